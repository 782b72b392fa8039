"""The sequences of a micro-batch, and what the user's functions make of a chunk of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anybatch.errors import BatchError, LossError
from anybatch.gradient.pieces import Piece, Place, in_place_explained, whole
from anybatch.gradient.timesteps import Shares, Steps, flat, joined, narrowed, reordered
from anybatch.records.means import Mean
from anybatch.tensors.graph import is_recomputing, recomputing
from anybatch.tensors.meter import LiveBytes
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.rerun import TwoPasses

if TYPE_CHECKING:
    from anybatch.gradient.overtime import OverTime

LAST = "last"
"""The name of the loss on the last state, where there are others beside it."""

Bounds = tuple[int, int]
"""The first step of a chunk and the one after its last."""


class Carried(NamedTuple):
    """The last states of a batch, for the next one to begin with.

    Args:
        rows: of the batch.
        parts: states of consecutive rows, each with the first row and the one after the last.
    """

    rows: int
    parts: tuple[tuple[int, int, Any], ...] = ()

    def of(self, start: int, stop: int, rows: int) -> Any:
        """The state of some rows.

        Args:
            start: the first.
            stop: the one after the last.
            rows: of the batch that goes on.

        Raises:
            BatchError: the batch has another number of rows.
        """
        if rows != self.rows:
            raise BatchError(
                f"the batch has {rows} sequences, the state that is carried to it {self.rows}; expected the same "
                "streams in every batch. Call reset() where other streams begin, and leave out a last smaller batch "
                "(drop_last=True)"
            )
        found = []
        for first, end, state in self.parts:
            low, high = max(first, start), min(end, stop)
            if low < high:
                found.append((high - low, narrowed(state, end - first, low - first, high - first)))
        return joined(found) if found else None

    def replaced(self, start: int, stop: int, state: Any) -> "Carried":
        """The same with another state of some rows.

        Args:
            start: the first.
            stop: the one after the last.
            state: without a graph.
        """
        kept = [(start, stop, state)]
        for first, end, other in self.parts:
            for low, high in ((first, min(end, start)), (max(first, stop), end)):
                if low < high:
                    kept.append((low, high, narrowed(other, end - first, low - first, high - first)))
        return Carried(self.rows, tuple(sorted(kept, key=lambda part: part[0])))

    def state_dict(self) -> dict[str, Any]:
        """Plain containers around the states."""
        return {"rows": self.rows, "parts": [list(part) for part in self.parts]}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> "Carried":
        """Makes what ``state_dict`` was taken of."""
        return Carried(state["rows"], tuple((start, stop, value) for start, stop, value in state["parts"]))


class Sequences:
    """The sequences of a micro-batch.

    Args:
        loss: the user's functions.
        model: their first argument.
        batch: a micro-batch.
        place: what is asked.

    Attributes:
        steps: of the batch.
        passes: runs chunks twice.
        gives_losses: whether a chunk has given a loss.
    """

    def __init__(self, loss: "OverTime", model: Any, batch: Any, place: Place) -> None:
        self._loss = loss
        self._model = model
        self._batch = batch
        self._place = place
        self.steps = Steps(batch, loss.dim, loss.broadcast)
        self._rows = self.steps.rows_at(0) or place.rows
        roots = modules_behind(model, loss)
        self.modules = modules_of(*roots)
        self.devices = list({p.device for m in self.modules for p in m._parameters.values() if p is not None})
        self.passes = TwoPasses("the chunk_loss of OverTime", roots, self.devices)
        self.gives_losses = False
        self._ended: list[tuple[int, Any]] = []  # the last states of sequences that ended before the others did

    @property
    def has_last(self) -> bool:
        """Whether there is a loss on the last state."""
        return self._loss.last is not None

    def initial(self) -> Any:
        """The state before the first step, in the order of packed sequences."""
        carried = self._loss.carried if self._loss.carry and self._place.differentiate else None
        if carried is None:
            state = self._loss.state(self._model, self._batch)
        else:
            state = carried.of(self._place.start, self._place.start + self._rows, self._place.rows_of_batch)
        return reordered(state, self.steps.order)

    def entering(self, state: Any, step: int, since: int) -> Any:
        """The state of the sequences that reach a step.

        Args:
            state: after the step before.
            step: the next one.
            since: the first step of the chunk that gave the state.
        """
        here, before = self.steps.rows_at(step), self.steps.rows_at(since)
        return state if here is None or before is None else narrowed(state, before, 0, here)

    def called(self, state: Any, bounds: Bounds, *, wants_loss: bool = True) -> tuple[Any, Any, Any]:
        """Runs a chunk.

        Args:
            state: before it.
            bounds: of the chunk.
            wants_loss: whether a loss that is a function is called.

        Returns:
            The losses, the state and the metrics.

        Raises:
            LossError: the user's function gives something else.
        """
        chunk = self.steps.chunk(*bounds)
        with in_place_explained("the state that chunk_loss was given"):
            given = self._loss.chunk_loss(self._model, chunk, state)
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise LossError(
                f"chunk_loss gave a {type(given).__name__}; expected (loss, state) or (loss, state, metrics)"
            )
        result, new, *metrics = given
        if callable(result) and not isinstance(result, (torch.Tensor, Mean, Mapping)):
            result = result() if wants_loss else None
        self.gives_losses = self.gives_losses or result is not None
        self._note_ended(new, bounds)
        return result, new, metrics[0] if metrics else None

    def shares(self, bounds: Sequence[Bounds]) -> Shares:
        """Which share of the items each chunk has.

        Args:
            bounds: of all chunks.
        """
        place = self._place
        return Shares(self.steps, bounds, place.count, self._batch, is_split=place.rows != place.rows_of_batch)

    def _note_ended(self, state: Any, bounds: Bounds) -> None:
        entered, left = self.steps.rows_at(bounds[0]), self.steps.rows_at(bounds[1])
        if entered is None or left is None or is_recomputing() or not self.has_final:
            return
        if left < entered:
            self._ended.append((entered - left, narrowed(state, entered, left, entered)))

    @property
    def has_final(self) -> bool:
        """Whether the last states are asked for."""
        return self.has_last or self._loss.carry

    def final(self, state: Any) -> Any:
        """The last state of every sequence, in the order of the packed ones.

        Args:
            state: after the last step.
        """
        ended, self._ended = self._ended, []
        return joined(ended[::-1]) if self.steps.is_packed else state

    def last(self, final: Any) -> Piece:
        """The loss on the last states.

        Args:
            final: what ``final`` gave.
        """
        order = self.steps.order
        state = reordered(final, None if order is None else order.argsort())
        with in_place_explained("the state that last was given"):
            result = self._loss.last(self._model, state, self._batch) if self._loss.last is not None else None
        return Piece({LAST: result} if self.gives_losses and not isinstance(result, Mapping) else result, whole)

    def carry(self, final: Any) -> None:
        """Keeps the last states for the next batch, if that is asked for.

        Args:
            final: what ``final`` gave, without a graph.
        """
        if not (self._loss.carry and self._place.differentiate):
            return
        order, place = self.steps.order, self._place
        state = reordered(final, None if order is None else order.argsort())
        known = self._loss.carried or Carried(place.rows_of_batch)
        self._loss.carried = known.replaced(place.start, place.start + self._rows, state)

    def graph_bytes(self, length: int) -> tuple[int, int]:
        """What a chunk keeps for its backward, and what a state takes; nothing is changed.

        Args:
            length: of the chunk.

        Returns:
            The bytes of its graph and of a state.
        """
        random = RandomState([device for device in self.devices if device.type != "meta"])
        buffers = [(b, b.clone()) for module in self.modules for b in module._buffers.values() if b is not None]
        live = LiveBytes()
        try:
            state = self.initial()
            with live, recomputing():
                result, new, _ = self.called(state, (0, min(length, self.steps.total)))
            size = sum({id(leaf): leaf.nbytes for leaf in flat(new) if isinstance(leaf, torch.Tensor)}.values())
            del result
            return live.current, size
        finally:
            random.restore()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
