"""Do boxes that lie apart count as overlapping? The product of two negative sides is positive."""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import replayed, slots_of
from anybatch.doctor.ask.tape import Operation, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_TIMES = frozenset({"mul", "__mul__", "__rmul__", "prod"})
_MINUS = frozenset({"sub", "__sub__"})
_LEAST, _MOST = frozenset({"min", "minimum", "fmin"}), frozenset({"max", "maximum", "fmax"})
_SAME = frozenset(
    (
        *(
            "__getitem__",
            "unbind",
            "select",
            "squeeze",
            "unsqueeze",
            "view",
            "reshape",
            "stack",
            "cat",
            "chunk",
            "split",
        ),
        *("narrow", "T", "flatten", "permute", "transpose", "add", "__add__"),
    )
)


def apart(kept: Kept, tape: Tape) -> Probed:
    """Whether a product of differences of a least and a largest edge, one of them negative, is a part of the loss."""
    loss = tape.losses[-1] if tape.losses else None
    if tape.failed or loss is None:
        raise Unknown(tape.failed or "no step with a loss was written down")
    needed, made = slots_of(tape, loss), {out: one for one in tape.operations[: loss.before] for out in one.outs}
    products = [one for one in tape.operations[: loss.before] if one.name in _TIMES and needed & set(one.outs)]
    products = [
        one for one in products if one.grad and (sides := _factors(one)) and all(_is_side(made, slot) for slot in sides)
    ]
    if not products:
        return told("overlap", answer="no")
    run = replayed(tape, loss, lambda one: one, held=kept.first_of(tape))
    for one in products:
        values = [run.values[slot] for slot in _factors(one)]
        negative = (values[0] < 0).any(-1) if one.name == "prod" else torch.logical_or(values[0] < 0, values[1] < 0)
        product = run.values[one.outs[0]]
        if not product.requires_grad or negative.shape != product.shape or not bool(negative.any()):
            continue
        (slope,) = torch.autograd.grad(run.values[loss.slot].sum(), product, retain_graph=True, allow_unused=True)
        counted = int((slope[negative] != 0).sum()) if slope is not None else 0
        if counted:
            return told("overlap", one, apart=counted, pairs=negative.numel())
    return told("overlap", answer="no")


def _factors(product: Operation) -> list[Slot]:
    given = list(slots((product.args, product.kwargs)))
    return given if len(given) == (1 if product.name == "prod" else 2) else []


def _is_side(made: dict[Slot, Operation], slot: Slot) -> bool:
    """Whether it is nothing but the least of some edges minus the largest of others."""
    found = list(_behind(made, slot))
    return bool(found) and all(one.name in _MINUS and _is_of_edges(made, one) for one in found)


def _is_of_edges(made: dict[Slot, Operation], minus: Operation) -> bool:
    given = list(slots(minus.args))
    if len(given) != 2:
        return False
    ends = [
        {one.name for one in _behind(made, slot) if len(list(slots((one.args, one.kwargs)))) == 2} for slot in given
    ]
    return all(ends) and ends[0] <= _LEAST and ends[1] <= _MOST


def _behind(made: dict[Slot, Operation], slot: Slot) -> Iterator[Operation]:
    """The last operations that computed what a slot has, behind those that only look at a part of it."""
    operation = made.get(slot)
    if operation is None:
        return
    if operation.name in _SAME:
        for given in slots((operation.args, operation.kwargs)):
            yield from _behind(made, given)
    else:
        yield operation
