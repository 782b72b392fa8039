"""What a refused step says where it knows what helps, in place of a cause that is not there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, 8, dtype=torch.float64)
    return {"x": x, "y": torch.randint(4, (rows,)), "z": torch.randn(rows).double(), "valid": torch.rand(rows) > 0.6}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def two_losses(model: Any, batch: Any) -> Any:
    out, valid = model(batch["x"]), batch["valid"]
    return {"a": F.cross_entropy(out, batch["y"]), "b": F.mse_loss(out[:, 0][valid], batch["z"][valid])}


def a_coupled_one(model: Any, batch: Any) -> Any:
    out = model(batch["x"])
    return {"a": out.square().mean(), "b": F.cross_entropy(out @ out.T, torch.arange(len(out)))}


def standardised(model: Any, batch: Any) -> Any:
    target = (batch["z"] - batch["z"].mean()) / batch["z"].std()
    return F.mse_loss(model(batch["x"])[:, 0], target)


def advantages(model: Any, batch: Any) -> Any:
    advantage = (batch["z"] - batch["z"].mean()) / (batch["z"].std() + 1e-8)
    return -(advantage * F.log_softmax(model(batch["x"]), -1)[:, 0]).mean()


@pytest.mark.parametrize("loss_fn", [two_losses, a_coupled_one])
@pytest.mark.parametrize("rows", [6, 30])
def test_one_count_for_several_losses_is_told_to_be_a_mapping(loss_fn: Any, rows: int) -> None:
    count: Any = lambda batch: batch["valid"].sum()  # noqa: E731
    with pytest.raises(anybatch.NotSplittable, match=r"count=\{'a': ") as told:
        anybatch.backward(net(), loss_fn, batch_of(rows), micro_batch_size=rows // 2 + 1, count=count)
    assert "no weighting of its parts" not in str(told.value)


@pytest.mark.parametrize("loss_fn", [standardised, advantages])
def test_numbers_that_are_normalised_by_the_batch_are_told_to_be_made_before_it(loss_fn: Any) -> None:
    with pytest.raises(anybatch.NotSplittable, match=r"batch = prepare\(batch\); step\(batch\)"):
        anybatch.backward(net(), loss_fn, batch_of(23), micro_batch_size=5)


def test_what_they_say_helps() -> None:
    batch, counts = batch_of(23), {"a": anybatch.count_samples, "b": lambda batch: batch["valid"].sum()}
    assert anybatch.check(net(), two_losses, batch, count=counts).exact
    prepared = {**batch, "z": (batch["z"] - batch["z"].mean()) / batch["z"].std()}

    def given(model: Any, batch: Any) -> Any:
        return F.mse_loss(model(batch["x"])[:, 0], batch["z"])

    assert anybatch.check(net(), given, prepared).exact
