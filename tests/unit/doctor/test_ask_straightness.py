"""Nets of several layers that are one linear layer are told, and those that bend, or are narrow inside, are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


class Beside(nn.Module):
    """A linear layer and a correction of low rank, both of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A net that is applied to its own output, so that no graph is of one chain of layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), between, nn.Linear(12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x + self.net(x))  # type: ignore[no-any-return]


class Siamese(nn.Module):
    """Two layers that both halves of the input go through."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x[:, :3]) - self.net(x[:, 3:])  # type: ignore[no-any-return]


class Moved(nn.Module):
    """Two layers between which entries are moved, averaged and scaled, of which one is a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv1d(2, 5, 3), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = F.avg_pool1d(self.conv(x.unflatten(1, (2, 3)).repeat(1, 1, 2)), 2)
        return (2.0 * made.transpose(1, 2)) @ self.weight


class Computed(nn.Module):
    """A product with a matrix that is computed, before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x @ (self.small * 2))  # type: ignore[no-any-return]


def trains(net: nn.Module, shape: tuple[int, ...] = (6,)) -> Callable[[], None]:
    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(3):
            x = torch.randn(16, *shape)
            optimizer.zero_grad()
            F.mse_loss(net(x).flatten(1)[:, :1], x.flatten(1)[:, :1]).backward()
            optimizer.step()

    return train


class Parallel(nn.Module):
    """Two layers beside each other, before a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.one(x) + self.other(x))  # type: ignore[no-any-return]


class Sigmoid(torch.autograd.Function):
    """A sigmoid by hand, whose node has a name of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = x.sigmoid()
        ctx.save_for_backward(made)
        ctx.name = ctx.variable = 3
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (made,) = ctx.saved_tensors
        return grad * made * (1 - made)  # type: ignore[no-any-return]


class Gated(nn.Module):
    """An activation whose factor has no graph that is seen."""

    def __init__(self, gate: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.gate(h)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    net[1].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)), "yes"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3), nn.Softmax(1)), "yes"),
        (Parallel, "yes"),
        (Siamese, "yes"),
        (Moved, "yes"),
        (lambda: Twice(nn.Identity()), "no"),  # its layers come again behind themselves, as over time
        (lambda: Twice(nn.Tanh()), "no"),
        (Computed, "no"),
        (Beside, "no"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), *[nn.Sigmoid(), nn.Linear(8, 8)] * 20), "no"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), "no"),
        (lambda: nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6)), "no"),  # a bottleneck
        (lambda: nn.Sequential(layer := nn.Linear(6, 6), layer), "no"),  # over time
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), "no"),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), "no"),
        (frozen, "no"),
        (lambda: nn.Linear(6, 3), "no"),
        (lambda: nn.Sequential(nn.Linear(6, 8), Gated(Sigmoid.apply), nn.Linear(8, 3)), "unknown"),
        (lambda: nn.Sequential(nn.Linear(6, 8), Gated(lambda h: h > 0), nn.Linear(8, 3)), "unknown"),
    ],
    ids=[
        "normed",
        "squashed",
        "parallel",
        "siamese",
        "moved",
        "again",
        "again, bent",
        "computed",
        "low rank",
        "squashed between",
        "bent",
        "narrow",
        "twice",
        "layer norm",
        "in place",
        "frozen",
        "one",
        "own",
        "masked",
    ],
)
def test_layers_that_fold_are_told_by_the_graph_of_a_step(net: Callable[[], nn.Module], expected: str) -> None:
    assert answer(trains(net()), "layers") == expected
