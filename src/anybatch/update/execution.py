"""One attempt at the update of a logical batch: its gradient, and what happens with it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from anybatch.gradient.overtime import OverTime
from anybatch.gradient.sums import Sums, values_of
from anybatch.gradient.weights import Weights, fetched
from anybatch.interception import gradients_aside
from anybatch.records.results import Attempt, StepResult
from anybatch.tensors.batches import Part
from anybatch.update.boundary import Applied, Boundary
from anybatch.update.passes import Progress, Task, result_of, run_pass
from anybatch.update.transaction import SizeLimit, Snapshot, run_with_retries

_NOTHING_TO_COUNT = "the count of the whole batch is 0"


class Outcome(NamedTuple):
    """What an attempt that went through gave, and the attempts within it that did not."""

    weights: Weights
    sums: Sums
    applied: Applied
    parts: list[Part]
    failed: tuple[Attempt, ...] = ()

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
    """

    def __init__(
        self,
        boundary: Boundary,
        parameters: Callable[[], Sequence[torch.Tensor]],
        levers: Callable[[], AbstractContextManager[object]],
        check_used: Callable[[Sums], None],
    ) -> None:
        self._boundary = boundary
        self._parameters = parameters
        self._levers = levers
        self._check_used = check_used
        self._was_used = False

    def attempt(self, task: Task, parts: list[Part], progress: Progress, before: Snapshot) -> Outcome:
        """Takes the gradient and steps.

        Args:
            task: the logical batch.
            parts: how it is split.
            progress: is told what is running.
            before: what is put back if the update is skipped.
        """
        weights, sums, skipped = self._gradient(task, parts, progress)
        before.look_at_weights()
        is_shared = task.settings.reducer.is_shared
        applied = Applied(skipped, None) if skipped else self._boundary.apply(progress, is_shared=is_shared)
        if applied.skipped:  # as if the batch had not been, but for the scale
            before.restore()
        return Outcome(weights, sums, applied, parts)

    def attempt_with_closure(
        self, task: Task, progress: Progress, limit: SizeLimit, snapshot: Callable[[], Snapshot]
    ) -> Outcome:
        """Lets the optimizer evaluate the gradient as often as it likes; retries are in the closure.

        Args:
            task: the logical batch.
            progress: is told what is running.
            limit: of the size of micro-batches.
            snapshot: takes one.
        """
        first: list[Outcome] = []
        start = getattr(task.loss_fn, "carried", None)

        def closure() -> float:
            if isinstance(task.loss_fn, OverTime):  # each evaluation is of this batch, after the one before it
                task.loss_fn.carried = start
            before = snapshot()

            def attempt(parts: list[Part]) -> Outcome:
                weights, sums, skipped = self._gradient(task, parts, progress)
                before.look_at_weights()
                grad_norm = None if skipped else self._boundary.prepare(progress)
                return Outcome(weights, sums, Applied(skipped, grad_norm), parts)

            def roll_back() -> None:
                self._boundary.zero_()
                before.restore()

            reducer = task.settings.reducer
            reducer.listen()
            outcome, failed = run_with_retries(
                attempt, task.splittable, limit, roll_back, progress, reducer, before.note_weights
            )
            if not first:
                first.append(outcome._replace(failed=failed))
            progress.text = "optimizer.step"
            return float(sum(values_of(outcome.sums).values()))

        self._boundary.apply_with_closure(closure, progress, skipped=lambda: first[0].applied.skipped)
        return first[0]

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
