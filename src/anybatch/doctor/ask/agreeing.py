"""Several losses of the same rows: do their targets agree, and is there a prediction for each?"""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.steps import OF_CLASSES, Step, asks, said
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.records.lossfacts import Probed

_LEAST_ROWS, _LEAST_CLASSES = 32, 3
_SURE, _TIMES = 0.35, 2.0  # a probability, and times that of each class if all are alike
_SAME = frozenset({"log_softmax", "softmax", "log", "float", "to", "div", "mul", "view", "reshape", "squeeze", "clone"})
_BY_CHANCE = 2.0  # deviations of how many agree by chance


@asks("targets at odds", of_rows=False)
def targets_at_odds(step: Step) -> Iterator[Probed]:
    """Whether what a net is to give for some rows is sure of classes that are, by no more than chance, their labels."""
    for hard in step.used(*OF_CLASSES):
        labels = _labels(step, hard)
        if labels is None:
            continue
        for soft in step.used("kl_div", "cross_entropy"):
            likely = _probabilities(step, soft, labels)
            if likely is None or _source(step, hard.given[0]) != _source(step, soft.given[0]):
                continue
            count, classes = likely.shape
            top, sure = likely.argmax(1), float(likely.max(1).values.mean())
            shares = [one.bincount(minlength=classes).double() / count for one in (top, labels)]
            chance = float((shares[0] * shares[1]).sum())
            agree = float(top.eq(labels).double().mean())
            if agree < chance + _BY_CHANCE * (chance * (1 - chance) / count) ** 0.5 and sure > max(
                _SURE, _TIMES / classes
            ):
                yield said(soft, op=soft.name, rows=count, agree=agree, chance=chance, sure=sure)


def _labels(step: Step, operation: Operation) -> torch.Tensor | None:
    """The classes that a loss has as its targets, if each row of some has one."""
    given = operation.given[:2]
    labels = step.values[given[1]] if len(given) == 2 else torch.empty(0)
    fits = labels.dim() == 1 and not labels.is_floating_point() and len(labels) >= _LEAST_ROWS
    return labels if fits and step.values[given[0]].dim() == 2 and int(labels.min()) >= 0 else None


def _probabilities(step: Step, operation: Operation, labels: torch.Tensor) -> torch.Tensor | None:
    """The probabilities that a loss has as its targets for the rows of some labels, and that no parameter makes now."""
    given = operation.given[:2]
    one = step.values[given[1]] if len(given) == 2 else labels
    if one.dim() != 2 or len(one) != len(labels) or not one.is_floating_point() or one.requires_grad:
        return None
    likely = one.detach().double().exp() if operation.kwargs.get("log_target") else one.detach().double()
    several = likely.shape[1] > max(int(labels.max()), _LEAST_CLASSES - 1) and len(likely.argmax(1).unique()) > 2
    return likely if several and len(labels.unique()) > 2 else None


def _source(step: Step, slot: Slot) -> Slot:
    """What a tensor is made of by a softmax, a factor or another shape alone."""
    made = {out: one for one in step.operations for out in one.outs}
    while slot in made and made[slot].kind in _SAME:
        learned = [one for one in made[slot].given if step.values[one].requires_grad]
        if len(learned) != 1:
            break
        slot = learned[0]
    return slot


@asks("one for two", of_rows=False)
def one_for_two(step: Step) -> Iterator[Probed]:
    """Whether two losses are given the same numbers, each made for itself, beside targets that are not the same.

    Targets in another order are those of two samples that were mixed.
    """
    losses = [one for one in step.used(*OF_CLASSES) if _labels(step, one) is not None]
    for index, one in enumerate(losses):
        for other in losses[index + 1 :]:
            scores, labels = ([step.values[each.given[place]].detach() for each in (one, other)] for place in (0, 1))
            apart = _source(step, one.given[0]) != _source(step, other.given[0])
            is_twice = apart and torch.equal(*scores) and float(scores[0].double().std()) > 0
            kinds = [set(each.tolist()) for each in labels]
            if is_twice and kinds[0] & kinds[1] and not torch.equal(labels[0].sort().values, labels[1].sort().values):
                differ = float((labels[0] != labels[1]).double().mean())
                yield said(other, op=other.name, rows=len(labels[0]), differ=differ, first=one.line)
