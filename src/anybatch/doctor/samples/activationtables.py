"""Figures of outputs: a few numbers of each, made where it lies, and read together with those of all others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.records.samples import PERCENTILES

_NEAR = 1e-3
_LEAST_SAMPLES = 3
_ROWS, _COLUMNS = 16, 32  # of the sample of an output
_READ = 1 << 16  # entries of an output among which the largest and smallest are looked for
_ORDERED = 128  # entries of a sample whose percentiles are taken


@dataclass(slots=True, eq=False)
class Taken:
    """What was taken of one tensor."""

    sample: torch.Tensor  # some of its entries, samples of the batch times others, copied
    absmax: torch.Tensor  # of all entries
    live: torch.Tensor  # which of its units are not zero for the whole batch
    limit: str = ""  # ``"sigmoid"``, ``"tanh"`` or ``"softmax"`` where entries have limits
    classes: int = 0  # how many entries a row of a softmax has
    several: bool = True  # whether the batch has several rows


def take(tensor: torch.Tensor, axis: int, limit: str) -> Taken:
    """Looks at what a module gave."""
    values = tensor.detach()
    if not values.is_floating_point():
        values = values.float()
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    rows, classes = values.shape[0], values.shape[axis] if limit else 0
    some = values[:: -(-rows // _ROWS)]
    some = some.reshape(some.shape[0], -1)
    some = some[:, :: -(-some.shape[1] // _COLUMNS)].to(torch.float64, copy=True)  # so that a spread of 1e-9 is seen
    if values.numel() > _READ:
        values = _fewer(values, axis % values.dim())
    others = [dim for dim in range(values.dim()) if dim != axis % values.dim()]
    largest = values.abs().amax(others)  # of each unit
    return Taken(some, largest.amax().double(), largest != 0, limit, classes, rows > 1)


def _figures_of(samples: torch.Tensor) -> torch.Tensor:
    """Percentiles, mean, deviation, spread over the batch, zeros, and the shares near one and near zero of each."""
    flat = samples.flatten(1)
    size, mean = flat.abs(), flat.mean(1, keepdim=True)
    ordered = flat[:, :: -(-flat.shape[1] // _ORDERED)].sort(1).values
    places = [round((ordered.shape[1] - 1) * percent / 100) for percent in PERCENTILES]
    percentiles = torch.stack([ordered[:, place] for place in places], 1)  # a list of places would be waited for
    deviation = (flat - mean).square_().mean(1).sqrt_()
    spread = (samples - samples.mean(1, keepdim=True)).square_().mean(1).sqrt_().mean(1) / size.mean(1)
    shares = [one.double().mean(1) for one in (flat == 0, size > 1 - _NEAR, size < _NEAR)]
    return torch.cat([percentiles, mean, torch.stack([deviation, spread, *shares], 1)], 1)


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
    """What is known of one tensor."""

    percentiles: tuple[float, ...]  # of the sample, as ``records.samples.PERCENTILES``
    mean: float  # of the sample
    std: float  # of the sample
    spread: float | None  # over the batch, divided by the mean absolute value
    zeros: float  # share of entries of the sample that are exactly zero
    saturated: float | None  # share near a limit
    absmax: float  # of all entries
    dead: float  # share of units that are zero for the whole batch
    always_dead: float  # share of units that were zero in all samples; 0 before there are enough of them


@dataclass(slots=True)
class Units:
    """Reads samples, and remembers over them which units have ever given something other than zero."""

    _live: dict[Any, torch.Tensor] = field(default_factory=dict)
    _counts: dict[Any, int] = field(default_factory=dict)

    def read(self, taken: Mapping[Any, Taken]) -> dict[Any, Figures]:
        """Adds a sample of tensors, by keys that are the same in each sample."""
        found, alike = dict[Any, Figures](), dict[Any, list[Any]]()
        for key, one in taken.items():
            alike.setdefault((one.sample.device, one.sample.shape), []).append(key)
            known = self._live.get(key)
            is_same = known is not None and known.shape == one.live.shape and known.device == one.live.device
            self._live[key] = one.live | known if is_same and known is not None else one.live
            self._counts[key] = self._counts.get(key, 0) + 1
        rows = dict[torch.device, list[torch.Tensor]]()
        for (device, _), keys in alike.items():
            of_all = torch.stack([taken[key].absmax for key in keys])
            units = [one.sum(dtype=torch.float64) for key in keys for one in (taken[key].live, self._live[key])]
            figures = _figures_of(torch.stack([taken[key].sample for key in keys]))
            rows.setdefault(device, []).append(torch.cat([figures, of_all[:, None], torch.stack(units).view(-1, 2)], 1))
        read = {device: iter(torch.cat(parts).tolist()) for device, parts in rows.items()}  # one wait for each device
        for (device, _), keys in alike.items():
            found |= {key: self._figures(key, taken[key], next(read[device])) for key in keys}
        return found

    def _figures(self, key: Any, one: Taken, row: list[float]) -> Figures:
        mean, std, spread, zeros, near_one, near_zero, absmax, alive, ever = row[len(PERCENTILES) :]
        saturated = near_one + (near_zero if one.limit == "sigmoid" else 0.0) if one.limit else None
        if one.limit == "softmax":
            saturated = min(1.0, near_one * one.classes)
        units = len(one.live)
        return Figures(
            tuple(row[: len(PERCENTILES)]), mean, std,
            spread if one.several and spread == spread else 0.0 if one.several else None, zeros, saturated, absmax,
            dead=(units - alive) / units,
            always_dead=1.0 - ever / units if self._counts[key] >= _LEAST_SAMPLES else 0.0,
        )  # fmt: skip
