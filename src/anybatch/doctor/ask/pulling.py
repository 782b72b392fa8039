"""Does a loss bring near what is far in the inputs, drawn at random or a distance, and drive away what is near?"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from anybatch.doctor.ask.steps import DISTANCES, MOVING, OF_CLASSES, Step, asks, following, replayed, said, total
from anybatch.doctor.ask.tape import RANDOM, Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_LEAST_ROWS = 16
_LEAST_PAIRS = 8  # of those that are brought near, and of those that are driven away
_FEWEST_PAIRS = 4  # of either kind, where the sign of all agrees with labels
_SURE = 4.0  # standard errors
_MOSTLY = 0.9  # of the comparisons: mined negatives are about as near as positives, or somewhat nearer
_GUESSES = 17  # distances that all pairs have alike
_LEARNED = 0.5  # of the loss of the best of them
_DISTANCES = {"pairwise_distance": 1, "cosine_similarity": -1, "cosine_embedding_loss": 0}
_SIZES = frozenset({"norm", "vector_norm", "linalg_norm", "sum", "sqrt"})
_PRODUCTS = ("matmul", "mm", "einsum")
_POWERS = frozenset({"pow", "square", "abs", "mul", "clamp", "clamp_min", "add", "sum", "sqrt"})


@asks("far positives")
def far_positives(step: Step) -> Iterator[Probed]:
    """Whether what a loss of triplets should bring near is less like the anchor than what it should drive away.

    As they are given to the net, row by row.
    """
    for operation, slots in _triplets(step):
        found = [step.made_of(slot) & step.inputs for slot in slots]
        given = [step.leaves[next(iter(one))] for one in found if len(one) == 1]
        leaves = [one.double().flatten(1) for one in given if one.is_floating_point()]  # tokens are no coordinates
        if len(leaves) < 3 or len({one.shape for one in leaves}) > 1 or len(leaves[0]) < _LEAST_ROWS:
            continue
        anchor, positive, negative = leaves
        closer = (anchor - negative).norm(dim=1) - (anchor - positive).norm(dim=1)
        surely = float(closer.mean() / (closer.std() / len(closer) ** 0.5).clamp_min(1e-12))
        share = float((closer < 0).double().mean())
        yield said(operation, answer="yes" if surely < -_SURE else "no", share=share, rows=len(closer))


def _triplets(step: Step) -> Iterator[tuple[Operation, list[Slot]]]:
    """What a loss compares an anchor with: first what it brings near, then what it drives away."""
    for operation in step.used("triplet_margin_loss", "triplet_margin_with_distance_loss"):
        yield operation, operation.given[:3]
    every = (one for one in step.used(*_DISTANCES, *_SIZES) if step.values[one.outs[0]].requires_grad)
    pairs = [(one, sides) for one in every if len(sides := sides_of(step, one)) == 2]
    slopes = step.slopes(*[one.outs[0] for one, _ in pairs])
    sign = step.run.sign(step.optimizer)
    toward = [
        (one, sides, sign * slope * _DISTANCES.get(one.name, 1))
        for (one, sides), slope in zip(pairs, slopes, strict=True)
        if slope is not None and slope.any()
    ]
    for one, near, falls in toward:
        for _, far, rises in toward:
            shared = [slot for slot in near if slot in far]
            if len(shared) == 1 and bool((falls >= 0).all()) and bool((rises <= 0).all()):
                yield one, shared + [slot for slot in (*near, *far) if slot not in shared]


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
        if is_turned and is_learned(step, operation):
            raise Unknown("the net learned well what the loss asks of the pairs, so that their inputs say little of it")
        seen = {"share": share, "near_pairs": len(near), "far": len(far)}
        yield said(operation, answer="yes" if is_turned else "no", **seen)


@asks("labels apart", of_rows=False)
def labels_apart(step: Step) -> Iterator[Probed]:
    """Whether, in a matrix of all pairs of rows, a loss drives apart those of one label and brings near all others.

    Without labels a row belongs to the same row of what it is compared with, if that is made of another input. Where
    there are other labels, targets or matrices, some rows may be kept apart on purpose, as those of one domain.
    """
    if len(step.kept.tapes) > 1:
        raise Unknown("there are several optimizers, and one may work against another")
    run, of_pairs = None, [one for one in step.used(*_PRODUCTS, "cdist") if _is_square(step.values[one.outs[0]])]
    if len(of_pairs) != 1:
        raise Unknown("no matrix of all pairs of rows was seen, or several")
    for operation in of_pairs:
        made = [step.made_of(slot) & step.inputs for slot in operation.given]
        count = len(step.values[operation.outs[0]])
        if len(made) != 2 or not all(made):
            continue
        run = run or replayed(step.tape, step.loss, held=step.kept.first_of(step.tape))  # where no pair is right yet
        (slope,) = step.slopes(operation.outs[0], run=run)
        if slope is None:
            continue
        toward = step.run.sign(step.optimizer) * slope * (1 if operation.name == "cdist" else -1)
        for same, by in _belonging(step, count, is_one=made[0] == made[1]):
            off = ~torch.eye(count, dtype=torch.bool, device=same.device) if by == "label" else torch.ones_like(same)
            apart, near = toward[same & off], toward[~same]
            moving = _moving(apart), _moving(near)
            if min(moving) >= _FEWEST_PAIRS and _share(-apart) > _MOSTLY and _share(near) > _MOSTLY:
                yield said(operation, by=by, rows=count, apart=moving[0], near_pairs=moving[1])


def _belonging(step: Step, count: int, *, is_one: bool) -> Iterator[tuple[torch.Tensor, str]]:
    """Which of some rows belong to which others, and by what."""
    labels = [one for slot in step.inputs if (one := step.leaves[slot]).dtype == torch.int64 and one.shape == (count,)]
    is_alone = len(labels) == 1 and not any(step.used(*DISTANCES, *OF_CLASSES))
    if is_alone and 2 < len(labels[0].unique()) < count:
        yield labels[0][:, None] == labels[0], "label"
    if not is_one:
        yield torch.eye(count, dtype=torch.bool, device=step.values[step.loss.slot].device), "rows"


def _is_square(made: torch.Tensor) -> bool:
    return made.dim() == 2 and made.shape[0] == made.shape[1] and made.requires_grad


def _moving(toward: torch.Tensor) -> int:
    return int((toward != 0).sum())


def _share(toward: torch.Tensor) -> float:
    """How much of all that moves pairs brings them near."""
    return float(toward.clamp_min(0).sum() / toward.abs().sum().clamp_min(1e-30))


def is_learned(step: Step, operation: Operation) -> bool:
    """Whether the trained net has a far lower loss than any one distance of all pairs: then their inputs say little.

    Pairs of a few samples may be learned by heart, to a lower loss, but hardly so well.
    """
    is_angle = operation.name == "cosine_embedding_loss"
    made = step.values[operation.outs[0]].detach()
    shares = torch.linspace(0, 1, _GUESSES, dtype=torch.double, device="cpu")
    guesses = (2 * shares - 1 if is_angle else made.double().cpu().flatten().quantile(shares)).tolist()
    losses = list[float]()
    for guess in guesses:
        alike = torch.full_like(made, guess)
        run = step.with_other(operation, partial(_of_angle, guess) if is_angle else lambda *_, alike=alike, **__: alike)
        losses.append(step.run.sign(step.optimizer) * total(run, step.loss))
    own = step.run.sign(step.optimizer) * step.own
    return own < _LEARNED * min(losses)


def _of_angle(cosine: float, one: torch.Tensor, other: torch.Tensor, *marks: Any, **options: Any) -> torch.Tensor:
    """A loss of pairs of rows that all have one cosine."""
    first, second = torch.zeros_like(one), torch.zeros_like(other)
    first[:, 0], second[:, 0], second[:, 1] = 1.0, cosine, (1 - cosine**2) ** 0.5
    return torch.nn.functional.cosine_embedding_loss(first, second, *marks, **options)


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


_TURNED = frozenset({"T", "mT", "t", "transpose", "contiguous", "permute"})
_SCORING = frozenset({"softmax", "log_softmax", "logsumexp", "exp", "cross_entropy"})
_UNIT = 1e-3


@asks("unit columns", of_rows=False)
def unit_columns(step: Step) -> Iterator[Probed]:
    """Whether rows are compared by products, for a softmax, after each column was brought to length 1 over all rows.

    As by ``normalize(z, dim=0)``, which is right where columns are compared, in a matrix with a place for each.
    """
    makers = {slot: one for one in step.operations for slot in one.outs if slot not in one.given}
    for operation in step.used("matmul", "mm"):
        if len(operation.given) != 2 or step.values[operation.outs[0]].dim() != 2:
            continue
        cuts = [_unit_over(step, makers, slot, side) for side, slot in enumerate(operation.given)]
        if not all(cuts) or not step.values[operation.outs[0]].requires_grad:
            continue
        behind = step.made_with(operation.outs[0])
        if any(behind & set(one.given) for one in step.used(*_SCORING)):
            rows, columns = step.values[operation.given[0]].shape
            yield said(cuts[0], op=cuts[0].kind if cuts[0] else "", rows=rows, columns=columns)


def _unit_over(step: Step, makers: dict[Slot, Operation], slot: Slot, side: int) -> Operation | None:
    """What made the length of columns 1, where a product sums over these; ``side`` is 1 for what is on its right."""
    given = step.values[slot].detach().double()
    one = makers.get(slot)
    while one is not None and one.kind in _TURNED and one.given:
        one = makers.get(one.given[0])
    if one is None or given.dim() != 2 or one.kind not in ("normalize", "div"):
        return None
    rows = given.t() if side else given
    if min(rows.shape) < _LEAST_PAIRS or not step.made_of(slot) & step.inputs:
        return None
    by_column, by_row = ((rows.norm(dim=dim) - 1).abs().max() for dim in (0, 1))
    return one if float(by_column) < _UNIT and float(by_row) > _UNIT else None
