"""The one place that names torch's private module for modes that see every operation, and turns modes off."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode

from anybatch.torch_private import number_of_function_modes, number_of_modes, without_functions

__all__ = [
    "NUMBERLESS", "TorchDispatchMode", "current_mode", "has_numbers", "is_watched", "item_of", "sees_functions", "unseen",
    "unwatched", "without_modes",
]  # fmt: skip

NUMBERLESS = frozenset({"FakeTensor", "FunctionalTensor"})
"""The names of torch's classes of tensors that have a shape and no numbers, besides those on meta."""
P = ParamSpec("P")
T = TypeVar("T")


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has more than a shape.

    Args:
        tensor: of any kind.

    Example:
        >>> has_numbers(torch.ones(2)), has_numbers(torch.ones(2, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and type(tensor).__name__ not in NUMBERLESS


def is_watched() -> bool:
    """Whether a mode is on, one that sees operations or calls of torch's functions."""
    return bool(number_of_modes() or number_of_function_modes())


def sees_functions() -> bool:
    """Whether a mode of the user's sees calls of torch's functions; a default device is none."""
    return number_of_function_modes() > 0 and any(
        not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    )


@contextmanager
def unwatched() -> Iterator[None]:
    """Has no mode see what runs in the block, which is nothing of the user's: none that sees operations, none that sees
    calls of torch's functions, and no default device either.
    """
    with without_modes(), without_functions():
        yield


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose operations no mode sees, such as one that counts operations for the user.

    Args:
        function: that looks at tensors.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_watched():
            return function(*args, **kwargs)
        with unwatched():
            return function(*args, **kwargs)

    return call


@unseen
def item_of(tensor: torch.Tensor) -> Any:
    """The number in a tensor, read without a mode that sees it.

    Modes are given a Python number in the place of a tensor that was made of one, and torch then fails to read it:
    ``aten::_local_scalar_dense() Expected a value of type 'Tensor'``.

    Args:
        tensor: of one entry.

    Example:
        >>> item_of(torch.tensor(2.0))
        2.0
    """
    return tensor.item()
