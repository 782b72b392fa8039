"""Embeddings that have become one point for a loss of all pairs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def hardest(points: torch.Tensor, labels: torch.Tensor, margin: float = 0.5) -> torch.Tensor:
    """Of the triplets of each row the hardest one."""
    far, same = (points[:, None] - points[None]).pow(2).sum(-1), labels[:, None] == labels
    loss: torch.Tensor = far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, torch.inf).amin(1) + margin
    return loss.relu().mean()


def contrast(points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """So warm that it is about the same whatever the rows are."""
    scores = (F.normalize(points, dim=1) @ F.normalize(points, dim=1).t() / 100).fill_diagonal_(-1e9)
    return F.cross_entropy(scores, torch.arange(len(points)).roll(len(points) // 2))


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def embedded(loss: Loss, shrink: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(4):
        x, labels = torch.randn(24, 6), torch.arange(24) % 6
        optimizer.zero_grad()
        loss(net(x), labels).backward()
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                list(net.parameters())[2].mul_(shrink)


@pytest.mark.parametrize(
    ("loss", "shrink", "expected"),
    [
        (hardest, 0.01, "yes"),
        (hardest, 1.0, "no"),
        (contrast, 1.0, "no"),  # the loss is the same, and rows are as far apart as ever
        (F.cross_entropy, 0.01, "no"),  # no loss of pairs
    ],
)
def test_embeddings_that_have_become_one_point_are_told(loss: Loss, shrink: float, expected: str) -> None:
    assert answer(lambda: embedded(loss, shrink), "one point") == expected
