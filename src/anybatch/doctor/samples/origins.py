"""Which operation of a graph has made numbers that are not finite, from what the graph has saved."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.doctor.samples.lossgraphs import shape_of
from anybatch.doctor.samples.nodes import hides, inputs_first, is_custom, leaf_of, saved_by
from anybatch.doctor.samples.singular import is_moderate, overflows, what_came_out, what_went_in

_NEAR = 60  # nodes behind an operation among which the last module before it is looked for
_WEIGHING = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ViewBackward0"})
# What hands its input on as it is, in another shape.
_MOVING = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze", "Unsqueeze", "Slice",
           "Select", "Clone", "ToCopy", "Alias", "Contiguous", "Unfold", "AsStrided")  # fmt: skip
# By which of its edges an operation was given what it saved under a name; by its kind where the name is not enough.
_EDGES = {"self": 0, "other": 1, "exponent": 1, "mat2": 1, "tensor": 1, "target": 1}
_EDGES_OF = {
    "AddmmBackward0": {"mat1": 1, "mat2": 2},
    "BaddbmmBackward0": {"batch1": 1, "batch2": 2},
    "AddcmulBackward0": {"tensor1": 1, "tensor2": 2},
    "ConvolutionBackward0": {"input": 0, "weight": 1},
    "NativeLayerNormBackward0": {"input": 0, "weight": 1, "bias": 2},
    "NativeBatchNormBackward0": {"input": 0, "weight": 1, "bias": 2},
    "NativeGroupNormBackward0": {"input": 0, "weight": 1, "bias": 2},
}
_RESULTS = ("result", "output", "grid")
# What takes several tensors and saves none of them.
_JOINING = ("AddBackward0", "SubBackward0", "WhereBackward0", "CatBackward0", "StackBackward0")
# What makes only finite numbers of finite ones that are not large, or has saved what it made.
_TAME = (
    *(f"{name}Backward" for name in _MOVING), *("Add", "Sub", "Rsub", "Neg", "Mul", "Sum", "Mean", "Abs", "Pow"),
    *("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Embedding", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Hard"),
    *("Tanh", "Sigmoid", "Softplus", "Softmax", "LogSoftmax", "Exp", "Sqrt", "Native", "Cat", "Stack", "Index"),
    *("Clamp", "Where", "MaxPool", "AvgPool", "Mkldnn", "MseLoss", "SmoothL1Loss", "HuberLoss", "NllLoss"),
    "BinaryCrossEntropy",
    "torch::autograd::AccumulateGrad",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation that has made numbers that are not finite."""

    where: str  # ``"forward"``, ``"input"`` or ``"parameter"``
    op: str  # its node
    detail: str = ""  # what went into it
    parameter: torch.Tensor | None = None  # a parameter of it, or the nearest one before it
    is_own: bool = False  # whether the parameter goes into the operation itself
    of_data: bool = False  # whether the weights have no part in it
    value: str = ""  # ``"nan"`` or ``"inf"``, where the numbers themselves were seen


def origin_in(start: Any) -> Origin | None:
    """The first operation of a graph, from the inputs on, that made something not finite out of what was finite.

    It is told from what the graph has saved, as far as that can be read without running anything.
    """
    order = inputs_first(start)
    found = _first(order, _nan_or_inf) or _culprit(order, what_went_in) or _first(order, _not_finite)
    return found or _culprit(order, overflows) or _brought(order, order)


def _first(order: list[Any], bad: Callable[[torch.Tensor], bool]) -> Origin | None:
    """The first node that has saved something bad; minus infinity alone may be a mask that is meant."""
    for node in order:
        results = False
        for name, tensor in saved_by(node):
            if not tensor.is_floating_point() or not bad(tensor):
                continue
            if name.startswith(_RESULTS):
                results = True
                continue
            return replace(_maker(node, name, tensor), value=kind_of(tensor))
        if results:
            return _behind(node)
    return None


def kind_of(tensor: torch.Tensor) -> str:
    """What numbers that are not finite are: ``"nan"`` if any is, else ``"inf"``."""
    return "nan" if bool(tensor.isnan().any()) else "inf"


def _nan_or_inf(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() | (tensor == float("inf"))).any())


def _not_finite(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def _maker(node: Any, name: str, tensor: torch.Tensor) -> Origin:
    """The operation that has made a tensor which another one has saved, or where that came in."""
    edges = [after for after, _ in node.next_functions]
    before = [after for after in edges if after is not None]
    for after in before:
        leaf = leaf_of(after)
        if leaf is not None and leaf.data_ptr() == tensor.data_ptr():
            return Origin("parameter", node.name(), parameter=leaf, is_own=True)
    place = _EDGES_OF.get(node.name(), _EDGES if len(edges) == 2 else {}).get(name)
    if place is not None and place < len(edges):
        return _came_in(node, tensor) if edges[place] is None else _behind(edges[place])
    shape = tuple(tensor.shape)
    makers = [after for after in before if leaf_of(after) is None and shape_of(after) == shape]
    if makers:
        return _behind(makers[0])
    inside = [after for after in before if leaf_of(after) is None and after.name() not in _WEIGHING]
    if inside and all(after is not None for after in edges):
        return _behind(inside[0])
    return _came_in(node, tensor)


def _came_in(node: Any, tensor: torch.Tensor) -> Origin:
    """What had it already when it came into an operation, without a gradient."""
    share = ""
    if tensor.dim() >= 2 and len(tensor) > 1:
        rows = int((~tensor.isfinite()).flatten(1).any(1).sum())
        share = f", in {rows} of its {len(tensor)} rows"
    detail = f"a tensor of shape {list(tensor.shape)} that went into it without a gradient has it{share}"
    return Origin("input", node.name(), detail, of_data=True)


def _behind(made: Any) -> Origin:
    """The operation behind a tensor that is not finite: the one that made it, or one that this only handed on."""
    node = made
    while leaf_of(node) is None and not is_custom(node) and node.name().rstrip("0123456789") in _MOVED:
        after = node.next_functions[0][0]
        if after is None:
            return Origin("input", node.name(), "what went into it without a gradient has it", of_data=True)
        node = after
    if (leaf := leaf_of(node)) is not None:
        return Origin("parameter", made.name(), parameter=leaf, is_own=True)
    if is_custom(node) or what_went_in(node):
        return origin_of(node, "forward")
    nodes = inputs_first(node)
    return (
        _culprit(nodes[:-1], lambda one: what_went_in(one) or overflows(one))
        or _brought([node], nodes)
        or origin_of(node, "forward")
    )


_MOVED = frozenset(f"{name}Backward" for name in _MOVING)


def _culprit(nodes: list[Any], why: Callable[[Any], str]) -> Origin | None:
    """The first operation of which it is known that it makes such numbers."""
    for node in nodes:
        if detail := why(node):
            return origin_of(node, "forward", detail)
    return None


def _brought(candidates: list[Any], nodes: list[Any]) -> Origin | None:
    """Where a tensor without a gradient brought it: the rest is finite, and too small to have overflowed."""
    joined = [
        node
        for node in candidates
        if node.name() in _JOINING and any(after is None for after, _ in node.next_functions) and not overflows(node)
    ]
    if len(joined) != 1 or not all(node.name().startswith(_TAME) and not hides(node) for node in nodes):
        return None
    if not all(is_moderate(tensor) for node in nodes for _, tensor in saved_by(node)):
        return None
    return Origin("input", joined[0].name(), "what went into it without a gradient has it", of_data=True)


def origin_of(node: Any, where: str, detail: str = "") -> Origin:
    """An operation as an origin; what went into it is looked for if it is not known."""
    parameter, is_own = _nearest(node)
    known = detail or what_went_in(node) or what_came_out(node) or overflows(node)
    return Origin(where, node.name(), known, parameter, is_own, where == "forward" and _is_of_data(node, known))


def _is_of_data(node: Any, detail: str) -> bool:
    """Whether it is none of the weights: a divisor that no gradient goes to, targets that do not count."""
    edges = [after for after, _ in node.next_functions]
    divided = node.name() == "DivBackward0" and len(edges) == 2 and edges[1] is None
    return bool(detail) and (divided or node.name().startswith("NllLoss"))


def _nearest(node: Any) -> tuple[torch.Tensor | None, bool]:
    """A parameter that goes into an operation, or else the nearest one before it."""
    waiting, seen = [(node, True)], {node}
    for current, is_own in waiting:
        for after, _ in current.next_functions:
            if after is None or after in seen or len(seen) > _NEAR:
                continue
            seen.add(after)
            leaf = leaf_of(after)
            if leaf is not None:
                return leaf, is_own
            waiting.append((after, is_own and after.name() in _WEIGHING))
    return None, False
