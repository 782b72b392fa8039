"""What a model may give later, and what a batch may have: to see a loss there that has not left its first regime.

A loss over the triplets that are active, the samples above a threshold or the positions of a mask is a mean over all of
them as long as all are, as often in the first batch.
"""

from collections.abc import Sequence
from typing import Any

import torch

from anybatch.batch.batches import Splittable
from anybatch.batch.trees import flat, leaves, like

_FACTORS = (0.3, 30.0)
_NOISE = 0.5  # of what a sample has


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
            rate = 0.2 + 0.8 * torch.rand((len(leaf), *[1] * (leaf.dim() - 1)), generator=generator, device="cpu")
            kept = torch.rand(leaf.shape, generator=generator, device="cpu") < rate
            values[place] = torch.where(kept.to(leaf.device), leaf, torch.zeros_like(leaf))
            labels.append(label)
    return labels, Splittable([like(batch, values)], broadcast=splittable.broadcast) if labels else splittable


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
