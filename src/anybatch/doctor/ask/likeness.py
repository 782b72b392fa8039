"""Which way scores go: distances that are taken as scores, random rows that are drawn near.

Each is asked of a step that was written down; neither of them is a fault where the loss means it so.
"""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.steps import MOVING, OF_CLASSES, Step, asks, following, said
from anybatch.doctor.ask.tape import RANDOM, Operation, Slot
from anybatch.records.lossfacts import Probed

_PASSED = MOVING | {"squeeze", "unsqueeze", "transpose", "t", "T", "mT", "permute", "contiguous", "log_softmax",
                    "float", "double", "to", "sqrt", "clamp", "clamp_min", "add", "sub", "mean", "sum"}  # fmt: skip
_BETWEEN_ROWS = frozenset({"cdist", "pairwise_distance", "dist"})  # distances of their own
_LENGTHS = frozenset({"pow", "square", "abs", "norm", "linalg_norm", "vector_norm"})
_PARALLEL = 0.999  # a cosine


@asks("distance as score", of_rows=False)
def distance_as_score(step: Step) -> Iterator[Probed]:
    """Whether the scores of classes are distances, so that what lies farthest away is the most likely."""
    for operation in step.used("log_softmax", *OF_CLASSES):
        if operation.given and (made := _distance(step, operation.given[0])) is not None:
            yield said(made, op=made.name)


def _distance(step: Step, slot: Slot) -> Operation | None:
    """The operation that makes a distance of two things that follow parameters, where nothing turns its sign."""
    sign, length = 1, None
    for made in step.path(slot):
        given = [step.values[one] for one in made.given]
        if made.kind in _BETWEEN_ROWS or (made.kind == "sub" and length is not None):
            both = len(given) == 2 and all(one.requires_grad for one in given)
            return (length or made) if both and sign > 0 else None
        if made.kind in _LENGTHS:
            length = made
        elif made.kind in ("neg", "rsub"):
            sign = -sign
        elif made.kind in ("mul", "div"):
            factor = _factor(step, made)
            if not factor:
                return None
            sign = sign if factor > 0 else -sign
        elif made.kind not in _PASSED:
            return None
    return None


def _factor(step: Step, made: Operation) -> float:
    """The number that an operation multiplies its first tensor with, or divides it by; 0 where it is not one."""
    other = made.args[1] if len(made.args) > 1 else None
    if type(other) is Slot:
        value = step.values[other]
        is_last = type(made.args[0]) is Slot and value.numel() == 1
        return float(value.detach()) if is_last else 0.0
    return float(other) if isinstance(other, (int, float)) and type(made.args[0]) is Slot else 0.0


@asks("drawn near", of_rows=False)
def drawn_near(step: Step) -> Iterator[Probed]:
    """Whether rows that were drawn at random are brought near what they are compared with, as those that belong to it.

    The slope of the loss with a row that is scored by a product is parallel to what it is multiplied with.
    """
    drawn = following(step.operations, (), lambda one: one.name in RANDOM)
    lookups = [one for one in step.used("embedding") if step.values[one.outs[0]].requires_grad]
    slopes = dict(zip(lookups_of := [one.outs[0] for one in lookups], step.slopes(*lookups_of), strict=True))
    every = [(one, step.values[one.outs[0]].detach(), slopes[one.outs[0]]) for one in lookups]
    for random, row, slope in every:
        if random.given[0] not in drawn or slope is None:
            continue
        for _, anchor, _ in (one for one in every if one[0].given[0] not in drawn):
            pulls = _pull(slope, anchor, row.shape)
            others = [_pull(also, anchor, them.shape) for other, them, also in every
                      if other.given[0] not in drawn and also is not None]  # fmt: skip
            if pulls == 1 and 1 in others:
                yield said(random, op=random.name, rows=row[..., 0].numel())


def _pull(slope: torch.Tensor, anchor: torch.Tensor, shape: torch.Size) -> int:
    """1 where a loss falls as rows come nearer to their anchors, -1 where it rises, 0 else."""
    if slope.dim() < 2 or anchor.shape[0] != shape[0] or anchor.shape[-1] != shape[-1]:
        return 0
    one = anchor.reshape(len(anchor), -1, anchor.shape[-1])
    flat = slope.reshape(len(slope), -1, slope.shape[-1])
    if one.shape[1] not in (1, flat.shape[1]):
        return 0
    along = (flat * one).sum(-1)
    lengths = flat.norm(dim=-1) * one.norm(dim=-1)
    known = lengths > 0
    cosines = (along / lengths.clamp_min(1e-30))[known]
    if not len(cosines) or float(cosines.abs().min()) < _PARALLEL:
        return 0
    return 1 if bool((cosines < 0).all()) else -1 if bool((cosines > 0).all()) else 0
