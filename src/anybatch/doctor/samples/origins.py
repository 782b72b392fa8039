"""Which operation of a graph has made numbers that are not finite, from what the graph has saved."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.doctor.samples.lossgraphs import shape_of

_LIMIT = 20_000
_NEAR = 60  # nodes behind an operation among which the last module before it is looked for
_WEIGHING = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ViewBackward0"})
_EDGES = {"self": 0, "other": 1, "exponent": 1, "mat2": 1, "tensor": 1}  # of what has two inputs
_RESULTS = ("result", "output", "grid")

# Where the derivative of a function is infinite or undefined although its value is finite.
_STEEP = {
    "SqrtBackward0": "the derivative of a square root is infinite at 0",
    "RsqrtBackward0": "the derivative of 1/sqrt is infinite at 0",
    "LogBackward0": "the derivative of a logarithm is infinite at 0",
    "Log2Backward0": "the derivative of a logarithm is infinite at 0",
    "Log10Backward0": "the derivative of a logarithm is infinite at 0",
    "Log1PBackward0": "the derivative of log1p is infinite at -1",
    "PowBackward0": "the derivative of a power below 1 is infinite at 0",
    "PowBackward1": "the derivative of a power needs the logarithm of its base, which is infinite at 0",
    "DivBackward0": "the derivative of a quotient is infinite where the divisor is 0",
    "ReciprocalBackward0": "the derivative of 1/x is infinite at 0",
    "AcosBackward0": "the derivative of acos is infinite at -1 and 1",
    "AsinBackward0": "the derivative of asin is infinite at -1 and 1",
    "AtanhBackward0": "the derivative of atanh is infinite at -1 and 1",
    "AcoshBackward0": "the derivative of acosh is infinite at 1",
    "XlogyBackward0": "the derivative of x log y is infinite where y is 0",
    "LinalgSvdBackward0": "the derivative is infinite where singular values are equal",
    "LinalgEighBackward0": "the derivative is infinite where eigenvalues are equal",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation that has made numbers that are not finite.

    Args:
        where: ``"forward"``, ``"input"`` or ``"parameter"``.
        op: its node.
        detail: what went into it.
        parameter: a parameter of it, or the nearest one before it.
        is_own: whether the parameter goes into the operation itself.
    """

    where: str
    op: str
    detail: str = ""
    parameter: torch.Tensor | None = None
    is_own: bool = False


class SavedValues:
    """What a graph has saved, as far as it can be read without running anything.

    Args:
        start: the node of the loss.
    """

    def __init__(self, start: Any) -> None:
        self._order = _inputs_first(start)

    def origin(self) -> Origin | None:
        """The first operation, from the inputs on, that made something not finite out of what was finite."""
        return self._first(_nan_or_inf) or self._singular() or self._first(_not_finite)

    def _first(self, bad: Callable[[torch.Tensor], bool]) -> Origin | None:
        """The first node that has saved something bad; minus infinity alone may be a mask that is meant."""
        for node in self._order:
            results = False
            for name, tensor in _saved(node):
                if not tensor.is_floating_point() or not bad(tensor):
                    continue
                if name.startswith(_RESULTS):
                    results = True
                    continue
                return _maker(node, name, tensor)
            if results:
                return _origin(node, "forward")
        return None

    def _singular(self) -> Origin | None:
        for node in self._order:
            if _what_went_in(node):
                return _origin(node, "forward")
        return None


def risky(start: Any, bad: Mapping[int, torch.Tensor]) -> tuple[Origin | None, list[torch.Tensor]]:
    """The first operation of a backward that may have made the gradients that are not finite.

    It lies where all that is behind it has such gradients, and its derivative can be infinite.

    Args:
        start: the node of the loss, ``None`` if it is gone; what it has saved may be, too.
        bad: leaves with gradients that are not finite, by ``id``.

    Returns:
        The operation if there is one, and all leaves, the nearest to the loss first.
    """
    if start is None:
        return None, []
    order = _inputs_first(start)
    state: dict[Any, tuple[bool, bool]] = {}
    for node in order:
        some_bad = some_good = False
        if (leaf := _leaf(node)) is not None and leaf.grad is not None:
            some_bad, some_good = id(leaf) in bad, id(leaf) not in bad
        for after, _ in node.next_functions:
            if after in state:
                some_bad |= state[after][0]
                some_good |= state[after][1]
        state[node] = some_bad, some_good
    waiting, seen = [start], {start}
    found, leaves = None, []
    for node in waiting:
        if (leaf := _leaf(node)) is not None:
            leaves.append(leaf)
        if found is None and state.get(node) == (True, False) and _is_steep(node):
            found = _origin(node, "gradient", _STEEP[node.name()])
        new = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(new)
        waiting.extend(new)
    return found, leaves


def _is_steep(node: Any) -> bool:
    kind = node.name()
    if kind == "PowBackward0":
        exponent = getattr(node, "_saved_exponent", 2)
        return isinstance(exponent, (int, float)) and exponent < 1
    if kind == "DivBackward0":  # by a number, it is as steep in the forward
        return all(after is not None for after, _ in node.next_functions)
    return kind in _STEEP


def _inputs_first(start: Any) -> list[Any]:
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


def _leaf(node: Any) -> torch.Tensor | None:
    kind = type(node)
    if issubclass(kind, torch.autograd.function.FunctionCtx) or not hasattr(kind, "variable"):
        return None
    return node.variable  # type: ignore[no-any-return]


def _saved(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a node has saved, by name, without what was given to hooks."""
    if issubclass(type(node), torch.autograd.function.FunctionCtx):
        return
    for name in dir(type(node)):
        if name.startswith("_raw_saved_"):
            for entry in _entries(node, name):
                data = entry.data if getattr(entry, "unpack_hook", entry) is None else None
                if isinstance(data, torch.Tensor) and data.layout is torch.strided and data.numel():
                    yield name.removeprefix("_raw_saved_"), data.detach()


def _entries(node: Any, name: str) -> list[Any]:
    try:
        found = getattr(node, name)
    except RuntimeError:  # freed by a backward
        return []
    return list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]


def _nan_or_inf(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() | (tensor == float("inf"))).any())


def _not_finite(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())


def _maker(node: Any, name: str, tensor: torch.Tensor) -> Origin:
    """The operation that has made a tensor which another one has saved, or where that came in."""
    shape = tuple(tensor.shape)
    before = [after for after, _ in node.next_functions if after is not None]
    for after in before:
        leaf = _leaf(after)
        if leaf is not None and leaf.data_ptr() == tensor.data_ptr():
            return Origin("parameter", node.name(), parameter=leaf, is_own=True)
    edges = [after for after, _ in node.next_functions]
    own = edges[_EDGES[name]] if len(edges) == 2 and name in _EDGES else None
    named = [own] if own is not None else before
    makers = [after for after in named if _leaf(after) is None and shape_of(after) == shape]
    if makers:
        return _origin(makers[0], "forward")
    inside = [after for after in before if _leaf(after) is None and after.name() not in _WEIGHING]
    if inside and all(after is not None for after, _ in node.next_functions):
        return _origin(inside[0], "forward")
    return Origin("input", node.name(), f"a tensor of shape {list(shape)} that went into it without a gradient has it")


def _origin(node: Any, where: str, detail: str = "") -> Origin:
    parameter, is_own = _nearest(node)
    return Origin(where, node.name(), detail or _what_went_in(node), parameter, is_own)


def _nearest(node: Any) -> tuple[torch.Tensor | None, bool]:
    """A parameter that goes into an operation, or else the nearest one before it."""
    waiting, seen = [(node, True)], {node}
    for current, is_own in waiting:
        for after, _ in current.next_functions:
            if after is None or after in seen or len(seen) > _NEAR:
                continue
            seen.add(after)
            leaf = _leaf(after)
            if leaf is not None:
                return leaf, is_own
            waiting.append((after, is_own and after.name() in _WEIGHING))
    return None, False


def _what_went_in(node: Any) -> str:
    """Zeros and negative numbers where an operation has no finite value for them."""
    kind = node.name()
    if kind.startswith("NllLoss"):
        for name, tensor in _saved(node):
            if name == "total_weight" and float(tensor.sum()) == 0.0:
                return "none of its targets counts: all are ignored, or their weights are 0"
        return ""
    if kind in ("LogBackward0", "Log2Backward0", "Log10Backward0"):
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
        outside = sum(int((tensor.abs() > 1).sum()) for name, tensor in _saved(node) if name == "self")
        return f"its input has {outside} numbers outside of -1 to 1" if outside else ""
    return ""


def _counted(node: Any, name: str, what: str, *, shift: float = 0.0, negative: bool = True, zeros: bool = True) -> str:
    none = below = 0
    for saved, tensor in _saved(node):
        if saved == name and not tensor.is_complex():
            none += int((tensor + shift == 0).sum()) if zeros else 0
            below += int((tensor + shift < 0).sum()) if negative else 0
    parts = [f"{none} zeros" if none != 1 else "1 zero"] if none else []
    parts += [f"{below} negative numbers" if below != 1 else "1 negative number"] if below else []
    return f"{what} has {' and '.join(parts)}" if parts else ""
