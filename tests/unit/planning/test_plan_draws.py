"""Steps that run other layers by random numbers: their plans say that they are estimates."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from reference import assert_float64, gradients_of

ROWS = 60

Number = Callable[[], float]
NUMBERS: dict[str, Number] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: torch.rand(()).item(),
    "torch in place": lambda: torch.empty(1).uniform_(0, 1).item(),
}


class Dropping(nn.Module):
    """Blocks of which each is left out by a number."""

    def __init__(self, number: Number, *, runs_above: bool) -> None:
        super().__init__()
        self.number, self.runs_above = number, runs_above
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if (self.number() > 0.5) is self.runs_above:
                x = x + block(x)
        found: Tensor = self.head(x)
        return found


def loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(rows: int = ROWS) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {"x": torch.randn(rows, 8, dtype=torch.float64), "y": torch.randint(3, (rows,))}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def most_of(model: nn.Module, share: float) -> int:
    """A share of the way from the smallest budget to what the whole batch takes."""
    seed(0)
    plan = anybatch.plan(model, loss, batch_of(), sgd(model), memory=2**30)
    assert plan.confidence == "estimated"
    return int(plan.smallest_bytes + share * (plan.whole_bytes - plan.smallest_bytes))


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_step_that_another_draw_may_change_is_estimated(kind: str) -> None:
    seed(0)
    model = Dropping(NUMBERS[kind], runs_above=True).double()
    plan = anybatch.plan(model, loss, batch_of(), sgd(model), memory=2**30)
    assert plan.confidence == "estimated"


def test_the_gradient_is_that_of_the_micro_batches_as_they_were_drawn() -> None:
    model = Dropping(random.random, runs_above=False).double()
    budget, batch = most_of(model, 0.1), batch_of()
    seed(5)
    step = anybatch.TrainStep(model, loss, sgd(model), memory=budget)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seed(5)
    size = -(-ROWS // step(batch).micro_batches)
    got = gradients_of(model)
    model.load_state_dict(before)
    seed(5)
    model.zero_grad()
    for start in range(0, ROWS, size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        (loss(model, part) * len(part["y"]) / ROWS).backward()
    assert_float64(got, gradients_of(model))


def test_planning_draws_nothing_of_what_the_user_draws() -> None:
    batch = batch_of()
    for kind in NUMBERS:
        model = Dropping(NUMBERS[kind], runs_above=True).double()
        seed(3)
        anybatch.plan(model, loss, batch, sgd(model), memory=2**30)
        after = [random.random(), np.random.rand(), torch.rand(1).item()]
        seed(3)
        assert after == [random.random(), np.random.rand(), torch.rand(1).item()]
