"""What tells the values of tensors, and of the weights of a net, from others, by a few of their entries."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from anybatch.doctor.samples.inputs import across
from anybatch.tensors.dispatch import has_numbers, unseen


def mark(tensor: torch.Tensor) -> Any:
    """What tells the values of a tensor from others."""
    return _marks_of([tensor])[0]


@unseen
def _marks_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The same of several, with one wait for each precision and device."""
    found, kinds = [tuple[Any, ...](one.shape) for one in tensors], dict[Any, list[tuple[int, torch.Tensor]]]()
    for position, one in enumerate(tensors):
        is_plain = type(one) in (torch.Tensor, torch.nn.Parameter) and has_numbers(one)
        if is_plain and one.numel() and not one.is_complex():
            kinds.setdefault((one.dtype, one.device), []).append((position, some_of(one, 64)))
    for group in kinds.values():
        flat = torch.cat([some for _, some in group]).cpu().double()
        for (position, _), some in zip(group, flat.split([some.numel() for _, some in group]), strict=True):
            found[position] = found[position], float(some.dot(_weights(some.numel())))
    return found


@functools.cache
def _weights(count: int) -> torch.Tensor:
    """By which entries are told from each other; at most of as many counts as a mark has entries."""
    with torch.inference_mode(False):
        return torch.linspace(1, 2, count, dtype=torch.float64, device="cpu")


def some_of(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Evenly spaced entries of a tensor; all of a small one."""
    given = tensor.detach()
    if not given.is_contiguous() and given.numel() > most:  # a copy of what is expanded would be huge
        each = max(2, math.floor(most ** (1 / given.dim())))
        given = given[tuple(slice(None, None, -(-size // each)) for size in given.shape)]
    flat = given.reshape(-1)
    return flat[:: across(given, flat.numel() // most)][:most]


def versions_of(module: torch.nn.Module) -> dict[str, Any]:
    """For each tensor of a module's state how often it was written to, and where it lies."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    kept = set(module.state_dict(keep_vars=True))
    return {name: (one._version, one.data_ptr()) for name, one in tensors if name in kept and not one.is_inference()}


@unseen
def marks(module: torch.nn.Module) -> dict[str, Any]:
    """For each parameter and buffer what tells its values from others."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    known = {name: one for name, one in tensors if one.layout is torch.strided and not one.is_meta}
    return dict(zip(known, _marks_of([*known.values()]), strict=True))
