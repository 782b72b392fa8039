"""Is a net that is to fill in what is hidden given the very tokens that it has to fill in?"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from anybatch.doctor.ask.steps import OF_CLASSES, Step, asks, replayed, said
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.records.lossfacts import Probed

_ENOUGH, _SOME, _MOSTLY = 50, 0.1, 0.5  # places that count, and shares of those that do not, and of the columns
_LOOKED_UP = frozenset({"embedding", "index_select", "__getitem__", "one_hot"})


@asks("copied places")
def copied_places(step: Step) -> Iterator[Probed]:
    """Whether a net reads the target at all places that count, and tokens of the same kind at those that do not.

    A loss that counts some places alone is one of filling in what is hidden there. Padding counts neither, but lies at
    the ends of rows; what is hidden is one token, which is no target. Attention may leave out a place's own token.
    """
    for operation in step.used(*OF_CLASSES):
        made, wanted = operation.given[0], step.values[operation.given[1]]
        (slope,) = step.slopes(made) if step.values[made].requires_grad else (None,)
        if slope is None or slope.dim() < 2 or wanted.is_floating_point() or wanted.dim() == slope.dim():
            continue
        counted = slope.any(1)
        if counted.shape != wanted.shape or int(counted.sum()) < _ENOUGH:
            continue
        for slot in _read_as_tokens(step, step.made_of(made)):
            tokens = step.values[slot]
            if tokens.numel() == wanted.numel() and len(tokens) == step.rows and tokens.dim() > 1:
                target, counts = wanted.reshape(tokens.shape), counted.reshape(tokens.shape)
                is_given = torch.equal(tokens[counts], target[counts]) and _are_of_a_kind(tokens, counts)
                if is_given and _is_read(step, made, slot, counts):
                    yield said(operation, op=operation.name.strip("_"), share=float(counts.double().mean()))


def _read_as_tokens(step: Step, some: set[Slot]) -> Iterator[Slot]:
    """What rows of a table that is trained are looked up with."""
    for one in step.operations:
        if one.kind in _LOOKED_UP and some & set(one.outs) and any(slot in step.parameters for slot in one.given):
            yield from (slot for slot in one.given if step.values[slot].dtype in (torch.int64, torch.int32))


def _is_read(step: Step, made: Slot, slot: Slot, counts: torch.Tensor) -> bool:
    """Whether what is predicted at a place that counts depends on its own token, which attention may hide from it."""
    tokens, place = step.values[slot], int(counts.flatten().nonzero()[0])
    other = tokens.clone()
    flat = other.view(-1)
    flat[place] = tokens[tokens != flat[place]][0]
    operations, at = [*step.tape.operations], step.made_at(slot) + 1
    operations.insert(at, Operation("other", lambda _: other, (slot,), {}, (slot,)))
    loss = replace(step.loss, before=step.loss.before + 1)
    run = replayed(step.tape.changed(operations), loss)
    moved = (run.values[made].detach() != step.values[made].detach()).any(1)
    return bool(moved.flatten()[place])


def _are_of_a_kind(tokens: torch.Tensor, counts: torch.Tensor) -> bool:
    """Whether what does not count lies between what does, anywhere in a row, and is of the same tokens."""
    rows = counts.flatten(1)
    begun, ahead = rows.cumsum(1) > 0, rows.flip(1).cumsum(1).flip(1) > 0
    between = ~rows & begun & ahead
    kinds, others = tokens[counts].unique(), tokens[~counts].unique()
    is_alike = len(others) > 1 and bool(torch.isin(others, kinds).all())
    return is_alike and float((~rows).double().mean()) > _SOME and float(between.any(0).double().mean()) > _MOSTLY
