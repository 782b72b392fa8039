"""Saving and restoring random state."""

import ctypes
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anybatch.tensors.dispatch import unseen

_UNDRAWN = 623  # the position of NumPy's generator when it is loaded


def seed(number: int) -> None:
    """Seeds torch's generators; ``torch.manual_seed`` keeps a stack at each call for devices that never start."""
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


class RandomState:
    """The state of the global random generators: torch's, Python's, and NumPy's if ``numpy.random`` is loaded."""

    __slots__ = ("_cpu", "_devices", "_numpy", "_python")

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._cpu = _bytes(torch.get_rng_state())  # a tensor would count against a budget as long as a step runs
        self._python = random.getstate()
        # NumPy 2 loads it on first use. The legacy tuple would take twice as long.
        numpy_random = sys.modules.get("numpy.random")
        self._numpy = None if numpy_random is None else numpy_random.get_state(legacy=False)
        self._devices: dict[torch.device, bytes] = {}
        for device in devices:
            if device.type not in ("cpu", "meta"):
                self._devices[device] = _bytes(_generators(device).get_rng_state(device))

    def restore(self) -> None:
        """Restores every saved generator."""
        torch.set_rng_state(_tensor(self._cpu))
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        for device, state in self._devices.items():
            _generators(device).set_rng_state(_tensor(state), device)

    def is_now(self) -> bool:
        """Whether nothing was drawn since this was saved, see ``moved``."""
        return self.moved() == (False, False)

    def moved(self) -> tuple[bool, bool]:
        """Whether torch's generators, and whether Python's or NumPy's, were drawn from since this was saved.

        Compares bytes, without a torch operation that a trace would show. Ignores accelerators that were not named.
        """
        now = RandomState(self._devices)
        of_torch = (self._cpu, self._devices) != (now._cpu, now._devices)
        # The first draw loads numpy.random; so does torch's compiler, which draws nothing.
        is_new = self._numpy is None and now._numpy is not None and now._numpy["state"].get("pos") != _UNDRAWN
        return of_torch, is_new or self._python != now._python or not _is_same(self._numpy, now._numpy)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values for ``load_state_dict``; ``torch.load(weights_only=True)`` accepts them."""
        version, words, gauss = self._python
        state: dict[str, Any] = {
            "cpu": _tensor(self._cpu),
            "python": [version, list(words), gauss],
            "devices": {str(device): _tensor(state) for device, state in self._devices.items()},
        }
        if self._numpy is not None:
            state["numpy"] = _plain(self._numpy)
        return state

    @staticmethod
    def load_state_dict(state: Mapping[str, Any]) -> None:
        """Sets the generators to a saved state; skips accelerators that this machine does not have."""
        torch.set_rng_state(state["cpu"].cpu())
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        if "numpy" in state:
            import numpy as np

            inner = {**state["numpy"]["state"], "key": np.array(state["numpy"]["state"]["key"], dtype=np.uint32)}
            np.random.set_state({**state["numpy"], "state": inner})
        for name, value in state["devices"].items():
            device = torch.device(name)
            module = getattr(torch, device.type, None)
            if module is not None and module.is_available() and (device.index or 0) < module.device_count():
                module.set_rng_state(value.cpu(), device)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of torch's default generator on a device."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: torch.Tensor = _generators(device).get_rng_state(device)
    return state


@unseen
def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@unseen
def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states of NumPy's global generator, of any bit generator, are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    return one is None or bool(sys.modules["numpy"].array_equal(one, other))


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _generators(device: torch.device) -> Any:
    return getattr(torch, device.type)
