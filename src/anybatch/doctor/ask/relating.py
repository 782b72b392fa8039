"""Does what was learned belong to the rows? The last loss again, with the targets of other rows.

Wherever something that the parameters make meets something that they do not make, and both have rows, the rows of the
latter are exchanged. The loss of a model that learned what its targets say rises then, whatever kind of loss it is;
that of one that learned no more than how targets are distributed stays.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from statistics import fmean, median, stdev
from typing import Any

import torch

from anybatch.doctor.ask.steps import (
    DISTANCES,
    OF_CLASSES,
    Step,
    asks,
    following,
    replayed,
    said,
    scores_behind,
    slots_of,
    total,
)
from anybatch.doctor.ask.tape import Loss, Operation, Replay, Slot, Tape, rebuilt
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_LEAST_ROWS = 8
_MOST_MEETINGS = 6
_ORDERS = 12
_SECONDS = 3.0
_SURE = 4.0
"""How many spreads of the loss over orders are no accident."""

_UNSURE = 2.5
_MUCH = 0.5
"""A share of the loss that is no accident where it may be one by the spread."""

_LITTLE = 0.05
"""A share of the loss by which it may rise by accident."""

_NOTHING = 0.01
"""A share of the loss that says nothing, however surely it is there."""


_NEXT_TO_NOTHING = 1e-6
"""A share of the loss by which orders differ where rows of one input never meet those of another."""

_ALIKE = 0.95
"""The cosine of rows that have become alike."""

_ALIKE_AS = 1e-3
"""How far rows differ that hardly do, as a share of how far those do that they meet."""

_PAIRING = ("cosine_similarity", "mse_loss", "sub", "mul", "smooth_l1_loss", "l1_loss", "pairwise_distance")
"""Operations that compare, entry by entry, what two inputs become."""

_BY_VALUE = frozenset({"multinomial", "bernoulli", "poisson", "normal", "binomial"})
"""Operations that draw from what their arguments say; a policy's actions are drawn so."""

_LINEAR = 1e-3
"""A share of what a number does to a sum by which that is bent where it is only added."""

_ADDED = "what the parameters do not make is only added"
_WEIGHED = "the loss is a sum of rows, each times a number of either sign"
_HARDLY = "what derivatives stand beside hardly differs from row to row"
_OWN_DRAW = "the loss depends on what was drawn from the model's own outputs"
_PACKING = frozenset({"_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Operations that are given lengths, or how many rows go on at each place."""

_TERMS = DISTANCES | OF_CLASSES | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where what parameters make meets what they do not make."""

    index: int  # of the operation
    slot: Slot  # of what they do not make


@dataclass(frozen=True, slots=True)
class Risen:
    """What other orders of the rows do to a number."""

    own: float  # with the rows as they are
    gain: float  # by how much it rises on average
    spread: float  # how far the orders differ

    @property
    def answer(self) -> str:
        """Whether it rises."""
        size = max(abs(self.own), abs(self.own + self.gain), 1e-12)
        sure, unsure = self.gain > _SURE * self.spread, self.gain > _UNSURE * self.spread
        if (sure and self.gain > _NOTHING * size) or (unsure and self.gain > _MUCH * size):
            return "yes"
        return "no" if self.gain < _LITTLE * size or (not unsure and self.gain < _MUCH / 2 * size) else "unknown"


@asks("related")
def related(step: Step) -> Iterator[Probed]:
    """Whether the loss of a batch rises when its rows are compared with the targets of other rows."""
    optimizer, first = step.optimizer, step.replay
    draw = own_draw(step)
    if draw is not None:  # in another row it is as likely, whatever was learned
        yield said(draw, answer="unknown", detail=_OWN_DRAW, optimizer=optimizer, drawn=draw.name)
    found = meetings_of(step)
    end = min(step.until, time.perf_counter() + _SECONDS)
    if not found or _collapsed(step) is not None:
        yield _of_inputs(step, end)
    tried = [(one, *both) for one in found if (both := risen(step, one, end)) is not None]
    known = [each for each in tried if not _is_only_shifted(step, *each[:2])]
    if not known:
        raise Unknown("the step did not run with other targets")
    where, whole, _ = max(known, key=lambda one: one[1].gain / max(one[1].spread, 1e-12))
    answer = whole.answer if whole.answer == "yes" or len(tried) == len(found) else "unknown"
    if answer == "no" and any(weighs(step, one) for one in found):
        yield said(step.operations[where.index], answer="unknown", detail=_WEIGHED, optimizer=optimizer)
    if answer == "no" and all(_adds(step, one) for one in found):
        yield said(step.operations[where.index], answer="unknown", detail=_ADDED, optimizer=optimizer)
    # a loss of which only the gradient is used need not become small
    terms = slots_of(step.tape, step.loss, without="grad")
    alike = {one.slot for one in found if bool((first.values[one.slot] == first.values[one.slot][:1]).all())}
    derived = step.tape.opaque & step.needed or any(step.used("grad"))  # which may be meant to be zero
    # of what is mixed, a prediction has several targets, and those of the smallest share are hardly in it
    told_apart = {scores for one, _, term in known if term is not None and term.answer == "yes"
                  for scores in _scores_of(step, one)}  # fmt: skip
    evidence: dict[str, Any] = {
        "optimizer": optimizer, "rows": step.rows, "loss": whole.own, "others": whole.own + whole.gain,
        "spread": whole.spread, "meetings": len(known), "alike": not derived and alike >= {one.slot for one in found},
        "apart": [{"op": (of := step.operations[one.index]).name, "file": of.file, "line": of.line, "loss": term.own,
                   "others": term.own + term.gain} for one, _, term in known
                  if term is not None and term.answer == "no" and one.slot not in alike  # ones are no labels
                  and terms & set(step.operations[one.index].outs)
                  and not told_apart & _scores_of(step, one)
                  and not step.made_of(one.slot) & step.parameters.keys()],  # of a net as it was
    }  # fmt: skip
    if answer == "no" and derived and all(_hardly_differs(step, one) for one in found):
        yield said(step.operations[where.index], answer="unknown", detail=_HARDLY, **evidence)
    yield said(step.operations[where.index], answer=answer, **evidence)


def _scores_of(step: Step, where: Meeting) -> set[Slot]:
    """The predictions that meet something there, before any softmax."""
    learned = [one for one in step.operations[where.index].given if step.values[one].requires_grad]
    return {scores_behind(step, one) for one in learned}


def _is_only_shifted(step: Step, where: Meeting, whole: Risen) -> bool:
    """Whether the parameters make it, and no order changes the loss: scores less the largest of each row are such."""
    still, met = max(abs(whole.gain), whole.spread) <= _NEXT_TO_NOTHING * abs(whole.own), step.values[where.slot]
    return still and bool((met != met[:1]).any()) and bool(step.made_of(where.slot) & step.parameters.keys())


def _hardly_differs(step: Step, where: Meeting) -> bool:
    """Whether rows are far more alike than those that they meet, as at the border of an equation."""
    met = [step.values[one].detach() for one in step.operations[where.index].given if one != where.slot]
    own, others = (
        [float((one - one[:1]).abs().max()) for one in each if one.dim() and one.numel() and one.is_floating_point()]
        for each in ([step.values[where.slot].detach()], met)
    )
    return bool(own and others) and own[0] < _ALIKE_AS * max(others)


def weighs(step: Step, where: Meeting) -> bool:
    """Whether a row is weighed there, and not compared, so that the loss need not fall.

    That is with a factor of both signs, as an advantage is, or by the ratio of its probability to that of an older net.
    """
    factor, made = step.values[where.slot], step.operations[where.index]
    if made.kind == "sub" and any(one.name == "exp" and made.outs[0] in one.given for one in step.operations):
        return True
    if step.operations[where.index].kind not in ("mul", "multiply") or not factor.is_floating_point():
        return False
    several = (factor > 0).any() and (factor < 0).any() and len(factor.unique()) > 2  # a label may be 1 or -1
    return bool(several) and _is_straight(step, where)  # noise that is added to a code is multiplied, too


def _adds(step: Step, where: Meeting) -> bool:
    """Whether nothing is compared there: an input is added to what was made of it, or a number to the loss of a row."""
    kind = step.operations[where.index].kind
    return kind == "add" or (kind in ("sub", "rsub", "subtract") and _is_straight(step, where))


def _is_straight(step: Step, where: Meeting) -> bool:
    """Whether the loss goes along a line with what the parameters do not make there."""
    once, values = step.own, list[float]()
    for times in (0, 2):
        changed, moved = _exchanged(step, step.loss, where, partial(mul, times))
        values.append(total(replayed(changed, moved), moved))
    without, twice = values
    return abs(twice - 2 * once + without) < _LINEAR * abs(twice - without)


def own_draw(step: Step) -> Operation | None:
    """The draw from what the parameters made that the loss depends on, as that of a policy does on its actions."""
    made = following(step.operations, step.parameters)
    return next((one for one in step.used(*_BY_VALUE) if made & set(one.given)), None)


def _of_inputs(step: Step, end: float) -> Probed:
    """Of a loss without targets, or one that collapses: whether it rises with other orders of the rows of an input."""
    rows, given = step.rows, _inputs_of(step)
    if len(given) < 2:
        raise Unknown("nothing that the parameters do not make meets what they make")
    generator = torch.Generator().manual_seed(11)
    each: list[Risen] = []
    for leaf in given[:_MOST_MEETINGS]:
        values = [step.own]
        while len(values) <= _ORDERS and time.perf_counter() < end:
            order = torch.randperm(rows, generator=generator)
            values.append(step.loss_with(lambda one, leaf=leaf, order=order: one[order] if one is leaf else one))
        if len(values) < 4 or not all(map(math.isfinite, values)):
            raise Unknown("there was no time left, or the loss is not finite")
        each.append(Risen(values[0], fmean(values[1:]) - values[0], stdev(values[1:])))
    best = max(each, key=lambda one: one.gain / max(one.spread, 1e-12))
    seen: dict[str, Any] = {"optimizer": step.optimizer, "rows": rows, "inputs": len(given)}
    seen |= {"loss": best.own, "others": best.own + best.gain, "spread": best.spread}
    seen |= {"couples": best.spread > _NEXT_TO_NOTHING * abs(best.own) and _couples(step)}
    answer = best.answer if best.answer != "no" or all(one.answer == "no" for one in each) else "unknown"
    collapsed = _collapsed(step)
    answer = "no" if collapsed else answer  # distances are small beside what they are of, and differ
    return told("related inputs", collapsed or step.loss, answer=answer, collapsed=collapsed is not None, **seen)


def _couples(step: Step) -> bool:
    """Whether the loss is another one where each row is there twice, so that rows are told from other rows."""

    def doubled(one: torch.Tensor) -> torch.Tensor:
        return torch.cat([one, one]) if one.shape[:1] == (step.rows,) else one

    try:
        twice = replayed(step.tape, step.loss, doubled, lambda one: 2 * one if one == step.rows else one)
    except Unknown:  # it is not run with more rows
        return False
    return abs(total(twice, step.loss) - step.own) > _LITTLE * abs(step.own)


def _collapsed(step: Step) -> Operation | None:
    """What compares two inputs behind the same parameters, where all rows have become alike, and may be.

    Both have a gradient; targets may be there as well, as labels of pairs.
    """
    for operation in step.used(*_PAIRING):
        given = operation.given[:2]
        sides = [step.values[one] for one in given]
        if len(set(given)) < 2 or sides[0].shape != sides[1].shape or sides[0].dim() != 2:
            continue
        if not all(one.requires_grad for one in sides) or sides[0].shape[1] == 1:
            continue  # scores, which all have the direction of their sign
        one, two = (step.made_of(side) for side in given)
        if not one & two & step.parameters.keys() or not one & step.inputs - two or not two & step.inputs - one:
            continue
        unit = [torch.nn.functional.normalize(side.detach().double(), dim=1) for side in sides]
        if all(float((side @ side.T).mean()) > _ALIKE for side in unit):
            return operation if _is_best_alike(step) else None
    return None


def _inputs_of(step: Step) -> list[torch.Tensor]:
    """What has a place for each row of all that the loss is made of and the parameters do not make."""
    given = [step.leaves[one] for one in sorted(step.inputs & step.needed)]
    return [one for one in given if one.shape[:1] == (step.rows,)]


def _is_best_alike(step: Step) -> bool:
    """Whether the loss is no higher where all rows of all inputs are one: nothing in it keeps rows apart."""
    given = _inputs_of(step)
    values, like = list[float](), {id(one) for one in given if one.shape == given[0].shape}
    for at in range(min(len(given[0]), _ORDERS)):
        row = given[0][at : at + 1]
        values.append(step.loss_with(lambda one, row=row: row.expand_as(one) if id(one) in like else one))
    return median(values) <= step.own + _LITTLE * abs(step.own)


def meetings_of(step: Step) -> list[Meeting]:
    """The last places where both sides follow the rows, and one of them the parameters, the last one first."""
    values, found = step.values, list[Meeting]()
    given = {slot for slot in step.inputs if step.leaves[slot].shape[:1] == (step.rows,)}
    follows = following(  # with what was drawn for each row
        step.operations, given, lambda made: any(one.shape[:1] == (step.rows,) for one in made.drawn or ())
    )
    for index, operation in enumerate(step.operations):
        given = set(operation.given) & follows
        made = [one for one in given if values[one].requires_grad]
        is_none = (
            bool(operation.written) or operation.name == "grad"
        )  # whose numbers of one say of what, and are no targets
        if not made or not operation.grad or not step.needed & set(operation.outs) or is_none:
            continue
        if operation.name in _PACKING or (operation.name == "index_select" and _is_order(values, operation)):
            continue
        others = [one for one in given if not values[one].requires_grad and values[one].dim()]
        found += [Meeting(index, one) for one in sorted(others) if values[one].shape[0] >= _LEAST_ROWS]
    return (found or list(_of_terms(step)))[::-1][:_MOST_MEETINGS]


def _is_order(values: Mapping[Slot, torch.Tensor], picked: Operation) -> bool:
    """Whether all rows are picked, in another order, as where a packed sequence has that of its lengths."""
    index = values[picked.given[-1]]
    return index.dim() == 1 and torch.equal(index.sort().values, torch.arange(len(index), device=index.device))


def _of_terms(step: Step) -> Iterator[Meeting]:
    """Where a loss function has targets from outside, however many rows they have, as of an episode or a graph."""
    for index, operation in enumerate(step.operations):
        made, target = [*operation.given[:2], None, None][:2]
        if operation.name not in _TERMS or made is None or target is None or not step.needed & set(operation.outs):
            continue
        is_target = target in step.inputs and not step.values[target].requires_grad and step.values[target].dim() > 0
        if is_target and step.values[made].requires_grad and len(step.values[target]) >= _LEAST_ROWS:
            yield Meeting(index, target)


def risen(
    step: Step, where: Meeting, end: float, loss: Loss | None = None, first: Replay | None = None,
    held: Mapping[Slot, torch.Tensor] | None = None,
) -> tuple[Risen, Risen | None] | None:  # fmt: skip
    """What other orders do to the loss, or to a part of it, and to the term where that is one loss function.

    Nothing where it fails.
    """
    loss, first = loss or step.loss, first or step.replay
    count, own = first.values[where.slot].shape[0], first.results[where.index][0]
    is_term = step.operations[where.index].name in _TERMS and own.numel() == 1
    generator = torch.Generator().manual_seed(11)
    wholes, terms = [total(first, loss)], [_sum(own) if is_term else 0.0]
    for _ in range(_ORDERS):
        if time.perf_counter() > end:
            break
        order = torch.randperm(count, generator=generator)
        changed, moved = _exchanged(step, loss, where, lambda one: one[order.to(one.device)])  # noqa: B023 - used at once
        try:
            again = replayed(changed, moved, held=held)
        except Unknown:
            return None
        wholes.append(total(again, loss))
        terms.append(_sum(again.results[where.index + 1][0]) if is_term else 0.0)
    if len(wholes) < 4 or not all(map(math.isfinite, (*wholes, *terms))):
        return None
    sign = step.run.sign(step.optimizer)
    whole, term = [Risen(sign * own, sign * (fmean(rest) - own), stdev(rest)) for own, *rest in (wholes, terms)]
    return whole, term if is_term else None


def _sum(one: torch.Tensor) -> float:
    return float(one.detach().double().sum())


def _exchanged(
    step: Step, loss: Loss, where: Meeting, change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Tape, Loss]:
    """A tape with an operation more, which changes what is met, as by another order of its rows."""
    operations = step.tape.operations
    behind = operations[where.index]
    fresh = Slot(1 + max([*step.leaves, *(out for one in operations for out in one.outs)]))
    moving = Operation("index_select", change, (where.slot,), {}, (fresh,))
    both = rebuilt((behind.args, behind.kwargs), lambda one: fresh if type(one) is Slot and one == where.slot else one)
    moved = replace(behind, args=both[0], kwargs=both[1])
    other = step.tape.changed([*operations[: where.index], moving, moved, *operations[where.index + 1 :]])
    return other, replace(loss, before=loss.before + 1)
