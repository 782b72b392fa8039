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
    """What was taken of one tensor.

    Args:
        row: its figures, on its device.
        live: which of its units are not zero for the whole batch.
        limit: ``"sigmoid"``, ``"tanh"`` or ``"softmax"`` where entries have limits.
        classes: how many entries a row of a softmax has.
        several: whether the batch has several rows.
    """

    row: torch.Tensor
    live: torch.Tensor
    limit: str = ""
    classes: int = 0
    several: bool = True


def take(tensor: torch.Tensor, axis: int, limit: str) -> Taken:
    """Looks at what a module gave.

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
    some = values[:: -(-rows // _ROWS)]
    some = some.reshape(some.shape[0], -1)
    figures = _of_sample(some[:, :: -(-some.shape[1] // _COLUMNS)].double())
    if values.numel() > _READ:
        values = _fewer(values, axis % values.dim())
    others = [dim for dim in range(values.dim()) if dim != axis % values.dim()]
    ends = torch.stack([values.amax(others), values.amin(others)])
    live = (ends != 0).any(0)
    figures += [ends.abs().amax().double(), live.sum(dtype=torch.float64)]
    return Taken(torch.stack(figures), live, limit, classes, rows > 1)


def _of_sample(sample: torch.Tensor) -> list[torch.Tensor]:
    """Percentiles, mean, deviation, zeros, spread over the batch, and the shares near one and near zero."""
    flat, size, mean = sample.flatten(), sample.abs(), sample.mean()  # double, so that a spread of 1e-9 is seen
    ordered = flat[:: -(-flat.numel() // _ORDERED)].sort().values
    percentiles = [ordered[round((len(ordered) - 1) * percent / 100)] for percent in PERCENTILES]
    spread = (sample - sample.mean(0)).square_().mean(0).sqrt_().mean() / size.mean()
    deviation = (flat - mean).square_().mean().sqrt_()
    shares = [one.double().mean() for one in (sample == 0, size > 1 - _NEAR, size < _NEAR)]
    return [*percentiles, mean, deviation, spread, *shares]


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
        percentiles: of the sample, as ``records.samples.PERCENTILES``.
        mean: of the sample.
        std: of the sample.
        spread: over the batch, divided by the mean absolute value.
        zeros: share of entries of the sample that are exactly zero.
        saturated: share near a limit.
        absmax: of all entries.
        dead: share of units that are zero for the whole batch.
        always_dead: share of units that were zero in all samples; 0 before there are enough of them.
    """

    percentiles: tuple[float, ...]
    mean: float
    std: float
    spread: float | None
    zeros: float
    saturated: float | None
    absmax: float
    dead: float
    always_dead: float

    @property
    def finite(self) -> bool:
        """Whether all entries are."""
        return self.absmax - self.absmax == 0


@dataclass(slots=True)
class Units:
    """Reads samples, and remembers over them which units have ever given something other than zero."""

    _live: dict[Any, torch.Tensor] = field(default_factory=dict)
    _counts: dict[Any, int] = field(default_factory=dict)

    def read(self, taken: Mapping[Any, Taken]) -> dict[Any, Figures]:
        """Adds a sample.

        Args:
            taken: of tensors, by keys that are the same in each sample.

        Returns:
            The figures of each tensor.
        """
        found, by_device = dict[Any, Figures](), dict[torch.device, list[Any]]()
        for key, one in taken.items():
            by_device.setdefault(one.row.device, []).append(key)
            known = self._live.get(key)
            is_same = known is not None and known.shape == one.live.shape and known.device == one.live.device
            self._live[key] = one.live | known if is_same and known is not None else one.live
            self._counts[key] = self._counts.get(key, 0) + 1
        for keys in by_device.values():  # one wait for each device
            ever = torch.stack([self._live[key].sum(dtype=torch.float64) for key in keys])
            rows = torch.cat([torch.stack([taken[key].row for key in keys]), ever[:, None]], 1).tolist()
            found |= {key: self._figures(key, taken[key], row) for key, row in zip(keys, rows, strict=True)}
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
