"""The step again with its rows in another order, and with each row twice.

Rows that are permuted together with their labels leave a loss what it is, unless something between tears them apart.
With each row twice a mean stays what it is, and a sum is twice as large: a loss that adds both has a term that grows
with the batch.
"""

import itertools
import linecache
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anybatch.doctor.ask.steps import MOVING, PRODUCTS, Step, asks, replayed, said, total
from anybatch.doctor.ask.tape import Operation, Replay, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_ADDING = frozenset({"add", "add_", "sub", "sub_", "rsub"})
_CUTTING = frozenset({"__getitem__", "narrow", "select"})
_WHOLE = frozenset({"floor_divide", "__floordiv__", "long", "int", "floor", "trunc", "round"})
_MOSTLY = 0.5
_FEWEST, _MOST_BLOCKS = 8, 4096  # rows, and blocks of them
_TOLERANCE = 1e-4
_SAME = 3e-5  # relative, of two losses that differ by rounding only
_THROUGH = frozenset({"neg", "div", "mul"})
_LEAST_WEIGHTS = 4
_LOSSES = ("_loss", "cross_entropy", "_with_logits")  # how names of loss functions end
_ASSIGNED = re.compile(r"\s*(\w+)\s*[-+]?=(?!=)")
Pattern = tuple[int, int]


@asks("rows")
def torn(step: Step) -> Iterator[Probed]:
    """Whether a loss changes when rows and labels are permuted together, and what tears them apart."""
    rows, loss, first = step.rows, step.loss, step.replay
    order = _order(rows)
    inverse = torch.argsort(order)

    def permuted(one: torch.Tensor) -> torch.Tensor:
        if not one.dim() or one.shape[0] != rows:
            return one
        if _numbers_rows(one, rows):
            return inverse.to(one)[one[order.to(one.device)]].to(one.dtype)
        return one[order.to(one.device)]

    second = replayed(step.tape, loss, permuted)
    one, two = (total(run, loss) for run in (first, second))
    if not math.isfinite(one) or not math.isfinite(two):
        raise Unknown("the loss is not finite")
    seen: dict[str, Any] = {"rows": rows, "loss": one, "permuted": two}
    if abs(one - two) <= _SAME * max(abs(one), abs(two)) + 1e-7:
        yield said(answer="no", **seen)
    again = step.loss_with()
    if abs(one - again) > 1e-5 * max(abs(one), abs(again)):
        raise Unknown("two runs of the step differ")
    guilty = _guilty(step, second, order)
    if guilty is None:
        raise Unknown("rows have roles, or what changes the loss was not found")
    operation, why = guilty
    yield said(operation, detail=why, op=operation.name, **seen)


@asks("rounded alike", of_rows=False)
def rounded_alike(step: Step) -> Iterator[Probed]:
    """Whether whole numbers are made of a part of the batch by which its rows, which differ, become one number."""
    sizes = {len(step.leaves[one]) for one in step.inputs & step.needed if step.leaves[one].dim()}
    for operation in step.used(*_WHOLE):
        behind = step.made_of(operation.outs[0])
        if not operation.given or not behind & step.inputs or behind & step.parameters.keys():
            continue
        one, two = (step.values[part[0]].detach() for part in (operation.given, operation.outs))
        if {*one.shape[:1]} != sizes or len(one) < _FEWEST or one.shape != two.shape:
            continue
        differ = (one[1:] != one[:-1]).reshape(len(one) - 1, -1).any(1).double().mean()  # of neighbours
        if float(differ) > _MOSTLY and bool((two == two.flatten()[0]).all()):
            seen = {"least": float(one.min()), "most": float(one.max()), "value": float(two.flatten()[0])}
            yield said(operation, op=operation.kind.strip("_"), **seen)


def _order(rows: int) -> torch.Tensor:
    """A permutation that moves each row, and keeps no distance."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(50):
        order = torch.randperm(rows, generator=generator)
        if bool((order != torch.arange(rows)).all()) or rows < 5:
            return order
    return torch.randperm(rows, generator=generator)


def _numbers_rows(one: torch.Tensor, rows: int) -> bool:
    """Whether a tensor says for each row which other one belongs to it."""
    if one.dim() != 1 or one.dtype != torch.int64:
        return False
    return bool(torch.equal(one.sort().values.cpu(), torch.arange(rows)))


def _guilty(step: Step, second: Replay, order: torch.Tensor) -> tuple[Operation, str] | None:
    """The first operation behind which rows are no longer only in another order, if it is one that may tear them."""
    rows, patterns = step.rows, dict[Slot, Pattern | None]()
    for operation, one, two in zip(step.operations, step.replay.results, second.results, strict=True):
        if not step.needed & set(operation.outs):
            continue
        for slot, a, b in zip(operation.outs, one, two, strict=True):
            if a.shape != b.shape:
                return None
            found = _pattern(a, b, order, rows)
            if found is not None:
                patterns[slot] = found
                continue
            given = {patterns[one] for one in operation.given if one in patterns}
            if operation.name in MOVING:
                leading = itertools.accumulate(a.shape, lambda product, size: product * size)
                if (0, 1) in given and rows in leading:
                    return None  # it makes groups of rows, which have roles then
                return operation, "a view puts entries of several rows into one"
            if operation.name in _CUTTING and given == {(0, 1)} and _is_of_one(step, operation, a):
                return operation, "an index along the batch takes one row for all of them"
            if _is_of_cut_table(step, operation, patterns) and _stays_apart(step, operation):
                return operation, "row i of the batch gets entry i of a table, whatever is in it"
            given -= {None, (-1, 0)}
            if any(pattern is not None and pattern[1] < 0 for pattern in given):
                return None  # as many features as rows, whose order was changed as well
            aligned = {pattern for pattern in given if pattern is not None and pattern[0] == 0}
            if len(aligned) > 1 and operation.kind not in PRODUCTS | {"einsum", "cdist"}:
                return operation, "the rows of two tensors are in different orders"
            return None
    return None


def _is_of_one(step: Step, operation: Operation, taken: torch.Tensor) -> bool:
    """Whether one row is taken of a batch that has as many rows as places, so that its places pass for rows."""
    of = [step.values[one] for one in operation.given if step.values[one].dim() == taken.dim() + 1]
    return taken.dim() > 1 and len(taken) == step.rows and any(one.shape[1:] == taken.shape for one in of)


def _is_of_cut_table(step: Step, operation: Operation, patterns: Mapping[Slot, Pattern | None]) -> bool:
    """Whether a sum has a side that is a table, as of positions, cut to as many entries as there are rows."""
    given, rows = operation.given, step.rows
    sides = [step.values[one] for one in given]
    if operation.kind not in _ADDING or len(given) != 2 or any(one.dim() < 3 or one.shape[1] == rows for one in sides):
        return False
    cuts = {slot: [*one.given, slot][0] for one in step.tape.operations if one.name in _CUTTING for slot in one.outs}
    for slot, other, side in zip(given, reversed(given), sides, strict=True):
        table = step.values.get(cuts[slot]) if slot in cuts else None
        is_cut = table is not None and len(table) > rows == len(side)
        if is_cut and patterns.get(slot) == (-1, 0) and patterns.get(other) == (0, 1):
            return not bool((side == side[:1]).all())
    return False


def _stays_apart(step: Step, operation: Operation) -> bool:
    """Whether nothing of the first entry of dim 0 comes to the others behind an operation, as it does along time."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        made = operation.func(*args, **kwargs)
        return torch.cat([made[:1].flip(-1) + 1, made[1:]])

    place = next(at for at, one in enumerate(step.operations) if one is operation)
    shape, results = step.values[operation.outs[0]].shape[:2], step.with_other(operation, changed).results
    behind = [*zip(step.replay.results, results, strict=True)][place + 1 :]
    pairs = [pair for both in behind for pair in zip(*both, strict=True) if pair[0].shape[:2] == shape]
    return all(close(one[1:], other[1:]) for one, other in pairs)


def _pattern(one: torch.Tensor, two: torch.Tensor, order: torch.Tensor, rows: int) -> Pattern | None:
    """How a result follows the order of the rows: ``(-1, 0)`` not at all, else its dim and the number of blocks."""
    if close(one, two):
        return -1, 0
    order = order.to(one.device)
    for dim, size in enumerate(one.shape):
        if size % rows:
            continue
        count = size // rows
        for outer in (1, count) if count > _MOST_BLOCKS else [one for one in range(1, count + 1) if count % one == 0]:
            inner = size // rows // outer
            split = one.unflatten(dim, (outer, rows, inner)).index_select(dim + 1, order).flatten(dim, dim + 2)
            if close(split, two):
                return dim, outer
    square = [dim for dim, size in enumerate(one.shape) if size % rows == 0]
    for first, second in itertools.combinations(square, 2):
        both = one
        for dim in (first, second):
            blocks = one.shape[dim] // rows
            both = both.unflatten(dim, (blocks, rows)).index_select(dim + 1, order).flatten(dim, dim + 1)
        if close(both, two):
            return first, -second
    return None


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are the same but for rounding."""
    if not one.is_floating_point():
        return bool(torch.equal(one, two))
    if not one.numel():
        return True
    a, b = one.double().nan_to_num(), two.double().nan_to_num()
    return float((a - b).abs().max()) <= _TOLERANCE * max(float(a.abs().max()), float(b.abs().max()), 1e-12)


@asks("sums")
def mixed_sums(step: Step) -> Iterator[Probed]:
    """Whether a loss adds a mean over the batch and a sum over it."""
    rows, tape = step.rows, step.tape
    if not all(one.is_cpu for one in step.leaves.values()):
        raise Unknown("on a GPU an index that is out of range would end the process")
    last = max((at for at, one in enumerate(step.operations) if step.needed & set(one.outs)), default=-1)
    if any(tape.numbers[one] <= last for one in tape.numbers.keys() & step.needed):  # a loss itself may be printed
        raise Unknown("a value of the step became a number of Python on the way to the loss")

    of_rows = {slot for slot, one in step.values.items() if one.dim() and len(one) % rows == 0}
    if not any(sum(one not in of_rows for one in each.given) > 1 for each in step.used(*_ADDING)):
        yield said(answer="no", rows=rows)

    def twice(one: torch.Tensor) -> torch.Tensor:
        if not one.dim() or one.shape[0] != rows:
            return one
        return torch.cat((one, one + rows)) if _numbers_rows(one, rows) else torch.cat((one, one))

    found: list[tuple[Operation, float] | None] = []
    for number in (None, lambda n: 2 * n if n == rows else n, lambda n: _scaled(n, rows)):
        try:
            found.append(_mixed(step, replayed(tape, step.loss, twice, number)))  # frees it before the next
        except Unknown:
            continue
    if not found:
        raise Unknown("the step did not run with each row twice")
    guilty = found[0]
    if guilty is None or None in found:  # a number of the rows may be one in the code, which is not told from others
        yield said(answer="no", rows=rows)
    else:
        yield said(guilty[0], rows=rows, ratio=guilty[1])


def _mixed(step: Step, second: Replay) -> tuple[Operation, float] | None:
    """The sum of a mean and of a sum over the batch, and how many times as large the latter is."""
    ratios = _ratios(step, second)
    for operation in step.used(*_ADDING):
        sides = [one for one in operation.given if one in ratios and operation.grad]
        sums, means = [one for one in sides if ratios[one] == 2], [one for one in sides if ratios[one] == 1]
        if sums and means:
            size, other = (float(step.values[one].detach().double().mean()) for one in (sums[0], means[0]))
            return operation, abs(size) / max(abs(other), 1e-12)
    return None


def _scaled(number: Any, rows: int) -> Any:
    return 2 * number if isinstance(number, int) and number >= rows and number % rows == 0 else number


def _ratios(step: Step, second: Replay) -> dict[Slot, int]:
    """For tensors with a gradient that depend on the batch: 2 if they are, or come from, a sum over it; 1 if not."""
    rows, found = step.rows, dict[Slot, int]()
    varies = {slot for slot in step.inputs if step.leaves[slot].shape[:1] == (rows,)}
    whole: set[Slot] = set()  # a sum over the batch, or made of one
    for operation, one, two in zip(step.operations, step.replay.results, second.results, strict=True):
        given = set(operation.given)
        drawn = operation.drawn is not None and any(a.dim() and a.shape[0] == rows for a in operation.drawn)
        if not (given & varies or drawn):
            continue
        for slot, a, b in zip(operation.outs, one, two, strict=True):
            varies.add(slot)
            if not (a.is_floating_point() and step.values[slot].requires_grad and a.numel()):
                continue
            ratio = _ratio(a, b)
            if ratio == 2 and (a.numel() == 1 or given & whole):
                whole.add(slot)
                found[slot] = 2
            elif ratio == 1:
                found[slot] = 1
    return found


def _ratio(one: torch.Tensor, two: torch.Tensor) -> int:
    if two.shape != one.shape:
        if not one.dim() or two.shape[1:] != one.shape[1:] or two.shape[0] != 2 * one.shape[0]:
            return 0
        two = two[: one.shape[0]]
    kind = torch.promote_types(one.dtype, torch.float32)
    a, b = one.to(kind), two.to(kind)
    for ratio in (1, 2):
        if float(torch.sub(b, a, alpha=ratio).abs_().max()) <= 1e-3 * max(float(b.abs().max()), 1e-9):
            return ratio
    return 0


@asks("dropped", of_rows=False)
def dropped(step: Step) -> Iterator[Probed]:
    """Whether a number that other parameters make is left, as what a variable held that the loss is assigned to."""
    needed = {slot for one in step.tape.losses for slot in step.made_of(one.slot, one.before)}
    used = needed.union(*(one.given for one in step.tape.operations))
    for operation in reversed(step.operations):
        out = operation.outs[0] if len(operation.outs) == 1 else None
        if out is None or out in used or step.values[out].numel() > 1 or not step.values[out].requires_grad:
            continue
        shapes = [
            list(step.parameters[one].shape) for one in sorted(step.made_of(out) & step.parameters.keys() - needed)
        ]
        if shapes:
            lines, own = _lines_of(step), (operation.file, operation.line)
            again = own in lines or _variable(*own) in {_variable(*one) for one in lines} - {""}
            is_loss = operation.name.endswith(_LOSSES)
            yield said(operation, op=operation.name, shapes=shapes, again=again, is_loss=is_loss)


def _variable(file: str, line: int) -> str:
    """What a line assigns; empty where it assigns nothing."""
    found = _ASSIGNED.match(linecache.getline(file, line))
    return found[1] if found else ""


def _lines_of(step: Step) -> set[tuple[str, int]]:
    """The lines that made a loss, as far back as it is only divided or scaled there."""
    found = set[tuple[str, int]]()
    for operation in step.path(step.loss.slot):
        found.add((operation.file, operation.line))
        if len(operation.given) != 1:
            break
    return found


@asks("weighed late", of_rows=False)
def weighed_late(step: Step) -> Iterator[Probed]:
    """Whether a product has a number for each row on one side, and on the other the mean or sum over the same rows.

    All of them weigh the same then: the loss knows no more of the numbers than their sum.
    """
    for operation in step.used("mul"):
        if len(operation.given) != 2 or not operation.grad:
            continue
        whole, each = sorted(operation.given, key=lambda one: step.values[one].numel())
        made, weights = step.values[whole], step.values[each]
        if made.numel() != 1 or not made.requires_grad or weights.requires_grad or weights.numel() < _LEAST_WEIGHTS:
            continue
        reduced = _reduced(step, whole)
        if reduced is None or not _fits(reduced[1], weights) or not bool((weights != weights.flatten()[0]).any()):
            continue
        (slope,) = step.slopes(operation.outs[0])
        if slope is not None and slope.any() and float(slope.max() - slope.min()) <= 1e-6 * float(slope.abs().max()):
            yield said(operation, by=reduced[0].name, entries=weights.numel(), rows=reduced[1][0])


def _reduced(step: Step, slot: Slot) -> tuple[Operation, tuple[int, ...]] | None:
    """The mean, sum or loss function that a number comes from, and the shape of what it is over."""
    for operation in reversed(step.tape.operations):
        if slot not in operation.outs:
            continue
        given = operation.given
        if operation.name in ("mean", "sum") or operation.name.endswith(_LOSSES):
            shapes = [tuple(step.values[one].shape) for one in given]
            return (operation, min(shapes, key=len)) if shapes and all(shapes) else None  # a target has fewer dims
        if operation.kind not in _THROUGH or not given:
            return None
        slot = next((one for one in given if step.values[one].requires_grad), given[0])
    return None


def _fits(reduced: tuple[int, ...], weights: torch.Tensor) -> bool:
    """Whether there is a weight for each entry, or for each row, of what was reduced."""
    shape, own = (tuple(size for size in sizes if size != 1) for sizes in (weights.shape, reduced))
    return shape in (own, reduced[:1])
