"""What a step takes in memory, predicted from traces of few samples, which are made when they are first asked for."""

import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.errors import NotSplittable
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.memory.meter import OverBudget, Recording
from anybatch.planning.blocks import blocks_of, runs_of
from anybatch.planning.coupledpass import PassRun, which_run
from anybatch.planning.curve import ALL, Constants, Fit, NotAligned, Profile, Size
from anybatch.planning.knapsack import Option
from anybatch.planning.lengths import Known, Lengths, lengths_of
from anybatch.planning.memorytrace import NotFake, PassTrace, Tracer
from anybatch.planning.microbatches import bytes_to_collate, takes_memory
from anybatch.planning.optimizer import UpdateTrace, counted_bytes, trace_update
from anybatch.planning.recipe import Chunks, Recipe
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Confidence
from anybatch.update.batchnorm import coupling_modules
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)


class TooLarge(OverBudget):
    """A micro-batch of a size might not fit if it ran for real: it takes so many bytes at least, if that is known."""

    def __init__(self, size: Size, needed: int = 0) -> None:
        super().__init__(needed)
        self.size = size

    def __str__(self) -> str:
        return f"a micro-batch of {self.size} might not fit if it ran for real"


class NothingRuns(OverBudget):
    """Not even the smallest configuration to run the step does so for real within the budget; it was stopped."""


Traced = tuple[Size, PassTrace]
_Way = tuple[Chunks | None, str]  # chunks and precision

_CONVOLUTIONS = (
    torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d,
    torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d,
)  # fmt: skip


def _is_compiled(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


class Predictor:
    """Traces a subject as often as needed, and no more; ``kind`` is what writes down."""

    def __init__(self, subject: Subject, kind: type[Recording], *, may_recompute: bool) -> None:
        self.subject = subject
        self.least = 1  # samples of the smallest micro-batch that may be, which runs for real where that is needed
        self._may_recompute = may_recompute
        self.excluded: set[str] = set()  # blocks, and runs of them, that can't be recomputed
        self.is_last = True  # nothing that may hold less is looked at beside this, or after it
        self.extrapolates = True  # what runs for real is taken to be linear in the samples
        # Blocks that are recomputed in all runs, since not even the smallest one stays within the budget without.
        self.always: tuple[str, ...] = ()
        self.blocks = blocks_of(subject.model, subject.blocks)
        self._runs = runs_of(subject.model, self.blocks)
        on_meta = any(parameter.is_meta for parameter in subject.parameters)
        # What a recurrent layer keeps for its backward is not known to fake tensors: their kernel says 0 bytes. What
        # torch.jit compiled keeps what it learned from fake tensors and fails with real ones.
        is_real = subject.is_recurrent or subject.is_scripted
        self._tracer = Tracer(subject, self.blocks, kind, is_fake=on_meta or not is_real, may_probe=not on_meta)
        self._traces: dict[tuple[Recipe, bool, Any], PassTrace] = {}
        self._settled: set[tuple[Recipe, bool, Any]] = set()  # run for real twice, with the same bytes
        self._profiles: dict[tuple[Recipe, Size | None, bool], Profile] = {}
        self._unaligned: set[Recipe] = set()
        self._varies = self._is_curved = False  # curved: bytes are not linear in the samples
        self._updates: dict[tuple[int, ...], UpdateTrace] = {}
        self._update: UpdateTrace | None = None
        self._lengths: Lengths | None = None
        self._known_lengths: Known = {}
        self._count_bytes: int | None = None
        self._accumulators = functools.cache(lambda count: sum(subject.accumulators(count * subject.placements)))
        self._budget: int | None = None
        self._limit: int | None = None
        # For each of some ways the smallest size that does not fit if it runs for real, none where one sample does.
        self._refused: dict[_Way, Size | None] = {}
        self._over: dict[tuple[Recipe, bool, Any], int] = {}  # what passes had reached that were stopped

    @property
    def is_fake(self) -> bool:
        """Whether fake tensors are used, or real probes since they can't be."""
        return self._tracer.is_fake

    @property
    def known(self) -> tuple[Any, ...]:
        """What was found out about the step, which decides how it is traced."""
        return self.is_fake, len(self._unaligned), self._is_curved, dict(self._refused), self.always, len(self.excluded)

    @property
    def varies(self) -> bool:
        """Whether it depends on numbers what runs, such as which experts a sample goes to or what is left out."""
        return not self.is_fake and self._varies

    @functools.cached_property
    def refuses_single(self) -> bool:
        """Whether a micro-batch may not have a single sample, since ghost BatchNorm would see one value a channel."""
        subject = self.subject
        if subject.batch_norm != "ghost" or not subject.splits or not coupling_modules(*subject.roots):
            return False
        try:
            self._trace(Part([0], 1), Recipe(), False)
        except NotSplittable:
            return True
        return False

    def _run(self, parts: Sequence[Part], recipe: Recipe, **how: Any) -> PassTrace:
        """A trace; what shows meanwhile about the step is noted for all later ones, and raised."""
        try:
            return self._tracer.trace(parts, recipe, **how)
        except NotFake:
            self._forget()
            raise
        except NotRecomputable as error:
            self.excluded.add(error.block)
            raise

    def share(self, other: "Predictor") -> None:
        """Takes over the traces of another one, which may go on, whose step differs in its optimizers only."""
        self._traces.update(other._traces)

    def stay_within(self, budget: int, limit: int | None = None) -> None:
        """Sets the bytes that real probes stay under.

        At the limit, or else the budget, the smallest run is stopped; at the budget those that a plan can do without.
        """
        if budget != self._budget:
            self._budget, self._limit, self._refused, self._over = budget, limit or budget, {}, {}
            if self.always:  # which may be enough without
                self.always = ()
                self._forget()

    @property
    def lengths(self) -> Lengths:
        """The lengths of the raw samples as ``collate`` lays them out."""
        if self._lengths is None:
            self._lengths = lengths_of(self.subject, self._known_lengths)
        return self._lengths

    def forget_lengths(self) -> None:
        """The next batch has other samples, which may be counted in another way."""
        self._lengths = self._count_bytes = None
        self._settled.clear()

    def size_of(self, part: Part) -> Size:
        """What a part looks like to the model: its samples, and the length that they are padded to if it varies."""
        return self.lengths.size_of(part, is_exact=self.is_fake)

    def heaviest(self, parts: Sequence[Part]) -> list[Part]:
        """Micro-batches of which one is at least as heavy as any of some; see ``Lengths``."""
        return self.lengths.heaviest(parts, packed=self.subject.splittable.has_costs)

    def profile(self, recipe: Recipe, size: Size, *, single: bool) -> Profile:
        """The profile that is good for a size; ``TooLarge`` if it has to run for real, and might not fit."""
        single = single and not self.subject.splits  # else it follows from the trace of a later micro-batch
        # A single sample that ran for real is not what two and four samples would have it be.
        if self.is_straight(recipe) and (self.is_fake or size.samples > 1):
            try:
                return self._made(recipe, None, single)
            except (NotAligned, TooLarge) as error:
                if isinstance(error, TooLarge) and error.size.samples <= self.least:
                    raise
                self._note_unaligned(recipe, error)
        return self._made(recipe, size, single)

    def traced(self, recipe: Recipe, part: Part, *, single: bool, last: Part | None = None) -> Profile:
        """The profile of one size with memory optimizations on, exactly at that size on fake tensors.

        With ``last``, the bytes of another micro-batch's size are known, too, where they can be. Where two sizes are
        ``NotAligned``, every size is traced by itself from now on, and what was found out from two sizes before is not
        to be trusted.
        """
        size = self.size_of(part)
        is_exact = self.is_fake or size.samples < 4 or not self.extrapolates or self._is_apart(recipe.plain)
        points = [(size, part)] if is_exact else self._points()
        try:
            traces = [(s, self._trace(p, recipe, single)) for s, p in points]
        except TooLarge:
            if is_exact:
                raise
            traces = [(size, self._trace(part, recipe, single))]  # which may fit where larger ones do not
        other = size if last is None else self.size_of(last)
        if last is not None and self.is_fake and other == replace(size, samples=other.samples) != size:
            with contextlib.suppress(NotAligned):  # one that is as large as the others is taken for it
                return self.profile_of([*traces, (other, self._trace(last, recipe, single))])
        try:
            return self.profile_of(traces)
        except NotAligned as error:
            self._note_unaligned(recipe.plain, error)
            raise

    def is_straight(self, recipe: Recipe) -> bool:
        """Whether the bytes of any size follow from those of small ones."""
        return self.subject.splittable.rows > 2 and not (self.subject.splittable.has_lists or self._is_apart(recipe))

    def _is_apart(self, recipe: Recipe) -> bool:
        """Whether nothing follows from one size for another."""
        return self._is_curved or recipe in self._unaligned or self.lengths.are_apart

    def _note_unaligned(self, recipe: Recipe, error: Exception) -> None:
        self._unaligned.add(recipe)
        self._varies = self._varies or isinstance(error, NotAligned)
        logger.info("operations depend on the micro-batch (%s); every size is traced separately", error)

    def note_curved(self, told: int, exact: int) -> None:
        """Notes that the bytes of one size do not follow from those of two others."""
        self._is_curved = True
        logger.info(
            "small micro-batches predict %d bytes for the whole batch, which takes %d; each is traced", told, exact
        )

    def _made(self, recipe: Recipe, size: Size | None, single: bool) -> Profile:
        key = (recipe, size, single)
        if key not in self._profiles:
            recipe = replace(recipe, recompute=self.always)
            points = self._points() if size is None else [(size, self.lengths.part_like(size))]
            if self.is_fake or not self.subject.splits:
                traces = [(s, self._trace(p, recipe, single)) for s, p in points]
            else:
                traces = self._probed(points, recipe, single, extrapolates=size is None)
            self._profiles[key] = self.profile_of(traces)
        return self._profiles[key]

    def whole_pass(self, recipe: Recipe, parts: Sequence[Part]) -> Profile:
        """The profile of a pass with a coupled loss, of which few micro-batches run, see ``which_run``.

        Raises:
            OverBudget: it ran for real, and was stopped.
            NotRecomputable: a block can't be recomputed.
        """
        kept, sizes = recipe.keep or 0, tuple(self.size_of(part) for part in parts)
        numbers, like, more = which_run([(size.samples, size.length) for size in sizes], kept)
        ran = tuple(sizes[number] for place, number in enumerate(numbers) if place not in like)
        key = (replace(recipe, keep=None), False, (sizes, ran, kept - more[1]))
        if key not in self._traces:
            if key in self._over:
                raise OverBudget(self._over[key])
            some, run = [parts[number] for number in numbers], functools.partial(PassRun, like=like)
            try:
                self._traces[key] = self._run(some, recipe, split=False, limit=self._budget, run=run)
            except OverBudget as error:
                error.needed = self._over[key] = max(error.needed, (self._budget or 0) + 1)
                raise
        trace = self._traces[key].with_more(more, self.subject.granularity)
        return self.profile_of([(Size(self.subject.splittable.rows), trace)])

    def profile_of(self, traces: Sequence[tuple[Size, PassTrace]]) -> Profile:
        """The profile that some traces give."""
        subject = self.subject
        fit = Fit(traces, granularity=subject.granularity)
        trained = self.trained(fit.trace.trained)
        if trained not in self._updates:
            self._updates[trained] = trace_update(subject, trained)
        self._update = self._updates[trained]
        parameters = subject.parameters
        unreached = sum(parameters[position].nbytes for position in {*trained} - {*fit.trace.trained})
        buffers = sum(buffer.nbytes for buffer in subject.buffers)
        copies = 1 if subject.device_type == "cpu" else 2
        if subject.splittable.is_collated:
            is_ahead = subject.counts_ahead or subject.devices is not None
            copies = ALL if is_ahead and subject.device_type == "cpu" else copies
        elif subject.batch_bytes and not subject.behaviour.writes_batch:
            copies = 0
        times = 2 if subject.splittable.copies_rows else 1  # all micro-batches are cut out at once
        summed = subject.summed_bytes([parameters[position] for position in trained])
        constants = Constants(
            times * subject.batch_bytes, buffers, copies, subject.placements, summed, unreached, self._counted()
        )
        size = traces[0][0]
        return Profile(fit, self._update, constants, self.confidence, self._runs, self._accumulators, size)

    def _counted(self) -> int:
        """The bytes of parameters, and of what a count holds, while it runs; 0 where nothing is there to be run."""
        if self._count_bytes is None:
            self._count_bytes = counted_bytes(self.subject)
        return self._count_bytes and sum(p.nbytes for p in self.subject.parameters) + self._count_bytes

    def trained(self, reached: Iterable[int]) -> tuple[int, ...]:
        """The positions of the parameters that a step may give a gradient.

        Where it depends on numbers what runs, such as which experts a sample goes to, few samples do not reach all of
        them.
        """
        if self.is_fake and not self._unaligned and not self.subject.behaviour.draws:
            return tuple(sorted(reached))
        return tuple(sorted({*reached, *self.subject.wanted}))

    @property
    def confidence(self) -> Confidence:
        """How far plans may be trusted."""
        subject, modules = self.subject, self.subject.modules
        is_traced = self._update is None or self._update.is_traced
        if not is_traced or subject.hides_bytes or subject.behaviour.draws:
            return "estimated"
        if any(map(_is_compiled, modules)):  # traced without its compiler, which fuses and recomputes some operations
            return "estimated"
        if subject.device_type != "cpu" and not subject.is_present:
            has_kernels = subject.is_recurrent or any(isinstance(module, _CONVOLUTIONS) for module in modules)
            return "predicted" if self.is_fake and not has_kernels else "estimated"
        return "predicted" if self.is_fake else "measured"

    def _trace(self, part: Part, recipe: Recipe, single: bool) -> PassTrace:
        if takes_memory(self.subject) and not self.may_collate(part):
            raise TooLarge(self.size_of(part))
        has_own = not self.is_fake or self.subject.splittable.has_lists  # bytes of its own, whatever its size
        look = (tuple(part.samples), self._limit) if has_own else (self.size_of(part), self.lengths.in_order(part))
        key = (recipe, single, look)
        known = self._traces.get(key)
        if known is None or (has_own and key not in self._settled):
            trace = self._traces[key] = self._traced_now(part, recipe, split=not single)
            if known is not None and known.held_the_same(trace):  # a first run may fill a cache
                self._settled.add(key)
        return self._traces[key]

    def _traced_now(self, part: Part, recipe: Recipe, *, split: bool) -> PassTrace:
        is_least = len(part.samples) <= self.least
        limit = self._limit if is_least or not self.subject.splits else self._budget  # what a plan leaves free is left
        expected = 0 if is_least or limit is None else self._foreseen(recipe, len(part.samples))
        if limit is not None and expected > max(0, limit):  # buckets may leave less than nothing
            self._stopped(part, recipe, expected)
            raise TooLarge(self.size_of(part), expected)
        try:
            return self._run([part], recipe, split=split, limit=limit)
        except NotRecomputable as error:
            if error.block not in self.always:
                raise
            failure, needed = Failure(error), 0
        except Exception as error:
            if not isinstance(error, OverBudget) and (self.is_fake or not is_out_of_memory(error)):
                raise
            failure, needed = Failure(error), getattr(error, "needed", 0)
        failure.release()  # outside of the except block, where no traceback holds tensors any more
        self._stopped(part, recipe, needed)
        raise TooLarge(self.size_of(part), needed)

    def _foreseen(self, recipe: Recipe, samples: int) -> int:
        """What a real run will take by smaller ones: by two, or at most by one; 0 where there is none.

        One that is stopped at its limit may have held more than that within an operation.
        """
        known = {len(key[2][0]): trace for key, trace in self._traces.items() if key[0] == recipe and trace.taken}
        smaller = sorted(one for one in known if one < samples)[-2:]
        if not smaller or self._is_apart(recipe.plain):
            return 0
        last = known[smaller[-1]]
        fixed, few = (known[smaller[0]].taken, smaller[0]) if len(smaller) > 1 else (last.fixed, 0)
        return last.taken + (last.taken - fixed) * (samples - smaller[-1]) // (smaller[-1] - few)

    def _stopped(self, part: Part, recipe: Recipe, needed: int) -> None:
        """Has the smallest micro-batches run with all blocks recomputed from now on, if they do not run without.

        If they do not run with that either, it raises ``NothingRuns``.
        """
        if self.subject.splits and (len(part.samples) > self.least or not self.is_last):
            way = recipe.chunks, recipe.autocast
            known = self._refused.get(way) or self.size_of(part)
            self._refused[way] = min(known, self.size_of(part), key=lambda one: one.samples)
            return
        wanted = self._recomputable
        if not wanted or (self.always == wanted == recipe.recompute):
            raise NothingRuns(needed)
        if self.always != wanted:
            logger.info("the smallest micro-batch would take more than the budget: all blocks are recomputed")
            self.always = wanted
            self._forget()

    @property
    def _recomputable(self) -> tuple[str, ...]:
        return tuple(name for name in self.blocks if name not in self.excluded) if self._may_recompute else ()

    def recomputable(self, options: Sequence[Option]) -> list[Option]:
        """The options that a search may choose from; none where all blocks are recomputed anyway."""
        if not self._may_recompute or self.always:
            return []
        found = [one for one in options if one.name not in self.excluded]
        alone = {one.first for one in options if one.first == one.last and one.name in self.excluded}
        # A run of blocks of which one can't be recomputed can't be either.
        return [one for one in found if not any(one.first <= place <= one.last for place in alone)]

    def smallest_runs(self, base: Recipe, parts: Sequence[Part], *, single: bool) -> list[list[Traced]]:
        """The traces of the smallest micro-batches as they run for real: as they are, and with all blocks recomputed.

        Most of what they hold lies elsewhere meanwhile, so that they run within less than that.
        """
        split = not single or self.subject.splits
        ways = dict.fromkeys(((), self._recomputable))
        found = [one for way in ways if (one := self._spilled(parts, replace(base, recompute=way), split=split))]
        if found and split and not self.varies and self.is_straight(base):
            points = [part for _, part in self._points()]
            spare = self.least * min(trace.spare for _, trace in found[0])
            several = self._spilled(points, base, split=split) if len(points[-1].samples) <= spare else []
            self._varies = not several  # which nobody knows then
            try:
                _ = several and self.profile_of(several)
            except NotAligned as error:
                self._note_unaligned(base, error)
        return found

    def _spilled(self, parts: Sequence[Part], recipe: Recipe, *, split: bool) -> list[Traced]:
        """Traces of real runs of which most lies elsewhere; none where they can't be run."""
        for spills in (True, False):  # not every step runs with hooks on what it saves
            run = functools.partial(
                self._tracer.trace, recipe=recipe, split=split, limit=self._limit, spills=spills
            )  # fmt: skip
            try:
                return [(self.size_of(part), run([part])) for part in parts]
            except Exception as error:  # noqa: BLE001 - what this run shows is not needed for a plan
                failure, is_over = Failure(error), isinstance(error, OverBudget)
            logger.info("a run did not measure what is needed: %s", failure.text)
            failure.release()
            if is_over:
                break
        return []

    def needed_by(self, reached: int) -> int:
        """The least bytes of a step of which a run had reached so many; the optimizers' state comes later."""
        update = trace_update(self.subject, self.trained(()))
        return max(reached + update.state - self.subject.state_bytes, update.peak + self.subject.batch_bytes)

    def _forget(self) -> None:
        self._profiles.clear()
        self._traces.clear()
        self._settled.clear()
        self._refused = {}

    def _points(self) -> list[tuple[Size, Part]]:
        return [(self.size_of(part), part) for part in self.lengths.points(self.subject.splittable.rows)]

    def _probed(
        self, points: list[tuple[Size, Part]], recipe: Recipe, single: bool, *, extrapolates: bool
    ) -> list[tuple[Size, PassTrace]]:
        """Traces the points that may run for real within the budget, found from one sample on.

        It raises ``NotAligned`` where two sizes to extrapolate from do not fit, and ``TooLarge`` for a size that might
        not.
        """
        way = recipe.chunks, recipe.autocast
        for part in [] if way in self._refused else self.lengths.fewest(self.least):
            self._trace(part, recipe, single)
        self._refused.setdefault(way, None)
        traces: list[tuple[Size, PassTrace]] = []
        three = Part(range(3), 3)  # which may run where four do not
        more = [(self.size_of(three), three)] if extrapolates and not self.lengths.each else []
        for size, part in [*points, *more]:
            is_new = all(size != known for known, _ in traces)
            if len(traces) < len(points) and is_new and self._may_run(size, way):
                try:
                    traces.append((size, self._trace(part, recipe, single)))
                except TooLarge:
                    if size.samples <= self.least:
                        raise
        if len(traces) == len(points):
            return traces
        raise TooLarge(points[-1][0])

    def _may_run(self, size: Size, way: _Way) -> bool:
        """Whether no smaller size was stopped."""
        refused = self._refused.get(way)
        return refused is None or not refused.is_within(size)

    def may_collate(self, part: Part) -> bool:
        """Whether there is room to collate samples while the plan is made."""
        if not self.subject.splittable.is_collated or self._budget is None or len(part.samples) <= self.least:
            return True
        return bytes_to_collate(self.subject, part, self.lengths.bytes_of_one) <= self._budget
