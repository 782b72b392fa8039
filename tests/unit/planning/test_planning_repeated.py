"""Blocks that run several times in a loss, as in a siamese one, may be recomputed, and what is predicted is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from planning_modules import Residual
from planning_truth import peak_of_first_call, peak_of_step

POINTS, WIDTH = 256, 16


class Stack(nn.Module):
    """Blocks one after the other, the whole stack several times."""

    def __init__(self, times: int = 1, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(WIDTH, 4) for _ in range(blocks))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x


def siamese(model: Any, batch: Any) -> Any:
    return (model(batch["a"]) - model(batch["b"])).square().mean()


def first_part_only(model: Any, batch: Any) -> Any:
    """The first blocks run once more."""
    x = batch["b"]
    for block in model.blocks[:3]:
        x = block(x)
    return (model(batch["a"]) - x).square().mean()


def shared(model: Any, batch: Any) -> Any:
    return model(batch["a"]).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "siamese": (Stack, siamese),
    "partly": (Stack, first_part_only),
    "shared weights": (lambda: Stack(times=4, blocks=3), shared),
    "one block": (lambda: Stack(times=8, blocks=1), shared),
}


def make(name: str, **options: Any) -> tuple[anybatch.TrainStep, dict[str, Tensor]]:
    torch.manual_seed(0)
    build, loss_fn = CASES[name]
    model = build()
    batch = {"a": torch.randn(1, POINTS, WIDTH), "b": torch.randn(1, POINTS, WIDTH)}  # one sample: nothing to split
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options), batch


@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("name", ["siamese", "partly", "shared weights"])
def test_they_are_recomputed_within_the_budget(name: str, share: float) -> None:
    whole, batch = make(name)
    budget = int(share * peak_of_step(whole, batch))
    step, _ = make(name, memory=budget)
    assert peak_of_first_call(step, batch) <= budget
    plan = step(batch).plan
    assert plan is not None
    assert plan.chosen.recompute
    again, _ = make(name, plan=plan)
    assert peak_of_step(again, batch) == pytest.approx(plan.peak_bytes, rel=0.005)


@pytest.mark.parametrize("name", CASES)
def test_the_update_is_that_of_the_whole(name: str) -> None:
    whole, batch = make(name)
    needed = peak_of_step(whole, batch)
    try:
        step, _ = make(name, memory=int(0.8 * needed))
        step(batch)
    except anybatch.DoesNotFit as error:
        step, _ = make(name, memory=error.needed or 0)
        step(batch)
    step(batch)
    for one, other in zip(step.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_not_all_of_them_where_some_are_enough() -> None:
    whole, batch = make("siamese")
    step, _ = make("siamese", memory=int(0.9 * peak_of_step(whole, batch)))
    plan = step(batch).plan
    assert plan is not None
    assert 0 < len(plan.chosen.recompute) < 6
