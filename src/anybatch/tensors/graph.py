"""The autograd graph behind a tensor."""

from collections.abc import Iterable
from typing import Any

import torch


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a backward from a tensor would give a gradient to.

    Args:
        tensor: with a gradient function.

    Returns:
        The leaf tensors with ``requires_grad``, each once.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> [leaf is weight for leaf in leaves_of((weight * 3).sum() + weight.sum())]
        [True]
    """
    return [node.variable for node in _accumulators_behind([tensor])]


def _accumulators_behind(tensors: Iterable[torch.Tensor], known: Iterable[Any] = ()) -> list[Any]:
    """The nodes that would put a gradient on a leaf, each once and without those that are known."""
    found: list[Any] = []
    waiting: list[Any] = list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    seen = {*known, *waiting}
    accumulates: dict[type, bool] = {}
    for node in waiting:
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            kind = type(following)
            if kind not in accumulates:  # asked of the type, since a node of the user's own may have any attribute
                accumulates[kind] = hasattr(kind, "variable")
            (found if accumulates[kind] else waiting).append(following)
    return found


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread, as it is while a checkpoint recomputes its forward."""
    return bool(torch._C._current_graph_task_id() != -1)


class OutsideLeaves:
    """Leaves that get a gradient though nobody named them, such as a temperature that a loss function closes over.

    Their gradients are taken off when they are found, so that the new ones are alone until they are added.

    Args:
        known: the leaves that are cared for elsewhere.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(leaf) for leaf in known}
        self._accumulators: set[Any] = set()  # held, so that the graph of the next micro-batch has the same ones
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def found(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """What was found, each with the gradient that it had."""
        return self._found

    def look_behind(self, tensors: Iterable[torch.Tensor], *, ignoring: Iterable[torch.Tensor] = ()) -> None:
        """Finds the leaves behind some tensors and takes their gradients off.

        Args:
            tensors: are about to be differentiated.
            ignoring: leaves that live for a moment only.
        """
        ignored = {id(leaf) for leaf in ignoring}
        for node in _accumulators_behind(tensors, self._accumulators):
            leaf = node.variable
            if id(leaf) in ignored:
                continue
            self._accumulators.add(node)
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._found.append((leaf, leaf.grad))
                leaf.grad = None
