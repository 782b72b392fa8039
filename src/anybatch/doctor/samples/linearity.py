"""Layers of a graph between which nothing bends, so that they compute what one of them could."""

from collections.abc import Mapping
from typing import Any

from anybatch.doctor.samples.lossgraphs import following

_MOST = 400
"""Nodes that are looked at; where a model bends, it does so within a few."""

_OPERANDS = {
    "AddmmBackward0": (1, 2), "MmBackward0": (0, 1), "LinearBackward0": (0, 1), "ConvolutionBackward0": (0, 1),
}  # fmt: skip
"""Products with a weight: the places of what comes in and of the weight."""

_STRAIGHT = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Transpose", "Permute", "T"),
        *("Expand", "Slice", "Select", "Index", "IndexSelect", "Alias", "Flatten", "Add", "Sub", "Rsub", "Neg", "Mean"),
        *("Sum", "Cat", "Stack", "NativeDropout", "FusedDropout", "NativeBatchNorm", "CudnnBatchNorm", "AvgPool1D"),
        *("AvgPool2D", "AdaptiveAvgPool2D", "MeanAdaptiveAvgPool2D", "ConstantPadNd", "Embedding", "Repeat", "Narrow"),
    )
    for number in range(3)
)
_SCALED = frozenset({"MulBackward0", "DivBackward0"})


def linear_layers(start: Any, names: Mapping[Any, str]) -> tuple[tuple[int, int], ...]:
    """The sizes of the layers of a graph, the last one first, where nothing bends below the last one.

    What comes after the last layer is the loss, or an activation of the output.

    Args:
        start: the node of the loss.
        names: of the nodes.

    Returns:
        For each layer how many features or channels come in and go out; empty where something bends, where a weight is
        frozen or computed, and where the graph is large.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 3))
        >>> node = torch.nn.functional.cross_entropy(model(torch.ones(4, 2)), torch.zeros(4).long()).grad_fn
        >>> nodes = [node]
        >>> for one in nodes: nodes.extend(after for after in following(one) if after is not None)
        >>> linear_layers(node, {one: one.name() for one in nodes if not hasattr(one, "variable")})
        ((8, 3), (2, 8))
    """
    waiting, inside = [start], list[Any]()
    for node in waiting:
        if len(waiting) > _MOST:
            return ()
        if names.get(node) in _OPERANDS:
            inside.append(node)
        else:
            waiting.extend(_computed(node))
    found: list[tuple[int, int]] = []
    known = set(inside)
    for node in inside:
        layer = _layer(node, names)
        if layer is None and not _is_straight(node, names):
            return ()
        if layer:
            found.append(layer)
        after = _operand(node, names) if layer else _computed(node)
        inside.extend(one for one in after if one not in known)
        known.update(after)
        if len(inside) > _MOST:
            return ()
    return tuple(found)


def _computed(node: Any) -> list[Any]:
    """What a node is made of, without leaves."""
    return [one for one in following(node) if one is not None and not hasattr(one, "variable")]


def _operand(node: Any, names: Mapping[Any, str]) -> list[Any]:
    one = following(node)[_OPERANDS[names[node]][0]]
    return [] if one is None or hasattr(one, "variable") else [one]


def _layer(node: Any, names: Mapping[Any, str]) -> tuple[int, int] | None:
    """The features that come into a product with a weight and go out of it, ``None`` if it is no such product."""
    name = names.get(node, "")
    if name not in _OPERANDS:
        return None
    weight, transposed = following(node)[_OPERANDS[name][1]], name in ("AddmmBackward0", "MmBackward0")
    while weight is not None and names.get(weight, "") in ("TBackward0", "TransposeBackward0"):
        weight, transposed = following(weight)[0], not transposed
    if weight is None or not hasattr(weight, "variable") or names.get(weight):
        return None
    shape = weight.variable.shape
    return (int(shape[0]), int(shape[1])) if transposed else (int(shape[1]), int(shape[0]))


def _is_straight(node: Any, names: Mapping[Any, str]) -> bool:
    name = names.get(node, "")
    return name in _STRAIGHT or (name in _SCALED and len(_computed(node)) == 1)
