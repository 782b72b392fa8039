"""The plain numbers that a loss was multiplied by or divided by, read off its graph."""

from typing import Any

import torch

from anybatch.tensors.dispatch import item_of

_MOST_FACTORS = 8
FACTORS = frozenset({"MulBackward0", "DivBackward0"})
"""Names of the nodes of products and quotients."""


def factor_and_top(loss: torch.Tensor, *, scaled: bool) -> tuple[float, str]:
    """The product of the plain numbers at the top of the graph of a loss, and the kind of the node behind them.

    Args:
        loss: that is about to be differentiated.
        scaled: whether a ``GradScaler`` has multiplied it by its scale.

    Example:
        >>> factor_and_top(torch.ones(3, requires_grad=True).sum() / 4, scaled=False)
        (0.25, 'SumBackward0')
    """
    node, factor = loss.grad_fn, 1.0
    for _ in range(_MOST_FACTORS):
        kind = "" if node is None else node.name()
        if kind not in FACTORS or node is None:
            return factor, kind
        number = _plain_factor(node, loss.dtype)
        if number is None and scaled:
            scaled = False  # the product with the scale, a tensor
        elif number is None:
            return factor, kind
        else:
            factor = factor * number if kind == "MulBackward0" else factor / number if number else factor
        node = next((after for after, _ in node.next_functions if after is not None), None)
    return factor, "" if node is None else node.name()


def _plain_factor(node: Any, dtype: torch.dtype) -> float | None:
    """The plain number that a product or quotient has on its right; a tensor of the loss's own kind is none."""
    following = node.next_functions
    if len(following) != 2 or following[0][0] is None or following[1][0] is not None:
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # freed by an earlier backward
        return None
    if other is None or other.dim() or other.device.type != "cpu":
        return None
    plain = other.dtype in (torch.float64, torch.int64) and not (
        other.dtype is dtype and other.dtype is not torch.float64
    )
    return float(item_of(other)) if plain else None
