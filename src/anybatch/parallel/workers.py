"""One worker thread per device: torch's thread-local state in each, and a common end."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context

import torch

from anybatch.accelerators import current_stream, has_streams, running_in
from anybatch.memory.replay import default_device
from anybatch.torch_private import hooks_on_saved_tensors


class DeviceThread(threading.Thread):
    """A thread that works on a device, with copies of what the thread that waits for it works with."""


class ThreadState:
    """torch's thread-local state of the thread that creates this.

    These are: whether gradients are taken, inference mode, autocast, the default device, the hooks on saved tensors,
    and on CUDA the stream. Anomaly detection, the default dtype and ``torch.backends`` are the process's.

    Args:
        home: the device of this thread.
        devices: of the threads in which it is wanted.
    """

    def __init__(self, home: torch.device, devices: Sequence[torch.device]) -> None:
        self._home = home
        self._gradients = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = {kind: _autocast_of(kind) for kind in {"cpu", home.type, *(one.type for one in devices)}}
        self._default = default_device()
        self._hooks = hooks_on_saved_tensors()
        self._streams = {one: current_stream(one) for one in devices if has_streams(one)}

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Sets this state in the calling thread, which ends afterwards."""
        for kind, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if device.type != self._home.type:
            torch.set_autocast_enabled(device.type, self._autocast[self._home.type][0])
        torch.set_autocast_cache_enabled(False)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            if self._default.type != "cpu":
                stack.enter_context(device if self._default == self._home else self._default)
            if self._hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            if device in self._streams:
                stack.enter_context(running_in(self._streams[device]))
            yield


def _autocast_of(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


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

    Returns:
        What each of them failed with, ``None`` for one that went through or was stopped.

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
    state = ThreadState(home, [device for device, _ in works])

    def run(index: int) -> None:
        device, work = works[index]
        try:
            if index == 0:
                work()
            else:
                with state.entered(device):
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
