"""One attempt at the update of a logical batch: its gradient, and what happens with it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from anybatch.gradient.sequence import OverTime
from anybatch.gradient.sums import Sums, total_of
from anybatch.gradient.weights import Weights, fetched
from anybatch.interception import gradients_aside
from anybatch.records.results import Attempt, StepResult
from anybatch.tensors.batches import Part
from anybatch.update.boundary import Applied, Boundary
from anybatch.update.closures import Again
from anybatch.update.passes import Progress, Task, result_of, run_pass
from anybatch.update.transaction import SizeLimit, Snapshot, run_with_retries

_NOTHING_TO_COUNT = "the count of the whole batch is 0"


class Outcome(NamedTuple):
    """What an attempt that went through gave, and the attempts within it that did not."""

    weights: Weights
    sums: Sums
    applied: Applied
    parts: list[Part]

    def result(self, failed: tuple[Attempt, ...], rows: int) -> StepResult:
        """The result with the whole trail of attempts.

        Args:
            failed: the attempts before this one.
            rows: samples of the logical batch.
        """
        skipped, grad_norm = self.applied
        last = Attempt(
            max((part.cost for part in self.parts), default=0),
            len(self.parts),
            0 if skipped else rows,
            "skipped" if skipped else "done",
        )
        return result_of(self.weights, self.sums, self.parts, (*failed, last), skipped=skipped, grad_norm=grad_norm)


class Execution:
    """Attempts at updates.

    Args:
        boundary: what happens once a logical batch.
        parameters: gives all that get a gradient.
        levers: gives the context in which the gradient is taken.
        check_used: is told what the first gradient gave; raises if the model was not used.
        limit: of the size of micro-batches.
        snapshot: takes one.
    """

    def __init__(
        self,
        boundary: Boundary,
        parameters: Callable[[], Sequence[torch.Tensor]],
        levers: Callable[[], AbstractContextManager[object]],
        check_used: Callable[[Sums], None],
        limit: SizeLimit,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._boundary = boundary
        self._parameters = parameters
        self._levers = levers
        self._check_used = check_used
        self._limit, self._snapshot = limit, snapshot
        self._was_used = False

    def attempt(self, task: Task, parts: list[Part], progress: Progress, before: Snapshot) -> Outcome:
        """Takes the gradient and steps.

        Args:
            task: the logical batch.
            parts: how it is split.
            progress: is told what is running.
            before: what is put back if the update is skipped.
        """
        start = getattr(task.loss_fn, "carried", None)
        weights, sums, skipped = self._gradient(task, parts, progress)
        before.look_at_weights()
        is_shared, again = task.settings.reducer.is_shared, self._again(task, sums, start)
        applied = Applied(skipped, None) if skipped else self._boundary.apply(progress, again, is_shared=is_shared)
        if applied.skipped:  # as if the batch had not been, but for the scale
            before.restore()
        return Outcome(weights, sums, applied, parts)

    def _again(self, task: Task, sums: Sums, start: Any) -> Again:
        """The gradient that is there, and how to take it again where an optimizer has moved the weights."""

        def evaluate() -> torch.Tensor:
            if isinstance(task.loss_fn, OverTime):  # each evaluation is of this batch, after the one before it
                task.loss_fn.carried = start
            task.settings.reducer.listen()
            scaler = task.settings.scaler
            if scaler is None or not scaler.is_enabled():
                return total_of(self._evaluated(task))
            return self._evaluated_in_scale(task, scaler.get_scale())

        return Again(self._parameters, lambda: total_of(sums), evaluate)

    def _evaluated_in_scale(self, task: Task, scale: float) -> torch.Tensor:
        """Takes the gradient at a scale at which it is finite, since this update can't be skipped any more."""
        while True:
            scaler = torch.amp.GradScaler(task.settings.device.type, init_scale=scale)
            sums = self._evaluated(replace(task, settings=replace(task.settings, scaler=scaler)), scaler)
            if scale <= 1 or not self._boundary.is_infinite(scaler):
                return total_of(sums)
            scale /= 16

    def _evaluated(self, task: Task, scaler: Any = None) -> Sums:
        before, progress, reducer = self._snapshot(), Progress(), task.settings.reducer

        def attempt(parts: list[Part]) -> Sums:
            _, sums, skipped = self._gradient(task, parts, progress)
            before.look_at_weights()
            if not skipped:
                self._boundary.prepare(progress, scaler)
            return sums

        def roll_back() -> None:
            self._boundary.zero_()
            before.restore()

        return run_with_retries(
            attempt, task.splittable, self._limit, roll_back, progress, reducer, before.note_weights
        )[0]

    def _gradient(self, task: Task, parts: list[Part], progress: Progress) -> tuple[Weights, Sums, str]:
        """Fills ``.grad``; gives the reason if there is nothing to update with."""
        self._boundary.zero_()
        with gradients_aside(), self._levers():
            weights, sums = run_pass(task, parts, self._parameters(), progress)
        task.settings.reducer.reduce_(sums, self._parameters())
        if weights.is_empty or _means_are_empty(sums):
            self._boundary.zero_()
            return weights, sums, _NOTHING_TO_COUNT
        if not self._was_used:
            self._check_used(sums)
            self._was_used = True
        return weights, sums, ""


def _means_are_empty(sums: Sums) -> bool:
    """Whether every loss was a ``Mean``, and all of them were over no items."""
    if sums.shared is not None:
        return sums.shared.is_over_nothing
    if not sums.counts or any(name not in sums.counts for name in sums.terms):
        return False
    return all(sum(fetched(counts)) == 0 for counts in sums.counts.values())
