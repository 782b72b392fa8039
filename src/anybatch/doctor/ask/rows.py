"""The step again with its rows in another order, and with each row twice.

Rows that are permuted together with their labels leave a loss what it is, unless something between tears them apart.
With each row twice a mean stays what it is, and a sum is twice as large: a loss that adds both has a term that grows
with the batch.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.tape import Loss, Operation, Replay, Slot, Tape, replay, slots
from anybatch.doctor.ask.trials import FAILURES, Unknown, told
from anybatch.records.lossfacts import Probed

MOVING = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "_unsafe_view"})
_ADDING = frozenset({"add", "add_", "sub", "sub_", "__add__", "__radd__", "__sub__", "__rsub__", "__iadd__", "rsub"})
_CUTTING = frozenset({"__getitem__", "narrow"})
_FEWEST, _LEAST_MARKS = 8, 2  # rows of which each is repeated, and how often
_TOLERANCE = 1e-4
_SAME = 3e-5  # relative, of two losses that differ by rounding only
Pattern = tuple[int, int]


def torn(tape: Tape) -> Probed:
    """Whether a loss changes when rows and labels are permuted together, and what tears them apart."""
    rows = rows_of(tape)
    order = _order(rows)
    inverse = torch.argsort(order)

    def permuted(one: torch.Tensor) -> torch.Tensor:
        if not one.dim() or one.shape[0] != rows:
            return one
        if _numbers_rows(one, rows):
            return inverse.to(one)[one[order.to(one.device)]].to(one.dtype)
        return one[order.to(one.device)]

    loss = tape.losses[-1]
    first = replayed(tape, loss, lambda one: one)
    second = replayed(tape, loss, permuted)
    one, two = (float(run.values[loss.slot].double().sum()) for run in (first, second))
    if not math.isfinite(one) or not math.isfinite(two):
        raise Unknown("the loss is not finite")
    seen: dict[str, Any] = {"rows": rows, "loss": one, "permuted": two}
    if abs(one - two) <= _SAME * max(abs(one), abs(two)) + 1e-7:
        return told("rows", answer="no", **seen)
    again = float(replayed(tape, loss, lambda one: one).values[loss.slot].double().sum())
    if abs(one - again) > 1e-5 * max(abs(one), abs(again)):
        raise Unknown("two runs of the step differ")
    guilty = _guilty(tape, loss, first, second, order, rows)
    if guilty is None:
        raise Unknown("rows have roles, or what changes the loss was not found")
    operation, why = guilty
    return told("rows", operation, detail=why, op=operation.name, **seen)


def repeated(tape: Tape) -> Probed:
    """Whether numbers of rows are the batch over and over, where each row has one mark and as many others behind it."""
    whole, needed = rows_of(tape), slots_of(tape, tape.losses[-1])
    given = [one for slot, one in tape.leaves.items() if slot in needed - tape.parameters.keys()]
    ids = [one for one in given if one.dtype == torch.int64 and one.shape == (whole,)]
    for marks in (one.flatten() for one in given if one.numel() == whole and one.unique().numel() == 2):
        (first,) = (marks != marks[0]).nonzero()[:1, 0].tolist()
        times = next((one for one in _divisors(whole) if first < one and _is_tiled(marks, one)), whole)
        few = whole // times
        group = marks[:times]
        is_one = min(int((group == value).sum()) for value in marks.unique()) == 1
        if not is_one or few < _FEWEST or few == times or times < _LEAST_MARKS:
            continue
        over = [one for one in ids if _is_tiled(one, few)]
        if len(over) < len(ids) and any(_are_drawn(one[:few]) for one in over):
            return told("repeated rows", tape.losses[-1], times=times, rows=whole)
    return told("repeated rows", answer="no")


def _are_drawn(one: torch.Tensor) -> bool:
    """Whether numbers are mostly different and in no order, as those of positions are."""
    return one.unique().numel() > len(one) // 2 and bool((one.diff() < 0).any())


def _is_tiled(one: torch.Tensor, size: int) -> bool:
    return bool((one.view(-1, size) == one[:size]).all())


def rows_of(tape: Tape) -> int:
    """The rows of the batch of a step that can be run again."""
    if tape.failed or not tape.losses:
        raise Unknown(tape.failed or "no step with a loss was written down")
    if tape.rows < 4:
        raise Unknown("the batch has fewer than four rows")
    needed = slots_of(tape, tape.losses[-1])
    if any(tape.leaves[one].shape[:1] != (tape.rows,) for one in tape.opaque & needed):
        raise Unknown("a part of the step was computed by what can't be run again")
    sizes = sum(one.numel() for one in tape.parameters.values())
    if sizes > 1 << 26:
        raise Unknown("the model is too large to run again")
    return tape.rows


def slots_of(tape: Tape, loss: Loss, *, without: str = "", but: Iterable[Operation] = ()) -> set[Slot]:
    """The slots that a loss is made of; what it is made of by way of some operations, or of a name, may be left out."""
    left_out = {id(one) for one in but}
    needed = {loss.slot}
    for operation in reversed(tape.operations[: loss.before]):
        if operation.name == without or id(operation) in left_out:
            continue
        if needed & set(operation.outs) or (operation.name.endswith("_") and needed & set(slots(operation.args))):
            needed |= set(slots((operation.args, operation.kwargs)))
    return needed


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


def replayed(
    tape: Tape, loss: Loss, change: Any, number: Any = lambda n: n, held: Mapping[Slot, torch.Tensor] | None = None
) -> Replay:
    """Runs a step again as far as a loss, without random numbers of its own."""
    torch.manual_seed(0)
    try:
        return replay(tape, loss.before, change, number, held or {})
    except FAILURES as error:
        raise Unknown(f"the step did not run again: {type(error).__name__}: {error}"[:200]) from None


def _guilty(
    tape: Tape, loss: Loss, first: Replay, second: Replay, order: torch.Tensor, rows: int
) -> tuple[Operation, str] | None:
    """The first operation behind which rows are no longer only in another order, if it is one that may tear them."""
    needed, patterns = slots_of(tape, loss), dict[Slot, Pattern | None]()
    for operation, one, two in zip(tape.operations[: loss.before], first.results, second.results, strict=True):
        if not needed & set(operation.outs):
            continue
        for slot, a, b in zip(operation.outs, one, two, strict=True):
            if a.shape != b.shape:
                return None
            found = _pattern(a, b, order, rows)
            if found is not None:
                patterns[slot] = found
                continue
            given = {patterns[one] for one in slots((operation.args, operation.kwargs)) if one in patterns}
            if operation.name in MOVING:
                leading = itertools.accumulate(a.shape, lambda product, size: product * size)
                if (0, 1) in given and rows in leading:
                    return None  # it makes groups of rows, which have roles then
                return operation, "a view puts entries of several rows into one"
            if _is_of_cut_table(tape, operation, first, rows, patterns):
                return operation, "row i of the batch gets entry i of a table, whatever is in it"
            given -= {None, (-1, 0)}
            if any(pattern is not None and pattern[1] < 0 for pattern in given):
                return None  # as many features as rows, whose order was changed as well
            aligned = {pattern for pattern in given if pattern is not None and pattern[0] == 0}
            if len(aligned) > 1 and operation.name not in ("matmul", "mm", "bmm", "einsum", "__matmul__", "cdist"):
                return operation, "the rows of two tensors are in different orders"
            return None
    return None


def _is_of_cut_table(
    tape: Tape, operation: Operation, run: Replay, rows: int, patterns: Mapping[Slot, Pattern | None]
) -> bool:
    """Whether a sum has a side that is a table, as of positions, cut to as many entries as there are rows."""
    given = list(slots(operation.args))
    sides = [run.values[one] for one in given]
    if operation.name not in _ADDING or len(given) != 2 or any(one.dim() < 3 or one.shape[1] == rows for one in sides):
        return False
    cuts = {
        slot: next(iter(slots(one.args)), slot) for one in tape.operations if one.name in _CUTTING for slot in one.outs
    }
    for slot, other, side in zip(given, reversed(given), sides, strict=True):
        table = run.values.get(cuts[slot]) if slot in cuts else None
        is_cut = table is not None and len(table) > rows == len(side)
        if is_cut and patterns.get(slot) == (-1, 0) and patterns.get(other) == (0, 1):
            return not bool((side == side[:1]).all())
    return False


def _pattern(one: torch.Tensor, two: torch.Tensor, order: torch.Tensor, rows: int) -> Pattern | None:
    """How a result follows the order of the rows: ``(-1, 0)`` not at all, else its dim and the number of blocks."""
    if _close(one, two):
        return -1, 0
    order = order.to(one.device)
    for dim, size in enumerate(one.shape):
        if size % rows:
            continue
        for outer in _divisors(size // rows):
            inner = size // rows // outer
            split = one.unflatten(dim, (outer, rows, inner)).index_select(dim + 1, order).flatten(dim, dim + 2)
            if _close(split, two):
                return dim, outer
    square = [dim for dim, size in enumerate(one.shape) if size % rows == 0]
    for first, second in itertools.combinations(square, 2):
        both = one
        for dim in (first, second):
            blocks = one.shape[dim] // rows
            both = both.unflatten(dim, (blocks, rows)).index_select(dim + 1, order).flatten(dim, dim + 1)
        if _close(both, two):
            return first, -second
    return None


def _divisors(number: int) -> Iterator[int]:
    if number > 4096:
        yield from (1, number)
        return
    yield from (one for one in range(1, number + 1) if number % one == 0)


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return bool(torch.equal(one, two))
    if not one.numel():
        return True
    a, b = one.double().nan_to_num(), two.double().nan_to_num()
    return float((a - b).abs().max()) <= _TOLERANCE * max(float(a.abs().max()), float(b.abs().max()), 1e-12)


_COMPARING = frozenset({"kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
_MATCHING = frozenset({"matmul", "__matmul__", "mm", "cosine_similarity", "pairwise_distance", "cdist"})
_DIFFERENCES = frozenset({"sub", "__sub__", "rsub", "__rsub__"})
_RATIOS = frozenset({"div", "__truediv__", "true_divide"})
_EXPONENTS = frozenset({"exp", "expm1"})
_SIZING = frozenset({"pow", "__pow__", "square", "abs", "__abs__", "norm", "mul", "__mul__"})


def of_itself(tape: Tape) -> Probed:
    """Whether a term of the loss compares what the model gives with itself."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    computed = set[Slot]()
    differences: dict[Slot, Operation] = {}
    twins: dict[Slot, Operation] = {}
    drops = any(one.drops for one in tape.operations)  # which may tell two calls apart in the run
    for operation, found in zip(tape.operations[: loss.before], run.results, strict=True):
        given = list(slots((operation.args, operation.kwargs)))
        computed |= set(operation.outs)
        if not needed & set(operation.outs) or not found:
            continue
        sides = [run.values[one].detach() for one in given[:2]]
        if operation.name == "kl_div" and not drops and _is_itself(operation, sides):
            return _itself(operation)
        if operation.name in _MATCHING and _is_twice(tape, [given[0], given[-1]], run):
            return _itself(operation)
        if operation.name == "cross_entropy" and not drops and _is_of_pairs_of_one(given, run):
            return _itself(operation)
        if operation.name in _RATIOS and not drops and bool((found[0] == 1).all()) and _are_twins(tape, given, run):
            return _itself(operation)
        if operation.name in _EXPONENTS and (twin := next((twins[one] for one in given if one in twins), None)):
            return _itself(twin)
        if bool(found[0].count_nonzero()):
            continue
        if operation.name in _DIFFERENCES and not drops and _are_twins(tape, given, run):
            twins[operation.outs[0]] = operation
        if operation.name in _COMPARING or operation.name in _DIFFERENCES:
            made = set(given[:2]) & computed
            alike = len(given) >= 2 and sides[0].shape == sides[1].shape and made and not (drops and len(made) > 1)
            if alike and sides[0].numel() > 1 and float(sides[0].double().std()) > 0:
                differences[operation.outs[0]] = operation
                if operation.name in _COMPARING:
                    return _itself(operation)
        elif operation.name in _SIZING and (guilty := next((differences[g] for g in given if g in differences), None)):
            return _itself(guilty)
    return told("itself", answer="no")


def _is_itself(operation: Operation, sides: list[torch.Tensor]) -> bool:
    """Whether both sides of a divergence are one distribution, and not an even one."""
    if len(sides) < 2 or sides[0].shape != sides[1].shape:
        return False
    second = sides[1].exp() if operation.kwargs.get("log_target") else sides[1]
    return _close(sides[0].exp(), second) and float(second.double().std()) > 1e-3


def _is_twice(tape: Tape, sides: list[Slot], run: Replay) -> bool:
    """Whether both sides were computed by the same parameters in two calls, without chance, and are equal."""
    values = [run.values[one] for one in sides]
    if not all(one.requires_grad and one.dim() == 2 for one in values) or any(one.drops for one in tape.operations):
        return False
    one, two = (value.detach() for value in values)
    if one.shape != two.shape:
        two = two.t()
    if one.shape != two.shape or len(one) < 4 or not _close(one, two) or float(one.double().std()) == 0:
        return False
    first, second = ({id(one) for one in _makers(tape, side)} for side in sides)
    return not first & second


def _are_twins(tape: Tape, given: list[Slot], run: Replay) -> bool:
    """Whether both sides of a ratio were computed apart by the same parameters, are equal, and get a gradient."""
    values = [run.values[one] for one in given[:2]]
    if len(set(given[:2])) < 2 or not all(one.requires_grad and one.numel() > 1 for one in values):
        return False
    one, two = (value.detach() for value in values)
    if one.shape != two.shape or not bool((one == two).all()) or float(one.double().std()) == 0:
        return False
    made = [list(_makers(tape, side)) for side in given[:2]]
    apart = all(given[1 - side] not in {s for maker in makers for s in maker.outs} for side, makers in enumerate(made))
    used = [{slot for maker in makers for slot in slots((maker.args, maker.kwargs))} for makers in made]
    held = [one & tape.parameters.keys() for one in used]
    return apart and bool(held[0]) and held[0] == held[1]


def _is_of_pairs_of_one(given: list[Slot], run: Replay) -> bool:
    """Whether scores of each of some tensors with each other have as their targets those with themselves."""
    scores, targets = (run.values[one].detach() for one in given[:2]) if len(given) > 1 else (torch.ones(0),) * 2
    if scores.dim() != 2 or scores.shape[0] != scores.shape[1] or len(scores) < 4 or targets.dim() != 1:
        return False
    own = torch.arange(len(scores), device=targets.device)
    return bool(torch.equal(targets, own)) and _close(scores, scores.t()) and float(scores.double().std()) > 0


def _makers(tape: Tape, slot: Slot) -> Iterator[Operation]:
    """The operations with a graph that a tensor is made by."""
    needed = {slot}
    for operation in reversed(tape.operations):
        if operation.grad and needed & set(operation.outs):
            needed |= set(slots((operation.args, operation.kwargs)))
            yield operation


def _itself(operation: Operation) -> Probed:
    return told("itself", operation, op=operation.name.strip("_"))


def mixed_sums(tape: Tape) -> Probed:
    """Whether a loss adds a mean over the batch and a sum over it."""
    rows = rows_of(tape)
    loss = tape.losses[-1]
    needed = slots_of(tape, loss)
    if not all(one.is_cpu for one in tape.leaves.values()):
        raise Unknown("on a GPU an index that is out of range would end the process")
    last = max((at for at, one in enumerate(tape.operations[: loss.before]) if needed & set(one.outs)), default=-1)
    if any(tape.numbers[one] <= last for one in tape.numbers.keys() & needed):  # of a loss itself it may be printed
        raise Unknown("a value of the step became a number of Python on the way to the loss")

    def twice(one: torch.Tensor) -> torch.Tensor:
        if not one.dim() or one.shape[0] != rows:
            return one
        return torch.cat((one, one + rows)) if _numbers_rows(one, rows) else torch.cat((one, one))

    first = replayed(tape, loss, lambda one: one)
    found: list[tuple[Operation, float] | None] = []
    for number in (lambda n: n, lambda n: 2 * n if n == rows else n, lambda n: _scaled(n, rows)):
        try:
            second = replayed(tape, loss, twice, number)
        except Unknown:
            continue
        found.append(_mixed(tape, loss, first, second, rows))
    if not found:
        raise Unknown("the step did not run with each row twice")
    guilty = found[0]
    if guilty is None or None in found:  # a number of the rows may be one in the code, which is not told from others
        return told("sums", answer="no", rows=rows)
    operation, ratio = guilty
    return told("sums", operation, rows=rows, ratio=ratio)


def _mixed(tape: Tape, loss: Loss, first: Replay, second: Replay, rows: int) -> tuple[Operation, float] | None:
    """The sum of a mean and of a sum over the batch, and how many times as large the latter is."""
    needed, ratios = slots_of(tape, loss), _ratios(tape, loss, first, second, rows)
    for operation in tape.operations[: loss.before]:
        if operation.name not in _ADDING or not needed & set(operation.outs) or not operation.grad:
            continue
        sides = [one for one in slots(operation.args) if one in ratios]
        sums, means = [one for one in sides if ratios[one] == 2], [one for one in sides if ratios[one] == 1]
        if sums and means:
            return operation, abs(_mean(first, sums[0])) / max(abs(_mean(first, means[0])), 1e-12)
    return None


def _scaled(number: Any, rows: int) -> Any:
    return 2 * number if isinstance(number, int) and number >= rows and number % rows == 0 else number


def _ratios(tape: Tape, loss: Loss, first: Replay, second: Replay, rows: int) -> dict[Slot, int]:
    """For tensors with a gradient that depend on the batch: 2 if they are, or come from, a sum over it; 1 if not."""
    varies = {slot for slot, one in tape.leaves.items() if one.shape[:1] == (rows,) and slot not in tape.parameters}
    found: dict[Slot, int] = {}
    whole: set[Slot] = set()  # a sum over the batch, or made of one
    for operation, one, two in zip(tape.operations[: loss.before], first.results, second.results, strict=True):
        given = set(slots((operation.args, operation.kwargs)))
        drawn = operation.drawn is not None and any(a.dim() and a.shape[0] == rows for a in operation.drawn)
        if not (given & varies or drawn):
            continue
        for slot, a, b in zip(operation.outs, one, two, strict=True):
            varies.add(slot)
            if not (a.is_floating_point() and first.values[slot].requires_grad and a.numel()):
                continue
            ratio = _ratio(a, b, rows)
            scalar = a.numel() == 1
            if ratio == 2 and (scalar or given & whole):
                whole.add(slot)
                found[slot] = 2
            elif ratio == 1:
                found[slot] = 1
    return found


def _ratio(one: torch.Tensor, two: torch.Tensor, rows: int) -> int:
    if two.shape != one.shape:
        if not one.dim() or two.shape[1:] != one.shape[1:] or two.shape[0] != 2 * one.shape[0]:
            return 0
        two = two[: one.shape[0]]
    a, b = one.double(), two.double()
    for ratio in (1, 2):
        if float((ratio * a - b).abs().max()) <= 1e-3 * max(float(b.abs().max()), 1e-9):
            return ratio
    return 0


def _mean(run: Replay, slot: Slot) -> float:
    return float(run.values[slot].detach().double().mean())


def dropped(tape: Tape) -> Probed:
    """Whether a number that other parameters make is left, as what a variable held that the loss is assigned to."""
    if tape.failed or not tape.losses:
        raise Unknown(tape.failed or "no step with a loss was written down")
    last = tape.losses[-1]
    run = replayed(tape, last, lambda one: one)
    needed = {slot for one in tape.losses for slot in slots_of(tape, one)}
    used = {slot for one in tape.operations for slot in slots((one.args, one.kwargs))}
    for operation in reversed(tape.operations[: last.before]):
        out = operation.outs[0] if len(operation.outs) == 1 else None
        if out is None or out in needed | used or run.values[out].numel() > 1 or not run.values[out].requires_grad:
            continue
        made_of = slots_of(tape, replace(last, slot=out)) & tape.parameters.keys()
        shapes = [list(tape.parameters[one].shape) for one in sorted(made_of - needed)]
        if shapes:
            again = (operation.file, operation.line) in _lines_of(tape, last)
            return told("dropped", operation, op=operation.name, shapes=shapes, again=again)
    return told("dropped", answer="no")


def _lines_of(tape: Tape, loss: Loss) -> set[tuple[str, int]]:
    """The lines that made a loss, as far back as it is only divided or scaled there."""
    found, slot = set[tuple[str, int]](), loss.slot
    for operation in reversed(tape.operations[: loss.before]):
        if slot in operation.outs:
            found.add((operation.file, operation.line))
            given = list(slots((operation.args, operation.kwargs)))
            if len(given) != 1:
                break
            slot = given[0]
    return found
