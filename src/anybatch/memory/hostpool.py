"""Host buffers for offloaded activations, with copies that overlap with computation."""

import threading
from collections import defaultdict
from typing import Any, NamedTuple

import torch

from anybatch.accelerators import current_stream, has_streams, running_in

_SMALLEST = 4096


def size_class(size: int) -> int:
    """Rounds up to one of four sizes between powers of two; at most a fifth of a large buffer is unused.

    Example:
        >>> [size_class(n) for n in (1, 5000, 6000, 8193)]
        [4096, 5120, 6144, 10240]
    """
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class Layout(NamedTuple):
    """The layout of a tensor on the device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A new tensor like it."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class HostPool:
    """Buffers in host memory, pinned where a device copies beside its computation, and the stream of its copies.

    Pinning takes milliseconds, so a buffer that is given back is kept for the next one that needs its size class. All
    copies of a device go through one stream, in both directions, so that a buffer is never written while an earlier
    copy still reads it.

    Attributes:
        bytes: in all buffers that were made.
        used: bytes in those that are taken now.

    Example:
        >>> pool, x = HostPool(), torch.ones(3)
        >>> host = pool.out(x)
        >>> pool.back(host, Layout(x.size(), x.stride(), x.dtype, x.device))[0], pool.used
        (tensor([1., 1., 1.]), 4096)
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

    def back(self, kept: Any, like: Layout) -> tuple[torch.Tensor, Any]:
        """Starts to copy to a new tensor on the device; returns it and a handle for ``wait``."""
        brought = like.empty()
        source = _part(kept, brought.numel(), like.dtype).view(like.size)
        if not has_streams(like.device):
            brought.copy_(source)
            return brought, None
        stream = self._stream(like.device)
        # What the computation has yet to do may still use the memory of the new tensor.
        stream.wait_stream(current_stream(like.device))
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

    def back(self, kept: Any, like: Layout) -> tuple[torch.Tensor, Any]:
        """Gives an empty tensor."""
        return like.empty(), None

    def drop(self, kept: Any, device: torch.device) -> None:
        """Nothing to free."""
