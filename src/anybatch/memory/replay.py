"""What a forward depends on beside its arguments and its module, saved so that it can run again in the same way."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from anybatch.accelerators import attention_kernels, set_attention_kernels
from anybatch.tensors.randomness import RandomState


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
