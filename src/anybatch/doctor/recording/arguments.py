"""The arguments of a call: without their graph, and how many rows they have."""

from typing import Any

import torch

from anybatch.tensors.dispatch import unseen

_DEEPEST = 4
PLAIN = frozenset({int, float, bool, str, type(None)})
"""Types of arguments that have no graph."""


def without_graph(value: Any, depth: int = 0) -> Any:
    """An argument whose tensors do not hold the graph that they came out of."""
    if isinstance(value, torch.Tensor):
        return _detached(value) if value.requires_grad else value
    if depth < _DEEPEST and type(value) in (tuple, list):
        return type(value)(without_graph(entry, depth + 1) for entry in value)
    if depth < _DEEPEST and type(value) is dict:
        return {name: without_graph(entry, depth + 1) for name, entry in value.items()}
    return value


@unseen
def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach()


def rows_of(arguments: Any) -> int:
    """The size of the first dim of the first tensor, -1 if there is none."""
    for value in (*arguments[0], *arguments[1].values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    return -1
