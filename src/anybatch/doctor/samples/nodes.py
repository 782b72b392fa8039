"""Nodes of a graph: their order, their leaves, and what they have saved."""

from collections.abc import Iterator
from typing import Any

import torch

from anybatch.doctor.graphs import raw_saved

_LIMIT = 20_000
_HIDDEN = object()


def inputs_first(start: Any) -> list[Any]:
    """The nodes in an order in which each comes after those that it is made of."""
    done: dict[Any, None] = {}
    waiting = [start]
    while waiting and len(done) < _LIMIT:
        node = waiting[-1]
        missing = [after for after, _ in node.next_functions if after is not None and after not in done]
        if node in done or not missing:
            done[waiting.pop()] = None
        else:
            waiting.extend(missing)
    return list(done)


def is_custom(node: Any) -> bool:
    """Whether it belongs to an ``autograd.Function`` that somebody wrote."""
    return issubclass(type(node), torch.autograd.function.FunctionCtx)


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node gathers, ``None`` if it does not."""
    if is_custom(node) or not hasattr(type(node), "variable"):
        return None
    return node.variable  # type: ignore[no-any-return]


def saved_by(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a node has saved, by name, without what was given to hooks."""
    for name, data in _looked_at(node):
        if isinstance(data, torch.Tensor) and data.layout is torch.strided and data.numel():
            yield name, data.detach()


def hides(node: Any) -> bool:
    """Whether it has saved what cannot be read without running something."""
    return is_custom(node) or any(data is _HIDDEN for _, data in _looked_at(node))


def _looked_at(node: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that a node has saved; ``_HIDDEN`` for one that was given to hooks."""
    for name, entry in () if is_custom(node) else raw_saved(node):
        yield name, entry.data if getattr(entry, "unpack_hook", entry) is None else _HIDDEN
