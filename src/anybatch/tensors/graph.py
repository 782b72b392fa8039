"""The autograd graph behind a tensor."""

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
    waiting: list[Any] = [tensor.grad_fn] if tensor.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return found


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread, as it is while a checkpoint recomputes its forward."""
    return bool(torch._C._current_graph_task_id() != -1)
