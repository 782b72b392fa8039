"""A pass with a coupled loss that is traced: few of its micro-batches run, and its whole loss.

Of very many micro-batches those that are alike hold what the first of their kind holds. So its storages count as often
as there are such micro-batches, and the bytes for any number of them follow from one trace.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from anybatch.batch.batches import Part
from anybatch.batch.trees import map_leaves
from anybatch.loss.coupling import Coupled, CoupledPass
from anybatch.loss.outputs import Outputs
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.memory.meter import Allocation, Recording
from anybatch.planning.microbatches import tensors_in
from anybatch.planning.running import Uncounted
from anybatch.planning.subjects import Subject

FIRST, LOSS, BACKWARD, SECOND = (
    "first pass of the encoder", "coupled loss", "backward of the encoder", "second pass of the encoder",
)  # fmt: skip

_REAL = 3  # micro-batches of a kind that run: one for all that are alike, and the last ones, which may be smaller
_FEW = 24  # micro-batches of different sizes that all run


def which_run(sizes: Sequence[tuple[int, int]], kept: int) -> tuple[list[int], dict[int, int], tuple[int, int]]:
    """Chooses the micro-batches that run.

    Returns:
        The numbers of all, those that run twice before those that keep their graph, and each kind with the largest one
        first; for those that do not run the place among these of the one that they are alike; how many of each kind do
        not run.

    Example:
        >>> which_run([(8, 0)] * 6 + [(2, 0)], 5)
        ([0, 1, 2, 3, 4, 5, 6], {3: 2, 4: 2}, (0, 2))
    """
    runs_all = len(sizes) <= _FEW and len({*sizes}) > 2
    numbers: list[int] = []
    like: dict[int, int] = {}
    counts = []
    for kind in (range(len(sizes) - kept), range(len(sizes) - kept, len(sizes))):
        ordered = sorted(kind, key=lambda number: (-sizes[number][0] * max(1, sizes[number][1]), number))
        if len(ordered) > _REAL and not runs_all:
            start = len(numbers)
            like.update((start + 1 + index, start) for index in range(len(ordered) - _REAL))
        counts.append(max(0, len(ordered) - _REAL) if not runs_all else 0)
        numbers += kind if runs_all or len(ordered) <= _REAL else ordered
    return numbers, like, (counts[0], counts[1])


class ShortPass:
    """The micro-batches of a pass that is traced.

    Args:
        subject: what is planned, with a coupled loss.
        parts: all micro-batches, as ``which_run`` orders them.
        like: for those that do not run the one that they are alike, which has run before.
        keep: how many keep their graph.

    Attributes:
        running: those that run, by number.
        stays: whether they lie there throughout, in bytes of their own.
        stages: after how many operations each stage began, once it ran.
        repeated: for each kind the allocations that a micro-batch which does not run would hold, too.
    """

    def __init__(self, subject: Subject, parts: Sequence[Part], like: dict[int, int], keep: int) -> None:
        self._subject, self._parts, self._like = subject, parts, like
        self._kept_from = len(parts) - keep
        self._coupled = copy.copy(cast(Coupled, subject.loss_fn))
        self.running = {number: part for number, part in enumerate(parts) if number not in like}
        self._moves = subject.device_type != "cpu" and not subject.batch_is_there
        self.stays = subject.splittable.is_collated and not self._moves
        self.stages: list[tuple[int, str]] = []
        self.repeated: list[list[Allocation]] = []

    def whole(self) -> Any:
        """The batch that the loss looks at, if it does."""
        return self._subject.splittable.whole() if self._coupled.takes_batch else None

    def run(
        self, recording: Recording, parameters: Sequence[torch.Tensor], settings: Any, batches: dict[int, Any],
        whole: Any, outside: Any, begin: Callable[[], None], move: Callable[[Any], Any],
    ) -> Sums:  # fmt: skip
        """Runs it within a recording.

        Args:
            recording: writes down.
            parameters: fake ones or the real ones, without gradients.
            settings: of the run.
            batches: those that run.
            whole: what the loss looks at.
            outside: finds leaves besides the parameters.
            begin: is called before each micro-batch.
            move: brings a micro-batch to the device, where batches do not lie there.
        """
        subject, moved = self._subject, (move if self._moves else lambda batch: batch)
        splittable, ends = subject.splittable, [*itertools.accumulate(len(part.samples) for part in self._parts)]
        samples: list[Sequence[int]] = [
            range(end - len(part.samples), end) for end, part in zip(ends, self._parts, strict=True)
        ]
        if splittable.has_costs:  # which puts samples into another order
            samples = [part.samples for part in self._parts]
        noted = _Noted(
            subject.model, self._coupled, Weights([{"": ends[-1]}]), parameters, settings, samples=samples,
            outside=outside,
        ).note(recording, self._like)  # fmt: skip

        def coming() -> Iterator[Any]:
            for number in range(len(self._parts)):
                if number not in self._like:
                    begin()
                yield None if number in self._like else moved(batches[number])

        joins = len(splittable.batches) > 1 and not splittable.is_collated
        inputs = [recording.allocations_of(tensors_in(batches.get(n))) for n in (0, self._kept_from)]
        with recording:
            sums = noted.run(
                coming(), lambda number: moved(batches[number]), lambda: move(whole) if self._moves or joins else whole
            )
        self._note_stages(noted)
        self.repeated = [
            [*(own if self.stays else ()), *_held_by(recording, noted.first.get(number))]
            for number, own in zip((0, self._kept_from), inputs, strict=True)
        ]
        return sums

    def _note_stages(self, noted: "_Noted") -> None:
        second = [start for number, start in noted.back.items() if number < self._kept_from]
        back = [start for number, start in noted.back.items() if number >= self._kept_from]
        self.stages = [(0, FIRST), (noted.loss, LOSS)]
        self.stages += [(min(found), name) for found, name in ((back, BACKWARD), (second, SECOND)) if found]


def _held_by(recording: Recording, run: tuple[int, int] | None) -> list[Allocation]:
    """What a micro-batch made in its first run and left behind."""
    begin, end = run or (0, 0)
    return [one for one in recording.allocations if begin <= one.born < end and (one.died is None or one.died > end)]


def copied(batch: Any) -> Any:
    """A copy, as a device gets it, where there is none."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


class _Noted(CoupledPass):
    """A pass in which some micro-batches only stand there with the outputs of another one."""

    loss_pass = Uncounted

    def note(self, recording: Recording, like: dict[int, int]) -> "_Noted":
        """Begins to note after how many operations each first run begins and ends, the loss, and each backward."""
        self.recording, self.like = recording, like
        self.first: dict[int, tuple[int, int]] = {}
        self.back: dict[int, int] = {}
        self.loss = 0
        return self

    def _to_keep(self, number: int, given: list[Any], outputs: Outputs) -> Any:
        return self._noted(number, outputs, functools.partial(super()._to_keep, number, given, outputs))

    def _to_run_again(self, number: int, given: list[Any], again: Any, outputs: Outputs, comparison: Any) -> Any:
        run = functools.partial(super()._to_run_again, number, given, again, outputs, comparison)
        return self._noted(number, outputs, run)

    def _noted(self, number: int, outputs: Outputs, run: Callable[[], Any]) -> Any:
        if number in self.like:
            outputs.repeat(self.like[number], len(self._samples[number]))
            return [None] * len(outputs.labels)
        began = self.recording.now
        found = run()
        self.first[number] = began, self.recording.now
        return found

    def _loss_of(self, outputs: Outputs, whole: Callable[..., Any]) -> tuple[Sums, list[torch.Tensor | None]]:
        self.loss = self.recording.now
        return super()._loss_of(outputs, whole)

    def _back(self, number: int, graph: Any, gradients: Any) -> None:
        if number not in self.like:
            self.back[number] = self.recording.now
            super()._back(number, graph, gradients)
