"""What a model may give later, and what a batch may have: to see a loss there that has not left its first regime.

A loss over the triplets that are active, the samples above a threshold or the positions of a mask is a mean over all of
them as long as all are, as often in the first batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.batch.batches import Splittable
from anybatch.batch.trees import flat, leaves, like, lookup

_FACTORS = (0.3, 30.0)
_NOISE = 0.5  # of what a sample has


class Unseen(NamedTuple):
    """What a batch does not have, and would have to be proved for."""

    path: str  # of the leaf
    has: Callable[[torch.Tensor], torch.Tensor]  # which entries of it are so

    def is_in(self, splittable: Splittable) -> bool:
        """Whether a batch has it; one on an accelerator is not looked at, since that would wait for it."""
        found = (lookup(batch, self.path) for batch in splittable.batches)
        return any(one.device.type == "cpu" and bool(self.has(one).any()) for one in found)


def unseen(splittable: Splittable) -> Iterator[tuple[Unseen, Splittable]]:
    """Batches in which one leaf has what it has not: numbers that are missing or left out, or that are not all one."""
    (batch,) = splittable.batches
    for place, (_, keys, leaf) in enumerate(leaves(batch, "batch")):
        path, values = ".".join(keys), flat(batch)
        is_plain = type(leaf) is torch.Tensor and leaf.dim() > 0 and leaf.numel() > 1 and path not in splittable.broadcast
        if is_plain and not leaf.is_complex() and leaf.dtype is not torch.bool and not _is_full(leaf):
            kept, first = _by_chance(leaf), leaf.flatten()[0].item()
            for has, other in (
                (torch.isnan, float("nan") if leaf.is_floating_point() else None),
                (lambda one: one < 0, -100 if not leaf.is_floating_point() and not leaf.lt(0).any() else None),
                (lambda one, first=first: one != first, first / 4 if first and bool((leaf == first).all()) else None),
            ):
                if other is not None:
                    values[place] = torch.where(kept, leaf, torch.full_like(leaf, other))
                    yield Unseen(path, has), Splittable([like(batch, values)], broadcast=splittable.broadcast)


def moved(outputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """What a model gives, by micro-batch and leaf, with each sample's made smaller or larger, and less alike.

    Numbers of one sign keep it, and those from 0 to 1 stay there, since a loss may take no others.
    """
    kinds = [_kind(own) for own in zip(*outputs, strict=True)]
    generators = [torch.Generator("cpu").manual_seed(0) for _ in kinds]  # the same factors for each leaf of a sample
    return [[_moved(*one) if one[1] else one[0] for one in zip(own, kinds, generators, strict=True)] for own in outputs]


def thinned(splittable: Splittable, only: str = "") -> tuple[list[str], Splittable]:
    """A batch in which masks that are full are not, by chance and by another rate in each sample; and their labels.

    Args:
        only: the label of the one mask that is changed; ``""`` for all.
    """
    (batch,) = splittable.batches
    generator, values, labels = torch.Generator("cpu").manual_seed(0), flat(batch), list[str]()
    for place, (label, path, leaf) in enumerate(leaves(batch, "batch")):
        if (
            only in ("", label)
            and type(leaf) is torch.Tensor
            and ".".join(path) not in splittable.broadcast
            and _is_full(leaf)
        ):
            values[place] = torch.where(_by_chance(leaf, generator), leaf, torch.zeros_like(leaf))
            labels.append(label)
    return labels, Splittable([like(batch, values)], broadcast=splittable.broadcast) if labels else splittable


def _by_chance(leaf: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Which entries are kept, by another rate in each sample."""
    generator = generator or torch.Generator("cpu").manual_seed(0)
    rate = 0.2 + 0.8 * torch.rand((len(leaf), *[1] * (leaf.dim() - 1)), generator=generator, device="cpu")
    return (torch.rand(leaf.shape, generator=generator, device="cpu") < rate).to(leaf.device)


def _is_full(leaf: torch.Tensor) -> bool:
    return leaf.dim() > 0 and leaf.numel() > 1 and not leaf.is_complex() and bool((leaf == 1).all())


def _kind(own: Sequence[Any]) -> str:
    """How a leaf may be moved; ``""`` for not at all."""
    if not all(isinstance(one, torch.Tensor) and one.requires_grad and one.is_floating_point() for one in own):
        return ""
    least, most = (float(torch.stack([one.detach().aminmax()[i] for one in own]).aminmax()[i]) for i in (0, 1))
    return "part" if least >= 0 and most <= 1 else "sign" if least >= 0 or most <= 0 else "any"


def _moved(one: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    rows = (len(one), *[1] * (one.dim() - 1))
    chosen = torch.randint(len(_FACTORS), rows, generator=generator, device="cpu")
    factors = torch.tensor(_FACTORS, device="cpu")[chosen].to(one)
    noise = _NOISE * torch.randn(one.shape, generator=generator, device="cpu").to(one)
    value = one.detach()
    if kind == "part":
        return (value ** (factors * noise.exp())).requires_grad_()
    if kind == "sign":
        return (value * factors * noise.exp()).requires_grad_()
    return (factors * (value + noise * value.square().mean().sqrt())).requires_grad_()
