"""Bounds of what samples give together, which micro-batches have in common only until one of them crosses the bound.

A clamp of the mean over a batch is the mean of the clamps of its parts as long as none of them is at the bound. So a
comparison of some samples may find nothing, and a later batch gets another gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.checking.standins import argument
from anybatch.tensors.dispatch import Mode
from anybatch.tensors.graph import in_backward
from anybatch.tensors.shards import local_of

_MOST = 1024  # entries: what samples give together is small, and the values of an activation are not looked at
_SAME = 1e-5  # relative: the same numbers but for rounding, of parameters and constants
_NEAR = 10  # times as far as the parts differ: a guard that no training comes near to, as loss > 1e6, is no branch
_COMPARED = {getattr(torch.ops.aten, name): f"a comparison ({name})" for name in ("ge", "gt", "le", "lt")}
_AT_A_BOUND = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "abs", "abs_", "amax", "amin", "clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_",
        "hardtanh", "leaky_relu", "max", "maximum", "median", "min", "minimum", "relu", "relu_", "threshold", "where",
    )
)  # fmt: skip
_RANKING = frozenset(getattr(torch.ops.aten, name) for name in ("argsort", "cumsum", "kthvalue", "sort", "topk"))
_NOTED = _AT_A_BOUND | _RANKING | {*_COMPARED}


class Bound(NamedTuple):
    """One operation that is linear up to a bound."""

    name: str  # of the operation
    shapes: list[torch.Size]  # of what it is given
    totals: list[torch.Tensor]  # of the numbers of each of these, which may lie on several devices
    limit: float | None = None  # the number of a comparison; ``None`` for other operations


class Bounds(Mode):
    """Notes the operations of a forward that are linear up to a bound, of few numbers that have a gradient."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met: list[Bound] = []  # in their order
        self.ranks = False  # whether samples are put in an order, or counted on, as by a number that is taken of them
        # runs an operation in the place of torch, as ``__torch_dispatch__`` of another mode would
        self.run: Callable[..., Any] | None = None
        self._bounded: Any = None  # what the last operation gave, if it was one of these

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Notes the operation, and runs it."""
        packet, last, self._bounded = getattr(func, "overloadpacket", None), self._bounded, None
        is_noted = False
        if packet in _NOTED:
            self.ranks = self.ranks or (packet in _RANKING and _is_along_samples(func, args, kwargs or {}))
            is_noted = packet not in _RANKING and not in_backward() and self._note(packet, args)
        elif packet is torch.ops.aten.ne and last is not None and args[0] is last:  # ``isfinite`` takes the abs
            self.met.pop()
        result = func(*args, **(kwargs or {})) if self.run is None else self.run(func, types, args, kwargs)
        self._bounded = result if is_noted else None
        return result

    def _note(self, packet: Any, args: Sequence[Any]) -> bool:
        given = [one for one in args if isinstance(one, torch.Tensor) and one.requires_grad]
        if not (given and torch.is_grad_enabled()) or not all(map(_is_small, given)):
            return False
        limit, name = None, packet.__name__.rstrip("_")
        if packet in _COMPARED:
            limit, name = (args[1] if isinstance(args[1], (int, float)) else None), _COMPARED[packet]
            if not limit:  # nor 0, which a loss is often checked to be above
                return False
        totals = [local_of(one).detach().sum(dtype=torch.float32) for one in given]
        self.met.append(Bound(name, [one.shape for one in given], totals, limit))
        return True


def _is_along_samples(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    own, dim = args[0], argument(func, args, kwargs, "dim", -1)
    is_of_lengths = func.overloadpacket is not torch.ops.aten.cumsum and not own.is_floating_point()
    return own.dim() > 0 and not dim % own.dim() and not is_of_lengths and not in_backward()


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel() <= _MOST


def bound_of_samples(whole: Sequence[Bound], parts: Sequence[Bound], number: int) -> str:
    """The name of the first operation that bounds what the samples give together; ``""`` if there is none.

    That has one shape for all samples and for each part, where an activation has a row for each sample, and other
    numbers, where what comes of parameters alone has the same.
    """
    if number * len(whole) != len(parts):  # samples may be gone through one by one
        return ""
    for at, one in enumerate(whole):
        others = parts[at :: len(whole)]
        if all((other.name, other.shapes) == (one.name, one.shapes) for other in others):
            values = [sum(map(float, bound.totals)) for bound in (one, *others)]
            spread = max(values) - min(values)
            is_far = one.limit is not None and min(abs(value - one.limit) for value in values) > _NEAR * spread
            if spread > _SAME * max(map(abs, values)) and not is_far:
                return one.name
    return ""
