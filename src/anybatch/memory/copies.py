"""Copies of storages in host memory, made and brought back beside the computation."""

from typing import Any, NamedTuple, Protocol

import torch

from anybatch.accelerators import current_stream, has_streams, running_in
from anybatch.memory.hostpool import HostPool


class Layout(NamedTuple):
    """What a tensor on the device is like.

    Args:
        size: its shape.
        stride: its strides.
        dtype: of its items.
        device: where it lies.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A new tensor like it."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class Transfer(Protocol):
    """How the numbers of a tensor get to the host and back."""

    def out(self, tensor: torch.Tensor) -> Any:
        """Begins to copy a contiguous tensor to the host; gives what the other methods take."""

    def back(self, kept: Any, like: Layout) -> tuple[torch.Tensor, Any]:
        """Begins to copy to a new tensor on the device; gives it and what ``wait`` takes."""

    def wait(self, arrival: Any, device: torch.device) -> None:
        """Lets the computation wait until a tensor is there."""

    def drop(self, kept: Any, device: torch.device) -> None:
        """Frees the copy on the host."""


class Simulated:
    """Copies nothing: the tensors that come back have the right size, and their numbers are arbitrary."""

    def out(self, tensor: torch.Tensor) -> Any:
        """Keeps nothing."""

    def back(self, kept: Any, like: Layout) -> tuple[torch.Tensor, Any]:
        """Gives an empty tensor."""
        return like.empty(), None

    def wait(self, arrival: Any, device: torch.device) -> None:
        """Nothing to wait for."""

    def drop(self, kept: Any, device: torch.device) -> None:
        """Nothing to free."""


class Copied:
    """Copies through a pool on the host; beside the computation where the device has streams.

    Args:
        pool: host memory.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy to the host."""
        host = self._pool.take(tensor.nbytes, tensor.device)
        try:
            self._copy_out(tensor, _part(host, tensor.numel(), tensor.dtype).view(tensor.shape))
        except BaseException:
            self._pool.give(host, tensor.device)
            raise
        return host

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor) -> None:
        if not has_streams(tensor.device):
            target.copy_(tensor)
            return
        stream = self._pool.stream(tensor.device)
        stream.wait_stream(current_stream(tensor.device))
        with running_in(stream):
            target.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is given to nobody else before the copy is done

    def back(self, kept: torch.Tensor, like: Layout) -> tuple[torch.Tensor, Any]:
        """Begins to copy to the device."""
        brought = like.empty()
        source = _part(kept, brought.numel(), like.dtype).view(like.size)
        if not has_streams(like.device):
            brought.copy_(source)
            return brought, None
        stream = self._pool.stream(like.device)
        # What the computation has yet to do may still use the memory of the new tensor.
        stream.wait_stream(current_stream(like.device))
        with running_in(stream):
            brought.copy_(source, non_blocking=True)
        brought.record_stream(stream)  # it may be dropped before anyone has waited for it
        return brought, stream.record_event()

    def wait(self, arrival: Any, device: torch.device) -> None:
        """Lets the current stream wait for the copy."""
        if arrival is not None:
            current_stream(device).wait_event(arrival)

    def drop(self, kept: torch.Tensor, device: torch.device) -> None:
        """Gives the buffer back to the pool."""
        self._pool.give(kept, device)


def _part(host: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return host[: numel * dtype.itemsize].view(dtype)
