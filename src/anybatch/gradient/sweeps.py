"""Goes through the chunks of sequences: forward for states, and back for gradients."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anybatch.errors import LossError, NotSplittable
from anybatch.gradient.pieces import Piece, standing, whole
from anybatch.gradient.sequences import Bounds, Sequences
from anybatch.gradient.timesteps import detached, flat, like, row_dim

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
        yield Piece(result, shares.of(index), (), metrics)
        if cuts and index + 1 < len(bounds):
            state = detached(state)
    if sequences.has_last:
        yield sequences.last(sequences.final(state))


def truncated(sequences: Sequences, length: int) -> Iterator[Piece]:
    """Gives the losses of chunks in their order; no gradient goes from one to the one before.

    Args:
        sequences: of a micro-batch.
        length: of a chunk.

    Raises:
        LossError: a loss on the last state would miss sequences that have ended.
    """
    if sequences.has_last and sequences.steps.is_packed:
        raise LossError(
            "OverTime(mode='truncated', last=...) on packed sequences: those that end before the last chunk would get "
            "no gradient; expected mode='exact', or a loss within chunk_loss"
        )
    bounds = sequences.steps.bounds(length)
    shares = sequences.shares(bounds)
    origin = sequences.initial()
    state, leaves = _stand_in(origin, [_needs_gradient(leaf) for leaf in flat(origin)])
    for index, chunk in enumerate(bounds):
        state = sequences.entering(state, chunk[0], bounds[max(0, index - 1)][0])
        with standing(_tensors(leaves)):
            result, new, metrics = sequences.called(state, chunk)
            piece = Piece(result, shares.of(index), (), metrics)
            if index + 1 < len(bounds):
                yield piece
            else:
                yield from _ended(sequences, new, chunk, piece, [])
            state = detached(new)
            del result, new, piece
        if index == 0:
            yield Piece(None, whole, _roots(origin, _gradients(leaves)))
            leaves, origin = [], None


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
        if index + 1 < len(bounds):
            state, forward = entered.pop()
            again = forward.again()
        stand_in, leaves = _stand_in(state, needs if index == 0 else None)
        with standing(_tensors(leaves)):
            with again:
                result, new, metrics = sequences.called(stand_in, bounds[index])
            piece = Piece(result, shares.of(index), (), metrics)
            del stand_in, result
            if index + 1 == len(bounds):
                yield from _ended(sequences, new, bounds[index], piece, final)
            else:
                back = _with_ended(sequences, upstream, final, new, bounds[index])
                yield piece._replace(roots=_roots(new, back))
            del new, piece
        upstream = _gradients(leaves)
    yield Piece(None, whole, _roots(origin, upstream))


def _advanced(sequences: Sequences, bounds: Sequence[Bounds], state: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Runs all chunks but the last without a graph.

    Returns:
        The state before each of them and how it runs again, and the state before the last one.
    """
    entered = []
    for chunk in bounds[:-1]:
        versions = _versions(state)
        with torch.no_grad(), sequences.passes.first() as forward:
            _, new, _ = sequences.called(state, chunk, wants_loss=False)
        if _versions(state) != versions:
            raise LossError(
                "chunk_loss changes the state that it is given in place (such as state.mul_() or state[...] = x), so "
                "that the chunk can't run again; expected a new state: clone it first"
            )
        entered.append((state, forward))
        state = sequences.entering(detached(new), chunk[1], chunk[0])
    if entered:
        torch.clear_autocast_cache()  # of weights that were cast without a graph
    return entered, state


def _ended(sequences: Sequences, new: Any, chunk: Bounds, piece: Piece, final: Gradients) -> Iterator[Piece]:
    """Gives the loss on the last states, and then the last chunk's with the gradient that this one has left.

    Args:
        sequences: of a micro-batch.
        new: the state after the last chunk.
        chunk: its bounds.
        piece: its losses.
        final: takes the gradient of the last states.
    """
    states = detached(sequences.final(detached(new))) if sequences.has_final else None
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
    joined: Gradients = []
    for position, leaf in enumerate(flat(new)):
        dim = row_dim(leaf, entered)
        if dim is None:
            joined.append(upstream[position] if left and upstream else None)
            continue
        going_on = upstream[position] if left and upstream else None
        ended = final[position] if final else None
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
        The state, and its leaves by position: ``None`` where there is none, or one that stood before.
    """
    made: dict[int, torch.Tensor] = {}
    values: list[Any] = []
    leaves: list[torch.Tensor | None] = []
    for position, leaf in enumerate(flat(state)):
        if not isinstance(leaf, torch.Tensor):
            values.append(leaf)
            leaves.append(None)
        elif id(leaf) in made:  # a state that is there twice stays one
            values.append(made[id(leaf)])
            leaves.append(None)
        else:
            wanted = (leaf.is_floating_point() or leaf.is_complex()) if needs is None else needs[position]
            value = leaf.detach().requires_grad_(wanted)
            made[id(leaf)] = value
            values.append(value)
            leaves.append(value if wanted else None)
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


def _versions(state: Any) -> list[int]:
    return [leaf._version for leaf in flat(state) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


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
