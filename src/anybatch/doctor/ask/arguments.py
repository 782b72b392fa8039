"""What a loss function is given: rates where it takes their logarithms, weights of classes, targets that are noise."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anybatch.doctor.ask.sampling import is_normal, spread
from anybatch.doctor.ask.steps import DISTANCES, OF_CLASSES, Step, asks, said
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.doctor.samples.losscalls import ahead_of
from anybatch.records.lossfacts import Probed
from anybatch.records.samples import Scored

_RATES = frozenset({"softplus", "exp", "relu"})
_SHAPING = frozenset({"squeeze", "view", "reshape", "flatten", "unsqueeze", "contiguous", "to", "float"})
_SMOOTHED = frozenset({"add", "clamp", "clamp_min"})  # a small number keeps a rate above 0
_ORDER = {
    "poisson_nll_loss": ("input", "target", "log_input"),
    **dict.fromkeys(OF_CLASSES, ("input", "target", "weight")),
}
_TWICE = 2
_RARE = 3.0  # times as many targets of one class as of another
_HEAVY = 2.0  # times the weight of another class
_NO_WEIGHT = 1e-30  # in the place of 0, which has no logarithm
_NEARLY_ALL, _NOT_ALL = 0.97, 0.8  # of a loss, and of the targets
_ENOUGH = 32  # targets, and entries of an input
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose")
_ALIKE = 0.9  # a correlation
_LENGTHS = frozenset({"pow", "square", "abs", "norm"})
_NORMAL = frozenset({"randn", "randn_like", "normal"})  # labels of a GAN are drawn from an interval
_ENOUGH_NOISE = 100  # numbers
_WIDE = 8  # numbers in a row: fewer targets of data may well be normal, and go with the inputs along no line
_SIGMAS = 4
_TRACE = 0.12  # a correlation
_MOSTLY_NOISE, _END = 0.7, 0.1  # of the noisiest inputs, and of the range of times
_NOWHERE = Slot(-1)
_NOTHING = 1e-3  # of the power of the noise
_LEAST_TIMES = 4
_CHOOSING = frozenset({"argmax", "argmin", "max", "min", "sort", "topk"})
_ARITHMETIC = frozenset({"mul", "add", "sub", "rsub"})
_PARTS = frozenset({"__getitem__", "select", "narrow"})
_CASTING = frozenset({"float", "double", "to", "type", "type_as", "detach"})
_PICKED = frozenset({"__getitem__", "log_softmax", "index_select", "float", "long", "to", "contiguous", "squeeze"})
_NEIGHBOURS_OF = 1024  # rows
_MARKED = 8  # rows, of which numbers would be larger than one
_LEAST = 3  # targets of a class, none of which counts
_USUAL = 3.0  # times as frequent as the other classes on average, or as rare: not what stands for "unknown"


@asks("rates", of_rows=False)
def rates(step: Step) -> Iterator[Probed]:
    """Whether a Poisson loss takes the exponential of what is a rate already."""
    for operation in (one for one in step.tape.operations if one.name == "poisson_nll_loss"):
        given = _given(operation)
        if given.get("log_input", True) and type(given["input"]) is Slot:
            made = next((one for one in step.path(given["input"])
                         if one.kind not in _SHAPING | _SMOOTHED or len(one.given) != 1), None)  # fmt: skip
            if made is not None and made.name in _RATES:
                yield said(operation, op=made.name)


@asks("far ahead")
def far_ahead(step: Step) -> Iterator[Probed]:
    """Whether all targets are tokens that stand two places or more behind those that the net looks up."""
    found = list[tuple[int, Operation]]()
    tokens = {one.given[0] for one in step.used("embedding") if one.given[0] in step.inputs}
    looked_up = [step.leaves[one] for one in tokens if step.leaves[one].dim() == 2 and step.leaves[one].numel()]
    for operation in step.used(*OF_CLASSES):
        target = step.values[operation.given[1]] if len(operation.given) > 1 else None
        if target is None or target.is_floating_point():
            continue
        ignored = int(operation.kwargs.get("ignore_index", -100))
        found += [(ahead["shift"], operation) for one in looked_up if (ahead := ahead_of(target, ignored, one))]
    if found and min(shift for shift, _ in found) >= _TWICE:
        shift, operation = found[0]
        yield said(operation, op=operation.name, shift=shift)


@asks("one number", of_rows=False)
def one_number(step: Step) -> Iterator[Probed]:
    """Whether a layer is given one and the same number by the script, wherever it is used and in each step."""
    layers: dict[Slot, list[Operation]] = {}
    for one in step.used():
        if one.name.startswith(_LAYERS) and len(one.given) > 1 and one.given[1] in step.parameters:
            layers.setdefault(one.given[1], []).append(one)
    before = step.kept.earlier.get(step.optimizer)
    earlier = [_only(one) for one in before.leaves.values()] if before is not None else []
    for uses in layers.values():
        given = [_only(step.leaves[one.given[0]]) if one.given[0] in step.inputs else None for one in uses]
        if given[0] is not None and len({*given}) == 1 and given[0] in earlier:
            yield said(uses[0], value=given[0][-1], op=uses[0].name)


def _only(one: torch.Tensor) -> tuple[int | float, ...] | None:
    """The shape of a batch of real numbers without its rows, and the number that each of them is, if that is one."""
    if one.dim() < 2 or one.numel() < _ENOUGH or not one.is_floating_point() or bool((one != one.flatten()[0]).any()):
        return None
    return *one.shape[1:], float(one.flatten()[0])


@asks("class weights")
def class_weights(step: Step) -> Iterator[Probed]:
    """Whether classes weigh the more, the more targets they have."""
    for operation, counts, weight in _weights_of_classes(step):
        yield from _favoured(operation, counts[weight > 0], weight[weight > 0])


@asks("positive weights")
def positive_weights(step: Step) -> Iterator[Probed]:
    """Whether the rarer of two classes weighs less, by what a loss of marks multiplies the positive ones with."""
    for operation, counts, weight in _weights_of_marks(step):
        yield from _favoured(operation, counts, weight)


@asks("drowning weights")
def drowning_weights(step: Step) -> Iterator[Probed]:
    """Whether one class is nearly all of a loss by its weight alone."""
    for operation, counts, weight in (*_weights_of_classes(step), *_weights_of_marks(step)):
        shares, known = counts * weight.double() / (counts * weight.double()).sum(), counts / counts.sum()
        most = int(shares.argmax())
        if counts.sum() >= _ENOUGH and float(shares[most]) > _NEARLY_ALL and float(known[most]) < _NOT_ALL:
            yield said(
                operation, weight=float(weight[most]), loss_share=float(shares[most]), targets=float(known[most])
            )


def _weights_of_classes(step: Step) -> Iterator[tuple[Operation, torch.Tensor, torch.Tensor]]:
    """Losses of classes with weights, how many targets each class has, and what it weighs."""
    for operation in step.operations:
        given = _given(operation)
        weight, target = (step.values.get(given[one]) if type(given.get(one)) is Slot else None
                          for one in ("weight", "target"))  # fmt: skip
        if weight is None or target is None or target.dtype != torch.int64:
            continue
        weight, target = weight.detach().cpu(), target.cpu()
        known = target[(target >= 0) & (target < len(weight))]
        yield operation, torch.bincount(known.flatten(), minlength=len(weight)), weight


def _weights_of_marks(step: Step) -> Iterator[tuple[Operation, torch.Tensor, torch.Tensor]]:
    """The same of losses of marks, of which one number is what positive ones weigh."""
    for operation in step.used("binary_cross_entropy_with_logits"):
        weight = operation.kwargs.get("pos_weight")
        target = step.values[operation.given[1]].detach() if len(operation.given) > 1 else None
        weight = step.values[weight].detach() if type(weight) is Slot else None
        if target is None or weight is None or weight.numel() > 1 or not bool(((target == 0) | (target == 1)).all()):
            continue
        if target.numel() == len(target):  # not of places in a few pictures, of which one may be full of what is rare
            positive = int(target.sum())
            yield operation, torch.tensor([target.numel() - positive, positive]), torch.tensor([1.0, float(weight)])


def _favoured(operation: Operation, counts: torch.Tensor, weight: torch.Tensor) -> Iterator[Probed]:
    """The most frequent of some classes and the rarest, where they weigh the more, the more targets they have."""
    counts, weight = counts[counts > 0].double(), weight[counts > 0].double()
    if len(counts) < 2 or counts.sum() < _ENOUGH or counts.max() < _RARE * counts.min():
        return
    alike = _correlation(counts.log(), weight.clamp_min(_NO_WEIGHT).log())
    if weight.max() >= _HEAVY * weight.min() and alike > _ALIKE:
        most, least = int(counts.argmax()), int(counts.argmin())
        yield said(
            operation,
            most_targets=float(counts[most]), most_weight=float(weight[most]),
            least_targets=float(counts[least]), least_weight=float(weight[least]),
        )  # fmt: skip


@asks("drawn targets", of_rows=False)
def drawn_targets(step: Step) -> Iterator[Probed]:
    """Whether a net has to predict normal random numbers that none of its inputs was made with."""
    is_scored = any(True for _ in step.run.of(Scored))  # of a density, what was drawn from it is asked
    measured = {one for operation in step.tape.operations if operation.kind in _LENGTHS for one in operation.given}
    for number, operation in enumerate(step.operations):
        given = operation.given
        is_difference = operation.kind == "sub" and measured & set(operation.outs) and not is_scored
        for target, predicted in _both(given) if is_difference or operation.name in DISTANCES else ():
            made_of = step.made_of(predicted, number)
            draw, noise = _source(step, target)
            if (draw and not draw & made_of) or (noise in step.leaves and _is_unseen(noise, step, made_of)):
                yield said(operation, op=operation.name.strip("_"))


def _both(given: list[Slot]) -> list[list[Slot]]:
    """Two tensors in both orders; nothing of others."""
    return [given, given[::-1]] if len(given) == 2 else []


@asks("drowned")
def drowned(step: Step) -> Iterator[Probed]:
    """Whether a net that is to predict noise is given next to nothing else, at times of many kinds."""
    values = step.values
    taken = {slot for one in step.tape.operations if set(one.given) & step.parameters.keys() for slot in one.given}
    for number, operation in enumerate(step.operations):
        for target, predicted in _both(operation.given) if operation.name in DISTANCES else ():
            noise, made_of = values[target], step.made_of(predicted, number) - step.parameters.keys()
            if noise.requires_grad or noise.numel() < _ENOUGH_NOISE or not is_normal(noise):
                continue
            beside = [one for slot in made_of if not (one := values[slot]).requires_grad]
            nets = [values[slot] for slot in made_of & (taken | step.leaves.keys())]
            away = [_power(one - noise) / _power(noise) for one in nets if one.shape == noise.shape]
            is_timed = any(one.numel() == step.rows and len(one.unique()) >= _LEAST_TIMES for one in beside)
            if is_timed and away and 0 < min(away) < _NOTHING:  # not at one late time
                yield said(operation, share=min(away) ** 0.5, rows=step.rows)


@asks("hardly noised")
def hardly_noised(step: Step) -> Iterator[Probed]:
    """Whether a net predicts noise of which it is given little at the times at which sampling is nothing but noise."""
    starts = [one.calls[0][0] for one in step.kept.sampling.loops.values() if one.noise and one.calls]
    for number, operation in enumerate(step.operations) if starts else ():
        compares = operation.name in DISTANCES or operation.kind == "sub"
        for target, predicted in _both(operation.given) if compares else ():
            noise, given = step.leaves.get(target), step.made_of(predicted, number) & step.inputs
            if noise is None or noise.dim() < 2 or noise.numel() < _ENOUGH_NOISE or not is_normal(noise):
                continue
            inputs = [one for one in given if step.leaves[one].shape == noise.shape]
            times = [one for one in given if step.leaves[one].numel() == len(noise)]
            for one, time, start in itertools.product(inputs, times, starts):
                found = list(_both_steps(step, target, one, time))
                late = [_nearest(each, start) for each in found]
                if not found or not _is_end(found[0][2], start) or not _traces(found):
                    continue
                share, count = _shared(late)
                if share + _SIGMAS / count**0.5 < _MOSTLY_NOISE:
                    yield said(operation, share=share, start=start)


def _is_end(times: torch.Tensor, start: float) -> bool:
    """Whether a time is about the first or the last one, of several."""
    low, high = float(times.min()), float(times.max())
    near = _END * (high - low)
    return len(times.unique()) >= _LEAST_TIMES and min(abs(start - low), abs(start - high)) <= near


def _nearest(found: list[torch.Tensor], start: float) -> list[torch.Tensor]:
    """The quarter of the rows of noise and inputs whose times are nearest to one."""
    noise, given, times = found
    rows = (times.flatten().double() - start).abs().argsort()[: max(1, len(noise) // 4)]
    return [noise[rows], given[rows]]


def _power(one: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(one, dtype=torch.double)) ** 2 / max(one.numel(), 1)


def _source(step: Step, slot: Slot) -> tuple[set[Slot], Slot]:
    """Where a tensor is from, whatever its shape and its scale: of the step's own draws, or from outside."""
    for operation in step.path(slot):
        if operation.name in _NORMAL:
            return set(operation.outs), _NOWHERE
        if operation.kind not in _SHAPING | {"mul"} or len(operation.given) != 1:
            return set(), _NOWHERE
        slot = operation.given[0]
    return set(), slot


def _is_unseen(slot: Slot, step: Step, made_of: set[Slot]) -> bool:
    """Whether numbers are distributed as normal draws are, and an input of as many has nothing of them."""
    noise = step.leaves[slot]
    alike = [one for one in made_of & step.inputs
             if step.leaves[one].shape == noise.shape and step.leaves[one].is_floating_point()]  # fmt: skip
    drawn = torch.cat([one.flatten() for (one,) in _both_steps(step, slot)])
    if not alike or len(drawn) < _ENOUGH_NOISE or not noise.is_floating_point() or not is_normal(drawn):
        return False
    if any(_traces(list(_both_steps(step, slot, one))) for one in alike):
        return False
    return noise.numel() >= _WIDE * len(noise) or not any(_is_of_neighbours(noise, step.leaves[one]) for one in alike)


def _both_steps(step: Step, *wanted: Slot) -> Iterator[list[torch.Tensor]]:
    """What came from outside in the step, and in the one that was written down before it, with as many rows."""
    for tape in (step.tape, step.kept.earlier.get(step.optimizer)):
        found = [] if tape is None else [tape.leaves[one] for one in wanted if one in tape.leaves]
        is_whole = len(found) == len(wanted) and len({one.shape[:1] for one in found}) == 1
        if is_whole and all(one.shape[1:] == step.leaves[at].shape[1:]
                                             for one, at in zip(found, wanted, strict=True)):  # fmt: skip
            yield found


def _traces(pairs: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether two tensors go with each other: surely, or clearly and not quite by chance."""
    share, count = _shared(pairs)
    errors = share * count**0.5
    return errors >= _SIGMAS or (errors >= _SIGMAS / 2 and share >= _TRACE)


def _shared(pairs: Sequence[Sequence[torch.Tensor]]) -> tuple[float, int]:
    """The size of the correlation of two tensors, and of how many numbers it is."""
    one, other = (torch.cat([spread(pair[side]) for pair in pairs]) for side in (0, 1))
    return abs(_correlation(one, other)), len(one)


def _is_of_neighbours(noise: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether rows that lie beside each other have targets that are alike."""
    one, target = (x[:_NEIGHBOURS_OF].reshape(min(len(x), _NEIGHBOURS_OF), -1).double() for x in (given, noise))
    nearest = torch.cdist(one, one).fill_diagonal_(torch.inf).argmin(1)
    return bool(abs(_correlation(target[nearest].flatten(), target.flatten())) > _SIGMAS / target.numel() ** 0.5)


@asks("indices")
def of_indices(step: Step) -> Iterator[Probed]:
    """Whether a target is a sum of numbers and of the places at which what a net gave is largest."""
    values, made = step.values, set(step.parameters)
    places: dict[Slot, Operation] = {}  # what is computed of places alone, and numbers from outside
    sums: dict[Slot, Operation] = {}  # of them and of something else
    for one in step.operations:
        given = one.given
        is_difference = one.kind == "sub" and any(values[slot].requires_grad for slot in given)
        if one.name in _CHOOSING and made & set(given):
            places |= {slot: one for slot in one.outs if values[slot].dtype == torch.int64}
        elif one.name in DISTANCES or is_difference:
            wrong = next((sums[slot] for slot in given if slot in sums and not values[slot].requires_grad), None)
            if wrong is not None:
                yield said(wrong, op=wrong.name)
        elif one.kind in _ARITHMETIC | _SHAPING | _CASTING or (one.name in _PARTS and len(given) == 1):
            of = next((known[slot] for known in (sums, places) for slot in given if slot in known), None)
            beside = [slot for slot in given if slot not in places and slot not in sums]
            is_sum = one.kind in ("add", "sub", "rsub") and any(values[slot].is_floating_point() for slot in beside)
            if of is not None:
                (sums if is_sum or set(given) & sums.keys() else places).update(dict.fromkeys(one.outs, of))
        if made & set(given):
            made |= set(one.outs)


@asks("rows of marks")
def rows_of_marks(step: Step) -> Iterator[Probed]:
    """Whether rows are picked by zeros and ones, one for each row, as if they were numbers of rows."""
    for operation in step.used("__getitem__", "index_select"):
        is_of_rows = operation.name == "__getitem__" or 0 in (*operation.args[1:2], operation.kwargs.get("dim"))
        if len(operation.given) != 2 or operation.given[1] not in (operation.args[-1], operation.kwargs.get("index")):
            continue  # by several indices, or places of more than the rows
        if not is_of_rows or operation.given[0] in step.parameters:
            continue  # a table that is looked up
        source, marks = (step.values[one].detach() for one in operation.given)
        if marks.dtype in (torch.int64, torch.int32) and marks.dim() == 1 and len(marks) == len(source) >= _MARKED:
            count = int(marks.sum())
            if 0 < count < len(marks) and bool(((marks == 0) | (marks == 1)).all()):
                yield said(operation, op=operation.name, ones=count, rows=len(marks))


def _given(operation: Operation) -> dict[str, Any]:
    return {**dict(zip(_ORDER.get(operation.name, ()), operation.args, strict=False)), **operation.kwargs}


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


@asks("picked apart")
def picked_apart(step: Step) -> Iterator[Probed]:
    """Whether what a net makes of some rows is compared with the targets of others, of as many for each.

    As of nodes of a graph, of which one side is picked by their numbers or a mask, and the other one cut off.
    """
    for operation in step.used(*OF_CLASSES, *DISTANCES, "binary_cross_entropy", "binary_cross_entropy_with_logits"):
        given = operation.given[:2]
        if len(given) < 2 or [step.values[one].requires_grad for one in given] != [True, False]:
            continue
        picks = [pick for one in given if (pick := _picked(step, one)) is not None]
        if len(picks) < 2 or picks[0][0] != picks[1][0] or picks[0][2] == picks[1][2]:
            continue  # by two indices, as those of the ends of edges
        mine, others = (rows for _, rows, _ in picks)
        if len(mine) == len(others) and len((mine - others).unique()) > 1:
            apart = int((mine != others).sum())
            seen: dict[str, Any] = {"mine": mine[:3].tolist(), "others": others[:3].tolist()}
            yield said(operation, op=operation.name, apart=apart, of=len(mine), **seen)


def _picked(step: Step, slot: Slot) -> tuple[int, torch.Tensor, bool] | None:
    """Of how many rows some were picked, which ones, and whether by their numbers or a mask."""
    for operation in step.path(slot):
        source = step.values[operation.given[0]] if operation.given else None
        if source is not None and source.dim() and operation.name in ("__getitem__", "index_select"):
            return len(source), _numbers_of(step, operation, source), len(operation.given) > 1
        if operation.kind not in _SHAPING | _CASTING | {"log_softmax"}:
            return None
    return None


def _numbers_of(step: Step, operation: Operation, source: torch.Tensor) -> torch.Tensor:
    """The numbers of the rows that an operation takes of a tensor."""
    numbers = torch.arange(len(source), device=source.device).reshape(-1, *[1] * (source.dim() - 1))
    found: torch.Tensor = operation.again({**step.values, operation.given[0]: numbers.expand(source.shape)})
    return found.flatten(1)[:, 0] if found.dim() > 1 else found


@asks("uncounted")
def masked_out(step: Step) -> Iterator[Probed]:
    """Whether no row of one class has a gradient at its outputs, and each row of the others has."""
    tokens = [
        one for slot, one in step.leaves.items() if slot in step.needed and one.dim() > 1 and len(one) == step.rows
    ]
    calls = list(step.used(*OF_CLASSES))
    if len(calls) != 1 or any(not one.is_floating_point() for one in tokens):
        raise Unknown("there is not one loss of classes, or rows of tokens may be padding")
    places = [_before_picking(step, one) for one in calls[0].given[:2]]
    scores, target = (step.values[one] for one in places)
    if scores.dim() != 2 or len(scores) != step.rows or target.shape != (step.rows,) or target.is_floating_point():
        raise Unknown("targets are not one class for each row")
    (slope,) = step.slopes(places[0])
    if slope is None:
        raise Unknown("the loss does not depend on the scores")
    counted = slope.bool().any(1)
    known = (target >= 0) & (target < scores.shape[1])
    kinds = set(target[known & ~counted].tolist())
    if not kinds & set(target[known & counted].tolist()):
        counts = target[known].bincount(minlength=scores.shape[1]).tolist()
        yield from left_out(-1, counts, sorted(kinds), calls[0], "mask")


def _before_picking(step: Step, slot: Slot) -> Slot:
    """What a tensor was before some of its rows were picked."""
    for operation in reversed(step.tape.operations):
        if slot in operation.outs and operation.name in _PICKED:
            slot = next(iter(operation.given), slot)
    return slot


def left_out(root: int, counts: Sequence[float], numbers: Sequence[int], place: Any, by: str) -> Iterator[Probed]:
    """The classes that are left out though they are about as frequent as the others."""
    others = [count for number, count in enumerate(counts) if count and number not in numbers]
    usual = sum(others) / len(others) if others else 0.0
    for number in numbers:
        if counts[number] >= _LEAST and usual / _USUAL <= counts[number] <= usual * _USUAL:
            share = counts[number] / sum(counts)
            yield told("uncounted", place, root=root, number=number, share=share, classes=len(counts), by=by)
