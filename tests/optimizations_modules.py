"""Modules that change buffers or draw random numbers, for the tests of recomputed blocks."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stateful(nn.Module):
    """A large buffer that is written to in one of several ways, and read."""

    def __init__(self, how: str, size: int = 20_000) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("level", torch.ones(size))
        self.level: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).sin() * self.level[:4].clone()
        with torch.no_grad():
            if self.how == "in place":
                self.level.mul_(0.5)
            elif self.how == "replaced":
                self.level = self.level * 0.5
            elif self.how == "a view":
                self.level[:2].add_(1.0)
            elif self.how == "data":
                self.level.data.mul_(0.5)
        return y * y


class Lucky(nn.Module):
    """Draws from one of the generators, or from all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.line = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = torch.rand(()).item() if self.how in ("torch", "all") else 1.0
        if self.how in ("python", "all"):
            factor += random.random()
        if self.how in ("numpy", "all"):
            factor += float(np.random.randn()) + float(np.random.rand())
        if self.how == "dropout":
            x = F.dropout(x, 0.5)
        y: Tensor = (self.line(x) * torch.full((), factor)).sin()
        return y


def square(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss
