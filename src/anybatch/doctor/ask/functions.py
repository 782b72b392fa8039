"""Ways of a gradient: does an own autograd.Function follow it, and does it pass from step to step of a sequence?"""

import inspect
import itertools
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.doctor.ask.differences import differing
from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Operation, Slot, Tape, slots
from anybatch.doctor.ask.trials import FAILURES, tensors, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_MOST_NODES = 3000
_MOST_FUNCTIONS = 8
_FLAT = frozenset({"round", "floor", "ceil", "trunc", "sign", "bernoulli", "normal", "heaviside"})
_LEAST_CUTS = 3
_CELLS = frozenset({"gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"})
_NEAREST = frozenset({"argmin", "min"})
_REVERSING = re.compile(r"revers|(?<![a-z])grl|grl(?![a-z])|gradrev|flip", re.I)
_PLAIN = (torch.Tensor, int, float, bool, str, type(None))
_PIECES = frozenset({"__getitem__", "select", "unbind", "split", "chunk"})


@dataclass(slots=True)
class Function:
    """A function of the user's, with what its forward left for its backward."""

    cls: Any
    context: Any  # has the tensors and attributes of the node of the graph, as copies
    shapes: tuple[tuple[int, ...], ...]  # of the gradients that come in
    dtype: torch.dtype
    given: tuple[Any, ...] = ()  # what its next forward was given, where that is tensors and plain values

    def called(self, args: tuple[Any, ...]) -> None:
        """Is shown a call of its forward."""
        if not self.given:
            args = args[self.cls.setup_context is torch.autograd.Function.setup_context :]  # without the context
            if all(isinstance(one, _PLAIN) for one in args):
                self.given = tuple([one.detach().clone() if torch.is_tensor(one) else one for one in args])


def functions_of(loss: torch.Tensor, known: set[Any]) -> Iterator[Function]:
    """The functions of the user's own in the graph of a loss that were not seen before."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        cls = getattr(type(node), "_forward_cls", None)
        if cls is None or cls in known or len(known) >= _MOST_FUNCTIONS or cls.__module__.startswith("torch."):
            continue
        known.add(cls)
        made = node._input_metadata
        saved = tuple([None if one is None else one.detach().clone() for one in node.saved_tensors])
        left = {**vars(node), "saved_tensors": saved, "needs_input_grad": node.needs_input_grad}
        shapes = tuple([tuple(one.shape) for one in made])
        yield Function(cls, types.SimpleNamespace(**left), shapes, made[0].dtype)


def about_functions(kept: Any, run: Run) -> Iterator[Probed]:
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
    torch.manual_seed(0)
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


def flat(tape: Tape) -> Probed:
    """Where the loss goes through an operation whose gradient is zero everywhere."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    for one in tape.operations[: loss.before]:
        given = next(iter(slots(one.args)), None)
        is_flat = one.name.strip("_") in _FLAT and one.grad and needed & set(one.outs)
        if is_flat and given is not None and run.values[given].requires_grad:
            return told("flat", one, op=one.name.strip("_"))
    return told("flat", answer="no")


def forgotten(tape: Tape) -> Probed:
    """Whether a state is detached at each step of a sequence, so that a loss behind it trains the last step only."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    lines: dict[tuple[str, int], list[Operation]] = {}
    pieces: dict[Slot, int] = {}
    made: dict[Slot, list[torch.Tensor]] = {}  # by parameter what each operation with it gave
    for one in tape.operations[: loss.before]:
        given = list(slots((one.args, one.kwargs)))
        if one.name == "detach" and needed & set(one.outs) and run.values[given[0]].requires_grad:
            lines.setdefault((one.file, one.line), []).append(one)
        elif one.name in _PIECES and given and not run.values[given[0]].requires_grad:
            pieces[given[0]] = pieces.get(given[0], 0) + len(one.outs)
        for slot in set(given) & tape.parameters.keys() if one.grad and one.outs else ():
            made.setdefault(slot, []).append(run.values[one.outs[0]])
    for cuts in lines.values():
        again = [one[:-1] for one in made.values() if len(cuts) <= len(one) <= len(cuts) + 1]
        if len(cuts) < _LEAST_CUTS or not again or not any(count >= len(cuts) for count in pieces.values()):
            continue  # without pieces it is no sequence: what is made again of the same may be trained by its last step
        early = list(itertools.chain(*again))
        slopes = torch.autograd.grad(run.values[loss.slot].sum(), early, retain_graph=True, allow_unused=True)
        if all(one is None for one in slopes):
            return told("forgotten", cuts[0], steps=len(cuts))
    return told("forgotten", answer="no")


def not_carried(tape: Tape) -> Probed:
    """Whether each call of a recurrent cell starts from one and the same state, or from zeros, and not from the last.

    Of a cell that is called for the pieces of a sequence; branches of one state need as many calls, but no sequence.
    """
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    calls: dict[frozenset[Slot], list[Operation]] = {}
    for one in tape.operations[: loss.before]:
        if one.name in _CELLS and one.grad and needed & set(one.outs):
            held = set(slots((one.args, one.kwargs))) & tape.parameters.keys()
            calls.setdefault(frozenset(held), []).append(one)
    for same in calls.values():
        states = [tuple(slots(one.args[1])) for one in same]
        given = {next(iter(slots(one.args))) for one in same}
        if len(given) <= _LEAST_CUTS or not all(states):
            continue
        is_zero = not any(bool(run.values[slot].count_nonzero()) for state in states for slot in state)
        if len(set(states)) == 1 or is_zero:
            return told("not carried", same[1], op=same[1].name, steps=len(same), zero=is_zero)
    return told("not carried", answer="no")


def twice(tape: Tape) -> Probed:
    """Whether a layer is given one and the same tensor twice, as when one of two names in a line was not changed."""
    seen: set[tuple[Any, ...]] = set()
    for one in tape.operations[: tape.losses[-1].before]:
        given = tuple(slots((one.args, one.kwargs)))
        held = [slot for slot in given if slot in tape.parameters and tape.parameters[slot].dim() > 1]
        if held and one.grad and one.outs and (one.name, given) in seen:
            return told("twice", one, op=one.name, shape=list(tape.parameters[held[0]].shape))
        seen.add((one.name, given))
    return told("twice", answer="no")


def quantised(tape: Tape) -> Probed:
    """Whether what is nearest takes the place of what an encoder made, and what is behind it does not train that."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    for place, choice in enumerate(tape.operations[: loss.before]):
        nearest = choice.outs[-1] if choice.name in _NEAREST and choice.outs else None
        if nearest is None or run.values[nearest].dtype != torch.int64:
            continue
        before = slots_of(tape, replace(loss, slot=nearest, before=place + 1)) & tape.parameters.keys()
        follows, table, lookup = {nearest}, set[Slot](), choice
        for one in tape.operations[place + 1 : loss.before]:
            given = set(slots((one.args, one.kwargs)))
            held = given & tape.parameters.keys()
            if not given & follows:
                continue
            follows |= set(one.outs)
            if held <= before:
                table |= held
                lookup = one if held else lookup
            elif needed & set(one.outs):
                encoder = [value for slot in before - table if (value := run.values[slot]).requires_grad]
                made = run.values[one.outs[0]].sum()
                found = torch.autograd.grad(made, encoder, retain_graph=True, allow_unused=True) if encoder else ()
                if encoder and all(slope is None for slope in found):
                    return told("quantised", lookup, op=choice.name)
                break
    return told("quantised", answer="no")
