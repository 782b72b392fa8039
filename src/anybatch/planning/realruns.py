"""What may run for real while a plan is made, from what real runs of fewer samples took."""

from collections.abc import Iterable

from anybatch.planning.curve import Fit, NotAligned, Size
from anybatch.planning.subjects import Subject
from anybatch.planning.tracing import PassTrace
from anybatch.tensors.meter import OverBudget


class TooLarge(OverBudget):
    """A micro-batch might not fit if it ran for real.

    Args:
        size: of the micro-batch.
        needed: bytes that it takes at least, as far as that is known.
    """

    def __init__(self, size: Size, needed: int = 0) -> None:
        super().__init__(needed)
        self.size = size

    def __str__(self) -> str:
        return f"a micro-batch of {self.size} might not fit if it ran for real"


class NothingRuns(OverBudget):
    """Not even the smallest way to run the step does so for real within the budget; it was stopped."""


class TooFew(NotAligned):
    """Not enough sizes may run for real to extrapolate from them."""


class RealRuns:
    """The peaks of real runs.

    Args:
        subject: what is planned.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._peaks: dict[Size, tuple[int, int]] = {}  # and what was fixed in them

    def __bool__(self) -> bool:
        return bool(self._peaks)

    def may_run(self, size: Size, budget: int) -> bool:
        """Whether a micro-batch fits for sure.

        Live bytes are at most proportional to the samples, on top of what is there anyway, and not more where all are
        shorter.

        Args:
            size: of the micro-batch.
            budget: bytes.
        """
        longer = [one for one in self._peaks if one.length >= size.length]
        if not longer:
            return False
        known = min(longer, key=lambda one: (one.samples < size.samples, abs(one.samples - size.samples), one.length))
        peak, fixed = self._peaks[known]
        bound = fixed + (peak - fixed) * max(1.0, size.samples / known.samples)
        return bound + self._subject.batch_bytes + self._subject.state_bytes <= budget

    def note(self, size: Size, trace: PassTrace, trained: Iterable[int]) -> None:
        """Notes what ran.

        Args:
            size: of the micro-batch.
            trace: of it.
            trained: the positions of the parameters that a step may give a gradient.
        """
        peak = max(Fit([(size, trace)]).live(size), default=0)
        fixed = sum(one.size for one in trace.allocations if one.born < 0)
        # The gradients that were put there for it lie there also where it did not reach the parameter.
        idle = self._subject.gradient_bytes({*trained} - {*trace.trained})
        self._peaks[size] = max(self._peaks.get(size, (0, 0)), (peak + idle, fixed + idle))
