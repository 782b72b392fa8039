"""Entries of weights between the steps of an optimizer, by which it is seen that they were drawn anew."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

_ENTRIES, _LEAST_ENTRIES, _MOST_DRAWN = 256, 64, 32

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
        before, now = known.before, weight.detach().as_strided(known.before.shape, (known.step,)).clone()
        known.looks, known.before = known.looks + 1, now
        if float(torch.dot(before, now)) < _RELATED * float(torch.dot(before, before)):  # as in ``related``
            known.drawn.append((known.looks, now))


def _is_plain(weight: torch.Tensor) -> bool:
    is_dense = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout is torch.strided
    return is_dense and weight.is_contiguous() and weight.is_cpu and weight.dim() > 1 and weight.is_floating_point()


def related(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether weights go on from others; those that are zero or not finite can't be told to be new ones."""
    return not float(torch.dot(one, other)) < _RELATED * float(torch.dot(one, one))
