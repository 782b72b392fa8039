"""Splits against the whole batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from anybatch.batch.batches import Part
from anybatch.checking.causes import reason
from anybatch.checking.measuring import Outcome, Rig, distance
from anybatch.checking.subjects import Subject
from anybatch.errors import CountError
from anybatch.records.certificates import Reason
from anybatch.update.transaction import is_out_of_memory

T = TypeVar("T")


class Comparison:
    """A split against the whole.

    Attributes:
        parts: the split.
        outcome: what it gave, ``None`` if it failed.
        failure: the error it failed with.
        difference: the norm of the difference of the gradients.
        error: the same over the norm of the whole batch's gradient.
        loss_errors: of each loss.
    """

    def __init__(self, whole: Outcome, parts: Sequence[Part], outcome: Outcome | Exception) -> None:
        self.parts = parts
        self.outcome = outcome if isinstance(outcome, Outcome) else None
        self.failure = outcome if isinstance(outcome, Exception) else None
        self.error = self.difference = math.inf
        self.loss_errors = dict.fromkeys(whole.losses, math.inf)
        if self.outcome is not None:
            self.difference = distance(self.outcome.gradients, whole.gradients)
            self.error = relative(self.difference, whole.norm)
            self.loss_errors = {
                name: relative(abs(self.outcome.losses.get(name, 0.0) - value), abs(value))
                for name, value in whole.losses.items()
            }


class Comparisons:
    """All splits against the whole.

    Args:
        rig: runs them.
        whole: what the whole batch gave.
        splits: the splits.
        subject: other than the rig's own.
        **options: see ``Rig.run``.

    Attributes:
        each: one a split.
        error: the relative error of the gradient of the worst split.
    """

    def __init__(
        self,
        rig: Rig,
        whole: Outcome,
        splits: Sequence[Sequence[Part]],
        *,
        subject: Subject | None = None,
        **options: Any,
    ) -> None:
        self.whole = whole
        self.each = [Comparison(whole, parts, attempt(rig, parts, subject=subject, **options)) for parts in splits]
        self.error = max(one.error for one in self.each)

    @property
    def loss_error(self) -> float:
        """The relative error of the value of the worst loss in the worst split."""
        return max((error for one in self.each for error in one.loss_errors.values()), default=0.0)

    @property
    def failures(self) -> list[tuple[Sequence[Part], Exception]]:
        """The splits that failed, and the errors."""
        return [(one.parts, one.failure) for one in self.each if one.failure is not None]

    @property
    def breaks(self) -> bool:
        """Whether a split fails where the whole batch does not, other than by its counts."""
        return any(not isinstance(error, CountError) for _, error in self.failures)

    def wrong_losses(self, tolerance: float) -> list[str]:
        """The losses whose values differ; all if none does."""
        names = list(self.whole.losses)
        return [name for name in names if max(one.loss_errors[name] for one in self.each) > tolerance] or names

    def forgive_cancellation(self, rig: Rig, tolerance: float) -> None:
        """Relates the error to the gradients of the parts where these cancel to a gradient that is nearly nothing.

        Args:
            rig: runs the parts alone.
            tolerance: below which the error is forgiven.
        """
        errors = []
        for one in self.each:
            if one.outcome is None:
                return
            batches = zip(one.parts, rig.parts_of(one.parts), strict=True)
            norm = sum(rig.part(batch, part.samples).norm for part, batch in batches) / len(one.parts)
            errors.append(relative(one.difference, max(norm, self.whole.norm)))
        if max(errors) <= tolerance:
            self.error = max(errors)


def searched(what: str, search: Callable[[], T], otherwise: T, notes: list[Reason]) -> T:
    """Looks for one cause; a search that fails is noted, and the others go on.

    Args:
        what: is looked for.
        search: looks for it.
        otherwise: what is given if it fails.
        notes: is added to if it fails.

    Returns:
        What was found.
    """
    try:
        return search()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        text = str(error).splitlines()[0] if str(error) else ""
        notes.append(reason("not examined", "check", {"error": type(error).__name__}, what=what, text=text))
        return otherwise


def attempt(rig: Rig, parts: Sequence[Part] | None = None, **options: Any) -> Outcome | Exception:
    """Runs a split; a failure where the whole batch ran is an answer too.

    Args:
        rig: runs it.
        parts: the split; ``None`` for the whole batch at once.
        **options: see ``Rig.run``.

    Returns:
        What it gave, or the error.
    """
    try:
        return rig.run(parts, **options)
    except BaseException as error:
        if not isinstance(error, Exception) or is_out_of_memory(error):
            raise
        return error.with_traceback(None)


def relative(difference: float, scale: float) -> float:
    """A difference over a scale: 0 for no difference, infinite for what is not finite."""
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and math.isfinite(difference) else math.inf
