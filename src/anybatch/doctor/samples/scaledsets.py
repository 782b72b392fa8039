"""What the columns of a data set tell of themselves: that it was scaled by itself, and that numbers are too large.

Only a set scaled by itself has columns with mean 0 and standard deviation 1; with the statistics of another set of n
rows it is about 1/sqrt(n) away from them. Of numbers too large for float32, as of time stamps, neighbours become one.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset

from anybatch.tensors.dispatch import unseen

_MOST_NUMBERS = 1 << 22
_LEAST = 20  # rows
_MEAN, _STD = 2e-5, 1e-4  # by which a column may be away


def data_of(dataset: Any) -> torch.Tensor | None:
    """The inputs that a data set of plain rows holds; ``None`` where they are not found."""
    held = vars(dataset) if hasattr(dataset, "__dict__") else {}
    values = held["tensors"] if isinstance(held.get("tensors"), tuple) else held.values()
    found = [one for one in values if type(one) is torch.Tensor and one.dim() in (2, 4) and one.is_floating_point()]
    try:
        return found[0] if found and len(found[0]) == len(dataset) else None
    except TypeError:  # of a stream
        return None


@unseen
def standardised(data: torch.Tensor | None) -> tuple[int, int, float]:
    """How many columns, or channels, are standardised, how many there are, and a number that tells sets apart.

    The answer is 0 of 0 for what can't be looked at on the host.
    """
    if (
        data is None
        or not data.is_cpu
        or data.layout is not torch.strided
        or len(data) < _LEAST
        or data.numel() > _MOST_NUMBERS
    ):
        return 0, 0, 0.0
    dims = (0,) if data.dim() == 2 else (0, 2, 3)
    spread, mean = torch.std_mean(data.detach().double(), dims, correction=0)
    count = data.numel() // max(len(mean), 1)
    is_one = ((spread - 1).abs() < _STD) | ((spread * (count / (count - 1)) ** 0.5 - 1).abs() < _STD)
    exact = int(((mean.abs() < _MEAN) & is_one).sum())
    return exact, len(mean), float(data[:_LEAST].detach().double().sum())


_LEAST_ROUNDED, _MOST, _FIELDS = 64, 1 << 14, 16
_LARGE = 1 << 17  # below that float32 has two digits behind the point, and what looks alike is rounding of results
_LEAST_VALUES = 32
_TIES = 0.05  # of the entries
_NEXT = 0.1  # of the neighbours that are the next number that float32 has


class Rounded(NamedTuple):
    """Where neighbours have become one."""

    field: str
    spacing: float  # between two numbers of float32 of this size
    size: float  # of them
    ties: float  # the share of those that have become equal to another one


def rounded_fields(dataset: Any) -> Rounded | None:
    """The first column of what a data set holds in float32 in which neighbours have become one."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    held = vars(dataset) if hasattr(dataset, "__dict__") else {}
    for name, column in list(_columns(held))[:_FIELDS]:
        if (found := rounded(column)) is not None:
            return Rounded(name, *found)
    return None


def _columns(held: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in held.items():
        for held_one in value if isinstance(value, tuple) else (value,):
            is_array = type(held_one).__name__ == "ndarray" and str(held_one.dtype) == "float32"
            one = torch.from_numpy(held_one[:_MOST].copy()) if is_array and held_one.ndim else held_one
            if type(one) is torch.Tensor and one.is_cpu and one.dim() in (1, 2) and one.layout is torch.strided:
                yield from ((name, column) for column in (one[:, None] if one.dim() == 1 else one).T[:_FIELDS])


@unseen
def rounded(column: torch.Tensor) -> tuple[float, float, float] | None:
    """The spacing of float32 at the size of a column, that size, and the share of ties; ``None`` where it will do.

    Example:
        >>> stamps = 1.7e9 + 40 * torch.arange(400, dtype=torch.float64)
        >>> rounded(stamps.float()), rounded(stamps), rounded((stamps - stamps[0]).float())
        ((128.0, 1700007936.0, 0.685), None, None)
    """
    if column.dtype is not torch.float32 or len(column) < _LEAST_ROUNDED:
        return None
    values = column[:_MOST].detach()
    size = values.abs().median()
    if not bool(values.isfinite().all()) or float(size) < _LARGE:
        return None
    spacing = float(size.nextafter(size.new_tensor(torch.inf)).double() - size.double())
    if spacing <= 1 and bool((values == values.round()).all()):
        return None  # whole numbers are exact there
    different = values.unique()
    ties = 1 - len(different) / len(values)
    steps = different.diff().double()
    own = different.nextafter(different.new_tensor(torch.inf)).double() - different.double()
    beside = float((steps <= 1.5 * own[:-1]).double().mean())
    is_rounded = len(different) >= _LEAST_VALUES and ties > _TIES and beside > _NEXT
    return (spacing, float(size), ties) if is_rounded else None
