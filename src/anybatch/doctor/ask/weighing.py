"""What is weighed in a step with what: values with a softmax, tokens with a mask, log-probabilities with a reward.

And which way the loss goes with what it should make large: what was rewarded, what is like its target.
"""

import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Replay, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "mm"})
_BETWEEN = frozenset({"dropout", "to", "float", "half", "type_as", "contiguous"})
_HIDING = frozenset({"masked_fill", "masked_fill_"})
_SCALING = _BETWEEN | {"div", "__truediv__", "mul", "__mul__", "__rmul__", "add", "__add__", *_HIDING}
_HIDDEN = -1e3  # a score that a softmax makes 0 of
_SCORED = re.compile(r"log_?p|\blps?\b|ratio", re.IGNORECASE)
_REWARD = re.compile(r"adv|reward|returns?\b|\b[RG]\b", re.IGNORECASE)
_LEFT = re.compile(r"^\s*(return\b|[\w., \[\]]+=(?!=))")
_TIMES = frozenset({"mul", "__mul__", "__rmul__"})
_OVER = frozenset({"div", "__truediv__", "true_divide"})
_FEW, _FAR, _VANISHED = 16, 50.0, 1e-3  # entries of weights, how far they are moved, and what is left of the loss
_PICKING = frozenset({"gather", "__getitem__", "take_along_dim"})
_THROUGH = frozenset(
    {"log", "clamp", "clamp_min", "add", "__add__", "squeeze", "view", "reshape", "flatten", *_BETWEEN}
)
_PAIRED = re.compile(r"\b(?:\w*pos\w*\s*-\s*\w*neg|\w*neg\w*\s*-\s*\w*pos)", re.IGNORECASE)
_POSITIVE_FIRST = re.compile(r"\b\w*pos\w*\s*-", re.IGNORECASE)
_SCORES = frozenset({*_PRODUCTS, "einsum", "cosine_similarity", "dot", "mv"})
_DISTANCES = frozenset({"norm", "linalg_norm", "vector_norm", "pairwise_distance", "cdist", "dist"})
_SIZES = frozenset({"pow", "__pow__", "square", "abs"})
_NEGATED = frozenset({"neg", "__neg__"})
_NEGATIVE = re.compile(r"logsigmoid\(\s*\w*neg\w*\s*\)", re.IGNORECASE)
_LOG_SIGMOIDS = frozenset({"logsigmoid", "log_sigmoid"})
_MEANS = frozenset({"mean", "sum"})
_LIKELIHOOD = re.compile(
    r"(torch\.(mean|sum)\()?(\w+(\[\w+\])?\.)+log_?prob\(.*\)"
    r"(\.(mean|sum)\([^)]*\)|\))\s*(#.*)?"
)
_DRAWN = re.compile(r"sampl|action|\ba\b|fake|generated", re.IGNORECASE)
_TURNED = frozenset({"__rsub__", "rsub", "sub", "__sub__", "neg", "__neg__"})
_NEGATIONS = frozenset({"ne", "__ne__", "logical_not", "bitwise_not", "__invert__"})
_LOGARITHMS = frozenset({"log", "log1p", "binary_cross_entropy"})
_UNIT = 1e-3  # by how much the length of a row of a normalised tensor may differ from 1


def weighed_away(tape: Tape) -> Probed:
    """Whether what parameters make alone scales a loss, and may make it 0 whatever the rest of the net does."""
    rows, loss = rows_of(tape), tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    own, follows = float(run.values[loss.slot].sum()), _following(tape, loss)
    small = [slot for slot, one in tape.parameters.items() if one.requires_grad and one.numel() <= _FEW]
    for operation in tape.operations[: loss.before]:
        given = list(slots(operation.args))
        if operation.name not in _TIMES | _OVER or len(given) != 2 or not needed & set(operation.outs) or own <= 0:
            continue
        made = [slot for slot in given if slot in follows and run.values[slot].numel() <= min(_FEW, rows - 1)]
        factor = [slot for slot in given if slot not in follows and run.values[slot].requires_grad]
        if len(made) != 1 or not factor or not run.values[made[0]].requires_grad:
            continue
        of = slots_of(tape, replace(loss, slot=factor[0]))
        for slot in (one for one in small if one in of):
            for far in (_FAR, -_FAR):
                moved = (tape.parameters[slot].detach() + far).requires_grad_()
                there = float(replayed(tape, loss, lambda one: one, held={slot: moved}).values[loss.slot].sum())
                if 0 <= there < _VANISHED * own:
                    return told("weighed away", operation, op=operation.name, loss=own, there=there, far=far)
    return told("weighed away", answer="no")


def _following(tape: Tape, loss: Loss) -> set[Slot]:
    """The slots that depend on anything but parameters."""
    found = tape.leaves.keys() - tape.parameters.keys()
    for operation in tape.operations[: loss.before]:
        if operation.drawn is not None or found & set(slots((operation.args, operation.kwargs))):
            found |= set(operation.outs)
    return found


def softmax_axis(tape: Tape) -> Probed:
    """Whether values are summed over another axis than the one along which their weights sum to 1."""
    rows_of(tape)
    run, needed = replayed(tape, tape.losses[-1], lambda one: one), slots_of(tape, tape.losses[-1])
    weights: dict[Slot, tuple[Operation, int]] = {}
    for operation in tape.operations[: tape.losses[-1].before]:
        given = list(slots(operation.args))
        if operation.name == "softmax" and operation.outs:
            dim = operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else None)
            dims = run.values[operation.outs[0]].dim()
            if isinstance(dim, int) and dims > 2 and _is_of_pairs(tape, given[0]):
                weights[operation.outs[0]] = operation, dim % dims
        elif operation.name in _BETWEEN and given and given[0] in weights:
            weights |= dict.fromkeys(operation.outs, weights[given[0]])
        elif operation.name in _PRODUCTS and given[0] in weights and needed & set(operation.outs):
            made, dim = weights[given[0]]
            last = run.values[given[0]].dim() - 1
            if dim != last:
                return told("softmax axis", made, dim=dim, dims=last + 1, summed=last)
    return told("softmax axis", answer="no")


def _is_of_pairs(tape: Tape, slot: Slot) -> bool:
    """Whether scores compare what comes from the data with what comes from them, as those of attention do."""
    for operation in reversed(tape.operations):
        if slot in operation.outs:
            given = list(slots(operation.args))
            if operation.name in _PRODUCTS or operation.name == "einsum":
                return not set(given) & tape.parameters.keys()
            if operation.name not in _SCALING or not given:
                return False
            slot = given[0]
    return False


def hidden_tokens(tape: Tape) -> Probed:
    """Whether scores are hidden where tokens are, and not where padding is."""
    rows = rows_of(tape)
    run = replayed(tape, tape.losses[-1], lambda one: one)
    paddings = [one for leaf in tape.leaves.values() if (one := padding_of(leaf)) is not None and len(leaf) == rows]
    for operation in tape.operations[: tape.losses[-1].before]:
        found = list(slots((operation.args, operation.kwargs)))
        value = operation.kwargs.get("value", operation.args[-1] if operation.args else None)
        if operation.name not in _HIDING or len(found) < 2 or not isinstance(value, (int, float)) or value > _HIDDEN:
            continue
        mask = run.values[found[1]]
        small = mask.reshape(rows, -1) if mask.numel() % rows == 0 else mask
        if any(small.shape == one.shape and bool((small == ~one).all()) for one in paddings):
            return told("hidden tokens", operation, op=operation.name)
    return told("hidden tokens", answer="no")


def padding_of(tokens: torch.Tensor) -> torch.Tensor | None:
    """Where tokens are one value that stands only at the ends of rows, which makes them equally long; else ``None``."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.shape[1] < 3:
        return None
    same = tokens == tokens[:, -1].mode().values
    behind = same.flip(1).long().cumprod(1).flip(1).bool()
    lengths = behind.sum(1)
    is_padding = not bool((same & ~behind).any() or behind.all(1).any()) and len(lengths.unique()) > 2
    return behind if is_padding else None


def rewarded(tape: Tape) -> Probed:
    """Whether a step makes what was rewarded less likely: the loss rises with a log-probability times its reward."""
    loss = tape.losses[-1]
    if tape.failed:
        raise Unknown(tape.failed)
    run = replayed(tape, loss, lambda one: one)
    found: list[tuple[float, Operation]] = []
    for operation in _products(tape):
        made, given = run.values[operation.outs[0]], list(slots(operation.args))
        if len(given) != 2 or len({run.values[one].requires_grad for one in given}) < 2 or made.numel() < 2:
            continue
        (slope,) = torch.autograd.grad(run.values[loss.slot].sum(), made, retain_graph=True, allow_unused=True)
        if slope is not None and bool(slope.any()):
            found.append((float(slope.sum()) * _sign(tape, given[0]) * _sign(tape, given[1]), operation))
    if not found:
        raise Unknown("no product of a log-probability and a reward was seen")
    rises, operation = max(found, key=lambda one: abs(one[0]))
    return told("rewarded", operation, answer="yes" if rises > 0 else "no", slope=rises, products=len(found))


def _products(tape: Tape) -> Iterator[Operation]:
    """Products on lines that name a log-probability and a reward."""
    for operation in tape.operations[: tape.losses[-1].before]:
        text = _right(operation)
        is_product = operation.name in _TIMES and operation.grad and operation.outs
        if is_product and _SCORED.search(text) and _REWARD.search(text):
            yield operation


def _right(operation: Operation) -> str:
    """The line of an operation, without what it is assigned to."""
    return _LEFT.sub("", linecache.getline(operation.file, operation.line))


def _sign(tape: Tape, slot: Slot) -> int:
    """Of what a tensor was before it was negated or multiplied with a number."""
    sign = 1
    for operation in reversed(tape.operations):
        if slot in operation.outs:
            numbers = [one for one in operation.args if isinstance(one, (int, float)) and not isinstance(one, Slot)]
            if operation.name not in ("neg", "__neg__", "negative") and not (operation.name in _TIMES and numbers):
                return sign
            sign *= -1 if not numbers or numbers[0] < 0 else 1
            slot = next(iter(slots(operation.args)))
    return sign


def punished(tape: Tape) -> Probed:
    """Whether a loss rises with each probability of a target, or with each similarity to one, and so makes it small."""
    loss, needed = tape.losses[-1], slots_of(tape, tape.losses[-1])
    rows_of(tape)
    run = replayed(tape, loss, lambda one: one)
    found = [
        one for one in tape.operations[: loss.before]
        if one.grad and needed & set(one.outs)
        and (_is_likeness(one, run) or _is_of_target(tape, one, run) or _is_masked(tape, one, run))
    ]  # fmt: skip
    if not found or any(_REWARD.search(_right(one)) for one in tape.operations if one.grad):
        raise Unknown("nothing that is made is compared with a target by its probability or direction")
    masks = [{slot for slot in slots(one.args) if not run.values[slot].requires_grad} for one in found]
    others = [one for one in tape.operations[: loss.before] if needed & set(one.outs) and _is_loss(one)]
    if any(not all(set(slots((one.args, one.kwargs))) & mask for mask in masks) for one in others):
        raise Unknown("another loss is part of it, beside which something may be meant to become small")
    if _is_meant_small(tape, found):
        raise Unknown("the logarithm of one minus a probability is taken: that is meant to become small")
    made = [run.values[one.outs[0]] for one in found]
    slopes = torch.autograd.grad(run.values[loss.slot].sum(), made, allow_unused=True)
    rises = [bool(one.any() and (one >= 0).all()) for one in slopes if one is not None]
    kind = "similarity to" if _is_likeness(found[0], run) else "probability of"
    return told(
        "punished",
        found[0],
        answer="yes" if rises and all(rises) else "no",
        kind=kind,
        terms=len(found),
        beside=len(others),
    )


def _is_loss(operation: Operation) -> bool:
    return operation.name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits"))


def misplaced(tape: Tape) -> Probed:
    """Whether a loss makes positive pairs, by their names, less alike, or negative ones more alike."""
    loss, needed = tape.losses[-1], slots_of(tape, tape.losses[-1])
    rows_of(tape)
    run = replayed(tape, loss, lambda one: one)
    lines: dict[tuple[str, int], list[tuple[bool, Operation]]] = {}
    for operation in tape.operations[: loss.before]:
        given, text, wrong = list(slots(operation.args)), _right(operation), 0
        if not needed & set(operation.outs) or not given or not run.values[given[0]].requires_grad:
            continue
        if operation.name in ("sub", "__sub__") and len(given) == 2 and len(found := _PAIRED.findall(text)) == 1:
            kinds, first = [_alikeness(tape, one) for one in given], bool(_POSITIVE_FIRST.match(found[0]))
            wrong, made = kinds[0] if kinds[0] == kinds[1] else 0, run.values[given[0 if first else 1]]
        elif operation.name in _LOG_SIGMOIDS and _NEGATIVE.search(text):
            wrong, made = -_alikeness(tape, given[0]), run.values[given[0]]
        if not wrong:
            continue
        (slope,) = torch.autograd.grad(run.values[loss.slot].sum(), made, retain_graph=True, allow_unused=True)
        is_wrong = slope is not None and bool(slope.any()) and bool((slope * wrong >= 0).all())
        lines.setdefault((operation.file, operation.line), []).append((is_wrong, operation))
    wrong_ones = (same[0][1] for same in lines.values() if all(is_wrong for is_wrong, _ in same))
    guilty = next(wrong_ones, None)
    return told("misplaced", guilty, op=guilty.name.strip("_")) if guilty else told("misplaced", answer="no")


def _alikeness(tape: Tape, slot: Slot) -> int:
    """1 for a product of vectors, which is large for what is alike, -1 for a distance, and 0 for what is not known."""
    sign = 1
    for operation in reversed(tape.operations):
        if slot in operation.outs:
            given = list(slots(operation.args))
            made = next((one.name for one in reversed(tape.operations) if given and given[0] in one.outs), "")
            if operation.name in _SCORES or (operation.name == "sum" and made in _TIMES):
                return sign
            if operation.name in _DISTANCES or (operation.name == "sum" and made in _SIZES):
                return -sign
            if operation.name not in _THROUGH | _NEGATED or not given:
                return 0
            sign *= -1 if operation.name in _NEGATED else 1
            slot = given[0]
    return 0


def unlikely(tape: Tape) -> Probed:
    """Whether what is minimised is, as its line says, a log-likelihood of data."""
    loss = tape.losses[-1]
    made = next((one for one in reversed(tape.operations[: loss.before]) if loss.slot in one.outs), None)
    if tape.failed or made is None or made.name not in _MEANS:
        raise Unknown(tape.failed or "the loss is no mean")
    text = _right(made).strip()
    is_one = _LIKELIHOOD.fullmatch(text) and not _DRAWN.search(text) and not _REWARD.search(text)
    return told("unlikely", made, answer="yes" if is_one else "no", op=made.name)


def _is_meant_small(tape: Tape, found: Sequence[Operation]) -> bool:
    """Whether log(1 - p) of what is picked is used, as for labels that a row does not have, or for unlikely tokens."""
    picked, turned = {one.outs[0] for one in found}, set[Slot]()
    for operation in tape.operations:
        given, outs = set(slots(operation.args)), set(operation.outs)
        if given & turned and operation.name in _LOGARITHMS:
            return True
        if given & picked and operation.name in _TURNED:
            turned |= outs
        elif operation.name in _THROUGH | {"exp"}:
            picked |= outs if given & picked else set()
            turned |= outs if given & turned else set()
    return False


def _is_likeness(operation: Operation, run: Replay) -> bool:
    """Whether it compares the direction of what is trained with that of something else that is not."""
    given = [run.values[one] for one in slots(operation.args)][:2]
    if len(given) < 2 or given[0].shape != given[1].shape or given[0].requires_grad == given[1].requires_grad:
        return False
    if operation.name == "cosine_similarity":
        return True
    unit = [one.dim() > 1 and bool(((one.detach().norm(dim=-1) - 1).abs() < _UNIT).all()) for one in given]
    return operation.name in _TIMES and all(unit)


def _is_of_target(tape: Tape, operation: Operation, run: Replay) -> bool:
    """Whether it picks the probabilities of classes, or their logarithms, by numbers that come from outside."""
    given = list(slots(operation.args))
    if operation.name not in _PICKING or len(given) < 2 or not run.values[given[0]].requires_grad:
        return False
    index = run.values[given[-1]]
    if index.dtype != torch.int64 or index.requires_grad or len(index.unique()) < 2:
        return False
    return _is_probability(tape, given[0], ("softmax", "log_softmax"))


def _is_masked(tape: Tape, operation: Operation, run: Replay) -> bool:
    """Whether it weighs probabilities, or their logarithms, with targets of 0 and 1 that come from outside."""
    given = list(slots(operation.args))
    if operation.name not in _TIMES or len(given) != 2:
        return False
    made, mask = sorted(given, key=lambda one: not run.values[one].requires_grad)
    one, other = run.values[made], run.values[mask]
    if not one.requires_grad or other.requires_grad or one.shape != other.shape or one.numel() < 2:
        return False
    if not bool(((other == 0) | (other == 1)).all()) or len(other.unique()) < 2 or _is_turned(tape, mask):
        return False
    return _is_probability(tape, made, ("softmax", "log_softmax", "sigmoid", *_LOG_SIGMOIDS)) and _is_all(tape, made)


def _is_all(tape: Tape, made: Slot) -> bool:
    """Whether nothing of the parameters reaches the loss but through a tensor, or what that one is made of."""
    source = made
    for one in reversed(tape.operations):
        if source in one.outs and one.name in _THROUGH:
            source = next(iter(slots(one.args)), source)
    needed = {tape.losses[-1].slot}
    for one in reversed(tape.operations[: tape.losses[-1].before]):
        outs = set(one.outs) - {source}
        if needed & outs:
            needed |= set(slots((one.args, one.kwargs)))
    return not needed & tape.parameters.keys()


def _is_turned(tape: Tape, slot: Slot) -> bool:
    """Whether targets say what is not there, as 1 - y does, or were drawn."""
    for one in reversed(tape.operations):
        if slot in one.outs:
            if one.drawn is not None or one.name in _TURNED | _NEGATIONS:
                return True
            slot = next(iter(slots(one.args)), slot)
    return False


def _is_probability(tape: Tape, slot: Slot, names: Sequence[str]) -> bool:
    for one in reversed(tape.operations):
        if slot in one.outs:
            if one.name in names:
                return True
            if one.name not in _THROUGH:
                return False
            slot = next(iter(slots(one.args)), slot)
    return False
