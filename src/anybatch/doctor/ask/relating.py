"""Does what was learned belong to the rows? The last loss again, with the targets of other rows.

Wherever something that the parameters make meets something that they do not make, and both have rows, the rows of the
latter are exchanged. The loss of a model that learned what its targets say rises then, whatever kind of loss it is;
that of one that learned no more than how targets are distributed stays.
"""

import math
import time
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Replay, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_LEAST_ROWS = 8
_MOST_MEETINGS = 6
_ORDERS = 12
_SECONDS = 3.0
_SURE = 4.0
"""How many spreads of the loss over orders are no accident."""

_UNSURE = 2.5
_LITTLE = 0.05
"""A share of the loss by which it may rise by accident."""

_NOTHING = 0.01
"""A share of the loss that says nothing, however surely it is there."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where what parameters make meets what they do not make.

    Args:
        index: of the operation.
        slot: of what they do not make.
    """

    index: int
    slot: Slot


def related(tape: Tape, optimizer: int, until: float) -> Probed:
    """Whether the loss of a batch rises when its rows are compared with the targets of other rows.

    Args:
        tape: of a step; it is run with the parameters as they are now.
        optimizer: the number of the one that stepped.
        until: the time by ``time.perf_counter`` after which nothing is begun.

    Raises:
        Unknown: it can't be told.
    """
    rows, loss = rows_of(tape), tape.losses[-1]
    first = replayed(tape, loss, lambda one: one)
    found = _meetings(tape, loss, first, rows)
    if not found:
        raise Unknown("nothing that the parameters do not make meets what they make")
    own = float(first.values[loss.slot].double().sum())
    end = min(until, time.perf_counter() + _SECONDS)
    answers = [_risen(tape, loss, first, one, own, end) for one in found]
    known = [one for one in answers if one is not None]
    if not known:
        raise Unknown("the step did not run with other targets")
    gain, spread, where = max(known, key=lambda one: one[0] / max(one[1], 1e-12))
    size = max(abs(own), abs(own + gain), 1e-12)
    operation = tape.operations[where.index]
    others = [first.values[one.slot] for one in found]
    evidence: dict[str, Any] = {"optimizer": optimizer, "rows": rows, "loss": own, "others": own + gain,
                                "spread": spread, "meetings": len(known),
                                "alike": all(bool((one == one[:1]).all()) for one in others)}  # fmt: skip
    answer = "unknown"
    if gain > max(_SURE * spread, _NOTHING * size):
        answer = "yes"
    elif len(known) == len(answers) and (gain < _UNSURE * spread or gain < _LITTLE * size):
        answer = "no"
    return Probed(probe="related", root=-1, answer=answer, file=operation.file, line=operation.line, evidence=evidence)


def _meetings(tape: Tape, loss: Loss, first: Replay, rows: int) -> list[Meeting]:
    """The last places where both sides follow the rows, and one of them the parameters, the last one first."""
    wanted, follows = slots_of(tape, loss), _following(tape, loss, rows)
    found: list[Meeting] = []
    for index, operation in enumerate(tape.operations[: loss.before]):
        given = set(slots((operation.args, operation.kwargs))) & follows
        made = [one for one in given if first.values[one].requires_grad]
        if not made or not operation.grad or not wanted & set(operation.outs) or operation.name.endswith("_"):
            continue
        others = [one for one in given if not first.values[one].requires_grad and first.values[one].dim()]
        found += [Meeting(index, one) for one in sorted(others) if first.values[one].shape[0] >= _LEAST_ROWS]
    return found[::-1][:_MOST_MEETINGS]


def _following(tape: Tape, loss: Loss, rows: int) -> set[Slot]:
    """The slots that depend on what came from outside for each row, or was drawn for it."""
    found = {slot for slot, one in tape.leaves.items() if one.shape[:1] == (rows,) and slot not in tape.parameters}
    for operation in tape.operations[: loss.before]:
        drawn = operation.drawn is not None and any(one.dim() and one.shape[0] == rows for one in operation.drawn)
        if drawn or found & set(slots((operation.args, operation.kwargs))):
            found |= set(operation.outs)
    return found


def _risen(
    tape: Tape, loss: Loss, first: Replay, where: Meeting, own: float, end: float
) -> tuple[float, float, Meeting] | None:
    """By how much the loss rises with the rows in other orders, and how far these differ; nothing where it fails."""
    count = first.values[where.slot].shape[0]
    generator = torch.Generator().manual_seed(11)
    values: list[float] = []
    for _ in range(_ORDERS):
        if time.perf_counter() > end:
            break
        order = torch.randperm(count, generator=generator)
        changed, moved = _exchanged(tape, loss, where, order)
        try:
            again = replayed(changed, moved, lambda one: one)
        except Unknown:
            return None
        values.append(float(again.values[loss.slot].double().sum()))
    if len(values) < 3 or not all(map(math.isfinite, (*values, own))):
        return None
    return fmean(values) - own, stdev(values), where


def _exchanged(tape: Tape, loss: Loss, where: Meeting, order: torch.Tensor) -> tuple[Tape, Loss]:
    """A tape with an operation more, which puts rows into another order for the one behind it."""
    behind = tape.operations[where.index]
    fresh = Slot(1 + max([*tape.leaves, *(out for one in tape.operations for out in one.outs)]))
    moving = Operation("index_select", lambda one: one[order.to(one.device)], (where.slot,), {}, (fresh,))
    moved = replace(behind, args=_with(behind.args, where.slot, fresh), kwargs=_with(behind.kwargs, where.slot, fresh))
    other = Tape()
    other.leaves, other.parameters = tape.leaves, tape.parameters
    other.operations = [*tape.operations[: where.index], moving, moved, *tape.operations[where.index + 1 :]]
    return other, replace(loss, before=loss.before + 1)


def _with(value: Any, old: Slot, new: Slot) -> Any:
    """Arguments with one slot in place of another."""
    if isinstance(value, Slot):
        return new if value == old else value
    if isinstance(value, slice):
        return slice(*[_with(one, old, new) for one in (value.start, value.stop, value.step)])
    if type(value) in (list, tuple):
        return type(value)([_with(one, old, new) for one in value])
    if type(value) is dict:
        return {key: _with(one, old, new) for key, one in value.items()}
    return value
