"""Splits against the whole batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anybatch.batch.batches import Part
from anybatch.checking.causes import reason
from anybatch.checking.measuring import Outcome, Rig, distance
from anybatch.errors import CountError
from anybatch.records.certificates import Reason
from anybatch.update.transaction import is_out_of_memory

T = TypeVar("T")


class Comparison:
    """A split against the whole.

    Attributes:
        parts: the split.
        outcome: what it gave, or the error it failed with.
        difference: the norm of the difference of the gradients.
        error: the same over the norm of the whole batch's gradient.
        loss_errors: of each loss.
    """

    def __init__(self, whole: Outcome, parts: Sequence[Part], outcome: Outcome | Exception) -> None:
        self.parts, self.outcome = parts, outcome
        self.error = self.difference = math.inf
        self.loss_errors = dict.fromkeys(whole.losses, math.inf)
        if isinstance(outcome, Outcome):
            self.difference = distance(outcome.gradients, whole.gradients)
            self.error = relative(self.difference, whole.norm)
            self.loss_errors = {
                name: relative(abs(outcome.losses.get(name, 0.0) - value), abs(value))
                for name, value in whole.losses.items()
            }


class Comparisons:
    """All splits against the whole.

    Args:
        whole: what the whole batch gave.
        each: one a split.

    Attributes:
        error: the relative error of the gradient of the worst split.
    """

    def __init__(self, whole: Outcome, each: Sequence[Comparison]) -> None:
        self.whole, self.each = whole, each
        self.error = max(one.error for one in each)

    @property
    def loss_error(self) -> float:
        """The relative error of the value of the worst loss in the worst split."""
        return max((error for one in self.each for error in one.loss_errors.values()), default=0.0)

    @property
    def failures(self) -> list[tuple[Sequence[Part], Exception]]:
        """The splits that failed, and the errors."""
        return [(one.parts, one.outcome) for one in self.each if isinstance(one.outcome, Exception)]

    @property
    def breaks(self) -> bool:
        """Whether a split fails where the whole batch does not, other than by its counts."""
        return any(not isinstance(error, CountError) for _, error in self.failures)

    def wrong_losses(self, tolerance: float) -> list[str]:
        """The losses whose values differ; all if none does."""
        names = list(self.whole.losses)
        return [name for name in names if max(one.loss_errors[name] for one in self.each) > tolerance] or names


@dataclass
class Case:
    """What is compared with what, for everybody who looks for a cause.

    Args:
        rig: opened.
        whole: what the whole batch gave.
        splits: that are compared with it.
        tolerance: up to which relative error gradients are the same.
        notes: of what else there is to know.
    """

    rig: Rig
    whole: Outcome
    splits: list[list[Part]]
    tolerance: float
    notes: list[Reason] = field(default_factory=list)

    def compared(
        self, *, whole: Outcome | None = None, splits: Sequence[Sequence[Part]] | None = None, **options: Any
    ) -> Comparisons:
        """Runs splits.

        Args:
            whole: what they are compared with, if it is another.
            splits: others.
            **options: see ``Rig.run``.
        """
        other = self.whole if whole is None else whole
        splits = self.splits if splits is None else splits
        return Comparisons(other, [Comparison(other, parts, self.attempt(parts, **options)) for parts in splits])

    def is_exact(self, **options: Any) -> bool:
        """Whether splits give the whole's gradient, see ``compared``."""
        return self.compared(**options).error <= self.tolerance

    def attempt(self, parts: Sequence[Part] | None = None, **options: Any) -> Outcome | Exception:
        """Runs a split; a failure where the whole batch ran is an answer too.

        Args:
            parts: the split; ``None`` for the whole batch at once.
            **options: see ``Rig.run``.

        Returns:
            What it gave, or the error.
        """
        try:
            return self.rig.run(parts, **options)
        except BaseException as error:
            if not isinstance(error, Exception) or is_out_of_memory(error):
                raise
            return error.with_traceback(None)

    def error_of(self, gradients: Any, scale: float = 0.0) -> float:
        """How far a gradient is from the whole's, over the norm of that or a larger scale."""
        return relative(distance(gradients, self.whole.gradients), max(scale, self.whole.norm))

    def searched(self, what: str, search: Callable[[], T], otherwise: T) -> T:
        """Looks for one cause; a search that fails is noted, and the others go on.

        Args:
            what: is looked for.
            search: looks for it.
            otherwise: what is given if it fails.

        Returns:
            What was found.
        """
        try:
            return search()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            text = str(error).splitlines()[0] if str(error) else ""
            self.notes.append(reason("not examined", "check", {"error": type(error).__name__}, what=what, text=text))
            return otherwise

    def forgive_cancellation(self, comparisons: Comparisons) -> None:
        """Relates the error to the gradients of the parts where these cancel to a gradient that is nearly nothing.

        Args:
            comparisons: whose error is forgiven if it is then below the tolerance.
        """
        errors = []
        for one in comparisons.each:
            if isinstance(one.outcome, Exception):
                return
            batches = zip(one.parts, self.rig.parts_of(one.parts), strict=True)
            norm = sum(self.rig.part(batch, part.samples).norm for part, batch in batches) / len(one.parts)
            errors.append(relative(one.difference, max(norm, comparisons.whole.norm)))
        if max(errors) <= self.tolerance:
            comparisons.error = max(errors)


def relative(difference: float, scale: float) -> float:
    """A difference over a scale: 0 for no difference, infinite for what is not finite."""
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and math.isfinite(difference) else math.inf
