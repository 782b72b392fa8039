"""Finds the fastest configuration of a step within a budget of memory."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from anybatch.batch.batches import Splittable
from anybatch.errors import AnyBatchError, DoesNotFit, LossError
from anybatch.loss.coupling import Coupled
from anybatch.loss.sequence import OverTime
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.planning.advice import binding_of, does_not_fit, least_budget, stopped, what_helps, why_whole
from anybatch.planning.coupledsearch import CoupledSearch
from anybatch.planning.curve import NotAligned, Peak
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.fingerprints import fingerprint_of, shapes_of
from anybatch.planning.overtimesearch import ChunkLengths, ChunkSearch, InChunks
from anybatch.planning.predictor import NothingRuns, TooLarge
from anybatch.planning.recipe import Recipe
from anybatch.planning.reserved import held_on
from anybatch.planning.running import python_state_kept, random_state_kept
from anybatch.planning.search import Search, pareto, sorted_rows
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import Finalist, Row, Times, is_far, is_near, neighbours, raced
from anybatch.records.memory import ACTIVATIONS
from anybatch.records.plans import ModuleShare, Plan, PlanRow

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPTIMIZATIONS = ("recompute", "offload", "loss_chunks")
_FINALISTS = 3
_ATTEMPTS = 4


class Planner:
    """Plans a step for any budget; what was traced and measured for one is there for the next.

    Args:
        subject: what is planned.
        target: the device.
        allow: the memory optimizations that may be used, and precisions such as ``"bfloat16"``.
        patience: seconds that may go into measuring times.
        times: what was measured before, for each precision; ``None`` to measure.
        budget: bytes, for a plan that was made before.
        like: the planner of a step that differs in its optimizers only, whose traces are good here, too.

    Attributes:
        rows: samples of the logical batch that is planned for.
    """

    def __init__(
        self,
        subject: Subject,
        target: Target,
        *,
        allow: Sequence[str] = OPTIMIZATIONS,
        patience: float = 1.5,
        times: Sequence[Times | None] | None = None,
        budget: int = 0,
        like: "Planner | None" = None,
    ) -> None:
        self.subject = subject
        self.target = target
        self.rows = subject.splittable.rows
        self._patience, self._allow, self._may_try = patience, allow, True
        self._like, self._lengths = like, None
        if isinstance(subject.loss_fn, OverTime):
            self._lengths = ChunkLengths(subject, target, None if like is None else like._lengths)
        self._made: dict[tuple[object, ...], list[Search]] = {}
        self._searches = self._searches_for(
            None if self._lengths is None else self._lengths.chunks_of(None, splits=False)
        )
        for search, known in zip(self._searches, times or (), strict=False):
            search.times = known
        self._least_searches, self._budget = self._searches, budget
        self._usable = self._usable_of(budget)

    def _searches_for(self, chunks: InChunks | None) -> list[Search]:
        """A search at each precision, of a loss over time in chunks of a length."""
        key = () if chunks is None else chunks.key
        if key not in self._made:
            subject, kind = self.subject, CoupledSearch if isinstance(self.subject.loss_fn, Coupled) else Search
            if chunks is not None:
                subject, kind = replace(subject, loss_fn=chunks), ChunkSearch
            with random_state_kept(subject.parameters):
                precisions = subject.at_precisions(self._allow)
                self._made[key] = [kind(one, self.target, self._allow, name) for one, name in precisions]
            others = [] if self._like is None else self._like._made.get(key, [])
            for search, other in zip(self._made[key], others, strict=False):
                search.share(other)
        return self._made[key]

    def _usable_of(self, budget: int) -> int:
        first = self._searches[0]
        varies, replays = first.profiles.varies, first.held is not None
        return usable_bytes(budget, self.target, first.confidence, varies=varies, replays=replays)

    @property
    def others(self) -> int:
        """The bytes on the device that are not the step's, as far as that is known."""
        held = self._searches[0].held
        return 0 if held is None else held.others

    @property
    def times(self) -> list[Times | None]:
        """What was measured, for each precision; nothing of a loss over time, where times depend on the length."""
        return [] if self._lengths is not None else [search.times for search in self._searches]

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none, to let go of the last one."""
        self.subject.attend(splittable)
        for search in itertools.chain(*self._made.values()):
            search.attend(splittable)
        if self._lengths is not None:
            self._lengths.forget()

    def outgrown_parts(self, splittable: Splittable, limit: float | None, row: PlanRow) -> str:
        """Says which micro-batch of raw samples would need more than the budget; empty if none would."""
        self.attend(splittable)
        searches = self._searches
        if self._lengths is not None:
            searches = self._searches_for(self._lengths.chunks_of(row.chunk_length, splits=row.micro_batches > 1))
        search = next(search for search in searches if search.autocast == row.autocast)
        row = replace(row, micro_batch_size=limit or 0)
        with random_state_kept(self.subject.parameters):
            return search.outgrown_parts(splittable.plan(limit, oversized="alone"), row, self._usable)

    def plan(self, budget: int, *, race: bool = True) -> Plan:
        """Finds the fastest way within a budget.

        Returns:
            The plan.

        Raises:
            DoesNotFit: nothing does; it says how many bytes the smallest configuration needs and what holds them.
        """
        return self._stable(lambda: self._planned(budget, race), budget)

    def _stable(self, search: Callable[[], T], budget: int) -> T:
        """What a search finds once nothing new is found out about the step, of which nothing stays."""
        with random_state_kept(self.subject.parameters), python_state_kept(self.subject):
            try:
                return until_stable(self._known, self._forget, search)
            except NothingRuns as error:
                beside, why = self.subject.bytes_beside, why_whole(self.subject)
                raise stopped(error.needed, budget, self._usable_of, beside, why) from None

    def _known(self) -> tuple[object, ...]:
        return tuple(search.known for search in itertools.chain(*self._made.values()))

    def _forget(self) -> None:
        for search in itertools.chain(*self._made.values()):
            search.forget()

    def _planned(self, budget: int, race: bool) -> Plan:
        self._may_try = race
        finalists, rows = list[Finalist](), list[Row]()
        for searches in self._all_searches(budget):
            self._searches = searches
            usable = self._look_within(searches, budget)
            if not self._searches[0].holds_update(usable):
                continue
            for search in searches:
                search.take_times(usable, self._patience / 2)
            rows = self._rows(usable)
            finalists = self._finalists(rows, usable)
            while not finalists and self._with_chunks():
                rows = self._rows(usable)
                finalists = self._finalists(rows, usable)
            if finalists:
                break
        else:
            finalists = [self._smallest()]
            if finalists[0][1].needed_bytes > usable:
                raise self._does_not_fit(finalists[0], budget)
        ranked = self._raced(finalists, rows, usable) if race else finalists
        plan = self._plan(ranked, budget)
        logger.info("planned: %s", plan)
        return plan

    def _all_searches(self, budget: int) -> list[list[Search]]:
        """The searches that are gone through until something fits: a loss over time in shorter and shorter chunks."""
        self._budget = budget
        if self._lengths is None:
            return [self._searches]
        found = [self._searches_for(chunks) for chunks in self._lengths.within(budget)]
        self._least_searches = found[-1]
        return found

    def _look_within(self, searches: Sequence[Search], budget: int) -> int:
        """Begins some searches; gives the bytes that a plan may take, of which more is known then."""
        held = held_on(self.subject, self.target)
        for search in searches:
            search.held = held
            search.look_within(self._usable_of(budget), budget)
        self._usable = self._usable_of(budget)
        for search in searches:
            search.limit = self._usable
        return self._usable

    def _rows(self, budget: int) -> list[Row]:
        rows = [(search, row) for search in self._searches for row in search.rows(budget)]
        is_plain = rows and any(
            row.micro_batches == self._searches[0].fewest and not row.optimizations for _, row in rows
        )
        may_be_faster = self.target.is_present and self._searches[0].has_large_head  # in chunks, which is measured
        if (not is_plain or may_be_faster) and len(self._searches[0].recipes) == 1 and self._with_chunks():
            return [(search, row) for search in self._searches for row in search.rows(budget)]
        return rows

    def _with_chunks(self, searches: Sequence[Search] | None = None) -> bool:
        added = [search.add_chunks() for search in searches or self._searches]
        return any(added)

    def _finalists(self, rows: list[Row], budget: int) -> list[Finalist]:
        """The fastest rows that fit, each traced as it would run; those that are raced differ by more than a little."""
        found: list[Finalist] = []
        by_row = {id(row): search for search, row in rows}
        for row in sorted_rows(row for _, row in rows):
            if len(found) == (_FINALISTS if self.target.is_present else 1) or (found and is_far(row, found[0][1])):
                break
            if not any(is_near(row, other) for _, other, _ in found):
                found += self._finalist(by_row[id(row)], row, budget)
        return found

    def _finalist(self, search: Search, row: PlanRow, budget: int) -> list[Finalist]:
        """A row as it would run; with more memory optimizations if a trace showed more bytes than were predicted."""
        wanted: PlanRow | None = row
        goal = budget
        for _ in range(_ATTEMPTS):
            if wanted is None:
                break
            try:
                exact, peak = search.traced(wanted)
            except NotRecomputable as error:
                logger.info("%s is not recomputed: %s", error.block, error)
                search.exclude(error.block)
            except (AnyBatchError, TooLarge) as error:
                logger.info("not taken: %s (%s)", wanted, error)
                break
            else:
                if exact.needed_bytes <= budget:
                    return [(search, exact, peak)]
                goal -= exact.needed_bytes - budget
            wanted = search.row(Recipe.of(row).plain, search.splitting_of(row), goal)  # with more of them
        return []

    def _raced(self, finalists: list[Finalist], rows: list[Row], budget: int) -> list[Finalist]:
        """The finalists by their measured times; as they are where nothing can be measured."""
        expected = sum((row.seconds or 0.0) / row.micro_batches for _, row, _ in finalists)
        if not self.target.is_present or not self._searches[0].may_race or expected * 2 > self._patience:
            return finalists
        if len(finalists) < 2 and not neighbours(finalists[0][1], rows, [finalists[0][1]]):
            return finalists

        def trace(search: Search, row: PlanRow) -> list[Finalist]:
            return self._finalist(search, row, budget)

        return raced(finalists, rows, trace, lambda search, row: search.timed(row), self._patience / 2)

    def _smallest(self) -> Finalist:
        """The way with the least memory, with the loss in chunks as far as that helps."""
        searches = self._least_searches
        if searches is not self._searches:
            self._look_within(searches, self._budget)
        while any(search.is_bound_by_loss() for search in searches) and self._with_chunks(searches):
            pass
        return min(((search, *search.least()) for search in searches), key=lambda one: one[1].needed_bytes)

    def least_budget(self, budget: int) -> int:
        """The smallest budget that a plan can be made for."""

        def found() -> int:
            self._searches = self._all_searches(budget)[-1]
            self._look_within(self._searches, budget)
            return self._least_budget()

        try:
            return self._stable(found, budget)
        except DoesNotFit as error:
            return error.needed or 0

    def _least_budget(self) -> int:
        """The smallest budget that a plan can be made for, which is what ``DoesNotFit`` asks for."""
        try:
            return self._budget_for(self._smallest()[1])
        except AnyBatchError as error:
            logger.info("the smallest configuration can't be traced: %s", error)
            rows = [search.smallest() for search in self._least_searches]
            return self._budget_for(min(rows, key=lambda row: row.needed_bytes))

    def _budget_for(self, row: PlanRow) -> int:
        """The smallest budget in which the way with the least memory is found."""
        taken = max(search.profiles.taken for search in self._least_searches)  # without which there is no plan
        beside = self.subject.bytes_beside
        return max(least_budget(row.needed_bytes, self._usable_of, beside), taken + beside)

    def _does_not_fit(self, smallest: Finalist, budget: int) -> Exception:
        search, row, peak = smallest
        beside, needed = self.subject.bytes_beside, self._budget_for(row)
        if not peak.by_category:  # it was run and stopped, so nobody knows what it would take in the end
            reasons = f"{why_whole(self.subject)}{search.hint(row, peak)}".strip()
            return stopped(row.peak_bytes, budget, self._usable_of, beside, reasons)
        return does_not_fit(
            row, peak, budget, needed, self._usable_of, search.shares(row), beside,
            lambda holders: f"{search.hint(row, peak)} {self._remedies(holders, needed, budget + beside, peak)}",
        )  # fmt: skip

    def _remedies(self, holders: Sequence[ModuleShare], needed: int, budget: int, peak: Peak) -> str:
        def least(subject: Subject) -> int:
            same = subject.optimizers is not self.subject.optimizers  # nothing else differs then
            planner = type(self)(subject, self.target, allow=self._allow, like=self if same else None)
            return planner.least_budget(max(budget - subject.bytes_beside, 0))

        may_try = self._may_try and self._searches[0].is_fake  # else steps would run for real
        activations = peak.by_category.get(ACTIVATIONS, 0)
        return what_helps(self.subject, holders, needed, budget, activations, least if may_try else None)

    def _plan(self, ranked: list[Finalist], budget: int) -> Plan:
        search, row, peak = ranked[0]
        known = {_configuration(one) for _, one, _ in ranked}
        front = ((t, r) for t in self._searches for r in t.front() if _configuration(r) not in known)
        alternatives = pareto(t.finished(r) for t, r in (*(one[:2] for one in ranked), *front))
        return Plan(
            chosen=search.finished(row),
            alternatives=tuple(alternatives),
            budget=budget,
            samples=self.subject.splittable.rows,
            device=self.target.name,
            whole_bytes=search.whole_bytes(),
            smallest_bytes=self._least_budget(),
            at_peak=peak.by_category,
            binding=binding_of(peak, search.hint(row, peak), search.floor_size(row)),
            modules=tuple(search.shares(row)),
            relative_time=not self.target.is_present,
            shapes=shapes_of(self.subject),
            copies_batch=bool(self.subject.writes_batch),
            fingerprint=fingerprint_of(replace(search.subject, loss_fn=self.subject.loss_fn), self.target),
        )


def _configuration(row: PlanRow) -> PlanRow:
    """A row without what is predicted about it."""
    return replace(row, peak_bytes=0, reserved_bytes=0, seconds=None, confidence="predicted")


def until_stable(known: Callable[[], object], forget: Callable[[], None], search: Callable[[], T]) -> T:
    """Searches until nothing new is found out about the step while that goes on.

    A step may run other operations with other micro-batches, or turn out not to run on fake tensors, when a search is
    half done. It then knows less than it thought, and begins again with sizes that are traced by themselves.

    Args:
        known: gives what was found out so far.
        forget: lets go of what was solved by traces that are not to be trusted any more.
        search: gives what is looked for.

    Raises:
        LossError: the step differs from one time to the next in a way that no search gets along with.
    """
    while True:
        before = known()
        try:
            return search()
        except (NotAligned, TooLarge) as error:
            if before == known():
                raise LossError(
                    f"the step can't be planned, since it runs other operations from one time to the next; got: "
                    f"{error}. Expected operations that follow from the samples of a micro-batch. Take the branch or "
                    "loop that depends on values out of the loss or the metrics, or give micro_batch_size= instead of "
                    "memory="
                ) from error
            logger.info("searching again: %s", error)
        forget()
