"""A referee for memory: the bytes of live tensors during real work. It shares no code with what it judges."""

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def _delays_weak_references() -> bool:
    """Whether Python's weak references to a storage end only when ``StorageWeakRef`` lets go, as in torch 2.6."""
    tensor = torch.ones(1)
    ended = weakref.ref(tensor.untyped_storage())
    held = StorageWeakRef(tensor.untyped_storage())
    del tensor
    return held.expired() and ended() is not None


_DELAYS_WEAK_REFERENCES = _delays_weak_references()


class Referee(TorchDispatchMode):
    """Adds up the live storages after every operation, each once, and keeps the largest sum.

    A storage is alive until torch says that its weak reference has expired. What an operation takes and frees within
    itself is not seen. A storage that comes up first as an argument was alive before and counts from the start.

    Args:
        alive: tensors that are alive already.
    """

    def __init__(self, alive: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}
        self._at_most = 0  # with storages that may have gone since they were last asked for
        for tensor in alive:
            self._meet(tensor)
        self.peak = self.live_bytes()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _DELAYS_WEAK_REFERENCES:  # others look at the same storages by those
            self.live_bytes()
        before = [(tensor.dim(), self._meet(tensor)) for tensor in tensors_in((args, kwargs))]
        self.peak += sum(size for dimensions, size in before if dimensions)  # a lone number was made just now
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):  # an argument that was made larger by out= is among them
            self._meet(tensor)
        self._look()
        return result

    def _look(self) -> None:
        """Raises the peak to what is alive now; where even the dead would not raise it, none is looked for."""
        if self._at_most > self.peak:
            self.peak = max(self.peak, self.live_bytes())

    def live_bytes(self) -> int:
        """The bytes of all storages that are alive now."""
        for reference in [reference for reference in self._sizes if reference.expired()]:
            self._at_most -= self._sizes.pop(reference)
        return self._at_most

    def _meet(self, tensor: torch.Tensor) -> int:
        """Takes a tensor's storage up; gives its bytes if it was not known."""
        if tensor.layout is not torch.strided:
            return sum(self._meet(part) for part in (tensor._indices(), tensor._values()))
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # so do fake tensors, wherever they say that they lie
            return 0
        reference, size = StorageWeakRef(storage), int(storage.nbytes())
        known = self._sizes.get(reference)
        self._sizes[reference] = size
        self._at_most += size - (known or 0)
        return size if known is None else 0


class Cap(Referee):
    """Runs out of memory as a device of a given size would: an operation after which more is alive raises.

    What it would have taken then does not count in the peak, because a device would not have given it.

    Args:
        budget: bytes.
        alive: tensors that are alive already.

    Attributes:
        raised: how often memory ran out.
    """

    def __init__(self, budget: int, alive: Iterable[torch.Tensor]) -> None:
        self.budget, self.raised = budget, 0
        super().__init__(alive)

    def _look(self) -> None:
        if self._at_most > self.budget and (live := self.live_bytes()) > self.budget:
            self.raised += 1
            # What torch says on CUDA; Accelerate looks for these words.
            raise torch.OutOfMemoryError(f"CUDA out of memory. {live} bytes are alive of {self.budget} (emulated)")
        super()._look()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, item.name) for item in dataclasses.fields(value)])


def alive_in(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model, its gradients, its optimizers and a batch, one by one: a list would keep them alive.

    Args:
        model: with parameters, buffers and gradients.
        optimizers: whose state counts.
        batch: any nested container.

    Yields:
        The tensors; some may share a storage.
    """
    for parameter in model.parameters():
        yield from tensors_in([parameter, parameter.grad])
    yield from model.buffers()
    for optimizer in optimizers:
        yield from tensors_in(list(optimizer.state.values()))
    yield from tensors_in(batch)


def peak_of(work: Callable[[], object], alive: Iterable[torch.Tensor]) -> int:
    """Measures the most bytes of live tensors during a piece of work.

    Args:
        work: what is measured. Garbage is not collected within, so that the peak repeats.
        alive: tensors that are alive already; an iterator lets go of them, so that ``work`` may free them.

    Returns:
        Bytes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with Referee(alive) as referee:
            work()
    finally:
        if was_enabled:
            gc.enable()
    peak: int = referee.peak
    return peak
