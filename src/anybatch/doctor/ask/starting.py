"""Does a loss start far above that of a constant guess since weights began too large? With smaller ones on a copy."""

import math
from collections.abc import Mapping

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import replayed, rows_of
from anybatch.doctor.ask.tape import Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

_FAR = 2.0  # times the loss of a constant guess
_NEAR = 1.5
_SMALLER = 0.1
_LOOKING_UP = frozenset({"embedding", "embedding_bag", "index_select", "__getitem__", "gather"})
_SPREAD = 0.3  # of the entries of a table
_GAIN = 3.0  # by which a layer makes its input larger; He has 1.4


def too_large(kept: Kept, tape: Tape, run: Run) -> Probed:
    """Whether a loss that starts far above a constant guess starts near it where some weights are smaller."""
    rows_of(tape)
    guess = next((known for one in run.of(LossCall) if one.reduction == "mean" and (known := _guess(one))), None)
    if guess is None:
        raise Unknown("no loss whose constant guess is known was seen")
    held = kept.first_of(tape)
    first = _value(tape, held)
    if not first > _FAR * guess:
        return told("start", answer="no", loss=first, guess=guess)
    large = [slot for slot in held if _is_large(tape, slot, held[slot])]
    small = _value(tape, _with_smaller(held, large)) if large else first
    if small > _NEAR * guess:
        return told("start", answer="no", loss=first, guess=guess, smaller=small)
    blamed = [slot for slot in large if _value(tape, _with_smaller(held, [slot])) < (first + small) / 2] or large
    names = {id(one): (name, state.root) for state in kept.states.values() if (net := state.module()) is not None
             for name, one in net.named_parameters()}  # fmt: skip
    told_of = [names.get(id(tape.parameters[slot]), ("a parameter", -1)) for slot in blamed]
    where = next(one for one in tape.operations if blamed[0] in slots((one.args, one.kwargs)))
    return told(
        "start", where, root=told_of[0][1], loss=first, guess=guess, smaller=small,
        names=[name for name, _ in told_of],
        tenth=_SMALLER * max(float(held[slot].detach().std()) for slot in blamed),
    )  # fmt: skip


def _guess(call: LossCall) -> float | None:
    is_of_classes = call.function == "cross_entropy" and call.classes > 1
    return call.guess or (math.log(call.classes) if is_of_classes else None)


def _value(tape: Tape, held: Mapping[Slot, torch.Tensor]) -> float:
    loss = tape.losses[-1]
    return float(replayed(tape, loss, lambda one: one, held=held).values[loss.slot].detach().double().sum())


def _with_smaller(held: Mapping[Slot, torch.Tensor], some: list[Slot]) -> dict[Slot, torch.Tensor]:
    return {slot: (one.detach() * _SMALLER).requires_grad_() if slot in some else one for slot, one in held.items()}


def _is_large(tape: Tape, slot: Slot, weight: torch.Tensor) -> bool:
    """Whether entries of a table, or the gain of a layer, are far from small."""
    if weight.dim() < 2:
        return False
    size = float(weight.detach().double().square().mean().sqrt())
    looks_up = any(one.name in _LOOKING_UP and slot in slots((one.args, one.kwargs)) for one in tape.operations)
    return size > _SPREAD if looks_up else size * (weight.numel() / weight.shape[0]) ** 0.5 > _GAIN
