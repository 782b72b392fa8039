"""Under a budget, a mean over weights that are uneven in a later batch only is seen in the first one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]
SAMPLES = 48
pytestmark = pytest.mark.usefixtures("constant_times")


def batch_of(weights: torch.Tensor | None = None) -> Batch:
    torch.manual_seed(0)
    batch = {"x": torch.randn(SAMPLES, 16, 8), "y": torch.randint(5, (SAMPLES,))}
    return batch | {"w": torch.ones(SAMPLES) if weights is None else weights}


def weighted(model: Any, batch: Batch) -> Any:
    losses = F.cross_entropy(model(batch["x"])[:, 0], batch["y"], reduction="none")
    return (losses * batch["w"]).sum() / batch["w"].sum()


def of_each(model: Any, batch: Batch) -> Any:
    return (F.cross_entropy(model(batch["x"])[:, 0], batch["y"], reduction="none") * batch["w"]).mean()


def of_weights(batch: Batch) -> torch.Tensor:
    return batch["w"].sum()


def step_of(loss_fn: Callable[[Any, Any], Any], **options: Any) -> tuple[nn.Module, anybatch.TrainStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    return model, anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=1.0), **options)


@pytest.mark.parametrize("memory", ["500KiB", "300KiB", "200KiB"])  # micro-batches of 16, 10 and 6 samples
def test_a_mean_over_weights_that_become_uneven_is_not_silent(memory: str) -> None:
    _, step = step_of(weighted, memory=memory)
    with pytest.warns(anybatch.AnyBatchWarning, match="is 1 everywhere in this batch"):
        assert step(batch_of()).micro_batches > 2
    with pytest.raises(anybatch.NotSplittable, match="sum"):
        step(batch_of(torch.rand(SAMPLES) * 4 + 0.1))


@pytest.mark.parametrize("way", ["no room", "scaler"])
def test_where_nothing_can_be_tried_the_first_uneven_batch_is_proved(way: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    options: Any = {"memory": "130KiB"} if way == "no room" else {"micro_batch_size": 8, "scaler": scaler}
    _, step = step_of(weighted, **options)
    step(batch_of())
    with pytest.raises(anybatch.NotSplittable, match="sum"):
        step(batch_of(torch.rand(SAMPLES) * 4 + 0.1))


@pytest.mark.filterwarnings("error::anybatch.AnyBatchWarning")
@pytest.mark.parametrize(("loss_fn", "options"), [(of_each, {}), (weighted, {"count": of_weights})])
def test_uneven_weights_that_are_counted_give_the_gradient_of_the_whole(loss_fn: Any, options: Any) -> None:
    model, step = step_of(loss_fn, memory="300KiB", **options)
    step(batch_of())
    model.zero_grad()
    batch, before = batch_of(torch.rand(SAMPLES) * 4 + 0.1), [one.detach().clone() for one in model.parameters()]
    loss_fn(model, batch).backward()
    expected = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    assert step(batch).micro_batches > 2
    for one, old, gradient in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(old - one.detach(), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["classes", "tokens"])
def test_a_mean_over_what_is_uneven_in_the_first_batch_is_refused(kind: str) -> None:
    def loss_fn(model: Any, batch: Batch) -> Any:
        outputs, labels = model(batch["x"])[:, 0], batch["y"]
        weight = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0]) if kind == "classes" else None
        return F.cross_entropy(outputs, labels, weight=weight, ignore_index=0 if kind == "tokens" else -100)

    _, step = step_of(loss_fn, memory="300KiB")
    with pytest.raises(anybatch.NotSplittable, match=r"weighted mean.*|labels"):
        step(batch_of())
