"""The device that is planned for, and the budget that a user asks for on it."""

import contextlib
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.accelerators import capacity_of, free_bytes, is_accelerator, memory_of, synchronize
from anybatch.errors import BatchError
from anybatch.records.plans import Confidence
from anybatch.torch_private import clear_workspaces
from anybatch.units import parse_bytes, read_budget

logger = logging.getLogger(__name__)

_GIB = 2**30


@dataclass(frozen=True)
class Target:
    """A device that is planned for."""

    name: str  # such as "cpu", "cuda" or "h200"
    device_type: str  # "cpu", or such as "cuda"
    total: int  # bytes of its memory; 0 if they are not known
    is_present: bool  # whether the model lies on it, so that steps can be measured
    flops: float = 100e12  # operations a second of its matrix units in bfloat16, as its vendor states them
    bandwidth: float = 1e12  # bytes a second of its memory
    host_bandwidth: float = 20e9  # bytes a second between it and the host


# Dense bfloat16 (float16 where there is none), memory bandwidth and host link as in the vendors' data sheets.
_CARDS = {
    "t4": (16, 65e12, 320e9, 12e9),
    "v100": (32, 125e12, 900e9, 12e9),
    "rtx3060": (12, 51e12, 360e9, 20e9),
    "rtx3090": (24, 71e12, 936e9, 20e9),
    "rtx4070": (12, 117e12, 504e9, 20e9),
    "rtx4090": (24, 165e12, 1008e9, 20e9),
    "rtx5090": (32, 210e12, 1792e9, 40e9),
    "l4": (24, 121e12, 300e9, 20e9),
    "l40s": (48, 362e12, 864e9, 20e9),
    "a10": (24, 125e12, 600e9, 20e9),
    "a100": (80, 312e12, 2039e9, 20e9),
    "a100-40": (40, 312e12, 1555e9, 20e9),
    "h100": (80, 989e12, 3350e9, 40e9),
    "h200": (141, 989e12, 4800e9, 40e9),
    "b200": (180, 2250e12, 8000e9, 40e9),
}


def target_of(device: Any, home: torch.device) -> Target:
    """Reads what a user wants a plan for: where the model lies, a device, a card by its name, or a size as ``"24GiB"``.

    Raises:
        BatchError: it is nothing of the kind.

    Example:
        >>> target_of("h200", torch.device("cpu")).is_present, target_of(None, torch.device("cpu")).name
        (False, 'cpu')
    """
    if device is None or str(device) == str(home) or str(device) == home.type:
        return _present(home)
    if isinstance(device, str):
        key = device.lower().replace(" ", "").replace("nvidia", "").replace("_", "-").strip("-")
        if key in _CARDS:
            size, flops, bandwidth, host = _CARDS[key]
            return Target(key, "cuda", size * _GIB, False, flops, bandwidth, host)
        try:
            return Target(device, "cuda", parse_bytes(device), False)
        except ValueError:
            pass
    kind = str(device).partition(":")[0]
    if kind in ("cpu", "cuda"):
        return Target(kind, kind, 0, False)
    raise BatchError(
        f"device={device!r}; expected a device such as 'cpu' or 'cuda:0', a size such as '24GiB', or one of the cards "
        f"{', '.join(_CARDS)}"
    )


def _present(home: torch.device) -> Target:
    if is_accelerator(home):
        return Target(str(home), home.type, capacity_of(home)[1], True)
    if home.type == "meta":
        return Target("meta", "cuda", 0, False)
    return Target(home.type, "cpu", 0, home.type == "cpu")


def budget_of(memory: Any, target: Target, held: int, *, sharers: int = 1) -> int:
    """Reads a budget.

    Args:
        memory: bytes; a text such as ``"8GiB"``; ``"free"`` for what is free on the device; or a float up to 1.0, a
            share of the device.
        target: the device.
        held: bytes that the model, its gradients and its optimizer hold there already, which are part of a step.
        sharers: how many have the same memory, such as threads that stand for devices; each gets a part of a share of
            it, or of what is free. A number of bytes is for each.

    Raises:
        BatchError: it is nothing of the kind, or the size of the device is not known here.

    Example:
        >>> budget_of("8GiB", Target("cpu", "cpu", 0, True), 0)
        8589934592
    """
    budget = read_budget(memory)
    if budget is None:
        return _free_bytes(target) // sharers + (held if target.is_present else 0)
    if isinstance(budget, int):
        return budget
    return int(budget * _total_bytes(target) / sharers)


def _total_bytes(target: Target) -> int:
    if target.total:
        return target.total
    if target.device_type == "cpu":
        import psutil  # only budgets of the host need it

        return int(psutil.virtual_memory().total)
    raise BatchError(f"the size of {target.name} is not known here; give memory as bytes, such as '8GiB'")


def _free_bytes(target: Target) -> int:
    if target.is_present or target.device_type == "cpu":
        return free_bytes(torch.device(target.name))
    return _total_bytes(target)


_VARIES = 0.03


def margin_of(target: Target, confidence: Confidence, *, expandable: bool = False, replays: bool = False) -> float:
    """The share of a budget that is kept free, since a plan knows less than the whole truth.

    On the CPU live tensors are what is counted. An allocator of a device reserves more than is allocated; where that
    was not found by a replay of the allocations, it is guessed.
    """
    if target.device_type == "cpu":
        return {"predicted": 0.0, "measured": 0.02, "estimated": 0.1}[confidence]
    allocator = 0.0 if replays else 0.03 if expandable else 0.1
    return allocator + {"predicted": 0.0, "measured": 0.0, "estimated": 0.1}[confidence]


def segments_expand(target: Target) -> bool:
    """Whether the device's allocator was told to let its segments grow, which the environment says before it starts."""
    said = " ".join(os.environ.get(f"PYTORCH_{name}ALLOC_CONF", "") for name in ("CUDA_", "HIP_", ""))
    return target.is_present and "expandable_segments:true" in said.lower().replace(" ", "")


@functools.cache
def workspace_bytes(device: torch.device) -> int:
    """What the library for matrix products keeps of a device's memory from its first products on.

    cuBLAS has a workspace for each thread and stream, and a backward has a thread of its own. How large they are
    depends on the card and the environment, so a product and its backward are made and the allocator is asked.
    """
    if not is_accelerator(device):
        return 0
    clear_workspaces()
    before = memory_of(device).allocated
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for dtype in (torch.float32, torch.bfloat16):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # devices without some precision
                weight = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
                torch.nn.functional.linear(weight, weight, weight[0]).sum().backward()
                del weight
    synchronize(device)
    return max(0, memory_of(device).allocated - before)


def usable_bytes(
    budget: int, target: Target, confidence: Confidence, *, varies: bool = False, replays: bool = False
) -> int:
    """What of a budget a plan may take, the margin left free.

    More is left where what runs ``varies`` with the numbers in a sample, so that others take more than those measured,
    and where no replay says what the allocator reserves.
    """
    expandable = segments_expand(target)
    margin = margin_of(target, confidence, expandable=expandable, replays=replays) + (_VARIES if varies else 0.0)
    if target.device_type != "cpu" and not expandable and not replays:
        _tell_margin(round(100 * margin))
    return int(budget * (1 - margin))


@functools.cache  # once in a process, and not for each plan that is compared
def _tell_margin(percent: int) -> None:
    logger.info(
        "%d %% of the budget is kept free for what the allocator reserves; less with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True set before CUDA is used", percent,
    )  # fmt: skip
