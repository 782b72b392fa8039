"""How long a micro-batch takes on a device that is not at hand: good for comparing plans, not for the clock.

Each operation takes the longest of its arithmetic, its memory traffic and its launch (the roofline model: Williams,
Waterman and Patterson 2009).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from anybatch.planning.devices import Target
from anybatch.planning.fitting import Fit
from anybatch.planning.recipe import Recipe
from anybatch.planning.searching import Search, Splitting
from anybatch.planning.timing import Timed, Times
from anybatch.tensors.dispatch import unseen
from anybatch.tensors.meter import Recording, storages_of

_LAUNCH_SECONDS = 4e-6
_EFFICIENCY = 0.6  # of the vendor's figures that operations reach
_HALF = (torch.bfloat16, torch.float16)
_FULL_PRECISION = 0.5  # of the half-precision rate: what matrix units give in TF32


class CostRecording(Recording):
    """A recording that also counts arithmetic and bytes moved.

    Attributes:
        costs: for every operation its floating-point operations, at the rate of half precision, and its bytes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.costs: list[tuple[float, float]] = []

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super()._run(func, args, kwargs)
        packet = getattr(func, "overloadpacket", None)
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        outputs = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if _is_tensor(t)]
        if flops and outputs and outputs[0].dtype not in _HALF:
            flops /= _FULL_PRECISION
        inputs = [t for t in args if _is_tensor(t)]
        is_view = not _writes(func) and _lie_within(outputs, inputs)
        moved = 0 if is_view else sum(t.numel() * t.element_size() for t in [*inputs, *outputs])
        self.costs.append((float(flops), float(moved)))
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _lie_within(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether tensors take no memory of their own."""
    if not outputs:
        return True
    seen = {storage._cdata for tensor in inputs for storage in storages_of(tensor)}
    return all(storage._cdata in seen for tensor in outputs for storage in storages_of(tensor))


def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def estimated_times(search: Search, splittings: Sequence[Splitting], target: Target) -> Times:
    """Estimates every splitting's largest micro-batch.

    Args:
        search: has the profiles, made with ``CostRecording``.
        splittings: whose micro-batches are wanted.
        target: the device.
    """
    known: dict[float, Timed] = {}
    for splitting in splittings:
        profile, size = search.profile(Recipe(), splitting)
        costs = profile.fit.costs(size)
        if costs is None:
            return Times({})
        start, stop = profile.fit.trace.starts[-2:]
        known[search.worst(Recipe(), splitting).cost] = _timed(profile.fit, costs, start, stop, target)
    return Times(known)


@unseen
def _timed(fit: Fit, costs: torch.Tensor, start: int, stop: int, target: Target) -> Timed:
    flops, moved = costs.unbind(-1)
    longest = torch.maximum(flops / (target.flops * _EFFICIENCY), moved / (target.bandwidth * _EFFICIENCY))
    runs = (flops != 0) | (moved != 0)
    seconds: list[float] = torch.where(runs, longest.clamp(min=_LAUNCH_SECONDS), 0.0).tolist()
    forward: dict[str, float] = {}
    for span in fit.trace.spans:
        if start <= span.enter and span.leave <= stop:
            forward[span.name] = forward.get(span.name, 0.0) + sum(seconds[span.enter : span.leave])
    return Timed(sum(seconds[start:stop]), forward)
