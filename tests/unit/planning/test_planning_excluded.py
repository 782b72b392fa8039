"""Blocks that can't be recomputed are left as they are, at every budget and on every way to a plan.

How it could be silently wrong: the error that is meant for the planner alone reaches the user, from the search, from
what is timed, or from the smallest configuration that is told where nothing fits; or such a block is in the plan.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.units import parse_bytes

BUDGETS = ("1", "100KiB", "150KiB", "165KiB", "200KiB", "1MiB")


class Block(nn.Module):
    """Many activations; one that changes a parameter can't run a second time."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(64, 64), changes
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            with torch.no_grad():
                self.scale.mul_(1.0001)
        hidden = torch.relu(self.linear(x)) * self.scale.clone()
        for _ in range(6):
            hidden = torch.tanh(hidden)
        return hidden


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Repeating(nn.Module):
    """One block three times, for which the planner also tries to recompute everything."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(changes=True), Block(changes=False)])
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        logits: Tensor = self.head(x)
        return logits


def recomputed(model: nn.Module, budget: str) -> set[str]:
    """The blocks at which runs of a plan for a budget begin; none where nothing fits. The plan is used once."""
    batch = {"x": torch.randn(32, 64), "y": torch.randint(3, (32,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        plan = anybatch.plan(model, loss_fn, batch, optimizer=optimizer, memory=budget)
    except anybatch.DoesNotFit:
        assert parse_bytes(budget) < 2**18
        return set()
    assert plan.chosen.peak_bytes <= parse_bytes(budget)
    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan, verify="off")
    assert step(batch).loss > 0  # a block that is in the plan after all would raise
    return {run.split("..")[0] for run in plan.chosen.recompute}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_block_that_runs_several_times(budget: str) -> None:
    torch.manual_seed(0)
    model = Repeating()
    begun = recomputed(model, budget)
    assert not any(run.startswith("blocks.0") for run in begun)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("changing", [(0, 1, 2, 3), (1,), (0, 3)], ids=str)
def test_they_are_in_no_plan(changing: tuple[int, ...], budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(changes=index in changing) for index in range(4)], nn.Linear(64, 3))
    assert not recomputed(model, budget) & {str(index) for index in changing}
