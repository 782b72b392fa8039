"""Queries of accelerators: CUDA, ROCm, XPU, MPS and devices that register themselves with torch.

All of them go through ``torch.accelerator`` and torch's module for the type of device. No other file names a type of
device.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

HOST = frozenset({"cpu", "meta"})
"""Device types without memory of their own."""


def is_accelerator(device: torch.device | None) -> bool:
    """Whether a device has memory of its own; false for ``None``.

    Example:
        >>> is_accelerator(torch.device("cpu")), is_accelerator(torch.device("cuda", 0))
        (False, True)
    """
    return device is not None and device.type not in HOST


def module_of(device: torch.device) -> ModuleType:
    """torch's module for a device, such as ``torch.cuda``."""
    found: ModuleType = torch.get_device_module(device)
    return found


def usual() -> torch.device | None:
    """The accelerator of this machine, without an index; ``None`` if there is none."""
    if not torch.accelerator.is_available():  # asked first: torch 2.6 raises where there is none
        return None
    found: torch.device | None = torch.accelerator.current_accelerator()
    return found


def in_use() -> list[torch.device]:
    """All accelerators of this machine if this process has initialized them; initializes none."""
    kind = usual()
    if kind is None:
        return []
    begun = getattr(module_of(kind), "is_initialized", lambda: True)
    return [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())] if begun() else []


def release_cache() -> None:
    """Returns unused cached blocks of the accelerators in use to their devices."""
    if devices := in_use():
        getattr(module_of(devices[0]), "empty_cache", lambda: None)()


def synchronize(device: torch.device) -> None:
    """Waits for all queued work on a device."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory, as its caching allocator counts them."""

    allocated: int  # held by tensors
    reserved: int  # held by the allocator, cached blocks included
    peak_allocated: int  # the most since forget_peaks
    peak_reserved: int  # the same, of reserved


def memory_of(device: torch.device) -> DeviceMemory:
    """The bytes that a device's allocator reports; 0 for those that its module does not report."""
    module = module_of(device)
    names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    found = [getattr(module, name, None) for name in names]
    return DeviceMemory(*(0 if one is None else int(one(device)) for one in found))


def forget_peaks(device: torch.device) -> None:
    """Resets the peak statistics of a device's memory."""
    getattr(module_of(device), "reset_peak_memory_stats", lambda _: None)(device)


def capacity_of(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device; ``(0, 0)`` if its module does not report them."""
    tells = getattr(module_of(device), "mem_get_info", None)
    free, total = (0, 0) if tells is None else tells(device)
    return int(free), int(total)


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on a device, those that its allocator holds and nothing uses included, or on the host."""
    if is_accelerator(device):
        counted = memory_of(device)
        return capacity_of(device)[0] + counted.reserved - counted.allocated
    import psutil  # only here

    return int(psutil.virtual_memory().available)


class TakenBlock(NamedTuple):
    """A block of a device's memory."""

    address: int  # of its first byte
    size: int  # bytes
    is_used: bool  # by a tensor, or by one that was freed while queued work still reads it


class TakenSegment(NamedTuple):
    """A segment of the caching allocator: contiguous bytes from the device."""

    is_small: bool  # for blocks of at most 1 MiB
    stream: int  # the stream of its blocks
    is_expandable: bool  # it may grow
    blocks: list[TakenBlock]  # by address


def segments_of(device: torch.device) -> list[TakenSegment] | None:
    """The segments that the allocator of a device holds; ``None`` if its module does not report them."""
    tells = getattr(module_of(device), "memory_snapshot", None)
    if tells is None:
        return None
    found = []
    for segment in (one for one in tells() if one["device"] == (device.index or 0)):
        blocks, address = [], int(segment["address"])
        for block in segment["blocks"]:
            blocks.append(TakenBlock(address, int(block["size"]), block["state"] != "inactive"))
            address += blocks[-1].size
        is_small, grows = segment["segment_type"] == "small", bool(segment.get("is_expandable"))
        found.append(TakenSegment(is_small, int(segment["stream"]), grows, blocks))
    return found


@contextlib.contextmanager
def reserving_at_most(budget: int | None, device: torch.device) -> Iterator[None]:
    """Limits the bytes that a device's allocator may reserve in this block, where torch supports it.

    An optimizer that steps ends it, since an update that runs out can't be taken back.

    Args:
        budget: bytes; ``None`` for all memory of the device.
    """
    module = module_of(device)
    limit = getattr(module, "set_per_process_memory_fraction", None)
    total = capacity_of(device)[1]
    if limit is None or not total:
        yield
        return
    known = getattr(module, "get_per_process_memory_fraction", None)  # missing in older versions of torch
    before = 1.0 if known is None else known(device)
    # Rounded up, so that a segment that ends exactly at the budget is allowed.
    limit(min(before, math.nextafter((budget or total) / total, 2.0)), device)
    with contextlib.ExitStack() as stack:
        stack.callback(limit, before, device)
        stack.callback(register_optimizer_step_pre_hook(lambda *_: limit(before, device)).remove)
        yield


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether copies to and from a device can overlap with its computation."""
    if not is_accelerator(device):
        return False
    try:
        torch.Stream(device).record_event()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def current_stream(device: torch.device) -> Any:
    """The current stream of a device."""
    return torch.accelerator.current_stream(device)


@functools.cache
def side_stream(device: torch.device) -> Any:
    """A second stream of a device; always the same one, since the allocator caches memory per stream."""
    return torch.Stream(device)


@contextlib.contextmanager
def running_in(stream: Any) -> Iterator[None]:
    """Makes a stream the current one in this block."""
    device = torch.accelerator.current_device_index()
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def name_of(devices: Iterable[torch.device]) -> str:
    """The product name of the first device; ``"cpu"`` for none."""
    device = next(iter(devices), None)
    if device is None:
        return "cpu"
    tells = getattr(module_of(device), "get_device_name", None)
    return device.type if tells is None else str(tells(device))


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def has_cudnn(device: torch.device) -> bool:
    """Whether recurrent layers run in cuDNN, which draws its own dropout and wants weights in one chunk."""
    return device.type == "cuda" and torch.backends.cudnn.enabled


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def attention_kernels() -> tuple[bool, ...]:
    """Which attention kernels are enabled; on every device another kernel would save other tensors."""
    return tuple(bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")()) for name in _ATTENTION)


def set_attention_kernels(enabled: Iterable[bool]) -> None:
    """Restores what ``attention_kernels`` returned."""
    for name, value in zip(_ATTENTION, enabled, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
