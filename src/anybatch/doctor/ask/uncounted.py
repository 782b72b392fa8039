"""Whether a class that a net has an output for, and that targets are of, is left out of the loss."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Operation, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.doctor.ask.weighing import padding_of
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LOSSES = frozenset({"cross_entropy", "nll_loss"})
_BETWEEN = frozenset({"__getitem__", "log_softmax", "index_select", "float", "long", "to", "contiguous", "squeeze"})
_LEAST = 3  # targets of a class, none of which counts
_FEWEST = 100  # targets that were kept
_BATCHES = 5  # that have to agree
_USUAL = 3.0  # times as frequent as the other classes on average, or as rare: not what stands for "unknown"


def about_uncounted(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether ``ignore_index``, or a weight of 0, is that of a class, where each row of numbers has one target."""
    for root, batches in kept.batches.items():
        given = [one for first, name, one in batches if name in _LOSSES and _is_of_rows(first, one["target"], one)]
        if len(given) < len(batches) or len({one["shape"][1] for one in given}) != 1:
            continue
        classes = int(given[0]["shape"][1])
        targets = torch.cat([one["target"] for one in given])
        counts = targets[(targets >= 0) & (targets < classes)].bincount(minlength=classes).tolist()
        ignored, weight = int(given[0].get("ignore_index", -100)), given[0].get("weight")
        left_out = {ignored} if 0 <= ignored < classes else set[int]()
        if weight is not None:
            left_out |= {number for number, one in enumerate(weight.tolist()) if not one}
        by = "ignore_index" if ignored in left_out else "weight"
        if sum(counts) >= _FEWEST:
            yield from _told(root, counts, sorted(left_out), None, by)


def _is_of_rows(first: torch.Tensor, target: torch.Tensor, given: dict[str, Any]) -> bool:
    """Whether each row that the net is given has a target of its own: rows of tokens may be padding, or unknown."""
    is_plain = first.is_floating_point() and first.dim() > 1 and len(given["shape"]) == 2
    return is_plain and target.shape == first.shape[:1] and not target.is_floating_point()


def _told(root: int, counts: Sequence[float], left_out: Sequence[int], place: Any, by: str) -> Iterator[Probed]:
    others = [count for number, count in enumerate(counts) if count and number not in left_out]
    usual = sum(others) / len(others) if others else 0.0
    for number in left_out:
        if counts[number] >= _LEAST and usual / _USUAL <= counts[number] <= usual * _USUAL:
            share = counts[number] / sum(counts)
            yield told("uncounted", place, root=root, number=number, share=share, classes=len(counts), by=by)


def about_ends(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether the token that ends each row is the padding, and never a target of a model of the next token.

    Rows that are filled up to the longest have no padding in that one. Where the longest of each batch has one place of
    it, and what stands before it is not one token, that place is the end.
    """
    for root, batches in kept.batches.items():
        found = {_end_of(*batch) for batch in batches}
        rows = sum(len(tokens) for tokens, _, _ in batches)
        if len(batches) >= _BATCHES and len(found) == 1 and rows >= _FEWEST and (number := found.pop()) is not None:
            yield told("end uncounted", root=root, number=number, rows=rows)


def _end_of(tokens: torch.Tensor, name: str, given: dict[str, Any]) -> int | None:
    """The token that ends all rows of a batch and is no target; ``None`` where it is one, or there is none."""
    behind, target = padding_of(tokens), given["target"]
    if behind is None or name not in _LOSSES or target.numel() != tokens[:, 1:].numel():
        return None
    number, ahead = int(tokens[0, -1]), tokens[:, 1:]
    target, lengths = target.reshape(ahead.shape), (~behind).sum(1)
    out = target == given.get("ignore_index", -100)
    is_next = torch.equal(out, ahead == number) and torch.equal(target[~out], ahead[~out])
    last = tokens.gather(1, lengths[:, None] - 1).unique()
    is_output = len(given["shape"]) > 1 and number < given["shape"][1]
    return number if is_next and is_output and int(behind.sum(1).min()) == 1 and len(last) > 1 else None


def masked_out(tape: Tape) -> Probed:
    """Whether no row of one class has a gradient at its outputs, and each row of the others has."""
    rows, loss = rows_of(tape), tape.losses[-1]
    needed = slots_of(tape, loss)
    tokens = [one for slot, one in tape.leaves.items() if slot in needed and one.dim() > 1 and len(one) == rows]
    calls = [one for one in tape.operations[: loss.before] if one.name in _LOSSES and needed & set(one.outs)]
    if len(calls) != 1 or any(not one.is_floating_point() for one in tokens):
        raise Unknown("there is not one loss of classes, or rows of tokens may be padding")
    run = replayed(tape, loss, lambda one: one)
    scores, target = (run.values[_source(tape, one)] for one in [*slots((calls[0].args, calls[0].kwargs))][:2])
    if scores.dim() != 2 or len(scores) != rows or target.shape != (rows,) or target.is_floating_point():
        raise Unknown("targets are not one class for each row")
    (slope,) = torch.autograd.grad(run.values[loss.slot].sum(), scores)
    counted = slope.bool().any(1)
    known = (target >= 0) & (target < scores.shape[1])
    kinds = set(target[known & ~counted].tolist())
    if kinds & set(target[known & counted].tolist()):
        return told("uncounted", answer="no")
    counts = target[known].bincount(minlength=scores.shape[1]).tolist()
    found = next(_told(-1, counts, sorted(kinds), calls[0], "mask"), None)
    return found or told("uncounted", answer="no")


def _source(tape: Tape, slot: Slot) -> Slot:
    """What a tensor was before some of its rows were picked."""
    for operation in reversed(tape.operations):
        if slot in operation.outs and operation.name in _BETWEEN:
            slot = _first(operation, slot)
    return slot


def _first(operation: Operation, slot: Slot) -> Slot:
    return next(iter(slots(operation.args)), slot)
