"""The one place that names torch's private module for modes that see every operation, and turns modes off."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode

from anybatch.torch_private import hooks_on_all_modules, number_of_function_modes, number_of_modes

__all__ = [
    "NUMBERLESS", "TorchDispatchMode", "current_mode", "has_numbers", "is_watched", "item_of", "unseen", "unwatched",
    "without_modes", "without_user_modes",
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


@contextmanager
def unwatched() -> Iterator[None]:
    """Turns modes that see operations off in this thread, and the default device, and on again.

    Other modes that see calls of torch's functions stay, since one of them may be entered or left meanwhile.
    """
    with without_modes():
        devices = []
        while isinstance(_get_current_function_mode(), DeviceContext):
            devices.append(_pop_mode())
        try:
            yield
        finally:
            for mode in reversed(devices):
                _push_mode(mode)


@contextmanager
def without_user_modes() -> Iterator[None]:
    """Turns off what looks on at all operations or all modules, and on again.

    These are the modes of this thread, but for default devices, which decide where tensors lie, and hooks on every
    module, as of a tracker of modules, which may keep what it is shown.
    """
    kept = [(hooks, dict(hooks)) for hooks in hooks_on_all_modules()]
    for hooks, _ in kept:
        hooks.clear()
    with without_modes():
        modes = []
        while (mode := _get_current_function_mode()) is not None:
            modes.append(mode)
            _pop_mode()
        devices = [mode for mode in reversed(modes) if isinstance(mode, DeviceContext)]
        for mode in devices:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in devices:
                _pop_mode()
            for mode in reversed(modes):
                _push_mode(mode)
            for hooks, own in kept:
                hooks.update(own)


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
