"""Which steps are sampled, and when that is made rarer because it costs too much."""

from dataclasses import dataclass

FIRST = 10
"""Steps from the beginning that are all sampled: causes show there."""
EVERY = 25
"""Steps between two samples after that."""
DEAREST = 0.01
"""The share of the run's time that the doctor may take; samples that would take more are left out."""
_MUCH = frozenset({0, 1, 5, 9})  # of the first steps
_RARELY = 4  # samples between two dear ones
_LEAST_SECONDS = 2.5  # that a run is taken to last


@dataclass(slots=True)
class Sampling:
    """Decides what is sampled.

    The first ten steps and the steps ``every``, twice, four times ``every`` and so on are always sampled; the others
    between them as long as all samples together stay within their share of the time.

    Example:
        >>> sampling = Sampling()
        >>> [step for step in range(80) if sampling.wants(step)]
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 25, 50, 75]
        >>> sampling.review(75, own=3.0, total=60.0)
        >>> [step for step in range(220) if sampling.wants(step)][10:]
        [25, 50, 100, 200]
    """

    every: int = EVERY  # steps between two samples
    thinned: int = 0  # how many samples were left out
    _own: float = 0.0
    _cost: float = 0.0
    _is_over: bool = False

    def wants(self, step: int) -> bool:
        """Whether a step is sampled."""
        if step < FIRST:
            return True
        return step % self.every == 0 and not (self._is_over and self._may_go(step))

    def wants_much(self, step: int) -> bool:
        """Whether more is looked at than gradients and weights, on a step that is sampled."""
        return step in _MUCH or step >= FIRST

    def wants_all(self, step: int) -> bool:
        """Whether what is dear on large models is taken as well."""
        return step in _MUCH or (step >= FIRST and step % (_RARELY * self.every) == 0)

    def review(self, step: int, *, own: float, total: float, sampled: bool = False) -> None:
        """Decides whether there is time for a sample, by the seconds of the doctor and of the whole run so far."""
        if sampled:
            self._cost = own - self._own
        self._own = own
        self._is_over = own + self._cost > DEAREST * max(total, _LEAST_SECONDS)
        if self._is_over and step >= FIRST and step % self.every == 0 and self._may_go(step):
            self.thinned += 1

    def _may_go(self, step: int) -> bool:
        times = step // self.every
        return bool(times & (times - 1))
