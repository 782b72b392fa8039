"""A factor of the loss that is zero everywhere is told, with where it has become so; others are not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from test_doctor_ask import asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Weigh = Callable[[torch.Tensor], torch.Tensor]


def told(weigh: Weigh) -> tuple[str, object]:
    net = nn.Linear(6, 4)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def train() -> None:
        for _ in range(3):
            scores = net(torch.randn(1, 12, 6))
            dist = torch.distributions.Categorical(logits=scores)
            loss = -(dist.log_prob(dist.sample()) * weigh(torch.rand(1, 12))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found = asked(train, "zero factor")[-1]
    return found.answer, found.evidence.get("own_mean")


def normal(dim: int) -> Weigh:
    return lambda one: (one - one.mean(dim, keepdim=True)) / (one.std(dim, keepdim=True, unbiased=False) + 1e-8)


def test_a_factor_that_is_zero_is_told() -> None:
    assert told(normal(0)) == ("yes", True)
    assert told(lambda one: (one - 2).clamp(min=0)) == ("yes", False)


@pytest.mark.parametrize("weigh", [normal(1), lambda one: one - one.mean(), lambda one: one * 0.5])
def test_others_are_not(weigh: Weigh) -> None:
    assert told(weigh)[0] == "no"
