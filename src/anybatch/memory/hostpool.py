"""Host memory that activations wait in: buffers that are used again from step to step."""

import threading
from collections import defaultdict
from typing import Any

import torch

from anybatch.accelerators import has_streams

_SMALLEST = 4096


def size_class(size: int) -> int:
    """Rounds up to one of four sizes between two powers of two, so that at most a fifth of a large buffer lies idle.

    Args:
        size: bytes.

    Returns:
        Bytes.

    Example:
        >>> [size_class(n) for n in (1, 5000, 6000, 8193)]
        [4096, 5120, 6144, 10240]
    """
    if size <= _SMALLEST:
        return _SMALLEST
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

    Example:
        >>> pool, device = HostPool(), torch.device("cpu")
        >>> pool.give(pool.take(5000, device), device)
        >>> pool.take(5100, device).nbytes, pool.bytes
        (5120, 5120)
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.used = 0
        self._free: dict[tuple[int, torch.device], list[torch.Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, Any] = {}
        # Backward runs in a thread for each device, and a garbage collection within the lock may give a buffer back.
        self._lock = threading.RLock()

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """Gives a buffer of at least some bytes; what is in it is arbitrary.

        Args:
            size: bytes.
            device: where the bytes come from.
        """
        size = size_class(size)
        with self._lock:
            free = self._free[size, device]
            buffer = free.pop() if free else None
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=has_streams(device))
            self.bytes += size
        self.used += size
        return buffer

    def give(self, buffer: torch.Tensor, device: torch.device) -> None:
        """Takes a buffer back; copies from and to it may still be waiting in the stream of the device.

        Args:
            buffer: that ``take`` gave.
            device: as for ``take``.
        """
        with self._lock:
            self.used -= buffer.nbytes
            self._free[buffer.nbytes, device].append(buffer)

    def __deepcopy__(self, _: object) -> "HostPool":
        return self  # a copy of a model shares the memory

    def clear(self) -> None:
        """Frees the buffers that nobody uses now."""
        for stream in self._streams.values():
            stream.synchronize()
        with self._lock:
            self.bytes -= sum(buffer.nbytes for free in self._free.values() for buffer in free)
            self._free.clear()

    def stream(self, device: torch.device) -> Any:
        """The stream of the copies of a device."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            return self._streams[device]
