"""What a loss compares: a tensor with itself, rows with their negatives or views, boxes, nets that agree, states."""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from anybatch.doctor.ask.rows import close
from anybatch.doctor.ask.steps import DISTANCES, MOVING, Step, asks, replayed, said, slots_of
from anybatch.doctor.ask.tape import Operation, Replay, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.events import Backward, Stepped
from anybatch.records.lossfacts import LossCall, Probed

_COMPARING = DISTANCES | {"kl_div"}
_EQUAL, _TURNING = frozenset({"eq", "__eq__"}), frozenset({"T", "mT", "t", "transpose", "contiguous"})
_BEYOND = 0.1  # of the rounded scores that are no label
_MATCHING = frozenset({"matmul", "mm", "cosine_similarity", "pairwise_distance", "cdist"})
_DIFFERENCES = frozenset({"sub", "rsub"})
_SIZING = frozenset({"pow", "square", "abs", "norm", "mul"})
_SIDES_OF_PAIRS = frozenset({"matmul", "mm"})
_MASKED = -1e3  # a score that says "not this pair", beside which all others are alike
_DIFFERS = 1e-4  # the deviation of an entry over rows
_JOINING = frozenset({"cat", "concat", "concatenate", "stack"})  # of two views, before all are compared with all


@asks("itself")
def of_itself(step: Step) -> Iterator[Probed]:
    """Whether a term of the loss compares what the model gives with itself."""
    computed = set[Slot]()
    differences: dict[Slot, Operation] = {}
    twins: dict[Slot, Operation] = {}
    drops = any(one.drops for one in step.tape.operations)  # which may tell two calls apart in the run
    for operation, found in zip(step.operations, step.replay.results, strict=True):
        given, kind = operation.given, operation.kind
        computed |= set(operation.outs)
        if not step.needed & set(operation.outs) or not found:
            continue
        sides = [step.values[one].detach() for one in given[:2]]
        is_one = not drops and (
            (kind == "kl_div" and _is_itself(operation, sides))
            or (kind in _MATCHING and _is_twice(step, given[0], given[-1]))
            or (kind == "cross_entropy" and len(sides) > 1 and _is_of_pairs_of_one(*sides))
            or (kind == "div" and bool((found[0] == 1).all()) and _are_twins(step, given))
            or (kind in _JOINING and len(given) == 2 and _are_twins(step, given))
            or (kind in _SIDES_OF_PAIRS and _is_of_views_of_one(step, operation))
            or (kind in _EQUAL and len(given) == 2 and _is_own_list(step, given))
        )
        if is_one:
            yield _itself(operation)
        if kind in ("exp", "expm1") and (twin := next((twins[one] for one in given if one in twins), None)):
            yield _itself(twin)
        if bool(found[0].count_nonzero()):
            continue
        if kind in _DIFFERENCES and not drops and _are_twins(step, given):
            twins[operation.outs[0]] = operation
        if kind in _COMPARING | _DIFFERENCES:
            made = set(given[:2]) & computed
            alike = len(given) >= 2 and sides[0].shape == sides[1].shape and made and not (drops and len(made) > 1)
            if alike and sides[0].numel() > 1 and float(sides[0].double().std()) > 0:
                differences[operation.outs[0]] = operation
                if kind in _COMPARING:
                    yield _itself(operation)
        elif kind in _SIZING and (guilty := next((differences[one] for one in given if one in differences), None)):
            yield _itself(guilty)


@asks("compared scores", of_rows=False)
def compared_scores(step: Step) -> Iterator[Probed]:
    """Whether scores that no sigmoid made probabilities are rounded and compared with labels of 0 and 1."""
    if not any(step.used("binary_cross_entropy_with_logits")):
        raise Unknown("no loss takes scores of labels that are 0 or 1")
    rounded = {slot: one for one in step.operations if one.kind == "round" for slot in one.outs}
    for operation in step.operations:
        given = operation.given if operation.name in _EQUAL else ()
        made, labels = [one for one in given if one in rounded], [one for one in given if one not in rounded]
        if len(made) != 1 or len(labels) != 1 or not step.made_of(made[0]) & step.parameters.keys():
            continue
        scores, marks = step.values[made[0]], step.values[labels[0]]
        beyond = float(((scores != 0) & (scores != 1)).double().mean())
        if scores.shape == marks.shape and bool(((marks == 0) | (marks == 1)).all()) and beyond > _BEYOND:
            yield said(operation, share=beyond)


def _itself(operation: Operation) -> Probed:
    is_of_views = operation.kind in _JOINING | _SIDES_OF_PAIRS
    return said(operation, op="cat" if is_of_views else operation.name.strip("_"))


def _is_own_list(step: Step, given: list[Slot]) -> bool:
    """Whether labels are compared with themselves one by one, and not each with all others: a list has no columns."""
    one = step.values[given[0]]
    if one.dim() != 1 or one.is_floating_point() or one.dtype == torch.bool or len(one.unique()) < 2:
        return False
    sources = [
        {slot, *(each.given[0] for each in itertools.takewhile(lambda one: one.name in _TURNING, step.path(slot)))}
        for slot in given
    ]
    return torch.equal(one, step.values[given[1]]) and bool(sources[0] & sources[1])


def _is_itself(operation: Operation, sides: list[torch.Tensor]) -> bool:
    """Whether both sides of a divergence are one tensor, or one distribution that is not even."""
    if len(set(operation.given[:2])) == 1 < len(operation.given):
        return True
    if len(sides) < 2 or sides[0].shape != sides[1].shape:
        return False
    second = sides[1].exp() if operation.kwargs.get("log_target") else sides[1]
    return close(sides[0].exp(), second) and float(second.double().std()) > 1e-3


def _is_twice(step: Step, first: Slot, second: Slot) -> bool:
    """Whether both sides were computed by the same parameters in two calls, and are equal."""
    one, two = (step.values[side] for side in (first, second))
    if not (one.requires_grad and two.requires_grad and one.dim() == two.dim() == 2):
        return False
    one, two = one.detach(), (two if one.shape == two.shape else two.t()).detach()
    if one.shape != two.shape or len(one) < 4 or not close(one, two) or float(one.double().std()) == 0:
        return False
    return not {id(made) for made in _makers(step, first)} & {id(made) for made in _makers(step, second)}


def _is_of_views_of_one(step: Step, operation: Operation) -> bool:
    """Whether all rows are compared with all, and each is there twice, as two halves or in turns: of no other view.

    Nothing may be drawn on the way, and the two have to belong together: the loss draws them nearer.
    """
    rows, result = step.values[operation.given[0]], step.values[operation.outs[0]]
    half, odd = divmod(len(rows) if rows.dim() == 2 else 1, 2)
    if odd or half < _LEAST_ROWS or not result.requires_grad or result.shape != (2 * half, 2 * half):
        return False
    made, pairs = rows.detach(), result.detach()
    halves, turns = close(made[:half], made[half:]), close(made[::2], made[1::2])
    if not (halves or turns) or not close(pairs, pairs.t()) or float(made[::2].double().std(0).max()) < _DIFFERS:
        return False
    behind = step.made_of(operation.given[0])
    if any(one.drawn is not None and behind & set(one.outs) for one in step.operations):
        return False
    (slope,) = step.slopes(operation.outs[0])
    here = torch.arange(2 * half, device=pairs.device)
    other = (here + half) % (2 * half) if halves else here ^ 1
    return slope is not None and bool((slope[here, other] < 0).all())


def _are_twins(step: Step, given: list[Slot]) -> bool:
    """Whether both sides of a ratio were computed apart by the same parameters, are equal, and get a gradient."""
    values = [step.values[one] for one in given[:2]]
    if len(set(given[:2])) < 2 or not all(one.requires_grad and one.numel() > 1 for one in values):
        return False
    one, two = (value.detach() for value in values)
    if one.shape != two.shape or not bool((one == two).all()) or float(one.double().std()) == 0:
        return False
    made = [list(_makers(step, side)) for side in given[:2]]
    apart = all(given[1 - side] not in {s for maker in makers for s in maker.outs} for side, makers in enumerate(made))
    held = [{slot for maker in makers for slot in maker.given} & step.parameters.keys() for makers in made]
    return apart and bool(held[0]) and held[0] == held[1]


def _is_of_pairs_of_one(scores: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether scores of each of some tensors with each other have as their targets those with themselves."""
    if scores.dim() != 2 or scores.shape[0] != scores.shape[1] or len(scores) < 4 or targets.dim() != 1:
        return False
    own, seen = torch.arange(len(scores), device=targets.device), scores.masked_fill(scores < _MASKED, 0.0)
    return bool(torch.equal(targets, own)) and close(seen, seen.t()) and float(seen.double().std()) > 0


def _makers(step: Step, slot: Slot) -> Iterator[Operation]:
    """The operations with a graph that a tensor is made by."""
    needed = {slot}
    for operation in reversed(step.tape.operations):
        if operation.grad and needed & set(operation.outs):
            needed |= set(operation.given)
            yield operation


_LEAST_ROWS = 8
_SQUASHING, _SCALED = frozenset({"logsigmoid", "log_sigmoid", "softplus", "sigmoid"}), frozenset({"neg", "mul", "div"})
_LEAST_SUMMED = 8  # rows
_LOOKING_UP = frozenset({"__getitem__", "index_select", "embedding", "gather"})
_LIKENESS = {"matmul": 1, "mm": 1, "cosine_similarity": 1, "einsum": 1, "cdist": -1}
_LEAST_VIEWS = 16
_MOST_INPUTS = 3
_CLEARLY = 3.0  # standard errors
_MOST_OF_IT = 0.4  # of a change: half of it is in the row and half in the column of one set with itself
_BY_CHANCE = 0.65
"""A share of the other rows that are less alike: of a pair by chance it is a half."""


@asks("mispaired")
def mispaired(step: Step) -> Iterator[Probed]:
    """Whether the positive pairs of a loss are alike by chance only, and others in a fixed distance are the views.

    Two inputs of a step have the views of a sample in the same row: which rows of the matrix of all pairs change with
    it tells which belong together. Where both views are one input, they are those that are alike before training.
    """
    held = step.kept.first_of(step.tape)
    run = replayed(step.tape, step.loss, held=held)
    for index, operation in enumerate(step.operations):
        if operation.kind in _LIKENESS and operation.grad and step.needed & set(operation.outs):
            found = _pulled(step, run, index)
            if found is not None:
                yield _of_sources(step, index, run, held, found[1]) or _compared(operation, *found)
    raise Unknown("no loss of pairs of rows was seen")


def _pulled(step: Step, run: Replay, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """How alike the rows are, and the one that each is pulled toward, if that is one for each."""
    operation = step.operations[index]
    sign, result, live = _LIKENESS[operation.kind], run.results[index][0], run.values[operation.outs[0]]
    if result.dim() != 2 or result.shape[0] != result.shape[1] or len(result) < _LEAST_VIEWS or not live.requires_grad:
        return None
    (slope,) = step.slopes(operation.outs[0], run=run)
    if slope is None or slope.shape != result.shape:
        return None
    pulls = (sign * slope < 0).sum(1)
    given = (sign * slope).argmin(1)
    is_one = bool((pulls == 1).all()) and len(given.unique()) == len(given)
    return (sign * result.double().nan_to_num(), given) if is_one else None


def _of_sources(
    step: Step, index: int, run: Replay, held: Mapping[Slot, torch.Tensor], given: torch.Tensor
) -> Probed | None:
    """Whether two inputs whose rows meet in the matrix belong together in it; nothing where that can't be told."""
    rows = step.rows
    tables = {one.given[0] for one in step.operations if one.kind in _LOOKING_UP and len(one.given) > 1}
    leaves = [step.leaves[slot] for slot in sorted(step.needed & step.inputs - tables)]
    inputs = [one for one in leaves if one.shape[:1] == (rows,) and one.is_floating_point()][:_MOST_INPUTS]
    met: list[list[tuple[int, int]]] = []  # for each input and some of its rows, the row and the column that change
    for leaf in inputs if len(inputs) > 1 else ():
        changed = [
            replayed(step.tape, step.loss, partial(_without, leaf, row), held=held) for row in (0, rows // 3, rows - 1)
        ]
        met.append([_place(again.results[index][0] - run.results[index][0]) for again in changed])
    pairs = [
        [(row, column) for (row, _), (_, column) in zip(one, two, strict=True)]
        for one, two in itertools.permutations(met, 2)
        if all(a[0] >= 0 and b[1] >= 0 and a != b for a, b in zip(one, two, strict=True))
    ]
    if not pairs:
        return None
    right = [[int(given[row]) == column for row, column in one] for one in pairs]
    answer = "no" if any(map(any, right)) else "yes"
    named, both = _pairings(len(given), given), [pair for one in pairs for pair in one]
    given_name = next((name for name, one in named.items() if bool((one == given).all())), "of another order")
    other = next((name for name, one in named.items() if all(int(one[row]) == column for row, column in both)), "")
    seen: dict[str, Any] = {"rows": len(given), "given": given_name, "by": "inputs"}
    seen |= {"other": other or "the row of the same sample"}
    return said(step.operations[index], answer=answer, **seen)


def _without(leaf: torch.Tensor, row: int, one: torch.Tensor) -> torch.Tensor:
    """A tensor with other numbers in a row where it is the one that is meant."""
    if one is not leaf:
        return one
    other = one.clone()
    other[row] = -one[row - 1] - 1
    return other


def _place(change: torch.Tensor) -> tuple[int, int]:
    """The row and the column of a matrix that change; -1 where none does more than others."""
    size = change.double().nan_to_num().abs()
    row, column = (
        int(one.argmax()) if float(one.max()) > _MOST_OF_IT * float(one.sum()) > 0 else -1
        for one in (size.sum(1), size.sum(0))
    )
    return row, column


def _pairings(count: int, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The usual orders of pairs."""
    here = torch.arange(count, device=like.device)
    found = {
        "i": here,
        "n - 1 - i": count - 1 - here,
        "(i + 1) % n": (here + 1) % count,
        "(i - 1) % n": (here - 1) % count,
    }
    return found if count % 2 else found | {"(i + n // 2) % n": (here + count // 2) % count, "i ^ 1": here ^ 1}


def _compared(operation: Operation, alike: torch.Tensor, given: torch.Tensor) -> Probed:
    count, here = len(alike), torch.arange(len(alike), device=alike.device)
    others = _pairings(count, given)
    crosses = bool((given == here).any())  # two sets of rows, of which the same row may be the right one
    named = next((name for name, one in others.items() if bool((one == given).all())), "")
    shares = {name: _share(alike, one) for name, one in others.items()
              if name != named and (crosses or not bool((one == here).any()))}  # fmt: skip
    own, best = _share(alike, given), max(shares, key=lambda name: shares[name])
    error = (6 * count) ** -0.5  # of the difference of two shares that are by chance
    answer = "yes" if own < _BY_CHANCE and shares[best] - own > _CLEARLY * error else "no"
    seen: dict[str, Any] = {"rows": count, "given": named or "of another order", "other": best, "by": "likeness"}
    seen |= {"own_share": own, "share": shares[best]}
    return said(operation, answer=answer, **seen)


def _share(alike: torch.Tensor, pairs: torch.Tensor) -> float:
    """The share of the other rows that are less like a row than the one that it is paired with, on average."""
    mine = alike.gather(1, pairs[:, None])
    less = (alike < mine).double()
    less.fill_diagonal_(0)
    own = pairs == torch.arange(len(pairs), device=pairs.device)
    return float((less.sum(1) / (len(pairs) - 2 + own.double())).mean())


_EDGES = frozenset({"__getitem__", "unbind", "select", "squeeze", "unsqueeze", "view", "reshape", "stack", "cat", "add",
                    "chunk", "split", "narrow", "T", "flatten", "permute", "transpose"})  # fmt: skip


@asks("overlap", of_rows=False)
def apart(step: Step) -> Iterator[Probed]:
    """Whether a product of differences of a least and a largest edge, one of them negative, is a part of the loss.

    The product of two negative sides is positive, so that boxes which lie apart count as overlapping.
    """
    made = {out: one for one in step.operations for out in one.outs}
    products = [one for one in step.used("mul", "prod") if one.grad and len(one.given) == 2 - (one.kind == "prod")]
    products = [one for one in products if all(_is_side(made, slot) for slot in one.given)]
    if not products:
        yield said(answer="no")
    run = replayed(step.tape, step.loss, held=step.kept.first_of(step.tape))
    for one in products:
        values, product = [run.values[slot] for slot in one.given], run.values[one.outs[0]]
        negative = (values[0] < 0).any(-1) if one.kind == "prod" else torch.logical_or(values[0] < 0, values[1] < 0)
        if not product.requires_grad or negative.shape != product.shape or not bool(negative.any()):
            continue
        (slope,) = step.slopes(one.outs[0], run=run)
        counted = int((slope[negative] != 0).sum()) if slope is not None else 0
        if counted:
            yield said(one, apart=counted, pairs=negative.numel())


def _is_side(made: dict[Slot, Operation], slot: Slot) -> bool:
    """Whether it is nothing but the least of some edges minus the largest of others."""
    found = list(_behind(made, slot))
    return bool(found) and all(one.kind == "sub" and _is_of_edges(made, one) for one in found)


def _is_of_edges(made: dict[Slot, Operation], minus: Operation) -> bool:
    ends = [{one.name for one in _behind(made, slot) if len(one.given) == 2} for slot in minus.given]
    least, most = {"min", "minimum", "fmin"}, {"max", "maximum", "fmax"}
    return len(ends) == 2 and all(ends) and ends[0] <= least and ends[1] <= most


def _behind(made: dict[Slot, Operation], slot: Slot) -> Iterator[Operation]:
    """The last operations that computed what a slot has, behind those that only look at a part of it."""
    operation = made.get(slot)
    if operation is not None and operation.kind in _EDGES:
        for given in operation.given:
            yield from _behind(made, given)
    elif operation is not None:
        yield operation


@asks("only agreeing")
def only_agreeing(step: Step) -> Iterator[Probed]:
    """Whether all that a loss asks of two nets, both of which its optimizer trains, is that they agree.

    A target is made by a net that is trained to meet it, as by a teacher whose student's loss trains it, too.
    """
    if len(step.tape.losses) > 1 or not _is_alone(step):
        raise Unknown("the optimizer takes steps of several losses")
    own = step.tape.trained
    trained = {slot for slot, one in step.parameters.items() if id(one) in own}
    for operation in step.used(*_COMPARING, "cross_entropy"):
        sides = operation.given
        if len(sides) != 2:
            continue
        one, two = (step.made_of(side) for side in sides)
        nets, data = (one & trained, two & trained), one & step.inputs == two & step.inputs != set()
        grads = all(step.values[side].requires_grad for side in sides)
        beside = slots_of(step.tape, step.loss, but=[operation]) & trained or _has_data_of_its_own(step, one | two)
        if grads and all(nets) and not nets[0] & nets[1] and data and not beside:
            yield said(operation, op=operation.name, optimizer=step.optimizer)


def _has_data_of_its_own(step: Step, sides: set[Slot]) -> bool:
    """Whether data meet what a net has made of them, as in a rest that it is to explain."""
    data, made = set(step.inputs), set[Slot]()
    for operation in step.tape.operations:
        given = set(operation.given)
        if given & made and given & data and sides & set(operation.outs):
            return True
        (made if given & (made | step.parameters.keys()) else data).update(operation.outs if given else ())
    return False


def _is_alone(step: Step) -> bool:
    """Whether all backwards between the steps of an optimizer are of one line, and of one loss function."""
    steps = [one.at for one in step.run.of(Stepped) if one.optimizer == step.optimizer]
    if not steps:
        return False
    backwards = {(one.file, one.line) for one in step.run.of(Backward) if steps[0] <= one.at <= steps[-1]}
    calls = {one.function for one in step.run.of(LossCall) if steps[0] <= one.at <= steps[-1]}
    return len(backwards) == 1 and len(calls) <= 1


PASSING = MOVING | {"detach", "unsqueeze", "squeeze", "to", "float", "clone", "data"}
_REORDERING = frozenset(
    {"roll", "flip", "cat", "stack", "index_select", "narrow"}
)  # as where values are shifted by one
_LEAST_DISCOUNT = 0.5


@asks("same state")
def same_state(step: Step) -> Iterator[Probed]:
    """Whether a target is a reward and a discounted value, of the very states whose value is to be like it."""
    for operation in step.used(*DISTANCES):
        sides = operation.given[:2]
        for predicted, target in (sides, sides[::-1]) if len(sides) == 2 else ():
            value, discount = bootstrapped(step, target)
            own = _states(step, predicted) if value is not None else set()
            if value is not None and own and own <= _states(step, value):  # a goal may be that of both
                calls = {one for each in step.operations if step.parameters.keys() & {*each.given} for one in each.outs}
                # One call for both is that of states that follow each other.
                if not step.made_of(value) & step.made_of(predicted) & calls:
                    yield said(operation, discount=discount, rows=step.rows)


def bootstrapped(step: Step, target: Slot) -> tuple[Slot | None, float]:
    """What a target multiplies with a discount and adds to what came from outside, and that discount."""
    for made in step.path(target):
        if made.kind == "add" and len(made.given) == 2:
            for value in made.given:
                reward, discount = next((one for one in made.given if one != value), value), _discount(step, value)
                is_given = step.made_of(reward).isdisjoint(step.parameters)  # from outside, in whatever shape
                if discount and is_given and all(one.name in PASSING for one in step.path(reward)):
                    return value, discount
        if made.name not in PASSING:
            break
    return None, 0.0


def _discount(step: Step, slot: Slot) -> float:
    """The number that a product is made with; 0 where there is none like a discount."""
    for made in step.path(slot):
        numbers = [one for one in made.args if type(one) is float and _LEAST_DISCOUNT < one <= 1]
        if made.kind == "mul" and numbers:
            return float(numbers[0])
        if made.kind != "mul" and made.name not in PASSING:
            break
    return 0.0


def _states(step: Step, slot: Slot) -> set[bytes]:
    """The values of the batches of numbers that a tensor is made of by way of parameters, where no rows are moved."""
    made = step.made_of(slot)
    moved = [one for one in step.operations if made & set(one.outs) and _moves_rows(one)]
    if moved or step.parameters.keys().isdisjoint(made) or not step.values[slot].dim():
        return set()
    rows = len(step.values[slot])
    given = [step.leaves[one] for one in made & step.inputs]
    return {_bytes(one) for one in given if one.dim() > 1 and len(one) == rows and one.is_floating_point()
            and bool((one != one[:1]).any())}  # fmt: skip


def _moves_rows(operation: Operation) -> bool:
    first = operation.args[1] if operation.name == "__getitem__" and len(operation.args) > 1 else None
    parts = first if isinstance(first, tuple) else (first,)
    return operation.name in _REORDERING or any(isinstance(one, slice) and one != slice(None) for one in parts)


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return f"{tensor.shape}".encode() + plain.tobytes()


@asks("summed early", of_rows=False)
def summed_early(step: Step) -> Iterator[Probed]:
    """Whether the loss is a log-sigmoid of a sum over all rows, which some that are right make flat for the others.

    Rows are what is looked up in two tables by two lists of as many entries: other sums may be over one sample.
    """
    for operation in step.used(*_SQUASHING):
        made = operation.given[0]
        ends = all(len(one.given) == 1 for one in step.operations if operation.outs[0] in one.given)
        if not ends or step.values[made].numel() != 1 or not step.values[made].requires_grad:
            continue
        whole = next((one for one in step.path(made) if one.kind not in _SCALED), None)
        summed = step.values[whole.given[0]] if whole is not None and whole.kind == "sum" else None
        if summed is None or summed.dim() != 2 or summed.shape[1] < 2 or len(summed) < _LEAST_SUMMED:
            continue
        found = [one.given for one in step.used(*_LOOKING_UP) if len(one.given) == 2]
        pairs = [given for given in found if any(step.values[one].shape == summed.shape[:1] for one in given)]
        tables, lists = ({given[place] for given in pairs} for place in (0, 1))
        if min(len(tables), len(lists)) >= 2:
            yield said(operation, op=operation.name, rows=len(summed))
