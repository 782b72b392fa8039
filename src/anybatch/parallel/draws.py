"""Random numbers for micro-batches on several devices: each has its own seed, on any device and at any time."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.randomness import RandomState

_SEEDS = 2**62


def seeds_for(micro_batches: int) -> list[int]:
    """A seed for each micro-batch, by torch's generator for the CPU, which stays as it is.

    Example:
        >>> seeds_for(3) == seeds_for(3), len(set(seeds_for(3)))
        (True, 3)
    """
    with without_modes():
        generator = torch.Generator(device="cpu").set_state(torch.get_rng_state())
        first = int(torch.randint(_SEEDS, (), generator=generator, device="cpu").item())
        generator.manual_seed(first)  # the next batch begins one draw later, and shares none of these
        found: list[int] = torch.randint(_SEEDS, (micro_batches,), generator=generator, device="cpu").tolist()
    return found


class HostDraws:
    """The generators of the host, which all threads share: those of torch for the CPU, of Python and of numpy.

    Args:
        seeds: of the micro-batches.

    Attributes:
        drew: whether anything was seen to draw from any generator, so that the next batch has to get other numbers.
        drew_here: whether it was one of these.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._natural = self._before = _now()
        self.drew = self.drew_here = False

    def begin(self, number: int) -> None:
        """Seeds them for a micro-batch that runs alone."""
        seed = self._seeds[number]
        with without_modes():
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        self._before = _now()

    def look(self) -> None:
        """Looks whether anything was drawn since the micro-batch began, or since all of them did."""
        with without_modes():
            if not self._before.is_now():
                self.drew = self.drew_here = True

    def end(self) -> None:
        """Puts them back to before the first micro-batch, and one draw further if anything was drawn anywhere."""
        self._natural.restore()
        if self.drew:
            with without_modes():
                torch.randint(_SEEDS, (), device="cpu")


def _now() -> RandomState:
    with without_modes():
        return RandomState()


class DeviceDraws:
    """The generator of an accelerator, which no other thread uses.

    Args:
        device: the CPU has none of its own.
        seeds: of the micro-batches.

    Attributes:
        drew: whether anything was drawn from it.
    """

    def __init__(self, device: torch.device, seeds: Sequence[int]) -> None:
        self._device = device
        self._seeds = seeds
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._before: Any = None
        self.drew = False

    def begin(self, number: int) -> None:
        """Seeds it for a micro-batch; the device is the current one of its kind."""
        if self._module is not None:
            self._module.manual_seed(self._seeds[number])
            self._before = self._module.get_rng_state(self._device)

    def look(self) -> None:
        """Looks whether anything was drawn since the micro-batch began."""
        if self._module is not None and not self.drew:
            with without_modes():
                self.drew = not torch.equal(self._before, self._module.get_rng_state(self._device))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Puts it back at the end of the block: what is drawn from it elsewhere does not depend on the split."""
        if self._module is None:
            yield
            return
        state = self._module.get_rng_state(self._device)
        try:
            yield
        finally:
            self._module.set_rng_state(state, self._device)
