"""Is a sample one of its own negatives, or are those that are picked the easiest ones? Then nothing is driven apart."""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Operation, Replay, Tape, slots
from anybatch.doctor.ask.trials import told
from anybatch.records.lossfacts import Probed

_LEAST_ROWS = 8
_PICKING = {"min": -1, "amin": -1, "argmin": -1, "max": 1, "amax": 1, "argmax": 1, "topk": 1, "sort": -1, "argsort": -1}
_HINGES = frozenset({"relu", "relu_", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})
_MARGINS = frozenset({"margin_ranking_loss", "triplet_margin_loss", "hinge_embedding_loss", "cosine_embedding_loss"})
_FILLER = 1e4  # what is put in the place of pairs that are not to be picked is larger
_ASLEEP, _AWAKE = 0.05, 0.3  # of the entries of a hinge that are not 0
_NEAREST = {"min": -1, "amin": -1, "max": 1, "amax": 1, "topk": 1, "kthvalue": -1, "cross_entropy": 1}
_SAME = 1e-5  # the same of what is computed twice
_EVEN = 1e-3
"""A share of the spread of a matrix by which the entries of its diagonal may differ, as distances near zero do."""


def own_negative(tape: Tape) -> Probed:
    """Whether the nearest one of each row, in a matrix of all pairs of rows, is always the row itself."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    for operation in tape.operations[: loss.before]:
        if needed & set(operation.outs) and _takes_itself(operation, run):
            return told("own negative", operation, op=operation.name)
    return told("own negative", answer="no")


def easiest(tape: Tape) -> Probed:
    """Whether the farthest pairs are picked for a hinge that is 0 for them, and would not be for the nearest ones.

    With the weights of the end. Picking what is nearest is let alone: positives may be easy on purpose.
    """
    rows = rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    for place, operation in enumerate(tape.operations[: loss.before]):
        if not needed & set(operation.outs) or not _picks_far(operation, run) or not _of_pairs(tape, place, run, rows):
            continue
        follows, hinges = set(operation.outs), list[Operation]()
        for one in tape.operations[place + 1 : loss.before]:
            if follows & set(slots((one.args, one.kwargs))):
                follows |= set(one.outs)
                hinges += [one] if one.name in _HINGES | _MARGINS and needed & set(one.outs) else []
        asleep = [one for one in hinges if _active(run, one) <= _ASLEEP]
        if not asleep:
            continue
        turned = replace(operation, func=_turned(operation.func))
        operations = [*tape.operations[:place], turned, *tape.operations[place + 1 :]]
        other: Any = types.SimpleNamespace(leaves=tape.leaves, parameters=tape.parameters, operations=operations)
        there = replayed(other, loss, lambda one: one)
        woken = max(_active(there, one) for one in asleep)
        if woken >= _AWAKE:
            most = max(_active(run, one) for one in asleep)
            return told("easiest", operation, op=operation.name, inactive=1 - most, left=1 - woken)
    return told("easiest", answer="no")


def _picks_far(operation: Operation, run: Replay) -> bool:
    """Whether it picks the largest of distances, or the smallest of similarities."""
    given = [run.values[one] for one in slots((operation.args, operation.kwargs))]
    if operation.name not in _PICKING or len(given) != 1 or not given[0].is_floating_point():
        return False
    sign = _PICKING[operation.name]
    flags = [one for one in (*operation.args, *operation.kwargs.values()) if type(one) is bool]
    if operation.name in ("topk", "sort", "argsort") and flags:
        sign = 1 if flags[0] else -1  # largest, or descending
    real = given[0].detach()[given[0].abs() < _FILLER]
    return bool(real.numel() > _LEAST_ROWS) and (sign > 0) == bool(real.min() >= 0)


def _of_pairs(tape: Tape, place: int, run: Replay, rows: int) -> bool:
    """Whether what is picked from is made of a matrix of all pairs of rows."""
    given = next(iter(slots((tape.operations[place].args, tape.operations[place].kwargs))))
    made = slots_of(tape, replace(tape.losses[-1], slot=given, before=place))
    return rows >= _LEAST_ROWS and any(run.values[one].shape == (rows, rows) for one in made - tape.leaves.keys())


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


def _takes_itself(operation: Operation, run: Replay) -> bool:
    """Whether it picks the nearest of each row, and picks the row itself each time."""
    sign, given = (
        _NEAREST.get(operation.name, 0),
        [run.values[one] for one in slots((operation.args, operation.kwargs))],
    )
    if not sign or not given or given[0].dim() != 2 or not given[0].requires_grad:
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
