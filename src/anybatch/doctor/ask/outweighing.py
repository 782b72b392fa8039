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
from anybatch.doctor.ask.weighing import names_rewards
from anybatch.records.lossfacts import Probed

_SECONDS, _MORE = 5.0, 1.0
_MOST_SUMMANDS = 4
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "addmm")
_MOST_LAYERS, _MOVED, _UNMOVED = 8, 1e-4, 1e-6  # the last ones, and parts of the loss
_RATE = 3e-3
_NOISE = frozenset({"randn", "randn_like", "rand", "rand_like", "normal_"})
_ADDING, _MEANS = frozenset({"add", "add_"}), frozenset({"mean", "sum"})


@asks("outweighed")
def outweighed(step: Step) -> Iterator[Probed]:
    """Whether a part of a loss is learned by itself and not beside the rest of it."""
    end, values = min(step.until, time.perf_counter() + _SECONDS), step.values
    if own_draw(step) is not None:
        raise Unknown("the loss is of what the model itself draws")
    if names_rewards(step):
        raise Unknown("a term is weighed with rewards, so that its size says nothing")
    parts = [(one, at) for one, at in _summands(step) if values[one].requires_grad][:_MOST_SUMMANDS]
    parts = [one for one in parts if _shares(step, one[0], parts)]
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


@asks("only penalised")
def only_penalised(step: Step) -> Iterator[Probed]:
    """Whether the loss is the same whichever row the outputs of a layer are of, and compares them with no target.

    The layer then learns one output for all rows, as that of the deviation does where nothing is drawn with it.
    """
    if not meetings_of(step):  # as of a generator, whose rows are of nothing that is given
        raise Unknown("nothing that the parameters do not make meets what they make")
    own, moved = abs(float(step.values[step.loss.slot].detach().sum())), list[tuple[float, Operation]]()
    layers = [one for one in step.used(*_LAYERS) if _is_own(step, one)]
    for one in layers[-_MOST_LAYERS:]:
        (slope,) = step.slopes(one.outs[0])
        if slope is not None and bool(slope.any()) and bool((slope != slope[:1]).any()):
            moved.append((max(abs(_with_rows(step, one, seed) - own) for seed in (1, 2)), one))
    if any(apart > _MOVED * own for apart, _ in moved):
        for apart, one in moved:
            if apart < _UNMOVED * own and not _meets_targets(step, one):
                yield said(one, rows=step.rows, entries=step.values[one.outs[0]][0].numel())


def _is_own(step: Step, layer: Operation) -> bool:
    """Whether a layer is trained by this optimizer, and called once with the rows of the batch."""
    weights = [slot for slot in layer.given if id(step.parameters.get(slot)) in step.tape.trained]
    again = [one for one in step.operations if set(weights) & set(one.given)]
    return bool(weights) and again == [layer] and len(step.values[layer.outs[0]]) == step.rows


def _with_rows(step: Step, layer: Operation, seed: int) -> float:
    """The absolute loss where the rows of what a layer gives are in another order."""
    order = torch.randperm(step.rows, generator=torch.Generator().manual_seed(seed))
    at = next(place for place, one in enumerate(step.tape.operations) if one is layer) + 1
    turned = Operation("index_select", lambda one: one[order.to(one.device)], (layer.outs[0],), {}, layer.outs)
    tape = step.tape.changed([*step.tape.operations[:at], turned, *step.tape.operations[at:]])
    loss = replace(step.loss, before=step.loss.before + 1)
    return abs(float(replayed(tape, loss).values[loss.slot].detach().sum()))


def _meets_targets(step: Step, layer: Operation) -> bool:
    """Whether rows of what is not made of the layer's own inputs, or of none, come in between it and the loss."""
    behind, known = step.made_with(layer.outs[0]), step.made_of(layer.outs[0])
    beside = {slot for one in step.used() if behind & set(one.given) for slot in one.given}
    beside -= behind | step.parameters.keys()
    of_rows = {slot for slot in beside if (of := step.values[slot]).dim() and len(of) and len(of) % step.rows == 0}
    of_inputs = [step.made_of(slot) & step.inputs for slot in of_rows]
    return any(not one or one - known for one in of_inputs)


def _shares(step: Step, slot: Slot, parts: list[tuple[Slot, Operation]]) -> bool:
    """Whether another part of the loss trains what this one trains, as one of a net of its own does not."""
    trained = step.made_of(slot) & step.parameters.keys()
    return any(trained & step.made_of(other) for other, _ in parts if other != slot)


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
