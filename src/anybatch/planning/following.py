"""Keeps a training step within its budget: plans on the first batch, plans again when it has to, and grows back."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from anybatch.accelerators import forget_peaks, is_accelerator, memory_of, release_cache, reserving_at_most
from anybatch.batch.batches import Splittable
from anybatch.errors import BatchError, DoesNotFit, NotSplittable
from anybatch.interception import unobserved
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import InPieces
from anybatch.loss.sequence import OverTime
from anybatch.memory.application import apply_optimizations
from anybatch.memory.offloading import HostPool
from anybatch.parallel.devices import Devices
from anybatch.planning.devices import Target, target_of
from anybatch.planning.entrance import budget_for, refuse_joined
from anybatch.planning.fingerprints import fingerprint_of, outgrown, shapes_of
from anybatch.planning.microbatches import shapes_differ
from anybatch.planning.planner import Planner
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan
from anybatch.tensors.dispatch import without_user_modes
from anybatch.units import format_bytes
from anybatch.update.passes import is_of_split, written_out
from anybatch.update.transaction import OwnSizeLimit, SizeLimit

logger = logging.getLogger(__name__)

_SMALLER = 0.85  # of a plan's peak is what the next one may take after memory ran out
_LONG = 1.0  # second, from which on the time of a plan is logged
_MOST = 16  # plans that are kept
_CONFIRMED = 2  # steps on CUDA until the allocator's own figures are known


class Follower(OwnSizeLimit):
    """The plan that a step follows: the size of its micro-batches, and smaller plans when memory runs out.

    ``memory`` is ``None`` to follow the given plan only, and ``plan`` to make one on the first batch. ``subject_of``
    describes the step for a logical batch.
    """

    def __init__(self, subject_of: Callable[[Splittable], Subject], *, memory: Any, plan: Plan | None) -> None:
        super().__init__(None)
        self.on_plan: Callable[[], None] | None = None  # is called when a plan was made
        self._subject_of = subject_of
        self._memory = memory
        self._planner: Planner | None = None
        self._first = plan
        self._is_checked = self._is_varied = False  # varied: the plan is for a window of batches of several shapes
        self._rows = plan.samples if plan is not None else 0
        self._trained: list[int] = []  # ids of the parameters that were trained in the last batch
        self._covered = frozenset[int]()  # those that the plan in force was made for
        self._confirmed = 0
        self._subject: Subject | None = None  # the step for the logical batch that is there
        self._is_whole = False  # whether batches run whole from now on
        self._pool = HostPool()
        self.has_split = False  # whether a batch went through in micro-batches, so that a refusal comes too late for it
        self.refusal: NotSplittable | None = None  # of a split, because of which the batch is to run again, whole
        self.obstacle: BatchError | None = None  # why parts of a batch can't run, so that none is cut
        # Batches of many short samples and of few long ones may come in turn, and phases that train other parameters.
        self._made: list[tuple[Plan, frozenset[int]]] = []
        self.plan = plan  # in force; ``None`` before the first batch
        if plan is not None:
            self._take(plan)

    may_grow = False
    """Whether sizes change from batch to batch while nothing runs out of memory."""

    def shrink(self, tried: float) -> None:
        """Takes a smaller plan after memory ran out."""
        size = self._smaller_plan()
        super().shrink(tried)
        if size is not None:
            self.value = size

    def relieve(self) -> bool:
        """Takes a smaller plan also where micro-batches have one sample; says whether there is one."""
        size = self._smaller_plan()
        if size is not None:
            self.value = size
        return size is not None

    def resolve(self, largest: float) -> None:
        """Notes a logical batch that went through."""
        self.has_split = self.has_split or (self.plan is not None and self.plan.chosen.micro_batches > 1)
        if not (self.is_on_first_plan and self.value == self.ceiling):
            self._note_quiet(largest)

    def _grow(self, largest: float) -> None:
        """Returns to the first plan; sizes between the two were planned by nobody, so it does not go step by step."""
        if self._first is not None and self.plan is not self._first:
            self.plan = self._first
            if self._subject is not None:
                self._hand_over(self._subject)
            logger.info("no out-of-memory for a while: back to the first plan: %s", self._first)
        self.value = self.ceiling

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets what ``state_dict`` gave."""
        super().load_state_dict(state)
        if state["value"] is not None:
            self.value = state["value"]

    def prepare(self, splittable: Splittable, clear: Callable[[], None]) -> None:
        """Makes sure that there is a plan and that it is good for a logical batch.

        Raises:
            DoesNotFit: nothing fits into the budget.
            PlanMismatch: the given plan was made for something else.
        """
        self._subject = None
        if not splittable.rows:  # of a process that has no samples while others have some
            return
        subject = self._subject = self._subject_of(splittable)
        subject.is_coupled = subject.is_coupled or self._is_whole
        refuse_joined(subject.loss_fn, subject.settings.reducer)
        try:
            with _apart(subject):
                self._prepare(subject, clear)
        finally:
            self._hand_over(subject)

    def _prepare(self, subject: Subject, clear: Callable[[], None]) -> None:
        rows = subject.splittable.rows
        if self.plan is not None and not self._is_checked:
            self._check(subject, self.plan)
        if self._planner is not None and rows == self._planner.rows:
            self._planner.attend(subject.splittable)
        reason = self._reason_to_plan(subject, clear)
        if not reason:
            return
        if self._memory is None:
            logger.warning("the plan may not be enough: %s. Pass memory= so that it is remade", reason)
            self._rows = max(self._rows, rows)
            self._cover(self._covered.union(trained_in(subject)), subject)
            return
        found = None if self.plan is None else self._made_for(subject)
        if found is not None:
            self._return_to(*found, subject)
            return
        if self.plan is not None:
            logger.info("planning again: %s", reason)
        clear()
        began = time.perf_counter()
        self._make(subject)
        if (seconds := time.perf_counter() - began) > _LONG:
            logger.info("a plan was made in %.1f s: %s", seconds, reason)

    def _cover(self, trained: frozenset[int], subject: Subject) -> None:
        self._covered, self._trained = trained, trained_in(subject)

    def _made_for(self, subject: Subject) -> tuple[Plan, frozenset[int]] | None:
        """The latest plan that was made for a batch at least as large as this one in everything, and what it trains.

        Of raw samples nobody knows before they are collated, and of a window of several shapes which are large.
        """
        if subject.splittable.is_collated or shapes_differ(subject.splittable, subject.loss_fn):
            return None
        rows, here, trained = subject.splittable.rows, shapes_of(subject), trained_in(subject)
        for plan, covered in reversed(self._made):
            if rows <= plan.samples and covered.issuperset(trained) and not outgrown(dict(plan.shapes), here):
                return plan, covered
        return None

    def _return_to(self, plan: Plan, covered: frozenset[int], subject: Subject) -> None:
        """Takes a plan that was made for a batch like this one."""
        subject.behaviour = self._planner.subject.behaviour if self._planner is not None else subject.behaviour
        self._planner = self._planner_of(subject, self._budget_of(subject))
        self._first, self._rows = plan, plan.samples
        self._cover(covered, subject)
        self._take(plan)

    def _planner_of(self, subject: Subject, budget: int = 0) -> Planner:
        """Plans a step with what was measured before."""
        known = self._planner.times if self._planner is not None else None
        return Planner(subject, _target(subject), times=known, budget=budget)

    def _budget_of(self, subject: Subject) -> int:
        return budget_for(self._memory, subject, _target(subject))

    def _hand_over(self, subject: Subject, *, halved: bool = False) -> None:
        """Tells the engine what the plan in force says besides the size of micro-batches."""
        if self.plan is None:
            return
        writes = None if self._planner is None else self._planner.subject.behaviour.writes_batch
        subject.splittable.is_copied = self.plan.copies_batch if writes is None else writes
        row, settings = self.plan.chosen, subject.settings
        settings.kept_graphs = 1 if halved and row.kept_graphs is not None else row.kept_graphs
        settings.chunk_length = row.chunk_length

    def release(self) -> None:
        """Lets go of the logical batch, which would stay in memory."""
        self._subject = None
        if self._planner is not None:
            self._planner.attend(None)

    def _check(self, subject: Subject, plan: Plan) -> None:
        found = fingerprint_of(subject, _target(subject))
        if not subject.optimizers:  # the gradient alone, which fits with any
            found["optimizer"] = plan.fingerprint.get("optimizer", "")
        # A plan for one device holds on each of several, but for what it takes to sum over them.
        plan.check_fingerprint({"devices": "1", **found})
        self._is_checked = True
        self._cover(frozenset(trained_in(subject)), subject)
        if self._memory is None:
            return
        budget = self._budget_of(subject)
        if self._planner is None:
            self._planner = self._planner_of(subject, budget)
        if subject.devices is not None and "devices" not in plan.fingerprint:
            self.plan = None
        else:
            self._drop_above(budget, plan)

    def _drop_above(self, budget: int, plan: Plan) -> None:
        """Has a plan made again that was made for more memory than there is now."""
        needed = plan.chosen.needed_bytes
        if needed > budget:
            logger.info("the plan takes %s, and the budget is %s", format_bytes(needed), format_bytes(budget))
            self.plan = None
        elif self._first is not None and self._first.chosen.needed_bytes > budget:
            self._first = plan
            self.ceiling = plan.micro_batch_size

    def _reason_to_plan(self, subject: Subject, clear: Callable[[], None]) -> str:
        splittable = subject.splittable
        if self.plan is None:
            return "there is no plan yet"
        if (trained := trained_in(subject)) != self._trained:
            if more := len(self._covered.union(trained)) - len(self._covered):
                return f"{more} {'parameter is' if more == 1 else 'parameters are'} trained that it was not made for"
            self._trained = trained
        if splittable.rows > self._rows:
            return f"the batch has {splittable.rows} samples, the plan is for {self._rows}"
        if splittable.is_collated:
            return self._outgrown_parts(splittable, clear)
        planned = dict(self.plan.shapes)
        larger = outgrown(planned, shapes_of(subject) if planned else {})
        self._is_varied = self._is_varied or shapes_differ(splittable, subject.loss_fn)
        return larger or (self._outgrown_parts(splittable, clear) if self._is_varied else "")

    def _outgrown_parts(self, splittable: Splittable, clear: Callable[[], None]) -> str:
        if self._planner is None or self.plan is None:
            return ""
        clear()  # micro-batches of a shape that is new may run for real
        return self._planner.outgrown_parts(splittable, self.value, self.plan.chosen)

    def keep_whole(self, refusal: NotSplittable) -> None:
        """Has batches run whole from now on, if they may, since they can't be split."""
        if self._subject is None or not self._may_run_whole(self._subject):
            return
        self._is_whole = True
        self.refusal, self.plan, self._first, self._planner, self._made = refusal, None, None, None, []

    def _may_run_whole(self, subject: Subject) -> bool:
        if self._memory is None or self.has_split or subject.is_coupled or subject.devices is not None:
            return False
        # Pieces have a way of their own to split what does not add up.
        return not (subject.settings.reducer.is_shared or isinstance(subject.loss_fn, InPieces))

    def _make(self, subject: Subject, beside: int = 0) -> None:
        budget, planner = self._budget_of(subject), self._planner_of(subject)
        try:
            self._first = planner.plan(budget - beside)
        except DoesNotFit as error:
            refusal, self.refusal = self.refusal, None
            if refusal is None:
                raise
            self._is_whole, self.obstacle = False, None  # a next batch may fit
            refusal.add_note(f"The whole batch does not fit: {error}")
            raise refusal from None
        except (RuntimeError, ValueError, IndexError) as error:
            if self.refusal is not None:  # the whole batch does not run either
                self.refusal, self.obstacle, self._is_whole = None, None, False
            elif is_of_split(error, subject.splittable) and subject.splits and self._may_run_whole(subject):
                self.obstacle = BatchError(
                    f"{type(subject.model).__name__} can't run a part of this batch alone, as it is split "
                    f"({type(error).__name__}: {error}); anybatch.check(model, loss_fn, batch) tries which leaf "
                    f"must not be split (broadcast=, layout=){written_out(error, subject.splittable)}"
                )
                raise NotSplittable(str(self.obstacle)) from error
            raise
        self.refusal = None
        if is_accelerator(subject.settings.device):
            release_cache()  # what the planner measured left blocks of other sizes
        self._planner = planner
        self._is_varied = shapes_differ(subject.splittable, subject.loss_fn)
        if not self._is_varied:
            self._made = [*self._made[1 - _MOST :], (self._first, frozenset(trained_in(subject)))]
        rows = subject.splittable.rows
        self._rows = max(self._rows, rows) if subject.splittable.is_collated else rows
        self._is_checked = True
        self._cover(frozenset(trained_in(subject)), subject)
        self._confirmed = 0
        self._take(self._first)
        if self.on_plan is not None:
            self.on_plan()

    def _take(self, plan: Plan) -> None:
        self.plan = plan
        self.value = self.ceiling = plan.micro_batch_size

    def _smaller_plan(self) -> float | None:
        """Plans for less than the plan in force takes, since memory ran out with it.

        Gives the size of its micro-batches; ``None`` if there is no smaller plan, so that they are halved.
        """
        self._pool.clear()
        subject = self._subject
        if subject is None:
            return None
        self._hand_over(subject, halved=True)
        if self.plan is None or self._planner is None:
            return None
        is_other = subject.splittable.is_collated or self._is_varied
        if is_other or subject.splittable.rows != self._planner.rows:
            self._planner = self._planner_of(subject)
        less = int(self.plan.chosen.needed_bytes * _SMALLER)
        try:
            with _apart(subject):
                found = self._planner.plan(less, race=False)  # real runs might run out of memory again
        except DoesNotFit:
            logger.warning("out of memory under the plan, and none is smaller than %s", format_bytes(less))
            return None
        logger.warning("out of memory under the plan; now %s", found)
        self.plan = found
        self._hand_over(subject)
        return found.micro_batch_size

    def look_again(self) -> None:
        """Plans again for this batch if the plan in force would need more than the budget by now.

        Raises:
            DoesNotFit: nothing fits into the budget.
        """
        subject, plan = self._subject, self.plan
        if subject is None or plan is None or self._memory is None or self.value != plan.micro_batch_size:
            return  # nobody planned sizes that were halved
        with _apart(subject):
            subject.behaviour = self._planner.subject.behaviour if self._planner is not None else subject.behaviour
            planner = self._planner_of(subject, budget := self._budget_of(subject))
            if planner.fits(plan.chosen):
                return
            logger.info("planning again: the step runs different operations than planned")
            made, self._made = self._made, []
            try:
                self._make_for_larger(subject)
            except DoesNotFit as error:
                if error.needed is None or error.needed > budget:
                    raise
                self._made = made  # it ran out of memory far below the budget, which says nothing of the plan
                logger.warning("the plan is kept: the step ran out of memory during replanning")
        self._hand_over(subject)

    def _make_for_larger(self, subject: Subject) -> None:
        """Plans so that larger batches, of other operations, find the plan enough, if there is one that leaves room.

        Else phases of both kinds that come in turn would have each other's plan made again without end.
        """
        rows, most = subject.splittable.rows, self._rows
        is_plain = not isinstance(subject.loss_fn, (Coupled, OverTime))  # of which samples keep nothing but the batch
        if rows < most and is_plain and not subject.splittable.is_collated:
            try:
                self._make(subject, beside=subject.batch_bytes * (most - rows) // rows)
            except DoesNotFit:
                pass
            else:
                self._rows = most
                return
        self._make(subject)

    @property
    def is_on_first_plan(self) -> bool:
        """Whether the plan in force is the one for the whole budget."""
        return self.plan is self._first

    def applied(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Runs with the memory optimizations of the plan in force."""
        row = self.plan.chosen if self.plan is not None else None
        if row is None or not row.optimizations:
            return contextlib.nullcontext()
        return apply_optimizations(
            model, recompute=row.recompute, offload=row.offload, head=row.head, loss_chunks=row.loss_chunks,
            pool=self._pool,
        )  # fmt: skip

    @contextlib.contextmanager
    def confirmed(self, device: torch.device, devices: Devices | None = None) -> Iterator[None]:
        """Runs steps within the budget of the plan, and learns from the first ones how much the allocator reserves."""
        if not is_accelerator(device) or self._memory is None or self._planner is None:
            yield
            return
        places = [device] if devices is None else [placement.device for placement in devices.placements]
        budget = self._first.budget + self._planner.others if self._first is not None else None
        learns = self._confirmed < _CONFIRMED
        with contextlib.ExitStack() as stack:
            for place in places:
                if learns:
                    forget_peaks(place)
                stack.enter_context(reserving_at_most(budget, place))
            yield
        if learns:
            self._confirmed += 1
            if budget is not None:
                self._learn(max(memory_of(place).peak_reserved for place in places), budget)

    def _learn(self, reserved: int, budget: int) -> None:
        if self.plan is None or self._planner is None or not self.plan.peak_bytes:
            return
        needed = self.plan.chosen.needed_bytes
        ratio = reserved / needed
        logger.info(
            "the allocator reserved %s, %.2f times the planned %s",
            format_bytes(reserved), ratio, format_bytes(needed),
        )  # fmt: skip
        if reserved <= budget:
            return
        try:
            with contextlib.nullcontext() if self._subject is None else _apart(self._subject):
                self._first = self._planner.plan(int(budget / ratio))
        except DoesNotFit as error:
            logger.warning("the allocator reserves more than the budget, and no plan is small enough: %s", error)
        else:
            release_cache()  # of blocks of other sizes
            self._take(self._first)

    def plan_state(self) -> dict[str, Any]:
        """The plans, as plain values."""
        return {
            "plan": None if self.plan is None else self.plan.to_dict(),
            "first": None if self._first is None else self._first.to_dict(),
            "rows": self._rows,
        }

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the plans that ``plan_state`` gave; they are checked on the next batch."""
        self.plan = None if state["plan"] is None else Plan.from_dict(state["plan"])
        is_first = state["first"] == state["plan"]
        self._first = self.plan if is_first or state["first"] is None else Plan.from_dict(state["first"])
        self._rows = state["rows"]
        self._is_checked = False
        if self._first is not None:
            self.ceiling = self._first.micro_batch_size


@contextlib.contextmanager
def _apart(subject: Subject) -> Iterator[None]:
    """Nothing communicates while a plan is made: the other processes make theirs, or have one. Nobody looks on."""
    with unobserved(), without_user_modes(), subject.settings.reducer.apart(subject.roots):
        yield


def trained_in(subject: Subject) -> list[int]:
    """The ids of the parameters that a step trains, in each step, so without a call for each of them."""
    groups = [group["params"] for optimizer in subject.optimizers for group in optimizer.param_groups]
    found = []
    for parameters in groups or [subject.parameters]:
        for parameter in parameters:
            if parameter.requires_grad:
                found.append(id(parameter))
    return found


def _target(subject: Subject) -> Target:
    return target_of(None, subject.settings.device)


@contextlib.contextmanager
def followed(
    follower: Any, splittable: Splittable, clear: Callable[[], None], device: torch.device,
    devices: Devices | None = None,
) -> Iterator[None]:  # fmt: skip
    """Makes sure of a plan for a logical batch, which runs within the block under the budget of that plan."""
    try:
        follower.prepare(splittable, clear)
        with follower.confirmed(device, devices):
            yield
    except NotSplittable as error:
        follower.keep_whole(error)
        raise
    finally:
        follower.release()


def limit_by_plan(follower: Any, splittable: Splittable, limit: SizeLimit) -> None:
    """Makes micro-batches as small as in training, which without gradients is small enough."""
    if follower is None:
        return
    if follower.plan is None:
        try:
            follower.prepare(splittable, lambda: None)
        finally:
            follower.release()
    if limit.ceiling is None or follower.may_grow:
        limit.value = limit.ceiling = follower.value
