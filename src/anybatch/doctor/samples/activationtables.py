"""Figures of many outputs at once: those of one shape are stacked, so that few operations do for all of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.records.samples import PERCENTILES

_NEAR = 1e-3
_LEAST_SAMPLES = 3
_ROWS, _COLUMNS = 16, 32  # of the sample of an output
_READ = 1 << 16  # entries of an output among which the largest and smallest are looked for
_ORDERED = 128  # entries of a sample whose percentiles are taken
_COPIED = 1 << 11  # entries up to which all are copied, which takes less time than the operations that it saves


@dataclass(slots=True, eq=False)
class Taken:
    """What was taken of one tensor.

    Args:
        high: the largest entry of each unit.
        low: the smallest entry of each unit.
        sample: rows of the batch and columns of the rest.
        limit: ``"sigmoid"``, ``"tanh"`` or ``"softmax"`` where entries have limits.
        classes: how many entries a row of a softmax has.
        several: whether the batch has several rows.
        axis: of the units of a small tensor, of which all three are a copy until it is read together with others.
    """

    high: torch.Tensor
    low: torch.Tensor
    sample: torch.Tensor
    limit: str = ""
    classes: int = 0
    several: bool = True
    axis: int | None = None


def take(tensor: torch.Tensor, axis: int, limit: str) -> Taken:
    """Copies what is looked at after the forward.

    Args:
        tensor: a result of a module.
        axis: of the units.
        limit: of its entries.
    """
    values = tensor.detach()
    if not values.is_floating_point():
        values = values.float()
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    rows, classes = values.shape[0], values.shape[axis] if limit else 0
    is_contiguous = values.is_contiguous()
    if is_contiguous and values.numel() <= _COPIED:
        copy = values.clone()
        return Taken(copy, copy, copy, limit, classes, rows > 1, axis)
    if is_contiguous:
        sample = values.as_strided(*_spread(rows, values.numel() // rows)).clone()
    else:
        some = values[:: -(-rows // _ROWS)]
        some = some.reshape(some.shape[0], -1)
        sample = some[:, :: -(-some.shape[1] // _COLUMNS)].clone()
    if values.numel() > _READ:
        values = _fewer(values, axis % values.dim())
    others = _others(values.dim(), axis)
    return Taken(values.amax(others), values.amin(others), sample, limit, classes, rows > 1)


def _others(dims: int, axis: int) -> int | list[int]:
    """The dims that are not that of the units."""
    return 0 if dims == 2 and axis != 0 else [dim for dim in range(dims) if dim != axis % dims]


def _spread(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size and the strides of evenly spaced rows and columns of a contiguous matrix."""
    row, column = -(-rows // _ROWS), -(-columns // _COLUMNS)
    return (-(-rows // row), -(-columns // column)), (row * columns, column)


def _divide(taken: Iterable[Taken]) -> None:
    """Takes of small tensors what was taken of the large ones at once, with few operations for those of one shape."""
    groups: dict[Any, list[Taken]] = {}
    for one in taken:
        if one.axis is not None:
            groups.setdefault((one.high.shape, one.high.dtype, one.high.device, one.axis), []).append(one)
    for (shape, _, _, axis), group in groups.items():
        copies = torch.stack([one.high for one in group])
        rows, count = shape[0], len(group)
        size, strides = _spread(rows, shape.numel() // rows)
        dims = _others(len(shape), axis)
        others = 1 if isinstance(dims, int) else [dim + 1 for dim in dims]
        parts = (
            copies.amax(others).unbind(),
            copies.amin(others).unbind(),
            copies.as_strided((count, *size), (shape.numel(), *strides)).unbind(),
        )
        for one, high, low, sample in zip(group, *parts, strict=True):
            one.high, one.low, one.sample, one.axis = high, low, sample, None


def _fewer(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Evenly spaced entries of each unit, thinned along positions before samples of the batch."""
    steps, left = [1] * values.dim(), values.numel()
    while left > _READ:
        lengths = {dim: values.shape[dim] // steps[dim] // (4 if dim == 0 else 1) for dim in range(len(steps))}
        longest = max((dim for dim in lengths if dim != axis), key=lengths.__getitem__)
        if values.shape[longest] < 2 * steps[longest]:
            break
        steps[longest] *= 2
        left //= 2
    return values[tuple([slice(None, None, step) for step in steps])]


@dataclass(slots=True, eq=False)
class Figures:
    """What is known of one tensor.

    Args:
        mean: of the sample.
        std: of the sample.
        zeros: share of entries of the sample that are exactly zero.
        spread: over the batch, divided by the mean absolute value.
        saturated: share near a limit.
        absmax: of all entries.
        dead: share of units that are zero for the whole batch.
        always_dead: share of units that were zero in all samples; 0 before there are enough of them.
        finite: whether all entries are.
        percentiles: of the sample, as ``records.samples.PERCENTILES``.
    """

    mean: float
    std: float
    zeros: float
    spread: float | None
    saturated: float | None
    percentiles: tuple[float, ...]
    absmax: float = 0.0
    dead: float = 0.0
    always_dead: float = 0.0
    finite: bool = True


def _figures(group: list[Taken]) -> Iterator[Figures]:
    samples = _stacked([one.sample for one in group]).double()  # so that a spread of one part in 1e9 is seen
    mean, size, room = samples.mean((1, 2)), samples.abs(), torch.empty_like(samples)
    zeros = torch.eq(samples, 0, out=room).mean((1, 2)).to(torch.get_default_dtype())
    limits = []
    if any(one.limit for one in group):
        limits = [torch.gt(size, 1 - _NEAR, out=room).mean((1, 2)), torch.lt(size, _NEAR, out=room).mean((1, 2))]
    percentiles = _percentiles(samples.flatten(1))
    among = torch.sub(samples, samples.mean(1, keepdim=True), out=room)
    deviation = samples.sub_(mean[:, None, None]).square_().mean((1, 2)).sqrt()
    spread = among.square_().mean(1).sqrt_().mean(1) / size.mean((1, 2))
    columns = torch.stack([mean, deviation, zeros, spread, *limits], 1)
    for one, row, percents in zip(group, columns.tolist(), percentiles, strict=True):
        saturated = None
        if one.limit == "softmax":
            saturated = min(1.0, row[4] * one.classes)
        elif one.limit:
            saturated = row[4] + (row[5] if one.limit == "sigmoid" else 0.0)
        spread_of_it = row[3] if one.several and row[3] == row[3] else 0.0 if one.several else None
        yield Figures(row[0], row[1], row[2], spread_of_it, saturated, tuple(percents))


def _percentiles(samples: torch.Tensor) -> list[list[float]]:
    """Percentiles of some evenly spaced entries of each row."""
    some = samples[:, :: -(-samples.shape[1] // _ORDERED)].to(torch.get_default_dtype()).sort(1).values
    places = [round((some.shape[1] - 1) * percent / 100) for percent in PERCENTILES]
    found: list[list[float]] = some[:, places].tolist()
    return found


def _alike(taken: Mapping[Any, torch.Tensor]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for key, tensor in taken.items():
        groups.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(key)
    return groups


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(tensors)
    return stacked if stacked.dtype in (torch.float32, torch.float64) else stacked.float()


@dataclass(slots=True)
class Units:
    """Reads samples, and remembers over them which units have ever given something other than zero."""

    _groups: dict[Any, tuple[list[Any], torch.Tensor]] = field(default_factory=dict)
    _single: dict[Any, torch.Tensor] = field(default_factory=dict)
    _counts: dict[Any, int] = field(default_factory=dict)

    def read(self, taken: Mapping[Any, Taken]) -> dict[Any, Figures]:
        """Adds a sample.

        Args:
            taken: of tensors, by keys that are the same in each sample.

        Returns:
            The figures of each tensor.
        """
        _divide(taken.values())
        found: dict[Any, Figures] = {}
        for group in _alike({key: one.sample for key, one in taken.items()}).values():
            found.update(zip(group, _figures([taken[key] for key in group]), strict=True))
        for kind, group in _alike({key: one.high for key, one in taken.items()}).items():
            self._look_at_ends(kind, group, taken, found)
        return found

    def _look_at_ends(
        self, kind: Any, keys: list[Any], taken: Mapping[Any, Taken], found: dict[Any, Figures]
    ) -> None:  # fmt: skip
        """What the largest and smallest entries of units tell of tensors with as many units."""
        ends = torch.stack([*[taken[key].high for key in keys], *[taken[key].low for key in keys]])
        units = ends.shape[1]
        ends = ends.view(2, len(keys), units)
        largest, live = ends.abs().amax((0, 2)), (ends != 0).any(0)
        now = live.sum(1, dtype=torch.float64)
        self._live_so_far(kind, keys, live)
        rows = torch.stack([largest.double(), now, live.sum(1, dtype=torch.float64)], 1).tolist()
        for key, (top, alive, ever) in zip(keys, rows, strict=True):
            one, count = found[key], self._counts.get(key, 0) + 1
            self._counts[key] = count
            one.absmax, one.finite = top, top - top == 0
            one.dead = (units - alive) / units
            one.always_dead = 1.0 - ever / units if count >= _LEAST_SAMPLES else 0.0

    def _live_so_far(self, kind: Any, keys: list[Any], live: torch.Tensor) -> None:
        """Adds the units to those that have been live in the samples before."""
        known = self._groups.get(kind)
        if known is None or known[0] != keys:
            self._dissolve(kind)
            for row, key in enumerate(keys):
                if key in self._single and self._single[key].shape == live[row].shape:
                    live[row] |= self._single[key]
        else:
            live |= known[1]
        self._groups[kind] = keys, live

    def _dissolve(self, kind: Any) -> None:
        """Keeps what is known by key, since other modules ran this time."""
        group, live = self._groups.pop(kind, ([], torch.empty(0)))
        self._single |= dict(zip(group, live, strict=True)) if group else {}
