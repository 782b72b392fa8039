"""Rules about weights that the script updates itself, without an optimizer."""

import pytest
import torch
from torch import nn

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor


def flattened(kind: str, updates: int = 60) -> list[str]:
    """The findings of a net that is updated through flat views, of which one may be a copy."""
    torch.manual_seed(0)
    first, last = nn.Linear(3, 8), nn.Linear(8, 1)
    if kind == "transposed":
        first.weight.data = torch.randn(3, 8).t()
    first.requires_grad_(kind != "frozen")
    x = torch.randn(50, 3)
    y = x.prod(1, keepdim=True)
    with Doctor() as doctor:
        for update in range(updates):
            nets = [first, last] if kind != "in turns" else [(first, last)[update % 2]]
            (last(first(x).tanh()) - y).square().mean().backward()
            for each in [one for net in nets for one in net.parameters() if one.grad is not None]:
                assert each.grad is not None
                each.data.reshape(-1).sub_(0.1 * each.grad.reshape(-1))
            for each in [*first.parameters(), *last.parameters()]:
                each.grad = None
    return [one.name for one in diagnosis(doctor.run).findings if one.severity != "info"]


def test_hand_update_lost_fires_where_a_copy_is_updated() -> None:
    assert "HAND_UPDATE_LOST" in flattened("transposed")


@pytest.mark.parametrize("kind", ["plain", "frozen", "in turns"])
def test_hand_update_lost_is_quiet_where_the_weights_move_or_need_not(kind: str) -> None:
    assert "HAND_UPDATE_LOST" not in flattened(kind)
