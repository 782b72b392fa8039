"""The parameters and buffers that a forward sees, so that it can see them again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from anybatch.errors import AnyBatchError

SMALL = 64 * 1024
"""Bytes up to which a copy of a buffer is kept whether or not the buffer is seen to change."""


class NotRecomputable(AnyBatchError, RuntimeError):
    """A block does not compute the same a second time, so that it can't be recomputed.

    Attributes:
        block: its name, as it was given to ``recompute``.
    """

    def __init__(self, message: str, *, block: str) -> None:
        super().__init__(message)
        self.block = block


class State:
    """The parameters and buffers of a block.

    Args:
        name: of the block, for messages.
        modules: all modules in it.
        title: what messages call it, if it is no block of a model.
        advice: what to do where it can't be recomputed.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[torch.nn.Module],
        *,
        title: str = "",
        advice: str = "Leave the block out of recompute, or change the state after the backward",
    ) -> None:
        self.name = name
        self.title = title or f"the block {name!r}"
        self.advice = advice
        self._parameters = [module._parameters for module in modules if module._parameters]
        self._modules = [module for module in modules if module._buffers]
        # Kernels of batch normalisation write to their statistics without counting it as a new version.
        self._unseen = {index for index, module in enumerate(self._modules) if isinstance(module, _NormBase)}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, as they are now."""
        for parameters in self._parameters:
            yield from (parameter for parameter in parameters.values() if parameter is not None)
        for module in self._modules:
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)

    @property
    def is_lazy(self) -> bool:
        """Whether there are parameters or buffers that the first forward will make."""
        return any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor in self.tensors())

    def before_forward(self) -> "StateOfCall":
        """Notes what there is; buffers are copied, since nobody knows yet which will change."""
        return StateOfCall(self)

    def parameters(self) -> list[tuple[torch.Tensor, int]]:
        """The parameters, each with its version."""
        return [(p, _version(p)) for found in self._parameters for p in found.values() if p is not None]

    def buffers(self) -> dict[tuple[int, str], tuple[torch.Tensor, int]]:
        """The buffers by the position of their module and their name, each with its version."""
        return {
            (index, name): (buffer, _version(buffer))
            for index, module in enumerate(self._modules)
            for name, buffer in module._buffers.items()
            if buffer is not None
        }


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class StateOfCall:
    """What one call of a block saw.

    It keeps a copy of every buffer that is small, that belongs to a normalisation, or whose version grew in the
    forward. Writes to a large buffer through ``.data`` are no new version and can't be seen.
    """

    def __init__(self, state: State) -> None:
        self._of = state
        self._parameters = state.parameters()
        self._buffers = state.buffers()
        with torch.no_grad():
            copies: dict[int, torch.Tensor] = {}
            for buffer, _ in self._buffers.values():
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
        self._copies = copies
        self._before: dict[tuple[int, str], torch.Tensor] = {}

    def after_forward(self) -> None:
        """Keeps the copies of the buffers that changed, and drops the others."""
        now = self._of.buffers()
        for place, (buffer, version) in self._buffers.items():
            found, copy = now.get(place), self._copies[id(buffer)]
            changed = found is None or found[0] is not buffer or found[1] != version
            if changed or copy.nbytes <= SMALL or place[0] in self._of._unseen:
                self._before[place] = copy
        self._copies = {}
        self._buffers = {place: found for place, found in now.items() if place not in self._before}
        parameters = self._of.parameters()
        if [entry[1] for entry in parameters] != [entry[1] for entry in self._parameters]:
            raise self._changed("a parameter was changed by the forward itself")

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Puts the buffers from before the forward in place for the time of its block.

        The buffers themselves are not written to: others may have saved them for their own backward.
        """
        self._check()
        modules, made = self._of._modules, {}
        swapped: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for (index, name), copy in self._before.items():
                buffers = modules[index]._buffers
                swapped.append((buffers, name, buffers.get(name)))
                if id(copy) not in made:
                    made[id(copy)] = copy.clone()
                buffers[name] = made[id(copy)]
            yield
        finally:
            for buffers, name, buffer in swapped:
                buffers[name] = buffer

    def _check(self) -> None:
        """What the forward only read has to be the same, or the second forward would compute something else."""
        parameters = self._of.parameters()
        if not all(a is b and v == w for (a, v), (b, w) in zip(parameters, self._parameters, strict=True)):
            raise self._changed("a parameter was changed or replaced between the forward and the backward")
        now = self._of.buffers()
        for (index, name), (buffer, version) in self._buffers.items():
            found = now.get((index, name))
            if found is None or found[0] is not buffer or found[1] != version:
                raise self._changed(f"the buffer {name!r} was changed between the forward and the backward")

    def _changed(self, what: str) -> NotRecomputable:
        return NotRecomputable(
            f"{self._of.title} can't be recomputed, because {what}; expected that what it reads stays as it is. "
            f"{self._of.advice}",
            block=self._of.name,
        )
