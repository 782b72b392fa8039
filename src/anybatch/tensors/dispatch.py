"""The one place that names torch's private module for modes that see every operation, and turns modes off."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode

from anybatch.torch_private import (
    NOBODY_IS_ASKED,
    function_state,
    hooks_on_all_modules,
    number_of_function_modes,
    number_of_modes,
    set_function_state,
)

__all__ = [
    "NUMBERLESS", "Mode", "TorchDispatchMode", "current_mode", "function_modes_paused", "function_modes_resumed",
    "functions_unseen", "has_numbers", "is_asked", "is_watched", "item_of", "nobody_looks", "unseen", "unwatched",
    "without_modes", "without_user_modes",
]  # fmt: skip

NUMBERLESS = frozenset({"FakeTensor", "FunctionalTensor"})
"""The names of torch's classes of tensors that have a shape and no numbers, besides those on meta."""
P = ParamSpec("P")
T = TypeVar("T")


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has more than a shape.

    Example:
        >>> has_numbers(torch.ones(2)), has_numbers(torch.ones(2, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and type(tensor).__name__ not in NUMBERLESS


class Mode(TorchDispatchMode):
    """A mode that sees operations, for whose sake torch does not import its compiler, which takes seconds.

    Whoever enters it around a compiled model has that run without the compiler, or before it is first called.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # asked by torch when a class is made; older versions don't ask
        return False


def is_watched() -> bool:
    """Whether a mode is on, one that sees operations or calls of torch's functions."""
    return bool(number_of_modes() or number_of_function_modes())


def is_asked() -> bool:
    """Whether a mode is on that sees calls of torch's functions, and is not kept from it."""
    return bool(number_of_function_modes()) and function_state() != NOBODY_IS_ASKED


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
def nobody_looks() -> Iterator[None]:
    """Turns off what sees operations and calls of torch's functions in this thread, for what is none of the user's.

    These are all modes, a default device among them, and classes of tensors that are asked about functions. Modes that
    see functions stay on their stack, since one of them may be entered or left meanwhile.
    """
    with without_modes(), functions_unseen():
        yield


@contextmanager
def functions_unseen() -> Iterator[None]:
    """Has nobody see calls of torch's functions in this thread."""
    state = function_state()
    set_function_state(NOBODY_IS_ASKED)
    try:
        yield
    finally:
        set_function_state(state)


is_traced = torch.compiler.is_dynamo_compiling


class _Paused(threading.local):
    """Who was asked about calls of functions before they were no longer seen."""

    state: Any = None


_paused = _Paused()


def function_modes_paused(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose calls of torch's functions nobody sees, but for what is ``function_modes_resumed`` in it."""

    def paused(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_traced():
            return function(*args, **kwargs)
        state, outer = function_state(), _paused.state
        _paused.state = state
        set_function_state(NOBODY_IS_ASKED)
        try:
            return function(*args, **kwargs)
        finally:
            _paused.state = outer
            set_function_state(state)

    return paused


def function_modes_resumed(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the user's run that is called in one that is ``function_modes_paused``, seen as without it."""

    def resumed(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_traced() or _paused.state is None:
            return function(*args, **kwargs)
        set_function_state(_paused.state)
        try:
            return function(*args, **kwargs)
        finally:
            set_function_state(NOBODY_IS_ASKED)

    return resumed


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
    """A function whose operations no mode sees, such as one that counts operations for the user."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not (number_of_modes() or number_of_function_modes()):  # in each step of a run: no call more than it needs
            return function(*args, **kwargs)
        with nobody_looks():
            return function(*args, **kwargs)

    return call


def item_of(tensor: torch.Tensor) -> Any:
    """The number in a tensor, read without a mode that sees it.

    Modes are given a Python number in the place of a tensor that was made of one, and torch then fails to read it:
    ``aten::_local_scalar_dense() Expected a value of type 'Tensor'``.

    Example:
        >>> item_of(torch.tensor(2.0))
        2.0
    """
    if not (number_of_modes() or number_of_function_modes()):
        return tensor.item()
    with nobody_looks():
        return tensor.item()
