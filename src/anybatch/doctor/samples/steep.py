"""Which operation of a backward can have made gradients that are not finite though the loss was."""

from collections.abc import Mapping
from typing import Any

import torch

from anybatch.doctor.samples.nodes import inputs_first, is_custom, leaf_of
from anybatch.doctor.samples.origins import Origin, origin_of

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
_HIDDEN = {
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
    state = _states(start, bad, late=late)
    waiting, chosen, leaves = [start], {start: False}, []
    certain: list[tuple[Any, str]] = []
    behind: list[tuple[Any, str]] = []
    masked: list[tuple[Any, str]] = []
    unlikely: list[tuple[Any, str]] = []
    for node in waiting:
        if (leaf := leaf_of(node)) is not None:
            leaves.append(leaf)
        is_behind = chosen[node]
        if state.get(node) == (True, False) and (why := _why(node)):
            is_hidden = node.name() in _HIDDEN
            (behind if is_behind else unlikely if is_hidden else certain).append((node, why))
        if state.get(node) == (True, False) and _is_masked(node):
            masked.append((node, _MASKED))
        for after, _ in node.next_functions:
            if after is not None and after not in chosen:
                chosen[after] = is_behind or node.name().startswith(_CHOOSING)
                waiting.append(after)
    # What stands behind a choice is the branch that was not taken; without one it is where values are finite.
    found = [*behind, *certain]
    if masked and not found:
        return origin_of(masked[-1][0], "forward", _MASKED), leaves
    found += unlikely
    return (_told(found) if found else None), leaves


def _is_masked(node: Any) -> bool:
    """Whether it is a softmax of scores some of which a mask has hidden."""
    before = [after for after, _ in node.next_functions if after is not None]
    return node.name() == "SoftmaxBackward0" and bool(before) and before[0].name().startswith(_MASKING)


def _told(found: list[tuple[Any, str]]) -> Origin:
    node, why = found[0]
    by_hand = [other for other, reason in found[1:] if reason == _BY_HAND]
    if by_hand:
        names = ", ".join(dict.fromkeys(other.name().removesuffix("Backward") for other in by_hand))
        why = f"{why}; or it is made by {names}, whose backward is written by hand"
    return origin_of(node, "gradient", why)


def _states(start: Any, bad: Mapping[int, torch.Tensor], *, late: bool) -> dict[Any, tuple[bool, bool]]:
    """For each node whether some leaves behind it have such gradients, and whether some have good ones."""
    state: dict[Any, tuple[bool, bool]] = {}
    for node in inputs_first(start):
        some_bad = some_good = False
        if (leaf := leaf_of(node)) is not None and (late or leaf.grad is not None):
            some_bad, some_good = id(leaf) in bad, id(leaf) not in bad
        for after, _ in node.next_functions:
            if after in state:
                some_bad |= state[after][0]
                some_good |= state[after][1]
        state[node] = some_bad, some_good
    return state


def _why(node: Any) -> str:
    kind = node.name()
    if is_custom(node):
        return _BY_HAND
    if kind == "PowBackward0":
        exponent = getattr(node, "_saved_exponent", 2)
        return _STEEP[kind] if isinstance(exponent, (int, float)) and exponent < 1 else ""
    if kind == "DivBackward0" and any(after is None for after, _ in node.next_functions):
        return ""  # by a number, it is as steep in the forward
    return _STEEP.get(kind, "") or _HIDDEN.get(kind, "")
