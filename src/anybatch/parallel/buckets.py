"""Gradients summed over processes, in few collectives of many tensors each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from anybatch.tensors.precision import LOW_PRECISION

BYTES = 25 * 2**20  # as in DistributedDataParallel


@dataclass
class Bucket:
    """Gradients that go together: tensors of one dtype on one device."""

    gradients: list[torch.Tensor]
    dtype: torch.dtype
    numel: int = 0  # of all of them

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.gradients[0].device


def buckets_of(gradients: Sequence[torch.Tensor]) -> list[Bucket]:
    """Packs gradients, in their order, which is the same on all processes; a large one has a bucket for itself."""
    found: list[Bucket] = []
    running: dict[tuple[torch.device, torch.dtype], Bucket] = {}
    for gradient in gradients:
        dtype = torch.float32 if gradient.dtype in LOW_PRECISION else gradient.dtype
        key = (gradient.device, dtype)
        waiting = running.setdefault(key, Bucket([], dtype))
        if waiting.gradients and (waiting.numel + gradient.numel()) * dtype.itemsize > BYTES:
            found.append(waiting)
            running[key] = waiting = Bucket([], dtype)
        waiting.gradients.append(gradient)
        waiting.numel += gradient.numel()
    return [*found, *running.values()]


class Buffers:
    """The memory that buckets travel in, taken before anybody relies on it."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self._buffers = {key: torch.empty(n, dtype=key[1], device=key[0]) for key, n in _sizes(gradients).items()}

    @staticmethod
    def bytes_for(gradients: Sequence[torch.Tensor]) -> int:
        """The bytes of the buffers."""
        return sum(n * dtype.itemsize for (_, dtype), n in _sizes(gradients).items())

    def sum_(self, gradients: Sequence[torch.Tensor], group: Any, lost: Callable[[RuntimeError], Exception]) -> None:
        """Sums gradients in place over all processes."""
        for bucket in buckets_of(gradients):
            first = bucket.gradients[0]
            if len(bucket.gradients) == 1 and first.dtype is bucket.dtype and first.is_contiguous():
                _all_reduce(first, group, lost)  # it is a buffer already
                continue
            buffer = self._buffers[bucket.device, bucket.dtype][: bucket.numel]
            parts = buffer.split([gradient.numel() for gradient in bucket.gradients])
            views = [part.view(g.shape) for part, g in zip(parts, bucket.gradients, strict=True)]
            torch._foreach_copy_(views, bucket.gradients)
            _all_reduce(buffer, group, lost)
            torch._foreach_copy_(bucket.gradients, views)

    def release_(self) -> None:
        """Gives the memory back, after the last sum: gloo's thread holds what it has sent for a moment longer."""
        for buffer in self._buffers.values():
            buffer.untyped_storage().resize_(0)


def ready_to_sum(
    tensors: Sequence[torch.Tensor], group: Any, lost: Callable[[RuntimeError], Exception]
) -> Callable[[list[bool], float], None]:
    """Takes all memory that summing gradients over processes will need, before others rely on this one."""
    for tensor in tensors:
        if tensor.grad is None and tensor.requires_grad:
            tensor.grad = torch.zeros_like(tensor)
    buffers = Buffers([tensor.grad for tensor in tensors if tensor.grad is not None])

    def sum_(reached: list[bool], scale: float) -> None:
        for tensor, is_reached in zip(tensors, reached, strict=True):
            if not is_reached:
                tensor.grad = None
        buffers.sum_([tensor.grad for tensor in tensors if tensor.grad is not None], group, lost)
        buffers.release_()

    return sum_


def _sizes(gradients: Sequence[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], int]:
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for bucket in buckets_of(gradients):  # of fewer gradients, buckets may hold others, but never more bytes
        key = (bucket.device, bucket.dtype)
        together = sizes.get(key, 0) + bucket.numel
        sizes[key] = max(bucket.numel, min(together, BYTES // bucket.dtype.itemsize))
    return sizes


def _all_reduce(tensor: torch.Tensor, group: Any, lost: Callable[[RuntimeError], Exception]) -> None:
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise lost(error) from error
