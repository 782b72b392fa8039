"""Losses over long sequences, in chunks of time with a carried state.

``OverTime`` is what a user makes; ``_Sequences`` goes through one micro-batch. In mode ``"exact"`` each chunk but the
last is checkpointed: it runs once without a graph, for the state after it, and again when its turn to be differentiated
comes, the last chunk first. A state in between is a leaf that stands for it, as in a ``cut``.
"""

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from anybatch.batch.counting import count_samples
from anybatch.batch.trees import flat
from anybatch.errors import BatchError, CountError, LossError
from anybatch.loss.cutting import cut, declare_nothing_to_do, in_place_explained, standing
from anybatch.loss.losses import SINGLE, Evaluation, InPieces, Piece, Place, check_callable, whole
from anybatch.loss.states import (
    Called,
    Carried,
    ChunkCall,
    RowDims,
    Steps,
    checked_state,
    detached,
    is_near,
    joined,
    kept,
    narrowed,
    own_bytes,
    reordered,
    standing_in,
)
from anybatch.memory.meter import Recording
from anybatch.records.means import Mean
from anybatch.tensors.dropouts import masks_set_aside
from anybatch.tensors.graph import recomputing
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.randomness import RandomState

logger = logging.getLogger(__name__)

Mode = Literal["exact", "truncated"]
Gradients = Sequence[torch.Tensor | None]
"""Of the leaves of a state, in order; ``None`` where there is none."""

LAST = "last"
"""The name of the loss on the last state, where there are others beside it."""
_WITHOUT_GRAPH = 256  # steps in a chunk where nothing is kept for a backward
_SHORTEST = 16  # steps: below, the time is that of starting operations
_MOST = 1.9  # times the bytes of the best length


class OverTime(InPieces):
    """A loss over sequences that runs in chunks of time, with the activations of one chunk at a time.

    In mode ``"exact"`` the gradient is that of backpropagation through all time steps. A first pass without a graph
    saves the state at the start of each chunk. Then each chunk runs again, the last one first, and passes the gradient
    of its initial state to the chunk before. In mode ``"truncated"`` no gradient flows between chunks (truncated
    backpropagation through time).

    Args:
        chunk_loss: ``chunk_loss(model, chunk, state)`` returns ``(loss, state)`` or ``(loss, state, metrics)``. The
            loss is the mean over the items of the chunk, a ``Mean``, a mapping of names to either, ``None``, or a
            function without arguments that returns one of these and is called only when the loss is needed. Metrics are
            ``Mean`` s by name. The state is any nested container of tensors and plain values. The function must not
            change the state or the chunk in place. It sees only the steps of its chunk: everything that it needs from
            earlier chunks has to be in the state; for layers over all steps, such as a convolution, see ``prepare``.
        state: ``state(model, batch)`` returns the initial state. It may depend on parameters, as the state of a decoder
            depends on its encoder. In mode ``"truncated"`` it gets a gradient from the first chunk only.
        dim: the time dimension in the tensors of the batch. Tensors with fewer dimensions go whole to every chunk.
        chunk: steps in a chunk; ``None``, in mode ``"exact"`` only, measures it: the longest chunk with less than twice
            the bytes of the smallest, which has sqrt(steps * bytes of a state / bytes of activations per step) steps.
        mode: ``"exact"`` or ``"truncated"``.
        last: ``last(model, state, batch)`` returns a loss on the final state of every sequence, a mean over samples, or
            a pair of this loss and metrics.
        carry: whether a batch starts from the final state of the batch before, detached, as for streams that are cut
            into batches; ``reset()`` starts a new stream. An evaluation starts from ``state``, and does not change the
            carried state.
        broadcast: dotted paths of leaves of the batch that are not sequences.
        prepare: ``prepare(model, batch)`` returns the batch that is split along time and passed to ``state``, for parts
            that are computed from all steps at once, such as the output of a bidirectional layer. Its graph is
            differentiated once.
        state_dim: the dimension of the sequences in the tensors of the state, which packed sequences and ``carry``
            need. ``None`` finds it by the number of sequences.

    Raises:
        LossError: an argument is invalid.

    Example:
        >>> import torch.nn.functional as F
        >>> rnn, head = torch.nn.GRU(3, 8, batch_first=True), torch.nn.Linear(8, 2)
        >>> def chunk_loss(model, chunk, state):
        ...     output, state = model[0](chunk["x"], state)
        ...     return lambda: F.cross_entropy(model[1](output).flatten(0, 1), chunk["y"].flatten()), state
        >>> loss = OverTime(chunk_loss, lambda model, batch: torch.zeros(1, len(batch["x"]), 8), chunk=10)
        >>> batch = {"x": torch.ones(4, 100, 3), "y": torch.ones(4, 100, dtype=torch.long)}
        >>> loss(torch.nn.ModuleList([rnn, head]), batch).shape
        torch.Size([])
    """

    is_over_time = True
    """By which ``loss.losses.as_over_time`` knows it."""

    def __init__(
        self,
        chunk_loss: Callable[[Any, Any, Any], Any],
        state: Callable[[Any, Any], Any],
        *,
        dim: int = 1,
        chunk: int | None = None,
        mode: Mode = "exact",
        last: Callable[[Any, Any, Any], Any] | None = None,
        carry: bool = False,
        broadcast: Sequence[str] = (),
        prepare: Callable[[Any, Any], Any] | None = None,
        state_dim: int | None = None,
    ) -> None:
        check_callable("OverTime", "chunk_loss", chunk_loss, "model", "chunk", "state")
        check_callable("OverTime", "state", state, "model", "batch")
        if last is not None:
            check_callable("OverTime", "last", last, "model", "state", "batch")
        if prepare is not None:
            check_callable("OverTime", "prepare", prepare, "model", "batch")
        for name, value, least, expected in (
            ("state_dim", state_dim, 0, "the number of a dimension, or None to find it"),
            ("dim", dim, 1, "at least 1, since samples lie along dimension 0: transpose [time, rows] to [rows, time]"),
            ("chunk", chunk, 1, "a number of steps, or None to measure"),
        ):
            is_left_out = value is None and name != "dim"
            if not is_left_out and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise LossError(f"OverTime({name}={value!r}); expected {expected}")
        if mode not in ("exact", "truncated"):
            raise LossError(f"OverTime(mode={mode!r}); expected 'exact' or 'truncated'")
        if chunk is None and mode == "truncated":
            raise LossError("OverTime(mode='truncated') needs chunk=: how far back gradients go is part of the method")
        if isinstance(broadcast, str):
            raise LossError(f"OverTime(broadcast={broadcast!r}); expected a sequence of paths: [{broadcast!r}]")
        self.chunk_loss, self.state, self.last = chunk_loss, state, last
        self.dim, self.chunk, self.mode, self.carry = dim, chunk, mode, carry
        self.broadcast, self.prepare, self.state_dim = tuple(broadcast), prepare, state_dim
        self.carried: Carried | None = None
        self.known_dims: dict[tuple[int, int], int | None] = {}
        self.has_run_again = False
        self.has_given_losses = False
        self.measured: dict[int, tuple[float, float]] = {}  # bytes of a state and of a step, by the length in bits

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self.chunk_loss, self.state, self.last, self.prepare

    def reset(self) -> None:
        """Forgets the carried state, so that the next batch starts from ``state(model, batch)``."""
        self.carried = None

    def __call__(self, model: Any, batch: Any) -> Any:
        """The loss of whole sequences at once, or a mapping of losses, with one graph of all steps.

        With ``carry`` it starts from the carried state, which does not change.
        """
        try:
            rows = count_samples(batch)
        except BatchError:
            rows = 0
        sequences = _Sequences(self, model, batch, Place(0, rows, rows), is_alone=True)
        cuts = self.mode == "truncated"
        length = self.chunk if cuts and self.chunk else sequences.steps.total
        totals: dict[str, Any] = {}
        for piece in sequences.at_once(length, cuts=cuts):
            for name, loss in () if piece.result is None else Evaluation(piece.result, torch.enable_grad):
                part = loss if isinstance(loss, Mean) else loss * piece.share(name)
                totals[name] = totals[name] + part if name in totals else part
        return totals[SINGLE] if list(totals) == [SINGLE] else totals

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Gives the losses chunk by chunk, see ``InPieces``.

        The length that a plan has chosen counts in mode ``"exact"``, whose gradient does not depend on it.
        """
        sequences = _Sequences(self, model, batch, place)
        length = self.chunk if self.mode == "truncated" else place.length or self.chunk
        if not place.differentiate:
            yield from sequences.at_once(length or min(sequences.steps.total, _WITHOUT_GRAPH))
            return
        yield from sequences.back(length or sequences.affordable_length(), exact=self.mode == "exact")

    def cut_of(self, batch: Any, chosen: int | None) -> tuple[int, float] | None:
        """The steps in a chunk and in a batch, infinite if not known; ``None`` where all steps are in one chunk."""
        given = self.chunk if self.mode == "truncated" else chosen or self.chunk
        is_unknown = given is None and self.prepare is not None  # which may put the time elsewhere
        try:
            total: float = math.inf if is_unknown else Steps(batch, self.dim, self.broadcast).total
        except BatchError:
            total = math.inf  # before ``prepare``
        return (given or _SHORTEST, total) if total > (given or 2 * _SHORTEST) else None

    def in_chunks(self, length: int) -> "OverTime":
        """The same loss in chunks of another length, which carries nothing and learns apart."""
        other = copy.copy(self)
        other.chunk, other.carried, other.known_dims = length, None, dict(self.known_dims)
        return other

    def state_dict(self) -> dict[str, Any]:
        """The carried state."""
        return {"carried": None if self.carried is None else self.carried.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a carried state that ``state_dict`` gave."""
        self.carried = None if state["carried"] is None else Carried.from_state_dict(state["carried"])


_Pair = tuple[Any, tuple[Any, ...]]
"""The state of the sequences that go on, and the last states of those that ended before the others did."""


class _Sequences:
    """One micro-batch of sequences, gone through chunk by chunk."""

    def __init__(self, loss: OverTime, model: Any, batch: Any, place: Place, *, is_alone: bool = False) -> None:
        self._loss, self._model, self._given, self._place, self._is_alone = loss, model, batch, place, is_alone
        self._batch = batch if loss.prepare is None else loss.prepare(model, batch)
        self.steps = Steps(self._batch, loss.dim, loss.broadcast)
        self._rows = self.steps.rows_at(0) or place.rows
        self._modules = modules_of(*modules_behind(model, loss))
        self._call = ChunkCall(loss.chunk_loss, model, self._modules, self._batch)
        self._dims = RowDims(loss.state_dim, self._modules, loss.known_dims)
        self._carries = loss.carry and place.differentiate
        self._wants_ends = loss.last is not None or self._carries

    def at_once(self, length: int, *, cuts: bool = False) -> Iterator[Piece]:
        """Gives the losses with the graphs of all chunks, or without any where none is made."""
        self._cut(length)
        carried: _Pair = self._initial(), ()
        with self._looking_back():
            for index, chunk in enumerate(self._chunks.batches):
                called = self._call(chunk, carried[0])
                yield self._piece(index, called)
                carried = self._handed_on(called.state, carried[1], index)
                if cuts and index + 1 < self._count:
                    carried = detached(carried)
        if self._loss.last is not None:
            yield self._last(self._final(carried))
        self._check_has_losses()

    def _check_has_losses(self) -> None:
        if not self._call.gives_losses and self._loss.last is None:
            raise LossError("chunk_loss gave None as the loss of every chunk, and there is no last=; expected a loss")

    def _looking_back(self) -> contextlib.AbstractContextManager[None]:
        return self._call.looking_back() if self._count > 1 else contextlib.nullcontext()

    def back(self, length: int, *, exact: bool) -> Iterator[Piece]:
        """Gives the losses chunk by chunk, each of which is to be differentiated before the next is asked for."""
        self._cut(length)
        origin = self._initial()
        with contextlib.ExitStack() as upstream, self._looking_back():
            given = (self._chunks.batches if self._loss.prepare is not None else (), origin)
            batches, state = upstream.enter_context(cut(given))
            self._chunks.batches = batches or self._chunks.batches
            declare_nothing_to_do()  # a chunk that takes no gradient from its state is no mistake
            del origin, given
            if exact:
                yield from self._last_first(state)
            else:
                yield from self._first_to_last(state, upstream)
            self._check_has_losses()
            del batches, state
            self._chunks.batches = ()
        yield Piece(None, whole)  # after what went upstream

    def _cut(self, length: int) -> None:
        self._chunks = self.steps.cut(length)
        self._count = len(self._chunks.bounds)

    def _last_first(self, state: Any) -> Iterator[Piece]:
        """Runs all chunks but the last without a graph, and then each with one, from the last to the first.

        A loss that is a function is left out the first time, unless it draws random numbers: then the next chunk would
        draw the same ones.
        """
        call, chunks = self._call, self._chunks.batches
        if self._count > 1:
            call.refuse_hidden_dropout()
        carried: _Pair = state, ()
        entered: list[tuple[_Pair, Any]] = []
        for index, chunk in enumerate(chunks[:-1]):
            with torch.no_grad(), call.checkpoint.first() as run_again:
                # The loss of the first chunk shows whether losses draw random numbers.
                new = call(chunk, carried[0], wants_loss=index == 0 or bool(call.draws), looks=index == 0).state
            call.draws = bool(call.draws)
            entered.append((carried, run_again))
            carried = self._handed_on(kept(new, carried[0]), carried[1], index)
            del new
        del state
        if entered:
            torch.clear_autocast_cache()  # of weights that were cast without a graph
        upstream: Gradients = []
        # From the end of time: the gradient at the first state of a chunk is that of the last state of the one before.
        for index in reversed(range(self._count)):
            is_again = index + 1 < self._count
            after, again = carried, contextlib.nullcontext()
            if is_again:
                carried, run_again = entered.pop()
                again = run_again()
            given, leaves = standing_in(carried) if index else (carried, [])
            looks = is_again and not self._loss.has_run_again
            with again:
                called = call(chunks[index], given[0], looks=looks and not call.draws)
            left: Any = self._handed_on(called.state, given[1], index)
            if looks:
                self._compare(left, after, index)
            with standing(leaves):
                if not is_again:
                    left, upstream = yield from self._end(left, given)
                yield self._piece(index, called, self._roots_of(left, upstream))
            del called, given, after, left
            upstream = [None if leaf is None else leaf.grad for leaf in leaves]
        self._loss.has_run_again |= self._count > 1

    def _first_to_last(self, state: Any, upstream: contextlib.ExitStack) -> Iterator[Piece]:
        """Runs each chunk once, from a state without a graph."""
        if self._loss.last is not None and self.steps.is_packed and self._count > 1:
            raise LossError(
                "OverTime(mode='truncated', last=...) on packed sequences: those that end before the last chunk would "
                "get no gradient; expected mode='exact', or a loss within chunk_loss"
            )
        carried: _Pair = state, ()
        del state
        for index, chunk in enumerate(self._chunks.batches):
            called = self._call(chunk, carried[0])
            if index + 1 < self._count:
                piece = self._piece(index, called)
                carried = self._handed_on(kept(called.state, carried[0]), carried[1], index)
                del called
                yield piece
                del piece
            else:
                left = self._handed_on(called.state, carried[1], index)
                final, gradients = yield from self._end(left, carried)
                yield self._piece(index, called, self._roots_of(final, gradients))
            if index == 0 and self._loss.prepare is None:  # whose graph may be a part of the same one
                upstream.close()
                yield Piece(None, whole)

    def _piece(self, index: int, called: Called, roots: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> Piece:
        share = self._chunks.share(index, self._place.count, is_weighed=not self._is_alone)
        return Piece(called.result, share, roots, called.metrics)

    def _initial(self) -> Any:
        """The state before the first step, in the order of packed sequences."""
        carried, place, state = self._loss.carried, self._place, None
        if self._carries and carried is not None:
            state = carried.of(place.start, place.start + self._rows, place.rows_of_batch, self._dims)
        if state is None:
            state = self._loss.state(self._model, self._batch)
        return self._in_order(checked_state(state, "state(model, batch)"), self.steps.order)

    def _in_order(self, state: Any, order: torch.Tensor | None) -> Any:
        if order is None or len(order) < 2:
            return state
        return reordered(state, self._dims.of(state, self._rows), order)

    def _in_own_order(self, state: Any) -> Any:
        return self._in_order(state, None if self.steps.order is None else self.steps.order.argsort())

    def _handed_on(self, state: Any, ends: tuple[Any, ...], index: int) -> _Pair:
        """The rows of a state that go on after a chunk; those of sequences that end in it join the ends, if wanted."""
        start, stop = self._chunks.bounds[index]
        entered, left = self.steps.rows_at(start), self.steps.rows_at(stop)
        if entered is None or left is None or entered == left or not (left or self._wants_ends):
            return state, ends
        dims = self._dims.of(state, entered)
        if self._wants_ends:
            ends = (*ends, narrowed(state, dims, left, entered))
        return (narrowed(state, dims, 0, left) if left else state), ends

    def _final(self, carried: _Pair) -> Any:
        """The last state of every sequence, in the order of the packed ones, of which the longest come first."""
        state, ends = carried
        return joined(ends[::-1], self._dims.of(ends[-1], self._rows)) if ends else state

    def _end(self, carried: _Pair, given: Any) -> Generator[Piece, None, tuple[Any, Gradients]]:
        """Gives the loss on the last states, which it returns with their gradients and keeps for the next batch."""
        if not self._wants_ends:
            return None, []
        final = self._final(carried)
        states = kept(final, given)
        if self._carries:
            place = self._place
            known = self._loss.carried or Carried(place.rows_of_batch)
            own = self._in_own_order(states)
            self._loss.carried = known.followed_by(place.start, place.start + self._rows, own)
        if self._loss.last is None:
            return None, []
        stand_in, leaves = standing_in(states)
        with standing(leaves):
            yield self._last(stand_in)
        return final, [None if leaf is None else leaf.grad for leaf in leaves]

    def _last(self, states: Any) -> Piece:
        loss, count = self._loss, self._place.count
        with in_place_explained("the state that last was given"):
            result = loss.last(self._model, self._in_own_order(states), self._given) if loss.last is not None else None
        metrics = None
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, metrics = result
        is_weighed = not isinstance(result, (Mean, Mapping)) and not isinstance(count, (Mapping, str))
        if is_weighed and self._call.gives_losses and count is not count_samples:
            raise CountError(
                f"count= is one function, for the losses of chunks and the loss {LAST!r} on the last state, which is "
                f"the mean over samples; expected a mapping: count={{'loss': ..., {LAST!r}: anybatch.count_samples}}"
            )
        loss.has_given_losses |= self._call.gives_losses
        beside = loss.has_given_losses or (isinstance(count, Mapping) and LAST in count)
        return Piece({LAST: result} if beside and not isinstance(result, Mapping) else result, whole, (), metrics)

    def _roots_of(self, state: Any, gradients: Gradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors of the state after a chunk that take a gradient, each with its own."""
        if not gradients:
            return []
        found = flat(state)
        if len(found) != len(gradients):
            raise LossError(
                f"a state of chunk_loss has {len(found)} leaves, the same one of the first pass had "
                f"{len(gradients)}; expected a function that does the same when run again"
            )
        return [
            (leaf, gradient)
            for leaf, gradient in zip(found, gradients, strict=True)
            if gradient is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]

    def _compare(self, new: Any, expected: Any, index: int) -> None:
        """Refuses a chunk that gives another state the second time; looked at once, since that waits for the device."""
        found, before = flat(detached(new)), flat(expected)
        if len(found) != len(before) or not all(map(is_near, found, before)):
            start, stop = self._chunks.bounds[index]
            raise LossError(
                f"chunk_loss gives a different state for the steps {start} to {stop - 1} when it runs again; "
                "expected it to depend only on the model, the chunk, the state and the global random state. Look "
                "for state kept on a module and for generators of your own, and pass on in the state what a chunk "
                "needs from the previous one"
            )

    def affordable_length(self) -> int:
        """The longest chunk that takes little memory, from what two short ones take; see ``best_length``.

        What was measured holds until there are twice the steps. Micro-batches of other sizes have the same proportions.
        """
        total, known = self.steps.total, self._loss.measured
        if total <= 2 * _SHORTEST:
            return total
        size = total.bit_length()
        if size not in known:
            (low, _), (high, state) = (self._graph_bytes(length) for length in (_SHORTEST // 2, _SHORTEST))
            known[size] = state, (high - low) / (_SHORTEST - _SHORTEST // 2)
            logger.info("of %d steps a state takes %d bytes, two short chunks took %d and %d", total, state, low, high)
        return best_length(total, *known[size])

    def _graph_bytes(self, length: int) -> tuple[int, int]:
        saved = RandomState(self._call.devices)
        buffers = [(b, b.clone()) for module in self._modules for b in module._buffers.values() if b is not None]
        self._cut(length)
        recording = Recording()
        try:
            with torch.no_grad(), masks_set_aside():
                state = standing_in(self._initial())[0]
            with recording, recomputing(), masks_set_aside(), self._looking_back():
                new = self._call(self._chunks.batches[0], state).state  # its graph stays, the loss does not
            return recording.bytes_made, own_bytes(new, state)
        finally:
            self._call.gives_losses = False
            saved.restore()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def best_length(total: int, state: float, step: float) -> int:
    """The longest chunk that holds less than twice what the best one does.

    With chunks of k of T steps, states of s bytes and activations of a bytes a step, what is held is
    T / k * s + k * a, which is least at k = sqrt(T * s / a). Longer chunks are faster.

    Example:
        >>> best_length(4096, 4096, 44544)
        68
    """
    if step <= 0:
        return total
    longest = math.sqrt(total * state / step) * (_MOST + math.sqrt(_MOST**2 - 1))
    return min(total, max(_SHORTEST, int(longest)))
