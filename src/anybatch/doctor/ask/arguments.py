"""What a loss function is given: rates where it takes their logarithms, weights of classes, targets that are noise."""

from typing import Any

import torch

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Slot, Tape, slots
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
_DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
_DIFFERENCES, _LENGTHS = frozenset({"sub", "__sub__"}), frozenset({"pow", "__pow__", "square", "abs", "norm"})
_NORMAL = frozenset({"randn", "randn_like", "normal"})  # labels of a GAN are drawn from an interval
_ENOUGH_NOISE = 100  # numbers
_KOLMOGOROV = 1.63  # the distance of Kolmogorov and Smirnov times the root of n, which 1 of 100 draws exceed
_SIGMAS = 4
_NOTHING = 1e-3  # of the power of the noise
_LEAST_TIMES = 4
_CHOOSING = frozenset({"argmax", "argmin", "max", "min", "sort", "topk"})
_ARITHMETIC = frozenset(
    {"mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"}
)
_PARTS = frozenset({"__getitem__", "select", "narrow"})
_CASTING = frozenset({"float", "double", "to", "type", "type_as", "detach"})


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


def drawn_targets(tape: Tape) -> Probed:
    """Whether a net has to predict normal random numbers that none of its inputs was made with."""
    if tape.failed or not tape.losses:
        raise Unknown(tape.failed or "no step with a loss was written down")
    loss = tape.losses[-1]
    measured = {one for operation in tape.operations if operation.name in _LENGTHS for one in slots(operation.args)}
    for number, operation in enumerate(tape.operations[: loss.before]):
        given = list(slots((operation.args, operation.kwargs)))
        is_difference = operation.name in _DIFFERENCES and measured & set(operation.outs)
        if len(given) != 2 or not (is_difference or operation.name in _DISTANCES):
            continue
        for target, predicted in (given, given[::-1]):
            made_of = slots_of(tape, Loss(predicted, number, "", 0))
            draw, noise = _source(tape, target)
            if (draw and not draw & made_of) or (noise is not None and _is_unseen(noise, tape, made_of)):
                return told("drawn targets", operation, op=operation.name.strip("_"))
    return told("drawn targets", answer="no")


def drowned(tape: Tape) -> Probed:
    """Whether a net that is to predict noise is given next to nothing else, at times of many kinds."""
    rows, loss = rows_of(tape), tape.losses[-1]
    values = replayed(tape, loss, lambda one: one).values
    taken = {
        slot for one in tape.operations for slot in slots(one.args) if set(slots(one.args)) & tape.parameters.keys()
    }
    for number, operation in enumerate(tape.operations[: loss.before]):
        given = list(slots((operation.args, operation.kwargs)))
        for target, predicted in (given, given[::-1]) if operation.name in _DISTANCES and len(given) == 2 else ():
            noise, made_of = values[target], slots_of(tape, Loss(predicted, number, "", 0)) - tape.parameters.keys()
            if noise.requires_grad or noise.numel() < _ENOUGH_NOISE or not _is_normal(noise):
                continue
            beside = [one for slot in made_of if not (one := values[slot]).requires_grad]
            nets = [values[slot] for slot in made_of & (taken | tape.leaves.keys())]
            away = [_power(one - noise) / _power(noise) for one in nets if one.shape == noise.shape]
            is_timed = any(
                one.numel() == rows and len(one.unique()) >= _LEAST_TIMES for one in beside
            )  # not one late time
            if is_timed and away and 0 < min(away) < _NOTHING:
                return told("drowned", operation, share=min(away) ** 0.5, rows=rows)
    return told("drowned", answer="no")


def _power(one: torch.Tensor) -> float:
    return float(one.double().pow(2).mean())


def _source(tape: Tape, slot: Slot) -> tuple[set[Slot], torch.Tensor | None]:
    """Where a tensor is from, whatever its shape and its scale: of the step's own draws, or from outside."""
    for operation in reversed(tape.operations):
        if slot in operation.outs:
            if operation.name in _NORMAL:
                return set(operation.outs), None
            given = list(slots(operation.args))
            if operation.name not in _SHAPING | {"mul", "__mul__", "__rmul__"} or len(given) != 1:
                return set(), None
            slot = given[0]
    return set(), tape.leaves.get(slot)


def _is_unseen(noise: torch.Tensor, tape: Tape, made_of: set[Slot]) -> bool:
    """Whether numbers are distributed as normal draws are, and an input of as many has nothing of them."""
    count = noise.numel()
    inputs = [one for slot, one in tape.leaves.items() if slot in made_of - tape.parameters.keys()]
    alike = [one for one in inputs if one.shape == noise.shape and one.is_floating_point()]
    if not alike or count < _ENOUGH_NOISE or not noise.is_floating_point():
        return False
    if not _is_normal(noise):
        return False
    drawn = noise.detach().double().flatten().cpu()
    return all(abs(_correlation(drawn, one.detach().double().flatten().cpu())) < _SIGMAS / count**0.5 for one in alike)


def of_indices(tape: Tape) -> Probed:
    """Whether a target is a sum of numbers and of the places at which what a net gave is largest."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, made = replayed(tape, loss, lambda one: one), set(tape.parameters)
    places: dict[Slot, Operation] = {}  # what is computed of places alone, and numbers from outside
    sums: dict[Slot, Operation] = {}  # of them and of something else
    for one in tape.operations[: loss.before]:
        given = list(slots((one.args, one.kwargs)))
        if one.name in _CHOOSING and made & set(given):
            places |= {slot: one for slot in one.outs if run.values[slot].dtype == torch.int64}
        elif one.name in _DISTANCES or (
            one.name in _DIFFERENCES and any(run.values[slot].requires_grad for slot in given)
        ):
            wrong = next((sums[slot] for slot in given if slot in sums and not run.values[slot].requires_grad), None)
            if wrong is not None:
                return told("indices", wrong, op=wrong.name)
        elif one.name in _ARITHMETIC | _SHAPING | _CASTING or (one.name in _PARTS and len(given) == 1):
            of = next((known[slot] for known in (sums, places) for slot in given if slot in known), None)
            beside = [slot for slot in given if slot not in places and slot not in sums]
            is_sum = one.name.strip("_r") in ("add", "sub") and any(
                run.values[slot].is_floating_point() for slot in beside
            )
            if of is not None:
                (sums if is_sum or set(given) & sums.keys() else places).update(dict.fromkeys(one.outs, of))
        if made & set(given):
            made |= set(one.outs)
    return told("indices", answer="no")


def _is_normal(noise: torch.Tensor) -> bool:
    """Whether numbers are distributed as normal draws are."""
    count = noise.numel()
    steps = torch.arange(1, count + 1, dtype=torch.double) / count
    away = (torch.special.ndtr(noise.detach().double().flatten().cpu().sort().values) - steps).abs().max()
    return bool(away * count**0.5 <= _KOLMOGOROV)


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
