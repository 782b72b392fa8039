"""A mean kept as a total and a count."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean kept as a total over items and the number of items.

    A loss function returns it instead of a scalar if only the forward knows the count. Means of micro-batches are
    combined by adding totals and counts.

    Args:
        total: the sum over the items, a number or a scalar tensor.
        count: the number of items, or their total weight, a number or a scalar tensor.

    Example:
        >>> half, rest = Mean(3.0, 2), Mean(9.0, 4)
        >>> (half + rest).value
        2.0
    """

    total: Any
    count: Any

    @property
    def value(self) -> float:
        """The mean; 0.0 if the count is 0. Reading it synchronizes with the device of the tensors."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0

    def __add__(self, other: "Mean") -> "Mean":
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.count + other.count)

    def to_dict(self) -> dict[str, float]:
        """The total, the count and the value as plain numbers."""
        return {"total": float(self.total), "count": float(self.count), "value": self.value}
