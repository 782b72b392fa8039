"""Weights that were written to where no version tells of it, as through ``.data``, seen by sums of their bits."""

from collections.abc import Iterable

import torch

_AT_ONCE = 2**18  # numbers that are looked at in one go, for which a kernel may need eight bytes each


class WeightPrints:
    """What weights held at one moment, in one number each.

    Numbers of a device stay there until somebody asks which weights have changed.

    Args:
        weights: any tensors; those without numbers never change.

    Example:
        >>> one, other = torch.ones(3), torch.ones(3)
        >>> prints = WeightPrints([one, other])
        >>> _ = one.data.mul_(0.9)
        >>> len(prints.changed()), one._version
        (1, 0)
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = [weight for weight in weights if not weight.is_meta]
        self._before = [print_of(weight) for weight in self._weights]

    def changed(self) -> list[torch.Tensor]:
        """The weights that hold something else now."""
        pairs = zip(self._weights, self._before, strict=True)
        return [weight for weight, before in pairs if bool((print_of(weight) != before).any())]


def print_of(weight: torch.Tensor) -> torch.Tensor:
    """The bits of a weight added up, all and every third, so that numbers that change places are seen too.

    Args:
        weight: with numbers.

    Returns:
        Two integers on its device.
    """
    from anybatch.tensors.meter import storages_of

    sums = torch.zeros(2, dtype=torch.int64, device=weight.device)
    with torch.no_grad():
        for storage in storages_of(weight):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            width = next(size for size in (4, 2, 1) if len(whole) % size == 0)
            bits = whole.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
            for few in bits.split(_AT_ONCE):
                sums[0] += few.sum()
                sums[1] += few[::3].sum()
    return sums
