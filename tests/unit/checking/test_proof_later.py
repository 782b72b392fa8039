"""What each micro-batch counts, and what matters only once it was counted further, is said of the first batch.

How this could alarm without need: a count of calls that only a log reads is told as a schedule.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Loss = Callable[[Any, Any], torch.Tensor]


def made() -> tuple[Loss, dict[str, Any]]:
    """A mean loss, and what a loss may keep beside it."""
    return lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]), {"calls": 0, "seen": [], "best": 9.0}


def late(model: Any, batch: Any, kept: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    return loss if kept["calls"] < 40 else loss * 0.5


def each_16th(model: Any, batch: Any, kept: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    return loss + model[0].weight.square().sum() if kept["calls"] % 16 == 0 else loss


def grown(model: Any, batch: Any, kept: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    return loss if len(kept["seen"]) < 200 else loss * 0.5


def logged(model: Any, batch: Any, kept: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    if kept["calls"] % 100 == 0:
        kept["best"] = min(kept["best"], float(loss))
    return loss


def averaged(model: Any, batch: Any, kept: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    kept["mean"] = sum(kept["seen"]) / len(kept["seen"])
    return loss


def warmed_up(model: Any, batch: Any, kept: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    return loss * float(min(1.0, (kept["calls"] + 50) / 4))


def begun_anew(model: Any, batch: Any, kept: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    kept["position"] = 0
    for _ in range(3):
        kept["position"] += 1
    return loss * float(kept["position"])


def said_of(reads: Callable[[Any, Any, dict[str, Any], torch.Tensor], torch.Tensor]) -> list[str]:
    torch.manual_seed(0)
    mean, kept = made()

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = mean(model, batch)
        kept["calls"] += 1
        kept["seen"].append(float(loss))
        return reads(model, batch, kept, loss)

    model, batch = nn.Sequential(nn.Linear(4, 3)).double(), {"x": torch.randn(20, 4), "y": torch.randn(20, 3)}
    batch = {name: value.double() for name, value in batch.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        proof = anybatch.backward(model, loss_fn, batch, micro_batch_size=8).proof
    assert proof is not None
    assert proof.exact
    assert kept["calls"] == 3
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(("reads", "name"), [(late, "kept['calls']"), (each_16th, "kept['calls']"), (grown, "len(")])
def test_a_count_that_matters_later_is_said(reads: Any, name: str) -> None:
    (said,) = said_of(reads)
    assert name in said
    assert "a schedule based on it runs that many times as fast" in said


@pytest.mark.parametrize("reads", [logged, averaged, begun_anew, warmed_up])
def test_a_count_that_the_gradient_does_not_depend_on_is_not(reads: Any) -> None:
    assert said_of(reads) == []


class Annealed:
    """A count that is an attribute of the class until the first call."""

    calls = 0

    def __init__(self, until: int) -> None:
        self.until = until

    def __call__(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        return F.mse_loss(model(batch["x"]), batch["y"]) * (0.5 if self.calls < self.until else 1.0)


def test_a_count_that_begins_in_the_class_is_a_count() -> None:
    model, batch = nn.Linear(4, 3).double(), {"x": torch.randn(20, 4).double(), "y": torch.randn(20, 3).double()}
    with pytest.warns(UserWarning, match=r"`self\.calls` of Annealed was counted 3 times"):
        anybatch.backward(model, Annealed(400), batch, micro_batch_size=8)
    with pytest.raises(anybatch.NotSplittable, match=r"(.|\n)*self\.calls \+= 1  # here, once"):
        anybatch.backward(model, Annealed(2), batch, micro_batch_size=8)


@pytest.mark.parametrize("size", ["450KiB", "600KiB"])
def test_a_budget_with_room_sees_what_matters_later_and_another_says_that_it_does_not(size: str) -> None:
    torch.manual_seed(0)
    kept = {"calls": 0}
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    batch, optimizer = {"x": torch.randn(4096, 16), "y": torch.randn(4096, 4)}, torch.optim.SGD(model.parameters())

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        kept["calls"] += 1
        return F.mse_loss(model(batch["x"]), batch["y"]) * (1.0 if kept["calls"] < 1000 else 0.5)

    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        proof = step(batch).proof
    assert proof is not None
    is_told = any("kept['calls']" in str(one.message) for one in caught)
    assert (
        "what starts later" in proof.note
    ) != is_told  # which size of micro-batches a plan takes is a matter of time
