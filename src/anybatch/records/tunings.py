"""A recommended batch size and learning rate, from the measurements of a run."""

from dataclasses import dataclass

from anybatch.records.showing import Shown


@dataclass(frozen=True, slots=True)
class BatchAdvice(Shown):
    """The batch size that pays off, and the learning rate for it; ``str`` gives one sentence.

    Example:
        >>> print(BatchAdvice(8, "as it is", 24, "samples", 0.1, 0.1, "", "", 8, 7.0, 4.0, 9.0))
        Your batch of 8 fits as it is; a batch of about 8 pays off (noise scale 7, 4 to 9), at the same learning rate.
    """

    batch: int  # the samples in the batch of the run
    way: str  # how it is run, such as ``"as it is"`` or ``"in 3 micro-batches of 22"``
    steps: int  # the number of steps measured
    unit: str  # the unit of the noise scale and of batch sizes, such as ``"samples"``
    rate: float  # the learning rate of the run
    new_rate: float  # the learning rate for the batch size that pays off
    rule: str  # the scaling rule that gives ``new_rate``
    advice: str = ""  # ``NoiseScale.advice``
    pays: int | None = None  # the batch size that pays off; ``None`` if not known yet
    noise: float | None = None  # the noise scale; ``None`` if ``pays`` is ``None``
    low: float = 0.0  # the lower end of its confidence interval
    high: float | None = None  # the upper end; ``None`` if unbounded
    # pairs of a factor of the learning rate and the fall of the loss with it; ``None`` if the loss did not stay finite
    rated: tuple[tuple[float, float | None], ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Batch sizes from 1/16 to 16 times the one that pays off, and that of the run; empty if none is known."""
        if self.pays is None:
            return []
        return sorted({max(1, round(self.pays * 2.0**power)) for power in range(-4, 5)} | {self.batch})

    def cost(self, size: float) -> tuple[float, float]:
        """The cost of a batch size: updates and samples to the same loss, each relative to its minimum.

        With noise scale ``B``, they are ``1 + B / size`` and ``1 + size / B`` (McCandlish et al. 2018, "An Empirical
        Model of Large-Batch Training").
        """
        noise = self.noise or 0.0
        return 1 + noise / size, 1 + size / noise if noise else 1.0

    def __str__(self) -> str:
        fits = f"Your batch of {self.batch} fits {self.way}"
        if self.pays is None or self.noise is None:
            return f"{fits}; which batch size pays off is not known after {self.steps} steps: {self.advice}."
        if self.high is None:
            about = f"at least {_shown(self.low)}" if self.low else "unsure, measure longer"
        else:
            about = f"{_shown(self.low)} to {_shown(self.high)}"
        pays = f"{fits}; a batch of about {self.pays} pays off (noise scale {_shown(self.noise)}, {about})"
        if self.pays == self.batch:
            return f"{pays}, at the same learning rate."
        return f"{pays}, at a learning rate of {self.new_rate:.3g} instead of {self.rate:g} (rule {self.rule})."


def _shown(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{float(f'{number:.2g}'):.0f}"
