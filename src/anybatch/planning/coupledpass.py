"""A pass with a coupled loss that is traced: few of its micro-batches run, and its whole loss.

Of very many micro-batches those that are alike hold what the first of their kind holds. So its storages count as often
as there are such micro-batches, and the bytes for any number of them follow from one trace.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from anybatch.batch.batches import Part
from anybatch.loss.coupling import Coupled, CoupledPass, Outputs
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.memory.meter import Allocation, Recording
from anybatch.planning.memorytrace import Given, PassTrace, Run
from anybatch.planning.microbatches import tensors_in
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import Uncounted
from anybatch.planning.subjects import Subject

FIRST, LOSS, BACKWARD, SECOND = (
    "first pass of the encoder", "coupled loss", "backward of the encoder", "second pass of the encoder",
)  # fmt: skip

_REAL = 2  # micro-batches of a kind that run: one for all that are alike, and the last one, which may be smaller
_FEW = 24  # micro-batches of different sizes that all run


def which_run(sizes: Sequence[tuple[int, int]], kept: int) -> tuple[list[int], dict[int, int], tuple[int, int]]:
    """Chooses the micro-batches that run.

    Returns:
        The numbers of all, those that run twice before those that keep their graph, and each kind with the largest one
        first; for those that do not run the place among these of the one that they are alike; how many of each kind do
        not run.

    Example:
        >>> which_run([(8, 0)] * 6 + [(2, 0)], 5)
        ([0, 1, 2, 3, 4, 5, 6], {3: 2, 4: 2, 5: 2}, (0, 3))
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


class PassRun(Run):
    """A pass that is traced: of micro-batches that are alike few run, see ``which_run``."""

    is_pass = True

    def __init__(
        self, subject: Subject, parts: Sequence[Part], recipe: Recipe, blocks: Sequence[str], split: bool,
        like: dict[int, int],
    ) -> None:  # fmt: skip
        super().__init__(subject, parts, recipe, blocks, split)
        self._all, self._like, self._kept_from = parts, like, len(parts) - (recipe.keep or 0)
        self._coupled = copy.copy(cast(Coupled, subject.loss_fn))
        self._parts = {number: part for number, part in enumerate(parts) if number not in like}
        self._count = len(self._parts)
        self._moves = subject.device_type != "cpu" and not subject.batch_is_there
        self.stays = subject.splittable.is_collated and not self._moves
        # The float32 buffers are a part of what is traced.
        self._settings = replace(self._settings, policy=subject.settings.policy)
        self._stages: tuple[tuple[int, str], ...] = ()
        self._held: list[set[Allocation]] = []

    def _whole(self) -> Any:
        return self._subject.splittable.whole() if self._coupled.takes_batch else None

    def _run(self, given: Given, begin: Callable[[], None]) -> Sums:
        subject, moved = self._subject, (given.move if self._moves else lambda batch: batch)
        splittable, ends = subject.splittable, [*itertools.accumulate(len(part.samples) for part in self._all)]
        samples: list[Sequence[int]] = [
            range(end - len(part.samples), end) for end, part in zip(ends, self._all, strict=True)
        ]
        if splittable.has_costs:  # which puts samples into another order
            samples = [part.samples for part in self._all]
        noted = _Noted(
            subject.model, self._coupled, Weights([{"": ends[-1]}]), given.parameters, given.settings, samples=samples,
            outside=given.outside,
        ).note(given.recording, self._like)  # fmt: skip

        def coming() -> Iterator[Any]:
            for number in range(len(self._all)):
                if number not in self._like:
                    begin()
                yield None if number in self._like else moved(given.batches[number])

        joins = len(splittable.batches) > 1 and not splittable.is_collated
        whole = given.move if self._moves or joins else lambda batch: batch
        firsts = [given.batches.get(number) if self.stays else None for number in (0, self._kept_from)]
        inputs = [given.recording.allocations_of(tensors_in(one)) for one in firsts]
        with given.recording:
            sums = noted.run(coming(), lambda number: moved(given.batches[number]), lambda: whole(given.whole))
        second = [start for number, start in noted.back.items() if number < self._kept_from]
        back = [start for number, start in noted.back.items() if number >= self._kept_from]
        begun = [(min(found), name) for found, name in ((back, BACKWARD), (second, SECOND)) if found]
        self._stages = ((0, FIRST), (noted.loss, LOSS), *begun)
        runs = [noted.first.get(number) for number in (0, self._kept_from)]
        self._held = [{*own, *_held_by(given.recording, run)} for own, run in zip(inputs, runs, strict=True)]
        return sums

    def _note(self, trace: PassTrace, given: Given) -> None:
        numbers = given.recording.numbers
        trace.stages = self._stages
        trace.repeated = tuple(tuple(numbers[id(one)] for one in held) for held in self._held)


def _held_by(recording: Recording, run: tuple[int, int] | None) -> list[Allocation]:
    """What a micro-batch made in its first run and left behind."""
    begin, end = run or (0, 0)
    return [one for one in recording.allocations if begin <= one.born < end and (one.died is None or one.died > end)]


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

    def _to_run_again(self, number: int, given: list[Any], again: Any, outputs: Outputs) -> Any:
        return self._noted(number, outputs, functools.partial(super()._to_run_again, number, given, again, outputs))

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
