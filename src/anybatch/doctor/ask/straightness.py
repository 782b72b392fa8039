"""Is a net of several layers one linear layer? By the graph of a step, and by what it gives on a line."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from anybatch.doctor.ask.leaks import pairs_of
from anybatch.doctor.ask.steps import Step, asks
from anybatch.doctor.ask.tape import Operation
from anybatch.doctor.ask.trials import Trial, Unknown, tensors, told
from anybatch.doctor.graphs import MOVING, following, leaf_of, nodes_behind, nodes_of, sort_of
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLACES = (0.5, -1.0, 3.0)  # on the line, between both inputs and beyond them
_BENT = 1e-3  # of what the outputs differ


def straight(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether layers follow each other with nothing between, and all outputs are a linear function of the inputs."""
    inputs = trial.inputs
    if inputs.rows < 2 or not inputs.by_rows() or not all(one.is_floating_point() for one in inputs.tensors()):
        raise Unknown("the last input is no batch of real numbers")
    layers = _following(trial)
    if not layers:
        raise Unknown("no layer follows another one with nothing between")

    def along(place: float) -> Any:
        return trial.forward(inputs.changed(
            lambda one: one + place * (one.roll(1, inputs.dim) - one) if inputs.has_rows(one) else one
        ))  # fmt: skip

    first, last, bends = along(0.0), along(1.0), False
    for place in _PLACES:
        for (one, other), made in zip(pairs_of(first, last), tensors(along(place)), strict=True):
            way = other.double() - one.double()
            spread = float(way.abs().max())
            if not spread > _BENT * float(one.double().abs().max()):
                raise Unknown("an output hardly depends on the inputs, so that rounding hides whether it bends")
            away = float((made.double() - one.double() - place * way).abs().max())
            bends |= not one.is_floating_point() or not away < _BENT * spread
    return told("straight", root=root, answer="no" if bends else "yes", layers=layers)


def _following(trial: Trial) -> list[str]:
    """The names of the layers of a chain, none of which is narrower than what is before it and what is behind it."""
    given: list[tuple[str, tuple[int, int], tuple[int, int]]] = []
    alive: list[torch.Tensor] = []  # so that no two lie in one place

    sizes: dict[str, tuple[int, int]] = {}

    def see(name: str, layer: Any, both: tuple[Any, Any], made: torch.Tensor) -> None:
        taken = next(iter((*both[0], *both[1].values())))
        alive.extend((taken, made))
        given.append((name, _state_of(taken), _state_of(made)))
        sizes[name] = layer.weight.shape[1], layer.weight.shape[0]

    trial.hooked(trial.inputs, _LAYERS, see)
    takers: dict[tuple[int, int], list[int]] = {}
    for at, (_, taken, _) in enumerate(given):
        takers.setdefault(taken, []).append(at)
    for at, (name, _, made) in enumerate(given):
        for other in (given[later][0] for later in takers.get(made, ()) if later > at):
            if sizes[name][1] >= min(sizes[name][0], sizes[other][1]):
                return [name, other]
    return []


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how often it was written to: an activation in place leaves it where it is."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


@asks("layers", of_rows=False)
def layers(step: Step) -> Iterator[Probed]:
    """Whether layers feed each other with nothing that bends between them, as the graph of the step shows."""
    loss = step.values[step.loss.slot]
    kinds: dict[Any, Any] = {node: type(node) for node in nodes_behind([loss])}
    names = {node: sort_of(kind)[1] for node, kind in kinds.items() if not sort_of(kind)[0]}
    pairs = [one for one in linear_layers(loss.grad_fn, names) if one[1] >= min(one[0], one[2]) > 0]
    sizes = dict.fromkeys(pair for one in pairs[::-1] for pair in (one[:2], one[1:]))
    own = set(map(id, step.parameters.values()))
    roots = (root for root, one in step.modules.items() if own & set(map(id, one.parameters())))
    if pairs and (step.tape.opaque & step.needed or any(_hides(step, one) for one in step.used())):
        raise Unknown("a part of the step was computed by what the graph does not show, which may bend")
    if pairs:
        yield told("", step.loss, root=next(roots, -1), layers=[f"{one}→{other}" for one, other in sizes])


def _hides(step: Step, one: Operation) -> bool:
    """Whether what it gives has no graph, though what it was given has, as in the forward of an own function."""
    has_graph = [any(step.values[slot].requires_grad for slot in side) for side in (one.given, one.outs)]
    return has_graph == [True, False]


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
        is_computed = given is not None and leaf_of(given) is None
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
    return [one for one in following(node) if one is not None and leaf_of(one) is None]


def _layer(node: Any, names: Mapping[Any, str]) -> _Layer | None:
    """A product with a weight, ``None`` if it is one with something that is computed or frozen."""
    name = names[node]
    weight, transposed = following(node)[_OPERANDS[name][1]], name in ("AddmmBackward0", "MmBackward0")
    while weight is not None and names.get(weight, "") in ("TBackward0", "TransposeBackward0"):
        weight, transposed = following(weight)[0], not transposed
    leaf = leaf_of(weight)
    if leaf is None:
        return None
    first, second = (int(size) for size in leaf.shape[:2])
    return _Layer(first, second, leaf) if transposed else _Layer(second, first, leaf)


def _is_straight(node: Any, names: Mapping[Any, str]) -> bool:
    name = names.get(node, "")
    return name in _STRAIGHT or (name in _SCALED and len(_computed(node)) == 1)
