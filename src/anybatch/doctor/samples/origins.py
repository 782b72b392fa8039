"""Which operation has made numbers or gradients that are not finite, from what a graph has saved."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.doctor.graphs import Graph, inputs_first, is_custom, leaf_of, outputs_first, raw_saved
from anybatch.doctor.samples.walking import shape_of

_LOGARITHMS = ("LogBackward0", "Log2Backward0", "Log10Backward0")
_SPREADS = ("StdBackward0", "VarBackward0", "StdMeanBackward0", "VarMeanBackward0")
_NORMS = ("NativeLayerNormBackward0", "NativeBatchNormBackward0", "NativeGroupNormBackward0")
_SOFTMAXES = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_MEAN = 1  # of a loss function: the number of its reduction


def what_went_in(node: Any) -> str:
    """Zeros, negative numbers and the like in the saved input of a node, which has no finite value for them.

    Empty if nothing of the kind is known; then its input was not saved, or it was harmless.
    """
    kind = node.name()
    if kind.startswith("NllLoss"):
        return _of_targets(node)
    if kind in _LOGARITHMS:
        return _counted(node, "self", "its input")
    if kind == "Log1PBackward0":
        return _counted(node, "self", "its input plus 1", shift=1.0)
    if kind in ("DivBackward0", "RemainderBackward0"):
        return _counted(node, "other", "its divisor", negative=False)
    if kind in ("PowBackward0", "PowBackward1"):
        exponent = getattr(node, "_saved_exponent", 2)
        whole = isinstance(exponent, (int, float)) and float(exponent).is_integer()
        if isinstance(exponent, (int, float)) and (exponent < 0 or not whole):
            return _counted(node, "self", "its base", negative=not whole, zeros=exponent < 0)
    if kind in ("AcosBackward0", "AsinBackward0"):
        outside = sum(int((tensor.abs() > 1).sum()) for name, tensor in saved_by(node) if name == "self")
        return f"its input has {outside} numbers outside of -1 to 1" if outside else ""
    if kind in _SPREADS:
        return _of_too_few(node)
    if kind.startswith("MeanBackward") and getattr(node, "_saved_self_sym_numel", 1) == 0:
        return "it is the mean of nothing: its input has no entries"
    return ""


def what_came_out(node: Any) -> str:
    """What the saved output of a node says of its input, if that was finite; empty if it says nothing."""
    kind = node.name()
    out = [tensor for name, tensor in saved_by(node) if name.startswith("result") and tensor.is_floating_point()]
    if not out or out[0].is_complex():
        return ""
    lost, endless = int(out[0].isnan().sum()), int((out[0] == math.inf).sum())
    if kind in ("SqrtBackward0", "RsqrtBackward0") and lost:
        return f"its input has {_numbers(lost, 'negative number')}"
    if kind in ("RsqrtBackward0", "ReciprocalBackward0") and (zeros := int(out[0].isinf().sum())):
        return f"its input has {_numbers(zeros, 'zero')}"
    if kind in ("ExpBackward0", "Exp2Backward0") and endless and not lost:
        return f"{_numbers(endless, 'number')} of its input {'are' if endless > 1 else 'is'} too large for it"
    if kind in _SOFTMAXES and lost:
        dim = int(getattr(node, "_saved_dim", -1))
        dim = dim if -out[0].dim() <= dim < out[0].dim() else -1
        rows = out[0].isnan().all(dim)
        return f"{int(rows.sum())} of its {rows.numel()} rows have no score above -inf" if bool(rows.any()) else ""
    if kind in _NORMS and not bool(out[-1].isfinite().all()):
        return "what it divides by is 0: a row or a channel of its input has no spread, and its eps is too small"
    return ""


def overflows(node: Any) -> str:
    """Whether a product of finite tensors that were saved is not finite."""
    kind, known = node.name(), dict(saved_by(node))
    one = known.get("self", known.get("mat1"))
    if one is None or not one.is_floating_point() or not bool(one.isfinite().all()):
        return ""
    exponent = getattr(node, "_saved_exponent", None)
    if kind == "PowBackward0" and isinstance(exponent, (int, float)):
        made = one.pow(exponent)
    elif kind == "MulBackward0" and "other" in known:
        made = one * known["other"]
    elif kind in ("MmBackward0", "BmmBackward0", "AddmmBackward0") and "mat2" in known:
        made = one @ known["mat2"]
    else:
        return ""
    other = known.get("other", known.get("mat2", one))
    if not bool(other.isfinite().all()) or bool(made.isfinite().all()):
        return ""
    largest = ", ".join(f"{float(tensor.abs().max()):.3g}" for tensor in (one, other))
    return f"it overflows: the largest numbers that went in are {largest}"


def _of_targets(node: Any) -> str:
    """Where it is a mean over none; a sum, or a loss for each target, has a value then."""
    if int(getattr(node, "_saved_reduction", _MEAN)) != _MEAN:
        return ""
    for name, tensor in saved_by(node):
        if name == "total_weight" and float(tensor.sum()) == 0.0:
            return "none of its targets counts: all are ignored, or their weights are 0"
    return ""


def _of_too_few(node: Any) -> str:
    made = shape_of(node)
    size = next((tensor.numel() for name, tensor in saved_by(node) if name == "self"), 0)
    correction = getattr(node, "_saved_correction", None)
    count = size // max(1, math.prod(made)) if made is not None else 0
    if not count or count > (1 if correction is None else correction):
        return ""
    return f"it is the spread of {_numbers(count, 'value')}, which needs one more"


def _numbers(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _counted(node: Any, name: str, what: str, *, shift: float = 0.0, negative: bool = True, zeros: bool = True) -> str:
    none = below = 0
    for saved, tensor in saved_by(node):
        if saved == name and not tensor.is_complex():
            none += int((tensor + shift == 0).sum()) if zeros else 0
            below += int((tensor + shift < 0).sum()) if negative else 0
    parts = [_numbers(none, "zero")] if none else []
    parts += [_numbers(below, "negative number")] if below else []
    return f"{what} has {' and '.join(parts)}" if parts else ""


def is_moderate(tensor: torch.Tensor) -> bool:
    """Whether sums of products of such numbers stay far from the largest number that their type holds."""
    if not tensor.is_floating_point():
        return True
    limit: float = torch.finfo(tensor.dtype).max ** 0.4
    return float(tensor.abs().max()) <= limit


_LIMIT = 20_000
_HIDDEN = object()


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
    order = list(inputs_first(start, most=_LIMIT))
    found = _first(order, lambda one: one.isnan() | (one == float("inf"))) or _culprit(order, what_went_in)
    found = found or _first(order, lambda one: ~one.isfinite())
    return found or _culprit(order, overflows) or _brought(order, order)


def _first(order: list[Any], bad: Callable[[torch.Tensor], torch.Tensor]) -> Origin | None:
    """The first node that has saved a bad entry; minus infinity alone may be a mask that is meant."""
    for node in order:
        results = False
        for name, tensor in saved_by(node):
            if not tensor.is_floating_point() or not bool(bad(tensor).any()):
                continue
            if name.startswith(_RESULTS):
                results = True
                continue
            return replace(_maker(node, name, tensor), value=kind_of(tensor))
        if results:
            return _behind(node)
    return None


def hidden_rows(start: Any) -> Origin | None:
    """The softmax that made the first nan of a graph out of rows that are -inf everywhere."""
    for node in outputs_first([start], most=_LIMIT):
        if type(node).__name__ in _SOFTMAXES and any(tensor.isnan().any() for _, tensor in saved_by(node)):
            origin = origin_in(start)
            return origin if origin is not None and origin.op in _SOFTMAXES and origin.detail else None
    return None


def kind_of(tensor: torch.Tensor) -> str:
    """What numbers that are not finite are: ``"nan"`` if any is, else ``"inf"``."""
    return "nan" if bool(tensor.isnan().any()) else "inf"


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
    nodes = list(inputs_first(node, most=_LIMIT))
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


# Where the derivative of a function is infinite or undefined although its value is finite.
_STEEP = {
    "SqrtBackward0": "the derivative of a square root is infinite at 0",
    "PowBackward0": "the derivative of a power below 1 is infinite at 0",
    "PowBackward1": "the derivative of a power needs the logarithm of its base, which is infinite at 0",
    "AcosBackward0": "the derivative of acos is infinite at -1 and 1",
    "AsinBackward0": "the derivative of asin is infinite at -1 and 1",
    "AcoshBackward0": "the derivative of acosh is infinite at 1",
    "LinalgSvdBackward0": "the derivative is infinite where singular values are equal",
    "LinalgEighBackward0": "the derivative is infinite where eigenvalues are equal",
    "Atan2Backward0": "the derivative of atan2 is not defined where both are 0",
}
# Where the value is infinite, too, so that something behind it must have taken another one in its place.
_STEEP_AND_INFINITE = {
    "LogBackward0": "the derivative of a logarithm is infinite at 0",
    "Log2Backward0": "the derivative of a logarithm is infinite at 0",
    "Log10Backward0": "the derivative of a logarithm is infinite at 0",
    "Log1PBackward0": "the derivative of log1p is infinite at -1",
    "RsqrtBackward0": "the derivative of 1/sqrt is infinite at 0",
    "DivBackward0": "the derivative of a quotient is infinite where the divisor is 0",
    "ReciprocalBackward0": "the derivative of 1/x is infinite at 0",
    "AtanhBackward0": "the derivative of atanh is infinite at -1 and 1",
    "XlogyBackward0": "the derivative of x log y is infinite where y is 0",
    "ExpBackward0": "where its value is too large, its derivative is infinite, and 0 times that is nan",
    "Exp2Backward0": "where its value is too large, its derivative is infinite, and 0 times that is nan",
}
_CHOOSING = ("Where", "MaskedFill", "MaskedSelect", "Index", "Gather", "Clamp", "Minimum", "Maximum", "NanToNum")
_MASKING = ("MaskedFill", "Where", "Add")
_MASKED = "a row that is masked altogether is nan in the forward already, where no target counts that shows it"
_BY_HAND = "its backward is written by hand"


def risky(
    start: Any, bad: Mapping[int, torch.Tensor], *, late: bool = False
) -> tuple[Origin | None, list[torch.Tensor]]:
    """The first operation of a backward that may have made gradients that are not finite; and all leaves, in order.

    It lies where all that is behind it has such gradients, and its derivative can be infinite. With ``late`` they had
    these in the step before, which had the same graph, and may have none now.
    """
    if start is None:
        return None, []
    leaves = [leaf for node in outputs_first([start]) if (leaf := leaf_of(node)) is not None]
    graph = Graph({id(leaf): 1 if id(leaf) in bad else 2 for leaf in leaves if late or leaf.grad is not None})
    graph.behind(start)
    waiting, chosen = [start], {start: False}
    certain: list[tuple[Any, str]] = []
    behind: list[tuple[Any, str]] = []
    masked: list[tuple[Any, str]] = []
    unlikely: list[tuple[Any, str]] = []
    for node in waiting:
        is_behind = chosen[node]
        only_bad = graph.masks.get(node) == 1
        if only_bad and (why := _why(node)):
            is_hidden = node.name() in _STEEP_AND_INFINITE
            (behind if is_behind else unlikely if is_hidden else certain).append((node, why))
        before = [after for after, _ in node.next_functions if after is not None]
        if only_bad and node.name() == "SoftmaxBackward0" and before and before[0].name().startswith(_MASKING):
            masked.append((node, _MASKED))  # of scores some of which a mask has hidden
        for after in before:
            if after not in chosen:
                chosen[after] = is_behind or node.name().startswith(_CHOOSING)
                waiting.append(after)
    # What stands behind a choice is the branch that was not taken; without one it is where values are finite.
    found = [*behind, *certain]
    if masked and not found:
        return origin_of(masked[-1][0], "forward", _MASKED), leaves
    found += unlikely
    return (_told(found) if found else None), leaves


def _told(found: list[tuple[Any, str]]) -> Origin:
    node, why = found[0]
    by_hand = [other for other, reason in found[1:] if reason == _BY_HAND]
    if by_hand:
        names = ", ".join(dict.fromkeys(other.name().removesuffix("Backward") for other in by_hand))
        why = f"{why}; or it is made by {names}, whose backward is written by hand"
    return origin_of(node, "gradient", why)


def _why(node: Any) -> str:
    kind = node.name()
    if is_custom(node):
        return _BY_HAND
    if kind == "PowBackward0":
        exponent = getattr(node, "_saved_exponent", 2)
        return _STEEP[kind] if isinstance(exponent, (int, float)) and exponent < 1 else ""
    if kind == "DivBackward0" and any(after is None for after, _ in node.next_functions):
        return ""  # by a number, it is as steep in the forward
    return _STEEP.get(kind, "") or _STEEP_AND_INFINITE.get(kind, "")
