"""Splits against the whole batch: the comparison that every search for a cause makes again, with something changed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anybatch.batch.batches import Part
from anybatch.checking.causes import in_one_line, reason
from anybatch.checking.rig import Outcome, Rig, announced
from anybatch.loss.losses import LossFunction
from anybatch.memory.meter import OverBudget
from anybatch.records.certificates import Reason
from anybatch.update.transaction import is_out_of_memory

T = TypeVar("T")


@dataclass
class Comparison:
    """Splits against the whole."""

    whole: Outcome  # what the whole batch gave
    # the splits, each with what it gave or the error it failed with
    each: Sequence[tuple[Sequence[Part], Outcome | Exception]]

    def __post_init__(self) -> None:
        # the relative error of the gradient of the worst split
        self.error = max(one.error(self.whole) if isinstance(one, Outcome) else math.inf for _, one in self.each)

    def loss_error(self, *names: str) -> float:
        """The relative error of the value of some losses, of all without names, in the worst split."""
        each = (outcome for _, outcome in self.each)
        return max(one.value_error(self.whole, *names) if isinstance(one, Outcome) else math.inf for one in each)

    @property
    def failures(self) -> list[tuple[Sequence[Part], Exception]]:
        """The splits that failed, and the errors."""
        return [(parts, outcome) for parts, outcome in self.each if isinstance(outcome, Exception)]

    def wrong_losses(self, tolerance: float) -> list[str]:
        """The losses whose values differ; all if none does."""
        names = list(self.whole.losses)
        return [name for name in names if self.loss_error(name) > tolerance] or names


@dataclass
class Case:
    """What is compared with what, for everybody who looks for a cause."""

    rig: Rig  # opened
    whole: Outcome  # what the whole batch gave
    splits: list[list[Part]]  # that are compared with it
    tolerance: float  # up to which relative error gradients are the same
    notes: list[Reason] = field(default_factory=list)  # of what else there is to know

    def compared(
        self, *, whole: Outcome | None = None, splits: Sequence[Sequence[Part]] | None = None, **options: Any
    ) -> Comparison:
        """Runs splits, and compares them with the whole, or another one; the options are those of ``Rig.run``."""
        splits = self.splits if splits is None else splits
        return Comparison(whole or self.whole, [(parts, self.attempt(parts, **options)) for parts in splits])

    def is_exact(self, **options: Any) -> bool:
        """Whether splits give the whole's gradient, see ``compared``."""
        return self.compared(**options).error <= self.tolerance

    def attempt(self, parts: Sequence[Part] | None = None, **options: Any) -> Outcome | Exception:
        """Runs a split, or the whole batch at once; a failure where the whole batch ran is an answer too."""
        try:
            return self.rig.run(parts, **options)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, OverBudget):
                raise
            return error.with_traceback(None)

    def beginning(self, begin: Callable[[], None]) -> LossFunction:
        """The loss, of which each micro-batch begins with something."""
        return announced(self.rig.task.loss_fn, begin)

    def searched(self, what: str, search: Callable[[], T], otherwise: T) -> T:
        """Looks for one cause; a search that fails is noted, and the others go on."""
        try:
            return search()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.notes.append(
                reason("not examined", "check", {"error": type(error).__name__}, what=what, text=in_one_line(error))
            )
            return otherwise

    def forgive_cancellation(self, comparison: Comparison) -> None:
        """Relates the error to the gradients of the parts where these cancel to a gradient that is nearly nothing."""
        errors = []
        for parts, outcome in comparison.each:
            if not isinstance(outcome, Outcome):
                return
            norm = sum(part.norm for part in self.rig.parts(parts)) / len(parts)
            errors.append(outcome.error(comparison.whole, norm))
        if max(errors) <= self.tolerance:
            comparison.error = max(errors)
