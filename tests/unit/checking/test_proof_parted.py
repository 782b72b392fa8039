"""A branch that goes other ways in two micro-batches of one batch stops that batch, however many went alike before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import anybatch.checking.proof

ROWS = 32


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": x, "y": (x[:, 0] > 0).long()}


def doubled(model: Any, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    return loss * 2 if loss.item() > 0.4 else loss


def with_penalty(model: Any, batch: Any) -> Any:
    outputs = model(batch["x"])
    loss = F.cross_entropy(outputs, batch["y"])
    return loss + 0.1 * outputs.square().mean() if loss.item() < 0.5 else loss


def harmless(model: Any, batch: Any) -> Any:
    """Another last operation, and the same loss."""
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    return loss * 1.0 if loss.item() > 0.4 else loss


def steps_until(loss_fn: Callable[..., Any], call: Callable[[nn.Module, Any], Any], most: int = 50) -> int:
    """Steps that were made, each with the gradient of the whole batch, until one was stopped."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(most):
        batch = batch_of(number)
        wanted = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
        optimizer.zero_grad()
        try:
            call(model, batch)
        except anybatch.NotSplittable:
            return number
        for one, other in zip(model.parameters(), wanted, strict=True):
            assert one.grad is not None
            assert torch.allclose(one.grad, other, rtol=1e-9, atol=1e-14)
        optimizer.step()
    return most


@pytest.mark.parametrize("loss_fn", [doubled, with_penalty])
@pytest.mark.parametrize("size", [4, 8])
def test_the_batch_in_which_it_goes_both_ways_is_stopped(loss_fn: Callable[..., Any], size: int) -> None:
    call = lambda model, batch: anybatch.backward(model, loss_fn, batch, micro_batch_size=size)  # noqa: E731
    assert 5 < steps_until(loss_fn, call) < 50


def test_one_that_makes_no_difference_goes_on_and_is_seldom_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs, prove = [], anybatch.checking.proof.prove

    def counted(*given: Any) -> Any:
        proofs.append(given[0])
        return prove(*given)

    monkeypatch.setattr("anybatch.checking.proof.prove", counted)
    call = lambda model, batch: anybatch.backward(model, harmless, batch, micro_batch_size=4)  # noqa: E731
    assert steps_until(harmless, call) == 50
    assert len(proofs) < 12
