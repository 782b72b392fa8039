"""What a plan says at a lower precision is of that precision."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from anybatch import Coupled
from anybatch.planning.entrance import subject_of
from anybatch.planning.planner import Planner
from anybatch.planning.recipe import Recipe


def test_a_row_and_the_whole_of_a_coupled_loss_are_of_the_precision_that_is_asked_for() -> None:
    def loss(model: Any, outputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    coupled = Coupled(lambda model, batch: model(batch["x"]), loss)
    subject, target = subject_of({"x": torch.randn(64, 16)}, None, model=model, loss_fn=coupled, memory="1MiB")
    planner = Planner(subject, target, allow=("recompute", "bfloat16"))
    planner.plan(1 << 20)
    search: Any = planner._search
    row = search.row(Recipe(autocast="bfloat16"), search.splittings[0], 1 << 20)
    assert row.autocast == "bfloat16"
    assert search.whole_bytes("bfloat16") != search.whole_bytes()


@pytest.mark.usefixtures("constant_times")
def test_the_whole_of_a_plan_is_of_the_precision_that_was_chosen() -> None:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    def whole_of(**options: Any) -> int:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
        model = nn.Sequential(*blocks, nn.Linear(64, 500))
        batch = {"x": torch.randn(512, 64), "y": torch.randint(500, (512,))}
        plan = anybatch.plan(model, loss_fn, batch, memory=6_000_000, **options)
        return plan.whole_bytes

    found = whole_of(allow=("bfloat16",))  # the only one that fits in one micro-batch
    assert found == whole_of(autocast=torch.bfloat16, allow=()) != whole_of(allow=())
