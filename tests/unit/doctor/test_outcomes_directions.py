"""A run whose optimizer maximizes, and one whose steps are written by hand, are judged as others are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch import Doctor
from anybatch.records.diagnoses import Diagnosis


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    return x, (x @ torch.randn(8, 1)) + 0.1 * torch.randn(1024, 1)


def likelihood(*, maximize: bool, sign: int) -> Diagnosis:
    x, y = data()
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, maximize=maximize)
    with Doctor() as doctor:
        for step in range(160):
            rows = slice(step % 16 * 64, step % 16 * 64 + 64)
            value = sign * torch.distributions.Normal(net(x[rows]), 1.0).log_prob(y[rows]).mean()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return doctor.report()


@pytest.mark.parametrize(("maximize", "sign"), [(True, 1), (False, -1)])
def test_a_likelihood_is_learned_in_either_direction(maximize: bool, sign: int) -> None:
    found = likelihood(maximize=maximize, sign=sign)
    assert found.verdict == "learning"
    assert ("maximizes" in found.reason) == maximize


@pytest.mark.asks
@pytest.mark.parametrize(("maximize", "sign"), [(True, -1), (False, 1)])
def test_a_likelihood_is_not_learned_in_the_wrong_direction(maximize: bool, sign: int) -> None:
    assert likelihood(maximize=maximize, sign=sign).verdict != "learning"


@pytest.mark.parametrize("rate", [0.2, 0.0])
def test_steps_by_hand_with_gradients_that_are_returned_are_judged(rate: float) -> None:
    x, y = data()
    classes = (y > 0).long().flatten()
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    with Doctor() as doctor:
        for step in range(160):
            rows = slice(step % 16 * 64, step % 16 * 64 + 64)
            loss = F.cross_entropy(net(x[rows]), classes[rows])
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter.sub_(rate * gradient)
    assert (doctor.report().verdict == "learning") == (rate > 0)
