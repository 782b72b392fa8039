"""A loss that takes all samples alike in the first batch, and not where the model or the masks give other numbers.

How this could alarm without need: a loss of each sample is told, or one that never leaves its regime.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch_of() -> Batch:
    torch.manual_seed(1)
    return {
        "x": torch.randn(24, 6), "y": torch.randint(4, (24,)), "mask": torch.ones(24), "kept": torch.ones(24).bool()
    }  # fmt: skip


def each(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def mean(model: Any, batch: Batch) -> Any:
    return each(model, batch).mean()


def active(model: Any, batch: Batch) -> Any:
    out = model(batch["x"])
    gaps = (1 - out[:, 0] + out[:, 1]).relu()
    return gaps.sum() / (gaps > 0).sum().clamp(min=1)


def certain(model: Any, batch: Batch) -> Any:
    out = model(batch["x"])
    most, label = out.softmax(-1).detach().max(-1)
    taken = (most > 0.95).float()
    extra = F.cross_entropy(out, label, reduction="none") * taken
    return F.cross_entropy(out, batch["y"]) + extra.sum() / taken.sum().clamp(min=1)


def hard(model: Any, batch: Batch) -> Any:
    losses = each(model, batch)
    return losses[losses > 0.05].mean()


def masked(model: Any, batch: Batch) -> Any:
    return (each(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def picked(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"])[batch["kept"]], batch["y"][batch["kept"]])


def weighted(model: Any, batch: Batch) -> Any:
    return (each(model, batch) * batch["mask"] * batch["kept"]).mean()


def hinge(model: Any, batch: Batch) -> Any:
    return F.multi_margin_loss(model(batch["x"]), batch["y"])


def finite(model: Any, batch: Batch) -> Any:
    losses = each(model, batch)
    return losses[losses.isfinite()].mean()


def probable(model: Any, batch: Batch) -> Any:
    return -(model(batch["x"]).softmax(-1) + 1e-6).log().gather(1, batch["y"][:, None]).mean()


def squared(model: Any, batch: Batch) -> Any:
    return F.mse_loss(model(batch["x"]).exp(), batch["x"][:, :4])


def said_of(loss_fn: Loss, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        proof = anybatch.backward(net(), loss_fn, batch_of(), micro_batch_size=6, **options).proof
    assert proof is not None
    assert proof.exact
    assert bool(caught) == ("as long as" in proof.note)
    return "".join(str(one.message) for one in caught)


@pytest.mark.parametrize("loss_fn", [active, certain, hard])
def test_samples_that_are_taken_by_what_the_model_gives_are_told(loss_fn: Loss) -> None:
    assert "once the model's outputs change" in said_of(loss_fn)


@pytest.mark.parametrize(("loss_fn", "name"), [(masked, "mask"), (picked, "kept")])
def test_a_mean_over_a_mask_that_is_full_is_told_with_its_count(loss_fn: Loss, name: str) -> None:
    said = said_of(loss_fn)
    assert f"count=lambda batch: batch['{name}'].sum()" in said
    assert said_of(loss_fn, count=lambda batch: batch[name].sum()) == ""
    batch, model = batch_of(), net()
    batch[name][::3] = 0
    parts = anybatch.backward(model, loss_fn, batch, micro_batch_size=6, count=lambda batch: batch[name].sum())
    assert parts.loss == pytest.approx(loss_fn(model, batch).item())


def test_the_mean_that_helps_is_not_told() -> None:
    def counted(model: Any, batch: Batch) -> Any:
        losses = each(model, batch)
        return anybatch.Mean(losses[losses > 0.05].sum(), (losses > 0.05).sum())

    assert said_of(counted) == ""


@pytest.mark.parametrize("loss_fn", [mean, weighted, hinge, finite, probable, squared])
def test_a_loss_of_each_sample_is_not_told(loss_fn: Loss) -> None:
    assert said_of(loss_fn) == ""


@pytest.mark.parametrize("size", ["450KiB", "900KiB"])
@pytest.mark.parametrize("loss_fn", [hard, mean])
def test_within_a_budget_it_is_told_or_there_is_no_room(loss_fn: Loss, size: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    batch = {"x": torch.randn(4096, 16), "y": torch.randint(4, (4096,))}
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters()), memory=size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        proof = step(batch).proof
    assert proof is not None
    assert proof.exact
    is_told = any("once the model's outputs change" in str(one.message) for one in caught)
    assert is_told == (loss_fn is hard and "with different outputs needs more" not in proof.note)
