"""Figures of many outputs at once: those of one shape are stacked, so that few operations do for all of them."""

from collections.abc import Iterable, Mapping
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


def tabled(taken: list[Taken]) -> list[tuple[Taken, dict[str, Any]]]:
    """The figures of each tensor.

    Args:
        taken: of the tensors.

    Returns:
        Each with ``mean``, ``std``, ``absmax``, ``zeros``, ``dead``, ``saturated``, ``spread`` and ``finite``.
    """
    rows: dict[int, dict[str, Any]] = {id(one): {} for one in taken}
    for group in _alike(taken, lambda one: one.high):
        high, low = _stacked(one.high for one in group), _stacked(one.low for one in group)
        largest = torch.maximum(high.abs(), low.abs()).amax(1)
        dead = ((high == 0) & (low == 0)).double().mean(1)
        for one, top, share in zip(group, *torch.stack([largest.double(), dead]).tolist(), strict=True):
            rows[id(one)] |= {"absmax": top, "dead": share, "finite": top - top == 0}
    for group in _alike(taken, lambda one: one.sample):
        for one, figures in zip(group, _figures(group), strict=True):
            rows[id(one)] |= figures
    return [(one, rows[id(one)]) for one in taken]


def _figures(group: list[Taken]) -> Iterable[dict[str, Any]]:
    samples = _stacked(one.sample for one in group).double()  # so that a spread of one part in 1e9 is seen
    mean, size = samples.mean((1, 2)), samples.abs()
    zeros = (samples == 0).sum((1, 2)) / samples[0].numel()
    among = samples - samples.mean(1, keepdim=True)
    deviation = samples.sub_(mean[:, None, None]).square_().mean((1, 2)).sqrt()
    spread = among.square_().mean(1).sqrt_().mean(1) / size.mean((1, 2))
    columns = [mean, deviation, zeros, spread]
    if any(one.limit for one in group):
        columns += [(size > 1 - _NEAR).double().mean((1, 2)), (size < _NEAR).double().mean((1, 2))]
    for one, row in zip(group, torch.stack(columns, 1).tolist(), strict=True):
        saturated = None
        if one.limit == "softmax":
            saturated = min(1.0, row[4] * one.classes)
        elif one.limit:
            saturated = row[4] + (row[5] if one.limit == "sigmoid" else 0.0)
        spread_of_it = row[3] if one.several and row[3] == row[3] else 0.0 if one.several else None
        yield {"mean": row[0], "std": row[1], "zeros": row[2], "spread": spread_of_it, "saturated": saturated}


def _alike(taken: list[Taken], part: Any) -> list[list[Taken]]:
    groups: dict[Any, list[Taken]] = {}
    for one in taken:
        tensor = part(one)
        groups.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(one)
    return list(groups.values())


def _stacked(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(tensors))
    return stacked if stacked.dtype in (torch.float32, torch.float64) else stacked.float()


@dataclass(slots=True)
class Units:
    """Remembers over samples which units have ever given something other than zero."""

    _groups: dict[Any, tuple[list[Any], torch.Tensor]] = field(default_factory=dict)
    _single: dict[Any, torch.Tensor] = field(default_factory=dict)
    _counts: dict[Any, int] = field(default_factory=dict)

    def note(self, taken: Mapping[Any, Taken]) -> dict[Any, float]:
        """Adds a sample.

        Args:
            taken: of tensors, by a key that is the same in each sample.

        Returns:
            For each key the share of units that were zero in all samples; 0 before there are enough of them.
        """
        shares: dict[Any, float] = {}
        keys: dict[Any, list[Any]] = {}
        for key, one in taken.items():
            keys.setdefault((one.high.shape, one.high.dtype, one.high.device), []).append(key)
            self._counts[key] = self._counts.get(key, 0) + 1
        for kind, group in keys.items():
            high = torch.stack([taken[key].high for key in group])
            low = torch.stack([taken[key].low for key in group])
            live = (high != 0) | (low != 0)
            known = self._groups.get(kind)
            if known is None or known[0] != group:
                self._dissolve(kind)
                for row, key in enumerate(group):
                    if key in self._single and self._single[key].shape == live[row].shape:
                        live[row] |= self._single[key]
            else:
                live |= known[1]
            self._groups[kind] = group, live
            shares |= dict(zip(group, (1.0 - live.double().mean(1)).tolist(), strict=True))
        return {key: share if self._counts[key] >= _LEAST_SAMPLES else 0.0 for key, share in shares.items()}

    def _dissolve(self, kind: Any) -> None:
        """Keeps what is known by key, since other modules ran this time."""
        group, live = self._groups.pop(kind, ([], torch.empty(0)))
        self._single |= dict(zip(group, live, strict=True)) if group else {}
