"""One worker thread per device: torch's thread-local state in each, and a common end."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch

from anybatch.accelerators import current_stream, has_streams, running_in
from anybatch.memory.checkpointing import default_device
from anybatch.torch_private import hooks_on_saved_tensors


class DeviceThread(threading.Thread):
    """A thread that works on a device, with copies of what the thread that waits for it works with."""


def _state_here(home: torch.device, devices: Sequence[torch.device]) -> Callable[[torch.device], Any]:
    """A context for other threads with torch's thread-local state of this one, of the device ``home``.

    It has: whether gradients are taken, inference mode, autocast, the default device, the hooks on saved tensors, and
    on CUDA the stream. Anomaly detection, the default dtype and ``torch.backends`` are the process's.
    """
    kinds = {"cpu", home.type, *(one.type for one in devices)}
    autocast = {one: (torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in kinds}
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    default, hooks = default_device(), hooks_on_saved_tensors()
    streams = {one: current_stream(one) for one in devices if has_streams(one)}

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        for kind, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if device.type != home.type:
            torch.set_autocast_enabled(device.type, autocast[home.type][0])
        torch.set_autocast_cache_enabled(False)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            if default.type != "cpu":
                stack.enter_context(device if default == home else default)
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            if device in streams:
                stack.enter_context(running_in(streams[device]))
            yield

    return entered


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Keeps autocast from its cache, which all threads share and each empties when its own block ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def run_together(
    home: torch.device, works: Sequence[tuple[torch.device, Callable[[], None]]], stop: threading.Event
) -> list[BaseException | None]:
    """Runs the first function in this thread and each other one in its own thread, and waits for all.

    It gives what each of them failed with, ``None`` for one that went through or was stopped.

    Example:
        >>> found: list[int] = []
        >>> cpu = torch.device("cpu")
        >>> run_together(cpu, [(cpu, lambda: found.append(1)), (cpu, lambda: found.append(2))], threading.Event())
        [None, None]
        >>> sorted(found)
        [1, 2]
    """
    errors: list[BaseException | None] = [None] * len(works)
    ended = [threading.Event() for _ in works]
    entered = _state_here(home, [device for device, _ in works])

    def run(index: int) -> None:
        device, work = works[index]
        try:
            with entered(device) if index else nullcontext():
                work()
        except BaseException as error:  # noqa: BLE001  # it is raised in the thread that waits
            errors[index] = error
            stop.set()
        finally:
            ended[index].set()

    threads = [
        DeviceThread(target=copy_context().run, args=(run, index), name=f"anybatch {device}", daemon=True)
        for index, (device, _) in enumerate(works)
        if index > 0
    ]
    try:
        with without_autocast_cache():
            for thread in threads:
                thread.start()
            run(0)
            _wait(threads, ended[1:])
    except BaseException:  # Ctrl-C in between: what runs ends with its micro-batch
        stop.set()
        _wait(threads, ended[1:])
        raise
    return errors


def _wait(threads: Sequence[threading.Thread], ended: Sequence[threading.Event]) -> None:
    """Waits for those that were started. A join that Ctrl-C interrupts takes its thread for ended, so it comes last."""
    for thread, end in zip(threads, ended, strict=True):
        if thread.ident is not None:
            end.wait()
            thread.join()
