"""Finds the fastest way to run a step with a loss over time within a budget of memory.

With chunks of k of T steps, states of s bytes and activations of a bytes a step, a pass holds T / k * s + k * a beside
what is there anyway. Fewer chunks are faster, so that the longest chunk is taken that fits with all samples at once;
where none does, the length with the least memory, in micro-batches that fit.
"""

import copy
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.trees import leaves
from anybatch.errors import LossError
from anybatch.loss.pieces import InPieces, Piece, Place
from anybatch.loss.sequence import OverTime
from anybatch.loss.timesteps import Steps
from anybatch.memory.meter import OverBudget
from anybatch.planning.advice import stopped
from anybatch.planning.curve import Fit, NotAligned, Profile, Size
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.fingerprints import fingerprint_of, shapes_of
from anybatch.planning.memorytrace import trace_pass
from anybatch.planning.microbatches import micro_batch_of
from anybatch.planning.planner import LEVERS
from anybatch.planning.predictor import Predictor, TooLarge
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import random_state_kept
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import Times
from anybatch.records.memory import ACTIVATIONS
from anybatch.records.plans import Plan, PlanRow
from anybatch.units import format_bytes

logger = logging.getLogger(__name__)

FEW = 3
"""Chunks that are looked at: the last one, which may be shorter, the one before it, and one that runs after these."""
_SHORT = 4  # steps in the chunks that are traced first; twice as many in those that are traced next
_ATTEMPTS = 4
_UNSURE = 1.25  # times what was extrapolated from few samples to all
_LESS = 0.9  # of a length is tried after one whose trace showed more bytes than were predicted


@dataclass(frozen=True)
class Shape:
    """What a pass holds as a function of the length of its chunks.

    Args:
        steps: of a sequence.
        fixed: bytes whatever the length, with as many chunks as are looked at.
        step: bytes for each step in a chunk.
        state: bytes for each chunk beyond those.
    """

    steps: int
    fixed: float
    step: float
    state: float

    def peak(self, length: int) -> float:
        """The bytes of a pass.

        Args:
            length: of a chunk.
        """
        return self.fixed + self.step * length + self.state * max(0, -(-self.steps // length) - FEW)

    @property
    def lengths(self) -> list[int]:
        """The shortest length for each number of chunks, the longest first."""
        found = dict.fromkeys(-(-self.steps // chunks) for chunks in range(1, self.steps + 1))
        return list(found)

    @property
    def best(self) -> int:
        """The length with the least memory."""
        return min(self.lengths, key=lambda length: (self.peak(length), -length))

    def longest(self, budget: float) -> int | None:
        """The longest length that fits in a budget, ``None`` if none does.

        Args:
            budget: bytes.
        """
        return next((length for length in self.lengths if self.peak(length) <= budget), None)


class InChunks(InPieces):
    """A loss over time in chunks of a length, which leaves the user's own object as it is.

    Of more chunks than a few, those in the middle are left out. The states that they would begin with are stood in for
    by a tensor of as many bytes, so that the peak is the same.

    Args:
        over_time: the user's.
        length: steps in a chunk.
        state_bytes: that a chunk which is left out would hold for each sample.
        most: chunks that are run.
        values: bytes that micro-batches leave behind for each chunk that is left out: the values of their losses.
    """

    def __init__(
        self, over_time: OverTime, length: int, state_bytes: int = 0, most: int = FEW, values: int = 0
    ) -> None:
        own = copy.copy(over_time)
        own.carried, own.carry, own.known_dims = None, False, {}
        own.has_run_again = True  # whether a chunk gives the same again is looked at with numbers
        self._carries = over_time.carry
        self._own = own
        self._length = length
        self._state_bytes, self._values = state_bytes, values
        self._most = sys.maxsize if over_time.prepare is not None else most
        if over_time.mode == "truncated":
            self._length = own.chunk or length

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self._own.user_functions

    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the losses at once."""
        return self._own(model, batch)

    def shown(self, total: int) -> tuple[int, int]:
        """How many steps are run of so many, and how many chunks are left out.

        Args:
            total: steps of a sequence.
        """
        chunks = -(-total // self._length)
        left_out = max(0, chunks - self._most)
        return total - left_out * self._length, left_out

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Gives the losses of the chunks that are looked at."""
        steps = Steps(batch, self._own.dim, self._own.broadcast)
        shown, left_out = (steps.total, 0) if steps.is_packed else self.shown(steps.total)
        if self._own.mode == "truncated":
            left_out = 0  # no state is kept there
        held = (left_out + self._carries) * self._state_bytes * place.rows + left_out * self._values
        tensors = (leaf for _, _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        room = torch.empty(held, dtype=torch.uint8, device=device)
        given = batch if shown == steps.total else steps.cut(shown).batches[0]
        yield from self._own.pieces(model, given, replace(place, length=self._length))
        del room


class SequencePlanner:
    """Plans a step with a loss over time for any budget, by the planner of other losses for each length of chunks.

    Args:
        subject: what is planned, with a loss over time.
        target: the device.
        allow: the levers that may be used, and precisions.
        patience: seconds that may go into measuring times.
        times: nothing of it is used, since times depend on the length.
        budget: bytes, for a plan that was made before.
        usual: the planner of a loss that adds up over micro-batches.

    Attributes:
        rows: samples of the logical batch that is planned for.
    """

    def __init__(
        self,
        subject: Subject,
        target: Target,
        *,
        allow: Sequence[str] = LEVERS,
        patience: float | None = None,
        times: Sequence[Times | None] | None = None,
        budget: int = 0,
        usual: Callable[..., Any],
    ) -> None:
        if not isinstance(subject.loss_fn, OverTime):
            raise LossError(f"the loss is a {type(subject.loss_fn).__name__}; expected anybatch.OverTime")
        self.subject = subject
        self.rows = subject.splittable.rows
        self._over_time: OverTime = subject.loss_fn
        self._target = target
        self._options: dict[str, Any] = {"allow": allow} | ({} if patience is None else {"patience": patience})
        self._usual = usual
        self._budget = budget
        self._inner: Any = None
        self._inner_length = (0, False)
        self._is_fake = True
        self._state_bytes = 0

    @property
    def times(self) -> list[Times | None]:
        """Nothing: times depend on the length."""
        return []

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none, to let go of the last one.

        Args:
            splittable: the batch.
        """
        self.subject.attend(splittable)
        if self._inner is not None:
            self._inner.attend(splittable)

    def outgrown_parts(self, splittable: Splittable, limit: float | None, row: PlanRow) -> str:
        """Says which micro-batch of raw samples would need more than the budget; empty if none would.

        Args:
            splittable: the batch.
            limit: the padded cost of a micro-batch.
            row: the plan that is followed.
        """
        self.subject.splittable = splittable
        inner = self._planner(row.chunk_length or self._over_time.chunk or 1, splits=row.micro_batches > 1)
        text: str = inner.outgrown_parts(splittable, limit, replace(row, chunk_length=None))
        return text

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
        try:
            return self._planned(budget, race)
        except OverBudget as error:
            raise stopped(error.needed, budget, lambda given: given, self.subject.bytes_beside) from None

    def _planned(self, budget: int, race: bool) -> Plan:
        self._budget = budget
        if self._over_time.mode == "truncated":
            return self._finished(self._planner(self._over_time.chunk or 1).plan(budget, race=race), None)
        with random_state_kept(self.subject.parameters):
            shape, usable = self._measured(budget)
        length = shape.longest(usable)
        for _ in range(_ATTEMPTS):
            if length is None:
                break
            found = self._planner(length).plan(budget, race=race)
            with random_state_kept(self.subject.parameters):
                found = self._looked_at(found, length, budget, is_sure=True)
            if (found.micro_batches == 1 and found.peak_bytes <= usable) or length <= shape.best:
                found = replace(found, smallest_bytes=self._least_budget(shape, budget))
                return self._finished(found, length)
            length = self._shorter(shape, length)
        length = self._least(shape, budget)
        found = self._planner(length, splits=True).plan(budget, race=race)
        with random_state_kept(self.subject.parameters):
            return self._finished(self._looked_at(found, length, budget, is_sure=False), length)

    def _looked_at(self, plan: Plan, length: int, budget: int, *, is_sure: bool) -> Plan:
        """A plan with its peak from a run of its largest micro-batch, where it can't be had from fake tensors.

        What a recurrent kernel works in is not linear in the samples, but it is in the steps.
        """
        row = plan.chosen
        if self._is_fake or row.levers or self.subject.splittable.is_collated:
            return plan
        rows, is_whole = min(int(row.micro_batch_size), self.rows), row.micro_batches == 1
        held, profile = self._held(length, FEW, budget, rows=rows, is_sure=is_sure and is_whole)
        chosen = replace(row, peak_bytes=max(held, profile.update_peak(Size(rows), row.micro_batches)))
        at_peak = dict(plan.at_peak)
        at_peak[ACTIVATIONS] = max(0, at_peak.get(ACTIVATIONS, 0) + chosen.peak_bytes - row.peak_bytes)
        return replace(
            plan,
            chosen=chosen,
            alternatives=tuple(chosen if other == row else other for other in plan.alternatives),
            at_peak=at_peak,
            binding=plan.binding.replace(format_bytes(row.peak_bytes), format_bytes(chosen.peak_bytes), 1),
        )

    def _least_budget(self, shape: Shape, budget: int) -> int:
        """The smallest budget that a plan can be made for, in the chunks that hold the least."""
        return int(self._new_planner(self._least(shape, budget), splits=True).least_budget(budget))

    def _least(self, shape: Shape, budget: int) -> int:
        """The length with which one sample holds the least, looked at around the one that is predicted to."""
        index = shape.lengths.index(shape.best)
        near = [*shape.lengths[max(0, index - 2) : index + 3], shape.lengths[-1]]
        with random_state_kept(self.subject.parameters):
            return min(near, key=lambda length: self._held(length, FEW, budget, rows=1)[0])

    def _shorter(self, shape: Shape, length: int) -> int | None:
        """A length below one whose trace showed more bytes than were predicted."""
        return next((one for one in shape.lengths if shape.best <= one <= length * _LESS), None)

    def _planner(self, length: int, *, splits: bool = False) -> Any:
        if self._inner is None or self._inner_length != (length, splits):
            self._inner, self._inner_length = self._new_planner(length, splits=splits), (length, splits)
        return self._inner

    def _new_planner(self, length: int, *, splits: bool) -> Any:
        """The planner of a loss in chunks of a length; where it splits, micro-batches leave losses behind."""
        size = max((4, *(p.element_size() for p in self.subject.parameters)))  # losses are in float32 at least
        values = size * (self.rows - 1) if splits else 0
        subject = replace(self.subject, loss_fn=InChunks(self._over_time, length, self._state_bytes, values=values))
        return self._usual(subject, self._target, budget=self._budget, **self._options)

    def _measured(self, budget: int) -> tuple[Shape, float]:
        """Traces short chunks, a few of one length and of twice that, and one more of them."""
        steps = self._steps()
        short = max(1, min(_SHORT, steps // (2 * FEW + 2)))
        self._state_bytes = 0
        rows = None
        ways = ((short, FEW), (short, FEW + 1), (2 * short, FEW))
        try:
            held = [self._held(length, most, budget) for length, most in ways]
        except TooLarge:
            logger.info("not even short chunks of all samples may run for real within the budget")
            rows = 1
            held = [self._held(length, most, budget, rows=rows) for length, most in ways]
        (low, profile), (more, _), (high, _) = held
        step, state = max(1.0, (high - low) / short), max(0.0, float(more - low))
        self._state_bytes = -(-int(state) // (rows or self.rows))
        shape = Shape(steps, low - step * short, step, state)
        logger.info("of %d steps a state takes %d bytes and a step in a chunk %d", steps, int(state), int(step))
        return shape, float(usable_bytes(budget, self._target, profile.confidence)) if rows is None else -1.0

    def _steps(self) -> int:
        """The steps of the longest sequences."""
        splittable = self.subject.splittable
        if not splittable.is_collated:
            return max(self._steps_of(batch) for batch in splittable.batches)
        whole = micro_batch_of(self.subject, Part(range(splittable.rows), splittable.rows))
        return self._steps_of(whole)

    def _steps_of(self, batch: Any) -> int:
        return Steps(batch, self._over_time.dim, self._over_time.broadcast).total

    def _held(
        self, length: int, most: int, budget: int, *, rows: int | None = None, is_sure: bool = False
    ) -> tuple[int, Profile]:
        """The bytes of a pass, and the profile of small micro-batches.

        Args:
            length: of a chunk.
            most: chunks that are run.
            budget: bytes.
            rows: samples of a micro-batch; ``None`` for all at once.
            is_sure: whether they are known to fit.
        """
        size = Size(self.rows if rows is None else rows)
        single, count = size.samples == self.rows, -(-self.rows // size.samples)
        subject = replace(self.subject, loss_fn=InChunks(self._over_time, length, self._state_bytes, most))
        profiles = Predictor(subject)
        profiles.stay_within(budget)
        part = Part(range(size.samples), size.samples)
        try:
            profile = profiles.traced(Recipe(), part, single=single)  # on fake tensors at that very size
        except NotAligned:
            held, around, profile = self._bound(profiles, size, count, single=single)
        else:
            around = profile.around(size, count)
            held = max(profile.fit.live(size)) + around
        self._is_fake = profiles.is_fake
        if profiles.is_fake or (held * _UNSURE > budget and not is_sure):
            return held, profile
        trace = trace_pass(subject, part, Recipe(), (), split=not single, fake=False)
        return max(Fit([(size, trace)]).live(size)) + around, profile

    def _bound(self, profiles: Predictor, size: Size, count: int, *, single: bool) -> tuple[int, int, Profile]:
        """At most so many bytes as one sample for each, where other sizes do not have the same operations."""
        profile = profiles.traced(Recipe(), Part(range(1), 1), single=single)
        more = (size.samples - 1) * profile.fit.input_bytes(Size(1)) * min(profile.constants.copies, count)
        around, live = profile.around(Size(1), count) + more, max(profile.fit.live(Size(1)))
        fixed = sum(one.size for one in profile.fit.trace.allocations if one.born < 0)
        return around + fixed + size.samples * (live - fixed), around, profile

    def _finished(self, plan: Plan, length: int | None) -> Plan:
        """The plan of the chunks that were looked at as one of all chunks."""
        steps = self._steps()
        chunks = InChunks(self._over_time, length or self._over_time.chunk or steps)
        factor = steps / max(1, chunks.shown(steps)[0])

        def whole(row: PlanRow) -> PlanRow:
            return replace(row, chunk_length=length, seconds=None if row.seconds is None else row.seconds * factor)

        if length is not None and length < steps:
            plan = replace(plan, whole_bytes=0)  # of all steps in one chunk, which were not looked at
        result = replace(
            plan,
            chosen=whole(plan.chosen),
            alternatives=tuple(whole(row) for row in plan.alternatives),
            shapes=shapes_of(self.subject),
            copies_batch=bool(self.subject.writes_batch),
            fingerprint=fingerprint_of(self.subject, self._target),
        )
        logger.info("planned: %s", result)
        return result
