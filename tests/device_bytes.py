"""The bytes that each of several devices holds, where threads of the CPU stand in for them."""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import anybatch
from anybatch.parallel.devices import ModelCopy
from anybatch.tensors.dispatch import without_modes
from anybatch.update import overdevices
from device_models import devices_of
from planning_referee import Referee, alive_in, tensors_in


class OneDevice(Referee):
    """Counts what a thread makes, and what was there on its device; what comes from another device is not its own.

    Args:
        alive: tensors on the device.
        most: bytes after which memory runs out; ``None`` for never.
    """

    def __init__(self, alive: Iterable[torch.Tensor], most: int | None = None) -> None:
        self.most, self.raised = most, 0
        super().__init__(alive)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        elsewhere = given - self._sizes.keys()
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if StorageWeakRef(tensor.untyped_storage()) not in elsewhere:
                self._meet(tensor)
        self._look()
        if self.most is not None and self.live_bytes() > self.most:
            self.raised += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory (emulated): {self.live_bytes()} of {self.most} bytes")
        return result


@contextmanager
def _each_thread(others: list[OneDevice], most: int | None) -> Iterator[None]:
    work: Callable[..., None] = overdevices._Worker.work
    lock = threading.Lock()

    def metered(worker: Any, begin: Any) -> None:
        copy = worker.placement.copy
        if copy is None:  # whose thread is the caller's
            work(worker, begin)
            return
        with OneDevice((there for _, there in copy._leaves.values()), most) as mine:
            with lock:
                others.append(mine)
            work(worker, begin)

    refresh = ModelCopy.refresh

    def unseen(copy: ModelCopy, models: Any) -> None:
        with without_modes():  # what is made for another device is not of the home device
            refresh(copy, models)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overdevices._Worker, "work", metered)
        patched.setattr(ModelCopy, "refresh", unseen)
        yield


def device_peaks(step: anybatch.TrainStep, batch: Any, *, most: int | None = None) -> list[int]:
    """The most bytes of live tensors on each device during a call, the home device first.

    Args:
        step: with ``devices=``; the logical batch counts on the home device.
        batch: for the call.
        most: bytes after which memory runs out on a device.
    """
    was_enabled = gc.isenabled()
    others: list[OneDevice] = []
    gc.disable()
    try:
        with OneDevice(alive_in(step.model, step._optimizers, batch), most) as home, _each_thread(others, most):
            step(batch)
    finally:
        if was_enabled:
            gc.enable()
    assert len(others) >= len(devices_of(step).placements) - 1
    return [home.peak, *(other.peak for other in others)]
