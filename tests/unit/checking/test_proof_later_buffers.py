"""What a model keeps in buffers, and matters once they have moved on, is said of the first batch that is split.

How this could alarm without need: a queue that is only filled, or a count that nothing reads, is told as one that
matters.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch


class Kept(nn.Module):
    """A layer with a queue of what it gave, a mean of its inputs, a count and a flag."""

    queue: torch.Tensor
    mean: torch.Tensor
    seen: torch.Tensor
    on: torch.Tensor

    def __init__(self, reads: Callable[["Kept", torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.reads = nn.Linear(4, 3), reads
        self.register_buffer("queue", torch.zeros(60, 3))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("on", torch.tensor(False))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.reads(self, x, self.layer(x))
        with torch.no_grad():
            self.queue[(self.seen + torch.arange(len(x))) % 60] = out
            self.mean.lerp_(x.mean(0), 0.1)
            self.seen += len(x)
        return out


def of_a_full_queue(model: Kept, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out - model.queue.mean(0) if model.seen >= 60 else out


def of_a_mean_that_has_begun(model: Kept, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return model.layer(x - model.mean) if model.seen > 1000 else out


def turned(model: Kept, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out - out.mean(0) if model.on else out


def nothing(model: Kept, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out


def of_each_sample(model: Kept, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.tanh() if model.on or model.seen > 10**9 else out


def mse(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def said_of(model: nn.Module) -> tuple[list[str], anybatch.Certificate]:
    batch = {"x": torch.randn(20, 4).double(), "y": torch.randn(20, 3).double()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        certificate = anybatch.check(model, mse, batch, micro_batch_size=8)
        proof = anybatch.backward(model, mse, batch, micro_batch_size=8).proof
    assert proof is not None
    assert proof.exact
    return [str(one.message) for one in caught], certificate


@pytest.mark.parametrize(
    ("reads", "name"), [(of_a_full_queue, "queue"), (of_a_mean_that_has_begun, "mean"), (turned, "on")]
)
def test_a_buffer_that_matters_later_is_said(reads: Any, name: str) -> None:
    torch.manual_seed(0)
    (said,), certificate = said_of(Kept(reads))
    assert name in said
    assert any(note.code == "buffer" and name in note.message for note in certificate.notes)


@pytest.mark.parametrize("reads", [nothing, of_each_sample])
def test_a_buffer_that_does_not_is_not(reads: Any) -> None:
    torch.manual_seed(0)
    assert said_of(Kept(reads))[0] == []


class Observed(nn.Module):
    """A layer that keeps the largest inputs in a buffer that has no entries before the first forward."""

    largest: torch.Tensor

    def __init__(self, *, clamps: bool) -> None:
        super().__init__()
        self.layer, self.clamps = nn.Linear(4, 3).double(), clamps
        self.register_buffer("largest", torch.empty(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.detach().abs().amax(0)
        if self.largest.numel():
            largest = torch.maximum(largest, self.largest)
        self.largest.resize_(largest.shape).copy_(largest)
        out: torch.Tensor = self.layer(x / self.largest if self.clamps else x)
        return out


def test_a_buffer_that_the_first_forward_makes_room_in_is_put_back() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(20, 4).double(), "y": torch.randn(20, 3).double()}
    model = Observed(clamps=False)
    assert anybatch.backward(model, mse, batch, micro_batch_size=8).proof.exact  # type: ignore[union-attr]
    torch.testing.assert_close(model.largest, batch["x"].abs().amax(0))
    model = Observed(clamps=True)
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(model, mse, batch, micro_batch_size=8)
    assert model.largest.shape == (0,)


class Dropped(nn.Module):
    """A layer whose first forward finds a buffer that no later one does."""

    def __init__(self, *, deletes: bool) -> None:
        super().__init__()
        self.layer, self.deletes = nn.Linear(4, 3).double(), deletes
        self.register_buffer("first", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 3.0 if getattr(self, "first", None) is not None else 1.0
        if not self.deletes:
            self.first = None
        elif hasattr(self, "first"):
            del self.first
        out: torch.Tensor = self.layer(x) * factor
        return out


@pytest.mark.parametrize("deletes", [False, True])
def test_a_buffer_that_the_forward_drops_is_no_proof(deletes: bool) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(20, 4).double(), "y": torch.randn(20, 3).double()}
    certificate = anybatch.check(Dropped(deletes=deletes), mse, batch, micro_batch_size=8)
    assert [(one.code, one.where) for one in certificate.reasons] == [("buffer", "first")]
    with pytest.raises(anybatch.NotSplittable, match="first"):
        anybatch.backward(Dropped(deletes=deletes), mse, batch, micro_batch_size=8)
