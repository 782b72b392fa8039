"""Activations wait in host memory between the forward and the backward, in copies that overlap with computation."""

import operator
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from anybatch.accelerators import current_stream, has_streams, running_in
from anybatch.memory.places import Handle, places_of
from anybatch.tensors.graph import in_backward, is_transformed
from anybatch.tensors.modules import modules_of

SMALLEST = 1024
"""Bytes below which a tensor stays on the device."""
_LEAST_BUFFER = 4096


def size_class(size: int) -> int:
    """Rounds up to one of four sizes between powers of two; at most a fifth of a large buffer is unused.

    Example:
        >>> [size_class(n) for n in (1, 5000, 6000, 8193)]
        [4096, 5120, 6144, 10240]
    """
    if size <= _LEAST_BUFFER:
        return _LEAST_BUFFER
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class HostPool:
    """Buffers in host memory, pinned where a device copies beside its computation, and the stream of its copies.

    Pinning takes milliseconds, so a buffer that is given back is kept for the next one that needs its size class. All
    copies of a device go through one stream, in both directions, so that a buffer is never written while an earlier
    copy still reads it.

    Attributes:
        bytes: in all buffers that were made.
        used: bytes in those that are taken now.
    """

    def __init__(self) -> None:
        self.bytes = self.used = 0
        self._free: dict[tuple[int, torch.device], list[torch.Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, Any] = {}
        # Backward runs in a thread for each device, and a garbage collection within the lock may give a buffer back.
        self._lock = threading.RLock()

    def out(self, tensor: torch.Tensor) -> Any:
        """Starts to copy a contiguous tensor to the host; returns a handle for the other methods."""
        device, host = tensor.device, self._taken(tensor.nbytes, tensor.device)
        try:
            target = _part(host, tensor.numel(), tensor.dtype).view(tensor.shape)
            if not has_streams(device):
                target.copy_(tensor)
                return host
            stream = self._stream(device)
            stream.wait_stream(current_stream(device))
            with running_in(stream):
                target.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # its memory is given to nobody else before the copy is done
        except BaseException:
            self.drop(host, device)
            raise
        return host

    def back(self, kept: Any, make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Starts to copy to a new tensor on the device; returns it and a handle for ``wait``."""
        brought = make()
        source = _part(kept, brought.numel(), brought.dtype).view(brought.shape)
        if not has_streams(brought.device):
            brought.copy_(source)
            return brought, None
        stream = self._stream(brought.device)
        # What the computation has yet to do may still use the memory of the new tensor.
        stream.wait_stream(current_stream(brought.device))
        with running_in(stream):
            brought.copy_(source, non_blocking=True)
        brought.record_stream(stream)  # it may be dropped before anyone has waited for it
        return brought, stream.record_event()

    def wait(self, arrival: Any, device: torch.device) -> None:
        """Makes the current stream wait for a copy."""
        if arrival is not None:
            current_stream(device).wait_event(arrival)

    def drop(self, kept: Any, device: torch.device) -> None:
        """Returns a buffer to the pool; copies with it may still be queued in the stream."""
        with self._lock:
            self.used -= kept.nbytes
            self._free[kept.nbytes, device].append(kept)

    def clear(self) -> None:
        """Frees the unused buffers."""
        for stream in self._streams.values():
            stream.synchronize()
        with self._lock:
            self.bytes -= sum(buffer.nbytes for free in self._free.values() for buffer in free)
            self._free.clear()

    def __deepcopy__(self, _: object) -> "HostPool":
        return self  # a copy of a model shares the memory

    def _taken(self, size: int, device: torch.device) -> torch.Tensor:
        size = size_class(size)
        with self._lock:
            free = self._free[size, device]
            buffer = free.pop() if free else None
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=has_streams(device), device="cpu")
            self.bytes += size
        self.used += size
        return buffer

    def _stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            return self._streams[device]


def _part(host: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return host[: numel * dtype.itemsize].view(dtype)


class Simulated(HostPool):
    """Copies nothing: tensors that come back have the right size and arbitrary elements."""

    def out(self, tensor: torch.Tensor) -> Any:
        """Keeps nothing."""

    def back(self, kept: Any, make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Gives an empty tensor."""
        return make(), None

    def drop(self, kept: Any, device: torch.device) -> None:
        """Nothing to free."""


def offload(
    model: torch.nn.Module, names: Iterable[str], *, pool: HostPool | None = None, simulate: bool = False
) -> Handle:
    """Moves what chosen blocks save for the backward to host memory, and back in time.

    The gradient is the same in every bit. Parameters, buffers and tensors below 1 KiB stay. When the backward of a
    block begins, the tensors of the block before it are already asked for. On CUDA the copies go through pinned memory
    on a stream of their own; on the CPU they are copies like any other, which saves nothing. What runs within a
    transform of ``torch.func`` or forward-mode differentiation stays.

    Args:
        names: dotted names of modules, or runs of children of a Sequential such as ``"net.2:5"``.
        simulate: whether to copy nothing, so that only what happens on the device is there to be measured; then small
            tensors go as well, so that which ones go does not depend on the size of the batch.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
        >>> with offload(model, ["0:2"]):
        ...     model(torch.ones(20, 30)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([30, 30])
    """
    places = places_of(model, names)
    traffic = _Traffic(model, Simulated() if simulate else pool or HostPool())
    return Handle([place.put_on(traffic) for place in places])


class _Traffic:
    """The layer around each of the blocks, and what their calls have on the host."""

    def __init__(self, model: torch.nn.Module, pool: HostPool) -> None:
        self.pool = pool
        # Simulated on a small batch for the sake of a large one, where what has few bytes here has many.
        self.smallest = 0 if isinstance(pool, Simulated) else SMALLEST
        self.entries: weakref.WeakValueDictionary[Any, _Entry] = weakref.WeakValueDictionary()
        self.latest: weakref.ref[_Call] | None = None  # that sent something
        self._model = model
        self._staying: set[int] | None = None

    def __call__(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
            return inner(*args, **kwargs)
        if in_backward():  # an outer block is recomputed: its tensors are needed at once, but are not that block's own
            # Detached, since a tensor may be the result of the node that saves it, which would be a cycle.
            with saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
                return inner(*args, **kwargs)
        with saved_tensors_hooks(_Call(self).pack, operator.call):
            return inner(*args, **kwargs)

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage belongs to a parameter or a buffer."""
        if self._staying is None:
            modules = modules_of(self._model)
            tables = [table for module in modules for table in (module._parameters, module._buffers)]
            tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
            self._staying = {t.untyped_storage()._cdata for t in tensors if is_plain(t)}
        return storage._cdata in self._staying


class _Call:
    """One call of a block: what it saved."""

    def __init__(self, traffic: _Traffic) -> None:
        self._traffic = traffic
        self._entries: list[weakref.ref[_Entry]] = []
        self._earlier: weakref.ref[_Call] | None = None  # the last one before it that sent something
        self._has_sent = self._is_asked_for = False

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sends a tensor to the host, or lets it stay; gives what brings it."""
        traffic = self._traffic
        if not is_plain(tensor) or tensor.nbytes < traffic.smallest or (tensor.is_leaf and tensor.requires_grad):
            return partial(_stayed, tensor.detach(), _version(tensor))
        storage = tensor.untyped_storage()
        is_whole = 4 * tensor.nbytes >= storage.nbytes() and storage.nbytes() % tensor.itemsize == 0
        if traffic.stays(storage) or not (is_whole or 0 not in tensor.stride()):
            return partial(_stayed, tensor.detach(), _version(tensor))
        part = None if is_whole else (tensor.storage_offset(), tensor.size(), tensor.stride())
        key = (storage._cdata, tensor.dtype, part)
        entry = traffic.entries.get(key)
        if entry is None or not entry.is_of(storage, tensor._version):
            entry = traffic.entries[key] = _Entry(tensor, storage, part is None, traffic.pool)
            self._entries.append(weakref.ref(entry))
        if not self._has_sent:
            self._has_sent, self._earlier, traffic.latest = True, traffic.latest, weakref.ref(self)
        entry.share()
        view = (tensor.size(), tensor.stride(), tensor.storage_offset()) if part is None else None
        owners = [tensor] if tensor._base is None else [tensor, tensor._base]
        return partial(self._bring, entry, view, [(weakref.ref(owner), owner._version) for owner in owners])

    def _bring(self, entry: "_Entry", view: Any, changes: list[tuple[weakref.ref[torch.Tensor], int]]) -> torch.Tensor:
        """Brings a tensor back; the first time also asks for all of this call, and of the one before it."""
        for ref, version in changes:
            if (found := ref()) is not None and found._version != version:
                raise _changed()
        if not self._is_asked_for:
            self._is_asked_for = True
            self.fetch()
            if self._earlier is not None and (earlier := self._earlier()) is not None:
                earlier.fetch()
        brought = entry.take()
        return brought if view is None else brought.as_strided(*view)

    def fetch(self) -> None:
        """Asks for all tensors of this call."""
        for ref in reversed(self._entries):
            entry = ref()
            if entry is not None:
                entry.fetch()


class _Entry:
    """A storage, or a part of one, on the host."""

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, is_whole: bool, pool: HostPool) -> None:
        self._kept: Any = None  # before anything that may run out of memory
        self._uses = self._taken = 0
        tensor = tensor.detach()
        self._pool = pool
        self._source, self._version = weakref.ref(storage), tensor._version
        self._brought: tuple[torch.Tensor, Any] | None = None
        if is_whole:
            sent = tensor = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
        else:  # made dense where it was computed, so that the copy to the host is one piece
            sent = tensor.contiguous()
        size, stride, self._device = tensor.size(), tensor.stride(), tensor.device
        self._make = partial(torch.empty_strided, size, stride, dtype=tensor.dtype, device=self._device)
        self._kept = pool.out(sent)

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether this is what the storage holds now."""
        return self._source() is storage and self._version == version

    def fetch(self) -> tuple[torch.Tensor, Any]:
        """Begins to bring it back."""
        if self._brought is None:
            self._brought = self._pool.back(self._kept, self._make)
        return self._brought

    def share(self) -> None:
        """Notes that one more saved tensor is in it."""
        self._uses += 1

    def take(self) -> torch.Tensor:
        """Gives it to the backward; lets go of it when everyone who saved it has had it."""
        brought, arrival = self.fetch()
        self._pool.wait(arrival, self._device)
        self._taken += 1
        if self._taken >= self._uses:  # the graph may stay, for a second backward
            self._brought, self._taken = None, 0
        return brought

    def __del__(self) -> None:
        if self._kept is not None:
            self._pool.drop(self._kept, self._device)


def _stayed(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if _version(tensor) != version:
        raise _changed()
    return tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of one storage."""
    return (
        tensor.layout is torch.strided
        and not hasattr(tensor, "__tensor_flatten__")
        and not (
            tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
        )
    )


def _changed() -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation (seen when "
        "an offloaded block was differentiated); expected tensors saved by a block to stay unchanged. Use the "
        "out-of-place version of the operation"
    )
