"""A total with the number of items it is over."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that is not divided yet: the total over items and how many items there are.

    A loss function returns it instead of a scalar when only the forward knows the count, and metrics are joined over
    micro-batches by adding totals and counts.

    Args:
        total: the sum over the items, a number or a tensor without dimensions.
        count: how many items (or how much weight) the total is over, a number or a tensor without dimensions.

    Example:
        >>> half, rest = Mean(3.0, 2), Mean(9.0, 4)
        >>> (half + rest).value
        2.0
    """

    total: Any
    count: Any

    @property
    def value(self) -> float:
        """The mean; 0.0 over no items. Reading it waits for the device the tensors lie on."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0

    def __add__(self, other: "Mean") -> "Mean":
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.count + other.count)

    def to_dict(self) -> dict[str, float]:
        """The total, the count and the value as plain numbers."""
        return {"total": float(self.total), "count": float(self.count), "value": self.value}
