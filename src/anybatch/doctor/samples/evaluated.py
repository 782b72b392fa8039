"""The targets of an evaluation: what a constant guess costs there, and whether the model does better."""

import math
from typing import Any

import torch

_MOST_CALLS = 256
_MOST_NUMBERS = 1 << 18  # of a call
_SURELY = 3.0  # standard errors


class Targets:
    """Sums up the targets of the calls of one loss function, on the host.

    Example:
        >>> targets = Targets("mse_loss")
        >>> targets.add(torch.zeros(4, 1), (torch.tensor([[0.0], [2.0], [0.0], [2.0]]), None, None, "mean", None))
        True
        >>> targets.facts()
        {'guess': 1.0, 'items': 4, 'better': False}
    """

    def __init__(self, name: str) -> None:
        self._name, self._calls, self._items, self._right = name, 0, 0, 0
        self._sums: Any = 0
        self._squares = 0.0

    def add(self, first: torch.Tensor, others: tuple[Any, ...]) -> bool:
        """Adds a call; whether it could be, as one of a mean over plain targets can."""
        target, self._calls = others[0], self._calls + 1
        is_plain = torch.is_tensor(target) and not any(torch.is_tensor(one) for one in others[1:])
        if (
            not is_plain
            or "mean" not in others[1:]
            or not target.is_cpu
            or target.numel() > _MOST_NUMBERS
            or self._calls > _MOST_CALLS
        ):
            return False
        if self._name == "cross_entropy" and not target.is_floating_point() and first.dim() == target.dim() + 1:
            counted = target != others[3]
            right = (first.argmax(1) == target) & counted
            if others[-1]:  # smoothed labels
                return False
            return self._sum(target[counted].bincount(minlength=first.shape[1]).double(), int(counted.sum()), right)
        if self._name == "mse_loss" and target.is_floating_point() and first.shape == target.shape and target.dim():
            self._squares += float(target.double().square().sum())
            return self._sum(target.double().sum(0), target.shape[0])
        return False

    def _sum(self, sums: torch.Tensor, items: int, right: torch.Tensor | None = None) -> bool:
        if torch.is_tensor(self._sums) and self._sums.shape != sums.shape:
            return False
        self._sums, self._items = self._sums + sums, self._items + items
        self._right += int(right.sum()) if right is not None else 0
        return True

    def facts(self) -> dict[str, Any]:
        """The entries of an ``Evaluated`` about its targets."""
        count = self._items
        if not count:
            return {}
        if self._name == "mse_loss":
            spread = self._squares - float(self._sums.square().sum()) / count
            return {"guess": spread / (count * max(self._sums.numel(), 1)), "items": count, "better": False}
        share = self._sums / count
        most = float(share.max())
        error = math.sqrt(most * (1 - most) / count)
        better = self._right / count > most + _SURELY * error
        return {"guess": float(torch.special.entr(share).sum()), "items": count, "better": better}
