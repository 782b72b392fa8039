"""Figures of many outputs at once: those of one shape are stacked, so that few operations do for all of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_NEAR = 1e-3
_LEAST_SAMPLES = 3


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
    """

    high: torch.Tensor
    low: torch.Tensor
    sample: torch.Tensor
    limit: str = ""
    classes: int = 0
    several: bool = True


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
    """

    mean: float
    std: float
    zeros: float
    spread: float | None
    saturated: float | None
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
    among = torch.sub(samples, samples.mean(1, keepdim=True), out=room)
    deviation = samples.sub_(mean[:, None, None]).square_().mean((1, 2)).sqrt()
    spread = among.square_().mean(1).sqrt_().mean(1) / size.mean((1, 2))
    columns = torch.stack([mean, deviation, zeros, spread, *limits], 1)
    for one, row in zip(group, columns.tolist(), strict=True):
        saturated = None
        if one.limit == "softmax":
            saturated = min(1.0, row[4] * one.classes)
        elif one.limit:
            saturated = row[4] + (row[5] if one.limit == "sigmoid" else 0.0)
        spread_of_it = row[3] if one.several and row[3] == row[3] else 0.0 if one.several else None
        yield Figures(row[0], row[1], row[2], spread_of_it, saturated)


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
            taken: of tensors, by a key that is the same in each sample.

        Returns:
            The figures of each tensor.
        """
        found: dict[Any, Figures] = {}
        for group in _alike({key: one.sample for key, one in taken.items()}).values():
            found.update(zip(group, _figures([taken[key] for key in group]), strict=True))
        for kind, group in _alike({key: one.high for key, one in taken.items()}).items():
            self._look_at_ends(kind, group, taken, found)
        return found

    def _look_at_ends(
        self, kind: Any, group: list[Any], taken: Mapping[Any, Taken], found: dict[Any, Figures]
    ) -> None:  # fmt: skip
        """What the largest and smallest entries of units tell of tensors with as many units."""
        ends = torch.stack([*[taken[key].high for key in group], *[taken[key].low for key in group]])
        units = ends.shape[1]
        ends = ends.view(2, len(group), units)
        largest, live = ends.abs().amax((0, 2)), (ends != 0).any(0)
        now = live.sum(1, dtype=torch.float64)
        known = self._groups.get(kind)
        if known is None or known[0] != group:
            self._dissolve(kind)
            for row, key in enumerate(group):
                if key in self._single and self._single[key].shape == live[row].shape:
                    live[row] |= self._single[key]
        else:
            live |= known[1]
        self._groups[kind] = group, live
        rows = torch.stack([largest.double(), now, live.sum(1, dtype=torch.float64)], 1).tolist()
        for key, (top, alive, ever) in zip(group, rows, strict=True):
            one, count = found[key], self._counts.get(key, 0) + 1
            self._counts[key] = count
            one.absmax, one.finite = top, top - top == 0
            one.dead = (units - alive) / units
            one.always_dead = 1.0 - ever / units if count >= _LEAST_SAMPLES else 0.0

    def _dissolve(self, kind: Any) -> None:
        """Keeps what is known by key, since other modules ran this time."""
        group, live = self._groups.pop(kind, ([], torch.empty(0)))
        self._single |= dict(zip(group, live, strict=True)) if group else {}
