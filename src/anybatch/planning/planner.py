"""Finds the fastest configuration of a step within a budget of memory."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from anybatch.batch.batches import Splittable
from anybatch.errors import AnyBatchError, DoesNotFit, LossError
from anybatch.loss.coupling import Coupled
from anybatch.loss.sequence import OverTime
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.planning.advice import Room, binding_of, does_not_fit, stopped, what_helps
from anybatch.planning.coupledsearch import CoupledSearch
from anybatch.planning.curve import NotAligned, Peak
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.fingerprints import fingerprint_of, shapes_of
from anybatch.planning.memorytrace import NotFake
from anybatch.planning.overtimesearch import ChunkSearch
from anybatch.planning.predictor import NothingRuns, TooLarge
from anybatch.planning.recipe import Recipe
from anybatch.planning.reserved import held_on
from anybatch.planning.running import left_as_it_was, random_state_kept
from anybatch.planning.search import Search, pareto, sorted_rows
from anybatch.planning.subjects import Behaviour, Subject
from anybatch.planning.timing import Finalist, Times, is_far, is_near, neighbours, raced
from anybatch.records.memory import ACTIVATIONS
from anybatch.records.plans import ModuleShare, Plan, PlanRow
from anybatch.update.transaction import Failure

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
        times: what was measured before; ``None`` to measure.
        budget: bytes, for a plan that was made before.
        like: the planner of a step that differs in its optimizers only, whose traces are good here, too.
    """

    def __init__(
        self,
        subject: Subject,
        target: Target,
        *,
        allow: Sequence[str] = OPTIMIZATIONS,
        patience: float = 1.5,
        times: Mapping[Recipe, Times] | None = None,
        budget: int = 0,
        like: "Planner | None" = None,
    ) -> None:
        self.subject = subject
        self.target = target
        self.rows = subject.splittable.rows  # of the logical batch that is planned for
        self._patience, self._allow, self._may_try = patience, allow, True
        kinds: dict[type, type[Search]] = {OverTime: ChunkSearch, Coupled: CoupledSearch}
        kind = next((search for loss, search in kinds.items() if isinstance(subject.loss_fn, loss)), Search)
        with random_state_kept(subject):
            self._search = kind(subject, target, allow)
        self._search.times.update(times or {})
        if like is not None:
            self._search.profiles.share(like._search.profiles)
        self._least = self._search.base
        self._budget = budget
        self._usable = self._usable_of(budget)

    def _usable_of(self, budget: int) -> int:
        search = self._search
        varies, replays = search.profiles.varies, search.held is not None
        return usable_bytes(budget, self.target, search.confidence, varies=varies, replays=replays)

    @property
    def others(self) -> int:
        """The bytes on the device that are not the step's, as far as that is known."""
        held = self._search.held
        return 0 if held is None else held.others

    @property
    def times(self) -> Mapping[Recipe, Times]:
        """What was measured."""
        return self._search.times

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none, to let go of the last one."""
        self.subject.attend(splittable)
        self._search.attend(splittable)

    def outgrown_parts(self, splittable: Splittable, limit: float | None, row: PlanRow) -> str:
        """Says which micro-batch of raw samples would need more than the budget; empty if none would."""
        self.attend(splittable)
        search = self._search
        search.begin(search.base_of(row))
        row, parts = replace(row, micro_batch_size=limit or 0), splittable.plan(limit, oversized="alone")
        if limit is not None and (most := max(part.cost for part in parts)) > limit:
            return f"a sample costs {most:g}, and a micro-batch may cost {limit:g}"
        with random_state_kept(self.subject):  # at each step, so no look for all state in Python
            return search.outgrown_parts(parts, row, self._usable)

    def fits(self, row: PlanRow) -> bool:
        """Whether a row fits into the budget as the step runs now, which is traced."""

        def found() -> bool:
            self._begin(self._search.base_of(row))
            self._search.turn_to(row.micro_batch_size)
            return self._search.traced(row)[0].needed_bytes <= self._usable

        self._may_try = False
        try:
            return self._stable(found)
        except (AnyBatchError, TooLarge):
            return False
        except Exception as error:  # noqa: BLE001 - the loss may run out of memory by itself: the step will show it
            logger.info("can't tell whether the plan still fits: %s", error)
            Failure(error).release()
            return True

    def plan(self, budget: int, *, race: bool = True) -> Plan:
        """Finds the fastest way within a budget.

        Returns:
            The plan.

        Raises:
            DoesNotFit: nothing does; it says how many bytes the smallest configuration needs and what holds them.
        """
        self._may_try, self._budget = race, budget
        found = self._stable(lambda: self._planned(race))
        if self._search.profiles.is_fake:
            return found
        return replace(found, smallest_bytes=min(budget, self._confirmed(found.smallest_bytes)))

    def _least_for_real(self) -> int | None:
        """The smallest budget in which the smallest micro-batches run for real; ``None`` if nobody knows."""
        room = self._room
        runs = (max(room.needed(needed), taken + room.beside) for needed, taken in self._search.smallest_runs())
        return min(runs, default=None)

    def _confirmed(self, least: int) -> int:
        """The smallest budget of a step that runs for real, of which fewer sizes may run within less."""
        for _ in range(_ATTEMPTS):
            unknown = replace(self.subject, behaviour=Behaviour())  # as for the first plan of a process
            wanted = type(self)(unknown, self.target, allow=self._allow).least_budget(least)
            if wanted <= least:
                break
            least = wanted
        return least

    def least_budget(self, budget: int) -> int:
        """The smallest budget that a plan can be made for."""
        self._budget, self._may_try = budget, False

        def found() -> int:
            self._begin(self._bases()[-1])
            return self._least_budget()

        try:
            return self._stable(found)
        except DoesNotFit as error:
            return error.needed or 0

    def _stable(self, search: Callable[[], T]) -> T:
        """What a search finds once nothing new is found out about the step, of which nothing stays."""
        profiles = self._search.profiles
        with left_as_it_was(self.subject):
            try:
                return until_stable(lambda: profiles.known, self._search.forget, search)
            except NothingRuns as error:
                needed = profiles.needed_by(error.needed)
            raise stopped(needed, self._least_for_real(), self._room, self._remedies)

    @property
    def _room(self) -> Room:
        return Room(self._budget, self.subject.bytes_beside, self._usable_of)

    def _planned(self, race: bool) -> Plan:
        search = self._search
        for base in self._bases():
            self._begin(base)
            search.look_at_whole()
            if not search.holds_update(self._usable):
                continue
            search.take_times(self._usable, self._patience / 2)
            rows = search.rows(self._usable)
            finalists = self._finalists(rows)
            while not finalists and search.add_chunks():
                rows = search.rows(self._usable)
                finalists = self._finalists(rows)
            if finalists:
                break
        else:
            finalists, rows = [self._smallest()], []
            if finalists[0][0].needed_bytes > self._usable:
                raise self._does_not_fit(*finalists[0])
        plan = self._plan(self._raced(finalists, rows) if race else finalists)
        logger.info("planned: %s", plan)
        return plan

    def _bases(self) -> list[Recipe]:
        """What is gone through until something fits; the last holds the least."""
        found = self._search.bases(self._budget)
        self._least = found[-1]
        return found

    def _begin(self, base: Recipe) -> None:
        """Begins to search; the bytes that a plan may take are known better then."""
        search = self._search
        search.begin(base)
        search.held, search.profiles.is_last = held_on(self.subject, self.target), base == self._least
        search.look_within(self._usable_of(self._budget), self._budget)
        self._usable = search.limit = self._usable_of(self._budget)

    def _finalists(self, rows: list[PlanRow]) -> list[Finalist]:
        """The fastest rows that fit, each traced as it would run; those that are raced differ by more than a little."""
        found: list[Finalist] = []
        for row in sorted_rows(rows):
            if len(found) == (_FINALISTS if self.target.is_present else 1) or (found and is_far(row, found[0][0])):
                break
            if not any(is_near(row, other) for other, _ in found):
                found += self._finalist(row)
        return found

    def _finalist(self, row: PlanRow) -> list[Finalist]:
        """A row as it would run; with more memory optimizations if a trace showed more bytes than were predicted."""
        search, wanted, goal = self._search, row, self._usable
        for _ in range(_ATTEMPTS):
            try:
                exact, peak = search.traced(wanted)
            except (AnyBatchError, TooLarge) as error:
                if isinstance(error, NotRecomputable):
                    raise
                logger.info("not taken: %s (%s)", wanted, error)
                return []
            if exact.needed_bytes <= self._usable:
                return [(exact, peak)]
            goal -= exact.needed_bytes - self._usable
            smaller = search.row(search.recipe_of(row).plain, search.splitting_of(row), goal)  # with more of them
            if smaller is None:
                return []
            wanted = smaller
        return []

    def _raced(self, finalists: list[Finalist], rows: list[PlanRow]) -> list[Finalist]:
        """The finalists by their measured times; as they are where nothing can be measured."""
        expected = sum((row.seconds or 0.0) / row.micro_batches for row, _ in finalists)
        if not self.target.is_present or not self._search.may_race or expected * 2 > self._patience:
            return finalists
        if len(finalists) < 2 and not neighbours(finalists[0][0], rows, [finalists[0][0]]):
            return finalists
        return raced(finalists, rows, self._finalist, self._search.timed, self._patience / 2)

    def _smallest(self) -> Finalist:
        """The way with the least memory, with the loss in chunks as far as that helps."""
        if self._search.base != self._least:
            self._begin(self._least)
        while self._search.is_bound_by_loss() and self._search.add_chunks():
            pass
        return self._search.least()

    def _least_budget(self) -> int:
        """The smallest budget that a plan can be made for, which is what ``DoesNotFit`` asks for."""
        try:
            return self._room.needed(self._smallest()[0].needed_bytes)
        except (AnyBatchError, TooLarge) as error:
            if isinstance(error, NotRecomputable):
                raise
            logger.info("the smallest configuration can't be traced: %s", error)
            return self._room.needed(self._search.smallest().needed_bytes)

    def _does_not_fit(self, row: PlanRow, peak: Peak) -> Exception:
        room, hint = self._room, self._search.hint(row, peak)
        if not peak.by_category:  # it was run and stopped, so nobody knows what it would take in the end
            return stopped(row.peak_bytes, None, room, self._remedies, hint.strip())
        needed = room.needed(row.needed_bytes)
        return does_not_fit(
            row, peak, room, needed, self._search.shares(row),
            lambda holders: f"{hint} {self._remedies(needed, holders, peak.by_category.get(ACTIVATIONS, 0))}",
        )  # fmt: skip

    def _remedies(self, needed: int, holders: Sequence[ModuleShare] = (), activations: int = 0) -> str:
        budget = self._room.budget + self._room.beside

        def least(subject: Subject) -> int:
            same = subject.optimizers is not self.subject.optimizers  # nothing else differs then
            planner = type(self)(subject, self.target, allow=self._allow, like=self if same else None)
            return planner.least_budget(max(budget - subject.bytes_beside, 0))

        may_try = self._may_try and self._search.profiles.is_fake  # else steps would run for real, beyond the budget
        return what_helps(self.subject, holders, needed, budget, activations, least if may_try else None)

    def _plan(self, ranked: list[Finalist]) -> Plan:
        row, peak = ranked[0]
        search = self._search
        known = {_configuration(one) for one, _ in ranked}
        front = (one for one in search.front() if _configuration(one) not in known)
        alternatives = pareto(search.finished(one) for one in (*(one for one, _ in ranked), *front))
        whole = search.whole_bytes(row.autocast)
        binding = binding_of(peak, search.hint(row, peak), search.floor_size(row))
        chosen, modules = search.finished(row), search.shares(row)
        return Plan(
            chosen=chosen,
            alternatives=tuple(alternatives),
            budget=self._budget,
            samples=self.subject.splittable.rows,
            device=self.target.name,
            whole_bytes=whole,
            smallest_bytes=self._least_budget(),
            at_peak=peak.by_category,
            binding=binding,
            modules=tuple(modules),
            relative_time=not self.target.is_present,
            shapes=shapes_of(self.subject),
            copies_batch=bool(self.subject.behaviour.writes_batch),
            fingerprint=fingerprint_of(
                replace(self.subject, settings=self.subject.settings_at(row.autocast)), self.target
            ),
        )


def _configuration(row: PlanRow) -> PlanRow:
    """A row without what is predicted about it."""
    return replace(row, peak_bytes=0, reserved_bytes=0, seconds=None, confidence="predicted")


def until_stable(known: Callable[[], object], forget: Callable[[], None], search: Callable[[], T]) -> T:
    """Searches until nothing new is found out about the step while that goes on.

    A step may run other operations with other micro-batches, have a block that can't be recomputed, or turn out not to
    run on fake tensors, when a search is half done. It then knows less than it thought, forgets what was solved by
    traces that are not to be trusted, and begins again without the block, for real, or with sizes that are traced by
    themselves. ``known`` gives what was found out so far.
    """
    while True:
        before = known()
        try:
            return search()
        except NotRecomputable as error:
            if before == known():
                raise
            logger.info("searching again: %s is not recomputed: %s", error.block, error)
        except (NotAligned, NotFake, TooLarge) as error:
            if before == known():
                raise LossError(
                    f"the step can't be planned, since it runs different operations each time; got: {error}. "
                    "Expected operations determined by the samples of a micro-batch. Remove value-dependent "
                    "branches or loops from the loss or the metrics, or pass micro_batch_size= instead of memory="
                ) from error
            logger.info("searching again: %s", error)
        forget()
