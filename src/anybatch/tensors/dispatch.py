"""Torch's dispatch and function modes: the only file that imports their private module, and turns modes off."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    without_torch_function,
)

__all__ = [
    "NUMBERLESS", "Mode", "TorchDispatchMode", "current_mode", "function_modes_paused", "function_modes_resumed",
    "has_numbers", "item_of", "nobody_looks", "tensors_in", "unseen",
    "without_modes", "without_user_modes", "written_by",
]  # fmt: skip

NUMBERLESS = frozenset({"FakeTensor", "FunctionalTensor"})
"""Names of torch's tensor classes without elements, besides tensors on the meta device."""
P = ParamSpec("P")
T = TypeVar("T")


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, and not only a shape.

    Example:
        >>> has_numbers(torch.ones(2)), has_numbers(torch.ones(2, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and type(tensor).__name__ not in NUMBERLESS


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """The tensors among some values, nested lists and tuples included."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors among the arguments of an operation that it writes to, as its schema says.

    Example:
        >>> x = torch.ones(2)
        >>> [one is x for one in written_by(torch.ops.aten.add_.Tensor, (x, torch.ones(2)), {})]
        [True]
    """
    if not func._schema.is_mutable:
        return []
    written = [
        (at, one.name) for at, one in enumerate(func._schema.arguments) if one.alias_info and one.alias_info.is_write
    ]
    return tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in written])


class Mode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler, which takes seconds.

    Around a compiled model it has to be entered without the compiler, or before the model is first called.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # called by newer versions of torch when the class is created
        return False


@contextmanager
def nobody_looks() -> Iterator[None]:
    """Disables all modes, the default device and ``__torch_function__`` in this block, for anybatch's own operations.

    Function modes stay on their stack, since one of them may be entered or left meanwhile.
    """
    with without_modes():
        state = function_state()
        set_function_state(NOBODY_IS_ASKED)
        try:
            yield
        finally:
            set_function_state(state)


is_traced = torch.compiler.is_dynamo_compiling


class _Paused(threading.local):
    """What intercepted torch functions before it was disabled."""

    state: Any = None


_paused = _Paused()


def function_modes_paused(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that nothing intercepts its torch functions, except within ``function_modes_resumed``."""

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
    """Wraps a function of the user that is called within ``function_modes_paused``, and undoes the pause for it."""

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
    """Disables the modes of this thread and global module hooks in this block; a default device stays.

    Module trackers use global hooks, and may keep the tensors that they get.
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
    """Wraps a function so that no mode or class of tensors sees its operations, such as a FLOP counter of the user."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not (number_of_modes() or number_of_function_modes()):  # the fast path: this runs in each step
            with without_torch_function():
                return function(*args, **kwargs)
        with nobody_looks():
            return function(*args, **kwargs)

    return call


item_of: Callable[[torch.Tensor], Any] = unseen(torch.Tensor.item)
"""``tensor.item()`` with modes disabled: for a tensor made from a Python number a mode gets the number, and torch fails
with ``aten::_local_scalar_dense() Expected a value of type 'Tensor'``."""
