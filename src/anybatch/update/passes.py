"""One pass over a logical batch in given parts, its gradient or only its loss, and who is told what is running."""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.moving import moved, to_device
from anybatch.batch.windowing import note_the_batches
from anybatch.errors import AnyBatchError, BatchError, LossError, warn
from anybatch.loss.accumulate import Accumulation, Settings, count_in_forward
from anybatch.loss.losses import SINGLE, InPieces, LossFunction, Place, as_coupled, as_over_time
from anybatch.loss.reducing import ALONE, Joint, Reducer, Stage
from anybatch.loss.sums import Sums, joined_metrics, values_of
from anybatch.loss.weights import FORWARD, Count, Weights, fetched, weigh
from anybatch.records.results import Attempt, StepResult
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import devices_among, devices_of, modules_behind, modules_of
from anybatch.update.batchnorm import (
    BatchNormPolicy,
    batch_norm_as,
    coupling_modules,
    may_couple,
    refuse_over_ranks,
    refuse_to_split,
)
from anybatch.update.refusals import Verb, WhySplit
from anybatch.update.transaction import Snapshot, is_out_of_memory

if TYPE_CHECKING:
    from anybatch.loss.coupling import Coupled
    from anybatch.parallel.devices import Devices


@dataclass
class Task:
    """What is the same for every attempt at a logical batch."""

    model: Any  # the first argument of the loss function
    loss_fn: LossFunction  # the user's
    count: Count  # how to count
    settings: Settings  # precision, scaling, inputs
    batch_norm: BatchNormPolicy  # what happens to BatchNorm in a split
    splittable: Splittable  # the logical batch
    micro_batch_size: float | None = None  # what the user asked for, for messages
    verb: Verb | None = None  # what the user called, for messages
    is_planned: bool = False  # whether a plan chose the size, for messages
    devices: "Devices | None" = None  # that share the micro-batches, ``None`` for that of the model
    # puts on a model those of a plan, where that is not done around the pass: on several devices each copy of the model
    # has its own
    optimizations: Callable[[torch.nn.Module], AbstractContextManager[None]] | None = None
    on_loss: Callable[..., None] | None = None  # is given losses, see ``Accumulation``
    # the model, and the loss if it is a module; looked for if they are not given
    modules: Sequence[torch.nn.Module] = ()
    every_module: Sequence[torch.nn.Module] = ()  # these with all that is in them

    def __post_init__(self) -> None:
        if self.settings.device.type == "meta":
            raise LossError(
                f"{type(self.model).__name__} is on the meta device, where tensors hold no data; only "
                "anybatch.plan accepts it there. Call model.to_empty(device=...), and load or initialize the "
                "weights"
            )
        self.over_time = as_over_time(self.loss_fn)
        self.modules = self.modules or modules_behind(self.model, self.loss_fn)
        self.every_module = self.every_module or modules_of(*self.modules)

    @property
    def cut_of_time(self) -> tuple[int, float] | None:
        """The steps in a chunk and in the longest batch, infinite if not known; ``None`` where no time is cut."""
        if self.over_time is None:
            return None
        batches = [None] if self.splittable.is_collated else self.splittable.batches
        found = (self.over_time.cut_of(batch, self.settings.chunk_length) for batch in batches)
        return max((one for one in found if one is not None), default=None)

    def optimized(self, model: Any) -> AbstractContextManager[None]:
        """A context in which a model, or a copy of it, trades for memory what a plan says."""
        return contextlib.nullcontext() if self.optimizations is None else self.optimizations(model)

    def there(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Micro-batches on the device of the model."""
        device = self.settings.device
        return iter(batches) if self.splittable.lies_on(device) else moved(batches, device)

    def cause(self, parts: Sequence[Part]) -> WhySplit:
        """Why the batch is in these parts: those smaller than what was asked for are so because memory ran out."""
        splittable, wanted = self.splittable, self.micro_batch_size
        most = min(one for one in (wanted, splittable.most, splittable.largest) if one is not None)
        is_known = wanted is None or not splittable.has_costs  # packs may be cheaper than what was asked for
        return WhySplit(
            verb=self.verb,
            micro_batch_size=wanted,
            sizes=tuple(len(part.samples) for part in parts),
            batches=1 if splittable.is_collated else len(splittable.batches),
            ran_out=is_known and max((part.cost for part in parts), default=math.inf) < most,
            planned=self.is_planned,
            devices=1 if self.devices is None else len(self.devices.placements),
        )


class Watch:
    """Looks on at one attempt at a logical batch; this one does nothing, and others override what they need."""

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The attempt is over, well or not."""

    def on_micro_batch(self, index: int) -> None:
        """A micro-batch begins."""

    def on_sums(self, weights: Any, sums: Any) -> None:
        """All micro-batches have run; over several processes, nothing was summed over them so far."""

    def on_gradient(self) -> None:
        """The gradient of the whole batch is in ``.grad``; it was neither unscaled nor clipped so far."""

    def on_outcome(self, outcome: Any) -> None:
        """The attempt went through."""


NOBODY = Watch()


class Progress:
    """What is running."""

    __slots__ = ("_index", "_of", "text", "watch")

    def __init__(self, text: str = "the start of the step", watch: Watch = NOBODY) -> None:
        self.text, self.watch = text, watch
        self._index = self._of = 0

    def micro_batch(self, index: int, of: int) -> None:
        """Notes that a micro-batch begins; its text is made when somebody asks."""
        self.text, self._index, self._of = "", index, of
        if self.watch is not NOBODY:
            self.watch.on_micro_batch(index)

    def __call__(self) -> str:
        """What is running."""
        return self.text or f"micro-batch {self._index + 1} of {self._of}"


class Beginnings:
    """What is on during a pass, and is notified of the beginning of each micro-batch."""

    def __init__(
        self,
        task: Task,
        parts: Sequence[Part],
        progress: Progress,
        stack: contextlib.ExitStack,
        differentiate: bool,
        *,
        seed: int | None = None,
    ) -> None:
        self._parts = parts
        self._progress = progress
        self._masks: Any = None
        self._begin_statistics: Callable[[], None] | None = None
        self.seed = seed
        if not differentiate:
            stack.enter_context(torch.no_grad())
            if task.batch_norm == "refuse":
                refuse_to_split(task.modules, len(parts), partial(task.cause, parts))
            return
        if may_couple(task.every_module):
            statistics = batch_norm_as(task.batch_norm, task.modules, len(parts), partial(task.cause, parts))
            self._begin_statistics = stack.enter_context(statistics)
        if task.settings.dropout == "per-sample":
            from anybatch.tensors.dropouts import SampleDropout, refuse_unseen

            for module in task.modules:
                refuse_unseen(module)
            if self.seed is None:
                with without_modes():  # of the stream that is put back before a retry
                    self.seed, following = torch.randint(2**62, (2,), device="cpu").tolist()
                # How much is drawn depends on the split; what the next batch draws must not.
                stack.callback(torch.default_generator.manual_seed, following)
            self._masks = stack.enter_context(SampleDropout(self.seed, task.modules))

    def begin(self, number: int) -> None:
        """Tells everybody that a micro-batch begins."""
        self._progress.micro_batch(number, len(self._parts))
        if self._begin_statistics is not None:
            self._begin_statistics()
        if self._masks is not None:
            self._masks.begin(self._parts[number].samples)

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The micro-batches, each after everybody was told."""
        self._progress.micro_batch(0, len(self._parts))  # also what makes the first one can fail
        numbers = count()  # enumerate would keep a batch while the next one is made
        acts = self._begin_statistics is not None or self._masks is not None
        for batch in batches:
            if acts:
                self.begin(next(numbers))
            else:
                self._progress.micro_batch(next(numbers), len(self._parts))
            yield batch
            del batch

    def again(self, number: int) -> None:
        """Tells everybody that a micro-batch begins for the second time."""
        self._progress.text = f"micro-batch {number + 1} of {len(self._parts)}, for the second time"
        if self._masks is not None:
            self._masks.begin(self._parts[number].samples)

    def whole(self, rows: int) -> None:
        """Begins what sees all samples."""
        self._progress.text = "the coupled loss of the whole batch"
        if self._masks is not None:
            self._masks.begin(range(rows), stage=1)


def run_pass(
    task: Task,
    parts: Sequence[Part],
    parameters: Sequence[torch.Tensor],
    progress: Progress,
    *,
    differentiate: bool = True,
    outside: OutsideLeaves | None = None,
) -> tuple[Weights, Sums]:
    """Goes through the parts once.

    Returns:
        The weights, and what was added up; empty sums if there is nothing to count.

    Raises:
        BatchError: batches that can't be cut are weighed against others by their samples.
    """
    rows = task.splittable.rows_in(parts)
    weights, batches = _counted(task, parts, rows, progress, differentiate)
    if weights.is_empty:  # by the count of all ranks, so that all of them return here
        return weights, Sums()
    reducer = task.settings.reducer
    if task.devices is not None:
        from anybatch.update.overdevices import OverDevices

        run = OverDevices(task, task.devices, parts, weights, progress, differentiate)
        sums = run.run(batches(), parameters)
    else:
        with contextlib.ExitStack() as stack:
            if reducer is not ALONE:
                stack.enter_context(reducer.apart(task.modules))
            if reducer.is_sharded:
                parameters = _parameters_in_parts(reducer, parameters, task.settings.inputs, outside)
            begin = Beginnings(task, parts, progress, stack, differentiate)
            coupled = as_coupled(task.loss_fn)
            if coupled is not None and (parts or coupled.joins(reducer)) and task.splittable.obstacle is None:
                return weights, _coupled_sums(
                    task, coupled, parts, begin, weights, batches(), parameters, outside, differentiate
                )
            accumulation = Accumulation(
                task.model, task.loss_fn, weights, parameters, task.settings,
                rows=rows, outside=outside, differentiate=differentiate, modules=task.every_module,
                on_loss=task.on_loss,
                places=_places(task, parts, differentiate) if isinstance(task.loss_fn, InPieces) else None,
            )  # fmt: skip
            each = begin.each(task.there(batches()))
            try:
                accumulation.collect(chain(each, _padding(task, parts)) if reducer.keeps_step else each)
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                note_the_batch(error, task.splittable, progress() if len(parts) > 1 else "")
                raise
            sums = accumulation.close()
    if task.splittable.obstacle is not None:
        _weighed_whole(task, sums)
    return weights, sums


def is_of_split(error: Exception, splittable: Splittable) -> bool:
    """Whether an error may come of a batch that was cut."""
    is_cut = splittable.rows > 1 and splittable.obstacle is None
    return is_cut and not isinstance(error, AnyBatchError) and not is_out_of_memory(error)


def written_out(error: Exception, splittable: Splittable) -> str:
    """That a size which an error speaks of may be the whole batch's, written out; empty if it speaks of none."""
    rows = splittable.rows
    if rows < 2 or re.search(rf"(?<!\d){rows}(?!\d)", str(error)) is None:
        return ""
    return f". {rows} is the number of its samples: where that is written out, as in view({rows}, -1), take x.size(0)"


def note_the_batch(error: Exception, splittable: Splittable, what: str) -> None:
    """Notes on an error of the user's code that it was given several batches, or not the whole batch, where it was."""
    if len(splittable.batches) == 1 and splittable.collate is None:
        note_the_batches(error, splittable.batches[0])
    is_of_shape = isinstance(error, (RuntimeError, ValueError, IndexError))
    if not what or not is_of_shape or not is_of_split(error, splittable):
        return
    cut = ", ".join(f"{leaf.label} {leaf.shape}" for leaf in splittable.outline().leaves if leaf.dim is not None)
    which = f" ({cut})" if cut else ""
    error.add_note(
        f"this came from {what}: the {splittable.rows} samples of the batch{which} were split. If the whole batch, "
        "without micro_batch_size and memory, runs: pass broadcast= or layout= for a leaf that does not have its "
        "samples in dimension 0, and let the model accept any number of samples; anybatch.check(model, loss_fn, "
        f"batch) tries each leaf{written_out(error, splittable)}"
    )


def _counted(
    task: Task, parts: Sequence[Part], rows: Sequence[int | None], progress: Progress, differentiate: bool
) -> tuple[Weights, Callable[[], Any]]:
    """Weighs the parts by the counts of all ranks, and gives what makes the micro-batches."""
    progress.text = "counting"
    splittable, reducer = task.splittable, task.settings.reducer
    made: list[Any] | None = None

    def micro_batches() -> Any:
        nonlocal made
        if splittable.collate is None:
            return splittable.materialise(parts)
        made = list(splittable.materialise(parts))
        return made

    wholes = None if splittable.collate is not None else splittable.batches
    weights = weigh(task.count, parts, micro_batches, wholes, rows)
    # What ``collate`` made is not made twice.
    batches = partial(splittable.materialise, parts) if made is None else partial(iter, made)
    # Before any forward: the weight of a micro-batch is its share of what all micro-batches of all ranks count.
    weights = reducer.weights(weights, splittable.rows, can_pad=reducer.is_sharded and _can_pad(task))
    if weights.is_empty:
        return weights, batches
    if reducer.is_shared:
        refuse_over_ranks(task.modules, task.batch_norm, is_training=differentiate)
    over_time = task.over_time
    is_cut = over_time is not None and (over_time.prepare is not None or task.cut_of_time is not None)
    if differentiate and task.batch_norm == "refuse" and is_cut:
        # BatchNorm in a chunk of time would see the steps of that chunk only.
        refuse_to_split(task.modules, 2, partial(WhySplit, verb=task.verb, over_time=True))
    if task.count == FORWARD and not as_coupled(task.loss_fn):  # whose loss sees the whole count at once
        with reducer.apart(task.modules), task.optimized(task.model):
            weights = _count_in_forward(task, parts, weights, progress)
        weights = Weights(weights.parts, reducer.totals(weights.own_totals, Stage.FORWARD))
    return weights, batches


def _can_pad(task: Task) -> bool:
    """Whether micro-batches that count nothing may be run, of which nothing stays."""
    is_made_of_pieces = isinstance(task.loss_fn, InPieces) or as_coupled(task.loss_fn)
    is_plain = not is_made_of_pieces and task.count != FORWARD and task.settings.dropout == "native"
    return is_plain and not coupling_modules(*task.modules)


def _weighed_whole(task: Task, sums: Sums) -> None:
    """Says what batches count that can't be cut, of which nobody knows how many samples they have."""
    splittable = task.splittable
    counts_samples = task.count is count_samples or task.count == FORWARD
    counted = [layout.samples is not None for layout in splittable.layouts]
    if not counts_samples or all(counted) or (len(splittable.layouts) < 2 and not task.settings.reducer.is_shared):
        return
    if all(name in sums.counts for name in sums.terms):  # a Mean has its own
        return
    obstacle = splittable.obstacle
    if any(counted):
        raise BatchError(
            f"{obstacle}. Other batches of the window can be split, and the number of samples of this one is "
            "unknown: pass count=, a function of a batch",
            path=getattr(obstacle, "path", ""),
        )
    warn(
        "the batches of a window can't be split, so their numbers of samples are unknown: all are weighted "
        "equally. Pass count=, a function of a batch, if their sizes differ",
    )


def _coupled_sums(
    task: Task, coupled: "Coupled", parts: Sequence[Part], begin: Beginnings, weights: Weights, batches: Any,
    parameters: Sequence[torch.Tensor], outside: OutsideLeaves | None, differentiate: bool,
) -> Sums:  # fmt: skip
    from anybatch.loss.coupling import CoupledPass

    kept = list(batches)  # what a collate made at random can't be made again

    def again(number: int) -> Any:
        begin.again(number)
        return next(task.there([kept[number]]))

    def whole(joint: Joint | None = None, *, own: bool = False) -> Any:
        if own:
            return task.splittable.whole()
        begin.whole(task.splittable.rows if joint is None else joint.rows)
        if not coupled.takes_batch:
            return None
        batch = task.splittable.whole() if joint is None else task.splittable.joined(joint.batches)
        return to_device(batch, task.settings.device)

    run = CoupledPass(
        task.model, coupled, Weights([weights.own_totals], weights.totals), parameters, task.settings,
        samples=[part.samples for part in parts], outside=outside, differentiate=differentiate,
        on_loss=task.on_loss,
    )  # fmt: skip
    return run.run(begin.each(task.there(kept)), again, whole)


def _parameters_in_parts(
    reducer: Reducer,
    parameters: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] | None,
    outside: OutsideLeaves | None,
) -> Sequence[torch.Tensor]:
    """The tensors that a pass gives gradients to, where parameters lie on several ranks."""
    if inputs is not None:
        raise BatchError(
            "inputs= was given, and the model is sharded by fully_shard, whose forward pass has different tensors "
            "than the optimizer; freeze what is not trained instead: parameter.requires_grad_(False)"
        )
    if outside is not None:
        outside.know(reducer.known_leaves(parameters))
    return parameters if reducer.keeps_step else reducer.known_leaves(parameters)


def _padding(task: Task, parts: Sequence[Part]) -> Iterator[Any]:
    """Micro-batches that count nothing, with which this process runs as many as any other.

    Random state and buffers are as before afterwards.
    """
    # All processes get them now, since one may have to send another what it lacks.
    return _unseen(task, task.settings.reducer.stand_ins(lambda: _smallest(task.splittable, parts)))


def _unseen(task: Task, batches: Sequence[Any]) -> Iterator[Any]:
    if batches:
        before = Snapshot(task.modules, devices_among(modules_of(*task.modules)))
        for batch in batches:
            yield to_device(batch, task.settings.device)
        before.restore(warns=False)


def _smallest(splittable: Splittable, parts: Sequence[Part]) -> Any:
    """A micro-batch that is run in any case; ``None`` where there is none."""
    if not parts:
        return None
    number = min(range(len(parts)), key=lambda number: len(parts[number].samples))
    if splittable.is_collated:
        return next(splittable.materialise([parts[number]]))
    return next(islice(splittable.materialise(parts), number, None))


def _count_in_forward(task: Task, parts: Sequence[Part], samples: Weights, progress: Progress) -> Weights:
    """Counts by a forward, whose traces in buffers and random state are taken off again."""
    progress.text = "the forward that counts"
    if task.batch_norm == "refuse":
        refuse_to_split(task.modules, len(parts), partial(task.cause, parts))
    before, writes = Snapshot(task.modules, devices_of(task.model)), task.splittable.writes()
    if task.devices is None:
        batches = task.there(task.splittable.materialise(parts))
    else:
        from anybatch.update.overdevices import count_draws_alike, seeds_for

        seeds = seeds_for(len(parts))
        batches = count_draws_alike(task, iter(list(task.splittable.materialise(parts))), seeds)
    try:
        weights = count_in_forward(task.model, task.loss_fn, batches, task.settings, samples)
    finally:
        before.restore()
    writes.refuse(task.splittable.batches, 'after count="forward" has counted')
    return weights


def _places(task: Task, parts: Sequence[Part], differentiate: bool) -> list[Place]:
    if task.over_time is not None and task.over_time.carry and task.splittable.is_collated:
        raise BatchError(
            "OverTime(carry=True) with collate=: which state belongs to which sample is unknown, since samples are "
            "packed anew for each batch; expected batches of tensors, whose rows are the streams"
        )
    rows: dict[int, int] = {}
    for part in parts:
        rows[part.batch] = rows.get(part.batch, 0) + len(part.samples)
    places = []
    seen = dict.fromkeys(rows, 0)
    for part in parts:
        start, count = seen[part.batch], len(part.samples)
        seen[part.batch] += count
        places.append(Place(start, count, rows[part.batch], task.count, differentiate, task.settings.chunk_length))
    return places


class Outcome(NamedTuple):
    """What an attempt at a logical batch gave."""

    weights: Weights  # the counts
    sums: Sums  # what was added up
    parts: Sequence[Part]  # how the batch was split
    skipped: str = ""  # why the update was left out; empty if it was not
    grad_norm: torch.Tensor | None = None  # the norm before clipping, if it was measured

    def result(self, failed: tuple[Attempt, ...], rows: int, *, counts_anyway: bool = False) -> StepResult:
        """Puts together what a logical batch gave; nothing is fetched from the device yet.

        Args:
            counts_anyway: whether the batch counts as gone through also where it gave nothing to learn from.
        """
        weights, sums, parts, skipped, grad_norm = self
        names = list(dict.fromkeys([*sums.terms, *sums.counts])) or [SINGLE]

        def losses() -> dict[str, float]:
            return {**dict.fromkeys(names, 0.0), **values_of(sums)}

        def counts() -> dict[str, float]:
            known = {name: sum(fetched(found)) for name, found in sums.counts.items()}
            return {name: known[name] if name in known else weights.total(name) for name in names}

        def metrics() -> dict[str, Any]:
            if not any(sums.metrics):
                return sums.means
            order = [sample for part in parts for sample in part.samples]
            return joined_metrics(sums.metrics, sorted(order) if sums.in_order else order) | sums.means

        largest, is_done = max(map(attrgetter("cost"), parts), default=0), not skipped or counts_anyway
        last = Attempt(largest, len(parts), rows if is_done else 0, "done" if is_done else "skipped")
        return StepResult(
            losses=losses,
            counts=counts,
            metrics=metrics,
            grad_norm=None if grad_norm is None else lambda: float(grad_norm),
            micro_batches=len(parts),
            skipped=skipped,
            attempts=(*failed, last),
            accumulator_bytes=sums.accumulator_bytes,
        )
