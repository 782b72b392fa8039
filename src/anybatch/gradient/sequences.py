"""The sequences of a micro-batch, and what the user's functions make of a chunk of them."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import torch

from anybatch.errors import LossError, NotSplittable
from anybatch.gradient.carrying import Carried
from anybatch.gradient.pieces import Piece, Place, in_place_explained, whole
from anybatch.gradient.preparing import Bounds, Prepared
from anybatch.gradient.states import (
    RowDims,
    checked_state,
    detached,
    joined,
    mapped,
    narrowed,
    own_bytes,
    reordered,
    tensors_of,
    versions,
)
from anybatch.gradient.timesteps import Shares, Steps
from anybatch.levers.rerun import TwoPasses
from anybatch.records.means import Mean
from anybatch.tensors.dropouts import masks_set_aside
from anybatch.tensors.graph import recomputing
from anybatch.tensors.meter import LiveBytes
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.randomness import RandomState

if TYPE_CHECKING:
    from anybatch.gradient.overtime import OverTime

LAST = "last"
"""The name of the loss on the last state, where there are others beside it."""


class Sequences:
    """The sequences of a micro-batch.

    Args:
        loss: the user's functions.
        model: their first argument.
        batch: a micro-batch.
        place: what is asked.
        is_cut: whether gradients are collected chunk by chunk.
        is_alone: whether they are all that is asked for, and no micro-batch.

    Attributes:
        steps: of the batch.
        prepared: the batch that is cut.
        passes: runs chunks twice.
        gives_losses: whether a chunk has given a loss.
        loss_draws: whether a loss that is a function draws random numbers; ``None`` until it is known.
    """

    def __init__(
        self, loss: "OverTime", model: Any, batch: Any, place: Place, *, is_cut: bool, is_alone: bool = False
    ) -> None:
        self.loss = loss
        self._model = model
        self._given = batch
        self._place = place
        self._is_alone = is_alone
        made = batch if loss.prepare is None else loss.prepare(model, batch)
        self.prepared = Prepared(made, is_cut=is_cut and loss.prepare is not None)
        self.steps = Steps(self.prepared.batch, loss.dim, loss.broadcast)
        self._tensors = tensors_of(self.prepared.batch)
        self._rows = self.steps.rows_at(0) or place.rows
        roots = modules_behind(model, loss)
        self.modules = modules_of(*roots)
        self.devices = list({p.device for m in self.modules for p in m._parameters.values() if p is not None})
        self.passes = TwoPasses("the chunk_loss of OverTime", modules_of(*roots), devices=self.devices)
        self.gives_losses = False
        self.loss_draws: bool | None = None
        self._dims = RowDims(loss.state_dim, self.modules, loss.known_dims)
        self._both_ways = [m for m in self.modules if isinstance(m, torch.nn.RNNBase) and m.bidirectional]
        self._ended: list[Any] = []  # the last states of sequences that ended before the others did

    @property
    def has_last(self) -> bool:
        """Whether there is a loss on the last state."""
        return self.loss.last is not None

    @property
    def has_final(self) -> bool:
        """Whether the last states are asked for."""
        return self.has_last or self._carries

    @property
    def _carries(self) -> bool:
        return self.loss.carry and self._place.differentiate

    def initial(self) -> Any:
        """The state before the first step, in the order of packed sequences."""
        carried, place = self.loss.carried if self._carries else None, self._place
        stop = place.start + self._rows
        if carried is not None and carried.knows(place.start, stop, place.rows_of_batch):
            state = carried.of(place.start, stop, self._dims)
        else:
            state = self.loss.state(self._model, self.prepared.whole)
        return self._in_order(checked_state(state, "state(model, batch)"), self.steps.order)

    def _in_order(self, state: Any, order: torch.Tensor | None) -> Any:
        if order is None or len(order) < 2:
            return state
        return reordered(state, self._dims.of(state, self._rows), order)

    def dims(self, state: Any, step: int) -> list[int | None]:
        """Along which dimension of the leaves of a state the sequences lie.

        Args:
            state: of the sequences that reach a step.
            step: the first of the chunk that gave it.
        """
        return self._dims.of(state, self.steps.rows_at(step) or self._rows)

    def entering(self, state: Any, step: int, since: int) -> Any:
        """The state of the sequences that reach a step.

        Args:
            state: after the step before.
            step: the next one.
            since: the first step of the chunk that gave the state.
        """
        here, before = self.steps.rows_at(step), self.steps.rows_at(since)
        if here is None or before is None or here == before:
            return state
        return narrowed(state, self.dims(state, since), 0, here)

    def called(
        self,
        state: Any,
        bounds: Bounds,
        *,
        wants_loss: bool = True,
        around_loss: Callable[[], None] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Runs a chunk.

        Args:
            state: before it.
            bounds: of the chunk.
            wants_loss: whether a loss that is a function is called.
            around_loss: is called before and after such a loss.

        Returns:
            The losses, the state and the metrics.

        Raises:
            LossError: the user's function gives something else.
        """
        chunk = self.prepared.chunk(self.steps, bounds)
        given = mapped(lambda leaf: leaf, state)  # containers are not shared
        watched = tensors_of(state)
        before = versions(watched), versions(self._tensors)
        looks_ahead = bool(self._both_ways) and bounds != (0, self.steps.total)
        with _one_way(self._both_ways) if looks_ahead else _NOTHING:
            try:
                found = self.loss.chunk_loss(self._model, chunk, given)
                result, new, metrics = _checked_parts(found)
                _check_is_handed_on(new, watched)
                self.gives_losses = self.gives_losses or result is not None
                if callable(result) and not isinstance(result, (torch.Tensor, Mean, Mapping)):
                    result = _evaluated(result, around_loss) if wants_loss else None
            except RuntimeError as error:
                with in_place_explained("the state that chunk_loss was given"):
                    raise error
        for what, was, now in zip(
            ("state", "chunk"), before, (versions(watched), versions(self._tensors)), strict=True
        ):
            if was != now:
                raise _written(what)
        _check_result(result)
        return result, checked_state(new, "chunk_loss"), metrics

    def shares(self, bounds: Sequence[Bounds]) -> Shares:
        """Which share of the items each chunk has.

        Args:
            bounds: of all chunks.
        """
        place = self._place
        return Shares(self.steps, bounds, place.count, self.prepared.batch, is_weighed=not self._is_alone)

    def note_ended(self, state: Any, bounds: Bounds) -> None:
        """Keeps the last states of the sequences that end in a chunk, if they are asked for.

        Args:
            state: after the chunk.
            bounds: of the chunk.
        """
        entered, left = self.steps.rows_at(bounds[0]), self.steps.rows_at(bounds[1])
        if entered is None or left is None or left == entered or not self.has_final:
            return
        part = state if left == 0 else narrowed(state, self.dims(state, bounds[0]), left, entered)
        self._ended.append(part)

    def final(self, state: Any) -> Any:
        """The last state of every sequence, in the order of the packed ones.

        Args:
            state: after the last step.
        """
        ended, self._ended = self._ended[::-1], []
        if len(ended) < 2:
            return ended[0] if ended else state
        return joined(ended, self._dims.of(ended[0], self._rows))

    def last(self, final: Any) -> Piece:
        """The loss on the last states.

        Args:
            final: what ``final`` gave.
        """
        loss, order = self.loss, self.steps.order
        state = self._in_order(final, None if order is None else order.argsort())
        with in_place_explained("the state that last was given"):
            result = loss.last(self._model, state, self._given) if loss.last is not None else None
        metrics = None
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, metrics = result
        loss.check_count_of_last(result, self._place.count, beside_others=self.gives_losses)
        count = self._place.count
        beside = self.gives_losses or loss.has_given_losses or (isinstance(count, Mapping) and LAST in count)
        loss.has_given_losses |= self.gives_losses
        named = {LAST: result} if beside and not isinstance(result, Mapping) else result
        return Piece(named, whole, (), metrics)

    def carry(self, final: Any) -> None:
        """Keeps the last states for the next batch, if that is asked for.

        Args:
            final: what ``final`` gave, without a graph.
        """
        if not self._carries:
            return
        order, place = self.steps.order, self._place
        state = self._in_order(final, None if order is None else order.argsort())
        known = self.loss.carried or Carried(place.rows_of_batch)
        self.loss.carried = known.replaced(place.start, place.start + self._rows, state, self._dims)

    def graph_bytes(self, length: int) -> tuple[int, int]:
        """What a chunk keeps for its backward, and what a state takes; nothing is changed.

        Args:
            length: of the chunk.

        Returns:
            The bytes of its graph and of a state.
        """
        saved = RandomState([device for device in self.devices if device.type != "meta"])
        buffers = [(b, b.clone()) for module in self.modules for b in module._buffers.values() if b is not None]
        gives_losses = self.gives_losses
        live = LiveBytes()
        try:
            with torch.no_grad(), masks_set_aside():
                state = mapped(_with_gradient, detached(self.initial()))
            with live, recomputing(), masks_set_aside():
                result, new, _ = self.called(state, (0, min(length, self.steps.total)))
            size = own_bytes(new, state)
            del result
            return live.current, size
        finally:
            self.gives_losses = gives_losses
            saved.restore()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def random_position(self) -> list[Any]:
        """What changes when torch draws a random number."""
        on_devices = [getattr(torch, d.type).get_rng_state(d) for d in self.devices if d.type not in ("cpu", "meta")]
        return [torch.get_rng_state(), *on_devices]


def is_same_position(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether nothing was drawn between two random positions.

    Args:
        one: what ``random_position`` gave.
        other: what it gave later.
    """
    return all(_plain(a) == _plain(b) for a, b in zip(one, other, strict=True))


def _plain(state: Any) -> Any:
    """The bytes of a random state, read without an operation, which fake tensors and whoever counts bytes would see."""
    return ctypes.string_at(state.data_ptr(), state.nbytes) if isinstance(state, torch.Tensor) else state


def _with_gradient(leaf: Any) -> Any:
    can = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return leaf.requires_grad_() if can else leaf


_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _one_way(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Refuses layers that look ahead where what is ahead has been cut off."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(_refuse_both_ways).remove)
        yield


def _checked_parts(found: Any) -> tuple[Any, Any, Any]:
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise LossError(f"chunk_loss gave a {type(found).__name__}; expected (loss, state) or (loss, state, metrics)")
    result, new, *rest = found
    metrics = rest[0] if rest else None
    if metrics is not None and not isinstance(metrics, Mapping):
        raise LossError(f"the metrics of chunk_loss are a {type(metrics).__name__}; expected a mapping of Means")
    return result, new, metrics


def _check_is_handed_on(new: Any, before: Sequence[torch.Tensor]) -> None:
    """Refuses to begin every chunk anew, as an RNN would from ``None``, where the state had tensors."""
    if before and not tensors_of(new):
        raise LossError(
            f"chunk_loss gave the state {new!r} after one with tensors; expected the state that the next chunk begins "
            "with: return (loss, state)"
        )


def _evaluated(loss: Callable[[], Any], around: Callable[[], None] | None) -> Any:
    if around is None:
        return loss()
    around()
    result = loss()
    around()
    return result


def _check_result(result: Any) -> None:
    if isinstance(result, GeneratorType):
        raise LossError(
            "the loss of chunk_loss is a generator; expected a loss, a Mean, a mapping of names to either, None, or a "
            "function without arguments that gives one of these"
        )
    if isinstance(result, tuple):
        raise LossError(
            "the loss of chunk_loss is a tuple; expected the metrics behind the state: (loss, state, metrics)"
        )


def _written(what: str) -> LossError:
    if what == "state":
        return LossError(
            "chunk_loss changes the state that it is given in place (such as state.mul_() or state[...] = x), so that "
            "the chunk can't run again; expected a new state: clone it first"
        )
    return LossError(
        "chunk_loss wrote to a tensor of the batch in place, so that the chunk would be another one when it runs "
        "again; use the operation that does not write in place, or clone the tensor first"
    )


def _refuse_both_ways(module: torch.nn.Module, _: Any) -> None:
    kind = type(module).__name__
    raise NotSplittable(
        f"a bidirectional {kind} runs within chunk_loss of OverTime, where its backward direction would begin anew at "
        "the end of every chunk and never see what follows. Choose one:\n"
        "  - run it on all steps before they are cut (exact): OverTime(..., prepare=lambda model, batch: {**batch, "
        "'x': model.rnn(batch['x'])[0]});\n"
        f"  - a {kind} in one direction only (another model).",
        modules=[kind],
    )
