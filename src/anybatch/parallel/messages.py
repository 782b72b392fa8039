"""Rounds of messages between all processes of a group, also when one of them has failed."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from anybatch.errors import AnyBatchError, DoesNotFit, NotSplittable
from anybatch.loss.reducing import Shortage, ShortageElsewhere

# One round takes one collective as long as every message fits; a longer one takes a second.
BYTES_AT_ONCE = 1024
_HEADER = 8
_TEXT = 2000
_NAMES = 20


class RankError(AnyBatchError, RuntimeError):
    """A step was aborted on all processes, because of an error on another one."""


class Messages:
    """Rounds of messages in a process group.

    A rank that fails reports it in its next round, so that no rank waits for it: every round
    is the same collective, whatever stage of the step its sender has reached.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        on_host = any(name in str(dist.get_backend(group)) for name in ("gloo", "mpi"))
        self.device = torch.device("cpu") if on_host else device
        self.is_open = False
        self.verb = ""
        self.units_differ = False  # whether ranks were ever about to run other parts of a model that lies in parts

    def round(self, stage: int, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends this rank's values at a stage, and receives those of all ranks.

        Raises:
            ShortageElsewhere: memory ran out on another rank.
            RankError: another rank failed, does something else, or is gone.
        """
        message = {"kind": "fine", "verb": self.verb, "stage": stage, **payload}
        while True:
            heard = self._gather(message)
            self._judge(heard)
            if min(one["stage"] for one in heard) == stage:
                return [one for one in heard if one["stage"] == stage]

    def tell_shortage(self, tried: float, *, is_final: bool, where: str, text: str) -> Shortage:
        """Reports to all ranks that memory ran out here; a ``RankError`` if another rank failed in another way."""
        mine = {"tried": tried, "is_final": is_final, "where": where, "text": text[:_TEXT]}
        heard = self._gather({"kind": "out of memory", "verb": self.verb, "stage": -1, **mine})
        try:
            self._judge(heard)
        except ShortageElsewhere as found:
            return found.shortage
        raise AssertionError("unreachable")

    def tell_failure(self, error: BaseException, where: str) -> None:
        """Reports to all ranks that this rank fails."""
        self.is_open = False
        message: dict[str, Any] = {"kind": "failed", "verb": self.verb, "stage": -1, "where": where}
        text = str(error)
        if isinstance(error, DoesNotFit):
            facts = {"needed": error.needed, "budget": error.budget, "modules": list(error.modules)[:_NAMES]}
            message["does_not_fit"] = facts
        elif isinstance(error, NotSplittable):
            message["not_splittable"] = list(error.modules)[:_NAMES]
        else:
            text = f"{type(error).__name__}: {error}"
        self._gather({**message, "text": text[:_TEXT]})

    def _judge(self, heard: list[dict[str, Any]]) -> None:
        failed = [(rank, one) for rank, one in enumerate(heard) if one["kind"] == "failed"]
        if failed:
            rank, one = failed[0]
            if all("does_not_fit" in one for _, one in failed):
                self.is_open = False
                raise DoesNotFit(f"rank {rank}: {one['text']}", **one["does_not_fit"])
            if all("not_splittable" in one for _, one in failed):
                self.is_open = False
                raise NotSplittable(f"rank {rank}: {one['text']}", modules=one["not_splittable"])
            raise self._given_up(
                f"rank {rank} failed in {one['where'] or one['verb']}: {one['text']}. This rank, {self.rank}, "
                "abandoned the step too, and changed nothing. Fix what failed there"
            )
        verbs = [one["verb"] for one in heard]
        if len(set(verbs)) > 1:
            rank = next(rank for rank, verb in enumerate(verbs) if verb != verbs[0])
            raise self._given_up(
                f"rank 0 runs {verbs[0]}, rank {rank} runs {verbs[rank]}; expected all ranks to call the same, "
                "ranks without samples with an empty batch"
            )
        short = [(rank, one) for rank, one in enumerate(heard) if one["kind"] == "out of memory"]
        if short:
            worst = next(
                (pair for pair in short if pair[1]["is_final"]), min(short, key=lambda p: float(p[1]["tried"]))
            )
            rank, one = worst
            self.is_open = self.is_open and not one["is_final"]
            where = f"{one['where']} on rank {rank}"
            raise ShortageElsewhere(Shortage(one["tried"], one["is_final"], where, one["text"]))
        deeds = [one.get("does") for one in heard]
        other = next((rank for rank, deed in enumerate(deeds) if deed != deeds[0]), None)
        if other is not None:
            self.units_differ = True
            where = f"rank 0 ({_worded(deeds[0])}) and rank {other} ({_worded(deeds[other])})"
            raise ShortageElsewhere(Shortage(0, False, where, "", is_memory=False))

    def _given_up(self, text: str) -> RankError:
        self.is_open = False
        return RankError(text)

    def _gather(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One collective; a second one if a message is longer than its buffer."""
        data = json.dumps(message).encode()
        room = BYTES_AT_ONCE - _HEADER
        first = self._all_gather(len(data).to_bytes(_HEADER, "big") + data[:room], BYTES_AT_ONCE)
        lengths = [int.from_bytes(one[:_HEADER], "big") for one in first]
        longest = max(lengths)
        rests = self._all_gather(data[room:], longest - room) if longest > room else [b""] * self.size
        texts = [(a[_HEADER:] + b)[:n] for a, b, n in zip(first, rests, lengths, strict=True)]
        return [json.loads(text) for text in texts]

    def _all_gather(self, data: bytes, length: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self.gather_tensors(found, mine)
        return [bytes(one.tolist()) for one in found]

    def gather_tensors(self, found: list[torch.Tensor], mine: torch.Tensor) -> None:
        """One collective, after a round in which all said that they come to it."""
        try:
            dist.all_gather(found, mine, group=self.group)
        except RuntimeError as error:
            raise self.lost(error) from error

    def gather_objects(self, mine: Any) -> list[Any]:
        """The same for anything that can be pickled, in two collectives."""
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, mine, group=self.group)
        except RuntimeError as error:
            raise self.lost(error) from error
        return found

    def lost(self, error: BaseException) -> RankError:
        """The error for a rank that does not answer."""
        return self._given_up(
            f"rank {self.rank} could not reach the others in {self.verb}: {error}. A rank has died, or did not "
            "respond within the timeout of the process group; look at its output, and restart all ranks"
        )


def as_text(flags: Iterable[bool]) -> str:
    """Flags as a text, four in a letter; the first bit keeps the zeros behind it.

    Example:
        >>> as_text([False, True]), as_flags(as_text([False, True]))
        ('5', [False, True])
    """
    return f"{int('1' + ''.join('01'[flag] for flag in flags), 2):x}"


def as_flags(text: str) -> list[bool]:
    """Reads what ``as_text`` gave."""
    return [bit == "1" for bit in f"{int(text, 16):b}"[1:]]


def _worded(deed: list[Any] | None) -> str:
    return "no unit" if deed is None else f"the {deed[0]} of unit {', '.join(map(str, deed[1:])) or 'none'}"
