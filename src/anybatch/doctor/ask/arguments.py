"""What a loss function is given beside scores: rates where it takes their logarithms, and weights of classes."""

from typing import Any

import torch

from anybatch.doctor.ask.rows import replayed, rows_of
from anybatch.doctor.ask.tape import Operation, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_RATES = frozenset({"softplus", "exp", "relu"})
_SHAPING = frozenset({"squeeze", "view", "reshape", "flatten", "unsqueeze", "contiguous", "to", "float"})
_SMOOTHED = frozenset({"add", "__add__", "clamp", "clamp_min"})  # a small number keeps a rate above 0
_ORDER = {
    "poisson_nll_loss": ("input", "target", "log_input"),
    "cross_entropy": ("input", "target", "weight"),
    "nll_loss": ("input", "target", "weight"),
}
_RARE = 3.0  # times as many targets of one class as of another
_HEAVY = 2.0  # times the weight of another class
_ENOUGH = 32  # targets
_ALIKE = 0.9  # a correlation


def rates(tape: Tape) -> Probed:
    """Whether a Poisson loss takes the exponential of what is a rate already."""
    if tape.failed:
        raise Unknown(tape.failed)
    for operation in tape.operations:
        given = _given(operation)
        if operation.name == "poisson_nll_loss" and given.get("log_input", True) and type(given["input"]) is Slot:
            made = _maker(tape, given["input"])
            if made in _RATES:
                return told("rates", operation, op=made)
    return told("rates", answer="no")


def class_weights(tape: Tape) -> Probed:
    """Whether classes weigh the more, the more targets they have."""
    rows_of(tape)
    values = replayed(tape, tape.losses[-1], lambda one: one).values
    for operation in tape.operations[: tape.losses[-1].before]:
        given = _given(operation)
        weight, target = (values.get(given[one]) if type(given.get(one)) is Slot else None
                          for one in ("weight", "target"))  # fmt: skip
        if weight is None or target is None or target.dtype != torch.int64:
            continue
        weight, target = weight.detach().double().cpu(), target.cpu()
        counts = torch.bincount(target[(target >= 0) & (target < len(weight))].flatten(), minlength=len(weight))
        used = (counts > 0) & (weight > 0)
        counts, weight = counts[used].double(), weight[used]
        if len(counts) < 2 or counts.sum() < _ENOUGH or counts.max() < _RARE * counts.min():
            continue
        if weight.max() >= _HEAVY * weight.min() and _correlation(counts.log(), weight.log()) > _ALIKE:
            most, least = int(counts.argmax()), int(counts.argmin())
            return told(
                "class weights", operation,
                most_targets=float(counts[most]), most_weight=float(weight[most]),
                least_targets=float(counts[least]), least_weight=float(weight[least]),
            )  # fmt: skip
    return told("class weights", answer="no")


def _given(operation: Operation) -> dict[str, Any]:
    named: dict[str, Any] = dict(zip(_ORDER.get(operation.name, ()), operation.args, strict=False))
    named.update(operation.kwargs)
    return named


def _maker(tape: Tape, slot: Slot) -> str:
    """The name of the operation that made a tensor, whatever its shape."""
    for operation in reversed(tape.operations):
        if slot in operation.outs:
            given = list(slots(operation.args))
            if operation.name not in _SHAPING | _SMOOTHED or len(given) != 1:
                return operation.name
            slot = given[0]
    return ""


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])
