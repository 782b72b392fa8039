"""Whether what a loss over time gives is the same wherever time is cut.

A few sequences run in the chunks of the step and in others, of which none has a larger graph than a chunk of a whole
micro-batch: all steps at once, or several chunks in one. What differs counts where it does in float64, too.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from anybatch.batch.batches import Part
from anybatch.batch.trees import flat, map_leaves
from anybatch.checking.causes import reason, unexplained
from anybatch.checking.cuts import MOST, Cut, Cuts
from anybatch.checking.examination import opened
from anybatch.checking.proving import Split
from anybatch.checking.rig import Rig
from anybatch.checking.trial import Found, Trial
from anybatch.checking.wording import in_one_line, is_own
from anybatch.errors import AnyBatchError
from anybatch.loss.sequence import OverTime
from anybatch.memory.meter import OverBudget
from anybatch.records.certificates import Proof, Reason
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure, is_out_of_memory

_APART = 1e-6  # an error in float64 that is no rounding
_APART_IN_SINGLE = 1e-2  # where the model can't run in float64
_MOVED = 0.5  # by which a state is moved to see whether a chunk reads it
_SAME = 1e-9  # the error of what does not read it


class _Shown(NamedTuple):
    """What the same sequences show in two ways to cut time, in float64."""

    reason: Reason | None  # of a difference; ``None`` for none
    error: float
    tolerance: float
    stops: bool = False  # whether it is a mistake also where the author has given the chunks


def proof_of_chunks(trial: Trial, split: Split) -> Found:
    """What a few sequences show in the chunks of a step that cuts time, and in others."""
    task = split.task
    loss, (length, total) = cast(OverTime, task.loss_fn), cast(tuple[int, float], task.cut_of_time)
    cut, other = _other_way(task, length, total, split.parts)
    note = "one sequence does not fit in a longer chunk"
    if other != length:
        try:
            in_chunks = [loss.in_chunks(one) for one in (length, other)]
            difference = trial.of_losses_alike(cut, in_chunks, in_value=loss.mode == "truncated")
            proof = difference.proof("exact", "comparison", chunks=(length, other))
            if difference.is_none:
                return proof, None
            try:
                found = trial.isolated(cut, lambda own: _found(own, loss, length, other))
            except Exception as error:
                is_other = isinstance(error, (AnyBatchError, OverBudget)) or is_out_of_memory(error)
                if loss.mode == "exact" and is_own(error) and not is_other:
                    return replace(proof, outcome="not exact"), unexplained(difference.error, error)
                raise
            shown = found.reason
            if shown is None:
                return replace(proof, by="certificate", error=found.error, tolerance=found.tolerance), None
            is_chosen = loss.chunk is None or task.settings.chunk_length is not None
            if found.stops or (loss.mode == "exact" and is_chosen):
                return replace(proof, outcome="not exact"), shown
            note = f"in chunks of {length} steps, whose loss differs from that of chunks of {other}"
            return replace(proof, note=note), shown  # a warning: they may be part of the loss
        except AnyBatchError as error:
            note = str(error)
        except Exception as error:  # noqa: BLE001 - the loss may run chunks of some lengths only
            note = f"in chunks of {other} steps it fails ({in_one_line(error)})"
            Failure(error).release()
    return Proof("undecided", note=f"whether it matters where time is cut is not known: {note}"), None


def _other_way(task: Task, length: int, total: float, parts: Sequence[Part]) -> tuple[Cut, int]:
    """A few rows of the largest micro-batch, and the length of chunks that take no more than this has in one."""
    batch, own = max(Cuts(task.splittable, parts).own_rows(), key=lambda one: max(map(len, one[1]), default=0))
    rows = max(own, key=len)
    fit = int(len(rows) * length // total)  # sequences that fit with all steps at once
    few = min(MOST, fit or max(1, len(rows) // 2))
    other = int(total) if fit else len(rows) // few * length
    chosen = rows[:: len(rows) // few][:few]
    return Cut(task.splittable.chosen(chosen, batch), (few,)), other if other > length else max(1, length // 2)


def _found(task: Task, loss: OverTime, length: int, other: int) -> _Shown:
    """What makes a difference in float64."""
    with ExitStack() as stack:
        rig, _, refused = opened(replace(task, loss_fn=loss.in_chunks(length)), stack)
        rig.stand_ins.held.constant = True
        whole, ran = rig.run(), rig.run(loss_fn=loss.in_chunks(other))
        error, off = ran.error(whole), ran.value_error(whole)
        least = _APART_IN_SINGLE if refused else _APART
        worst = off if loss.mode == "truncated" else max(error, off)
        if worst <= least or not math.isfinite(worst):
            return _Shown(None, worst, least)
        evidence: dict[str, Any] = {"error": worst, "loss_error": off, "length": length, "other": other}
        if off <= least:
            is_exact = loss.mode == "exact"
            return _Shown(reason("time of the gradient", "chunk_loss", evidence), worst, least, stops=is_exact)
        if what := _of_state(rig, loss, length):
            evidence["what"] = what
            return _Shown(reason("time of the state", "chunk_loss", evidence), worst, least, stops=True)
        return _Shown(reason("time", "chunk_loss", evidence), worst, least)


def _of_state(rig: Rig, loss: OverTime, length: int) -> str:
    """How a state fails to tell a chunk of the one before; "" if it does, or has no numbers that could."""
    whole = rig.run(loss_fn=(plain := _Followed(loss, length)).loss)
    if not plain.has_numbers:
        return ""
    moved = rig.run(loss_fn=_Followed(loss, length, by=_MOVED).loss)
    if max(moved.error(whole), moved.value_error(whole)) <= _SAME:
        return "`chunk_loss` does not read the state it is given"
    # A state that stays may be what the sequences have in common, such as the output of an encoder or a temperature; no
    # such one is zeros, as a state is where the first chunk begins.
    stays = plain.is_zero and not plain.is_changed
    return "`chunk_loss` returns the state it was given" if stays else ""


class _Followed:
    """A loss over time whose states are looked at, and moved before a chunk has them.

    Attributes:
        loss: the loss.
        has_numbers: whether there are floating point numbers in a state.
        is_zero: whether each of its tensors has several numbers and all are 0, where a chunk begins.
        is_changed: whether a chunk returned another state than the one it had.
    """

    def __init__(self, loss: OverTime, length: int, by: float = 0.0) -> None:
        self.loss, self._chunk_loss, self._by = copy.copy(loss.in_chunks(length)), loss.chunk_loss, by
        self.loss.chunk_loss = self._call
        self.has_numbers = self.is_changed = False
        self.is_zero = True

    def _call(self, model: Any, chunk: Any, state: Any) -> Any:
        given = map_leaves(lambda leaf: _moved(leaf, self._by), state) if self._by else state
        returned = self._chunk_loss(model, chunk, given)
        before = [leaf for leaf in flat(given) if _is_numbers(leaf)]
        after = [leaf for leaf in flat(returned[1]) if _is_numbers(leaf)]
        self.has_numbers |= bool(before)
        self.is_zero &= all(leaf.numel() > 1 and not bool(leaf.any()) and leaf.grad_fn is None for leaf in before)
        self.is_changed |= len(before) != len(after) or not all(map(torch.equal, before, after))
        return returned


def _moved(leaf: Any, by: float) -> Any:
    """Numbers each of which is moved by another amount and all are turned: a softmax or a norm reads no common one."""
    if not _is_numbers(leaf):
        return leaf
    size = leaf.detach().abs().mean() + 1
    steps = torch.linspace(-1, 2, leaf.numel(), dtype=torch.float64, device="cpu").sin().reshape(leaf.shape)
    return (leaf if leaf.numel() < 2 else -leaf) + 2 * by * size * (steps + 0.7).to(leaf)


def _is_numbers(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0
