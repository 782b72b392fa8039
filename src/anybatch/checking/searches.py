"""Why the gradient of a split is not the whole's: a search for each kind of cause, from the simple to the involved."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.layout import lay_out, placement
from anybatch.batch.trees import flat, leaves, like
from anybatch.checking.averages import Averages, does_not_add_up
from anybatch.checking.causes import more, reason
from anybatch.checking.cuts import placed_one_by_one
from anybatch.checking.elsewhere import of_one_size
from anybatch.checking.gradients import Comparison, Outcome, distance, less
from anybatch.checking.reach import optimized_by, parameters_of
from anybatch.checking.rig import Case, in_place_of, muted, scaled, with_each
from anybatch.checking.standins import Turns
from anybatch.checking.state import shown_iterators
from anybatch.checking.visits import ROUNDINGS, Recording, culprits, gets_different_inputs
from anybatch.errors import AnyBatchError, BatchError, CountError
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import InPieces, LossFunction
from anybatch.loss.sequence import OverTime
from anybatch.records.certificates import Reason
from anybatch.records.means import Mean
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import same
from anybatch.update.passes import Task

_MOST_MODULES = 5  # that are named
_LEAST = 4  # samples, of which two can change places in each half
_TURNED: Callable[[list[int]], list[int]] = lambda places: [*places[1:], places[0]]  # noqa: E731
_BACKWARDS: Callable[[list[int]], list[int]] = lambda places: places[::-1]  # noqa: E731
OTHERS = "numpy or Python"  # what draws numbers for which nothing can stand in, also a generator of the user's own
_MOST_ARGUMENTS = 3  # of an operation on two tensors, with a factor
_ONE_SIZE = (
    "images = [F.pad(one, (0, width - one.shape[-1], 0, height - one.shape[-2])) for one in images]  # the largest of "
    "the whole batch, before the step"
)
_PADDED = reason(
    "padding",
    shown="the same samples give the whole batch's gradient if they are split from the padded batch, but not if "
    "each micro-batch is padded to its own longest sample",
)


def searched(case: Case, comparison: Comparison) -> list[Reason]:
    """Names the first cause that is found."""
    for what, search in _SEARCHES.items():
        nothing: list[Reason] = []
        if found := case.searched(what, lambda search=search: search(case, comparison), nothing):  # type: ignore[misc]
            is_open = all(one.code in ("module", "not-additive") for one in found)
            padded = case.searched("sizes", lambda: _padded_in_the_model(case), None) if is_open else None
            return found if padded is None else [padded]
        if comparison.error <= case.tolerance:  # as it turned out
            return []
    return [does_not_add_up(case.rig.task, list(comparison.whole.losses))]


def _row_block(case: Case, comparison: Comparison) -> list[Reason]:
    """Whether a coupled loss is the whole batch's only if it is computed for all rows at once."""
    coupled = case.rig.task.loss_fn
    if not isinstance(coupled, Coupled) or coupled.row_block is None:
        return []
    one_block = Coupled(coupled.encode, coupled.loss, row_block=case.rig.splittable.rows)
    evidence = {"row_block": coupled.row_block, "error": comparison.error}
    return [reason("rows", "loss", evidence)] if case.is_exact(loss_fn=one_block) else []


def _written(case: Case, comparison: Comparison) -> list[Reason]:
    """The weights that the forward or the loss writes to, which other micro-batches find changed."""
    own = parameters_of(case.rig.roots)
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    case.rig.run()
    written = {name: one for name, one in own.items() if not torch.equal(one.detach(), before[name])}
    if not written:
        return []
    begun = list[list[torch.Tensor]]()
    case.rig.run()

    def begin() -> None:
        begun.append([one.detach().clone() for one in written.values()])

    carried = case.rig.effects.found()
    case.attempt(case.splits[0], fresh=False, carries=carried, loss_fn=case.beginning(begin))
    # As by a first forward that sets them by the samples that it is given.
    is_once = len(begun) > 1 and all(map(torch.equal, begun[1], [one.detach() for one in written.values()]))
    return [written_weights(case.rig.task, written, comparison.error, "first forward" if is_once else "")]


def written_weights(task: Task, weights: Mapping[str, torch.Tensor], error: float, cause: str = "") -> Reason:
    """Says that the forward or the loss writes to weights, or that the loss trains those of another net.

    It trains what an optimizer has that it reaches; an average that it moves requires gradients as often.
    """
    own = {id(one) for one in task.model.parameters()} if isinstance(task.model, torch.nn.Module) else set()
    is_trained = {id(one) for one in weights.values()} <= optimized_by(task.loss_fn) - own
    names = list(weights)
    return reason(cause or ("trained" if is_trained else "weight"), names[0], {"weights": names, "error": error})


def _failing(case: Case, comparison: Comparison) -> list[Reason]:
    for parts, failure in comparison.failures:
        if not isinstance(failure, CountError):
            whole_leaf = case.searched("leaves that are not per sample", lambda: _not_per_sample(case), None)
            return [whole_leaf or _part_fails(failure, min(len(part.samples) for part in parts))]
    return []


def _in_chunks(case: Case, _: Comparison) -> list[Reason]:
    """Whether micro-batches add up to the whole batch in the same chunks, though not to all steps at once."""
    loss, whole = case.rig.task.loss_fn, case.whole
    if not isinstance(loss, OverTime) or case.compared(whole=(found := case.rig.run())).error > case.tolerance:
        return []
    off = {"error": found.error(whole), "loss_error": found.value_error(whole)}
    return [reason("time", "chunk_loss", {**off, "length": loss.chunk, "other": "all"})]


def _moving(case: Case, _: Comparison) -> list[Reason]:
    """Whether random numbers that nothing stands in for make the difference, or something else that moves."""
    is_cut = isinstance(case.rig.task.loss_fn, OverTime)  # while the whole batch ran all steps at once
    first = case.rig.run() if is_cut else case.whole
    errors = [case.rig.run().error(first) for _ in range(2)]
    differs = any(case.tolerance < error < math.inf for error in errors)  # 0 / 0 is no state
    if case.rig.has_drawn() and (differs or case.rig.draws_by_size()):
        met = _meets(case)
        return [reason("drawn together") if met else reason("not held", "loss", {"meet": met})]
    where, what = shown_iterators(case.rig.effects.found())
    return [reason("moves", where, {"moves": True}, what=what)] if differs else []


def wrong_averages(case: Case, comparison: Comparison) -> list[Reason]:
    """Says of each loss that does not add up why not, and tries the counts that help."""
    averages = Averages(case)
    wrong = [name for name in comparison.whole.losses if comparison.loss_error(name) > case.tolerance]
    found = {name: averages.find(name) for name in wrong or comparison.whole.losses}
    counts = {name: candidate for name, (_, candidate) in found.items() if candidate is not None}
    line = (averages.line(counts, found.keys() - counts.keys()),) if counts else ()
    reasons = [one if candidate is None else replace(one, remedies=line) for one, candidate in found.values()]
    if counts and len(counts) == len(found):
        error = case.compared(count=averages.count_with(counts)).error
        rest = "" if error <= case.tolerance else " still, so there is another cause, too"
        text = f" With the count below the error is {error:.2g}{rest}."
        reasons = [more(one, text, error_with_remedy=error) for one in reasons]
    failures = [f" As it is, a split is refused: {failure}" for _, failure in comparison.failures[:1]]
    return [more(one, *failures) for one in reasons]


def _hooks(case: Case, _: Comparison) -> list[Reason]:
    """Whether the gradient is the whole's once hooks on parameters and backward hooks on modules are off."""
    rig = case.rig
    hooked = {n: p for n, p in zip(rig.names, rig.parameters, strict=True) if p._backward_hooks}
    modules = {n: m for n, m in rig.modules.items() if m._backward_hooks or m._backward_pre_hooks}
    if not hooked and not modules:
        return []
    with ExitStack() as undo:
        for owner in (*hooked.values(), *modules.values()):
            muted(owner._backward_hooks, undo)
            muted(getattr(owner, "_backward_pre_hooks", None), undo)
        error = case.compared(whole=rig.run()).error
    names = [f"parameter {name}" for name in hooked] + [name or "the model" for name in modules]
    evidence = {"hooks": names, "error_without_hooks": error}
    return [reason("hook", names[0], evidence)] if error <= case.tolerance else []


def _backward(case: Case, _: Comparison) -> list[Reason]:
    """Whether half of the loss has half of the gradient; the last module that has not is nearest to the place."""
    rig = case.rig
    half = rig.run(loss_fn=scaled(rig.task.loss_fn, 0.5))
    half.gradients = {key: 2 * gradient for key, gradient in half.gradients.items()}
    error = half.error(case.whole)
    if error <= case.tolerance:
        return []
    ones, others, wrong = half.gradients, case.whole.gradients, list[str]()
    for name, one in zip(rig.names, rig.parameters, strict=True):
        if distance(ones, others, of=[one]) > case.tolerance * distance(others, of=[one]):
            wrong.append(name)
    module = wrong[-1].rpartition(".")[0] if wrong else ""
    shown = f"the result of `{module}`" if module else f"parameter `{wrong[-1]}`" if wrong else "the model"
    evidence = {"error": error, "parameters": wrong[:20]}
    return [reason("backward", module or (wrong[-1] if wrong else "model"), evidence, shown=shown)]


def _padding(case: Case, comparison: Comparison) -> list[Reason]:
    """Whether the same samples, cut from the batch that is padded as a whole, give the whole's gradient.

    If not, the search goes on with that batch, whose tensors can be compared with those of its parts.
    """
    own, stand_ins = case.rig.splittable, case.rig.stand_ins
    if own.collate is None:
        return []
    effects, draws = case.rig.effects, stand_ins.draws
    before, random, generators = dict(draws), RandomState(), effects.generators()
    draws.clear()
    with stand_ins:  # as the whole batch was made: in the same precision, of the same numbers
        padded = joined(Turns(stand_ins, own.rows, [range(own.rows)]).collated(own))
    orders = {draw.operation for draw in draws} <= {"randperm"}
    others = random.moved()[1] or not same(generators, effects.generators())
    draws.update(before)
    if padded is None:
        return []
    splits = case.rig.splits(padded)
    if case.is_exact(splits=splits, splittable=padded):
        return _padded_or_drawn(case, comparison, padded, splits, orders=orders, others=others)
    case.rig.task, case.splits = replace(case.rig.task, splittable=padded, micro_batch_size=None), splits
    return []


def _padded_in_the_model(case: Case) -> Reason | None:
    """Whether samples of several sizes give the whole's gradient once all have one, which the model pads them to."""
    own = case.rig.splittable
    if own.collate is not None or len(own.batches) != 1:
        return None
    for label, batch in of_one_size(own.batches[0], own.rows):
        padded = Splittable([batch], broadcast=own.broadcast)
        if case.is_exact(whole=case.rig.run(splittable=padded), splittable=padded):
            found = reason(
                "padding", "model",
                shown=f"{label} and the others have several sizes, and once all have the largest size, "
                      "micro-batches give the whole batch's gradient; the model pads them to the largest of each "
                      "micro-batch, and what it computes on the padding, such as the statistics of a norm, "
                      "differs",
            )  # fmt: skip
            return replace(found, remedies=(_ONE_SIZE,))
    return None


def _mixing_modules(case: Case, comparison: Comparison) -> list[Reason]:
    """The modules that got the same in the whole batch and in its parts, and gave something else."""
    rig, parts = case.rig, list[Recording]()
    with rig.visits.recording(range(rig.splittable.rows)) as whole:
        ran = rig.run()
    rounded = whole
    if case.unit:
        with rig.rounded(case.unit), rig.visits.recording(whole.samples) as rounded:
            rounding = ROUNDINGS * rig.run().error(ran)
        if comparison.error <= rounding:
            return [reason("rounding", evidence={"error": comparison.error, "rounding": rounding})]
    for split in case.splits:
        alone = rig.parts(split)
        for part in split:
            with rig.visits.recording(part.samples) as recording:
                next(alone)
            parts.append(recording)
    found = culprits(whole, parts, case.tolerance, rounded)
    if found:
        return [_mixing(case, *one, whole) for one in list(found.items())[:_MOST_MODULES]]
    if "" in rig.modules and gets_different_inputs(whole, parts, case.tolerance):
        return [reason("mixed before", model=type(rig.task.model).__name__)]
    return []


def _mixing(case: Case, name: str, difference: float, whole: Recording) -> Reason:
    """A module that mixes samples, with what is special about one that knows where its batch lies."""
    modules = case.rig.modules
    module = modules[name]
    evidence = {"module": name, "class": type(module).__name__, "difference": difference}
    shown = f"`{name}`" if name else "The model's own forward"
    coupled = reason("module", name or type(module).__name__, evidence, shown=shown)
    batch_first = getattr(module, "batch_first", None)
    given = whole.visits[name, 0].got
    if batch_first is not None and given and len(given[0].shape) == 2:
        hint = reason("unbatched", dim=1 if batch_first else 0)
        return more(coupled, hint.message, before=hint.remedies)
    if batch_first is not False:
        return coupled
    layout = case.searched("samples along dimension 1", lambda: _samples_along_1(case), dict[str, int]())
    # Those that are built with ``batch_first`` too hand it on to those inside.
    outer = [one for one in modules if f"{name}.".startswith(f"{one}.") and _takes_batch_first(modules[one])]
    remedies = [f"{type(modules[min(outer, key=len)] if outer else module).__name__}(..., batch_first=True)"]
    remedies += [f"layout={layout!r}  # if the batch has time first, then the samples"] if layout else []
    return more(coupled, reason("time first").message, before=remedies)


def _takes_batch_first(module: torch.nn.Module) -> bool:
    return "batch_first" in inspect.signature(type(module).__init__).parameters


def _samples_along_1(case: Case) -> dict[str, int]:
    """The layout under which a split adds up, with the samples of all tensors along dimension 1."""
    own = case.rig.splittable
    tensors = [(".".join(path), leaf) for _, path, leaf in leaves(own.batches[0]) if isinstance(leaf, torch.Tensor)]
    layout = {path: 1 for path, leaf in tensors if leaf.dim() > 1 and path not in own.broadcast}
    try:
        other = Splittable(own.batches, broadcast=placement(tuple(own.broadcast), layout))
        is_exact = own.collate is None and case.is_exact(splits=case.rig.splits(other), splittable=other)
    except AnyBatchError:
        return {}
    return layout if is_exact else {}


class Aligned(TorchFunctionMode):
    """Compares samples in a column, ``[n, 1]``, and in a row, ``[n]``, one by one instead of all with all."""

    def __init__(self) -> None:
        super().__init__()
        # the first operation on such tensors and their shapes; empty if there is none
        self.found: tuple[str, str, str] | tuple[()] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if len(tensors) == 2 and len(args) <= _MOST_ARGUMENTS:
            one, other = sorted(tensors, key=lambda tensor: tensor.dim())
            column = one.dim() == 1 and other.dim() == 2 and other.shape == (len(one), 1) and len(one) > 1
            if column and one.requires_grad != other.requires_grad:  # two of the model's are compared on purpose
                name = getattr(func, "__name__", str(func)).strip("_")
                self.found = self.found or (name, str(tuple(tensors[0].shape)), str(tuple(tensors[1].shape)))
                args = tuple(value.reshape(-1) if value is other else value for value in args)
        return func(*args, **(kwargs or {}))


def _broadcasts(case: Case, _: Comparison) -> list[Reason]:
    """Whether the split adds up where samples in a column and samples in a row are compared one by one."""
    with Aligned() as aligned:
        whole = case.attempt()
        if not aligned.found or not isinstance(whole, Outcome) or not whole.is_finite:
            return []
        error = case.compared(whole=whole).error
    operation, *shapes = aligned.found
    evidence = {"operation": operation, "shapes": shapes, "error_with_remedy": error}
    return [reason("broadcasts", "loss", evidence)] if error <= case.tolerance else []


_SEARCHES: dict[str, Callable[[Case, Comparison], list[Reason]]] = {
    "rows of a block": _row_block,
    "weights that are written to": _written,
    "parts that fail": _failing,
    "chunks of time": _in_chunks,
    "what moves": _moving,
    "hooks": _hooks,
    "whether the backward is linear": _backward,
    "padding": _padding,
    "modules that mix samples": _mixing_modules,
    "shapes that broadcast": _broadcasts,
    "what the loss is averaged over": lambda case, _: wrong_averages(case, case.compared()),
}


def _not_per_sample(case: Case) -> Reason | None:
    """Whether a split works once one of the leaves is not cut, or along another dimension."""
    for label, placed, other in placed_one_by_one(case.rig.splittable):
        try:
            error = case.compared(splittable=other).error
        except AnyBatchError:
            continue
        if error <= case.tolerance and not _is_whole(case, other):
            return misplaced(label, placed, error, other.rows)
    return None


def misplaced(label: str, placed: Mapping[str, int | None], error: float, rows: int) -> Reason:
    """Says that leaves are not per sample, or are along another dimension."""
    path, dim = next(iter(placed.items()))
    evidence = {"path": path, "error_with_remedy": error, "dim": dim}
    code = "not per sample" if dim is None else "other dimension"
    return reason(code, label, evidence, label=label, rows=rows, layout=dict(placed))


def _is_whole(case: Case, splittable: Splittable) -> bool:
    """Whether a part alone gives the whole's gradient, since what is no longer cut was all the data."""
    task = case.rig.task
    case.rig.task = replace(task, splittable=splittable)
    try:
        alone = next(case.rig.parts(case.splits[0]))
    finally:
        case.rig.task = task
    return alone.error(case.whole) <= case.tolerance


def joined(splittable: Splittable) -> Splittable | None:
    """Raw samples in one batch, padded as a whole; ``None`` if that can't be cut. Other batches as they are."""
    if splittable.collate is None:
        return splittable
    batch = next(splittable.materialise(splittable.plan(None)))
    try:
        rows = lay_out(batch, splittable.broadcast).rows
    except BatchError:
        return None
    return Splittable([batch], broadcast=splittable.broadcast) if rows == splittable.rows else None


def _part_fails(failure: Exception, smallest: int) -> Reason:
    """A micro-batch fails where the whole batch does not."""
    kind = type(failure).__name__
    if isinstance(failure, AnyBatchError):
        return reason("refused", "loss", {"error": kind}, failure=failure)
    text = str(failure).splitlines()[0] if str(failure) else kind
    split = f"a split into micro-batches of {smallest} samples or more"
    fails = f"The whole batch runs, but {split} fails with {kind}: {text}."
    is_fixed = "invalid for input of size" in text and "[-1" not in text  # which takes whole groups
    cause = "fixed shape" if is_fixed else "squeezed" if smallest == 1 else "too few"
    return reason(cause, "loss", {"error": kind, "smallest_micro_batch": smallest}, fails=fails)


def _padded_or_drawn(
    case: Case, comparison: Comparison, padded: Splittable, splits: Sequence[Sequence[Part]], *, orders: bool,
    others: bool,
) -> list[Reason]:  # fmt: skip
    """Tells the length of the padding from what else ``collate`` does with samples, where one of them is the cause."""
    for is_left in (False, True):
        held = case.compared(splits=splits, splittable=_as_long_as_own(case.rig.splittable, padded, is_left))
        if held.error <= case.tolerance:
            if not others:
                # Other draws of torch are of samples, though they may be other ones where the padding is longer.
                return [reason("collated together", "collate")] if orders else [_PADDED]
            met = _meets(case)
            if met is not False:
                return [reason("drawn together") if met else reason("not held", "collate", {"meet": None})]
            # The same numbers are all there is to it.
            comparison.each, comparison.error = held.each, held.error
            case.notes.append(reason("drawn", "collate", {"operations": [OTHERS]}, shown=["`collate`"]))
            return []
    return [_PADDED]


def _as_long_as_own(samples: Splittable, padded: Splittable, is_left: bool) -> Splittable:
    """The rows of a padded batch, each part as long as that of its own samples, with the numbers of the whole."""
    raw, collate = samples.whole(), samples.collate

    def cut(chosen: list[int]) -> Any:
        own = padded.chosen(chosen).whole()
        lengths = flat(collate([raw[row] for row in chosen]))  # type: ignore[misc]
        return like(own, [_shortened(*pair, is_left) for pair in zip(flat(own), lengths, strict=True)])

    return Splittable([list(range(padded.rows))], collate=cut)


def _shortened(leaf: Any, other: Any, is_left: bool) -> Any:
    """A leaf of the lengths of another."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor) or leaf.dim() != other.dim():
        return leaf
    for dim, (size, wanted) in enumerate(zip(leaf.shape, other.shape, strict=True)):
        if dim and wanted < size:
            leaf = leaf.narrow(dim, size - wanted if is_left else 0, wanted)
    return leaf


def _meets(case: Case) -> bool | None:
    """Whether samples meet others by random numbers that nothing can stand in for; ``None`` where that can't be told.

    Such numbers belong to the places in the batch, so that a split, in which a sample has another place, can't be
    compared with the whole. Instead, whole batches are compared with one another, from the same random state: with the
    samples of one half in another order, with those of the other half, and with both. Where no sample meets one of the
    other half, what the two changes do to the sum over all items adds up, whatever is drawn for each place, or once for
    the batch.
    """
    if case.rig.splittable.rows < _LEAST or isinstance(case.rig.task.loss_fn, (Coupled, InPieces)):
        return None
    found = [_interact(case, step) for step in (_TURNED, _BACKWARDS)]
    with case.rig.drawn_on():  # they may meet none of the other half by chance
        found.append(_interact(case, _TURNED))
    return None if None in found else any(found)


def _interact(case: Case, ordered: Callable[[list[int]], list[int]]) -> bool | None:
    """Whether it matters for one half of the samples in which order the other is."""
    order = list(range(case.rig.splittable.rows))
    half = len(order) // 2  # the first, so that numbers that are drawn for one sample after the other stay
    one, two = (dict(zip(places, ordered(places), strict=True)) for places in (order[:half], order[half:]))
    runs = [_in_order(case, [moved.get(place, place) for place in order]) for moved in ({}, one, two, one | two)]
    (whole, ends), *others = runs
    if not all(same(ends, end) for _, end in others):
        return None  # how much is drawn depends on what is in the samples, so that others get other numbers
    first, second, both = (less(one.gradients, whole.gradients) for one, _ in others)
    scale = max(whole.norm, *(distance(one) for one in (first, second, both)))
    error = distance(less(both, first), second)
    return error > case.tolerance * scale if math.isfinite(error) and math.isfinite(scale) else None


def _in_order(case: Case, order: list[int]) -> tuple[Outcome, list[Any]]:
    """What all samples give in an order, and the random states at the end of ``collate`` and of the run."""
    rig, ends = case.rig, list[Any]()
    samples = rig.splittable.chosen(order)

    def ended() -> None:
        ends.append((RandomState([rig.device]).state_dict(), rig.effects.generators()))

    if (collate := samples.collate) is not None:  # after which the states are put back

        def collated(raw: list[Any]) -> Any:
            batch = collate(raw)
            ended()
            return batch

        samples.collate = collated
    found = rig.run(splittable=samples, loss_fn=_totals(rig.task), count=count_samples)
    ended()
    return found, ends


def _totals(task: Task) -> LossFunction:
    """The losses of a task as sums over the items that they are means of."""
    count, by_name = task.count, dict[str, Any]()  # the counts of the batch that runs

    def counted(model: Any, batch: Any) -> Any:
        own = count if isinstance(count, Mapping) else {"": count}
        by_name.update({name: one(batch) if callable(one) else 1 for name, one in own.items()})
        return task.loss_fn(model, batch)

    def total(name: str, loss: Any) -> Any:
        return loss.total if isinstance(loss, Mean) else loss * by_name.get(name, by_name.get("", 1))

    return with_each(in_place_of(task.loss_fn, counted), total)
