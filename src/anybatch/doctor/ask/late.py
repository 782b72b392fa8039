"""Do weights, masks or returns of rows weigh anything, or do they meet the mean of what they were to weigh?"""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.rows import replayed, slots_of
from anybatch.doctor.ask.tape import Operation, Replay, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_TIMES = frozenset({"mul", "__mul__", "__rmul__"})
_REDUCING = frozenset({"mean", "sum"})
_THROUGH = frozenset({"neg", "__neg__", "div", "__truediv__", *_TIMES})
_LEAST = 4  # entries


def weighed_late(tape: Tape) -> Probed:
    """Whether a product has a number for each row on one side, and on the other the mean or sum over the same rows.

    All of them weigh the same then: the loss knows no more of the numbers than their sum.
    """
    loss = tape.losses[-1] if tape.losses else None
    if tape.failed or loss is None:
        raise Unknown(tape.failed or "no step with a loss was written down")
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    for operation in tape.operations[: loss.before]:
        given = list(slots(operation.args))
        if operation.name not in _TIMES or len(given) != 2 or not needed & set(operation.outs) or not operation.grad:
            continue
        whole, each = sorted(given, key=lambda one: run.values[one].numel())
        made, weights = run.values[whole], run.values[each]
        if made.numel() != 1 or not made.requires_grad or weights.requires_grad or weights.numel() < _LEAST:
            continue
        reduced = _reduced(tape, whole, run)
        if reduced is None or not _fits(reduced[1], weights) or not bool((weights != weights.flatten()[0]).any()):
            continue
        (slope,) = torch.autograd.grad(run.values[loss.slot].sum(), run.values[operation.outs[0]], retain_graph=True)
        if bool(slope.any()) and float(slope.max() - slope.min()) <= 1e-6 * float(slope.abs().max()):
            by, shape = reduced
            return told("weighed late", operation, by=by.name, entries=weights.numel(), rows=shape[0])
    return told("weighed late", answer="no")


def _reduced(tape: Tape, slot: Slot, run: Replay) -> tuple[Operation, tuple[int, ...]] | None:
    """The mean, sum or loss function that a number comes from, and the shape of what it is over."""
    for operation in reversed(tape.operations):
        if slot not in operation.outs:
            continue
        given = list(slots((operation.args, operation.kwargs)))
        if operation.name in _REDUCING or operation.name.endswith(("_loss", "cross_entropy", "_with_logits")):
            shapes = [tuple(run.values[one].shape) for one in given]
            return (operation, min(shapes, key=len)) if shapes and all(shapes) else None  # a target has fewer dims
        if operation.name not in _THROUGH or not given:
            return None
        slot = next((one for one in given if run.values[one].requires_grad), given[0])
    return None


def _fits(reduced: tuple[int, ...], weights: torch.Tensor) -> bool:
    """Whether there is a weight for each entry, or for each row, of what was reduced."""
    shape = tuple(_without_ones(weights.shape))
    return shape in (tuple(_without_ones(reduced)), reduced[:1])


def _without_ones(shape: tuple[int, ...]) -> Iterator[int]:
    return (one for one in shape if one != 1)
