"""Compares the loss of the whole first batch with its micro-batches', by what the model gave in these.

A few samples do not show a loss that takes the 64 hardest, or divides by what one micro-batch lacks. All of them do,
and the model need not run for it: what it gave in each micro-batch of the first split is kept, and stands in for it.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from types import GeneratorType
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.batch.layout import lay_out
from anybatch.batch.trees import flat, like, map_leaves
from anybatch.checking.beginnings import in_place_of
from anybatch.checking.causes import reason as worded
from anybatch.checking.cuts import Cut
from anybatch.checking.trial import Optimizations, Trial, surroundings
from anybatch.loss.losses import as_coupled
from anybatch.loss.pieces import InPieces
from anybatch.memory.meter import Recording
from anybatch.records.certificates import Reason
from anybatch.records.proofs import Proof
from anybatch.tensors.modules import is_scripted
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure

_MOST_BYTES = 64 << 20  # of what a model gives for all samples
_LOSS_BYTES = 8  # times as many may be alive in the loss of these
_IN_DOUBT = 0.1  # the error up to which low precision may be all there is to it


class Replay:
    """What a model gives in the micro-batches of a step, to see the loss of all of them at once.

    Args:
        proof: what was found of some samples.
    """

    def __init__(
        self, task: Task, parts: Sequence[Part], parameters: Sequence[torch.Tensor], optimizations: Optimizations,
        proof: Proof,
    ) -> None:  # fmt: skip
        self._task, self._parts, self._parameters = task, parts, parameters
        self._optimizations, self._proof = optimizations, proof
        self._given: list[list[Any]] = []  # by micro-batch and call
        self._bytes = 0

    @staticmethod
    def can_be(task: Task, parts: Sequence[Part], proof: Proof) -> bool:
        """Whether the loss of all samples may be seen so, and was not in the proof."""
        splittable, model, loss_fn = task.splittable, task.model, task.loss_fn
        is_plain = isinstance(model, torch.nn.Module) and type(model).__call__ is torch.nn.Module.__call__
        is_plain = is_plain and not any(map(is_scripted, task.every_module)) and task.devices is None
        is_whole = len(splittable.layouts) == 1 and splittable.obstacle is None
        is_of_pieces = isinstance(loss_fn, InPieces) or as_coupled(loss_fn) is not None
        is_alone = not task.is_planned and not task.settings.reducer.is_shared
        return (
            is_plain and is_whole and is_alone and not is_of_pieces and len(parts) > 1 and proof.outcome != "not exact"
        )

    @property
    def task(self) -> Task:
        """The same step, in which what the model gives is kept."""
        user = self._task.loss_fn

        def evaluate(model: Any, batch: Any) -> Any:
            self._given.append([])
            with self._kept(model, self._given[-1]):
                result = user(model, batch)
            return self._yielded(result, model) if isinstance(result, GeneratorType) else result

        return replace(self._task, loss_fn=in_place_of(user, evaluate))

    def _yielded(self, losses: Generator[Any, None, Any], model: Any) -> Generator[Any, None, Any]:
        with self._kept(model, self._given[-1]):
            return (yield from losses)

    @contextlib.contextmanager
    def _kept(self, model: Any, given: list[Any]) -> Iterator[None]:
        handle = model.register_forward_hook(lambda _module, _args, output: self._keep(given, output))
        try:
            yield
        finally:
            handle.remove()

    def _keep(self, given: list[Any], output: Any) -> None:
        tensors = [one for one in flat(output) if isinstance(one, torch.Tensor)]
        self._bytes += sum(one.nbytes for one in tensors)
        if self._bytes > _MOST_BYTES:
            self._given.clear()
        else:
            given.append(like(output, [_Kept.of(one) for one in flat(output)]))

    def found(self) -> tuple[Proof, Reason] | None:
        """What the loss of all samples shows, once all micro-batches have run; ``None`` if nothing."""
        failure = None
        try:
            outputs = self._joined()
            return self._compared(outputs) if outputs else None
        except Exception as error:  # noqa: BLE001 - what was given may be of no sample, or the loss may use more of a model
            failure = Failure(error)
        failure.release()
        return None

    def _joined(self) -> list[Any]:
        """What the model gave in each call, of all samples, as leaves of a graph; empty where that is not known."""
        sizes = [len(part.samples) for part in self._parts]
        if len(self._given) != len(sizes) or len({len(given) for given in self._given}) != 1:
            return []
        joined = []
        for outputs in zip(*self._given, strict=True):
            leaves = [flat(output) for output in outputs]
            joined.append(like(outputs[0], [_whole(list(own), sizes) for own in zip(*leaves, strict=True)]))
        self._given.clear()
        return joined

    def _compared(self, outputs: list[Any]) -> tuple[Proof, Reason] | None:
        task, rows = self._task, self._task.splittable.rows
        cut, player = Cut(task.splittable, tuple(len(part.samples) for part in self._parts)), _Player(outputs, task)
        limit = _LOSS_BYTES * self._bytes + _MOST_BYTES
        with surroundings(), player.playing(), Recording(limit=limit):
            trial = Trial(replace(task, loss_fn=player.loss_fn), self._parameters, self._optimizations)
            difference = trial.difference(cut, in_single=False)
        if difference.is_none or difference.draws or (not difference.is_single and difference.error < _IN_DOUBT):
            return None
        told = worded("whole batch", "loss", {"error": difference.error}, rows=rows)
        dtype = str(difference.dtype).removeprefix("torch.")
        found = Proof("not exact", "losses", rows, cut.sizes, difference.error, difference.tolerance, dtype)
        return replace(found, update=self._proof.update), told


class _Kept:
    """A leaf of an output, which must not be written to before it is used."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self._version = value.detach(), value._version

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value) if isinstance(value, torch.Tensor) else value

    def read(self, rows: int) -> torch.Tensor:
        if self.value._version != self._version or self.value.dim() == 0 or len(self.value) != rows:
            raise ValueError("it was written to, or is not of the samples")
        return self.value


def _whole(own: list[Any], sizes: list[int]) -> Any:
    if isinstance(own[0], _Kept):
        joined = torch.cat([one.read(rows) for one, rows in zip(own, sizes, strict=True)])
        return joined.requires_grad_(joined.is_floating_point() or joined.is_complex())
    if any(one is not own[0] and one != own[0] for one in own):
        raise ValueError("what the model gives beside tensors differs")
    return own[0]


class _Player:
    """Gives what a model gave: of all samples, or of one micro-batch after the other.

    Args:
        outputs: of each call of the model, of all samples.
    """

    def __init__(self, outputs: list[Any], task: Task) -> None:
        def evaluate(model: Any, batch: Any) -> Any:
            return self._evaluate(model, batch)

        self.loss_fn = in_place_of(task.loss_fn, evaluate)
        self._outputs, self._task = outputs, task
        self._rows, self._calls, self._end = slice(0, 0), 0, 0

    def _evaluate(self, model: Any, batch: Any) -> Any:
        splittable = self._task.splittable
        rows = lay_out(batch, splittable.broadcast).rows
        start = self._end % splittable.rows
        self._rows, self._calls, self._end = slice(start, start + rows), 0, start + rows
        return self._task.loss_fn(model, batch)

    def _play(self, *_: Any, **__: Any) -> Any:
        output = self._outputs[self._calls]
        self._calls += 1
        return map_leaves(lambda leaf: leaf[self._rows] if isinstance(leaf, torch.Tensor) else leaf, output)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Lets a call of the model give its outputs, without running it."""
        own = vars(self._task.model)
        before = own.get("forward")
        own["forward"] = self._play
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before
