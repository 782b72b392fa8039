"""Layers of a graph between which nothing bends, so that they compute what one of them could."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anybatch.doctor.graphs import MOVING, following, nodes_of

_MOST = 400
"""Nodes that are looked at; where a model bends, it does so within a few."""

_OPERANDS = {
    "AddmmBackward0": (1, 2), "MmBackward0": (0, 1), "LinearBackward0": (0, 1), "ConvolutionBackward0": (0, 1),
}  # fmt: skip
"""Products with a weight: the places of what comes in and of the weight."""

_STRAIGHT = MOVING | nodes_of(
    *("Add", "Sub", "Rsub", "Neg", "Mean", "Sum", "Cat", "Stack", "NativeDropout", "FusedDropout", "NativeBatchNorm"),
    *("CudnnBatchNorm", "AvgPool1D", "AvgPool2D", "AdaptiveAvgPool2D", "MeanAdaptiveAvgPool2D", "ConstantPadNd"),
    *("Embedding", "Repeat", "Narrow"),
)  # fmt: skip
_SCALED = frozenset({"MulBackward0", "DivBackward0"})


def linear_layers(start: Any, names: Mapping[Any, str]) -> tuple[tuple[int, int, int], ...]:
    """Pairs of layers of which one feeds the other, where nothing bends from the input to the last layer.

    What comes after the last layer is the loss, or an activation of the output. For each pair, the last one first, it
    gives how many features or channels come into the first layer, lie between them, and go out of the second; 0 lie
    between where they are ordered in another way there. Empty where something bends, where a weight is frozen,
    computed or used twice, and where the graph is large.
    """
    last, count = _products_below([start], names, straight=False)
    if last is None:
        return ()
    layers: dict[Any, _Layer | None] = {}
    pairs: list[tuple[int, int, int]] = []
    for node in last:
        after = layers[node] = _layer(node, names)
        given = following(node)[_OPERANDS[names[node]][0]]
        is_computed = given is not None and not hasattr(given, "variable")
        before, looked = _products_below([given] if is_computed else [], names, straight=True)
        count += looked
        if after is None or before is None or count > _MOST:
            return ()
        for one in before:
            if (layer := _layer(one, names)) is not None:
                pairs.append((layer.inputs, after.inputs if layer.outputs == after.inputs else 0, after.outputs))
            if one not in layers:
                layers[one] = layer
                last.append(one)
    weights = [layer.weight for layer in layers.values() if layer is not None]
    return tuple(pairs) if len({*map(id, weights)}) == len(weights) else ()


class _Layer(NamedTuple):
    """A product with a weight."""

    inputs: int
    outputs: int
    weight: Any


def _products_below(nodes: Sequence[Any], names: Mapping[Any, str], *, straight: bool) -> tuple[list[Any] | None, int]:
    """The first products with a weight on each way down from some nodes, and how many nodes were looked at.

    Where the way has to be ``straight`` and something bends, there is no list.
    """
    waiting, found = list(nodes), list[Any]()
    known = {*nodes}
    for node in waiting:
        if names.get(node) in _OPERANDS:
            found.append(node)
            continue
        if len(waiting) > _MOST or (straight and not _is_straight(node, names)):
            return None, len(waiting)
        after = [one for one in _computed(node) if one not in known]
        known.update(after)
        waiting.extend(after)
    return found, len(waiting)


def _computed(node: Any) -> list[Any]:
    """What a node is made of, without leaves."""
    return [one for one in following(node) if one is not None and not hasattr(one, "variable")]


def _layer(node: Any, names: Mapping[Any, str]) -> _Layer | None:
    """A product with a weight, ``None`` if it is one with something that is computed or frozen."""
    name = names[node]
    weight, transposed = following(node)[_OPERANDS[name][1]], name in ("AddmmBackward0", "MmBackward0")
    while weight is not None and names.get(weight, "") in ("TBackward0", "TransposeBackward0"):
        weight, transposed = following(weight)[0], not transposed
    if weight is None or not hasattr(weight, "variable") or names.get(weight):
        return None
    first, second = (int(size) for size in weight.variable.shape[:2])
    return _Layer(first, second, weight.variable) if transposed else _Layer(second, first, weight.variable)


def _is_straight(node: Any, names: Mapping[Any, str]) -> bool:
    name = names.get(node, "")
    return name in _STRAIGHT or (name in _SCALED and len(_computed(node)) == 1)
