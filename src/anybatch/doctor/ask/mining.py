"""Are the pairs that a loss picks those that are meant: not a row itself, nor the easiest, nor what is masked?"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from anybatch.doctor.ask.steps import Step, asks, following, replayed, said, slots_of, total
from anybatch.doctor.ask.tape import Operation, Replay, Slot
from anybatch.records.lossfacts import Probed

_LEAST_ROWS = 8
_PICKING = {"min": -1, "amin": -1, "argmin": -1, "max": 1, "amax": 1, "argmax": 1, "topk": 1, "sort": -1, "argsort": -1}
_HINGES = frozenset({"relu", "relu_", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})
_MARGINS = frozenset({"margin_ranking_loss", "triplet_margin_loss", "hinge_embedding_loss", "cosine_embedding_loss"})
_FILLER = 1e4  # what is put in the place of pairs that are not to be picked is larger
_ASLEEP, _AWAKE = 0.05, 0.3  # of the entries of a hinge that are not 0
_NEAREST = {"min": -1, "amin": -1, "max": 1, "amax": 1, "topk": 1, "kthvalue": -1, "cross_entropy": 1}
_SAME = 1e-5  # the same of what is computed twice
_NO_OTHER, _SHRUNK = 0.01, 0.2  # a share of the loss, and of how far rows are from their mean with the first weights
_NOTHING = 1e-3  # of a slope: rounding
_EVEN = 1e-3
"""A share of the spread of a matrix by which the entries of its diagonal may differ, as distances near zero do."""


@asks("own negative")
def own_negative(step: Step) -> Iterator[Probed]:
    """Whether the nearest one of each row, in a matrix of all pairs of rows, is always the row itself."""
    for operation in step.used(*_NEAREST):
        if _takes_itself(operation, step.values) and _is_felt(step, operation):
            yield said(operation, op=operation.name)


def _is_felt(step: Step, operation: Operation) -> bool:
    """Whether the loss has a gradient by what is picked, or uses its place; a softmax is shifted by it for nothing."""
    if set(operation.outs[1:]) & step.needed:
        return True
    picked, whole = step.slopes(operation.outs[0], operation.given[0])
    return picked is not None and whole is not None and float(picked.abs().max()) > _NOTHING * float(whole.abs().max())


@asks("one point", of_rows=False)
def one_point(step: Step) -> Iterator[Probed]:
    """Whether a loss of all pairs of rows is no other one where what the net gives is the mean for every row."""
    rows, weights = step.rows, step.parameters.keys()
    for made in reversed(step.operations):
        points = step.values[made.outs[0]] if len(made.outs) == 1 and made.outs[0] in step.needed else torch.empty(0)
        if points.dim() != 2 or len(points) != rows or not points.requires_grad or points.shape[1] in (1, rows):
            continue
        if slots_of(step.tape, step.loss, but=[made]) & weights:
            break  # what lies before it is given to more than one
        of_pairs = [one for one in step.operations if step.values[one.outs[0]].shape[:2] == (rows, rows)
                    and one.outs[0] in step.made_with(made.outs[0])]  # fmt: skip
        if of_pairs:
            middle = points.detach().mean(0).expand_as(points).clone()
            alike = total(step.with_other(made, lambda *_, **__: middle), step.loss)  # noqa: B023 - used at once
            first = replayed(step.tape, step.loss, held=step.kept.first_of(step.tape)).values[made.outs[0]]
            spread, before = (float((one.detach() - one.detach().mean(0)).norm()) for one in (points, first))
            if abs(alike - step.own) < _NO_OTHER * abs(step.own) and spread < _SHRUNK * before:
                yield said(of_pairs[0], rows=rows, loss=step.own, alike=alike)
            break


@asks("easiest")
def easiest(step: Step) -> Iterator[Probed]:
    """Whether the farthest pairs are picked for a hinge that is 0 for them, and would not be for the nearest ones.

    With the weights of the end. Picking what is nearest is let alone: positives may be easy on purpose.
    """
    for operation in step.used(*_PICKING):
        place = next(at for at, one in enumerate(step.operations) if one is operation)
        if not _picks_far(operation, step.values) or not _of_pairs(step, place):
            continue
        behind = step.operations[place + 1 :]
        follows = following(behind, operation.outs)
        hinges = [one for one in behind if one.name in _HINGES | _MARGINS and follows & set(one.given)
                  and step.needed & set(one.outs)]  # fmt: skip
        asleep = [one for one in hinges if _active(step.replay, one) <= _ASLEEP]
        if not asleep:
            continue
        there = step.with_other(operation, _turned(operation.func))
        woken = max(_active(there, one) for one in asleep)
        if woken >= _AWAKE:
            most = max(_active(step.replay, one) for one in asleep)
            yield said(operation, op=operation.name, inactive=1 - most, left=1 - woken)


def _picks_far(operation: Operation, values: Mapping[Slot, torch.Tensor]) -> bool:
    """Whether it picks the largest of distances, or the smallest of similarities."""
    given = [values[one] for one in operation.given]
    if len(given) != 1 or not given[0].is_floating_point():
        return False
    real = given[0].detach()[given[0].abs() < _FILLER]
    return bool(real.numel() > _LEAST_ROWS) and (_sign(operation) > 0) == bool(real.min() >= 0)


def _of_pairs(step: Step, place: int) -> bool:
    """Whether what is picked from is made of a matrix of all pairs of rows."""
    made = step.made_of(step.operations[place].given[0], place) - step.leaves.keys()
    return step.rows >= _LEAST_ROWS and any(step.values[one].shape == (step.rows, step.rows) for one in made)


def _active(run: Replay, operation: Operation) -> float:
    """The share of the entries of a hinge that are not 0."""
    return float((run.values[operation.outs[0]].detach() != 0).double().mean())


def _turned(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that picks the smallest where another one picks the largest, and what is filled in as little."""

    def other(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        signs = torch.where(first.abs() < _FILLER, -1.0, 1.0).to(first)
        found = func(first * signs, *args, **kwargs)
        back = [-one if one.is_floating_point() else one for one in ([found] if torch.is_tensor(found) else found)]
        return back[0] if torch.is_tensor(found) else back

    return other


def _takes_itself(operation: Operation, values: Mapping[Slot, torch.Tensor]) -> bool:
    """Whether it picks the nearest of each row, and picks the row itself each time."""
    sign, given = _NEAREST[operation.name], [values[one] for one in operation.given]
    if not given or given[0].dim() != 2 or not given[0].requires_grad:
        return False
    pairs = given[0].detach().double()
    if pairs.shape[0] != pairs.shape[1] or len(pairs) < _LEAST_ROWS:
        return False
    here = torch.arange(len(pairs))
    if operation.name == "cross_entropy" and (
        len(given) != 2 or given[1].shape != here.shape or (given[1] == here).any()
    ):
        return False  # where the row itself is the target it is meant, and weights of classes are no pairs
    own, nearest = pairs.diagonal(), (sign * pairs).argmax(1)
    spread = (pairs.max() - pairs.min()).clamp_min(1e-12)
    if float((pairs - pairs.T).abs().max()) > _SAME * spread:
        return False  # of two sets, in which the same row is the right one
    even = own.max() - own.min() < _EVEN * spread
    nearest_own = bool((nearest == here).all()) and bool((sign * own).min() >= (sign * pairs).max() - _EVEN * spread)
    return nearest_own and bool(even) and _chosen_by_row(operation)


def _chosen_by_row(operation: Operation) -> bool:
    """Whether it picks along a dimension, and one of each row, not one of all pairs."""
    if operation.name == "cross_entropy":
        return True
    numbers = [one for one in operation.args[1:] if type(one) is int]
    if operation.name in ("topk", "kthvalue"):
        return (numbers[:1] or [operation.kwargs.get("k")]) == [1] and numbers[1:] != [0]
    return bool(numbers) or "dim" in operation.kwargs


_OFTEN = 0.5  # of what is picked
_DIFFERS = 1e-3  # of the loss


@asks("picked masked")
def picked_masked(step: Step) -> Iterator[Probed]:
    """Whether entries that a mask made 0 are what a maximum or a minimum along a dim picks, and not what is left."""
    for operation in step.used(*_PICKING):
        sides = [step.values[one].detach() for one in operation.given]
        product = next((one for one in step.path(operation.given[0]) if one.outs[0] == operation.given[0]), None)
        dims = [one for one in (*operation.args[1:], operation.kwargs.get("dim")) if type(one) is int]
        dims = dims[operation.name == "topk" :] or [-1] * (operation.name in ("topk", "sort", "argsort"))
        if product is None or product.kind != "mul" or len(product.given) != 2 or not sides[0].is_floating_point():
            continue
        masks = [one for one in map(step.values.__getitem__, product.given) if _is_mask(one)]
        if len(masks) != 1 or not dims or sides[0].dim() < 2:
            continue
        shown, largest = masks[0].bool().expand_as(sides[0]), _sign(operation) > 0
        left = (sides[0] if largest else -sides[0]).where(shown, -torch.inf).amax(dims[0])
        share = float(((left < 0) & left.isfinite() & ~shown.all(dims[0])).double().mean())
        if share >= _OFTEN and _matters(step, product, shown, largest):
            yield said(operation, op=operation.name, share=share, fill="-inf" if largest else "inf")


def _matters(step: Step, product: Operation, shown: torch.Tensor, largest: bool) -> bool:
    """Whether the loss is another one where what is masked is never picked: a hinge gives 0 either way."""

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = product.func(*args, **kwargs)
        return made.masked_fill(~shown, float(made.detach().min() if largest else made.detach().max()))

    return abs(total(step.with_other(product, filled), step.loss) - step.own) > _DIFFERS * abs(step.own)


def _is_mask(one: torch.Tensor) -> bool:
    """Whether it is zeros and ones."""
    return not one.requires_grad and one.dim() > 1 and bool(((one == 0) | (one == 1)).all()) and bool((one == 0).any())


def _sign(operation: Operation) -> int:
    """1 where it picks the largest first, -1 where it picks the smallest."""
    flags = [one for one in (*operation.args, *operation.kwargs.values()) if type(one) is bool]
    if operation.name in ("topk", "sort", "argsort") and flags:
        return 1 if flags[0] else -1  # largest, or descending
    return _PICKING[operation.name]
