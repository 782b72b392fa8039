"""A derivative that is a constant in the loss: told where it should be learned, and not where it is one by intent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Net = nn.Sequential
Loss = Callable[..., Any]


def derivative(made: Any, by: Any, **options: Any) -> Any:
    return torch.autograd.grad(made, by, torch.ones_like(made), retain_graph=True, **options)[0]


def equation(net: Net, t: torch.Tensor, **options: Any) -> Any:
    """u' = -u, u(0) = 1."""
    u = net(t)
    return (derivative(u, t, **options) + u).square().mean() + (net(torch.zeros(1, 1)) - 1).square().mean()


def curvature(net: Net, t: torch.Tensor, **options: Any) -> Any:
    """u'' = -u, with the first derivative kept in the graph."""
    u = net(t)
    return (derivative(derivative(u, t, create_graph=True), t, **options) + u).square().mean()


def attacked(net: Net, t: torch.Tensor) -> Any:
    u = net(t)
    return u.square().mean() + (net(t + 0.1 * derivative(u, t).sign()) - u).square().mean()


def weighed(net: Net, t: torch.Tensor) -> Any:
    u = net(t)
    return (u.square() * derivative(u, t).abs()).mean() + u.mean()


def balanced(net: Net, t: torch.Tensor) -> Any:
    """The weight of a term by the gradients of the last layer, as in VQGAN."""
    u = net(t)
    one, other, last = u.square().mean(), (u - 1).abs().mean(), net[2].weight
    weight = derivative(one, last).norm() / (derivative(other, last).norm() + 1e-4)
    return one + weight * other


def of_a_teacher(net: Net, t: torch.Tensor) -> Any:
    """Slopes of a net that is not trained are targets."""
    teacher = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    u = net(t)
    return (derivative(u, t, create_graph=True) - derivative(teacher(t), t)).square().mean()


def walked(net: Net, t: torch.Tensor) -> Any:
    """Samples that go down the slope of an energy, which is then raised there."""
    fake = torch.randn_like(t).requires_grad_()
    for _ in range(3):
        fake = (fake - 0.1 * derivative(net(fake), fake) + 0.01 * torch.randn_like(t)).detach().requires_grad_()
    return net(t).mean() - net(fake).mean()


def trained(loss: Loss) -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss(net, torch.rand(16, 1).requires_grad_()).backward()
        optimizer.step()


@pytest.mark.parametrize("loss", [equation, curvature])
def test_a_derivative_without_a_graph_beside_what_is_made_is_told(loss: Loss) -> None:
    assert answer(lambda: trained(loss), "constant derivative") == "yes"
    assert answer(lambda: trained(lambda net, t: loss(net, t, create_graph=True)), "constant derivative") == "no"


@pytest.mark.parametrize("loss", [attacked, weighed, balanced, of_a_teacher, walked])
def test_one_that_is_a_constant_by_intent_is_not(loss: Loss) -> None:
    assert answer(lambda: trained(loss), "constant derivative") == "no"


def adapted(uses: str, *, inner: int = 2, create_graph: bool = True) -> None:
    """Meta-learning: an inner loop on one half of the samples, the loss on the other."""
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        x, y = torch.rand(16, 1), torch.rand(16, 1)
        start = dict(net.named_parameters())
        fast: dict[str, Any] = dict(start)
        for _ in range(inner):
            loss = F.mse_loss(functional_call(net, fast, (x[:8],)), y[:8])
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=create_graph)
            fast = {name: one - 0.1 * slope for (name, one), slope in zip(fast.items(), slopes, strict=True)}
        chosen = {"start": start, "fast": fast}
        terms = [F.mse_loss(functional_call(net, chosen[one], (x[8:],)), y[8:]) for one in uses.split()]
        optimizer.zero_grad()
        torch.stack(terms).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("uses", "expected"), [("start", "yes"), ("fast", "no"), ("start fast", "no")])
@pytest.mark.parametrize("inner", [1, 2])
def test_an_inner_loop_whose_weights_nothing_is_computed_with_is_told(uses: str, inner: int, expected: str) -> None:
    assert answer(lambda: adapted(uses, inner=inner), "unused update") == expected


def test_gradients_for_a_look_at_them_are_no_update() -> None:
    def penalised(net: Net, t: torch.Tensor) -> Any:
        u = net(t)
        slope = derivative(u, t, create_graph=True)
        assert float(slope.norm()) >= 0  # printed
        return u.square().mean()

    assert answer(lambda: trained(penalised), "unused update") == "no"
    assert answer(lambda: trained(lambda net, t: equation(net, t, create_graph=True)), "unused update") == "no"
