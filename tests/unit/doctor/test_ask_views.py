"""Two views of a pair that are one and the same: told where they are joined, too, and not where they only may be."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def contrast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """NT-Xent."""
    both, rows = F.normalize(torch.cat([one, other]), dim=1), len(one)
    scores = (both @ both.t() / 0.2).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, torch.cat([torch.arange(rows) + rows, torch.arange(rows)]))


def trained(net: nn.Module, views: Any) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        one, other = views(torch.randn(16, 6))
        optimizer.zero_grad()
        contrast(net(one), net(other)).backward()
        optimizer.step()


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def once(x: torch.Tensor) -> Any:
    view = noisy(x)
    return view, view


def copied(x: torch.Tensor) -> Any:
    view = noisy(x)
    return view, view.clone()


def encoder(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *more, nn.Linear(16, 8))


@pytest.mark.parametrize("views", [once, copied])
def test_one_view_given_as_both_is_told(views: Any) -> None:
    assert answer(lambda: trained(encoder(), views), "itself") == "yes"


def test_two_views_are_not() -> None:
    assert answer(lambda: trained(encoder(), lambda x: (noisy(x), noisy(x))), "itself") == "no"
    assert answer(lambda: trained(encoder(), lambda x: (x, noisy(x))), "itself") == "no"


def test_dropout_makes_two_views_of_one() -> None:
    """As in SimCSE."""
    assert answer(lambda: trained(encoder(nn.Dropout(0.2)), lambda x: (x, x)), "itself") == "no"


def test_what_is_joined_for_another_reason_is_not() -> None:
    """Both heads of one trunk, and the values of two critics."""
    trunk, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    critics = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters(), *critics.parameters()])

    def train() -> None:
        for _ in range(4):
            x, y = torch.randn(16, 6), torch.randn(16, 8)
            joined = torch.cat([head(trunk(x)) for head in heads], 1)
            values = torch.stack([critic(x) for critic in critics])
            optimizer.zero_grad()
            (F.mse_loss(joined, y) + (values - y[:, :1]).square().mean()).backward()
            optimizer.step()

    assert answer(train, "itself") == "no"
