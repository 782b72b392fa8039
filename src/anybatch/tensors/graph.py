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
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    accumulates: dict[type, bool] = {}
    waiting: list[Any] = [tensor.grad_fn] if tensor.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node)
        if kind not in accumulates:  # a missing attribute takes long to find out
            accumulates[kind] = hasattr(node, "variable")
        if accumulates[kind]:
            found.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions if following is not None)
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
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def found(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """What was found, each with the gradient that it had."""
        return self._found

    def look_behind(self, tensor: torch.Tensor, *, ignoring: Iterable[torch.Tensor] = ()) -> None:
        """Finds the leaves behind a tensor and takes their gradients off.

        Args:
            tensor: is about to be differentiated.
            ignoring: leaves that live for a moment only.
        """
        ignored = {id(leaf) for leaf in ignoring}
        for leaf in leaves_of(tensor):
            if id(leaf) not in self._known and id(leaf) not in ignored:
                self._known.add(id(leaf))
                self._found.append((leaf, leaf.grad))
                leaf.grad = None
