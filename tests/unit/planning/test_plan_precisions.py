"""What a plan says at a lower precision is of that precision."""

from typing import Any

import torch
from torch import nn

from anybatch import Coupled
from anybatch.planning.entrance import subject_of
from anybatch.planning.planner import Planner
from anybatch.planning.recipe import Recipe


def test_a_coupled_way_and_the_whole_are_of_the_precision_that_is_asked_for() -> None:
    def loss(model: Any, outputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    coupled = Coupled(lambda model, batch: model(batch["x"]), loss)
    subject, target = subject_of({"x": torch.randn(64, 16)}, None, model=model, loss_fn=coupled, memory="1MiB")
    planner = Planner(subject, target, allow=("recompute", "bfloat16"))
    planner.plan(1 << 20)
    search: Any = planner._search
    row = search.row(Recipe(autocast="bfloat16"), search._few()[0], 1 << 20)
    assert row.autocast == "bfloat16"
    assert search.whole_bytes("bfloat16") != search.whole_bytes()
