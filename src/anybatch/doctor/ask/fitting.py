"""Would a batch be learned at another rate, from smaller weights, or without other summands? Steps on copies."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from anybatch.doctor.ask.relating import Meeting, meetings_of, own_draw, risen
from anybatch.doctor.ask.steps import DISTANCES, Step, asks, replayed, said, slots_of, total
from anybatch.doctor.ask.tape import Loss, Operation, Slot, Tape
from anybatch.doctor.ask.trials import Unknown
from anybatch.doctor.ask.weighing import names_rewards
from anybatch.records.events import Scaler, Stepped
from anybatch.records.lossfacts import LossCall, Probed

_STEPS = 120
_SECONDS, _TRIALS = 3.0, 7  # for each rate at most, and of how many
_FITTED = 0.5  # of the first loss
_LITTLE = 0.2  # of what is gained at the best rate
_NEARLY = 0.9  # of what is gained at most: a rate that is less far off is as good
_LESS, _MUCH_LEFT = 0.5, 0.4  # of what is gained, and of the first loss
_MUCH = 0.25  # of the first loss
_MOST_POWERS = 4  # of ten
_FAR, _NEAR = 2.0, 1.5  # times the loss of a constant guess
_DRAWN_ALIKE = 0.1  # a share of a standard deviation
_SMALLER = 0.1
_BY_ADAM, _OF_ADAM = 0.0, 3e-3  # in the place of a factor, and its rate
_AS_THE_RUN = 0.7  # of the loss at the end of a run, which a copy with its decay does not learn beyond either
_PART = 0.1  # of the weights, or of a gradient
_LOOKING_UP = frozenset({"embedding", "embedding_bag", "index_select", "__getitem__", "gather"})
_SPREAD = 0.3  # of the entries of a table
_LARGE = 10.0  # the mean or the deviation of an input
_BIASES = 1.0
_GAIN = 3.0  # by which a layer makes its input larger; He has 1.4
_SECONDS_OF_ALL, _MORE = 5.0, 1.0
_MOST_SUMMANDS = 4
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "addmm")
_MOST_LAYERS, _MOVED, _UNMOVED = 8, 1e-4, 1e-6  # the last ones, and parts of the loss
_RATE, _LEAST_USUAL = 3e-3, 1e-5
_OTHER_DATA = 2.0  # deviations, or times as large
_OF_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_STATISTICS = _OF_NORM[:3]
_RECURRENT, _SUMMING = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"}), frozenset({"add", "add_", "sub", "rsub"})
_NOISE = frozenset({"randn", "randn_like", "rand", "rand_like", "normal_"})
_ADDING, _MEANS = frozenset({"add", "add_"}), frozenset({"mean", "sum"})


@asks("outweighed")
def outweighed(step: Step) -> Iterator[Probed]:
    """Whether a part of a loss is learned by itself and not beside the rest of it.

    What a run learned of its targets is nothing then, as is what a copy does that is trained with the whole loss.
    """
    end, values = min(step.until, time.perf_counter() + _SECONDS_OF_ALL), step.values
    if own_draw(step) is not None:
        raise Unknown("the loss is of what the model itself draws")
    if names_rewards(step):
        raise Unknown("a term is weighed with rewards, so that its size says nothing")
    parts = [(one, at) for one, at in summands(step) if values[one].requires_grad][:_MOST_SUMMANDS]
    parts = [one for one in parts if _shares(step, one[0], parts)]
    meetings = meetings_of(step)
    if len(parts) < 2 or not meetings or not _is_nothing(step, meetings, end):
        yield said(answer="no")
    if _learned(step, step.loss, meetings, end) is not None:
        yield said(answer="no")
    for slot, at in parts:
        alone = _learned(step, replace(step.loss, slot=slot), meetings, end)
        if alone is not None and alone < float(values[slot].detach().sum()):
            others = [
                (abs(float(values[other].detach().sum())), one.line, other) for other, one in parts if other != slot
            ]
            _, by, other = max(others)
            seen: dict[str, Any] = {"loss": float(values[slot].detach().sum()), "alone": alone, "rows": step.rows}
            yield said(at, by=by, penalty=step.made_of(other).isdisjoint(step.inputs), **seen)


@asks("only penalised")
def only_penalised(step: Step) -> Iterator[Probed]:
    """Whether the loss is the same whichever row the outputs of a layer are of, and compares them with no target.

    The layer then learns one output for all rows, as that of the deviation does where nothing is drawn with it.
    """
    if not meetings_of(step):  # as of a generator, whose rows are of nothing that is given
        raise Unknown("nothing that the parameters do not make meets what they make")
    own, moved = abs(step.own), list[tuple[float, Operation]]()
    layers = [one for one in step.used(*_LAYERS) if _is_own(step, one)][-_MOST_LAYERS:]
    alone = [one for one in layers if not _meets_targets(step, one)]
    for one in layers if alone else ():
        (slope,) = step.slopes(one.outs[0])
        if slope is not None and bool(slope.any()) and bool((slope != slope[:1]).any()):
            moved.append((max(abs(_with_rows(step, one, seed) - own) for seed in (1, 2)), one))
    if any(apart > _MOVED * own for apart, _ in moved):
        for apart, one in moved:
            if apart < _UNMOVED * own and one in alone:
                yield said(one, rows=step.rows, entries=step.values[one.outs[0]][0].numel())


def _is_own(step: Step, layer: Operation) -> bool:
    """Whether a layer is trained by this optimizer, and called once with the rows of the batch."""
    weights = [slot for slot in layer.given if id(step.parameters.get(slot)) in step.tape.trained]
    again = [one for one in step.operations if set(weights) & set(one.given)]
    return bool(weights) and again == [layer] and len(step.values[layer.outs[0]]) == step.rows


def _with_rows(step: Step, layer: Operation, seed: int) -> float:
    """The absolute loss where the rows of what a layer gives are in another order."""
    order = torch.randperm(step.rows, generator=torch.Generator().manual_seed(seed))
    order = order.to(step.values[layer.outs[0]].device)
    return abs(total(step.with_other(layer, lambda *given, **more: layer.func(*given, **more)[order]), step.loss))


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
    return total(run, part) if is_learned else None


def _with_other_noise(step: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gives rows what was drawn for others of them; by noise that stays the same they are told apart."""
    noise = {id(one) for made in step.operations if made.drawn and made.name in _NOISE for one in made.drawn}
    order = partial(torch.randperm, generator=torch.Generator().manual_seed(13))  # a replay seeds that of torch
    return lambda one: one[order(len(one)).to(one.device)] if id(one) in noise and one.dim() else one


def _is_nothing(step: Step, meetings: list[Meeting], end: float) -> bool:
    """Whether the loss at the end of the run is the same with the targets of other rows, wherever they come in."""
    found = [risen(step, one, end) for one in meetings]
    return all(one is not None and one[0].answer == "no" for one in found)


def summands(step: Step) -> Iterator[tuple[Slot, Operation]]:
    """What a loss, or what it is the mean of, is the sum of, each with the operation that made it."""
    waiting = [(step.loss.slot, len(step.operations))]
    while waiting:
        slot, before = waiting.pop()
        at = step.made_at(slot, before)  # before the sum, since one in place gives what it is given
        if at >= 0 and (step.operations[at].kind in _ADDING or _is_mean_of_sum(step, at)):
            waiting += [(one, at) for one in step.operations[at].given]
        elif at >= 0:
            yield slot, step.operations[at]


def _is_mean_of_sum(step: Step, at: int) -> bool:
    while at >= 0 and step.operations[at].name in _MEANS:
        at = step.made_at(step.operations[at].given[0], at)
    return at >= 0 and step.operations[at].kind in _ADDING


class _Tried(NamedTuple):
    """What a copy learned of a batch in some steps."""

    gain: float  # by which its loss fell
    steps: int
    start: Mapping[Slot, torch.Tensor]  # its weights, at the end


@asks("rate")
def other_rate(step: Step) -> Iterator[Probed]:
    """Whether a batch is learned at another rate, or by Adam, and not at the rate of the run.

    Clips, decay and schedules are not in it: where the batch is learned at the rate of the run, that is not to blame.
    """
    kind, options, rates = _made(step)
    rate, tried, first = max(rates), dict[float, _Tried](), 0.0
    seconds = min(_SECONDS, (step.until - time.perf_counter()) / _TRIALS)

    def gained(factor: float) -> float:
        nonlocal first
        start = step.kept.first_of(step.tape)
        is_adam = factor == _BY_ADAM
        optimizer = (
            torch.optim.Adam([*start.values()], lr=_OF_ADAM)
            if is_adam
            else kind([*start.values()], lr=rate * factor, **options)
        )
        first, last, steps = fitted(step, start, optimizer, seconds=seconds)
        tried[factor] = _Tried(first - last if math.isfinite(last) else -math.inf, steps, start)
        return tried[factor].gain

    if gained(1.0) < (1 - _FITTED) * first:
        toward = 10.0 if gained(10.0) > gained(0.1) else 0.1
        for power in range(2, _MOST_POWERS + 1):
            if gained(toward**power) < max(one.gain for one in tried.values()):
                break
        if kind is torch.optim.SGD and max(one.gain for one in tried.values()) < (1 - _FITTED) * first:
            gained(_BY_ADAM)
    most = max(one.gain for one in tried.values())
    best = next(
        one for one in tried if tried[one].gain >= most - (1 - _NEARLY) * abs(most)
    )  # the nearest, and Adam last
    own, other, is_adam = tried[1.0], tried[best], best == _BY_ADAM
    elsewhere = _elsewhere(step, other.start) if own.gain < _LESS * other.gain else {}
    knows_more = _MUCH_LEFT * abs(first) < elsewhere.get("final", 0.0) > 2 * elsewhere.get("unseen", math.inf)
    blames = own.gain < _LITTLE * other.gain and _MUCH * first < other.gain <= first  # a loss that has a floor
    # Steps of other kinds are as long as the rate: fewer than the run made show nothing of it, unless the run, too,
    # stayed where it was at a rate below all that are usual.
    stayed = first - elsewhere.get("final", -math.inf) < _LITTLE * other.gain and rate < _LEAST_USUAL
    is_long = own.steps >= min(_STEPS, len(rates)) or stayed
    blames = blames and (best < 1 or kind is torch.optim.SGD or is_long)
    # Short steps make no loss worse than it was at first: the targets have moved since, as those that a net makes do.
    moved = best > 1 and elsewhere.get("final", 0.0) > 2 * abs(first)
    blames, knows_more = blames and not moved, knows_more and not moved
    seen: dict[str, Any] = {"optimizer": step.optimizer, "lr": rate, "by": "Adam" if is_adam else kind.__name__,
            "other_lr": _OF_ADAM if is_adam else float(f"{rate * best:.3g}"), "loss": first, "after": first - own.gain,
            "other_after": first - other.gain, "steps": min(own.steps, other.steps)}  # fmt: skip
    yield said(answer="yes" if blames or knows_more else "no", **seen, **elsewhere, knows_more=knows_more)


def _made(step: Step) -> tuple[Any, dict[str, float], list[float]]:
    """The class and options of the optimizer of a step, and its largest rate at each of its steps."""
    facts, run = step.run.optimizers.get(step.optimizer), step.run
    rates = [max(one.lrs) for one in run.of(Stepped) if one.optimizer == step.optimizer and one.lrs]
    kind = getattr(torch.optim, facts.cls, None) if facts is not None else None
    turns = [number for number, _ in itertools.groupby(one.optimizer for one in run.of(Stepped))]
    if facts is None or kind is None or not rates or turns.count(step.optimizer) > 1:
        raise Unknown("the step is not of one optimizer of torch")
    if any(True for _ in run.of(Scaler)):
        raise Unknown("the loss is scaled for half precision")
    momentum = max((group.momentum for group in facts.groups), default=0.0)
    return kind, {"momentum": momentum} if kind is torch.optim.SGD and momentum else {}, rates


@asks("decay", of_rows=False)
def decayed(step: Step) -> Iterator[Probed]:
    """Whether a batch is learned without the weight decay of the run, and with it neither by a copy nor by the run.

    Then a hundredth of the decay is tried, and AdamW, whose decay is no part of the gradient that Adam scales.
    """
    kind, options, rates = _made(step)
    decay = max(group.weight_decay for group in step.run.optimizers[step.optimizer].groups)
    if not decay or not (own := step.own) > 0 or not _holds(step, kind, max(rates) * decay * len(rates), decay):
        yield said(answer="no")
    end = min(step.until, time.perf_counter() + _SECONDS_OF_ALL)

    def learned(kind: Any, decay: float) -> tuple[float, float]:
        start = step.kept.first_of(step.tape)
        groups = [{"params": [one], "weight_decay": decay if one.dim() > 1 else 0.0} for one in start.values()]
        first, last, _ = fitted(step, start, kind(groups, lr=max(rates), **options), end)
        return first, last if math.isfinite(last) else math.inf

    first, without = learned(kind, 0.0)
    if not without < _FITTED * min(first, own):
        yield said(answer="no")
    held = learned(kind, decay)[1]
    if not math.isfinite(held) or not without < _FITTED * held or held < _AS_THE_RUN * own:
        yield said(answer="no")
    others = [(kind, decay / 100), *([(torch.optim.AdamW, decay)] if kind is torch.optim.Adam else [])]
    tried = [(learned(*one)[1], *one) for one in others]
    if first - tried[0][0] < _NEARLY * (first - without):  # by chance it learned without, as at a rate that is too high
        yield said(answer="no")
    after, other, less = next(one for one in reversed(tried) if first - one[0] >= _NEARLY * (first - without))
    yield said(optimizer=step.optimizer, decay=decay, loss=first, held=held, without=without, own=own,
               by=other.__name__, other_decay=less, other_after=after)  # fmt: skip


def _holds(step: Step, kind: Any, share: float, decay: float) -> bool:
    """Whether a decay takes a part of the weights in the steps of a run, or is no small part of a gradient at its end.

    The latter is scaled by Adam, so that its length says nothing of that of a step.
    """
    if share > _PART:
        return True
    if kind in (torch.optim.SGD, torch.optim.AdamW):
        return False
    weights = [slot for slot, one in step.parameters.items() if slot in step.needed and one.requires_grad]
    slopes = step.slopes(*weights)
    pulled = sum(float(step.values[one].detach().square().sum()) for one in weights) ** 0.5 * decay
    return bool(pulled > _PART * sum(float(one.square().sum()) for one in slopes if one is not None) ** 0.5)


@asks("scaled")
def scaled(step: Step) -> Iterator[Probed]:
    """Whether a batch is learned better where each column of an input of large numbers has mean 0 and deviation 1."""
    targets = {slot for one in step.used("sub", *DISTANCES) for slot in one.given}
    leaves = [step.leaves[one] for one in step.inputs & step.needed - targets]
    large = {id(one) for one in leaves if one.is_floating_point() and one.dim() > 1 and len(one) == step.rows
             and max(abs(float(one.mean())), float(one.std())) > _LARGE}  # fmt: skip
    if not large:
        yield said(answer="no")
    kind, options, rates = _made(step)

    def standardised(one: torch.Tensor) -> torch.Tensor:
        return (one - one.mean(0)) / one.std(0).clamp_min(1e-6) if id(one) in large else one

    ends: list[float] = []
    for change in (None, standardised):
        start = step.kept.first_of(step.tape)
        ends += [fitted(step, start, kind([*start.values()], lr=max(rates), **options), change=change)[1]]
    yield said(answer="yes" if ends[1] < _FITTED * ends[0] else "no", loss=ends[0], scaled=ends[1])


@asks("frozen statistics")
def frozen_statistics(step: Step) -> Iterator[Probed]:
    """Whether a batch is learned where norms take its statistics, and not with the running ones of other data."""
    norms = {id(one): given for one in step.used("batch_norm") if (given := _of_norm(one))["training"] is False}
    apart = [_apart(*(step.values[given[name]].detach() for name in _STATISTICS)) for given in norms.values()]
    if not norms or max(apart) < _OTHER_DATA:
        yield said(answer="no")
    kind, options, rates = _made(step)
    changed = dict.fromkeys(_STATISTICS[1:]) | {"training": True}
    operations = [replace(one, args=(), kwargs=norms[id(one)] | changed) if id(one) in norms else one
                  for one in step.tape.operations]  # fmt: skip
    tape = step.tape.changed(operations)
    tape.losses, tape.rows = step.tape.losses, step.tape.rows
    other = Step(tape, step.optimizer, step.kept, step.run, step.modules, step.until)
    ends: list[float] = []
    for one in (step, other):
        start = step.kept.first_of(step.tape)
        ends.append(fitted(one, start, kind([*start.values()], lr=max(rates), **options))[1])
    where = next(one for one in step.used("batch_norm") if id(one) in norms)
    is_better = math.isfinite(ends[1]) and ends[1] < _FITTED * ends[0]
    seen: dict[str, Any] = {"norms": len(norms), "apart": max(apart), "loss": ends[0], "other": ends[1]}
    yield said(where, answer="yes" if is_better else "no", **seen)


def _of_norm(norm: Operation) -> dict[str, Any]:
    """The arguments of a batch norm by name; none that are of use where it keeps no statistics."""
    given: dict[str, Any] = dict(zip(_OF_NORM, norm.args, strict=False)) | norm.kwargs
    return given if all(isinstance(given.get(name), Slot) for name in _STATISTICS) else given | {"training": True}


def _apart(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> float:
    """How far the means of most channels are from the running ones, in their deviations, or how many times as large."""
    spread = x.transpose(0, 1).flatten(1)
    std, own = variance.sqrt().clamp_min(1e-6), spread.std(1).clamp_min(1e-6)
    shift, ratio = (spread.mean(1) - mean).abs() / std, (own / std).log().abs().exp()
    return float(torch.maximum(shift, ratio).median())


def _elsewhere(step: Step, start: Mapping[Slot, torch.Tensor]) -> dict[str, float]:
    """The loss of another step that was written down, with the weights of a copy and with those at the end."""
    tape = step.kept.earlier.get(step.optimizer)
    if tape is None or torch.equal(_largest(tape), _largest(step.tape)):
        return {}  # of the same batch it tells no more
    known, loss = {id(step.parameters[slot]): one for slot, one in start.items()}, tape.losses[-1]
    held = {slot: known[id(one)] for slot, one in tape.parameters.items() if id(one) in known}
    unseen, final = (float(replayed(tape, loss, held=one).values[loss.slot].sum().detach()) for one in (held, {}))
    return {"unseen": unseen, "final": final}


def _largest(tape: Tape) -> torch.Tensor:
    given = [one for slot, one in tape.leaves.items() if slot not in tape.parameters]
    return max(given, key=torch.Tensor.numel, default=torch.empty(0, device="cpu"))


def fitted(
    step: Step, start: Mapping[Slot, torch.Tensor], optimizer: torch.optim.Optimizer, until: float = math.inf,
    part: Loss | None = None, change: Any = None, steps: int = _STEPS, seconds: float = _SECONDS,
) -> tuple[float, float, int]:  # fmt: skip
    """The loss, or a part of it, at first and at last, and in how many steps; fewer where time ends.

    Each step is that of the tape with what comes from outside and was drawn as ``change`` has it, of fewer rows where
    a run of all is long.
    """
    change, number = (change, None) if change or part else step.fewer
    values, end, loss = list[float](), min(step.until, until, time.perf_counter() + seconds), part or step.loss
    while len(values) < steps and time.perf_counter() < end:
        value = replayed(step.tape, loss, change, number, held=start).values[loss.slot].sum()
        values.append(float(value.detach()))
        if not math.isfinite(values[-1]) or not value.requires_grad:
            break
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    if len(values) < _STEPS // 6 and (not values or math.isfinite(values[-1])):
        raise Unknown("there was no time left")
    return values[0], median(values[-8:]), len(values)


@asks("start")
def too_large(step: Step) -> Iterator[Probed]:
    """Whether a loss that starts far above a constant guess starts near it where some weights are smaller."""
    calls = (one for one in step.run.of(LossCall) if one.reduction == "mean")
    guess = next((known for one in calls if (known := _guess(one))), None)
    if guess is None:
        raise Unknown("no loss whose constant guess is known was seen")
    held = step.kept.first_of(step.tape)
    first = step.loss_with(held=held)
    if not first > _FAR * guess:
        yield said(answer="no", loss=first, guess=guess)
    large = [slot for slot in held if _excess(step, slot, held[slot]) > 1]
    small = step.loss_with(held=_with_smaller(step, held, large)) if large else first
    if small > _NEAR * guess:
        yield said(answer="no", loss=first, guess=guess, smaller=small)
    halfway = (first + small) / 2
    blamed = [slot for slot in large if step.loss_with(held=_with_smaller(step, held, [slot])) < halfway] or large
    spreads = {slot: float(held[slot].detach().std()) for slot in large}
    # what was drawn alike in the layers before saturates them, where the last one alone makes the loss so high
    blamed = [
        one
        for one in large
        if one in blamed or any(abs(spreads[one] - spreads[it]) < _DRAWN_ALIKE * spreads[it] for it in blamed)
    ]
    names = {id(one): (name, state.root) for state, net in step.kept.nets() for name, one in net.named_parameters()}
    told_of = [names.get(id(step.parameters[slot]), ("a parameter", -1)) for slot in blamed]
    where = next(one for one in step.tape.operations if blamed[0] in one.given)
    yield said(
        where, root=told_of[0][1], loss=first, guess=guess, smaller=small, names=[name for name, _ in told_of],
        usual=max(spreads[slot] * _smaller(step, slot, held[slot]) for slot in blamed),
    )  # fmt: skip


def _guess(call: LossCall) -> float | None:
    """What a model that knows nothing has at the start: of classes no less than all of them alike have.

    That some are frequent, and others never a target, it has to learn.
    """
    alike = math.log(call.classes) if call.function == "cross_entropy" and call.classes > 1 else 0.0
    return max(call.guess or 0.0, alike) or None


def _with_smaller(step: Step, held: Mapping[Slot, torch.Tensor], some: list[Slot]) -> dict[Slot, torch.Tensor]:
    return {
        slot: (one.detach() * _smaller(step, slot, one)).requires_grad_() if slot in some else one
        for slot, one in held.items()
    }


def _smaller(step: Step, slot: Slot, weight: torch.Tensor) -> float:
    """By what a weight that is too large is made smaller: well below what is too large, and to a tenth at least."""
    return min(_SMALLER, 1 / (_GAIN * _excess(step, slot, weight)))


def _excess(step: Step, slot: Slot, weight: torch.Tensor) -> float:
    """By what factor the entries of a table, the gain of a layer, or what biases differ by are too large."""
    if weight.dim() < 2:
        counts = weight.numel() > 1 and _is_added(step, slot)
        return float(weight.detach().double().std(correction=0)) / _BIASES if counts else 0.0
    size = float(weight.detach().double().square().mean().sqrt())
    looks_up = any(one.name in _LOOKING_UP and slot in one.given for one in step.tape.operations)
    return size / _SPREAD if looks_up else size * (weight.numel() / weight.shape[0]) ** 0.5 / _GAIN


def _is_added(step: Step, slot: Slot) -> bool:
    """Whether it is the bias of a layer, or is added to something; not a scale, or what a rate is made of."""
    uses = [one for one in step.tape.operations if slot in one.given]
    return any(
        one.name.startswith((*_LAYERS, "conv_transpose")) or one.name in _RECURRENT
        or (one.kind in _SUMMING and len(one.given) > 1) for one in uses
    )  # fmt: skip
