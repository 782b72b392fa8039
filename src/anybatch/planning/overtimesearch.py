"""The search for a loss over time: how long its chunks are, beside the memory optimizations.

With chunks of k of T steps, states of s bytes and activations of a bytes a step, a pass holds T / k * s + k * a beside
what is there anyway. Fewer chunks are faster, so that the longest chunk is taken that fits with all samples at once;
where none does, the length with the least memory, in micro-batches that fit.
"""

import copy
import logging
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from anybatch.batch.batches import Part
from anybatch.batch.trees import leaves
from anybatch.loss.pieces import InPieces, Piece, Place
from anybatch.loss.sequence import OverTime
from anybatch.loss.timesteps import Steps
from anybatch.planning.curve import Profile
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.microbatches import micro_batch_of
from anybatch.planning.predictor import Predictor, TooLarge
from anybatch.planning.recipe import Recipe
from anybatch.planning.search import Search
from anybatch.planning.subjects import Subject
from anybatch.records.plans import PlanRow

logger = logging.getLogger(__name__)

FEW = 3
"""Chunks that are looked at: the last one, which may be shorter, the one before it, and one that runs after these."""
_SHORT = 4  # steps in the chunks that are traced first; twice as many in those that are traced next
_ATTEMPTS = 4  # lengths with all samples at once, before those with the least memory
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
        """The bytes of a pass."""
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

    Attributes:
        key: what tells it from others of the same loss.
        splits: whether samples are split, too, where they do not fit together.
    """

    def __init__(
        self, over_time: OverTime, length: int, state_bytes: int = 0, most: int = FEW, values: int = 0
    ) -> None:
        self.over_time = over_time
        own = copy.copy(over_time)
        own.carried, own.carry, own.known_dims = None, False, {}
        own.has_run_again = True  # whether a chunk gives the same again is looked at with numbers
        self._carries = over_time.carry
        self._own = own
        self._length = length
        self._state_bytes, self._values = state_bytes, values
        self._most = sys.maxsize if over_time.prepare is not None else most
        self.key = (length, state_bytes, values)
        self.splits = values > 0 or over_time.mode == "truncated"
        if over_time.mode == "truncated":
            self._length = own.chunk or length

    @property
    def length(self) -> int | None:
        """Steps in a chunk; ``None`` where that is part of the method."""
        return None if self._own.mode == "truncated" else self._length

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self._own.user_functions

    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the losses at once."""
        return self._own(model, batch)

    def steps_of(self, subject: Subject) -> int:
        """The steps of the longest sequences of a logical batch."""
        splittable = subject.splittable
        batches = splittable.batches
        if splittable.is_collated:
            batches = [micro_batch_of(subject, Part(range(splittable.rows), splittable.rows))]
        return max(Steps(batch, self._own.dim, self._own.broadcast).total for batch in batches)

    def shown(self, total: int) -> tuple[int, int]:
        """How many steps are run of so many, and how many chunks are left out."""
        chunks = -(-total // self._length)
        left_out = max(0, chunks - self._most)
        return total - left_out * self._length, left_out

    def runs_all(self, total: int) -> bool:
        """Whether no chunk and no state of so many steps is left out."""
        return not self._carries and (self._own.mode == "truncated" or not self.shown(total)[1])

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


class ChunkSearch(Search):
    """The search at one precision, for one length of chunks."""

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str], autocast: str) -> None:
        super().__init__(subject, target, allow, autocast)
        self._chunks = cast(InChunks, subject.loss_fn)
        # What a recurrent kernel works in is not linear in the samples, but it is in the steps.
        self.profiles.extrapolates = self._chunks.length is None

    @property
    def traces_all(self) -> bool:
        """Whether all chunks are traced."""
        return self._chunks.runs_all(self._chunks.steps_of(self.subject))

    def rows(self, budget: int) -> list[PlanRow]:
        """The fastest ways that fit; of all samples at once where shorter chunks hold less."""
        return [row for row in super().rows(budget) if self._chunks.splits or row.micro_batches == 1]

    def whole_bytes(self) -> int:
        """The peak of the whole batch at once; 0 where that is not looked at, with all steps in one chunk."""
        length = self._chunks.length
        return 0 if length is not None and length < self._chunks.steps_of(self.subject) else super().whole_bytes()

    def finished(self, row: PlanRow) -> PlanRow:
        """A row of the chunks that were looked at, as one of all chunks."""
        steps = self._chunks.steps_of(self.subject)
        factor = steps / max(1, self._chunks.shown(steps)[0])
        seconds = None if row.seconds is None else row.seconds * factor
        return replace(super().finished(row), chunk_length=self._chunks.length, seconds=seconds)


class ChunkLengths:
    """Which lengths are worth a search.

    Args:
        subject: what is planned, with a loss over time.
        target: the device.
        like: the same of a step that differs in its optimizers only, if there is one.
    """

    def __init__(self, subject: Subject, target: Target, like: "ChunkLengths | None") -> None:
        self._predictors: dict[tuple[int, ...], Predictor] = {} if like is None else {**like._predictors}
        self._subject, self._over_time, self._target = subject, cast(OverTime, subject.loss_fn), target
        self._rows = subject.splittable.rows
        self._state_bytes = 0

    def forget(self) -> None:
        """Lets go of the traces, and with them of the logical batch."""
        self._predictors.clear()

    def chunks_of(self, length: int | None, *, splits: bool) -> InChunks:
        """The loss in chunks of a length; where it splits, micro-batches leave losses behind."""
        size = max((4, *(p.element_size() for p in self._subject.parameters)))  # losses are in float32 at least
        values = size * (self._rows - 1) if splits else 0
        return InChunks(self._over_time, length or self._over_time.chunk or 1, self._state_bytes, values=values)

    def within(self, budget: int) -> list[InChunks]:
        """The loss in chunks of several lengths, the first that fits of which is taken.

        They are the longest that are predicted to fit with all samples at once, of which a trace may show more bytes,
        and the length with the least memory.
        """
        if self._over_time.mode == "truncated":
            return [self.chunks_of(None, splits=True)]
        shape, usable = self._measured(budget)
        found: list[int] = []
        for length in shape.lengths:
            fits = length >= shape.best and shape.peak(length) <= usable
            if fits and len(found) < _ATTEMPTS and (not found or length <= found[-1] * _LESS):
                found.append(length)
        least = self._least(shape, budget)
        return [*(self.chunks_of(length, splits=False) for length in found), self.chunks_of(least, splits=True)]

    def _least(self, shape: Shape, budget: int) -> int:
        """The length with which one sample holds the least, looked at around the one that is predicted to."""
        index = shape.lengths.index(shape.best)
        near = [*shape.lengths[max(0, index - 2) : index + 3], shape.lengths[-1]]
        return min(near, key=lambda length: self._held(length, FEW, budget, rows=1)[0])

    def _measured(self, budget: int) -> tuple[Shape, float]:
        """Traces short chunks, a few of one length and of twice that, and one more of them."""
        steps = self.chunks_of(1, splits=False).steps_of(self._subject)
        short = max(1, min(_SHORT, steps // (2 * FEW + 2)))
        self._state_bytes, rows = 0, self._rows
        ways = ((short, FEW), (short, FEW + 1), (2 * short, FEW))
        try:
            held = [self._held(length, most, budget, rows=rows) for length, most in ways]
        except TooLarge:
            logger.info("not even short chunks of all samples may run for real within the budget")
            rows = 1
            held = [self._held(length, most, budget, rows=rows) for length, most in ways]
        (low, profile), (more, _), (high, _) = held
        step, state = max(1.0, (high - low) / short), max(0.0, float(more - low))
        self._state_bytes = -(-int(state) // rows)
        shape = Shape(steps, low - step * short, step, state)
        logger.info("of %d steps a state takes %d bytes and a step in a chunk %d", steps, int(state), int(step))
        return shape, float(usable_bytes(budget, self._target, profile.confidence)) if rows == self._rows else -1.0

    def _held(self, length: int, most: int, budget: int, *, rows: int) -> tuple[int, Profile]:
        """The bytes of a pass with some chunks, traced at that very size, and its profile."""
        single, count = rows == self._rows, -(-self._rows // rows)
        key = length, self._state_bytes, most
        predictor = Predictor(replace(self._subject, loss_fn=InChunks(self._over_time, *key)))
        predictor.extrapolates = False
        if key in self._predictors:
            predictor.share(self._predictors[key])
        self._predictors[key] = predictor
        predictor.stay_within(budget)
        profile = predictor.traced(Recipe(), Part(range(rows), rows), single=single)
        profile = profile.at(profile.size, count)
        return max(profile.live) + profile.around, profile
