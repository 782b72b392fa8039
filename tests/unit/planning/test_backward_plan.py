"""backward(plan=...): the gradient of the whole batch, within what the plan says."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from anybatch.errors import BatchError, PlanMismatch
from reference import assert_float64, clear, gradients_of

ROWS = 64


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))).double()


def square(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn(ROWS, 32, dtype=torch.float64)


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_the_gradient_is_the_whole_one_within_the_planned_peak(
    batch: torch.Tensor, share: float, with_optimizer: bool
) -> None:
    model = blocks()
    whole = anybatch.measure(lambda: anybatch.backward(model, square, batch), model=model, batch=batch).peak_bytes
    expected = gradients_of(model)
    clear(model)
    held = sum(p.nbytes for p in model.parameters()) * 2 + batch.nbytes
    budget = int(held + (whole - held) * share)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None
    plan = anybatch.plan(model, square, batch, optimizer, memory=budget)
    results: list[Any] = []
    memory = anybatch.measure(
        lambda: results.append(anybatch.backward(model, square, batch, plan=plan)), model=model, batch=batch
    )
    assert_float64(gradients_of(model), expected)
    assert memory.peak_bytes <= plan.peak_bytes * 1.005 <= budget * 1.005
    assert results[0].plan is plan
    assert results[0].micro_batches == plan.chosen.micro_batches


def test_optimizations_are_off_again_also_after_an_exception(batch: torch.Tensor) -> None:
    model = blocks()
    model.append(nn.BatchNorm1d(32).double())  # not split, so that blocks are recomputed instead
    whole = anybatch.plan(model, square, batch, memory="1GiB").peak_bytes
    plan = anybatch.plan(model, square, batch, memory=int(whole * 0.9))
    assert plan.chosen.optimizations

    def failing(model: Any, batch: Any) -> torch.Tensor:
        square(model, batch)
        raise ZeroDivisionError

    forwards = [dict(vars(module)) for module in model.modules()]
    anybatch.backward(model, square, batch, plan=plan)
    assert [dict(vars(module)) for module in model.modules()] == forwards
    clear(model)
    with pytest.raises(PlanMismatch, match="loss"):
        anybatch.backward(model, failing, batch, plan=plan)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_for_something_else_is_refused(batch: torch.Tensor) -> None:
    model = blocks()
    plan = anybatch.plan(model, square, batch, memory="1MiB")
    with pytest.raises(PlanMismatch, match="model"):
        anybatch.backward(model[:5], square, batch, plan=plan)
    with pytest.raises(BatchError, match="leave one of them out"):
        anybatch.backward(model, square, batch, plan=plan, micro_batch_size=4)
    with pytest.raises(BatchError, match="plan is a str"):
        anybatch.backward(model, square, batch, plan="plan.json")  # type: ignore[arg-type]
