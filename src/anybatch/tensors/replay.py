"""What a forward depends on beside its arguments and its module, saved so that it can run again in the same way."""

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class NumpyDraws:
    """Saves numpy's random state where a part of a model draws from it."""

    def before(self) -> Any:
        """What ``after`` compares with; ``None`` if there is nothing to save."""
        numpy = sys.modules.get("numpy")
        return None if numpy is None or not hasattr(numpy, "random") else numpy.random.get_state(legacy=False)

    def after(self, saved: Any) -> Any:
        """The state to replay, ``None`` if nothing was drawn."""
        if saved is None:
            return None
        now = sys.modules["numpy"].random.get_state(legacy=False)
        return None if _is_same(saved, now) else saved


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal, whichever kind the generator is."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    return bool(sys.modules["numpy"].array_equal(one, other))


class Autocast:
    """The state of autocast, as it is now.

    Args:
        kinds: of devices.
    """

    __slots__ = ("_states",)

    def __init__(self, kinds: Iterable[str]) -> None:
        self._states = {kind: _autocast(kind) for kind in kinds}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Autocast) and self._states == other._states

    __hash__ = None  # type: ignore[assignment]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block in this state."""
        with ExitStack() as stack:
            for kind, state in self._states.items():
                if state != _autocast(kind):
                    enabled, dtype, cache = state
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


_Random = tuple[torch.Tensor, tuple[Any, ...], dict[torch.device, torch.Tensor]]


class Surroundings:
    """The random state, autocast, kernels of attention and default device that a forward began with.

    Args:
        devices: the accelerators that it runs on.
        numpy: knows whether it draws from numpy.
    """

    __slots__ = ("_attention", "_autocast", "_device", "_draws", "_numpy", "_random")

    def __init__(self, devices: Iterable[torch.device], numpy: NumpyDraws) -> None:
        self._random: _Random | None = (
            torch.get_rng_state(), random.getstate(), {d: _module(d).get_rng_state(d) for d in devices}
        )  # fmt: skip
        self._draws, self._numpy = numpy, numpy.before()
        self._autocast = Autocast({"cpu", *(device.type for device in self._random[2])})
        self._attention = _attention()
        self._device = default_device()

    def end_forward(self) -> None:
        """Drops what the forward turned out not to need."""
        self._numpy = self._draws.after(self._numpy)
        if self._numpy is None and self.drew_nothing():
            self._random = None

    def drew_nothing(self) -> bool:
        """Whether nothing was drawn since, from torch and Python."""
        if self._random is None:
            return True
        state, python, devices = self._random
        return (
            _same_bytes(state, torch.get_rng_state())
            and python == random.getstate()
            and all(_same_bytes(value, _module(d).get_rng_state(d)) for d, value in devices.items())
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block in these surroundings; afterwards they are as before."""
        if self._random is None:  # what drew nothing the first time has nothing to draw again
            with ExitStack() as stack:
                self._enter(stack)
                yield
            return
        now = torch.get_rng_state(), random.getstate(), {d: _module(d).get_rng_state(d) for d in self._random[2]}
        numpy = sys.modules["numpy"].random if self._numpy is not None else None
        numpy_now = numpy.get_state(legacy=False) if numpy is not None else None
        with ExitStack() as stack:
            self._enter(stack)
            try:
                self._set_random(*self._random)
                if numpy is not None:
                    numpy.set_state(self._numpy)
                yield
            finally:
                self._set_random(*now)
                if numpy is not None:
                    numpy.set_state(numpy_now)

    @staticmethod
    def _set_random(state: torch.Tensor, python: Any, devices: dict[torch.device, torch.Tensor]) -> None:
        torch.set_rng_state(state)
        random.setstate(python)
        for device, of_device in devices.items():
            _module(device).set_rng_state(of_device, device)

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(self._autocast.again())
        if self._attention != (now := _attention()):
            _set_attention(self._attention)
            stack.callback(_set_attention, now)
        if self._device != default_device():
            stack.enter_context(self._device)


def default_device() -> torch.device:
    """Where tensors are made that no device was named for, also in torch 2.6 after ``set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:  # it looks for the device of None
        return torch.device("cpu")


def _same_bytes(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares the bytes of two states of a generator by no operation, which a trace of operations would show."""
    sizes = state.nbytes, other.nbytes
    return sizes[0] == sizes[1] and ctypes.string_at(state.data_ptr(), sizes[0]) == ctypes.string_at(
        other.data_ptr(), sizes[1]
    )


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def _attention() -> tuple[bool, ...]:
    """Which kernels of attention a forward may choose from: another one would save other tensors."""
    return tuple(bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")()) for name in _ATTENTION)


def _set_attention(enabled: tuple[bool, ...]) -> None:
    for name, value in zip(_ATTENTION, enabled, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
