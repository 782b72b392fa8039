"""All that is asked of a device with a memory of its own: CUDA, ROCm, XPU, MPS, and those that register themselves.

Everything goes through ``torch.accelerator`` and the module that torch keeps for each type of device. Nothing else of
the package names a type of device, so what holds on one of them holds on all.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

HOST = frozenset({"cpu", "meta"})
"""Types of devices that have no memory of their own."""


def is_accelerator(device: torch.device | None) -> bool:
    """Whether a device has a memory of its own.

    Args:
        device: any; ``None`` is none.

    Example:
        >>> is_accelerator(torch.device("cpu")), is_accelerator(torch.device("cuda", 0))
        (False, True)
    """
    return device is not None and device.type not in HOST


def module_of(device: torch.device) -> ModuleType:
    """torch's own module for a device, such as ``torch.cuda``."""
    found: ModuleType = torch.get_device_module(device)
    return found


def usual() -> torch.device | None:
    """The accelerator of this machine, without its number; ``None`` on a machine that has none."""
    if not torch.accelerator.is_available():  # asked first: torch 2.6 raises where there is none
        return None
    found: torch.device | None = torch.accelerator.current_accelerator()
    return found


def in_use() -> list[torch.device]:
    """The accelerators that this process has begun to use; asking starts none."""
    kind = usual()
    if kind is None:
        return []
    begun = getattr(module_of(kind), "is_initialized", lambda: True)
    return [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())] if begun() else []


def release_cache() -> None:
    """Gives blocks that the allocators of the accelerators in use keep for later back to their devices."""
    if devices := in_use():
        getattr(module_of(devices[0]), "empty_cache", lambda: None)()


def synchronize(device: torch.device) -> None:
    """Waits for all work on a device."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory, as its allocator counts them."""

    allocated: int  # in tensors
    reserved: int  # that the allocator holds, for tensors and for later
    peak_allocated: int  # the most since the peaks were forgotten
    peak_reserved: int  # the same


def memory_of(device: torch.device) -> DeviceMemory:
    """What the allocator of a device counts; what its module does not tell is 0."""
    module = module_of(device)
    names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    found = [getattr(module, name, None) for name in names]
    return DeviceMemory(*(0 if one is None else int(one(device)) for one in found))


def forget_peaks(device: torch.device) -> None:
    """Lets the peaks of a device's memory begin anew."""
    getattr(module_of(device), "reset_peak_memory_stats", lambda _: None)(device)


def capacity_of(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on a device, and all that it has; ``(0, 0)`` where its module does not tell."""
    tells = getattr(module_of(device), "mem_get_info", None)
    free, total = (0, 0) if tells is None else tells(device)
    return int(free), int(total)


class TakenBlock(NamedTuple):
    """A block of a device's memory."""

    address: int  # where it begins
    size: int  # bytes
    is_used: bool  # whether a tensor lies there, or did so until work that was asked for is done


class TakenSegment(NamedTuple):
    """Bytes that an allocator has from its device in one piece; of an expandable segment, pages without a gap."""

    is_small: bool  # whether it is for blocks of at most 1 MiB
    stream: int  # whose blocks it holds
    is_expandable: bool  # whether it may grow
    blocks: list[TakenBlock]  # in order


def segments_of(device: torch.device) -> list[TakenSegment] | None:
    """What the allocator of a device holds; ``None`` where its module does not tell."""
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
    """Lets the allocator of a device reserve no more than a budget within its block, where it can be told to.

    Its peaks begin anew.

    Args:
        budget: bytes; ``None`` for all.
    """
    module = module_of(device)
    forget_peaks(device)
    limit = getattr(module, "set_per_process_memory_fraction", None)
    total = capacity_of(device)[1]
    if limit is None or not total:
        yield
        return
    known = getattr(module, "get_per_process_memory_fraction", None)  # not in every torch that is supported
    before = 1.0 if known is None else known(device)
    # A segment that ends at the budget is within it, whatever the share of the whole is rounded to.
    limit(min(before, math.nextafter((budget or total) / total, 2.0)), device)
    try:
        yield
    finally:
        limit(before, device)


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether copies to and from a device can run beside its computation."""
    if not is_accelerator(device):
        return False
    try:
        torch.Stream(device).record_event()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def current_stream(device: torch.device) -> Any:
    """The stream that a device computes in now."""
    return torch.accelerator.current_stream(device)


@functools.cache
def side_stream(device: torch.device) -> Any:
    """A stream of a device beside that it computes in; always the same, since memory is kept for each stream."""
    return torch.Stream(device)


@contextlib.contextmanager
def running_in(stream: Any) -> Iterator[None]:
    """Lets the work of its block go into a stream."""
    device = torch.accelerator.current_device_index()
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def name_of(devices: Iterable[torch.device]) -> str:
    """What a person calls the first of some devices; ``"cpu"`` for none."""
    device = next(iter(devices), None)
    if device is None:
        return "cpu"
    tells = getattr(module_of(device), "get_device_name", None)
    return device.type if tells is None else str(tells(device))


def widest_float(device: torch.device) -> torch.dtype:
    """The floating point type of most bits that a device computes in; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def has_cudnn(device: torch.device) -> bool:
    """Whether recurrent layers run in cuDNN there, which draws its dropout by itself and wants weights in one chunk."""
    return device.type == "cuda" and torch.backends.cudnn.enabled


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels of attention a forward may choose from, on any device: another one would save other tensors."""
    return tuple(bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")()) for name in _ATTENTION)


def set_attention_kernels(enabled: Iterable[bool]) -> None:
    """Lets a forward choose from what ``attention_kernels`` gave."""
    for name, value in zip(_ATTENTION, enabled, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
