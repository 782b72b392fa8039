"""A small classifier of sequences, for the tests of the loss in chunks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

V = 13


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, 6)
        self.line = nn.Linear(6, 6)
        self.head = nn.Linear(6, V, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.line(self.tokens(x)).tanh())
        return logits


Use = Callable[..., Tensor]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        result: Tensor = gradient * 2 + 0 * z
        return result


def sample(rows: int = 4) -> dict[str, Tensor]:
    y = torch.randint(0, V, (rows, 3))
    y[0] = 3
    return {"x": torch.randint(0, V, (rows, 3)), "y": y}
