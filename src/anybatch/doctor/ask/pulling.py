"""Does a loss of pairs or triplets bring near what is far in the inputs, and drive away what is near?"""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.steps import Step, asks, replayed, said
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.records.lossfacts import Probed

_LEAST_ROWS = 16
_LEAST_PAIRS = 8  # of those that are brought near, and of those that are driven away
_SURE = 4.0  # standard errors
_MOSTLY = 0.8  # of the comparisons: mined negatives are about as near as positives
_DISTANCES = {"pairwise_distance": 1, "cosine_similarity": -1, "cosine_embedding_loss": 0}
_SIZES = frozenset({"norm", "vector_norm", "linalg_norm", "sum", "sqrt"})
_POWERS = frozenset({"pow", "square", "abs", "mul", "clamp", "clamp_min", "add", "sum", "sqrt"})


@asks("far positives")
def far_positives(step: Step) -> Iterator[Probed]:
    """Whether what a loss of triplets should bring near is less like the anchor than what it should drive away.

    As they are given to the net, row by row.
    """
    for operation in step.used("triplet_margin_loss", "triplet_margin_with_distance_loss"):
        found = [step.made_of(slot) & step.inputs for slot in operation.given[:3]]
        given = [step.leaves[next(iter(one))] for one in found if len(one) == 1]
        leaves = [one.double().flatten(1) for one in given if one.is_floating_point()]  # tokens are no coordinates
        if len(leaves) < 3 or len({one.shape for one in leaves}) > 1 or len(leaves[0]) < _LEAST_ROWS:
            continue
        anchor, positive, negative = leaves
        closer = (anchor - negative).norm(dim=1) - (anchor - positive).norm(dim=1)
        surely = float(closer.mean() / (closer.std() / len(closer) ** 0.5).clamp_min(1e-12))
        share = float((closer < 0).double().mean())
        yield said(operation, answer="yes" if surely < -_SURE else "no", share=share, rows=len(closer))


@asks("far pairs")
def far_pairs(step: Step) -> Iterator[Probed]:
    """Whether pairs that a loss brings near by their label are farther apart, as given, than those it drives away.

    Where the label alone says which: a distance that is to have a value falls for all that are too far.
    """
    run = None
    for operation in step.used(*_DISTANCES, *_SIZES):
        sides = sides_of(step, operation)
        given = _given(step, sides) if sides else []
        if len(given) != 2:
            continue
        if operation.name == "cosine_embedding_loss":
            toward = step.values[operation.given[2]].double().flatten()
        else:
            run = run or replayed(step.tape, step.loss, held=step.kept.first_of(step.tape))
            (slope,) = step.slopes(operation.outs[0], run=run)
            if slope is None or slope.numel() != step.rows:
                continue
            toward = slope.double().flatten() * _DISTANCES.get(operation.name, 1)
        away = (given[0] - given[1]).norm(dim=1)
        near, far = away[toward > 0], away[toward < 0]
        if len(toward) != step.rows or min(len(near), len(far)) < _LEAST_PAIRS or not _is_labelled(step, toward):
            continue
        share = float((near[:, None] > far).double().mean())
        error = float((near.var() / len(near) + far.var() / len(far)).sqrt())
        is_turned = share > _MOSTLY and float(near.mean() - far.mean()) > _SURE * error
        seen = {"share": share, "near_pairs": len(near), "far": len(far)}
        yield said(operation, answer="yes" if is_turned else "no", **seen)


def sides_of(step: Step, operation: Operation) -> list[Slot]:
    """What a number for each pair of rows compares: the distance of two tensors."""
    if operation.name in _DISTANCES:
        return operation.given[:2]
    if step.values[operation.outs[0]].numel() != step.rows:
        return []
    made = next((one for one in step.path(operation.given[0]) if one.kind not in _POWERS), None)
    return made.given if made is not None and made.kind == "sub" else []


def _given(step: Step, sides: list[Slot]) -> list[torch.Tensor]:
    """The inputs that two sides are made of by the same parameters, one each; nothing for others."""
    made_of = [step.made_of(slot) for slot in sides]
    nets = [one & step.parameters.keys() for one in made_of]
    if len(sides) != 2 or not nets[0] or nets[0] != nets[1]:
        return []
    leaves = [[step.leaves[slot] for slot in one & step.inputs] for one in made_of]
    given = [one[0].double().flatten(1) for one in leaves if len(one) == 1 and one[0].dim() > 1]
    are_numbers = all(one[0].is_floating_point() for one in leaves if one)  # tokens are no coordinates
    alike = len(given) == 2 and given[0].shape == given[1].shape and len(given[0]) == step.rows >= _LEAST_ROWS
    return given if are_numbers and alike else []


def _is_labelled(step: Step, toward: torch.Tensor) -> bool:
    """Whether one of two values that an input has for each row says which pairs are brought near."""
    for slot in step.inputs:
        label = step.leaves[slot].flatten()
        if len(label) == len(toward) and len(values := label.unique()) == 2:
            ones = label == values[1]
            if any(bool((mark[toward > 0]).all() and not (mark[toward < 0]).any()) for mark in (ones, ~ones)):
                return True
    return False
