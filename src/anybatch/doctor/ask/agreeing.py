"""Several losses of the same rows: do their targets agree, and is there a prediction for each?"""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.steps import OF_CLASSES, Step, asks, said, scores_behind
from anybatch.doctor.ask.tape import Operation
from anybatch.records.lossfacts import Probed

_LEAST_ROWS, _LEAST_CLASSES = 32, 3
_SURE, _TIMES = 0.35, 2.0  # a probability, and times that of each class if all are alike
_LAYERS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "matmul", "addmm", "embedding"})
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
            if likely is None or scores_behind(step, hard.given[0]) != scores_behind(step, soft.given[0]):
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
    """The probabilities that a loss has as its targets for the rows of some labels, and that no net makes now."""
    given = operation.given[:2]
    one = step.values[given[1]] if len(given) == 2 else labels
    behind = step.made_of(given[1]) if len(given) == 2 else set()
    if any(made.kind in _LAYERS and behind & set(made.outs) for made in step.operations):
        return None  # of the same rows, by a teacher
    if one.dim() != 2 or len(one) != len(labels) or not one.is_floating_point() or one.requires_grad:
        return None
    likely = one.detach().double().exp() if operation.kwargs.get("log_target") else one.detach().double()
    several = likely.shape[1] > max(int(labels.max()), _LEAST_CLASSES - 1) and len(likely.argmax(1).unique()) > 2
    return likely if several and len(labels.unique()) > 2 else None


@asks("one for two", of_rows=False)
def one_for_two(step: Step) -> Iterator[Probed]:
    """Whether two losses are given the same numbers, each made for itself, beside targets that are not the same.

    Targets in another order are those of two samples that were mixed.
    """
    losses = [one for one in step.used(*OF_CLASSES) if _labels(step, one) is not None]
    for index, one in enumerate(losses):
        for other in losses[index + 1 :]:
            scores, labels = ([step.values[each.given[place]].detach() for each in (one, other)] for place in (0, 1))
            apart = scores_behind(step, one.given[0]) != scores_behind(step, other.given[0])
            is_twice = apart and torch.equal(*scores) and float(scores[0].double().std()) > 0
            kinds = [set(each.tolist()) for each in labels]
            if is_twice and kinds[0] & kinds[1] and not torch.equal(labels[0].sort().values, labels[1].sort().values):
                differ = float((labels[0] != labels[1]).double().mean())
                yield said(other, op=other.name, rows=len(labels[0]), differ=differ, first=one.line)
