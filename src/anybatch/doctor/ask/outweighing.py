"""Is one summand of a loss so heavy that nothing is learned of the others?

What a run learned of its targets is nothing, and a copy that is trained with the whole loss, on one batch, learns
nothing of them either; one that is trained with a summand alone does.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from anybatch.doctor.ask.fitting import fitted
from anybatch.doctor.ask.relating import Meeting, meetings_of, own_draw, risen
from anybatch.doctor.ask.steps import Step, asks, replayed, said, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_SECONDS, _MORE = 5.0, 1.0
_MOST_SUMMANDS = 4
_RATE = 3e-3
_NOISE = frozenset({"randn", "randn_like", "rand", "rand_like", "normal_"})
_ADDING, _MEANS = frozenset({"add", "add_"}), frozenset({"mean", "sum"})


@asks("outweighed")
def outweighed(step: Step) -> Iterator[Probed]:
    """Whether a part of a loss is learned by itself and not beside the rest of it."""
    end, values = min(step.until, time.perf_counter() + _SECONDS), step.values
    if own_draw(step) is not None:
        raise Unknown("the loss is of what the model itself draws")
    parts = [(one, at) for one, at in _summands(step) if values[one].requires_grad][:_MOST_SUMMANDS]
    meetings = meetings_of(step)
    if len(parts) < 2 or not meetings or not _is_nothing(step, meetings, end):
        yield said(answer="no")
    if _learned(step, step.loss, meetings, end) is not None:
        yield said(answer="no")
    for slot, at in parts:
        alone = _learned(step, replace(step.loss, slot=slot), meetings, end)
        if alone is not None and alone < float(values[slot].detach().sum()):
            others = {one.line: abs(float(values[other].detach().sum())) for other, one in parts if other != slot}
            seen: dict[str, Any] = {"loss": float(values[slot].detach().sum()), "alone": alone, "rows": step.rows}
            yield said(at, by=max(others, key=lambda one: others[one]), **seen)


def _learned(step: Step, part: Loss, meetings: list[Meeting], end: float) -> float | None:
    """What a loss, or a part of it, becomes in a copy that is trained with it alone, if rows are told apart then."""
    of = slots_of(step.tape, part)
    mine = [one for one in meetings if of & set(step.operations[one.index].outs)]
    if not mine:
        return None
    held = step.kept.first_of(step.tape)
    fitted(step, held, torch.optim.Adam(held.values(), lr=_RATE), end, part, _with_other_noise(step))
    run = replayed(step.tape, part, held=held)
    found = [risen(step, one, time.perf_counter() + _MORE, part, run, held) for one in mine]
    is_learned = any(one is not None and one[0].answer == "yes" for one in found)
    return float(run.values[part.slot].detach().sum()) if is_learned else None


def _with_other_noise(step: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gives rows what was drawn for others of them; by noise that stays the same they are told apart."""
    noise = {id(one) for made in step.operations if made.drawn and made.name in _NOISE for one in made.drawn}
    order = partial(torch.randperm, generator=torch.Generator().manual_seed(13))  # a replay seeds that of torch
    return lambda one: one[order(len(one)).to(one.device)] if id(one) in noise and one.dim() else one


def _is_nothing(step: Step, meetings: list[Meeting], end: float) -> bool:
    """Whether the loss at the end of the run is the same with the targets of other rows, wherever they come in."""
    found = [risen(step, one, end) for one in meetings]
    return all(one is not None and one[0].answer == "no" for one in found)


def _summands(step: Step) -> Iterator[tuple[Slot, Operation]]:
    """What a loss, or what it is the mean of, is the sum of, each with the operation that made it."""
    waiting = [(step.loss.slot, len(step.operations))]
    while waiting:
        slot, before = waiting.pop()
        at = _made_at(step, slot, before)  # before the sum, since one in place gives what it is given
        if at >= 0 and (step.operations[at].kind in _ADDING or _is_mean_of_sum(step, at)):
            waiting += [(one, at) for one in step.operations[at].given]
        elif at >= 0:
            yield slot, step.operations[at]


def _is_mean_of_sum(step: Step, at: int) -> bool:
    while at >= 0 and step.operations[at].name in _MEANS:
        at = _made_at(step, step.operations[at].given[0], at)
    return at >= 0 and step.operations[at].kind in _ADDING


def _made_at(step: Step, slot: Slot, before: int) -> int:
    return next((at for at in reversed(range(before)) if slot in step.operations[at].outs), -1)
