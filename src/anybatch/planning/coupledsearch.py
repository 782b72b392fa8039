"""The search for a coupled loss: how many micro-batches keep their graph, beside the memory optimizations.

With N micro-batches of which k keep their graph, an encoder whose forward takes F and whose backward takes B for each,
and a loss that takes L, a logical batch takes N (F + B) + (N - k) F + L. Blocks that are recomputed or offloaded make a
graph smaller, so that more of them are kept. The encoder by itself, with a loss that adds up, is searched as any step
is; what a whole pass holds is read off one that was written down.
"""

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from anybatch.batch.batches import Part, Splittable
from anybatch.errors import AnyBatchError
from anybatch.loss.coupling import Coupled
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.memory.meter import OverBudget, Recording
from anybatch.planning.coupledtrace import LOSS, CoupledTrace, EncoderAlone, trace_coupled, which_run
from anybatch.planning.curve import Peak, Profile, Size
from anybatch.planning.devices import Target
from anybatch.planning.lengths import Shapes
from anybatch.planning.memorytrace import NotFake, Tracer
from anybatch.planning.recipe import Recipe, Splitting
from anybatch.planning.search import Search
from anybatch.planning.subjects import Subject
from anybatch.records.memory import ACTIVATIONS, BUFFERS, GRADIENTS, INPUTS, OPTIMIZER
from anybatch.records.plans import Confidence, PlanRow
from anybatch.units import format_bytes

logger = logging.getLogger(__name__)

_NO_LIMIT = 2**62  # an encoder that does not fit as it is may do so with blocks checkpointed or offloaded
_FORWARD = 1 / 3  # of the time of linear layers: the backward multiplies twice
_MOST_OPTIMIZED = 8  # ways with blocks checkpointed or offloaded that are looked at in one search
_NEVER = float("inf")


class CoupledSearch(Search):
    """The search at one precision, of whole passes and not of single micro-batches.

    Args:
        subject: what is planned, with a coupled loss.
        target: the device.
        allow: the memory optimizations; the loss is computed in blocks of rows only where the user says so.
        autocast: the precision as the plan names it, if it is not the user's own.
    """

    may_race = replays = False

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str], autocast: str) -> None:
        self._whole, self._coupled = subject, cast(Coupled, subject.loss_fn)
        encoder = replace(subject, loss_fn=EncoderAlone(self._coupled))
        super().__init__(encoder, target, [name for name in allow if name != "loss_chunks"], autocast)
        on_meta = any(parameter.is_meta for parameter in subject.parameters)
        self._tracer = Tracer(subject, (), Recording, is_fake=True, may_probe=not on_meta)
        self._budget = 0
        self._traces: dict[Any, CoupledTrace] = {}
        self._too_large: dict[Any, int] = {}
        self._trained: set[int] = set()
        self._largest: dict[float, Size | Shapes] = {}
        self._found: list[PlanRow] = []

    @property
    def planned(self) -> Subject:
        """What the plan is for."""
        return self._whole

    @property
    def is_fake(self) -> bool:
        """Whether passes run on fake tensors."""
        return self.profiles.is_fake and self._tracer.is_fake

    @property
    def confidence(self) -> Confidence:
        """How far passes may be trusted."""
        return self.profiles.confidence if self.is_fake else "measured"

    @property
    def known(self) -> tuple[object, ...]:
        """What was found out about the step so far."""
        return *super().known, self._tracer.is_fake

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch, or at none."""
        self._whole.attend(splittable)
        super().attend(splittable)

    def forget(self) -> None:
        """Lets go of what follows from traces that are not to be trusted any more."""
        super().forget()
        self._traces.clear()
        self._too_large.clear()

    def look_within(self, usable: int, budget: int) -> None:
        """Begins a search; what can't run on fake tensors runs for real within a budget."""
        self._budget = usable
        self._too_large.clear()
        super().look_within(usable, _NO_LIMIT)
        self._peak(self._few()[-1], Recipe(keep=0))  # after which it is known whether the loss runs on fakes

    def _few(self) -> list[Splitting]:
        """The splittings that are looked at, as the engine makes them for their limit, the fewest micro-batches first.

        Each has a trace of its own.
        """
        splittable, found = self.subject.splittable, self.splittings
        if splittable.has_costs:
            limits = dict.fromkeys(one.limit for one in found)
            found = [Splitting(limit, tuple(splittable.plan(limit, oversized="alone"))) for limit in limits]
        few: list[Splitting] = []
        for one in found:
            if not few or 2 * one.limit <= few[-1].limit or one is found[-1]:
                few.append(one)
        return few

    def splitting_of(self, row: PlanRow) -> Splitting:
        """The splitting of a row."""
        return next(one for one in self._few() if one.limit == row.micro_batch_size)

    # What a pass holds.

    def _peak(self, splitting: Splitting, recipe: Recipe) -> Peak:
        """The most bytes alive in a pass, and what they are for.

        Raises:
            NotRecomputable: a block can't be recomputed.
        """
        kept = recipe.keep or 0
        more = which_run(self._sizes(splitting), kept)[2]
        ran = (len(splitting.parts) - kept - more[0], kept - more[1])
        key = (splitting.limit, replace(recipe, keep=None), ran)
        if key not in self._traces and key not in self._too_large:
            try:
                self._traces[key] = self._traced_pass(splitting, recipe)
            except OverBudget as error:
                self._too_large[key] = max(error.needed, self._budget + 1)
        if key in self._too_large:
            return Peak(self._too_large[key], {}, "", LOSS)
        trace = self._traces[key]
        self._trained |= {*trace.trained}
        self._note_largest(splitting)
        peak = trace.peak(more)
        constants = self.profile(Recipe(), self.splittings[-1])[0].constants
        reached = self.profiles.trained(self._trained)
        found = peak.by_category | {OPTIMIZER: self.profiles.update_of(reached).state}
        for name, size in (
            (INPUTS, constants.batch),
            (GRADIENTS, self.subject.gradient_bytes({*reached} - {*trace.trained})),
            (BUFFERS, constants.buffers),
        ):
            found[name] = found.get(name, 0) + size
        return replace(peak, total=sum(found.values()), by_category={name: n for name, n in found.items() if n})

    def _sizes(self, splitting: Splitting) -> list[tuple[int, int]]:
        sizes = (self.profiles.size_of(part) for part in splitting.parts)
        return [(size.samples, size.length) for size in sizes]

    def _note_largest(self, splitting: Splitting) -> None:
        sizes, lengths = self._sizes(splitting), self.profiles.lengths
        largest: Size | Shapes = Size(max(samples for samples, _ in sizes), max(length for _, length in sizes))
        if lengths.are_joined:
            largest = self.profile(Recipe(), splitting)[1]
        if lengths.shapes:
            largest = [lengths.large(part) for part in splitting.parts]
        self._largest[splitting.limit] = largest

    def _traced_pass(self, splitting: Splitting, recipe: Recipe) -> CoupledTrace:
        make = functools.partial(trace_coupled, self._whole, splitting.parts, self._sizes(splitting), recipe)
        if self.is_fake:
            try:
                return self._tracer.on_fakes(make)
            except NotFake:
                self._traces.clear()
        return make(None, limit=self._budget)

    def _update(self) -> tuple[Profile, Size]:
        """What is held apart from the pass; the loss may train more than the encoder has."""
        profile, size = self.profile(Recipe(), self.splittings[-1])
        own = copy.copy(profile)
        own.update = self.profiles.update_of(self.profiles.trained(self._trained))
        return own, size

    def _update_peak(self) -> int:
        profile, size = self._update()
        return profile.update_peak(size, 0)

    def holds_update(self, budget: int) -> bool:
        """Whether the update fits."""
        return self._update_peak() <= budget

    def whole_bytes(self) -> int:
        """The peak of the whole batch at once without memory optimizations; 0 if it is not known."""
        splitting = self._few()[0]
        return self._row_of(splitting, 1).peak_bytes if splitting.is_single else 0

    def traced(self, row: PlanRow) -> tuple[PlanRow, Peak]:
        """A row with its peak; it was traced as it would run when it was made."""
        peak = self._peak(self.splitting_of(row), Recipe.of(row))
        profile, size = self._update()
        if peak.total < profile.update_peak(size, 0):
            return row, profile.update_in_detail(size, 0)
        return row, profile.above_floor(peak, size, 0)

    # Which graphs are kept.

    def row(self, recipe: Recipe, splitting: Splitting, budget: int, least: int = 0) -> PlanRow | None:
        """The way that keeps the most graphs within a budget; ``None`` if not even the least fits."""
        kept = self._most(splitting, recipe, budget, least)
        return None if kept is None else self._row_of(splitting, kept)

    def _most(self, splitting: Splitting, recipe: Recipe, budget: int, least: int = 0) -> int | None:
        """The largest number of graphs that fits in a budget; ``None`` if not even the least does.

        Args:
            splitting: how the batch is split.
            recipe: the memory optimizations.
            budget: bytes.
            least: the smallest number that is worth a look.
        """

        def fits(kept: int) -> bool:
            return self._peak(splitting, replace(recipe, keep=kept)).total <= budget

        count = len(splitting.parts)
        if least >= count or (least and not fits(least)):
            return count if least <= count and fits(count) else None
        if fits(count):
            return count
        best = least if least or fits(0) else None
        low, high = max(1, least + 1), count - 1  # what is held grows with the number, from one to all but one
        while low <= high:
            middle = (low + high) // 2
            if fits(middle):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def _least_kept(self, splitting: Splitting, seconds: float, more: float = 0.0) -> int | None:
        """The smallest number of graphs with which a splitting is faster than that; ``None`` if it never is."""
        if not self.times or seconds == _NEVER:
            return 0
        numbers = range(len(splitting.parts) + 1)
        return next((kept for kept in numbers if (self._pass_seconds(splitting, kept) or 0.0) + more < seconds), None)

    def _pass_seconds(self, splitting: Splitting, kept: int) -> float | None:
        """The predicted time of a logical batch in the encoder, without memory optimizations."""
        times = self.times
        if not times:
            return None
        both = [times.seconds(part.cost) for part in splitting.parts]
        return sum(both) + _FORWARD * sum(both[: len(both) - kept])

    def _row_of(self, splitting: Splitting, kept: int, optimized: PlanRow | None = None) -> PlanRow:
        """A way to run the batch, with the blocks of a row of the encoder's own search checkpointed or offloaded."""
        recipe = replace(Recipe() if optimized is None else Recipe.of(optimized), keep=kept)
        seconds, base = self._pass_seconds(splitting, kept), self.seconds(splitting)
        if seconds is not None and optimized is not None and base is not None:
            seconds += (optimized.seconds or 0.0) - base
        return PlanRow(
            micro_batch_size=splitting.limit, micro_batches=len(splitting.parts), recompute=recipe.recompute,
            offload=recipe.offload, autocast=self.autocast, kept_graphs=kept, seconds=seconds,
            peak_bytes=max(self._peak(splitting, recipe).total, self._update_peak()), confidence=self.confidence,
        )  # fmt: skip

    def rows(self, budget: int) -> list[PlanRow]:
        """The fastest way of each splitting that fits, with blocks checkpointed only where that may be faster."""
        found = self._found = list[PlanRow]()

        def least_kept(splitting: Splitting, more: float = 0.0) -> int | None:
            fastest = min((_NEVER if row.seconds is None else row.seconds for row in found), default=_NEVER)
            return self._least_kept(splitting, fastest, more)

        for splitting in sorted(self._few(), key=lambda one: self._pass_seconds(one, len(one.parts)) or 0.0):
            least = least_kept(splitting)
            row = None if least is None else self.row(Recipe(), splitting, budget, least)
            found += [] if row is None else [row]
        if any(row.kept_graphs == row.micro_batches == 1 for row in found):
            return found
        rows = [(one, row) for one in self._few() for row in self.front_of(Recipe(), one) if row.optimizations]
        rows.sort(key=lambda pair: pair[1].seconds or 0.0)
        for splitting, row in rows[:_MOST_OPTIMIZED]:
            least = least_kept(splitting, (row.seconds or 0.0) - (self.seconds(splitting) or 0.0))
            if least is not None:
                found += self._optimized(splitting, row, functools.partial(self._most, budget=budget, least=least))
        return found

    def _optimized(
        self, splitting: Splitting, row: PlanRow | None, number: Callable[[Splitting, Recipe], int | None]
    ) -> list[PlanRow]:
        """The way with the blocks of a row checkpointed or offloaded, if it runs and keeps any number of graphs."""
        if row is None or not row.optimizations:
            return []
        try:
            kept = number(splitting, Recipe.of(row))
            return [] if kept is None else [self._row_of(splitting, kept, row)]
        except NotRecomputable as error:
            logger.info("%s is left as it is: %s", error.block, error)
            self.exclude(error.block)
        except AnyBatchError as error:
            logger.info("not taken: %s (%s)", row.optimizations, error)
        return []

    def smallest(self) -> PlanRow:
        """The way with the least memory."""

        def least(splitting: Splitting, recipe: Recipe) -> int:
            count = len(splitting.parts)
            some = {0, min(1, count), count}
            return min(some, key=lambda kept: (self._peak(splitting, replace(recipe, keep=kept)).total, -kept))

        found: list[PlanRow] = []
        for splitting in self._few()[-2:]:
            found.append(self._row_of(splitting, least(splitting, Recipe())))
            for make in (self.smallest_of, self.everything):
                found += self._optimized(splitting, make(Recipe(), splitting), least)
        return min(found, key=lambda row: row.peak_bytes)

    def least(self) -> tuple[PlanRow, Peak]:
        """The same, with its peak."""
        return self.traced(self.smallest())

    def front(self) -> list[PlanRow]:
        """Ways worth a look at any budget, those that were found, and the smallest."""
        found: list[PlanRow] = []
        for splitting in self._few()[::2]:
            count = len(splitting.parts)
            found += [self._row_of(splitting, kept) for kept in sorted({0, count // 2, count})]
        return [
            *self._found,
            *(row for row in found if self.is_fake or row.peak_bytes <= self._budget),
            self.smallest(),
        ]

    def floor_size(self, row: PlanRow) -> float | None:
        """Not known: how much is held is a matter of the graphs that are kept, too."""
        return None

    def hint(self, row: PlanRow, peak: Peak) -> str:
        """Says what the loss takes, and how it takes less."""
        if peak.stage != LOSS:
            return ""
        activations, block = peak.by_category.get(ACTIVATIONS), self._coupled.row_block
        held = "" if activations is None else f", with {format_bytes(activations)} of activations"
        if block is None:
            return f" The loss sees all samples{held}; Coupled(row_block=...) computes it for some rows at a time."
        return f" The loss takes {block} rows at a time{held}; a smaller row_block helps."

    def outgrown_parts(self, parts: Sequence[Part], row: PlanRow, budget: int) -> str:
        """Says which micro-batch is larger than those that were planned for; empty if none is."""
        return self.profiles.lengths.outgrown(parts, self._largest.get(row.micro_batch_size), is_exact=self.is_fake)
