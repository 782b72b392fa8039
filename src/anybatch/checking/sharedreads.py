"""Numbers over a batch that a loss reads, and what it does where they are others.

A branch on ``loss.item()`` or on ``mask.any()``, or a clamp of a detached mean, gives micro-batches the whole batch's
gradient until one of them lies on the other side. That a number is read shows nothing, since most are only logged. So
the same samples run again with other numbers in their places: where a little does not change the loss and more does,
the loss has a bound in between.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anybatch.tensors.graph import in_backward
from anybatch.tensors.shards import local_of
from anybatch.tensors.sideeffects import is_users

SAME = 1e-5
"""Relative difference of the same numbers but for rounding, of parameters and constants."""
NEAR = 10
"""Times as far as the parts differ: a guard that no training comes near to, as loss > 1e6, is no branch."""
_A_LITTLE = 1e-3  # of a change, which shows whether the loss is continuous in what is read
_TIMES = 2  # the size of a number is added to it: the numbers of later batches may all be others
_KEPT = 0.1  # of a number, which keeps its sign: a loss is often checked to be above 0
_NEARER = (1, 0.5, 0.25, 0.125)  # of a change that leaves everything out
_FEW = 4  # changes that are asked about one by one
aten = torch.ops.aten
_OF_ITEMS = frozenset((aten.all, aten.any, aten.count_nonzero, aten.sum))
_NOT_FINITE = (math.inf, -math.inf)


class _Items(NamedTuple):
    """What a scalar was made of: whether any, whether all, or how many of some items are so."""

    found: torch.Tensor
    number: int
    is_all: bool

    def is_nothing(self) -> bool:
        """Whether there are none: more samples would have some, or some that are not so."""
        return bool(self.found.item() == self.is_all)


_GUARD = "drawn, or whether numbers are finite"


class Read(NamedTuple):
    """One number that the loss reads, or what an operation with a bound is given without a gradient.

    Args:
        name: of the operation, and the line that runs it.
        shape: of what it is given.
        total: of the numbers.
        items: of which nothing was found; 0 for a number.
    """

    name: str
    shape: torch.Size
    total: float | torch.Tensor
    items: int = 0


class Reads:
    """Notes what a forward reads, and changes it.

    Args:
        shifts: what is added to the numbers of some reads, by their places in the order of all.

    Attributes:
        met: in their order.
    """

    def __init__(self, shifts: Mapping[int, float] | None = None) -> None:
        self.met: list[Read] = []
        self._shifts = shifts or {}
        self._made_of: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}

    def given(self, name: str, args: Sequence[Any]) -> Sequence[Any]:
        """Notes the numbers that an operation with a bound is given, and changes them.

        Args:
            name: of the operation.
            args: its arguments.
        """
        changed = list(args)
        for at, one in enumerate(args):
            if not isinstance(one, torch.Tensor) or not one.is_floating_point() or self._source(one) is _GUARD:
                continue
            if one.requires_grad and one.numel() > 1:  # an activation
                continue
            if shift := self._shifts.get(len(self.met)):
                changed[at] = one + shift
            total = local_of(one).detach().sum(dtype=torch.float32)
            self.met.append(Read(f"{name}{_line()}", one.shape, total))
        return changed

    def read(self, tensor: Any, value: Any) -> Any:
        """Notes a number that leaves its tensor, and changes it.

        Args:
            tensor: what is read.
            value: its number.
        """
        source = self._source(tensor)
        is_number = isinstance(value, float) and math.isfinite(value)
        if source is _GUARD or not (is_number or isinstance(source, _Items)) or in_backward():
            return value
        shift = self._shifts.get(len(self.met))
        items = source.number if isinstance(source, _Items) and source.is_nothing() else 0
        self.met.append(Read(f"a condition{_line()}", tensor.shape, float(value), items))
        if not shift:
            return value
        return not value if isinstance(value, bool) else value + type(value)(shift)

    def learn(self, func: Any, args: Sequence[Any], result: torch.Tensor) -> None:
        """Notes what a scalar, or a mask, is made of.

        Args:
            func: the operation.
            args: its arguments.
            result: what it gave.
        """
        packet, tensors = func.overloadpacket, [one for one in args if isinstance(one, torch.Tensor)]
        sources = [self._source(one) for one in tensors]
        source = next((one for one in sources if one is not None), None)
        if _GUARD in sources or torch.Tag.nondeterministic_seeded in func.tags or _asks_if_finite(packet, args):
            source = _GUARD
        elif packet in _OF_ITEMS and result.numel() == 1 and tensors and not tensors[0].is_floating_point():
            source = _Items(result, tensors[0].numel(), packet is aten.all)
        if source is not None:
            self._made_of[id(result)] = weakref.ref(result), source

    def _source(self, tensor: Any) -> Any:
        known, source = self._made_of.get(id(tensor), (None, None))
        return source if known is not None and known() is tensor else None


def _asks_if_finite(packet: Any, args: Sequence[Any]) -> bool:
    if packet in (aten.isnan, aten.isinf):
        return True
    if packet not in (aten.eq, aten.ne) or len(args) < 2:
        return False
    return args[0] is args[1] or (isinstance(args[1], float) and args[1] in _NOT_FINITE)


def _line() -> str:
    """Where the user's code runs what runs now."""
    frame: Any = sys._getframe(2)
    while frame is not None and not is_users(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"


def is_of_nothing(losses: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Whether a loss is no number that was one before, as a mean over no items, which have no gradient to show it."""
    return any(math.isnan(value) and not math.isnan(before.get(name, math.nan)) for name, value in losses.items())


def read_of_samples(
    whole: Sequence[Read], parts: Sequence[Read], number: int, changes: Callable[[Mapping[int, float]], bool | None]
) -> str:
    """The name of the first read on which the loss depends by a bound that no part has crossed.

    Args:
        whole: what was read with all samples.
        parts: the same in parts, one after the other.
        number: of parts.
        changes: runs the parts with other numbers in the places of some reads, and says whether that gives another
            gradient; ``None`` where it fails or leaves everything out.

    Returns:
        The name; ``""`` if there is none.
    """
    if number * len(whole) != len(parts):  # samples may be gone through one by one
        return ""
    found = [_moves(one, parts[at :: len(whole)]) for at, one in enumerate(whole)]
    for way in (0, 1):
        each = [(whole[at].name, _placed(at, moves[way], len(whole))) for at, moves in enumerate(found) if moves[way]]
        if not each or changes({at: shift for _, shifts in each for at, shift in shifts.items()}) is False:
            continue
        for name, shifts in each[:_FEW]:
            if _has_a_bound(shifts, whole, changes):
                return name
    return ""


def _has_a_bound(
    shifts: Mapping[int, float], whole: Sequence[Read], changes: Callable[[Mapping[int, float]], bool | None]
) -> bool:
    """Whether other numbers change the loss, and a little does not, which whole and parts would have shown."""
    if any(whole[at % len(whole)].items for at in shifts):
        return changes(shifts) is True
    for times in _NEARER:
        is_changed = changes({at: times * shift for at, shift in shifts.items()})
        if is_changed is not None:
            return is_changed and changes({at: _A_LITTLE * shift for at, shift in shifts.items()}) is False
    return False


def _placed(at: int, shifts: Iterable[float], step: int) -> dict[int, float]:
    return {at + turn * step: shift for turn, shift in enumerate(shifts)}


def _moves(one: Read, others: Sequence[Read]) -> tuple[list[float], list[float]]:
    """What may be added to a read in each part: more, and less; nothing where it is not the samples'."""
    if any((other.name, other.shape) != (one.name, one.shape) for other in others):
        return [], []
    if one.items or any(other.items for other in others):
        found_nothing = all(other.items and other.items != one.items for other in others)
        return [1.0] * len(others) if one.items and found_nothing else [], []
    values = [float(read.total) / max(1, one.shape.numel()) for read in (one, *others)]
    spread, largest = max(values) - min(values), max(map(abs, values))
    if not math.isfinite(spread) or spread <= SAME * largest:
        return [], []
    most = max(NEAR * spread, _TIMES * largest)
    up = [most if value >= 0 else min(most, (_KEPT - 1) * value) for value in values[1:]]
    down = [-most if value <= 0 else -min(most, (1 - _KEPT) * value) for value in values[1:]]
    return up, down
