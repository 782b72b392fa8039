"""Moves micro-batches to the device: the next one is copied while the current one computes."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.accelerators import current_stream, has_streams, is_accelerator, running_in, side_stream
from anybatch.batch.layout import home_of, moves_itself
from anybatch.batch.trees import leaves, map_leaves
from anybatch.errors import BatchError


def moved(micro_batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yields micro-batches on a device.

    On an accelerator with streams, each is copied from pinned memory on a side stream, one ahead of the computation.
    Micro-batches that are already there are yielded as they are.
    """
    if has_streams(device):
        yield from _prefetched(micro_batches, device)
        return
    for batch in micro_batches:
        yield to_device(batch, device)
        del batch  # frees it before the next one is made


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Moves the tensors of a batch, and objects with ``.to(device)``, to a device.

    Args:
        pin: copy host tensors to pinned memory first, so that the copy is asynchronous; objects are not moved.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return PackedSequence.to(leaf, device)  # type: ignore[arg-type]  # torch's stub knows only the dtype
        if not isinstance(leaf, torch.Tensor):
            return leaf.to(device) if not pin and moves_itself(leaf) else leaf
        if leaf.device == device:
            return leaf
        if leaf.is_meta:
            raise BatchError(
                f"the batch has a tensor {tuple(leaf.shape)} on the meta device, where tensors hold no data; "
                "expected one on the host or on a device. Only anybatch.plan, with a model on meta, accepts it "
                "there"
            )
        if pin and leaf.device.type == "cpu" and leaf.layout is torch.strided:
            leaf = leaf if leaf.is_pinned() else leaf.contiguous().pin_memory()
        return leaf.to(device, non_blocking=is_accelerator(device))

    return batch if _is_there(batch, device) else map_leaves(move, batch)


def _is_there(batch: Any, device: torch.device) -> bool:
    if isinstance(batch, torch.Tensor):
        return batch.device == device
    has_objects = device.type != "cpu"  # objects are assumed to be on the host
    return all(
        home_of(leaf) in (None, device) and not (has_objects and moves_itself(leaf)) for _, _, leaf in leaves(batch)
    )


def _prefetched(micro_batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    stream = side_stream(device)
    coming = iter(micro_batches)

    def fetch() -> tuple[Any, Any] | None:
        for batch in coming:
            with running_in(stream):
                return batch, to_device(batch, device, pin=True)
        return None

    following = fetch()
    while following is not None:
        batch, on_device = following
        current = current_stream(device)
        current.wait_stream(stream)
        if on_device is not batch:
            has_objects = False
            for _, _, leaf in leaves(on_device):
                if home_of(leaf) == device:
                    (leaf.data if isinstance(leaf, PackedSequence) else leaf).record_stream(current)
                has_objects |= moves_itself(leaf)
            if has_objects:  # moved on the current stream, since record_stream can't reach their tensors
                on_device = to_device(on_device, device)
        del batch, following
        following = fetch()
        yield on_device
        del on_device
