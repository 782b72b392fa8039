"""Fake tensors in place of a model's own: shapes without elements.

They are CPU tensors for every device: torch can't run a backward through fake CUDA tensors on a machine without a GPU
(pytorch issue 160532).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from anybatch.tensors.dispatch import unwatched
from anybatch.tensors.fakemode import Fake, QuickFakeMode
from anybatch.tensors.modules import modules_of


class Fakes:
    """Makes fake tensors: one per tensor, on one storage per storage."""

    def __init__(self) -> None:
        # the fake mode in which to run operations on them; it makes other tensors fake, too
        self.mode: Any = QuickFakeMode(allow_non_fake_inputs=True)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same shape, strides and dtype; the same one for the same tensor.

        Args:
            tensor: dense, on any device, ``meta`` included, or a fake tensor of another mode.

        Raises:
            TypeError: it is not strided, or of another subclass.
        """
        known = self._made.get(id(tensor))
        if known is not None:
            return known[1]
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter, Fake):
            raise TypeError(f"a {type(tensor).__name__} with layout {tensor.layout} has no fake tensor")
        self.mode.constants.is_off = True
        try:
            with self.mode, torch.no_grad():
                fake = self._part_of_storage(tensor)
                if isinstance(tensor, torch.nn.Parameter):
                    fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                elif tensor.requires_grad:
                    fake = fake.requires_grad_(tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        finally:
            self.mode.constants.is_off = False
        self._made[id(tensor)] = (tensor, fake)  # kept alive, so that no other tensor gets its id
        return fake

    def let_go(self) -> None:
        """Releases the fake tensors; from now on operations on those that others still hold raise."""
        self.mode.is_over = True
        self._made.clear()
        self._storages.clear()

    def alive(self) -> list[torch.Tensor]:
        """The fake tensors of the mode that something still refers to."""
        found: list[torch.Tensor] = self.mode.alive()
        return found

    def make_real(self, device: torch.device) -> None:
        """Replaces fake tensors that something still refers to by real ones, in place, where that is possible."""
        with unwatched(), torch.no_grad():
            for fake, real in self.mode.made_real():
                try:
                    torch.utils.swap_tensors(fake, real.to(device))
                except RuntimeError:  # a weak reference to it prevents the swap
                    self.mode.stays(fake)

    def _part_of_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        items = tensor.untyped_storage().nbytes() // tensor.element_size()
        if items == tensor.numel():
            shared = (tensor.untyped_storage()._cdata, tensor.dtype)
            if shared not in self._storages:
                self._storages[shared] = torch.empty(items, dtype=tensor.dtype, device="cpu")
            return self._storages[shared].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextmanager
def swapped(fakes: Fakes, modules: Iterable[torch.nn.Module]) -> Iterator[Mapping[int, torch.Tensor]]:
    """Replaces all parameters and buffers of modules by fake tensors in this block.

    Yields:
        The fake parameters, by the ``id`` of the real ones.
    """
    places: list[tuple[Any, dict[str, Any]]] = []
    parameters: dict[int, Any] = {}
    try:
        for module in modules_of(*modules):
            homes: tuple[Any, ...] = (module._parameters, module._buffers)
            for home in homes:
                own = dict(home)
                places.append((home, own))
                for name, tensor in own.items():
                    if tensor is not None:
                        home[name] = fakes.like(tensor)
                        if home is module._parameters:
                            parameters[id(tensor)] = home[name]
        yield parameters
    finally:
        for home, own in places:
            home.clear()
            home.update(own)
