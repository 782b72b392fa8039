"""Ways of a gradient: does an own autograd.Function follow it, and does it pass the steps of a sequence or a flow?"""

import inspect
import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anybatch.doctor.ask.differences import differing, near
from anybatch.doctor.ask.keeping import Function, Kept
from anybatch.doctor.ask.steps import DISTANCES, PRODUCTS, Step, asks, replayed, said, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Slot, slots
from anybatch.doctor.ask.trials import FAILURES, Line, Unknown, tensors, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run
from anybatch.tensors.randomness import seed

_FLAT = frozenset({"round", "floor", "ceil", "trunc", "sign", "bernoulli", "normal", "heaviside"})
_WITH_FACTORS = frozenset({"mul", "div", "linear", "einsum", "conv1d", "conv2d", *PRODUCTS})  # of which one may be 0
_FAR = (1, -1, 10, -10, 100, -100, 1000, -1000)  # how far numbers are moved where nothing may change
_LEAST_CUTS = 3
_CELLS = ("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
_REVERSING = re.compile(r"revers|(?<![a-z])grl|grl(?![a-z])|gradrev|flip", re.I)
_FOR_A_DRAW = frozenset({"exp", "mul", "div", "sqrt", "softplus", "pow", "expand", "expand_as", "view", "reshape",
                         "unsqueeze", "squeeze", "clamp", "clone", "contiguous"})  # fmt: skip
_PIECES = frozenset({"__getitem__", "select", "unbind", "split", "chunk"})
_CLOSE, _SAME = 1e-4, 1e-5
_MOST_ENTRIES, _LITTLE = 64, 0.05  # of a row, and of the logarithm of a volume
_OFF = 0.2  # of the deviation of that over rows
_MOVING = frozenset({"add", "sub", "addcmul", "addcdiv", "subtract"})
_SUMS = frozenset({"add", "sub", "rsub", "subtract", *DISTANCES})


def about_functions(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a backward gives the opposite for the opposite of what comes in, and what differences say."""
    for one in kept.functions:
        answer, why, keeps_sign = _asked(one)
        seen: dict[str, Any] = {"cls": one.cls.__name__}
        if answer == "no" and one.given:
            answer, more = differing(one.cls, one.given, one.context.needs_input_grad)
            seen |= more
        if answer == "no" and _REVERSING.search(one.cls.__name__) and keeps_sign:
            answer, seen = "yes", seen | {"kind": "not reversed"}
        yield told("function gradient", _line(one.cls), answer=answer, detail=why, **seen)


def _asked(one: Function) -> tuple[str, str, bool]:
    """The answer, why, and whether the backward gives a positive multiple of what comes in, as no reversal does."""
    seed(0)
    given = [torch.randn(shape, dtype=one.dtype) * 0.01 for shape in one.shapes]
    try:
        with torch.no_grad():
            found = [tensors(one.cls.backward(one.context, *[f * g for g in given])) for f in (1, 2, -1)]
    except FAILURES as error:
        return "unknown", f"{type(error).__name__}: {error}"[:200], False
    pairs = [(a, b, c) for a, b, c in zip(*found, strict=False) if a.numel() and bool(a.count_nonzero())]
    if any(near(a, c, _SAME) for a, _, c in pairs):
        same = any(near(a, b, _SAME) for a, b, _ in pairs)
        why = "twice the gradient and minus the gradient give the same" if same else "minus gives the same"
        return "yes", why, False
    alike = [(a, b) for a, b in zip(given, found[0], strict=False) if a.shape == b.shape and bool(b.any())]
    return "no", "", bool(alike) and all(near(a / a.norm(), b / b.norm(), _SAME) for a, b in alike)


def _line(cls: Any) -> Line:
    try:
        return Line(inspect.getsourcefile(cls.backward) or "", inspect.getsourcelines(cls.backward)[1] + 1)
    except (OSError, TypeError):
        return Line()


@asks("flat")
def flat(step: Step) -> Iterator[Probed]:
    """Where the loss goes through an operation whose gradient is zero everywhere, and what it keeps from learning."""
    values = step.values
    made = [one for one in step.used() if one.grad and one.given and values[one.given[0]].requires_grad]
    deaf = [one for one in made if one.kind not in _WITH_FACTORS and one.drawn is None and len(one.outs) == 1
            and values[one.outs[0]].requires_grad]  # fmt: skip
    every = list({slot for one in deaf for slot in (one.outs[0], one.given[0])})
    own = [slot for slot in step.parameters if values[slot].requires_grad]
    slopes = dict(zip((*every, *own), step.slopes(*every, *own), strict=True)) if every else {}
    still = {slot for slot in own if slot in slopes and not _is_slope(slopes[slot])}
    candidates = {id(one) for one in deaf if _is_slope(slopes[one.outs[0]]) and not _is_slope(slopes[one.given[0]])}
    for one in made:
        if time.perf_counter() > step.until:
            raise Unknown("there was no time left")
        name = one.name.strip("_")
        if name in _FLAT:
            yield said(one, op=name, constant=False)
        elif still and id(one) in candidates and _is_constant(step, one):
            before = {id(step.parameters[slot]) for slot in still & step.made_of(one.given[0])}
            names = {(root, name) for root, module in step.modules.items()
                     for name, held in module.named_parameters() if id(held) in before}  # fmt: skip
            numbers = [at for at, facts in step.run.parameters.items() if (facts.root, facts.name) in names]
            if numbers:
                yield said(one, op=name, constant=True, parameters=numbers)


def _is_slope(one: torch.Tensor | None) -> bool:
    return one is not None and bool(one.any())


def _is_constant(step: Step, one: Operation) -> bool:
    """Whether what it gives is the same for numbers near and far to both sides, as a softmax of one entry."""
    given, own = step.values[one.given[0]].detach(), step.values[one.outs[0]]
    noise, others = torch.randn_like(given) * (1 + given.abs()), dict(step.values)
    for far in _FAR:
        others[one.given[0]] = given + far * noise
        with torch.no_grad():
            if not torch.equal(one.again(others), own):
                return False
    return True


@asks("zero factor", of_rows=False)
def zero_factor(step: Step) -> Iterator[Probed]:
    """Whether a factor of the loss that has no gradient is zero everywhere, and where it has become so."""
    values = step.values
    for one in step.used("mul"):
        for factor, other in itertools.permutations(one.given, 2):
            made, rest = values[factor], values[other]
            if rest.requires_grad and not made.requires_grad and made.numel() > 1 and not bool(made.any()):
                zero = [each for each in step.path(factor) if not bool(values[each.outs[0]].any())]
                if zero and any(bool(values[slot].any()) for slot in zero[-1].given):
                    own = any(_is_own_mean(step, slot) for slot in zero[-1].given[1:])
                    own = own and zero[-1].kind == "sub"
                    yield said(zero[-1], entries=made.numel(), own_mean=own, optimizer=step.optimizer)


def _is_own_mean(step: Step, slot: Slot) -> bool:
    """Whether a mean is that of one entry, as over an axis of one row."""
    made = next(step.path(slot), None)
    is_mean = made is not None and made.kind == "mean"
    return is_mean and step.values[slot].numel() == step.values[made.given[0]].numel() > 1  # type: ignore[union-attr]


@asks("forgotten")
def forgotten(step: Step) -> Iterator[Probed]:
    """Whether a state is detached at each step of a sequence, so that a loss behind it trains the last step only."""
    lines: dict[tuple[str, int], list[Operation]] = {}
    pieces: dict[Slot, int] = {}
    made: dict[Slot, list[Slot]] = {}  # by parameter what each operation with it gave
    for one in step.operations:
        given = one.given
        if one.name == "detach" and step.needed & set(one.outs) and step.values[given[0]].requires_grad:
            lines.setdefault((one.file, one.line), []).append(one)
        elif one.name in _PIECES and given and not step.values[given[0]].requires_grad:
            pieces[given[0]] = pieces.get(given[0], 0) + len(one.outs)
        for slot in set(given) & step.parameters.keys() if one.grad and one.outs else ():
            made.setdefault(slot, []).append(one.outs[0])
    for cuts in lines.values():
        again = [one[:-1] for one in made.values() if len(cuts) <= len(one) <= len(cuts) + 1]
        if len(cuts) < _LEAST_CUTS or not again or not any(count >= len(cuts) for count in pieces.values()):
            continue  # without pieces it is no sequence: what is made again of the same may be trained by its last step
        if all(one is None for one in step.slopes(*itertools.chain(*again))):
            yield said(cuts[0], steps=len(cuts))


@asks("detached draw", of_rows=False)
def detached_draw(step: Step) -> Iterator[Probed]:
    """Whether the mean or the deviation of what is drawn with noise is detached, and trained by the rest of the loss.

    As in ``mean.detach() + deviation * noise``, where a penalty alone draws the mean, and what is made of the draw
    has no gradient for it. A deviation of data that scales some noise is in no other term.
    """
    makers = {slot: one for one in step.operations for slot in one.outs if slot not in one.given}
    drawn = {slot for one in step.operations if one.drawn is not None for slot in one.outs}
    for operation in step.used("add"):
        for mean, noise in itertools.permutations(operation.given, 2) if len(operation.given) == 2 else ():
            made = makers.get(noise)
            scales = made.given if made is not None and made.kind == "mul" and len(made.given) == 2 else ()
            scale = next((one for one in scales if one not in drawn), None)
            if scale is None or len(drawn & set(scales)) != 1:
                continue
            for part, other, name in ((mean, scale, "mean"), (scale, mean, "deviation")):
                cut = _cut_off(makers, part) if step.values[other].requires_grad else None
                (slope,) = step.slopes(cut.given[0]) if cut and step.values[cut.given[0]].requires_grad else (None,)
                if cut is None or slope is None or not bool(slope.any()):
                    continue
                is_of_it = cut.given[0] == other  # noise of the size of a value
                if not is_of_it and not _is_compared(step, cut.given[0], operation.outs[0]):
                    yield said(cut, part=name, op=cut.name)


def _is_compared(step: Step, slot: Slot, draw: Slot) -> bool:
    """Whether a tensor meets what comes from outside otherwise than by a draw, and is trained by that."""
    behind = step.made_with(slot) - step.made_with(draw)
    meeting = step.used("sub", "rsub", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", *DISTANCES)
    return any(set(one.given) & behind and set(one.given) & step.inputs for one in meeting)


def _cut_off(makers: Mapping[Slot, Operation], slot: Slot) -> Operation | None:
    """The detach behind which a tensor was only given another shape, or made positive."""
    one = makers.get(slot)
    while one is not None and one.kind in _FOR_A_DRAW and len(one.given) == 1:
        one = makers.get(one.given[0])
    return one if one is not None and one.name in ("detach", "data") else None


@asks("not carried")
def not_carried(step: Step) -> Iterator[Probed]:
    """Whether each call of a recurrent cell starts from one and the same state, or from zeros, and not from the last.

    Of a cell that is called for the pieces of a sequence; branches of one state need as many calls, but no sequence.
    """
    for same in _of_sequences(step):
        states = [tuple(slots(one.args[1])) for one in same]
        if not all(states):
            continue
        is_zero = not any(bool(step.values[slot].count_nonzero()) for state in states for slot in state)
        if len(set(states)) == 1 or is_zero:
            yield said(same[1], op=same[1].name, steps=len(same), zero=is_zero)


def _of_sequences(step: Step) -> Iterator[list[Operation]]:
    """The calls of each recurrent cell, in their order, with more than a few inputs."""
    calls: dict[frozenset[Slot], list[Operation]] = {}
    for one in step.used(*_CELLS):
        if one.grad:
            calls.setdefault(frozenset(set(one.given) & step.parameters.keys()), []).append(one)
    return (same for same in calls.values() if len({one.given[0] for one in same}) > _LEAST_CUTS)


@asks("cut between")
def cut_between(step: Step) -> Iterator[Probed]:
    """Whether a recurrent cell gets its last state detached in each call, though each output is in the loss."""
    makers = {slot: one for one in step.operations for slot in one.outs}
    for same in _of_sequences(step):
        made = [{slot for one in step.operations if set(before.outs) & set(one.given) and one.name != "detach"
                 for slot in one.outs if step.values[slot].requires_grad} for before in same[:-1]]  # fmt: skip
        states = [[makers.get(slot) for slot in slots(one.args[1])] for one in same[1:]]
        cut = [bool(each) and all(one is not None and one.name == "detach" and one.given[0] in before.outs
                                  for one in each) for before, each in zip(same, states, strict=False)]  # fmt: skip
        if all(made) and all(cut):
            yield said(same[1], op=same[1].name, steps=len(same))


@asks("twice", of_rows=False)
def twice(step: Step) -> Iterator[Probed]:
    """Whether a layer is given one and the same tensor twice, as when one of two names in a line was not changed."""
    seen: set[tuple[Any, ...]] = set()
    for one in step.operations:
        call = (one.name, *one.given)
        held = [step.parameters[slot] for slot in one.given if slot in step.parameters]
        shapes = [list(weight.shape) for weight in held if weight.dim() > 1]
        if shapes and one.grad and one.outs and call in seen:
            yield said(one, op=one.name, shape=shapes[0])
        seen.add(call)


@asks("outer", of_rows=False)
def outer(step: Step) -> Iterator[Probed]:
    """Where a column of outputs meets a row of as many targets, or a row a column: each is taken with every other one.

    Two outputs that meet so are pairs by intent.
    """
    for one in step.used():
        shapes = {tuple(step.values[slot].shape) for slot in one.given}
        rows = max((shape[0] for shape in shapes if shape), default=0)
        graphs = {step.values[slot].requires_grad for slot in one.given}
        is_outer = rows > 1 and shapes == {(rows,), (rows, 1)} and step.values[one.outs[0]].shape == (rows, rows)
        if is_outer and len(graphs) > 1:
            yield said(one, op=one.name, optimizer=step.optimizer)


@asks("cut off", of_rows=False)
def cut_off(step: Step) -> Iterator[Probed]:
    """Where numbers with a graph become numbers without one on the way to the loss, such as by a draw."""
    first = next((one for one in step.used() if _cuts(step, one)), None)
    if first is not None:
        same = [one for one in step.used() if (one.file, one.line, one.grad) == (first.file, first.line, False)]
        yield said(first, op=same[-1].name, optimizer=step.optimizer)


def _cuts(step: Step, operation: Operation) -> bool:
    made = [step.values[slot] for slot in operation.given if slot not in step.leaves]
    gave = [step.values[slot] for slot in operation.outs]
    numbers = bool(gave) and all(value.is_floating_point() for value in gave)
    return numbers and not operation.grad and any(value.requires_grad for value in made)


@asks("quantised")
def quantised(step: Step) -> Iterator[Probed]:
    """Whether what is nearest takes the place of what an encoder made, and what is behind it does not train that."""
    for place, choice in enumerate(step.operations):
        nearest = choice.outs[-1] if choice.name in ("argmin", "min") and choice.outs else None
        if nearest is None or step.values[nearest].dtype != torch.int64 or _has_backward(step, choice):
            continue
        before = step.made_of(nearest, place + 1) & step.parameters.keys()
        follows, table, lookup = {nearest}, set[Slot](), choice
        for one in step.operations[place + 1 :]:
            given = set(one.given)
            held = given & step.parameters.keys()
            if not given & follows:
                continue
            follows |= set(one.outs)
            if held <= before:
                table |= held
                lookup = one if held else lookup
            elif step.needed & set(one.outs):
                encoder = [value for slot in before - table if (value := step.values[slot]).requires_grad]
                made = step.values[one.outs[0]].sum()
                found = torch.autograd.grad(made, encoder, retain_graph=True, allow_unused=True) if encoder else ()
                if encoder and all(slope is None for slope in found):
                    yield said(lookup, op=choice.name)
                break


def _has_backward(step: Step, operation: Operation) -> bool:
    """Whether an operation is in the forward of an own function that gets something with a graph.

    What a step that is run again makes there has no graph, and the backward of the function says what passes.
    """
    for one in step.kept.functions:
        try:
            (lines, first), file = inspect.getsourcelines(one.cls.forward), inspect.getsourcefile(one.cls.forward)
        except (OSError, TypeError):
            continue
        inside = [each for each in step.operations if each.file == file and first <= each.line < first + len(lines)]
        made = {slot for each in inside for slot in each.outs}
        given = {slot for each in inside for slot in each.given} - made - step.parameters.keys()
        if operation in inside and any(step.values[slot].requires_grad for slot in given):
            return True
    return False


@asks("constant derivative", of_rows=False)
def constant_derivative(step: Step) -> Iterator[Probed]:
    """Whether a derivative by an input meets in a sum what the model made, and has no graph of its own there.

    One that moves an input, as an attack does, or that weighs a term, is a constant by intent.
    """
    constants = [one for one in step.used("grad") if not one.kwargs.get("create_graph")]

    def made_by(slot: Slot) -> set[Slot]:
        whole = Loss(slot, step.loss.before, "", 0)
        return slots_of(step.tape, whole, but=constants) & step.parameters.keys()

    for place, one in enumerate(step.operations):
        if one not in constants or not all(map(list, map(slots, one.args[:2]))):
            continue
        of = {held for slot in slots(one.args[0]) for held in made_by(slot) if step.values[held].requires_grad}
        if any(made_by(slot) for slot in slots(one.args[1])) or all(slope is None for slope in step.slopes(*of)):
            continue  # by a parameter, as for weights of terms, or of a net that is not trained
        derived = set(one.outs)
        for later in step.operations[place + 1 :]:
            others = set(later.given) - derived
            if len(others) == len(later.given) or others & step.parameters.keys() or not step.needed & set(later.outs):
                continue
            if not any(made_by(slot) for slot in others):
                derived |= set(later.outs)
            elif later.kind in _SUMS:
                yield said(one, op=later.kind)


@asks("flat derivative")
def flat_derivative(step: Step) -> Iterator[Probed]:
    """Whether a derivative of a derivative is 0 in all rows, as that of a net of straight pieces is."""
    derived = set[Slot]()
    for one in step.used("grad"):
        of = step.made_of(next(iter(slots(one.args[:1])), Slot(-1)))
        found = [step.values[out] for out in one.outs]
        if of & derived and found and all(map(_is_flat, found)):
            # with saturated units it is flat, too, but was not at the start
            first = replayed(step.tape, step.loss, held=step.kept.first_of(step.tape)).values
            if all(_is_flat(first[out]) for out in one.outs):
                yield said(one, rows=len(found[0]))
        derived |= set(one.outs)


@asks("mixed derivative", of_rows=False)
def mixed_derivative(step: Step) -> Iterator[Probed]:
    """Whether all columns of a derivative by an input are derived at once by it, so that mixed ones are added."""
    derived: dict[Slot, Slot] = {}
    for one in step.used("grad"):
        named = dict(zip(("outputs", "inputs", "grad_outputs"), one.args, strict=False)) | one.kwargs
        of, by = (list(slots(named.get(each))) for each in ("outputs", "inputs"))
        if len(of) != 1 or len(by) != len(one.outs):  # with allow_unused some may have none
            continue
        for slot, out in zip(by, one.outs, strict=False):
            whole = of[0] if of[0] in derived else next((each.given[0] for each in itertools.islice(step.path(of[0]), 1)
                                                         if each.kind == "sum"), of[0])  # fmt: skip
            first, given = step.values[whole], step.values[slot]
            weights = [step.values[each] for each in slots(named.get("grad_outputs"))]
            is_whole = derived.get(whole) == slot and all(bool((each == 1).all()) for each in weights)
            if is_whole and first.shape == given.shape and given.dim() == 2 and given.shape[1] > 1:
                made, own = step.values[out].detach(), torch.stack([
                    torch.autograd.grad(column.sum(), given, retain_graph=True)[0][:, at]
                    for at, column in enumerate(first.unbind(1))
                ], 1)  # fmt: skip
                if float((made - own).abs().max()) > _OFF * float(made.abs().max()):
                    yield said(one, columns=given.shape[1])
            derived[out] = slot


@asks("norm of places")
def norm_of_places(step: Step) -> Iterator[Probed]:
    """Whether a norm of a derivative by pictures is taken over their channels alone, and drawn to a number."""
    derived = {out for one in step.used("grad") for out in one.outs}
    is_of_pictures = any(one.name == "conv2d" and step.values[one.given[1]].shape[-1] > 1 for one in step.used())
    for one in step.used("norm", "linalg_vector_norm", "linalg_norm") if is_of_pictures else ():
        given, made = (step.values[slot] for slot in (one.given[0], one.outs[0]))
        later = [each for each in step.used("sub", "rsub") if each.given == [*one.outs]]
        if one.given[0] in derived and given.dim() == 4 and len(given) == step.rows and later and made.dim() > 1:
            numbers = made.numel() // step.rows
            if numbers > 1:
                yield said(one, op=one.name, shape=list(given.shape), numbers=numbers)


def _is_flat(values: torch.Tensor) -> bool:
    return len(values) > 1 and not bool(values.detach().any())


@asks("unused update", of_rows=False)
def unused_update(step: Step) -> Iterator[Probed]:
    """Whether weights that gradients with a graph were subtracted from meet no data, and reach no loss."""
    needed = set[Slot]().union(*(slots_of(step.tape, loss) for loss in step.tape.losses))
    for place, one in enumerate(step.operations):
        if one.kind != "grad" or not one.kwargs.get("create_graph"):
            continue
        derived, moved, is_used = set(one.outs), list[Operation](), bool(needed & set(one.outs))
        for later in step.operations[place + 1 :]:
            given = set(later.given)
            if not given & derived:
                continue
            others = given - derived
            is_update = bool(others) and all(step.values[slot].requires_grad for slot in others)
            is_used |= bool(needed & set(later.outs)) or bool(others and not is_update)
            moved += [later] * (is_update and later.kind in _MOVING)
            derived |= set(later.outs)
        if moved and not is_used:
            yield said(moved[-1], tensors=len(moved))


@asks("passed")
def passed(step: Step) -> Iterator[Probed]:
    """Whether entries of the data are the same behind all layers of a flow.

    What a normal density is taken of is known by the slope of the loss in it, which is itself times a number. Where
    some of its entries are bitwise those of the data in each row, behind several layers, nothing is learned of them.
    """
    values, needed, of = step.values, step.needed, _parameters_of(step)
    latent = _latent(step, of)
    made = values[latent]
    operation = next(step.path(latent))
    for given in (one for one in values if one in needed and not of.get(one) and values[one].shape == made.shape):
        same = (made == values[given]).all(0)
        layers = [values[slot] for slot in needed if of.get(slot) and of[slot] < of[latent]]
        own = [(one == values[given]).all(0) for one in layers if one.shape == made.shape]
        keeps = any(one[same].all() and not one.all() for one in own)  # these entries, and others that it made
        if keeps and 0 < int(same.sum()) < same.numel():
            yield said(operation, entries=int(same.sum()), of=same.numel())


@asks("turned volume")
def turned_volume(step: Step) -> Iterator[Probed]:
    """Whether a loss has the logarithm of how a flow stretches volumes, its determinant, with the other sign.

    Less the squares of what a normal density is taken of, minus a log-likelihood is minus that and a constant.
    """
    made, factor, stretched, values = _flow(step)
    own, stretch = values[made].detach().double(), float(stretched.sum())
    rest, constant = float(values[step.loss.slot].sum()) / factor - float(own.pow(2).sum()) / 2, math.log(math.tau) / 2
    knowns = (0.0, constant * own.numel())
    off = min((abs(rest - known - stretch), known) for known in knowns)
    right = min(abs(rest - known + stretch) for known in knowns)  # both may fit by chance
    wrong = abs(stretch) > _LITTLE * len(own) and off[0] < _LITTLE * abs(stretch) <= right
    place = next(step.path(step.loss.slot))
    yield said(place, answer="yes" if wrong else "no", loss=factor * (rest + float(own.pow(2).sum()) / 2),
               turned=factor * (float(own.pow(2).sum()) / 2 + off[1] - stretch))  # fmt: skip


@asks("false volume")
def false_volume(step: Step) -> Iterator[Probed]:
    """Whether what a loss adds for how a flow stretches each row is not the logarithm of the determinant of its map.

    Its slope is minus that of half the squares of what a normal density is taken of. A constant may be missing.
    """
    made, factor, stretched, values = _flow(step)
    rows = [
        one
        for one in sorted(step.needed - step.parameters.keys())
        if one in step.values and step.values[one].requires_grad and step.values[one].numel() == step.rows
    ]
    slopes = zip(rows, step.slopes(*rows), strict=True) if rows else ()
    known = [one for one, slope in slopes if slope is not None
             and float((slope.double() + factor).abs().max()) < _CLOSE * abs(factor)]  # fmt: skip
    squares = values[made].detach().double().flatten(1).pow(2).sum(1) / 2
    later = step.made_with(made)  # a log-likelihood has the squares, too
    claims = [(step.values[one].detach().double().flatten() + squares * (one in later), one) for one in known]
    last = [(one, slot) for one, slot in claims if step.made_with(slot).isdisjoint({*known} - {slot})]
    if len(last) > 1:  # means that are added up have no row for all
        claims.append((torch.stack([one for one, _ in last]).sum(0), last[-1][1]))
    if not claims or float(stretched.std()) < _CLOSE:
        raise Unknown("nothing is added to each row of a normal density, or the map stretches all alike")
    off, claimed, slot = min((float((one - stretched).std() / stretched.std()), float(one.mean()), slot)
                             for one, slot in claims)  # fmt: skip
    yield said(next(step.path(slot)), answer="yes" if off > _OFF else "no", off=off, claimed=claimed,
               stretched=float(stretched.mean()))  # fmt: skip


def _flow(step: Step) -> tuple[Slot, float, torch.Tensor, Mapping[Slot, torch.Tensor]]:
    """What a normal density is taken of, how its squares count in the loss, the logarithms of determinants, values."""
    latent = _latent(step, _parameters_of(step))
    size = step.values[latent].numel()
    data = _data_of(step, latent)
    if not data or size > _MOST_ENTRIES * step.rows:
        raise Unknown("a flow of few entries was not seen")
    if step.tape.opaque & step.needed:
        raise Unknown("the first layers of the flow were not seen")
    given = {id(step.leaves[slot]) for slot in data}
    values = replayed(
        step.tape, step.loss, lambda one: one.clone().requires_grad_() if id(one) in given else one
    ).values
    made, (slope,) = values[latent], step.slopes(latent)
    if slope is None:
        raise Unknown("the loss does not depend on what the flow gives")
    columns = made.reshape(step.rows, -1).unbind(1)
    entries = [values[slot] for slot in data]
    if bool(_slopes_of(columns[0][0], entries)[1:].any()):
        raise Unknown("what the flow gives for a row depends on others")
    stretched = torch.stack([_slopes_of(one.sum(), entries) for one in columns], 1).double().slogdet().logabsdet
    if not bool(stretched.isfinite().all()):
        raise Unknown("the map has no determinant")
    own = made.detach().double()
    return latent, float((slope * own).sum() / own.pow(2).sum()), stretched, values


def _data_of(step: Step, latent: Slot) -> list[Slot]:
    """The rows that a flow is given: one tensor, or parts of their entries that were taken apart before."""
    size, own = step.values[latent].numel(), step.inputs & step.made_of(latent)
    rows = [one for one in sorted(own) if step.leaves[one].shape[:1] == (step.rows,)]
    whole = [one for one in rows if step.leaves[one].numel() == size]
    parts = [one for one in rows if step.leaves[one].is_floating_point()]
    return whole[:1] or (parts if sum(step.leaves[one].numel() for one in parts) == size else [])


def _slopes_of(number: torch.Tensor, entries: list[torch.Tensor]) -> torch.Tensor:
    """The derivative by the entries of each row, side by side."""
    slopes = torch.autograd.grad(number, entries, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([one.flatten(1) for one in slopes], 1)


def _latent(step: Step, of: dict[Slot, frozenset[Slot]]) -> Slot:
    """What a normal density is taken of."""
    for slot in sorted(step.needed - step.parameters.keys(), reverse=True):
        if _is_latent(slot, of, step):
            return slot
    raise Unknown("no normal density of what the model makes was seen")


def _is_latent(slot: Slot, of: dict[Slot, frozenset[Slot]], step: Step) -> bool:
    """Whether it is made with all parameters, and the slope of the loss in it is itself times a positive number."""
    one = step.values.get(slot)
    if one is None or not of.get(slot) or of[slot] != of.get(step.loss.slot) or one.dim() < 2 or len(one) != step.rows:
        return False
    if not one.requires_grad or not one.is_floating_point():
        return False
    (slope,) = step.slopes(slot)
    if slope is None or not bool(slope.any()):
        return False
    own = one.detach()
    factor = float((slope * own).sum() / own.pow(2).sum())
    return factor > 0 and float((slope - factor * own).abs().max()) < _CLOSE * float(slope.abs().max())


def _parameters_of(step: Step) -> dict[Slot, frozenset[Slot]]:
    """The parameters that each tensor is made with."""
    of = {slot: frozenset({slot}) for slot, one in step.parameters.items() if one.requires_grad}
    for operation in step.tape.operations:
        made = frozenset[Slot]().union(*(of.get(one, ()) for one in operation.given))
        of |= dict.fromkeys(operation.outs, made)
    return of
