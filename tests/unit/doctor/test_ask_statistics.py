"""Frozen batch norms whose running statistics are those of other data, and ones whose statistics fit.

How this could alarm without need: the statistics are close, a copy learns with them as well, or the norms are trained.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def tuned(scale: float, *, frozen: bool = True, affine: bool = True) -> None:
    """Trains a head on a frozen body that knows data of mean 0 and deviation 1."""
    torch.manual_seed(0)
    first = nn.Linear(8, 32)
    body = nn.Sequential(first, nn.BatchNorm1d(32, affine=affine), nn.Tanh())
    with torch.no_grad():
        first.weight *= 2
        for _ in range(100):
            body(torch.randn(64, 8))
    net = nn.Sequential(body, nn.Linear(32, 3))
    body.requires_grad_(not frozen)
    optimizer = torch.optim.Adam(net[1].parameters() if frozen else net.parameters(), lr=1e-2)
    for _ in range(6):
        net.train()
        if frozen:
            body.eval()
        x = torch.randn(48, 8)
        y = x[:, :3].argmax(1)
        optimizer.zero_grad()
        F.cross_entropy(net(x * scale), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("scale", "options", "expected"),
    [
        (0.02, {}, "yes"),
        (0.02, {"affine": False}, "yes"),
        (1.0, {}, "no"),
        (1.5, {}, "no"),
        (0.02, {"frozen": False}, "no"),
    ],
)
def test_statistics_of_other_data_are_told(scale: float, options: dict[str, bool], expected: str) -> None:
    assert answer(lambda: tuned(scale, **options), "frozen statistics") == expected
