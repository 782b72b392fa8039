"""Entries of weights around the steps of an optimizer: whether they were drawn anew, or a step taken back."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

_ENTRIES, _LEAST_ENTRIES, _MOST_DRAWN = 256, 64, 32

_TINY = 1e-30
_RELATED = 0.5
"""A part of the square of the weights: a step leaves their product with the next ones near 1, new ones near 0."""


@dataclass(slots=True)
class Watched:
    """The largest matrix of an optimizer."""

    weight: "weakref.ref[torch.Tensor]"
    before: torch.Tensor
    shape: torch.Size
    step: int  # from one of the entries to the next
    looks: int = 0
    drawn: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # the look, and what came
    after: torch.Tensor | None = None  # a step, as long as the next one has not begun
    kept: list[float] = field(
        default_factory=list
    )  # cosines of what a step changed and what of it was there at the next


class Redraws:
    """Looks before each step; only on a CPU, since each look would wait for another device."""

    def __init__(self) -> None:
        self.optimizers: dict[int, Watched] = {}
        self.without = set[int]()  # optimizers without a matrix that tells

    def look(self, number: int, optimizer: Any) -> None:
        """Is told that an optimizer is about to step."""
        known = self.optimizers.get(number)
        if known is None:
            weights = (one for group in optimizer.param_groups for one in group["params"] if _is_plain(one))
            weight = max(weights, key=torch.Tensor.numel, default=None)
            if weight is None or weight.numel() < _LEAST_ENTRIES:
                self.without.add(number)
            else:
                step = max(1, weight.numel() // _ENTRIES)
                entries = weight.detach().as_strided((min(_ENTRIES, weight.numel()),), (step,)).clone()
                self.optimizers[number] = Watched(weakref.ref(weight), entries, weight.shape, step)
            return
        weight = known.weight()
        if weight is None or weight.shape != known.shape or len(known.drawn) >= _MOST_DRAWN:
            return
        if not weight.is_cpu or weight.dtype != known.before.dtype:
            return
        now = weight.detach().as_strided(known.before.shape, (known.step,)).clone()
        before, after, known.after = known.before, known.after, None
        known.looks, known.before = known.looks + 1, now
        if after is not None and len(known.kept) < _MOST_DRAWN and (moved := after - before).any():
            left = now - before
            known.kept.append(float(torch.dot(left, moved) / (left.norm() * moved.norm()).clamp_min(_TINY)))
        if float(torch.dot(before, now)) < _RELATED * float(torch.dot(before, before)):  # as in ``related``
            known.drawn.append((known.looks, now))

    def look_after(self, number: int) -> None:
        """Is told that an optimizer has made a step that is measured."""
        known = self.optimizers.get(number)
        weight = None if known is None else known.weight()
        if known is None or weight is None or weight.shape != known.shape or len(known.kept) >= _MOST_DRAWN:
            return
        if weight.is_cpu and weight.dtype == known.before.dtype:
            known.after = weight.detach().as_strided(known.before.shape, (known.step,)).clone()


def _is_plain(weight: torch.Tensor) -> bool:
    is_dense = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout is torch.strided
    return is_dense and weight.is_contiguous() and weight.is_cpu and weight.dim() > 1 and weight.is_floating_point()


def related(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether weights go on from others; those that are zero or not finite can't be told to be new ones."""
    return not float(torch.dot(one, other)) < _RELATED * float(torch.dot(one, one))
