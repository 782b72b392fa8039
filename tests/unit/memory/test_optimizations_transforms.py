"""Optimizations step aside where torch.func or forward-mode differentiation runs a block, and the gradient is exact."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import anybatch
from anybatch.memory.application import apply_optimizations

Loss = Callable[[Any, Any], Tensor]
grad: Any = torch.func.grad
jacrev: Any = torch.func.jacrev
jvp: Any = torch.func.jvp
vjp: Any = torch.func.vjp
vmap: Any = torch.func.vmap


def by_jvp(model: Any, batch: Any) -> Tensor:
    """The loss and what the output does along a direction."""
    output, tangent = jvp(model, (batch["x"],), (batch["t"],))
    loss: Tensor = F.cross_entropy(output, batch["y"]) + tangent.square().mean()
    return loss


def by_level(model: Any, batch: Any) -> Tensor:
    """The same, by hand."""
    with forward_ad.dual_level():
        output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(batch["x"], batch["t"])))
        assert tangent is not None
        loss: Tensor = F.cross_entropy(output, batch["y"]) + tangent.square().mean()
    return loss


def by_estimate(model: Any, batch: Any) -> Tensor:
    """What the output does along a direction that is made for it."""
    direction = torch.ones_like(batch["x"]).cumsum(1)
    output, tangent = jvp(model, (batch["x"],), (direction,))
    loss: Tensor = F.cross_entropy(output, batch["y"]) + tangent.square().mean()
    return loss


def by_vmap(model: Any, batch: Any) -> Tensor:
    """Every sample by itself."""
    return F.cross_entropy(vmap(model, randomness="different")(batch["x"]), batch["y"])


def by_jacrev(model: Any, batch: Any) -> Tensor:
    """A penalty on the Jacobian of every sample."""
    jacobians: Tensor = vmap(jacrev(model))(batch["x"])
    return jacobians.square().sum((1, 2)).mean()


def by_grad(model: Any, batch: Any) -> Tensor:
    """A penalty on the gradient of every sample with respect to the parameters."""

    def one(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    found = vmap(grad(one), in_dims=(None, 0, 0))(dict(model.named_parameters()), batch["x"], batch["y"])
    total: Tensor = sum(value.flatten(1).square().sum(1).mean() for value in found.values())
    return total


def by_both(model: Any, batch: Any) -> Tensor:
    """A forward as usual, and one within a transform."""
    return F.cross_entropy(model(batch["x"]), batch["y"]) + by_jvp(model, batch)


LOSSES: list[Loss] = [by_jvp, by_level, by_estimate, by_vmap, by_jacrev, by_grad, by_both]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)]
    return nn.Sequential(*layers).double()


def data(rows: int = 300) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x, t = torch.randn(2, rows, 16, dtype=torch.float64)
    return {"x": x, "t": t, "y": torch.randint(5, (rows,))}


def gradient_of(model: nn.Module, backward: Callable[[], Any]) -> Tensor:
    model.zero_grad()
    backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize(
    "optimizations",
    [
        {"recompute": ("0:2", "2:5")},
        {"recompute": ("", "0", "2")},
        {"offload": ("0:2", "2:4")},
        {"head": "4", "loss_chunks": 2},
    ],
    ids=str,
)
def test_optimizations_step_aside(loss_fn: Loss, optimizations: dict[str, Any]) -> None:
    model, batch = net(), data(20)
    want = gradient_of(model, lambda: loss_fn(model, batch).backward())
    with apply_optimizations(model, **{"recompute": (), "offload": (), "head": "", "loss_chunks": 1, **optimizations}):
        got = gradient_of(model, lambda: loss_fn(model, batch).backward())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def check_budgets(make: Callable[[], nn.Module], loss_fn: Loss, batch: Any, shares: Sequence[float]) -> None:
    """Runs a step within budgets between the least and that of the whole batch."""
    model = make()
    want = gradient_of(model, lambda: loss_fn(model, batch).backward())
    plan = anybatch.plan(model, loss_fn, batch, torch.optim.SGD(model.parameters(), lr=0.1), memory="1GiB")
    for share in shares:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        budget = int(plan.smallest_bytes + share * (plan.whole_bytes - plan.smallest_bytes))
        step = functools.partial(anybatch.TrainStep(model, loss_fn, optimizer, memory=budget), batch)
        assert anybatch.measure(step, model=model, optimizer=optimizer, batch=batch).peak_bytes <= budget
        got = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert (got - want).norm() <= 1e-10 * want.norm()


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_any_budget_holds_and_the_gradient_is_exact(loss_fn: Loss) -> None:
    check_budgets(net, loss_fn, data(40), (0.0, 0.2, 0.6))


class Inside(nn.Module):
    """A block that differentiates a part of itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line, self.how = nn.Linear(16, 16), how

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the layer does along its own input."""
        if self.how == "jvp":
            along: Tensor = jvp(self.line, (x,), (x,))[1]
            return x + along.tanh()
        output, back = vjp(lambda z: self.line(z).tanh(), x)
        found: Tensor = back(output)[0]
        return x + found


@pytest.mark.parametrize("how", ["jvp", "vjp"])
def test_a_block_that_uses_a_transform_itself(how: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Inside(how), Inside(how), Inside(how), nn.Linear(16, 5)).double()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    check_budgets(make, loss_fn, data(40), (0.0, 0.3, 0.7))
