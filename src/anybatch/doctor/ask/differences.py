"""Is what the backward of an own function gives the slope of its forward? Some entries of each input, moved a little.

Many backwards are not the slope, and are meant so: of what is rounded or compared, of what is handed on as it is, and
where an input is there for the backward alone. A backward is not judged where any of its inputs looks like that.
"""

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from anybatch.doctor.ask.trials import FAILURES, tensors
from anybatch.tensors.randomness import seed

_ENTRIES = 24  # of an input
_SECONDS = 2.0
_LITTLE = 1e-4  # by how much an entry is moved, beside the size of all
_SMOOTH = 1e-3  # by how much the slopes of two distances may differ
_MOSTLY = 0.98  # of the entries
_LEAST = 6  # entries with a slope
_ASIDE = 0.97  # the cosine of what points elsewhere
_ALONG, _FACTOR = 0.999, 1.2  # of what only has another size
_FEW = 3  # sizes of what is rounded
_SMALL = 0.01  # the size of the gradient that comes in, which is below what is clipped

Given = tuple[Any, ...]


def differing(cls: Any, given: Given, needs: Sequence[bool]) -> tuple[str, dict[str, Any]]:
    """Whether the gradient of an input is another one than its differences say, and what it is instead."""
    given = tuple([one.double() if _is_real(one) else one for one in given])
    until = time.perf_counter() + _SECONDS
    try:
        outputs = _run(cls, given)
        if not outputs or any(torch.equal(a, b) for a in outputs for b in given if _is_real(b)):
            return "no", {}  # what is handed on as it is has a gradient that is meant to be another one
        generator = torch.Generator().manual_seed(5)
        weights = [torch.randn(one.shape, dtype=one.dtype, generator=generator) * _SMALL for one in outputs]
        reals = [place for place, one in enumerate(given) if _is_real(one)]
        if any(_is_flat(cls, given, place, outputs, is_needed=needs[place]) for place in reals):
            return "no", {}
        slopes = _slopes(cls, given, needs, weights)
        twice = _slopes(cls, given, needs, [2 * one for one in weights])
        if any(not near(2 * one, two) for one, two in zip(slopes.values(), twice.values(), strict=True)):
            return "no", {}  # it clips, or draws random numbers
        found = None
        for place, slope in slopes.items():
            moved = _moved(cls, given, place, weights, until)
            if moved is None:
                return "unknown", {}
            found = found or _judged(given[place], slope, *moved, place)
    except FAILURES as error:
        return "unknown", {"failed": f"{type(error).__name__}: {error}"[:200]}
    return ("yes", found) if found else ("no", {})


def _is_real(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.is_floating_point()


def _run(cls: Any, given: Given) -> list[torch.Tensor]:
    seed(0)
    return [one for one in tensors(cls.apply(*given)) if one.is_floating_point()]


def _slopes(cls: Any, given: Given, needs: Sequence[bool], weights: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """What the backward gives for each input that has a gradient."""
    places = [place for place, one in enumerate(given) if _is_real(one) and needs[place]]
    held = {place: given[place].clone().requires_grad_() for place in places}
    with torch.enable_grad():  # copies, since a forward may write to what it is given
        outputs = _run(cls, tuple([held[at].clone() if at in held else one for at, one in enumerate(given)]))
        total = sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True))
    found = torch.autograd.grad(total, list(held.values()), allow_unused=True)  # type: ignore[arg-type]
    return {place: one for place, one in zip(places, found, strict=True) if one is not None}


def near(one: torch.Tensor, other: torch.Tensor, within: float = 1e-6) -> bool:
    """Whether no entries differ by more than a part of the largest one."""
    return float((one - other).abs().max()) <= within * float(one.abs().max())


def _is_flat(cls: Any, given: Given, place: int, outputs: list[torch.Tensor], *, is_needed: bool) -> bool:
    """Whether an input, moved a little, changes none of an output, as one that is rounded or for the backward alone.

    Or changes each entry of an output by what it was moved by, or by nothing, as one that is cut off; or next to none
    of them, where some are moved across an edge. What has few sizes, as signs times one of them, is rounded as well.
    """
    one = given[place]
    generator = torch.Generator().manual_seed(9)
    step = _distance(one) * torch.randn(one.shape, dtype=one.dtype, generator=generator)
    try:
        there = _run(cls, (*given[:place], one + step, *given[place + 1 :]))
    except FAILURES:
        if is_needed:
            raise
        return False  # a target that may only be 0 or 1 has its effect
    away = [other - own for own, other in zip(outputs, there, strict=True)]
    if not any(bool(part.any()) for part in away):
        return True
    for part, own in zip(away, outputs, strict=True):
        if part.shape == step.shape and bool(part.any()):
            if float((part == 0).double().mean()) > _MOSTLY or _has_few_sizes(own):
                return True
            is_same = ((part - step).abs() <= 1e-6 * step.abs().max())[part != 0]
            if float(is_same.double().mean()) > _MOSTLY:  # but for those that are moved across an edge
                return True
    return any(not bool(part.any()) and own.unique().numel() <= _FEW for part, own in zip(away, outputs, strict=True))


def _has_few_sizes(one: torch.Tensor) -> bool:
    """Whether the entries of each row are a few numbers, up to their sign, as where signs have a scale."""
    rows = one.abs().reshape(len(one), -1) if one.dim() > 1 else one.abs().reshape(1, -1)
    return rows.shape[1] > _FEW and all(row.unique().numel() <= _FEW for row in rows)


def _distance(one: torch.Tensor) -> float:
    return _LITTLE * (float(one.square().mean().sqrt()) or 1.0)


def _moved(
    cls: Any, given: Given, place: int, weights: list[torch.Tensor], until: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Some entries of an input, and the slopes along these; nothing where they are not smooth or time ends."""
    one, entries, found = given[place], [], []
    own = _distance(one)

    def value(entry: int, distance: float) -> float:
        moved = one.clone(memory_format=torch.contiguous_format)
        moved.view(-1)[entry] += distance
        outputs = _run(cls, (*given[:place], moved, *given[place + 1 :]))
        return float(sum((a * b).sum() for a, b in zip(outputs, weights, strict=True)))

    for entry in torch.randperm(one.numel(), generator=torch.Generator().manual_seed(3))[:_ENTRIES].tolist():
        if time.perf_counter() > until:
            return None
        wide, narrow = ((value(entry, h) - value(entry, -h)) / (2 * h) for h in (own, own / 2))
        if abs(wide - narrow) <= _SMOOTH * max(abs(wide), abs(narrow)):
            entries.append(entry)
            found.append(narrow)
    return torch.tensor(entries, dtype=torch.long), torch.tensor(found, dtype=torch.double)


def _judged(
    one: torch.Tensor, slope: torch.Tensor, entries: torch.Tensor, found: torch.Tensor, place: int
) -> dict[str, Any] | None:
    """What is wrong with a gradient; nothing where it may be right."""
    own = slope.double().reshape(-1)[entries]
    if int(found.count_nonzero()) < min(_LEAST, one.numel()) or 2 * len(entries) < min(_ENTRIES, one.numel()):
        return None
    cosine = _cosine(own, found)
    size, real = float(own.norm()), float(found.norm())
    seen: dict[str, Any] = {"place": place + 1, "cosine": cosine, "shape": list(one.shape)}
    if not size:
        return seen | {"kind": "zero"}
    if abs(cosine) > _ALONG and len(found) > 1:
        factor = math.copysign(size / real, cosine)
        return seen | {"kind": "factor", "factor": factor} if not 1 / _FACTOR < factor < _FACTOR else None
    if one.numel() < _LEAST or cosine > _ASIDE:
        return None
    turned = itertools.permutations(range(one.dim())) if one.dim() < 4 else ()
    for order in turned:
        other = slope.double().permute(order)
        is_same = other.shape == one.shape and order != tuple(range(one.dim()))
        if is_same and _cosine(other.reshape(-1)[entries], found) > _ALONG:
            return seen | {"kind": "turned"}
    return seen | {"kind": "aside"}


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))
