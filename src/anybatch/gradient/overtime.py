"""Losses over long sequences, in chunks of time with a carried state."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import torch

from anybatch.errors import BatchError, CountError, LossError
from anybatch.gradient.carrying import Carried
from anybatch.gradient.chunklength import Costs, affordable_length
from anybatch.gradient.losses import SINGLE, Evaluation
from anybatch.gradient.pieces import InPieces, Piece, Place, check_callable
from anybatch.gradient.sequences import LAST, Sequences
from anybatch.gradient.sweeps import at_once, exact, truncated
from anybatch.gradient.timesteps import Steps
from anybatch.records.means import Mean
from anybatch.tensors.counting import count_samples

Mode = Literal["exact", "truncated"]


class OverTime(InPieces):
    """A loss function over sequences that runs in chunks of time, within the memory of one chunk.

    In mode ``"exact"`` the gradient is that of back-propagation through all steps: a first pass without a graph keeps
    the state at the beginning of each chunk, then each chunk runs once more, the last one first, and hands the gradient
    of its initial state to the one before. In mode ``"truncated"`` no gradient goes from a chunk to the one before
    (truncated back-propagation through time).

    Args:
        chunk_loss: ``chunk_loss(model, chunk, state)`` gives ``(loss, state)`` or ``(loss, state, metrics)``. The loss
            is the mean over the items of the chunk, a ``Mean``, a mapping of names to either, ``None``, or a function
            without arguments that gives one of these and is called only where the loss is wanted; metrics are ``Mean``
            s by name. The state is any nested container of tensors and plain values. Neither it nor the chunk is
            changed in place, and what a chunk needs of the one before is in the state: a function that looks at other
            steps in another way, such as a convolution over time, sees those of its chunk only; see ``prepare``.
        state: ``state(model, batch)`` gives the initial state, which may depend on parameters, as that of a decoder
            on its encoder does. In mode ``"truncated"`` only the first chunk's gradient goes up from it.
        dim: the dimension of time in the tensors of the batch. Tensors with fewer dimensions go to every chunk whole.
        chunk: steps in a chunk; ``None`` in mode ``"exact"`` for what is measured: the most that take at most twice
            the bytes of the best chunk, which has sqrt(steps * bytes of a state / bytes of activations a step) steps.
        mode: ``"exact"`` or ``"truncated"``.
        last: ``last(model, state, batch)`` gives a loss on the last state of every sequence, the mean over samples, or
            it and metrics.
        carry: whether a batch begins with the last state of the batch before, detached, as for a stream that is cut
            into windows; ``reset()`` begins anew. An evaluation begins with ``state`` and leaves what is carried alone.
        broadcast: dotted paths of leaves of the batch that are no sequences.
        prepare: ``prepare(model, batch)`` gives the batch that is cut along time and that ``state`` sees, where a part
            of it is computed from all steps at once, such as the output of a bidirectional layer. Its graph is cut
            there and gone through once.
        state_dim: the dimension of the sequences in the tensors of the state. ``None`` finds it by the number of
            sequences, as is needed for packed sequences and ``carry``.

    Raises:
        LossError: an argument is none that can be meant.

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
    """By which ``gradient.losses.as_over_time`` knows it."""

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
        if state_dim is not None and (isinstance(state_dim, bool) or not isinstance(state_dim, int) or state_dim < 0):
            raise LossError(
                f"OverTime(state_dim={state_dim!r}); expected the number of a dimension, or None to find it"
            )
        if mode not in ("exact", "truncated"):
            raise LossError(f"OverTime(mode={mode!r}); expected 'exact' or 'truncated'")
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise LossError(
                f"OverTime(dim={dim!r}); expected at least 1, since samples lie along dimension 0: transpose [time, "
                "rows] to [rows, time]"
            )
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise LossError(f"OverTime(chunk={chunk!r}); expected a number of steps, or None to measure")
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
        self._measured: dict[int, Costs] = {}

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self.chunk_loss, self.state, self.last, self.prepare

    def reset(self) -> None:
        """Lets the next batch begin with ``state(model, batch)``, as at the start of another stream."""
        self.carried = None

    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the loss of whole sequences at once, with the graph of all their steps.

        Args:
            model: the first argument of ``chunk_loss``.
            batch: of sequences.

        Returns:
            The loss, or a mapping of losses. A carried state is begun with, and not replaced.
        """
        rows = _rows_of(batch)
        sequences = Sequences(self, model, batch, Place(0, rows, rows), is_cut=False, is_alone=True)
        cuts = self.mode == "truncated"
        length = self.chunk if cuts and self.chunk else sequences.steps.total
        return _joined([*at_once(sequences, length, cuts=cuts)])

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Gives the losses chunk by chunk, see ``InPieces``.

        Args:
            model: the first argument of ``chunk_loss``.
            batch: a micro-batch.
            place: what is asked; the length that a plan has chosen counts in mode ``"exact"``, whose gradient does not
                depend on it.
        """
        sequences = Sequences(self, model, batch, place, is_cut=place.differentiate)
        total = sequences.steps.total
        length = self.chunk if self.mode == "truncated" else place.length or self.chunk
        if not place.differentiate:
            yield from at_once(sequences, length or min(total, _WITHOUT_GRAPH))
        elif self.mode == "truncated" and length is not None:
            yield from truncated(sequences, length)
        else:
            yield from exact(sequences, length or affordable_length(sequences, self._measured))

    def check_count_of_last(self, loss: Any, count: Any, *, beside_others: bool) -> None:
        """Refuses a count that is meant for the losses of chunks, where the loss on the last state is weighed by it.

        Args:
            loss: on the last state.
            count: how items are counted.
            beside_others: whether chunks give losses.

        Raises:
            CountError: it is none of samples.
        """
        if isinstance(loss, (Mean, Mapping)) or not beside_others or isinstance(count, (Mapping, str)):
            return
        if count is not count_samples:
            raise CountError(
                f"count= is one function, for the losses of chunks and the loss {LAST!r} on the last state, which is "
                f"the mean over samples; expected a mapping: count={{'loss': ..., {LAST!r}: anybatch.count_samples}}"
            )

    def is_cut(self, batch: Any) -> bool:
        """Whether the sequences of a batch may go through in more than one chunk.

        Args:
            batch: of sequences.
        """
        return self.chunk is None or self.chunk < Steps(batch, self.dim, self.broadcast).total

    def state_dict(self) -> dict[str, Any]:
        """The carried state."""
        return {"carried": None if self.carried is None else self.carried.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a carried state.

        Args:
            state: what ``state_dict`` gave.
        """
        self.carried = None if state["carried"] is None else Carried.from_state_dict(state["carried"])


_WITHOUT_GRAPH = 256  # steps in a chunk where nothing is kept for a backward


def _rows_of(batch: Any) -> int:
    try:
        return count_samples(batch)
    except BatchError:
        return 0


def _joined(pieces: Sequence[Piece]) -> Any:
    """The losses of all chunks together."""
    totals: dict[str, Any] = {}
    for piece in pieces:
        if piece.result is None:
            continue
        for name, loss in Evaluation(piece.result, torch.enable_grad):
            part = loss if isinstance(loss, Mean) else loss * piece.share(name)
            totals[name] = totals[name] + part if name in totals else part
    return totals[SINGLE] if list(totals) == [SINGLE] else totals
