"""The result of the proof that runs before a step first splits a batch."""

import math
from dataclasses import dataclass
from typing import Literal

from anybatch.records.plainvalues import Plain, nothing


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
    note: str = ""  # why it is undecided, or another remark

    @property
    def exact(self) -> bool:
        """Whether the accumulated gradient was found to equal the whole batch's."""
        return self.outcome == "exact"

    def __str__(self) -> str:
        if self.outcome == "undecided":
            return f"not proved: {self.note}"
        what, by = ("loss", "comparison") if self.by == "losses" else ("gradient", self.by)
        what = f"the same {what}" if self.exact else f"not the same {what}"
        numbers = f"error {self.error:.2g}, tolerance {self.tolerance:.2g}"
        note = f"; {self.note}" if self.note else ""
        shown = " + ".join(map(str, self.parts))
        return f"{self.samples} samples whole and as {shown}: {what}, by {by} in {self.dtype} ({numbers}){note}"
