"""Finds the fastest way to run a step with a coupled loss within a budget of memory.

With N micro-batches of which k keep their graph, an encoder whose forward takes F and whose backward takes B for each,
and a loss that takes L, a logical batch takes N (F + B) + (N - k) F + L. Blocks that are recomputed or offloaded make a
graph smaller, so that more of them are kept. What a way holds is read off a pass that was written down.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anybatch.batch.batches import Part, Splittable
from anybatch.errors import AnyBatchError, DoesNotFit, LossError
from anybatch.loss.coupling import Coupled
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.memory.meter import OverBudget
from anybatch.planning.advice import begun, least_budget, listed, stopped
from anybatch.planning.coupledtrace import LOSS, CoupledTrace, EncoderAlone, trace_coupled, which_run
from anybatch.planning.curve import Peak, Size
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.fingerprints import fingerprint_of, shapes_of
from anybatch.planning.lengths import Shapes
from anybatch.planning.microbatches import clear_away
from anybatch.planning.optimizer import UpdateTrace
from anybatch.planning.planner import LEVERS, settled
from anybatch.planning.predictor import NothingRuns
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import random_state_kept
from anybatch.planning.search import Search, Splitting, pareto, sorted_rows
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import Times
from anybatch.records.memory import ACTIVATIONS, BUFFERS, GRADIENTS, INPUTS, OPTIMIZER
from anybatch.records.plans import Confidence, ModuleShare, Plan, PlanRow
from anybatch.tensors.fakemode import Remembered
from anybatch.tensors.fakes import Fakes
from anybatch.tensors.modules import modules_of
from anybatch.units import format_bytes
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)

_NO_LIMIT = 2**62  # an encoder that does not fit as it is may do so with blocks traded
_FORWARD = 1 / 3  # of the time of linear layers: the backward multiplies twice
_MOST_TRADED = 8  # ways with blocks traded that are looked at in one search
_TRACES = 2  # what a first one fills, such as a cache, is there in all later steps


@dataclass
class Way:
    """A way to run a batch, and what its peak is made of.

    Args:
        row: as the plan shows it.
        peak: of the pass, without the update.
        splitting: how the batch is split.
    """

    row: PlanRow
    peak: Peak
    splitting: Splitting


class CoupledTrack:
    """The search at one precision.

    Args:
        subject: what is planned, with a coupled loss.
        target: the device.
        allow: the levers that may be used.
        autocast: the precision as the plan names it, if it is not the user's own.
    """

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str], autocast: str) -> None:
        if not isinstance(subject.loss_fn, Coupled):
            raise LossError(f"the loss is a {type(subject.loss_fn).__name__}; expected anybatch.Coupled")
        self.subject, self.coupled, self.autocast = subject, subject.loss_fn, autocast
        encoder = replace(subject, loss_fn=EncoderAlone(subject.loss_fn))
        self.track = Search(encoder, target, [name for name in allow if name != "loss_chunks"], autocast)
        self._is_fake: bool | None = None
        self._budget = 0
        self._remembered = Remembered()
        self._traces: dict[Any, CoupledTrace] = {}
        self._too_large: dict[Any, int] = {}
        self._trained: set[int] = set()
        self._largest: dict[float | None, Size | Shapes] = {}

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch, or at none.

        Args:
            splittable: the batch.
        """
        for subject in (self.subject, self.track.subject):
            subject.attend(splittable)
        self.track.profiles.forget_lengths()

    def outgrown(self, parts: Sequence[Part], limit: float | None) -> str:
        """Says which micro-batch of raw samples is larger than those that were planned for; empty if none is.

        Args:
            parts: micro-batches of another batch.
            limit: of their cost or samples.
        """
        profiles = self.track.profiles
        return profiles.lengths.outgrown(parts, self._largest.get(limit), is_exact=profiles.is_fake)

    def forget(self) -> None:
        """Lets go of what was solved by traces that are not to be trusted any more."""
        self.track.forget()
        self._traces.clear()
        self._too_large.clear()

    def look_within(self, budget: int) -> None:
        """Begins a search; what can't run on fake tensors runs for real within a budget.

        Args:
            budget: bytes.
        """
        self._budget = budget
        self._too_large.clear()
        self.track.look_within(budget, _NO_LIMIT)
        self.smallest_peak()

    @property
    def is_fake(self) -> bool:
        """Whether passes run on fake tensors."""
        return self.track.profiles.is_fake if self._is_fake is None else self._is_fake

    @property
    def confidence(self) -> Confidence:
        """How far plans may be trusted."""
        return self.track.profiles.confidence if self.is_fake else "measured"

    @property
    def splittings(self) -> list[Splitting]:
        """The ways to split the batch as the engine does it for their limit, the fewest micro-batches first."""
        splittable, found = self.subject.splittable, self.track.splittings
        if splittable.has_costs:
            limits = dict.fromkeys(one.limit for one in found)
            found = [Splitting(limit, tuple(splittable.plan(limit, oversized="alone"))) for limit in limits]
        few: list[Splitting] = []
        for one in found:  # each has a trace of its own
            if not few or 2 * one.limit <= few[-1].limit or one is found[-1]:
                few.append(one)
        return few

    @property
    def update(self) -> UpdateTrace:
        """What the optimizer's step takes."""
        return self.track.profiles.update_of(self.track.profiles.trained(self._trained))

    def update_peak(self) -> int:
        """The most bytes alive in the update, with the copies of buffers and the logical batch."""
        profile, _ = self.track.profile(Recipe(), self.splittings[-1])
        most = max(self.update.peak, profile.constants.counted + self.update.state)
        return most + 2 * profile.constants.buffers + profile.constants.batch

    def peak(self, splitting: Splitting, recipe: Recipe) -> Peak:
        """The most bytes alive in a pass, and what they are for.

        Args:
            splitting: how the batch is split.
            recipe: what is traded, and how many graphs are kept.

        Raises:
            NotRecomputable: a block can't be recomputed.
        """
        more = which_run(self._sizes(splitting), recipe.keep or 0)[2]
        kept = recipe.keep or 0
        ran = (len(splitting.parts) - kept - more[0], kept - more[1])
        key = (splitting.limit, recipe.recompute, recipe.offload, *ran)
        if key not in self._traces and key not in self._too_large:
            try:
                self._traces[key] = self._traced(splitting, recipe)
            except OverBudget as error:
                self._too_large[key] = max(error.needed, self._budget + 1)
        if key in self._too_large:
            return Peak(self._too_large[key], {}, "", LOSS, "")
        trace = self._traces[key]
        self._trained |= {*trace.trained}
        self._note_largest(splitting)
        peak = trace.peak(more)
        profile, _ = self.track.profile(Recipe(), self.track.splittings[-1])
        constants, reached = profile.constants, self.track.profiles.trained(self._trained)
        more_gradients = self.subject.gradient_bytes({*reached} - {*trace.trained})
        found = peak.by_category | {OPTIMIZER: self.update.state}
        found[INPUTS] = found.get(INPUTS, 0) + constants.batch
        found[GRADIENTS] = found.get(GRADIENTS, 0) + more_gradients
        found[BUFFERS] = found.get(BUFFERS, 0) + constants.buffers
        return replace(peak, total=sum(found.values()), by_category=found)

    def _sizes(self, splitting: Splitting) -> list[tuple[int, int]]:
        sizes = (self.track.profiles.size_of(part) for part in splitting.parts)
        return [(size.samples, size.length) for size in sizes]

    def _note_largest(self, splitting: Splitting) -> None:
        profiles = self.track.profiles
        sizes = [profiles.size_of(part) for part in splitting.parts]
        largest: Size | Shapes = Size(max(s.samples for s in sizes), max(s.length for s in sizes))
        if profiles.lengths.are_joined:
            largest = self.track.profile(Recipe(), splitting)[1]
        if profiles.lengths.shapes:
            largest = [profiles.lengths.large(part) for part in splitting.parts]
        self._largest[splitting.limit] = largest

    def _traced(self, splitting: Splitting, recipe: Recipe) -> CoupledTrace:
        sizes = self._sizes(splitting)
        if not self.is_fake:
            return trace_coupled(self.subject, splitting.parts, sizes, recipe, fakes=None, limit=self._budget)
        device, failure = self.subject.settings.device, None
        left: list[str] = []
        try:
            for _ in range(_TRACES):
                found = trace_coupled(
                    self.subject, splitting.parts, sizes, recipe, fakes=(fakes := Fakes(self._remembered))
                )
                kept, left = clear_away(fakes, device) if found.leaves_fakes else (0, [])
                if not kept or left:
                    break
        except AnyBatchError:
            raise
        except Exception as error:
            if is_out_of_memory(error) or any(parameter.is_meta for parameter in self.subject.parameters):
                raise
            failure, left = Failure(error), [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
        if failure is not None:
            failure.release()  # outside of the except block, where no traceback holds tensors any more
            clear_away(fakes, device)
        if not left or any(parameter.is_meta for parameter in self.subject.parameters):
            return found
        logger.info("the coupled loss can't run on fake tensors (%s); it runs for real instead", left[0])
        self._is_fake = False
        self._traces.clear()
        return self._traced(splitting, recipe)

    def most(self, splitting: Splitting, recipe: Recipe, budget: int, least: int = 0) -> int | None:
        """The largest number of graphs that fits in a budget; ``None`` if not even the least does.

        Args:
            splitting: how the batch is split.
            recipe: what is traded.
            budget: bytes.
            least: the smallest number that is worth a look.
        """

        def fits(kept: int) -> bool:
            return self.peak(splitting, replace(recipe, keep=kept)).total <= budget

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

    def least_kept(self, splitting: Splitting, seconds: float, more: float = 0.0) -> int | None:
        """The smallest number of graphs with which a splitting is faster than that; ``None`` if it never is.

        Args:
            splitting: how the batch is split.
            seconds: of another way.
            more: what is traded takes.
        """
        if not self.track.times or seconds == _NEVER:
            return 0
        numbers = range(len(splitting.parts) + 1)
        return next((kept for kept in numbers if (self.seconds(splitting, kept) or 0.0) + more < seconds), None)

    def seconds(self, splitting: Splitting, kept: int) -> float | None:
        """The predicted time of a logical batch in the encoder, with nothing traded.

        Args:
            splitting: how it is split.
            kept: how many micro-batches keep their graph.
        """
        times = self.track.times
        if not times:
            return None
        both = [times.seconds(part.cost) for part in splitting.parts]
        return sum(both) + _FORWARD * sum(both[: len(both) - kept])

    def way(self, splitting: Splitting, kept: int, traded: PlanRow | None = None) -> Way:
        """A way to run the batch.

        Args:
            splitting: how the batch is split.
            kept: how many micro-batches keep their graph.
            traded: a row of the encoder's own search whose blocks are taken.
        """
        recipe = replace(Recipe() if traded is None else Recipe.of(traded), keep=kept)
        seconds, base = self.seconds(splitting, kept), self.track.seconds(splitting)
        if seconds is not None and traded is not None and base is not None:
            seconds += (traded.seconds or 0.0) - base
        peak = self.peak(splitting, recipe)
        row = PlanRow(
            micro_batch_size=splitting.limit, micro_batches=len(splitting.parts), recompute=recipe.recompute,
            offload=recipe.offload, autocast=self.autocast, kept_graphs=kept,
            peak_bytes=max(peak.total, self.update_peak()), seconds=seconds, confidence=self.confidence,
        )  # fmt: skip
        return Way(row, peak, splitting)

    def ways(self, budget: int) -> list[Way]:
        """The fastest way of each splitting that fits, with blocks traded only where that may be faster.

        Args:
            budget: bytes.
        """
        found: list[Way] = []
        search = self.track
        for splitting in sorted(self.splittings, key=lambda one: self.seconds(one, len(one.parts)) or 0.0):
            least = self.least_kept(splitting, min(map(_time, found), default=_NEVER))
            kept = None if least is None else self.most(splitting, Recipe(), budget, least)
            found += [] if kept is None else [self.way(splitting, kept)]
        if any(way.row.kept_graphs == way.row.micro_batches == 1 for way in found):
            return found
        rows = [(one, row) for one in self.splittings for row in search.front_of(Recipe(), one) if row.levers]
        rows.sort(key=lambda pair: pair[1].seconds or 0.0)
        for splitting, row in rows[:_MOST_TRADED]:
            more = (row.seconds or 0.0) - (search.seconds(splitting) or 0.0)
            least = self.least_kept(splitting, min(map(_time, found), default=_NEVER), more)
            if least is not None:
                most = functools.partial(self.most, budget=budget, least=least)
                found += self._traded(splitting, row, most)
        return found

    def _traded(
        self, splitting: Splitting, row: PlanRow | None, number: Callable[[Splitting, Recipe], int | None]
    ) -> list[Way]:
        """The way with the blocks of a row traded, if it runs and keeps any number of graphs."""
        if row is None or not row.levers:
            return []
        try:
            kept = number(splitting, Recipe.of(row))
            return [] if kept is None else [self.way(splitting, kept, row)]
        except NotRecomputable as error:
            logger.info("%s is left as it is: %s", error.block, error)
            self.track.exclude(error.block)
        except AnyBatchError as error:
            logger.info("not taken: %s (%s)", row.levers, error)
        return []

    def _least(self, splitting: Splitting, recipe: Recipe) -> int:
        """The number of graphs with the least memory."""
        count = len(splitting.parts)
        some = {0, min(1, count), count}
        return min(some, key=lambda kept: (self.peak(splitting, replace(recipe, keep=kept)).total, -kept))

    def smallest_peak(self) -> int:
        """The bytes of the smallest micro-batches with nothing traded and no graph kept."""
        return self.peak(self.splittings[-1], Recipe(keep=0)).total

    def smallest(self) -> Way:
        """The way with the least memory."""
        found: list[Way] = []
        for splitting in self.splittings[-2:]:
            found.append(self.way(splitting, self._least(splitting, Recipe())))
            for make in (self.track.smallest_of, self.track.everything):
                found += self._traded(splitting, make(Recipe(), splitting), self._least)
        return min(found, key=lambda way: way.row.peak_bytes)

    def front(self) -> list[PlanRow]:
        """Ways worth a look at any budget."""
        found: list[PlanRow] = []
        for splitting in self.splittings[::2]:
            count = len(splitting.parts)
            found += [self.way(splitting, kept).row for kept in sorted({0, count // 2, count})]
        return [row for row in found if self.is_fake or row.peak_bytes <= self._budget]


_NEVER = float("inf")


def _time(way: Way) -> float:
    return _NEVER if way.row.seconds is None else way.row.seconds


_Found = tuple[CoupledTrack, Way]


class CoupledPlanner:
    """Plans a step with a coupled loss for any budget, as ``Planner`` does for the others.

    Args:
        subject: what is planned.
        target: the device.
        allow: the levers that may be used, and precisions; the loss itself is computed in blocks of rows only where the
            user says so.
        patience: seconds that may go into measuring times.
        times: what was measured before, for each precision; ``None`` to measure.
        budget: bytes, for a plan that was made before.

    Attributes:
        rows: samples of the logical batch that is planned for.
    """

    def __init__(
        self,
        subject: Subject,
        target: Target,
        *,
        allow: Sequence[str] = LEVERS,
        patience: float = 4.0,
        times: Sequence[Times | None] | None = None,
        budget: int = 0,
    ) -> None:
        self.subject = subject
        self.target = target
        self.rows = subject.splittable.rows
        self._patience = patience
        with random_state_kept(subject.parameters):
            self._tracks = [CoupledTrack(one, target, allow, name) for one, name in subject.at_precisions(allow)]
        for track, known in zip(self._tracks, times or (), strict=False):
            track.track.times = known
        self._usable = self._usable_of(budget)

    def _usable_of(self, budget: int) -> int:
        profiles = self._tracks[0].track.profiles
        return usable_bytes(budget, self.target, profiles.confidence, varies=profiles.varies)

    @property
    def times(self) -> list[Times | None]:
        """What was measured, for each precision."""
        return [track.track.times for track in self._tracks]

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none, to let go of the last one.

        Args:
            splittable: the batch.
        """
        for track in self._tracks:
            track.attend(splittable)

    def outgrown_parts(self, splittable: Splittable, limit: float | None, row: PlanRow) -> str:
        """Says which micro-batch of raw samples is larger than planned for; empty if none is.

        Args:
            splittable: the batch.
            limit: the padded cost of a micro-batch.
            row: the plan that is followed.
        """
        track = next(track for track in self._tracks if track.autocast == row.autocast)
        self.attend(splittable)
        with random_state_kept(self.subject.parameters):
            return track.outgrown(splittable.plan(limit, oversized="alone"), limit)

    def plan(self, budget: int, *, race: bool = True) -> Plan:
        """Finds the fastest way within a budget.

        Args:
            budget: bytes.
            race: whether times may be measured now.

        Returns:
            The plan.

        Raises:
            DoesNotFit: nothing does; it says how many bytes the smallest way needs and what holds them.
        """
        with random_state_kept(self.subject.parameters):
            profiles = [track.track.profiles for track in self._tracks]
            try:
                return settled(profiles, lambda: self._planned(budget, race), self._forget)
            except NothingRuns as error:
                raise stopped(error.needed, budget, self._usable_of, self.subject.bytes_beside) from None

    def _forget(self) -> None:
        for track in self._tracks:
            track.forget()

    def _planned(self, budget: int, race: bool) -> Plan:
        usable = self._usable = self._usable_of(budget)
        for track in self._tracks:
            track.look_within(usable)
        usable = self._usable = self._usable_of(budget)  # it is known now how far traces may be trusted
        if self._tracks[0].update_peak() > usable:
            raise self._does_not_fit(budget)
        for track in self._tracks:
            track.track.take_times(usable, self._patience / 2)
        found: list[_Found] = [(track, way) for track in self._tracks for way in track.ways(usable)]
        if not found:
            smallest = self._smallest()
            if smallest[1].row.peak_bytes > usable:
                raise self._does_not_fit(budget)
            found = [smallest]
        rows = {id(way.row): (track, way) for track, way in found}
        ranked = [rows[id(row)] for row in sorted_rows(way.row for _, way in found)]
        plan = self._plan(*ranked[0], budget, [other.row for _, other in ranked[1:]])
        logger.info("planned: %s", plan)
        return plan

    def _smallest(self) -> _Found:
        return min(((track, track.smallest()) for track in self._tracks), key=lambda pair: pair[1].row.peak_bytes)

    def _plan(self, track: CoupledTrack, way: Way, budget: int, others: list[PlanRow]) -> Plan:
        row = way.row
        is_single = track.splittings[0].is_single
        whole = track.way(track.splittings[0], 1).row.peak_bytes if is_single else 0
        front = [one for one_track in self._tracks for one in one_track.front()]
        smallest = self._smallest()[1].row
        return Plan(
            chosen=row,
            alternatives=tuple(pareto([row, *others, *front, smallest])),
            budget=budget,
            samples=self.rows,
            device=self.target.name,
            whole_bytes=whole,
            smallest_bytes=least_budget(smallest.peak_bytes, self._usable_of, self.subject.bytes_beside),
            at_peak=self._at_peak(track, way),
            binding=self._binding(track, way),
            modules=tuple(self._shares(track, row)),
            relative_time=not self.target.is_present,
            shapes=shapes_of(self.subject),
            copies_batch=bool(self.subject.writes_batch),
            fingerprint=fingerprint_of(track.subject, self.target),
        )

    def _at_peak(self, track: CoupledTrack, way: Way) -> dict[str, int]:
        """The bytes at the peak by category; outputs of the encoder are activations."""
        if way.row.peak_bytes > way.peak.total:
            return dict(track.update.at_peak)
        return {name: count for name, count in way.peak.by_category.items() if count}

    def _binding(self, track: CoupledTrack, way: Way) -> str:
        row = way.row
        if row.peak_bytes > way.peak.total:
            return (
                f"Peak: {track.update.operation} in the optimizer's step, {format_bytes(row.peak_bytes)}, below which "
                "only an optimizer with less state helps."
            )
        kept = "" if not row.kept_graphs else f", with {row.kept_graphs} of {row.micro_batches} graphs kept"
        advice = f" {self._advice(track, way)}." if way.peak.stage == LOSS else ""
        return f"Peak: {way.peak.stage}{kept}, {format_bytes(way.peak.total)}.{advice}"

    def _advice(self, track: CoupledTrack, way: Way) -> str:
        activations = format_bytes(way.peak.by_category.get(ACTIVATIONS, 0))
        block = track.coupled.row_block
        if block is None:
            return (
                f"The loss sees all samples, with {activations} of activations; Coupled(row_block=...) computes it for "
                "some rows at a time"
            )
        return f"The loss takes {block} rows at a time, with {activations} of activations; a smaller one lowers that"

    def _shares(self, track: CoupledTrack, row: PlanRow) -> list[ModuleShare]:
        splitting = next(one for one in track.splittings if one.limit == row.micro_batch_size)
        profile, size = track.track.profile(Recipe(), splitting)
        times = track.track.times
        cost = track.track.worst(Recipe(), splitting).cost

        def seconds(name: str) -> float | None:
            return times.forward(cost, name) if times else None

        return profile.shares(size, len(splitting.parts), self._parameter_bytes, seconds)

    def _parameter_bytes(self, block: str) -> int:
        module = self.subject.model.get_submodule(block)
        own = (p for one in modules_of(module) for p in one._parameters.values() if p is not None)
        return sum(p.numel() * p.element_size() for p in own)

    def _does_not_fit(self, budget: int) -> DoesNotFit:
        track, way = self._smallest()
        row = way.row
        where = way.peak.stage
        beside = self.subject.bytes_beside
        holders = sorted(self._shares(track, row), key=lambda one: -(one.parameter_bytes + one.activation_bytes))[:5]
        if row.peak_bytes > way.peak.total:
            where = "the optimizer's step"
            remedy = "Use an optimizer with less state, or train fewer parameters with anybatch.freeze"
        elif where == LOSS:
            remedy = self._advice(track, way)
        else:
            remedy = "Use smaller samples, a smaller encoder, or autocast=torch.bfloat16; blocks= names more to trade"
        return DoesNotFit(
            f"{begun(row, budget, self._usable_of, beside)}, in {where}. At its peak: "
            f"{listed(self._at_peak(track, way), beside)}. The blocks that hold most: "
            + (
                ", ".join(
                    f"{one.name} ({format_bytes(one.parameter_bytes)} parameters, "
                    f"{format_bytes(one.activation_bytes)} kept)"
                    for one in holders
                )
                or "none were found"
            )
            + f". {remedy}",
            needed=least_budget(row.peak_bytes, self._usable_of, beside),
            budget=budget + beside,
            modules=[one.name for one in holders],
        )
