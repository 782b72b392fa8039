"""Which steps are sampled, and when that is made rarer because it costs too much."""

from dataclasses import dataclass

FIRST = 10
"""Steps from the beginning that are all sampled: causes show there."""
EVERY = 25
"""Steps between two samples after that."""
RAREST = 800
"""Steps between two samples at most."""
DEAREST = 0.025
"""The share of the run's time that the doctor may take before samples are made rarer."""
_MUCH = frozenset({0, 1, 2, 5, 9})  # of the first steps
_RARELY = 4  # samples between two dear ones
_SETTLED = 2.0  # seconds of a run before which shares say little


@dataclass(slots=True)
class Sampling:
    """Decides what is sampled.

    Args:
        every: steps between two samples.

    Attributes:
        thinned: how often the samples were made rarer.

    Example:
        >>> sampling = Sampling()
        >>> [step for step in range(80) if sampling.wants(step)]
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 25, 50, 75]
        >>> sampling.review(own=3.0, total=60.0)
        >>> [step for step in range(120) if sampling.wants(step)][10:]
        [50, 100]
    """

    every: int = EVERY
    thinned: int = 0
    _own: float = 0.0
    _total: float = 0.0
    _has_sampled: bool = False

    def wants(self, step: int) -> bool:
        """Whether a step is sampled.

        Args:
            step: from 0.
        """
        return step < FIRST or step % self.every == 0

    def wants_much(self, step: int) -> bool:
        """Whether what is dear on large models is taken as well.

        Args:
            step: from 0.
        """
        return step in _MUCH or (step >= FIRST and step % (_RARELY * self.every) == 0)

    def review(self, *, own: float, total: float, sampled: bool = True) -> None:
        """Makes samples rarer when the doctor took too much since the last review.

        Args:
            own: seconds that the doctor has taken so far.
            total: seconds of the run so far, its own among them.
            sampled: whether the step before was sampled, after the first ones.
        """
        if not sampled and not self._has_sampled:
            self._own, self._total = own, total  # what events cost does not become less by rarer samples
            return
        self._has_sampled = True
        if total - self._total < _SETTLED:
            return
        share = (own - self._own) / (total - self._total)
        self._own, self._total, self._has_sampled = own, total, False
        if share > DEAREST and self.every < RAREST:
            self.every *= 2
            self.thinned += 1
