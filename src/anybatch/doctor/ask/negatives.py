"""Is a sample one of its own negatives? The nearest one to it is itself then, and nothing is driven apart."""

import torch

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Operation, Replay, Tape, slots
from anybatch.doctor.ask.trials import told
from anybatch.records.lossfacts import Probed

_LEAST_ROWS = 8
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
