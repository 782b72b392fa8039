"""What may hold the samples of a batch in the variables of a loop."""

import types
from collections.abc import Sized
from typing import Any

import torch

from anybatch.batch.trees import leaves, opened

_PLAIN = (bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.optim.Optimizer, types.ModuleType)


def size_of(value: Any) -> int:
    """How many samples a value may hold: the rows of its longest tensor, or its items."""
    return rows_of(value) or (len(value) if isinstance(value, Sized) and not hasattr(value, "dim") else 0)


def is_flat(value: Any) -> bool:
    """Whether a value is no tensor with more than one dimension."""
    return not isinstance(value, torch.Tensor) or value.dim() < 2


def holds_samples(value: Any) -> bool:
    """Whether a value may be a part of a batch."""
    return _is_data(value) and not _has_modules(value)


def _is_data(value: Any) -> bool:
    """Whether a value may hold samples: tensors with rows, and what nobody here knows."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, _PLAIN) or value is None or callable(value):
        return False
    inside = opened(value)
    return inside is None or any(_is_data(child.value) for child in inside.children)


def _has_modules(value: Any) -> bool:
    """Whether a value is an object with modules, as a trainer is."""
    return any(isinstance(one, torch.nn.Module) for one in getattr(value, "__dict__", {}).values())


def rows_of(value: Any) -> int:
    """The length of the longest tensor in a batch."""
    return max((len(one) for _, _, one in leaves(value) if isinstance(one, torch.Tensor) and one.dim()), default=0)
