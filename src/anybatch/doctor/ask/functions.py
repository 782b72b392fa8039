"""Ways of a gradient: does an own autograd.Function follow it, and does it pass the steps of a sequence or a flow?"""

import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.differences import differing
from anybatch.doctor.ask.keeping import Function, Kept
from anybatch.doctor.ask.steps import DISTANCES, Step, asks, said, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Slot, slots
from anybatch.doctor.ask.trials import FAILURES, Unknown, tensors, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run
from anybatch.tensors.randomness import seed

_FLAT = frozenset({"round", "floor", "ceil", "trunc", "sign", "bernoulli", "normal", "heaviside"})
_LEAST_CUTS = 3
_CELLS = ("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
_REVERSING = re.compile(r"revers|(?<![a-z])grl|grl(?![a-z])|gradrev|flip", re.I)
_PIECES = frozenset({"__getitem__", "select", "unbind", "split", "chunk"})
_CLOSE = 1e-4
_MOVING = frozenset({"add", "sub", "addcmul", "addcdiv", "subtract"})
_SUMS = frozenset({"add", "sub", "rsub", "subtract", *DISTANCES})


def about_functions(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a backward gives the opposite for the opposite of what comes in, and what differences say."""
    for one in kept.functions:
        answer, why = _asked(one)
        seen: dict[str, Any] = {"cls": one.cls.__name__}
        if answer == "no" and one.given:
            answer, more = differing(one.cls, one.given, one.context.needs_input_grad)
            seen |= more
        if answer == "no" and _REVERSING.search(one.cls.__name__) and _keeps_sign(one):
            answer, seen = "yes", seen | {"kind": "not reversed"}
        found = told("function gradient", answer=answer, detail=why, **seen)
        file, line = _line(one.cls)
        yield replace(found, file=file, line=line)


def _asked(one: Function) -> tuple[str, str]:
    seed(0)
    given = [torch.randn(shape, dtype=one.dtype) * 0.01 for shape in one.shapes]
    try:
        with torch.no_grad():
            found = [tensors(one.cls.backward(one.context, *[f * g for g in given])) for f in (1, 2, -1)]
    except FAILURES as error:
        return "unknown", f"{type(error).__name__}: {error}"[:200]
    pairs = [(a, b, c) for a, b, c in zip(*found, strict=False) if a.numel() and bool(a.count_nonzero())]
    if any(_close(a, c) for a, _, c in pairs):
        same = any(_close(a, b) for a, b, _ in pairs)
        return "yes", "twice the gradient and minus the gradient give the same" if same else "minus gives the same"
    return "no", ""


def _keeps_sign(function: Function) -> bool:
    """Whether what is named after a reversal gives a positive multiple of the gradient that comes in."""
    coming = [torch.randn(shape, dtype=function.dtype) for shape in function.shapes]
    try:
        with torch.no_grad():
            found = tensors(function.cls.backward(function.context, *coming))
    except FAILURES:
        return False
    pairs = [(a, b) for a, b in zip(coming, found, strict=False) if a.shape == b.shape and bool(b.any())]
    return bool(pairs) and all(_close(a / a.norm(), b / b.norm()) for a, b in pairs)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) <= 1e-5 * float(one.abs().max())


def _line(cls: Any) -> tuple[str, int]:
    try:
        return inspect.getsourcefile(cls.backward) or "", inspect.getsourcelines(cls.backward)[1] + 1
    except (OSError, TypeError):
        return "", 0


@asks("flat")
def flat(step: Step) -> Iterator[Probed]:
    """Where the loss goes through an operation whose gradient is zero everywhere."""
    for one in step.used():
        name = one.name.strip("_")
        if name in _FLAT and one.grad and one.given and step.values[one.given[0]].requires_grad:
            yield said(one, op=name)


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


@asks("not carried")
def not_carried(step: Step) -> Iterator[Probed]:
    """Whether each call of a recurrent cell starts from one and the same state, or from zeros, and not from the last.

    Of a cell that is called for the pieces of a sequence; branches of one state need as many calls, but no sequence.
    """
    calls: dict[frozenset[Slot], list[Operation]] = {}
    for one in step.used(*_CELLS):
        if one.grad:
            calls.setdefault(frozenset(set(one.given) & step.parameters.keys()), []).append(one)
    for same in calls.values():
        states = [tuple(slots(one.args[1])) for one in same]
        if len({one.given[0] for one in same}) <= _LEAST_CUTS or not all(states):
            continue
        is_zero = not any(bool(step.values[slot].count_nonzero()) for state in states for slot in state)
        if len(set(states)) == 1 or is_zero:
            yield said(same[1], op=same[1].name, steps=len(same), zero=is_zero)


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


@asks("quantised")
def quantised(step: Step) -> Iterator[Probed]:
    """Whether what is nearest takes the place of what an encoder made, and what is behind it does not train that."""
    for place, choice in enumerate(step.operations):
        nearest = choice.outs[-1] if choice.name in ("argmin", "min") and choice.outs else None
        if nearest is None or step.values[nearest].dtype != torch.int64:
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
        if of & derived and found and all(len(value) > 1 and not bool(value.detach().any()) for value in found):
            yield said(one, rows=len(found[0]))
        derived |= set(one.outs)


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
    made_here = sorted(needed - step.parameters.keys(), reverse=True)
    latent = next((slot for slot in made_here if _is_latent(slot, of, step)), None)
    if latent is None:
        raise Unknown("no normal density of what the model makes was seen")
    made = values[latent]
    operation = next(one for one in step.tape.operations if latent in one.outs)
    for given in (one for one in values if one in needed and not of.get(one) and values[one].shape == made.shape):
        same = (made == values[given]).all(0)
        layers = [slot for slot in needed if of.get(slot) and of[slot] < of[latent] and values[slot].shape
                  == made.shape and _keeps(values[slot], values[given], same)]  # fmt: skip
        if layers and 0 < int(same.sum()) < same.numel():
            yield said(operation, entries=int(same.sum()), of=same.numel())


def _keeps(layer: torch.Tensor, given: torch.Tensor, same: torch.Tensor) -> bool:
    """Whether what a layer gives has these entries of the data, and others that it made."""
    own = (layer == given).all(0)
    return bool(own[same].all()) and not bool(own.all())


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
