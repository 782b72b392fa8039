"""Losses that a ``GradScaler`` has multiplied by its scale."""

import weakref

import torch

_MOST_LOSSES = 64


class ScaledLosses:
    """The losses that came out of ``GradScaler.scale`` and whose backward has not run yet.

    Example:
        >>> losses, loss = ScaledLosses(), torch.ones(1, requires_grad=True).sum() * torch.tensor(8.0)
        >>> losses.scale = 8.0
        >>> losses.add(loss)
        >>> losses.scale_of(loss), losses.scale_of(loss + 1), len(losses)
        (8.0, None, 1)
    """

    __slots__ = ("_losses", "pending", "scale")

    def __init__(self) -> None:
        self.scale = 1.0  # when it was last read
        self.pending = False  # whether a loss was scaled since the last ``update``, so that gradients may be scaled
        self._losses: dict[int, weakref.ref[torch.Tensor]] = {}  # another one may come to lie in the same place

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def in_force(self) -> float:
        """The scale of gradients that may be scaled, 1 where none was."""
        return self.scale if self.pending else 1.0

    def add(self, loss: torch.Tensor) -> None:
        """Takes note of a loss."""
        if loss.grad_fn is not None:
            if len(self._losses) >= _MOST_LOSSES:
                self._losses.clear()
            self._losses[id(loss)] = weakref.ref(loss)

    def scale_of(self, loss: torch.Tensor) -> float | None:
        """The scale of a loss that is one of these, ``None`` for others."""
        known = self._losses.get(id(loss)) if self._losses else None
        return self.scale if known is not None and known() is loss else None

    def updated(self) -> None:
        """The scaler goes on to its next step; losses that are gone are forgotten."""
        self.pending = False
        if self._losses:
            self._losses = {key: known for key, known in self._losses.items() if known() is not None}

    def drop(self, loss: torch.Tensor) -> None:
        """Forgets a loss whose backward runs."""
        if self._losses:
            self._losses.pop(id(loss), None)
