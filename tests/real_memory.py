"""What torch's allocator takes on the CPU while something runs, whatever modes are on or off: a referee for planning.

It sees what is allocated and freed within an operation too, so it may show somewhat more than live tensors do.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def allocator_peak(work: Callable[[], object], alive: Iterable[Tensor]) -> int:
    """The most bytes that are allocated while something runs, with those of tensors that are there already.

    Args:
        work: what is measured.
        alive: tensors that are there already; what the work frees of them is not seen to go.
    """
    current = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}.values())
    peak = current
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    for change in memory_events(profile):
        current += change
        peak = max(peak, current)
    return peak


def memory_events(profile: Any) -> Iterator[int]:
    """What was allocated (above zero) and freed, in the order of time."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    yield from (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
