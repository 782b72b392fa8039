"""Finds the fastest way to run a step within a budget of memory."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from anybatch.batch.batches import Splittable
from anybatch.errors import AnyBatchError, DoesNotFit, LossError
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.planning.advice import binding_of, does_not_fit, least_budget, stopped, what_helps, why_whole
from anybatch.planning.curve import NotAligned, Peak, Profile
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.fingerprints import fingerprint_of, shapes_of
from anybatch.planning.optimizer import history_of
from anybatch.planning.predictor import NothingRuns, Predictor, TooLarge
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import python_state_kept, random_state_kept
from anybatch.planning.search import Search, Splitting, pareto, sorted_rows
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import Finalist, Row, Times, is_far, is_near, neighbours, raced
from anybatch.records.plans import ModuleShare, Plan, PlanRow
from anybatch.tensors.modules import modules_of

logger = logging.getLogger(__name__)

LEVERS = ("recompute", "offload", "loss_chunks")
_FINALISTS = 3
_ATTEMPTS = 4


class Planner:
    """Plans a step for any budget; what was traced and measured for one is there for the next.

    Args:
        subject: what is planned.
        target: the device.
        allow: the levers that may be used, and precisions such as ``"bfloat16"``.
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
        patience: float = 1.5,
        times: Sequence[Times | None] | None = None,
        budget: int = 0,
    ) -> None:
        self.subject = subject
        self.target = target
        self.rows = subject.splittable.rows
        self._patience, self._allow, self._may_try = patience, allow, True
        with random_state_kept(subject.parameters):
            self._searches = [Search(one, target, allow, name) for one, name in subject.at_precisions(allow)]
        for search, known in zip(self._searches, times or (), strict=False):
            search.times = known
        self._usable = self._usable_of(budget)

    def _usable_of(self, budget: int) -> int:
        profiles = self._searches[0].profiles
        return usable_bytes(budget, self.target, profiles.confidence, varies=profiles.varies)

    @property
    def times(self) -> list[Times | None]:
        """What was measured, for each precision."""
        return [search.times for search in self._searches]

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none, to let go of the last one."""
        for search in self._searches:
            search.subject.attend(splittable)
            search.profiles.forget_lengths()

    def outgrown_parts(self, splittable: Splittable, limit: float | None, row: PlanRow) -> str:
        """Says which micro-batch of raw samples would need more than the budget; empty if none would."""
        search = next(search for search in self._searches if search.autocast == row.autocast)
        self.attend(splittable)
        with random_state_kept(self.subject.parameters):
            return search.outgrown_parts(splittable.plan(limit, oversized="alone"), row, self._usable)

    def plan(self, budget: int, *, race: bool = True) -> Plan:
        """Finds the fastest way within a budget.

        Args:
            budget: bytes.
            race: whether the best ways are measured against each other where the device is at hand.

        Returns:
            The plan.

        Raises:
            DoesNotFit: nothing does; it says how many bytes the smallest way needs and what holds them.
        """
        with random_state_kept(self.subject.parameters), python_state_kept(self.subject):
            profiles = [search.profiles for search in self._searches]
            try:
                return settled(profiles, lambda: self._planned(budget, race), self._forget)
            except NothingRuns as error:
                raise self._stopped(error, budget) from None

    def _forget(self) -> None:
        for search in self._searches:
            search.forget()

    def _planned(self, budget: int, race: bool) -> Plan:
        self._may_try = race
        usable = self._usable = self._usable_of(budget)
        for search in self._searches:
            search.look_within(usable, budget)
        usable = self._usable = self._usable_of(budget)  # it is known now how far traces may be trusted
        self._check_update(usable, budget)
        for search in self._searches:
            search.take_times(usable, self._patience / 2)
        rows = self._rows(usable)
        finalists = self._finalists(rows, usable)
        while not finalists:
            if self._with_chunks():
                rows = self._rows(usable)
                finalists = self._finalists(rows, usable)
                continue
            last = self._smallest()
            if last[1].peak_bytes > usable:
                raise self._does_not_fit(budget)
            finalists = [last]
        ranked = self._raced(finalists, rows, usable) if race else finalists
        search, row, profile = ranked[0]
        plan = self._plan(search, row, profile, budget, [other for _, other, _ in ranked[1:]])
        logger.info("planned: %s", plan)
        return plan

    def _rows(self, budget: int) -> list[Row]:
        rows = [(search, row) for search in self._searches for row in search.rows(budget)]
        is_plain = rows and any(row.micro_batches == self._searches[0].fewest and not row.levers for _, row in rows)
        may_be_faster = self.target.is_present and self._searches[0].has_large_head  # in chunks, which is measured
        if (not is_plain or may_be_faster) and len(self._searches[0].recipes) == 1 and self._with_chunks():
            return [(search, row) for search in self._searches for row in search.rows(budget)]
        return rows

    def _with_chunks(self) -> bool:
        added = [search.add_chunks() for search in self._searches]
        return any(added)

    def _add_chunks_that_help(self) -> None:
        """Takes the loss in ever smaller chunks into the search, as long as it is what the smallest way needs most."""
        while any(search.is_bound_by_loss() for search in self._searches) and self._with_chunks():
            pass

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
        traced = self._traced_within(search, row, budget)
        return [] if traced is None else [(search, *traced)]

    def _traced_within(self, search: Search, row: PlanRow, budget: int) -> tuple[PlanRow, Profile] | None:
        """A row as it would run; with more traded if a trace showed more bytes than were predicted."""
        wanted: PlanRow | None = row
        goal = budget
        for _ in range(_ATTEMPTS):
            if wanted is None:
                return None
            try:
                exact, profile = search.traced(wanted)
            except NotRecomputable as error:
                logger.info("%s is left as it is: %s", error.block, error)
                search.exclude(error.block)
            except (AnyBatchError, TooLarge) as error:
                logger.info("not taken: %s (%s)", wanted, error)
                return None
            else:
                if exact.peak_bytes <= budget:
                    return exact, profile
                goal -= exact.peak_bytes - budget
            wanted = self._smaller(search, row, goal)
        return None

    def _smaller(self, search: Search, row: PlanRow, budget: int) -> PlanRow | None:
        """The same splitting with more traded, since a trace showed more bytes than were predicted."""
        return search.row(Recipe.of(row).plain, search.splitting_of(row), budget)

    def _raced(self, finalists: list[Finalist], rows: list[Row], budget: int) -> list[Finalist]:
        """The finalists by their measured times; as they are where nothing can be measured."""
        expected = sum((row.seconds or 0.0) / row.micro_batches for _, row, _ in finalists)
        if not self.target.is_present or expected * 2 > self._patience:
            return finalists
        if len(finalists) < 2 and not neighbours(finalists[0][1], rows, [finalists[0][1]]):
            return finalists

        def trace(search: Search, row: PlanRow) -> list[Finalist]:
            return self._finalist(search, row, budget)

        return raced(finalists, rows, trace, lambda search, row: search.timed(row), self._patience / 2)

    def _check_update(self, usable: int, budget: int) -> None:
        search = self._searches[0]
        for splitting in reversed(search.splittings):  # of which some keep more losses than others
            profile, size = search.profile(Recipe(), splitting)
            if profile.update_peak(size, splitting.count) <= usable:
                return
        raise self._does_not_fit(budget)

    def _smallest(self) -> tuple[Search, PlanRow, Profile]:
        """The way with the least memory, traced as it would run."""
        found: list[Finalist] = []
        while not found:
            search, smallest = min(((t, t.smallest()) for t in self._searches), key=lambda pair: pair[1].peak_bytes)
            try:
                found.append((search, *search.traced(smallest)))
            except NotRecomputable as error:
                if not search.exclude(error.block):
                    raise
                logger.info("%s is left as it is: %s", error.block, error)
        everything = search.everything()
        if everything is not None:
            with contextlib.suppress(AnyBatchError):  # one of the blocks can't be recomputed
                found.append((search, *search.traced(everything)))
        return min(found, key=lambda one: one[1].peak_bytes)

    def least_budget(self, budget: int) -> int:
        """The smallest budget that a plan can be made for.

        Args:
            budget: bytes that micro-batches which have to run for real stay within.
        """

        def found() -> int:
            for search in self._searches:
                search.look_within(self._usable_of(budget), budget)
            return self._least_budget()

        with random_state_kept(self.subject.parameters), python_state_kept(self.subject):
            try:
                return settled([search.profiles for search in self._searches], found, self._forget)
            except NothingRuns as error:
                return self._stopped(error, budget).needed or 0

    def _stopped(self, error: NothingRuns, budget: int) -> DoesNotFit:
        return stopped(error.needed, budget, self._usable_of, self.subject.bytes_beside, why_whole(self.subject))

    def _least_budget(self) -> int:
        """The smallest budget that a plan can be made for, which is what ``DoesNotFit`` asks for."""
        self._add_chunks_that_help()
        try:
            peak = self._smallest()[1].peak_bytes
        except AnyBatchError as error:
            logger.info("the smallest way can't be traced: %s", error)
            peak = min(search.smallest().peak_bytes for search in self._searches)
        taken = max(search.profiles.taken for search in self._searches)  # by real runs, without which there is no plan
        beside = self.subject.bytes_beside
        return max(least_budget(peak, self._usable_of, beside), taken + beside)

    def _does_not_fit(self, budget: int) -> Exception:
        self._add_chunks_that_help()
        search, exact, profile = self._smallest()
        splitting = search.splitting_of(exact)
        peak = profile.peak_in_detail(profile.size, splitting.count)
        shares = self._shares(search, splitting)
        beside = self.subject.bytes_beside
        return does_not_fit(
            exact, budget, self._usable_of, profile.update_peak(profile.size, splitting.count), peak.by_category,
            shares, beside, lambda holders, needed: self._remedies(holders, needed, budget + beside),
            is_count_largest=profile.is_count_largest(),
            history=history_of(self.subject),
        )  # fmt: skip

    def _remedies(self, holders: Sequence[str], needed: int, budget: int) -> str:
        def least(subject: Subject) -> int:
            planner = type(self)(subject, self.target, allow=self._allow)
            return planner.least_budget(max(budget - subject.bytes_beside, 0))

        may_try = self._may_try and self._searches[0].profiles.is_fake  # else steps would run for real
        return what_helps(self.subject, holders, needed, budget, least if may_try else None)

    def _shares(self, search: Search, splitting: Splitting) -> list[ModuleShare]:
        profile, size = search.profile(Recipe(), splitting)
        times = search.times
        cost = search.worst(Recipe(), splitting).cost

        def seconds(name: str) -> float | None:
            return times.forward(cost, name) if times else None

        return profile.shares(size, splitting.count, self._parameter_bytes, seconds)

    def _parameter_bytes(self, block: str) -> int:
        module = self.subject.model.get_submodule(block)
        return sum(
            p.numel() * p.element_size()
            for one in modules_of(module)
            for p in one._parameters.values()
            if p is not None
        )

    def _plan(self, search: Search, row: PlanRow, profile: Profile, budget: int, others: list[PlanRow]) -> Plan:
        splitting = search.splitting_of(row)
        peak: Peak = profile.peak_in_detail(profile.size, splitting.count)
        known = {_configuration(one) for one in (row, *others)}
        front = (r for t in self._searches for r in t.front() if _configuration(r) not in known)
        alternatives = pareto([row, *others, *front])
        return Plan(
            chosen=row,
            alternatives=tuple(alternatives),
            budget=budget,
            samples=self.subject.splittable.rows,
            device=self.target.name,
            whole_bytes=search.whole_bytes(),
            smallest_bytes=self._least_budget(),
            at_peak=peak.by_category,
            binding=binding_of(
                peak,
                profile.update_peak(profile.size, splitting.count),
                row,
                search.floor_size(row),
                is_count_largest=profile.is_count_largest(),
                history=history_of(self.subject),
                has_state=profile.update.state > 0,
            ),
            modules=tuple(self._shares(search, splitting)),
            relative_time=not self.target.is_present,
            shapes=shapes_of(self.subject),
            copies_batch=bool(self.subject.writes_batch),
            fingerprint=fingerprint_of(search.subject, self.target),
        )


def _configuration(row: PlanRow) -> PlanRow:
    """A row without what is predicted about it."""
    return replace(row, peak_bytes=0, seconds=None, confidence="predicted")


T = TypeVar("T")


def settled(profiles: Sequence[Predictor], search: Callable[[], T], forget: Callable[[], None]) -> T:
    """Searches until nothing new is found out about the step while that goes on.

    A step may run other operations with other micro-batches, or turn out not to run on fake tensors, when a search is
    half done. It then knows less than it thought, and begins again with sizes that are traced by themselves.

    Raises:
        LossError: the step differs from one time to the next in a way that no search gets along with.
    """
    while True:
        before = [one.known for one in profiles]
        try:
            return search()
        except (NotAligned, TooLarge) as error:
            if before == [one.known for one in profiles]:
                raise LossError(
                    f"the step can't be planned, since it runs other operations from one time to the next; got: "
                    f"{error}. Expected operations that follow from the samples of a micro-batch. Take the branch or "
                    "loop that depends on values out of the loss or the metrics, or give micro_batch_size= instead of "
                    "memory="
                ) from error
            logger.info("searching again: %s", error)
        forget()
