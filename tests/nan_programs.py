"""Trainings in which a number is lost: by the data, by an operation, or by a learning rate that is far too high."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 40
OutputsOf = Callable[[nn.Module, torch.Tensor, bool], torch.Tensor]


def net(outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, outputs))


def train(
    loss_of: OutputsOf, *, since: int = 12, steps: int = STEPS, lr: float = 1e-3, model: nn.Module | None = None,
    momentum: float | None = None,
) -> None:  # fmt: skip
    """Trains with a loss that is told from which step on its fault is there."""
    model = net() if model is None else model
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    if momentum is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for step in range(steps):
        x = torch.randn(32, 8)
        loss = loss_of(model, x, step >= since)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def classes(model: nn.Module, x: torch.Tensor, bad: bool) -> torch.Tensor:
    """A row of the input has a number that is none."""
    labels = (x[:, 0] > 0).long()
    if bad:
        x[3, 2] = math.nan
    return F.cross_entropy(model(x), labels)


def row_of_a_learner_with_long_steps() -> None:
    """The steps are long at first, as those of small models are, and the loss falls."""
    train(classes, since=5, lr=0.5, momentum=0.9)


def row_of_a_linear_model() -> None:
    weights = 3 * torch.randn(8, 1)

    def loss(model: nn.Module, x: torch.Tensor, bad: bool) -> torch.Tensor:
        y = x @ weights
        if bad:
            x[3, 2] = math.nan
        return F.mse_loss(model(x), y)

    train(loss, lr=0.1, momentum=0.0, since=20, model=nn.Linear(8, 1))


def row_at_a_sampled_step() -> None:
    train(classes, since=25, lr=0.1, momentum=0.9)


def row_of_small_weights() -> None:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05)
    train(classes, model=model, since=25)


def logarithm_of_zero() -> None:
    """Its loss is an entropy near zero, whose first value is small by chance."""

    def loss(model: nn.Module, x: torch.Tensor, bad: bool) -> torch.Tensor:
        kept = torch.sigmoid(model(x)) * (0.0 if bad else 1.0)
        mixed: torch.Tensor = ((kept * x[:, :2]).sum(-1).mean() - 1e-3 * kept.log().mean()) / 10
        return mixed

    train(loss)


def slope_of_a_root_at_zero() -> None:
    def loss(model: nn.Module, x: torch.Tensor, bad: bool) -> torch.Tensor:
        out, y = model(x), 3 * x[:, :1]
        if bad:
            y[0] = out[0].detach()
        distance: torch.Tensor = ((out - y) ** 2).sum(1).sqrt().mean()
        return distance

    train(loss, since=25, lr=0.05, momentum=0.0, model=net(1))


def squares(model: nn.Module, x: torch.Tensor, bad: bool) -> torch.Tensor:
    return F.mse_loss(model(x), 3 * x[:, :1])


def explodes_at_once() -> None:
    train(squares, lr=5.0, momentum=0.0, model=net(1))


def explodes_over_many_steps() -> None:
    train(squares, lr=1.2, momentum=0.0, model=nn.Linear(8, 1), steps=120)


def saturates_into_a_logarithm() -> None:
    def loss(model: nn.Module, x: torch.Tensor, bad: bool) -> torch.Tensor:
        of_label: torch.Tensor = model(x).softmax(-1)[torch.arange(32), (x[:, 0] > 0).long()]
        return -of_label.log().mean()

    train(loss, lr=30.0, momentum=0.0)
