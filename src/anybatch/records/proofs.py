"""The result of the proof that runs before a step first splits a batch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from anybatch.records.reading import Plain, nothing


@dataclass(frozen=True, slots=True)
class Proof(Plain):
    """Whether some samples of a batch have the same gradient when they run whole and as two parts.

    Example:
        >>> print(Proof("exact", "comparison", 8, (3, 5), 1.1e-7, 7.6e-6, "float32", 0))
        8 samples whole and as 3 + 5: the same gradient, by comparison in float32 (error 1.1e-07, tolerance 7.6e-06)
    """

    _not_finite = nothing
    # ``"exact"``, ``"not exact"``, or ``"undecided"`` if they could not be compared
    outcome: Literal["exact", "not exact", "undecided"]
    # ``"comparison"`` of the gradients in the precision of the step; of the ``"losses"`` only, if the gradient of two
    # samples does not fit in memory; or a ``"certificate"`` in float64
    by: Literal["comparison", "losses", "certificate", ""] = ""
    samples: int = 0  # the number of samples that were run
    parts: tuple[int, ...] = ()  # the number of samples in each part
    error: float = math.nan  # the relative error of the gradient, ``||parts - whole|| / ||whole||``
    tolerance: float = 0.0  # the largest error at which the two count as equal
    dtype: str = ""  # the precision of the comparison, such as ``"float32"``
    update: int | None = None  # the number of updates applied before; ``None`` if they are not counted
    group: int = 1  # samples that stand together and have to stay so; 1 for none
    is_of_batch: bool = False  # whether which samples belong together lies in the values of a batch
    chunks: tuple[int, ...] = ()  # of time, the numbers of steps in two ways to cut it that were compared
    apart: float = 0.0  # the how far the parts' gradient is from the whole's that is 0 within rounding; else 0
    note: str = ""  # why it is undecided, or another remark

    @property
    def exact(self) -> bool:
        """Whether the accumulated gradient was found to equal the whole batch's."""
        return self.outcome == "exact"

    def holds_for(self, micro_batches: Iterable[Sequence[int]]) -> bool:
        """Whether it holds for another batch of the same layout, with the rows of its micro-batches given."""
        return not self.is_of_batch and all(
            list(rows) == list(range(rows[0], rows[-1] + 1)) and not rows[0] % self.group and not len(rows) % self.group
            for rows in micro_batches
        )

    def __str__(self) -> str:
        if self.outcome == "undecided":
            return f"not proved: {self.note}"
        what, by = ("loss", "comparison") if self.by == "losses" else ("gradient", self.by)
        is_same = self.exact and not self.error > self.tolerance  # two lengths of chunks may be two losses
        what = f"the same {what}" if is_same else f"not the same {what}"
        error = f"the whole's is 0, the parts' {self.apart:.2g}" if self.apart else f"error {self.error:.2g}"
        numbers = f"{error}, tolerance {self.tolerance:.2g}"
        note = f"; {self.note}" if self.note else ""
        ways = [f"whole and as {' + '.join(map(str, self.parts))}"] if len(self.parts) > 1 else []
        ways += ["in chunks of {} and of {} steps".format(*self.chunks)] if self.chunks else []
        return f"{self.samples} samples {', '.join(ways)}: {what}, by {by} in {self.dtype} ({numbers}){note}"
