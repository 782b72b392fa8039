"""What a forward depends on beside its arguments and its module, saved so that it can run again in the same way."""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from anybatch.accelerators import attention_kernels, set_attention_kernels
from anybatch.tensors.randomness import RandomState

_DEPTH = 5  # of objects within an object


class Autocast:
    """The state of autocast, as it is now."""

    __slots__ = ("_states",)

    def __init__(self, kinds: Iterable[str]) -> None:
        self._states = {kind: _autocast(kind) for kind in kinds}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block in this state."""
        with ExitStack() as stack:
            for kind, state in self._states.items():
                if state != _autocast(kind):
                    enabled, dtype, cache = state
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


class Surroundings:
    """The random state, autocast, kernels of attention and default device that a forward began with."""

    __slots__ = ("_attention", "_autocast", "_device", "_devices", "_random")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [*devices]
        self._random: RandomState | None = RandomState(self._devices)
        self._autocast = Autocast({"cpu", *(device.type for device in self._devices if device.type != "meta")})
        self._attention = attention_kernels()
        self._device = default_device()

    def end_forward(self) -> None:
        """Drops what the forward turned out not to need: what drew nothing has nothing to draw again."""
        if self._random is not None and self._random.is_now():
            self._random = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block in these surroundings; afterwards they are as before."""
        with ExitStack() as stack:
            self._enter(stack)
            if self._random is not None:
                stack.callback(RandomState(self._devices).restore)
                self._random.restore()
            yield

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(self._autocast.again())
        if self._attention != (now := attention_kernels()):
            set_attention_kernels(self._attention)
            stack.callback(set_attention_kernels, now)
        if self._device != default_device():
            stack.enter_context(self._device)


def default_device() -> torch.device:
    """Where tensors are made that no device was named for, also in torch 2.6 after ``set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:  # it looks for the device of None
        return torch.device("cpu")


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


Leaf = Callable[[Any], Any]


def copied(value: Any, known: dict[int, tuple[Any, Any]], leaf: Leaf | None = None, depth: int = _DEPTH) -> Any:
    """A copy of an object whose items and attributes may change without a change of it, some levels deep.

    Tensors, modules and functions are not copied, nor is what holds nothing.

    Args:
        known: copies that were made before, with their objects, by the ``id`` of these.
        leaf: gives what stands for a value, or the value itself; then only containers are copied.
    """
    if leaf is not None and (found := leaf(value)) is not value:
        return found
    if not depth or isinstance(value, (torch.Tensor, torch.nn.Module, type)) or callable(value):
        return value

    def inner(one: Any) -> Any:
        return copied(one, known, leaf, depth - 1)

    if type(value) is tuple:
        return tuple(map(inner, value))
    if isinstance(value, tuple):
        return value._make(map(inner, value)) if hasattr(value, "_make") else value
    is_container = isinstance(value, (dict, list, set, deque))
    attributes: Any = getattr(value, "__dict__", None)
    is_open = type(attributes) is dict and type(value).__module__.partition(".")[0] not in ("torch", "numpy")
    if id(value) in known or not (is_container or (is_open and leaf is None)):
        return known.get(id(value), (value, value))[1]
    made = _alone(value) if is_container else value
    if not is_container:
        with suppress(Exception):  # what refuses to be copied is shared
            made = copy.copy(value)
    known[id(value)] = value, made
    if isinstance(value, dict):
        put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        for key, one in value.items():
            put(made, key, inner(one))
    elif isinstance(value, list):
        list.__setitem__(made, slice(None), [inner(one) for one in value])
    elif is_container:
        items = [inner(one) for one in value]
        made.clear()
        (made.update if isinstance(made, set) else made.extend)(items)
    if is_open and made is not value:
        made.__dict__.update((key, inner(one)) for key, one in attributes.items())
    return made


def _alone(value: Any) -> Any:
    """Another container of the class of this one, with its attributes and perhaps its items."""
    made = value
    with suppress(Exception):  # it may not take its items one by one
        made = copy.copy(value)
    if made is value:
        kind: Any = type(value)
        made = kind.__new__(kind)
        if isinstance(value, deque):
            deque.__init__(made, (), value.maxlen)
        made.__dict__.update(value.__dict__)
    return made
