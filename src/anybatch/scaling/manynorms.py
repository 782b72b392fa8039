"""Norms of many gradients, most of which are small."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch._utils import _flatten_dense_tensors

SMALL = 2**16
"""Bytes of a gradient that waits for others: one kernel for several takes less time."""
HELD = 2**18
"""Bytes of gradients that wait at most."""


def joined_where_small(gradients: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The gradients, small ones of a CPU side by side in one: there a norm of each takes several times as long."""
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    held = 0
    for gradient in gradients:
        if type(gradient) is torch.Tensor and gradient.is_cpu and (size := gradient.nbytes) <= SMALL:
            small.setdefault(gradient.dtype, []).append(gradient)
            held += size
            if held >= HELD:
                yield from map(_flatten_dense_tensors, small.values())
                small, held = {}, 0
        else:
            yield gradient
    yield from map(_flatten_dense_tensors, small.values())


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The entries of a gradient, without a graph; a tensor is made only where that is another one."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def joined(norms: Sequence[torch.Tensor], home: torch.device) -> torch.Tensor:
    """The norm of all together; 0 of none."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=home)
    together: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(home, torch.float64) for norm in norms]))
    return together
