"""What is weighed in a step with what: values with a softmax, tokens with a mask, log-probabilities with a reward.

And which way the loss goes with what it should make large: what was rewarded, what is like its target.
"""

import linecache
import math
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch

from anybatch.doctor.ask.steps import DISTANCES, PRODUCTS, Step, asks, following, said, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed
from anybatch.records.samples import Scored

_BETWEEN = frozenset({"dropout", "to", "float", "half", "type_as", "contiguous"})
_MOVED = frozenset({"unsqueeze", "squeeze", "transpose", "permute", "view", "reshape"})
_HIDING = frozenset({"masked_fill", "masked_fill_"})
_SCALING = _BETWEEN | {"div", "mul", "add", *_HIDING}
_OF_DISTRIBUTIONS = DISTANCES | {"kl_div", "cross_entropy", "binary_cross_entropy"}
_COMPARING = frozenset({"ge", "gt", "le", "lt"})
_HIDDEN = -1e3  # a score that a softmax makes 0 of
_PUT_BEFORE = 2  # tokens: a class, and a separator
_RARE, _PAIRS = 0.1, 0.2  # of the words, for one that is padding as well, and of those for two in a row
_MOSTLY = 0.9  # of the tokens: some padding is a token, too
_SCORED = re.compile(r"log_?p|\blps?\b|(?<![a-z])ratio", re.IGNORECASE)
_REWARD = re.compile(r"adv|reward|returns?\b|\b[RG]\b", re.IGNORECASE)
_LEFT = re.compile(r"^\s*(return\b|[\w., \[\]]+=(?!=))")
_FEW, _FAR, _VANISHED = 16, 50.0, 1e-3  # entries of weights, how far they are moved, and what is left of the loss
_PICKING = frozenset({"gather", "__getitem__", "take_along_dim"})
_THROUGH = frozenset({"log", "clamp", "clamp_min", "add", "squeeze", "view", "reshape", "flatten", *_BETWEEN})
_PAIRED = re.compile(r"\b(?:\w*pos\w*\s*-\s*\w*neg|\w*neg\w*\s*-\s*\w*pos)", re.IGNORECASE)
_POSITIVE_FIRST = re.compile(r"\b\w*pos\w*\s*-", re.IGNORECASE)
_SCORES = PRODUCTS | {"einsum", "cosine_similarity", "dot", "mv"}
_DISTANCES = frozenset({"norm", "linalg_norm", "vector_norm", "pairwise_distance", "cdist", "dist"})
_SIZES = frozenset({"pow", "square", "abs"})
_NEGATIVE = re.compile(r"logsigmoid\(\s*\w*neg\w*\s*\)", re.IGNORECASE)
_LOG_SIGMOIDS = frozenset({"logsigmoid", "log_sigmoid"})
_LIKELIHOOD = re.compile(
    r"(torch\.(mean|sum)\()?(\w+(\[\w+\])?\.)+log_?prob\(.*\)"
    r"(\.(mean|sum)\([^)]*\)|\))\s*(#.*)?"
)
_DRAWN = re.compile(r"sampl|action|\ba\b|fake|generated", re.IGNORECASE)
_TURNED = frozenset({"rsub", "sub", "neg"})
_NEGATIONS = frozenset({"ne", "logical_not", "bitwise_not", "__invert__"})
_LOGARITHMS = frozenset({"log", "log1p", "binary_cross_entropy"})
_UNIT = 1e-3  # by how much the length of a row of a normalised tensor may differ from 1
_FILLING = frozenset({"fill_diagonal_", "__getitem__", "view", "reshape", "clone", "sub"})
_NOTHING_TOLD = 0.9  # of the loss of a guess: what is left of it with the best directions


@asks("weighed away")
def weighed_away(step: Step) -> Iterator[Probed]:
    """Whether what parameters make alone scales a loss, and may make it 0 whatever the rest of the net does."""
    own, values = step.own, step.values
    follows = following(step.operations, step.inputs, lambda one: one.drawn is not None)  # more than parameters
    small = [slot for slot, one in step.parameters.items() if one.requires_grad and one.numel() <= _FEW]
    for operation in step.used("mul", "div") if own > 0 else ():
        given = operation.given
        made = [slot for slot in given if slot in follows and values[slot].numel() <= min(_FEW, step.rows - 1)]
        factor = [slot for slot in given if slot not in follows and values[slot].requires_grad]
        if len(given) != 2 or len(made) != 1 or not factor or not values[made[0]].requires_grad:
            continue
        of = step.made_of(factor[0])
        for slot in (one for one in small if one in of):
            for far in (_FAR, -_FAR):
                there = step.loss_with(held={slot: (step.parameters[slot].detach() + far).requires_grad_()})
                if 0 <= there < _VANISHED * own:
                    yield said(operation, op=operation.name, loss=own, there=there, far=far)


@asks("softmax axis")
def softmax_axis(step: Step) -> Iterator[Probed]:
    """Whether values are summed over another axis than the one along which their weights sum to 1."""
    weights: dict[Slot, tuple[Operation, int]] = {}
    for operation in step.operations:
        given = operation.given
        if operation.name == "softmax" and operation.outs:
            dim = operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else None)
            dims = step.values[operation.outs[0]].dim()
            if isinstance(dim, int) and dims > 2 and _is_of_pairs(step, given[0]):
                weights[operation.outs[0]] = operation, dim % dims
        elif operation.name in _BETWEEN and given and given[0] in weights:
            weights |= dict.fromkeys(operation.outs, weights[given[0]])
        elif operation.kind in PRODUCTS and given[0] in weights and step.needed & set(operation.outs):
            made, dim = weights[given[0]]
            last = step.values[given[0]].dim() - 1
            if dim != last:
                yield said(made, dim=dim, dims=last + 1, summed=last)
    yield from _over_the_batch(step)


def _over_the_batch(step: Step) -> Iterator[Probed]:
    """Weights that sum to 1 over the rows of the batch, in a product that takes each row by itself."""
    weights: dict[Slot, Operation] = {}
    # the rows may be along the second dim of what is given, behind the time
    sizes = {size for slot in step.needed & step.inputs for size in step.leaves[slot].shape[:2]}
    for operation in step.operations:
        given = operation.given
        if operation.name == "softmax" and operation.outs:
            weights[operation.outs[0]] = operation
        elif operation.kind in _BETWEEN | _MOVED and given and given[0] in weights:
            weights |= dict.fromkeys(operation.outs, weights[given[0]])
        elif operation.kind in ("bmm", "matmul") and given[0] in weights and step.needed & set(operation.outs):
            one, made = step.values[given[0]].detach(), weights[given[0]]
            is_of_rows = one.dim() == 3 and len(one) in sizes and one.shape[-1] > 1
            if is_of_rows and _sums_to_one(one, 0) and not _sums_to_one(one, -1):
                dims = step.values[made.outs[0]].dim()
                yield said(made, dim=0, dims=dims, summed=dims - 1)


@asks("compared axes")
def compared_axes(step: Step) -> Iterator[Probed]:
    """Whether a loss compares probabilities along one axis with probabilities along another one."""
    along: dict[Slot, tuple[Operation, int]] = {}
    for operation in step.operations:
        given = operation.given
        if operation.kind in ("softmax", "log_softmax") and operation.outs:
            dim = operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else None)
            if isinstance(dim, int):
                along[operation.outs[0]] = operation, dim % step.values[operation.outs[0]].dim()
        elif operation.kind in _BETWEEN | {"log", "clamp", "clamp_min"} and given and given[0] in along:
            along |= dict.fromkeys(operation.outs, along[given[0]])
        elif operation.kind in _OF_DISTRIBUTIONS and len(given) > 1 and step.needed & set(operation.outs):
            pair = [along.get(one) or (operation, _axis_of(step, one)) for one in given[:2]]
            dims = {dim for _, dim in pair}
            shapes = {step.values[one].shape for one in given[:2]}
            is_of_pairs = any(
                one[0] == one[1] for one in shapes if len(one) == 2
            )  # of rows with rows, in two directions
            if len(dims) == 2 and min(dims) == 0 and len(shapes) == 1 and not is_of_pairs:
                yield said(next(one for one, dim in pair if dim == 0), op=operation.name, dim=0, other=max(dims))


def _axis_of(step: Step, slot: Slot) -> int:
    """The only axis along which what comes from outside sums to 1; -1 where there is none."""
    one = step.values[slot].detach()
    if slot not in step.inputs or not one.is_floating_point() or one.dim() < 2 or bool((one < 0).any()):
        return -1
    found = [dim for dim in range(one.dim()) if one.shape[dim] > 1 and _sums_to_one(one.double(), dim)]
    return found[0] if len(found) == 1 else -1


def _sums_to_one(one: torch.Tensor, dim: int) -> bool:
    return bool(((one.sum(dim) - 1).abs() < _UNIT).all())


def _is_of_pairs(step: Step, slot: Slot) -> bool:
    """Whether scores compare what comes from the data with what comes from them, as those of attention do."""
    made = next((one for one in step.path(slot) if one.kind not in _SCALING or not one.given), None)
    return made is not None and made.kind in PRODUCTS | {"einsum"} and not set(made.given) & step.parameters.keys()


@asks("hidden tokens")
def hidden_tokens(step: Step) -> Iterator[Probed]:
    """Whether scores are hidden where tokens are, and not where padding is."""
    rows = step.rows
    data = [one for slot in step.inputs if (one := step.leaves[slot]).shape[:1] == (rows,)]
    paddings = [ends for one in data if (ends := _ends_of(one)) is not None]
    for operation in step.operations:
        value = operation.kwargs.get("value", operation.args[-1] if operation.args else None)
        if operation.name == "multi_head_attention_forward" and operation.kwargs.get("key_padding_mask") is not None:
            mask = step.values[operation.kwargs["key_padding_mask"]]
            mask = mask if mask.dtype is torch.bool else mask < _HIDDEN
        elif operation.name in _HIDING and len(operation.given) > 1 and isinstance(value, (int, float)):
            mask = step.values[operation.given[1]] if value <= _HIDDEN else torch.zeros(0)
        elif operation.name == "scaled_dot_product_attention" and (shown := _shown_by(step, operation)) is not None:
            mask = ~shown  # of which True takes part
        else:
            continue
        small = (mask.reshape(rows, -1) if mask.numel() % rows == 0 else mask).bool()
        for one in paddings:
            if any(
                bool(hidden[~one].mean() >= _MOSTLY > 1 - _MOSTLY >= hidden[one].mean())
                for hidden in _of_tokens(small.double(), one.shape[1])
            ):
                yield said(operation, op=operation.name)


@asks("hides nothing", of_rows=False)
def hides_nothing(step: Step) -> Iterator[Probed]:
    """Whether a mask of attention is one and the same for all pairs, though what it is made of has two sides.

    That is a comparison which takes the number that it compares with for one of the others, ``>=`` in place of ``>``,
    as in an adjacency of 0 and 1. One batch may be without padding: in the step before it has to be the same.
    """
    tape = step.kept.earlier.get(step.optimizer)
    before = Step(tape, step.optimizer, step.kept, step.run, step.modules, step.until) if tape is not None else None
    found = list(_uniform(step))
    lines = {(one.file, one.line) for one, *_ in _uniform(before)} if found and before is not None else set()
    for operation, value, entries, limit in found:
        if (operation.file, operation.line) in lines:
            yield said(operation, op=operation.name, value=value, entries=entries, limit=limit)


def _uniform(step: Step) -> Iterator[tuple[Operation, bool, int, float]]:
    """What hides scores by a mask that is the same for all, though half of what it is made of equals the limit."""
    compared = {out: one for one in step.operations if one.name.strip("_") in _COMPARING for out in one.outs}
    for place, operation in enumerate(step.operations):
        mask = next((slot for slot in operation.given if slot in compared), None)
        if mask is None or operation.name not in ("where", *_HIDING) or not _is_weighed(step, operation, place):
            continue
        shown, made = step.values[mask], compared[mask]
        source, limit = step.values[made.given[0]], made.args[-1]
        if isinstance(limit, (int, float)) and len(made.given) == 1 and len(shown.unique()) == 1:
            equal = int((source == limit).sum())
            if source.numel() <= 2 * equal < 2 * source.numel() and len(source) > 1 and source.dim() > 1:
                yield operation, bool(shown.any()), equal, float(limit)


def _is_weighed(step: Step, operation: Operation, place: int) -> bool:
    """Whether scores of which some are hidden go into a softmax next."""
    follows = set(operation.outs)
    for one in step.operations[place + 1 :]:
        if one.given and one.given[0] in follows:
            if one.name == "softmax":
                lowest = min(float(step.values[slot].detach().min()) for slot in operation.given)
                value = operation.kwargs.get("value", operation.args[-1])
                lowest = min(lowest, value) if isinstance(value, (int, float)) else lowest
                return lowest <= _HIDDEN
            follows |= set(one.outs) if one.name in _BETWEEN else set()
    return False


def _of_tokens(hidden: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    """A mask without what was put before or behind the tokens, as that of a class token is."""
    more = hidden.shape[1] - width if hidden.dim() == 2 else -1
    if 0 <= more <= _PUT_BEFORE:
        yield hidden[:, more:]
        yield hidden[:, :width]


def _shown_by(step: Step, operation: Operation) -> torch.Tensor | None:
    """The mask of positions by which attention is told what takes part, if it is one of booleans."""
    given = operation.kwargs.get("attn_mask", operation.args[3] if len(operation.args) > 3 else None)
    mask = step.values.get(given) if given is not None else None
    return mask if mask is not None and mask.dtype is torch.bool else None


def _ends_of(given: torch.Tensor) -> torch.Tensor | None:
    """Where an input is padding: one token, or nothing but zeros, at the ends of some rows; ``None`` without."""
    if given.dim() == 3:
        same = (given == 0).all(-1)
    elif given.dim() != 2 or given.is_floating_point() or given.shape[1] < 2 or bool((given <= 1).all()):
        return None  # no tokens, or a mask itself
    else:
        ends = given[:, -1][given[:, -1] == given[:, -2]]
        same = given == ends.mode().values if len(ends) else torch.zeros_like(given, dtype=torch.bool)
    behind = same.flip(1).long().cumprod(1).flip(1).bool()
    return behind if bool((behind.sum(1) > 1).any()) and not bool(behind.all()) else None


def padding_of(tokens: torch.Tensor, *, is_word: bool = False) -> torch.Tensor | None:
    """Where tokens are one value that stands only at the ends of rows, which makes them equally long; else ``None``.

    With ``is_word`` it may stand elsewhere, but rarely and mostly alone: what repeats at the ends of rows of real data
    repeats within them as well.
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.shape[1] < 3:
        return None
    same = tokens == tokens[:, -1].mode().values
    behind = same.flip(1).long().cumprod(1).flip(1).bool()
    lengths = behind.sum(1)
    inside = same & ~behind
    if is_word:
        alone, pairs = int(inside.sum()), int((inside[:, 1:] & inside[:, :-1]).sum())
        is_rare = alone < _RARE * int((~behind).sum()) and pairs <= _PAIRS * alone
        elsewhere = not is_rare or int(lengths.min()) > 1 or float((lengths > 2).double().mean()) < 0.5
    else:
        elsewhere = bool(inside.any())
    return behind if not elsewhere and not behind.all(1).any() and len(lengths.unique()) > 2 else None


@asks("rewarded", of_rows=False)
def rewarded(step: Step) -> Iterator[Probed]:
    """Whether a step makes what was rewarded less likely: the loss rises with a log-probability times its reward."""
    found: list[tuple[float, Operation]] = []
    costs: list[Operation] = []
    for operation in step.operations:
        text, given = _right(operation), operation.given
        is_product = operation.kind == "mul" and operation.grad and operation.outs and len(given) == 2
        if not is_product or len({step.values[one].requires_grad for one in given}) < 2:
            continue
        if step.values[operation.outs[0]].numel() < 2:
            continue
        if (of_ratio := _of_ratio(step, operation)) is not None:
            found.append((of_ratio, operation))
            continue
        toward = _toward_rewards(step, operation)
        is_named = bool(toward or (_SCORED.search(text) and _REWARD.search(text)))
        if not is_named and not _weighs_draws(step, operation):
            continue
        (slope,) = step.slopes(operation.outs[0])
        if slope is not None and bool(slope.any()):
            sign = (toward or 1) * _sign(step, given[0]) * _sign(step, given[1])
            found.append((float(slope.sum()) * sign, operation))
            costs += [] if is_named else [operation]  # rewards or costs: which of them is not known
    if not found:
        raise Unknown("no product of a log-probability and a reward was seen")
    rises, operation = max(found, key=lambda one: abs(one[0]))
    is_wrong = rises > 0 and operation not in costs
    yield said(operation, answer="yes" if is_wrong else "no", slope=rises, products=len(found))


@asks("flat scores")
def flat_scores(step: Step) -> Iterator[Probed]:
    """Whether scores that are products of directions are too small for a softmax to tell any of them from the others.

    With the best directions, those of a simplex, a row's own score is as far above the others as their scale.
    """
    for operation in step.used("cross_entropy", "log_softmax"):
        scores = step.values[operation.given[0]].detach()
        product = _product(step, operation.given[0])
        if product is None or scores.dim() != 2 or step.values[product.outs[0]].numel() != scores.numel():
            continue
        likeness = step.values[product.outs[0]].detach().reshape(scores.shape)
        counted = (scores.abs() < -_HIDDEN) & (likeness.abs() < -_HIDDEN)
        one, other = (each[counted].double() - each[counted].double().mean() for each in (likeness, scores))
        if len(one) < _FEW or not bool(one.any()) or not bool((likeness[counted].abs() <= 1 + _UNIT).all()):
            continue
        scale, width = float((one * other).sum() / (one * one).sum()), scores.shape[1]
        guess, best = math.log(width), math.log1p((width - 1) * math.exp(-abs(scale) * width / (width - 1)))
        if best > _NOTHING_TOLD * guess:
            yield said(operation, op=operation.name, scale=scale, guess=guess, best=best, width=width)


def _product(step: Step, slot: Slot) -> Operation | None:
    """The product of directions that scores are made of by fixed numbers alone."""
    for operation in step.path(slot):
        if operation.kind in _SCORES | {"linear"}:
            sides = [step.values[one].detach() for one in operation.given[:2]]
            units = [any(bool(((one.norm(dim=dim) - 1).abs() < _UNIT).all()) for dim in (0, -1)) for one in sides]
            is_of_units = operation.kind == "cosine_similarity" or (len(units) == 2 and all(units))
            return operation if is_of_units and min(one.dim() for one in sides) > 1 else None
        is_learned = any(step.values[one].requires_grad for one in operation.given[1:])
        if operation.kind not in _SCALING | _FILLING or is_learned:
            return None
    return None


def names_rewards(step: Step) -> bool:
    """Whether a line that makes something with a graph names a reward, an advantage or a return."""
    return any(_REWARD.search(_right(one)) for one in step.tape.operations if one.grad)


def _weighs_draws(step: Step, product: Operation) -> bool:
    """Whether given numbers, none of them negative, weigh log-probabilities of what was drawn with these."""
    fixed, trained = sorted(product.given, key=lambda one: step.values[one].requires_grad)
    of = step.values[fixed]
    is_given = step.made_of(fixed).isdisjoint(step.parameters) and of.shape == step.values[trained].shape
    if not is_given or not of.is_floating_point() or bool((of < 0).any()) or len(of.unique()) < 3:  # a mask
        return False
    made = step.made_of(trained)
    draws = [one for one in step.operations if one.drawn is not None and made & set(one.outs) and not one.grad]
    scoring = slots_of(step.tape, Loss(trained, step.loss.before, "", 0), but=draws)
    of_net = scoring & {slot for slot, one in step.parameters.items() if one.requires_grad}
    return any(step.made_of(one.outs[0]) & of_net for one in draws) and any(True for _ in step.run.of(Scored))


def _toward_rewards(step: Step, product: Operation) -> int:
    """1 where log-probabilities are weighed with what a value is to become minus another number, -1 for the other way.

    What a value is to become is what the same step compares one with that it trains. 0 where none of it is there.
    """
    fixed, trained = sorted(product.given, key=lambda one: step.values[one].requires_grad)
    if not any(True for _ in step.run.of(Scored)) or step.values[fixed].shape != step.values[trained].shape:
        return 0
    wanted = set[Slot]()
    for one in step.used("sub", *DISTANCES):
        still = [slot for slot in one.given if not step.values[slot].requires_grad]
        wanted |= {*still} if len(one.given) == 2 and len(still) == 1 else set()
    for one in step.path(fixed):
        sides = [slot in wanted for slot in one.given]
        if one.kind == "sub" and len(sides) == 2 and sides[0] is not sides[1]:
            return 1 if sides[0] else -1
        if one.kind not in _TURNED | {"div", "mul", "add", "detach"}:
            return 0
    return 0


def _of_ratio(step: Step, product: Operation) -> float | None:
    """How the loss rises with log-probabilities times what a ratio of them to fixed ones is weighed with.

    A ratio is the exponential of a difference, of which one side alone is trained.
    """
    fixed, trained = sorted(product.given, key=lambda one: step.values[one].requires_grad)
    made = next(step.path(trained), None)
    minus = next(step.path(made.given[0]), None) if made is not None and made.kind == "exp" else None
    if minus is None or minus.kind != "sub" or len(minus.given) != 2:
        return None
    scores = [one for one in minus.given if step.values[one].requires_grad]
    weights = step.values[fixed].detach()
    is_signed = bool((weights > 0).any() and (weights < 0).any())
    if len(scores) != 1 or step.values[scores[0]].shape != weights.shape or not is_signed:
        return None
    (slope,) = step.slopes(scores[0])
    return None if slope is None else float((slope * weights).sum()) * _sign(step, fixed)


def _right(operation: Operation) -> str:
    """The line of an operation, without what it is assigned to."""
    return _LEFT.sub("", linecache.getline(operation.file, operation.line))


def _sign(step: Step, slot: Slot) -> int:
    """Of what a tensor was before it was negated or multiplied with a number."""
    sign = 1
    for operation in step.path(slot):
        numbers = [one for one in operation.args if isinstance(one, (int, float)) and not isinstance(one, Slot)]
        if operation.kind not in ("neg", "negative") and not (operation.kind == "mul" and numbers):
            return sign
        sign *= -1 if not numbers or numbers[0] < 0 else 1
    return sign


@asks("punished")
def punished(step: Step) -> Iterator[Probed]:
    """Whether a loss rises with each probability of a target, or with each similarity to one, and so makes it small."""
    found = [
        one for one in step.used()
        if one.grad and (_is_likeness(one, step) or _is_of_target(one, step) or _is_masked(one, step))
    ]  # fmt: skip
    if not found or names_rewards(step):
        raise Unknown("nothing that is made is compared with a target by its probability or direction")
    masks = [{slot for slot in one.given if not step.values[slot].requires_grad} for one in found]
    others = [one for one in step.used() if one.name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits"))]
    if any(not all(set(one.given) & mask for mask in masks) for one in others):
        raise Unknown("another loss is part of it, beside which something may be meant to become small")
    if _is_meant_small(step, found):
        raise Unknown("the logarithm of one minus a probability is taken: that is meant to become small")
    slopes = step.slopes(*(one.outs[0] for one in found))
    rises = [bool(one.any() and (one >= 0).all()) for one in slopes if one is not None]
    kind, answer = (
        "similarity to" if _is_likeness(found[0], step) else "probability of",
        "yes" if rises and all(rises) else "no",
    )
    yield said(found[0], answer=answer, kind=kind, terms=len(found), beside=len(others))


@asks("misplaced")
def misplaced(step: Step) -> Iterator[Probed]:
    """Whether a loss makes positive pairs, by their names, less alike, or negative ones more alike."""
    lines: dict[tuple[str, int], list[tuple[bool, Operation]]] = {}
    for operation in step.used():
        given, text, wrong, made = operation.given, _right(operation), 0, 0
        if not given or not step.values[given[0]].requires_grad:
            continue
        if operation.kind == "sub" and len(given) == 2 and len(found := _PAIRED.findall(text)) == 1:
            kinds, made = [_alikeness(step, one) for one in given], 0 if _POSITIVE_FIRST.match(found[0]) else 1
            wrong = kinds[0] if kinds[0] == kinds[1] else 0
        elif operation.kind in _LOG_SIGMOIDS and _NEGATIVE.search(text):
            wrong = -_alikeness(step, given[0])
        if wrong:
            (slope,) = step.slopes(given[made])
            is_wrong = slope is not None and bool(slope.any()) and bool((slope * wrong >= 0).all())
            lines.setdefault((operation.file, operation.line), []).append((is_wrong, operation))
    for same in lines.values():
        if all(is_wrong for is_wrong, _ in same):
            yield said(same[0][1], op=same[0][1].name.strip("_"))


def _alikeness(step: Step, slot: Slot) -> int:
    """1 for a product of vectors, which is large for what is alike, -1 for a distance, and 0 for what is not known."""
    sign, operations = 1, step.path(slot)
    for operation in operations:
        given = operation.given
        made = next((one.kind for one in step.path(given[0])), "") if given and operation.kind == "sum" else ""
        if operation.kind in _SCORES or made == "mul":
            return sign
        if operation.kind in _DISTANCES or made in _SIZES:
            return -sign
        if operation.kind not in _THROUGH | {"neg"} or not given:
            return 0
        sign *= -1 if operation.kind == "neg" else 1
    return 0


@asks("unlikely", of_rows=False)
def unlikely(step: Step) -> Iterator[Probed]:
    """Whether what is minimised is, as its line says, a log-likelihood of data."""
    made = next(step.path(step.loss.slot), None)
    if made is None or made.name not in ("mean", "sum"):
        raise Unknown("the loss is no mean")
    text = _right(made).strip()
    is_one = _LIKELIHOOD.fullmatch(text) and not _DRAWN.search(text) and not _REWARD.search(text)
    yield said(made, answer="yes" if is_one else "no", op=made.name)


def _is_meant_small(step: Step, found: Sequence[Operation]) -> bool:
    """Whether log(1 - p) of what is picked is used, as for labels that a row does not have, or for unlikely tokens."""
    picked, turned = {one.outs[0] for one in found}, set[Slot]()
    for operation in step.tape.operations:
        given, outs = set(operation.given), set(operation.outs)
        if given & turned and operation.kind in _LOGARITHMS:
            return True
        if given & picked and operation.kind in _TURNED:
            turned |= outs
        elif operation.kind in _THROUGH | {"exp"}:
            picked |= outs if given & picked else set()
            turned |= outs if given & turned else set()
    return False


def _is_likeness(operation: Operation, step: Step) -> bool:
    """Whether it compares the direction of what is trained with that of something else that is not."""
    given = [step.values[one] for one in operation.given][:2]
    if len(given) < 2 or given[0].shape != given[1].shape or given[0].requires_grad == given[1].requires_grad:
        return False
    if operation.name == "cosine_similarity":
        return True
    unit = [one.dim() > 1 and bool(((one.detach().norm(dim=-1) - 1).abs() < _UNIT).all()) for one in given]
    return operation.kind == "mul" and all(unit)


def _is_of_target(operation: Operation, step: Step) -> bool:
    """Whether it picks the probabilities of classes, or their logarithms, by numbers that come from outside."""
    given = operation.given
    if operation.name not in _PICKING or len(given) < 2 or not step.values[given[0]].requires_grad:
        return False
    index = step.values[given[-1]]
    if index.dtype != torch.int64 or index.requires_grad or len(index.unique()) < 2:
        return False
    return _is_probability(step, given[0], "softmax", "log_softmax")


def _is_masked(operation: Operation, step: Step) -> bool:
    """Whether it weighs probabilities, or their logarithms, with targets of 0 and 1 that come from outside."""
    if operation.kind != "mul" or len(operation.given) != 2:
        return False
    made, mask = sorted(operation.given, key=lambda one: not step.values[one].requires_grad)
    one, other = step.values[made], step.values[mask]
    if not one.requires_grad or other.requires_grad or one.shape != other.shape or one.numel() < 2:
        return False
    # whether targets say what is not there, as 1 - y does, or were drawn
    if (
        not bool(((other == 0) | (other == 1)).all())
        or len(other.unique()) < 2
        or any(one.drawn is not None or one.kind in _TURNED | _NEGATIONS for one in step.path(mask))
    ):
        return False
    return _is_probability(step, made, "softmax", "log_softmax", "sigmoid", *_LOG_SIGMOIDS) and _is_all(step, made)


def _is_all(step: Step, made: Slot) -> bool:
    """Whether nothing of the parameters reaches the loss but through a tensor, or what that one is made of."""
    source = made
    for one in takewhile(lambda one: one.kind in _THROUGH, step.path(made)):
        source = next(iter(one.given), source)
    makers = [one for one in step.operations if source in one.outs]
    return not slots_of(step.tape, step.loss, but=makers) & step.parameters.keys()


def _is_probability(step: Step, slot: Slot, *names: str) -> bool:
    made = next((one for one in step.path(slot) if one.kind not in _THROUGH), None)
    return made is not None and made.name in names
