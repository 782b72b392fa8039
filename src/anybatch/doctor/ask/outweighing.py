"""Is one summand of a loss so heavy that nothing is learned of the others?

What a run learned of its targets is nothing, and a copy that is trained with the whole loss, on one batch, learns
nothing of them either; one that is trained with a summand alone does.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.fitting import fitted
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.relating import Meeting, meetings_of, own_draw, risen
from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_SECONDS, _MORE = 5.0, 1.0
_MOST_SUMMANDS = 4
_RATE = 3e-3
_ADDING = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_MEANS = frozenset({"mean", "sum"})


def outweighed(kept: Kept, tape: Tape, until: float) -> Probed:
    """Whether a part of a loss is learned by itself and not beside the rest of it."""
    rows, loss, end = rows_of(tape), tape.losses[-1], min(until, time.perf_counter() + _SECONDS)
    if own_draw(tape, loss) is not None:
        raise Unknown("the loss is of what the model itself draws")
    first = replayed(tape, loss, lambda one: one)
    parts = [(one, at) for one, at in _summands(tape, loss) if first.values[one].requires_grad][:_MOST_SUMMANDS]
    meetings = meetings_of(tape, loss, first, rows)
    if len(parts) < 2 or not meetings or not _is_nothing(tape, loss, meetings, end):
        return told("outweighed", answer="no")
    if _learned(kept, tape, loss, meetings, end) is not None:
        return told("outweighed", answer="no")
    for slot, at in parts:
        part = replace(loss, slot=slot)
        alone = _learned(kept, tape, part, meetings, end)
        if alone is not None:
            others = {one.line: abs(float(first.values[other].detach().sum())) for other, one in parts if other != slot}
            seen: dict[str, Any] = {"loss": float(first.values[slot].detach().sum()), "alone": alone, "rows": rows}
            return told("outweighed", at, by=max(others, key=lambda one: others[one]), **seen)
    return told("outweighed", answer="no")


def _learned(kept: Kept, tape: Tape, part: Loss, meetings: list[Meeting], end: float) -> float | None:
    """What a loss, or a part of it, becomes in a copy that is trained with it alone, if rows are told apart then."""
    of = slots_of(tape, part)
    mine = [one for one in meetings if of & set(tape.operations[one.index].outs)]
    if not mine:
        return None
    held = kept.first_of(tape)
    fitted(tape, held, torch.optim.Adam(held.values(), lr=_RATE), end, part)
    run = replayed(tape, part, lambda one: one, held=held)
    found = [risen(tape, part, run, one, time.perf_counter() + _MORE, held) for one in mine]
    is_learned = any(one is not None and one[0].answer == "yes" for one in found)
    return float(run.values[part.slot].detach().sum()) if is_learned else None


def _is_nothing(tape: Tape, loss: Loss, meetings: list[Meeting], end: float) -> bool:
    """Whether the loss at the end of the run is the same with the targets of other rows, wherever they come in."""
    first = replayed(tape, loss, lambda one: one)
    found = [risen(tape, loss, first, one, end) for one in meetings]
    return all(one is not None and one[0].answer == "no" for one in found)


def _summands(tape: Tape, loss: Loss) -> Iterator[tuple[Slot, Operation]]:
    """What a loss, or what it is the mean of, is the sum of, each with the operation that made it."""
    waiting = [loss.slot]
    while waiting:
        slot = waiting.pop()
        made = _maker(tape, loss, slot)
        if made is not None and (made.name in _ADDING or _is_mean_of_sum(tape, loss, made)):
            waiting += slots(made.args)
        elif made is not None:
            yield slot, made


def _is_mean_of_sum(tape: Tape, loss: Loss, made: Operation | None) -> bool:
    while made is not None and made.name in _MEANS:
        made = _maker(tape, loss, next(iter(slots(made.args))))
    return made is not None and made.name in _ADDING


def _maker(tape: Tape, loss: Loss, slot: Slot) -> Operation | None:
    return next((one for one in reversed(tape.operations[: loss.before]) if slot in one.outs), None)
