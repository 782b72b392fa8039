"""Which batch and which learning rate pay, as a run has told."""

from dataclasses import dataclass

from anybatch.records.showing import Shown


@dataclass(frozen=True, slots=True)
class BatchAdvice(Shown):
    """The batch that pays, and the learning rate that goes with it; its text is one sentence.

    Example:
        >>> print(BatchAdvice(8, "as it is", 24, "samples", 0.1, 0.1, "", "", 8, 7.0, 4.0, 9.0))
        Your batch of 8 fits as it is, a batch of about 8 pays (noise scale 7, 4 to 9), and needs no other rate.
    """

    batch: int  # samples in the batch of the run
    way: str  # how it is run, such as ``"as it is"``
    steps: int  # that were looked at
    unit: str  # of the numbers below, such as ``"samples"``
    rate: float  # the learning rate of the run
    new_rate: float  # the one that goes with the batch that pays
    rule: str  # by which it follows
    advice: str = ""  # what the noise scale says by itself
    pays: int | None = None  # the batch that pays, ``None`` where it is not known yet
    noise: float | None = None  # the noise scale, ``None`` where ``pays`` is
    low: float = 0.0  # the lower end of its interval
    high: float | None = None  # the upper end, ``None`` where there is none
    # factors of the learning rate, and how far the loss fell with each; ``None`` where it did not stay finite
    rated: tuple[tuple[float, float | None], ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Batches on both sides of the one that pays, and that of the run; none where nothing is known."""
        if self.pays is None:
            return []
        return sorted({max(1, round(self.pays * 2.0**power)) for power in range(-4, 5)} | {self.batch})

    def cost(self, size: float) -> tuple[float, float]:
        """How many times the fewest updates, and how many times the fewest samples, a batch needs to the same loss.

        After McCandlish et al. 2018.
        """
        noise = self.noise or 0.0
        return 1 + noise / size, 1 + size / noise if noise else 1.0

    def __str__(self) -> str:
        fits = f"Your batch of {self.batch} fits {self.way}"
        if self.pays is None or self.noise is None:
            return f"{fits}; which batch pays is not known after {self.steps} steps: {self.advice}."
        if self.high is None:
            about = f"at least {_shown(self.low)}" if self.low else "unsure, measure longer"
        else:
            about = f"{_shown(self.low)} to {_shown(self.high)}"
        pays = f"{fits}, a batch of about {self.pays} pays (noise scale {_shown(self.noise)}, {about})"
        if self.pays == self.batch:
            return f"{pays}, and needs no other rate."
        return f"{pays}, and its learning rate is {self.new_rate:.3g} instead of {self.rate:g} (rule {self.rule})."


def _shown(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{float(f'{number:.2g}'):.0f}"
