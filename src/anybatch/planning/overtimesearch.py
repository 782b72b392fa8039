"""The search for a loss over time: how long its chunks are, beside the memory optimizations.

With chunks of k of T steps, states of s bytes and activations of a bytes a step, a pass holds T / k * s + k * a beside
what is there anyway. Fewer chunks are faster, so that the longest chunk is taken that fits with all samples at once;
where none does, with half of them, and so on; and last the length with the least memory, in micro-batches that fit.
"""

import contextlib
import copy
import logging
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from anybatch.batch.batches import Part
from anybatch.batch.trees import leaves
from anybatch.loss.losses import InPieces, Piece, Place
from anybatch.loss.sequence import OverTime
from anybatch.loss.states import Steps
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.microbatches import micro_batch_of
from anybatch.planning.predictor import TooLarge
from anybatch.planning.recipe import FEW, Chunks, Recipe
from anybatch.planning.search import Search
from anybatch.planning.subjects import Subject
from anybatch.records.plans import PlanRow

logger = logging.getLogger(__name__)

_SHORT = 4  # steps in the chunks that are traced first; twice as many in those that are traced next
_ATTEMPTS = 4  # lengths with all samples at once, before those with the least memory
_AROUND = (1.0, 0.5, 2.0, 0.25, 0.7, 1.4)  # of the length that is predicted to hold the least, what is looked at
_FOR_REAL = 3  # of them, where each takes a run
_LESS = 0.9  # of a length is tried after one whose trace showed more bytes than were predicted


@dataclass(frozen=True)
class Shape:
    """What a pass holds as a function of the length of its chunks."""

    steps: int  # of a sequence
    fixed: float  # bytes whatever the length, with as many chunks as are looked at
    step: float  # bytes for each step in a chunk
    state: float  # bytes for each chunk beyond those

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
    """A loss over time as it is planned, which leaves the user's own object as it is.

    Of more chunks than a few, those in the middle are left out. The states that they would begin with are stood in for
    by a tensor of as many bytes, so that the peak is the same.
    """

    def __init__(self, over_time: OverTime, chunks: Chunks) -> None:
        self.over_time = over_time
        own = copy.copy(over_time)
        own.carried, own.carry, own.known_dims = None, False, {}
        own.has_run_again = True  # whether a chunk gives the same again is looked at with numbers
        self._own, self._carries = own, over_time.carry
        self.is_truncated = over_time.mode == "truncated"
        """Whether the length is part of the method."""
        self._length = own.chunk or chunks.length if self.is_truncated else chunks.length
        self._chunks = chunks
        self._most = sys.maxsize if over_time.prepare is not None else chunks.most

    def at(self, chunks: Chunks) -> "InChunks":
        """The same, cut in another way."""
        return InChunks(self.over_time, chunks)

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
        return not self._carries and (self.is_truncated or not self.shown(total)[1])

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Gives the losses of the chunks that are looked at."""
        steps = Steps(batch, self._own.dim, self._own.broadcast)
        shown, left_out = (steps.total, 0) if steps.is_packed else self.shown(steps.total)
        if self.is_truncated:
            left_out = 0  # no state is kept there
        held = (left_out + self._carries) * self._chunks.state_bytes * place.rows + left_out * self._chunks.values
        tensors = (leaf for _, _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        room = torch.empty(held, dtype=torch.uint8, device=device)
        given = batch if shown == steps.total else steps.cut(shown).batches[0]
        yield from self._own.pieces(model, given, replace(place, length=self._length))
        del room


class ChunkSearch(Search):
    """The search at one precision, at one length of chunks after the other."""

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str]) -> None:
        over_time = cast(OverTime, subject.loss_fn)
        self._loss = InChunks(over_time, Chunks(over_time.chunk or 1))
        super().__init__(replace(subject, loss_fn=self._loss), target, allow)
        # What a recurrent kernel works in is not linear in the samples, but it is in the steps.
        self.profiles.extrapolates = self._loss.is_truncated
        self._state_bytes = 0

    def begin(self, base: Recipe) -> None:
        """Turns to a length of chunks."""
        super().begin(base)
        self._loss = self._loss.at(self._chunks)

    @property
    def _chunks(self) -> Chunks:
        return cast(Chunks, self.base.chunks)

    @property
    def _steps(self) -> int:
        return self._loss.steps_of(self.subject)

    @property
    def traces_all(self) -> bool:
        """Whether all chunks are traced."""
        return self._loss.runs_all(self._steps)

    def _rows(self, budget: int) -> list[PlanRow]:
        """The fastest ways that fit; of all samples at once where shorter chunks hold less."""
        splits = self._chunks.values > 0 or self._loss.is_truncated
        return [row for row in super()._rows(budget) if splits or row.micro_batches == 1]

    def whole_bytes(self, autocast: str = "") -> int:
        """The peak of the whole batch at once; 0 where that is not looked at, with all steps in one chunk."""
        is_known = self._loss.is_truncated or self._chunks.length >= self._steps
        return super().whole_bytes(autocast) if is_known else 0

    def finished(self, row: PlanRow) -> PlanRow:
        """A row of the chunks that were looked at, as one of all chunks."""
        factor = self._steps / max(1, self._loss.shown(self._steps)[0])
        seconds = None if row.seconds is None else row.seconds * factor
        length = None if self._loss.is_truncated else self._chunks.length
        return replace(super().finished(row), chunk_length=length, seconds=seconds)

    # Which lengths are worth a search.

    def base_of(self, row: PlanRow) -> Recipe:
        """The length of chunks of a row."""
        return self._base(row.chunk_length, splits=row.micro_batches > 1)

    def _base(self, length: int | None, *, splits: bool) -> Recipe:
        """Chunks of a length; where samples are split, micro-batches leave losses behind."""
        size = max((4, *(p.element_size() for p in self.subject.parameters)))  # losses are in float32 at least
        values = size * (self.subject.splittable.rows - 1) if splits else 0
        return Recipe(chunks=Chunks(length or self._loss.over_time.chunk or 1, self._state_bytes, values))

    def bases(self, budget: int) -> list[Recipe]:
        """Several lengths, the first that fits of which is taken.

        They are the longest that are predicted to fit with all samples at once, of which a trace may show more bytes;
        where none does, with half of the samples, and so on; and the length with the least memory. BatchNorm has to see
        all samples and steps at once.
        """
        if self._loss.is_truncated:
            return [self._base(None, splits=True)]
        if self.subject.normalises_together:
            return [self._base(self._steps, splits=False)]
        self.profiles.is_last = True
        self.profiles.stay_within(budget)
        usable, total = usable_bytes(budget, self._target, self.profiles.confidence), self.subject.splittable.rows
        rows, found = 2 * total, list[int]()
        while not found and rows > 1:
            rows //= 2
            try:
                shape = self._shape(rows)
            except TooLarge:
                if rows == 1:
                    raise
                logger.info("not even short chunks of %d samples may run for real within the budget", rows)
                continue
            for length in shape.lengths:
                fits = length >= shape.best and shape.peak(length) <= usable
                if fits and len(found) < _ATTEMPTS and (not found or length <= found[-1] * _LESS):
                    found.append(length)
        least = self._least_held(shape)
        return [*(self._base(length, splits=rows < total) for length in found), self._base(least, splits=True)]

    def _least_held(self, shape: Shape) -> int:
        """The length around the one that is predicted with which a single sample holds the least."""
        held: dict[int, int] = {}
        self.profiles.is_last = False  # of them
        for factor in _AROUND if self.profiles.is_fake else _AROUND[:_FOR_REAL]:
            length = min(shape.lengths, key=lambda one: abs(one - factor * shape.best))
            with contextlib.suppress(TooLarge):
                held[length] = self._held(Chunks(length, self._state_bytes), rows=1)
        self.profiles.is_last = True
        return min(held, key=lambda one: held[one]) if held else shape.best

    def _shape(self, rows: int) -> Shape:
        """Traces short chunks of so many samples: a few, one more of them, and a few that are twice as long."""
        steps = self._steps
        short = max(1, min(_SHORT, steps // (2 * FEW + 2)))
        ways = (Chunks(short), Chunks(short, most=FEW + 1), Chunks(2 * short))
        low, more, high = (self._held(chunks, rows=rows) for chunks in ways)
        step, state = max(1.0, (high - low) / short), max(0.0, float(more - low))
        of_one = -(-int(state) // rows)  # and what a chunk leaves behind whatever its samples, of many the least
        self._state_bytes = min(self._state_bytes or of_one, of_one)
        logger.info("of %d steps a state takes %d bytes and a step in a chunk %d", steps, int(state), int(step))
        return Shape(steps, low - step * short, step, state)

    def _held(self, chunks: Chunks, *, rows: int) -> int:
        """The bytes of a pass with some chunks, traced at that very size."""
        total = self.subject.splittable.rows
        recipe = Recipe(self.profiles.always, chunks=chunks)
        profile = self.profiles.traced(recipe, Part(range(rows), rows), single=rows == total)
        profile = profile.at(profile.size, -(-total // rows))
        return max(profile.live) + profile.around
