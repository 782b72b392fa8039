"""Goes through the chunks of sequences: forward for states, and back for gradients."""

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anybatch.errors import LossError, NotSplittable
from anybatch.gradient.pieces import Piece, standing, whole
from anybatch.gradient.preparing import Bounds
from anybatch.gradient.sequences import Sequences, is_same_position
from anybatch.gradient.states import detached, flat, kept, like

Gradients = list[torch.Tensor | None]
"""Of the leaves of a state, in order; ``None`` where there is none."""


def at_once(sequences: Sequences, length: int, *, cuts: bool = False) -> Iterator[Piece]:
    """Gives the losses with the graphs of all chunks, or without any where none is made.

    Args:
        sequences: of a micro-batch.
        length: of a chunk.
        cuts: whether the graph is cut between chunks.
    """
    bounds = sequences.steps.bounds(length)
    shares = sequences.shares(bounds)
    state = sequences.initial()
    for index, chunk in enumerate(bounds):
        state = sequences.entering(state, chunk[0], bounds[max(0, index - 1)][0])
        result, state, metrics = sequences.called(state, chunk)
        sequences.note_ended(state, chunk)
        yield Piece(result, shares.of(index), (), metrics)
        if cuts and index + 1 < len(bounds):
            state = detached(state)
    if sequences.has_last:
        yield sequences.last(sequences.final(state))
    _check_has_losses(sequences)


def truncated(sequences: Sequences, length: int) -> Iterator[Piece]:
    """Gives the losses of chunks in their order; no gradient goes from one to the one before.

    Args:
        sequences: of a micro-batch.
        length: of a chunk.

    Raises:
        LossError: a loss on the last state would miss sequences that have ended.
    """
    bounds = sequences.steps.bounds(length)
    if sequences.has_last and sequences.steps.is_packed and len(bounds) > 1:
        raise LossError(
            "OverTime(mode='truncated', last=...) on packed sequences: those that end before the last chunk would get "
            "no gradient; expected mode='exact', or a loss within chunk_loss"
        )
    shares = sequences.shares(bounds)
    origin = sequences.initial()
    state, leaves = _stand_in(origin, [_needs_gradient(leaf) for leaf in flat(origin)])
    for index, chunk in enumerate(bounds):
        result, new, metrics = sequences.called(state, chunk)
        piece = Piece(result, shares.of(index), (), metrics)
        with standing([*_tensors(leaves), *sequences.prepared.leaves]):
            if index + 1 < len(bounds):
                after = kept(new, state)
                sequences.note_ended(after, chunk)
                state = sequences.entering(after, bounds[index + 1][0], chunk[0])
                del new, after, result
                yield piece
            else:
                yield from _ended(sequences, new, state, chunk, piece, [])
                del new, result
            del piece
        sequences.prepared.collect(sequences.steps, chunk)
        if index == 0 and not sequences.prepared.has_graph:  # else it may be a part of the same graph
            yield Piece(None, whole, _roots(origin, _gradients(leaves)))
            leaves, origin = [], None
    yield Piece(None, whole, [*_roots(origin, _gradients(leaves)), *sequences.prepared.gradients()])
    _check_has_losses(sequences)


def exact(sequences: Sequences, length: int) -> Iterator[Piece]:
    """Gives the losses of chunks from the last to the first, whose gradients are those of all steps.

    Args:
        sequences: of a micro-batch.
        length: of a chunk.
    """
    bounds = sequences.steps.bounds(length)
    if len(bounds) > 1:
        _refuse_hidden_dropout(sequences)
    shares = sequences.shares(bounds)
    origin = sequences.initial()
    needs = [_needs_gradient(leaf) for leaf in flat(origin)]
    entered, state = _advanced(sequences, bounds, detached(origin))
    upstream: Gradients = []
    final: Gradients = []
    for index in reversed(range(len(bounds))):
        again: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        after: Any = None
        if index + 1 < len(bounds):
            after = state
            state, forward = entered.pop()
            again = forward.again()
        stand_in, leaves = _stand_in(state, needs if index == 0 else None)
        with again:
            result, new, metrics = _with_loss(sequences, stand_in, bounds[index], is_again=index + 1 < len(bounds))
        piece = Piece(result, shares.of(index), (), metrics)
        del result
        with standing([*_tensors(leaves), *sequences.prepared.leaves]):
            if index + 1 == len(bounds):
                yield from _ended(sequences, new, stand_in, bounds[index], piece, final)
            else:
                _compare(sequences, new, after, bounds[index])
                back = _with_ended(sequences, upstream, final, new, bounds[index])
                yield piece._replace(roots=_roots(new, back))
            del new, piece, stand_in
        upstream = _gradients(leaves)
        sequences.prepared.collect(sequences.steps, bounds[index])
    yield Piece(None, whole, [*_roots(origin, upstream), *sequences.prepared.gradients()])
    sequences.loss.has_run_again |= len(bounds) > 1
    _check_has_losses(sequences)


def _advanced(sequences: Sequences, bounds: Sequence[Bounds], state: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Runs all chunks but the last without a graph.

    Returns:
        The state before each of them and how it runs again, and the state before the last one.
    """
    entered = []
    for index, chunk in enumerate(bounds[:-1]):
        with torch.no_grad(), sequences.passes.first() as forward:
            new = _without_loss(sequences, state, chunk, is_first=index == 0)
        entered.append((state, forward))
        after = kept(new, state)
        sequences.note_ended(after, chunk)
        state = sequences.entering(after, chunk[1], chunk[0])
    if entered:
        torch.clear_autocast_cache()  # of weights that were cast without a graph
    return entered, state


def _without_loss(sequences: Sequences, state: Any, chunk: Bounds, *, is_first: bool) -> Any:
    """The state after a chunk.

    A loss that is a function is left out. But one that draws random numbers, as dropout before an output layer does,
    has to draw them in its turn, or the next chunk would draw the same ones.
    """
    if not is_first:
        return sequences.called(state, chunk, wants_loss=bool(sequences.loss_draws))[1]
    positions: list[list[Any]] = []
    new = sequences.called(
        state, chunk, around_loss=lambda: positions.append([*sequences.random_position(), random.getstate()])
    )[1]
    sequences.loss_draws = bool(positions) and not is_same_position(*positions)
    return new


def _with_loss(sequences: Sequences, state: Any, chunk: Bounds, *, is_again: bool) -> tuple[Any, Any, Any]:
    """Runs a chunk with its graph."""
    if not is_again or sequences.loss_draws or sequences.loss.has_run_again:
        return sequences.called(state, chunk)
    positions: list[list[Any]] = []
    found = sequences.called(state, chunk, around_loss=lambda: positions.append(sequences.random_position()))
    if positions and not is_same_position(*positions):
        raise LossError(
            "the loss of chunk_loss is a function that draws random numbers in some chunks and not in the first; "
            "expected the loss itself in the place of the function, so that they are drawn in the order of the chunks"
        )
    return found


def _compare(sequences: Sequences, new: Any, expected: Any, chunk: Bounds) -> None:
    """Refuses a chunk that gives another state when it runs again; looked at once, since it waits for the device.

    Args:
        sequences: of the micro-batch.
        new: the state after the chunk.
        expected: what it was the first time, of the sequences that go on.
        chunk: its bounds.
    """
    if sequences.loss.has_run_again:
        return
    found, before = flat(sequences.entering(detached(new), chunk[1], chunk[0])), flat(expected)
    same = len(found) == len(before) and all(_is_near(a, b) for a, b in zip(found, before, strict=True))
    if not same:
        raise LossError(
            f"chunk_loss gives another state for the steps {chunk[0]} to {chunk[1] - 1} when it runs again; expected "
            "that it depends on the model, the chunk, the state and the global random state only. Look for a state "
            "that is kept on a module and for generators of your own, and hand on in the state what a chunk needs of "
            "the one before"
        )


def _is_near(found: Any, expected: Any) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and bool(found == expected or found != found)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    if not found.numel():
        return True
    worst, size = torch.stack([(found - expected).abs().max(), expected.abs().max()]).double().tolist()
    return not worst > math.sqrt(torch.finfo(found.dtype).eps) * max(size, 1e-30)  # NaN is no difference


def _check_has_losses(sequences: Sequences) -> None:
    if not sequences.gives_losses and not sequences.has_last:
        raise LossError("chunk_loss gave None as the loss of every chunk, and there is no last=; expected a loss")


def _ended(
    sequences: Sequences, new: Any, given: Any, chunk: Bounds, piece: Piece, final: Gradients
) -> Iterator[Piece]:
    """Gives the loss on the last states, and then the last chunk's with the gradient that this one has left.

    Args:
        sequences: of a micro-batch.
        new: the state after the last chunk.
        given: the state before it.
        chunk: its bounds.
        piece: its losses.
        final: takes the gradient of the last states.
    """
    if sequences.has_final:
        after = kept(new, given)
        sequences.note_ended(after, chunk)
        states = detached(sequences.final(after))
        sequences.carry(states)
    if not sequences.has_last:
        yield piece
        return
    stand_in, leaves = _stand_in(states, None)
    with standing(_tensors(leaves)):
        yield sequences.last(stand_in)
    final.extend(_gradients(leaves))
    yield piece._replace(roots=_roots(new, _with_ended(sequences, final, final, new, chunk)))


def _with_ended(sequences: Sequences, upstream: Gradients, final: Gradients, new: Any, chunk: Bounds) -> Gradients:
    """The gradient of the state after a chunk: of the sequences that go on, and of those that ended in it."""
    entered, left = sequences.steps.rows_at(chunk[0]), sequences.steps.rows_at(chunk[1])
    if entered is None or left is None or left == entered:
        return upstream
    if not any(gradient is not None for gradient in (*upstream, *final)):
        return []
    joined: Gradients = []
    dims = sequences.dims(new, chunk[0])
    for position, leaf in enumerate(flat(new)):
        going_on = upstream[position] if left and upstream else None
        ended = final[position] if final else None
        dim = dims[position]
        if dim is None:  # what has no rows is, at the end, that of the last chunk
            joined.append(going_on if left else ended)
            continue
        if going_on is None and ended is None:
            joined.append(None)
            continue
        gradient = torch.zeros_like(leaf)
        if going_on is not None:
            gradient.narrow(dim, 0, left).copy_(going_on)
        if ended is not None:
            gradient.narrow(dim, left, entered - left).copy_(ended.narrow(dim, left, entered - left))
        joined.append(gradient)
    return joined


def _stand_in(state: Any, needs: Sequence[bool] | None) -> tuple[Any, list[torch.Tensor | None]]:
    """A state of leaves.

    Args:
        state: any nested container.
        needs: which of its leaves get a gradient; ``None`` for all that can.

    Returns:
        The state, and its leaves by position: ``None`` where there is none.
    """
    values: list[Any] = []
    leaves: list[torch.Tensor | None] = []
    for position, leaf in enumerate(flat(state)):
        if not isinstance(leaf, torch.Tensor):
            values.append(leaf)
            leaves.append(None)
            continue
        wanted = (leaf.is_floating_point() or leaf.is_complex()) if needs is None else needs[position]
        values.append(leaf.detach().requires_grad_(wanted))
        leaves.append(values[-1] if wanted else None)
    return like(state, values), leaves


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _tensors(leaves: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if leaf is not None]


def _gradients(leaves: Sequence[torch.Tensor | None]) -> Gradients:
    return [None if leaf is None else leaf.grad for leaf in leaves]


def _roots(state: Any, gradients: Gradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of a state that gradients go back from."""
    if not gradients:
        return []
    tensors = flat(state)
    if len(tensors) != len(gradients):
        raise LossError(
            f"a state of chunk_loss has {len(tensors)} leaves, the same one of the first pass had {len(gradients)}; "
            "expected a function that does the same when it runs again"
        )
    pairs = zip(tensors, gradients, strict=True)
    return [(tensor, gradient) for tensor, gradient in pairs if gradient is not None and _needs_gradient(tensor)]


def _refuse_hidden_dropout(sequences: Sequences) -> None:
    """cuDNN keeps the state of dropout between layers for itself: https://github.com/pytorch/pytorch/issues/74177 ."""
    if not any(device.type == "cuda" for device in sequences.devices) or not torch.backends.cudnn.enabled:
        return
    refuse_hidden_dropout(sequences.modules)


def refuse_hidden_dropout(modules: Sequence[torch.nn.Module]) -> None:
    """Refuses recurrent layers whose dropout between layers can't be drawn again.

    Args:
        modules: are to run twice on CUDA.

    Raises:
        NotSplittable: names the kinds and the ways out.
    """
    found = [m for m in modules if isinstance(m, torch.nn.RNNBase) and m.training and m.dropout and m.num_layers > 1]
    if found:
        raise NotSplittable(
            f"{type(found[0]).__name__}(num_layers={found[0].num_layers}, dropout={found[0].dropout}) on CUDA: cuDNN "
            "draws the dropout between its layers from a state of its own, which the random state does not put back, "
            "so a second pass would draw other masks. Choose one:\n"
            "  - layers of their own with torch.nn.Dropout between them (exact);\n"
            "  - torch.backends.cudnn.enabled = False (exact, slower);\n"
            "  - OverTime(mode='truncated', chunk=...), which runs every chunk once.",
            modules=[type(module).__name__ for module in found],
        )
