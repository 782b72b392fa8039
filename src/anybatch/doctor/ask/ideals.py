"""Does a loss see how far off what is nearly right is? The last step again, with targets as what the net gives.

Where a formula takes its targets in another form, such as boxes with two corners for ones with a centre and a size, it
may be the same whatever the net says, and has no gradient.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from anybatch.doctor.ask.fitting import summands
from anybatch.doctor.ask.pulling import sides_of
from anybatch.doctor.ask.relating import Meeting, meetings_of, own_draw, weighs
from anybatch.doctor.ask.steps import MOVING, Step, asks, said, slots_of, total
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed
from anybatch.tensors.randomness import seed

_MOST_MADE = 4
_LEAST_ROWS = 8
_NEARLY = 0.01  # of their deviation: how far from targets what is nearly right is
_MOSTLY = 0.5  # of the rows
_CLEARLY = 0.1  # of how far a loss falls, or rises
_APART = frozenset({"pairwise_distance", "norm", "linalg_vector_norm", "vector_norm"})
_WRITTEN_OUT = frozenset({"sqrt", "sum", "add", "clamp", "clamp_min", "pow", "square"})
_MARKED = frozenset({"binary_cross_entropy_with_logits"})
_ERRORS = ("_loss", "cross_entropy", "_with_logits", "square", "pow", "abs")  # how the names end of what gives them
_MEANS, _DIFFERENCES = frozenset({"mean", "sum"}), frozenset({"sub", "rsub"})
_SAME = MOVING | {"squeeze", "unsqueeze", "flatten", "view", "reshape", "__getitem__"}
_LAYERS = frozenset({"linear", "addmm", "matmul", "mm", "conv1d", "conv2d", "conv3d"})
_CLEAR = 4.0  # a score that is clearly right or wrong
_SIZES = [half / 2 for half in range(-2, 17)]  # of right scores
_WIDELY = 0.01  # of all that a loss rises and falls


@asks("unseen errors")
def unseen_errors(step: Step) -> Iterator[Probed]:
    """Whether a loss has no gradient in most rows with their targets, nearly, as what the net gives, or with others."""
    rows, needed = step.rows, step.needed
    if own_draw(step) is not None:
        raise Unknown("the loss is of what the model itself draws")
    for slot in sorted(needed & step.inputs) if rows >= _LEAST_ROWS else ():
        target = step.leaves[slot]
        is_varied = target.is_floating_point() and target.dim() > 1 and bool((target != target[:1]).any())
        if len(target) != rows or not is_varied:
            continue
        if ((target == 0) | (target == 1)).all() and any(slot in one.given for one in step.used("mul", "mul_")):
            continue  # its zeros take the gradient away on purpose
        found: list[tuple[float, float, int]] = []
        apart = needed - step.made_with(slot)
        for index, one in enumerate(step.operations):
            value = step.values[one.outs[0]] if len(one.outs) == 1 else None
            is_made = value is not None and value.requires_grad and value.shape == target.shape
            if is_made and one.outs[0] in apart:
                found.append((*_blind(step, index, slot), index))
        _, share, index = min(found[-_MOST_MADE:], default=(0.0, 0.0, 0))  # what fits best is what targets are like
        if share >= _MOSTLY:
            if any(weighs(step, one) for one in meetings_of(step)):  # a ratio that is clipped has none, and should not
                raise Unknown("rows are weighed with numbers of both signs, as by rewards")
            width = target.reshape(-1, 4) if target.shape[-1] == 4 else None
            turned = 0 if width is None else int((width[:, 2:] <= width[:, :2]).any(1).sum())
            made = step.operations[index]
            at = next(one for one in step.tape.operations[index + 1 :] if set(made.outs) & {*one.given})
            seen: dict[str, Any] = {"share": share, "rows": rows, "turned": turned, "boxes": turned > 0}
            yield said(at, shape=list(target.shape), **seen)


@asks("error preferred")
def error_preferred(step: Step) -> Iterator[Probed]:
    """Whether the loss falls from targets in place of what a net gives to those of other rows, and to their reverse."""
    if own_draw(step) is not None:
        raise Unknown("the loss is of what the model itself draws")
    met = meetings_of(step)
    found = [(*_falls(step, index, step.values[one.slot].detach()), one) for one in met
             if (index := _acts_through(step, one)) is not None]  # fmt: skip
    if not found:
        raise Unknown("nothing that all parameters act through is compared with targets of its shape")
    sign, losses, at = max(found, key=lambda one: one[0])
    answer = "yes" if sign > 0 and all(one[0] >= 0 for one in found) else "no"
    for one in met if answer == "yes" else ():
        if bool((step.values[one.slot] < 0).any()) and step.made_of(one.slot) & step.inputs - step.made_of(at.slot):
            raise Unknown("rows are weighed with negative numbers, as by rewards")
    after = step.operations[at.index]
    yield said(after, answer=answer, op=after.name, right=losses[0], others=losses[1], wrong=losses[2])


@asks("bottomless", of_rows=False)
def bottomless(step: Step) -> Iterator[Probed]:
    """Whether a term of the loss is a mean of what a layer gives minus targets, below 0 by now: it has no least value.

    What another term holds, as a penalty does, has one; so may what was made of outputs, such as shares or errors.
    """
    terms, sign = list(summands(step)), step.run.sign(step.optimizer)
    for slot, made in terms:
        at = step.made_at(made.given[0]) if made.name in _MEANS and made.given else -1
        one = step.operations[at] if at >= 0 else None
        if one is None or one.kind not in _DIFFERENCES or len(one.given) != 2 or sign * float(step.values[slot]) >= 0:
            continue
        learned = [side for side in one.given if step.values[side].requires_grad]
        is_held = any(learned[0] in step.made_of(other) for other, _ in terms if other != slot)
        if len(learned) == 1 and not is_held and _is_of_layer(step, learned[0]):
            yield said(one, loss=float(step.values[slot]), rows=step.rows)


def _is_of_layer(step: Step, slot: Slot) -> bool:
    """Whether a trained layer gives a tensor, which has any size then."""
    last = next((one for one in step.path(slot) if one.kind not in _SAME), None)
    weights = [one for one in last.given if id(step.parameters.get(one)) in step.tape.trained] if last else []
    return last is not None and last.kind in _LAYERS and bool(weights)


def _is_distance(step: Step, operation: Operation) -> bool:
    """Whether it gives how far two rows that are both learned are apart, also where that is written out."""
    if operation.name in _APART or operation.kind not in _WRITTEN_OUT:
        return operation.name in _APART
    values = [step.values[one] for one in sides_of(step, operation)]
    return len(values) == 2 and all(one.requires_grad and one.numel() > step.rows for one in values)


def _acts_through(step: Step, where: Meeting) -> int | None:
    """The last operation before targets are met that all parameters act through, with a result of their shape.

    Marks of pairs are not what their distances should be: ``far_pairs`` asks of these. Nor is what errors of rows, or
    numbers of all pairs of rows, are multiplied with or shifted by, as by a mask, what these should be.
    """
    target, tried = step.values[where.slot], 0
    if step.rows < _LEAST_ROWS or not target.is_floating_point() or not bool((target != target[:1]).any()):
        return None
    for index in reversed(range(where.index)):
        one = step.operations[index]
        made = step.values[one.outs[0]] if len(one.outs) == 1 and one.outs[0] in step.needed else None
        if made is not None and made.requires_grad and made.shape == target.shape and tried < _MOST_MADE:
            tried += 1
            if not slots_of(step.tape, step.loss, but=[one]) & step.parameters.keys():
                of_pairs, kind = made.shape == (step.rows, step.rows), step.operations[where.index].kind
                marks = of_pairs and kind in ("mul", "add") and len(target.unique()) == 2
                weighed = marks or (kind == "mul" and one.name.endswith(_ERRORS))
                return None if weighed or _is_distance(step, one) else index
    return None


def _falls(step: Step, index: int, target: torch.Tensor) -> tuple[int, list[float]]:
    """Whether what is minimised falls from right to wrong, as 1, or rises, as -1; and what it is."""
    losses = list[float]()
    mean = target.mean()
    for given in (target, target.roll(1, 0), 2 * mean - target, 3 * mean - 2 * target):
        run = step.with_other(step.operations[index], lambda *_, given=given, **__: given.clone())
        losses.append(step.run.sign(step.optimizer) * total(run, step.loss))
    right, others, wrong, beyond = losses
    if not all(map(math.isfinite, losses)) or abs(right - wrong) < _NEARLY * max(map(abs, losses[:3])):
        return 0, losses
    if right > wrong and beyond - wrong > _CLEARLY * (right - wrong):
        return 0, losses  # the reverse is what it aims at, as with the score of noise
    first, second = (right - others) / (right - wrong), (others - wrong) / (right - wrong)
    return (0 if min(first, second) < _CLEARLY else 1 if right > wrong else -1), losses


@asks("worse preferred")
def worse_preferred(step: Step) -> Iterator[Probed]:
    """Whether a loss pushes scores that are clearly wrong farther from their targets, and right ones toward them.

    As a weight does that is small where a model is wrong. One that is maximised pushes both away.
    """
    for operation, right, _, pushed in _of_scores(step):
        is_trained = operation.name in _MARKED and step.values[operation.given[0]].requires_grad
        pushes = [pushed(_CLEAR * side * right) for side in (-1, 1)] if is_trained else []
        away = [float(((push * right) > 0).double().mean()) for push in pushes if push is not None]
        if len(away) == 2 and away[0] > _MOSTLY and away[1] < 1 - _MOSTLY:
            yield said(operation, op=operation.name, share=away[0], score=_CLEAR)


@asks("halfway preferred")
def halfway_preferred(step: Step) -> Iterator[Probed]:
    """Whether a loss pushes scores that are halfway right back, and both worse and better ones toward their targets.

    As where it is weighed with the loss of a row in place of its probability. A smoothed target pushes the best back.
    """
    for operation, right, others, pushed in _of_scores(step):
        pushes = [pushed(size * right) for size in _SIZES] if len(operation.given) == 2 else []
        slopes = [0.0 if one is None else float((one.double() * right).sum()) for one in pushes]
        least = next((at for at, one in enumerate(slopes) if one > 0 and min(slopes[:at], default=0.0) < 0), 0)
        until = next((at for at in range(least, len(slopes)) if slopes[at] < 0), 0)
        if least and until and sum(slopes[least:until]) > _WIDELY * sum(map(abs, slopes)):
            halfway, best = (math.log1p(others * math.exp(-_SIZES[at])) for at in (least - 1, until))
            yield said(operation, op=operation.name, halfway=halfway, right=best)


def _of_scores(
    step: Step,
) -> Iterator[tuple[Operation, torch.Tensor, int, Callable[[torch.Tensor], torch.Tensor | None]]]:
    """Losses that are taken of the scores of each row, with scores that are right, and how many classes are wrong.

    The last is a function that says how the loss rises with the scores where they are others.
    """
    for index, operation in enumerate(step.operations):
        is_of_rows = operation.kwargs.get("reduction", "mean") == "none" and bool(step.needed & set(operation.outs))
        right = _right(step, operation) if is_of_rows and len(operation.given) > 1 else None
        made = step.made_at(operation.given[0], index) if right is not None else -1
        if right is not None and made >= 0:
            yield operation, *right, partial(_pushed, step, made, operation.given[0])


def _right(step: Step, operation: Operation) -> tuple[torch.Tensor, int] | None:
    """Scores that are right for a loss of marks or of classes, and how many wrong classes there are for each."""
    scores, target = (step.values[one].detach() for one in operation.given[:2])
    if operation.name in _MARKED and scores.shape == target.shape and bool(((target == 0) | (target == 1)).all()):
        return 2 * target.double() - 1, 1
    is_of_classes = operation.name == "cross_entropy" and target.dtype == torch.int64 and scores.dim() > 1
    if not is_of_classes or not bool(((target >= 0) & (target < scores.shape[1])).all()):
        return None
    return torch.zeros_like(scores, dtype=torch.double).scatter_(1, target.unsqueeze(1), 1.0), scores.shape[1] - 1


def _pushed(step: Step, made: int, scores: Slot, given: torch.Tensor) -> torch.Tensor | None:
    """How the loss rises with some scores, where an operation gives others."""
    maker = step.operations[made]
    if len(maker.outs) != 1:
        return None
    live = given.to(step.values[scores]).requires_grad_()
    value = step.with_other(maker, lambda *_, **__: live).values[step.loss.slot].sum()
    (slope,) = torch.autograd.grad(value, live, allow_unused=True)
    return slope


def _blind(step: Step, index: int, target: Slot) -> tuple[float, float]:
    """The loss where an operation nearly gives targets, and the share of rows without a gradient then.

    Or, where they are fewer, with the targets of the next rows.
    """
    values, blind = list[float](), list[float]()
    for shift in (0, 1):
        moved = step.leaves[target].detach().roll(shift, 0)
        seed(0)
        given = (moved + _NEARLY * moved.std() * torch.randn_like(moved)).requires_grad_()
        run = step.with_other(step.operations[index], lambda *_, given=given, **__: given)
        (slope,) = torch.autograd.grad(run.values[step.loss.slot].sum(), given, allow_unused=True)
        values.append(total(run, step.loss))
        blind.append(0.0 if slope is None else float((slope.flatten(1) == 0).all(1).double().mean()))
    return values[0], min(blind)
