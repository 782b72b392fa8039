"""Whether the columns of a data set have mean 0 and standard deviation 1, as only a set scaled by itself has.

With the statistics of another set of n rows it is about 1/sqrt(n) away from them.
"""

from typing import Any

import torch

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
