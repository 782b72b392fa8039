"""What is drawn once for the batch is the same in all micro-batches, as in the whole batch."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Losses = Callable[[Any, Any], torch.Tensor]
ROWS, STEPS = 22, 3


class Layers(nn.Module):
    """Residual layers, each of which is left out for the whole batch where ``leaves_out`` says so."""

    def __init__(self, leaves_out: Callable[[], bool], dropout: float = 0.0) -> None:
        super().__init__()
        self.leaves_out, self.dropout = leaves_out, nn.Dropout(dropout)
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.leaves_out():
                x = x + self.dropout(torch.tanh(layer(x)))
        return self.head(x)


def cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def scaled(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"] * np.random.uniform(0.5, 1.5)), batch["y"])


def masked(model: Any, batch: Any) -> torch.Tensor:
    first = int(torch.randint(0, 4, (1,)))
    return F.cross_entropy(model(batch["x"] * (torch.arange(6) != first)), batch["y"])


def noisy_weights(model: Any, batch: Any) -> torch.Tensor:
    weight = model.head.weight + 0.3 * torch.randn_like(model.head.weight)
    return F.cross_entropy(F.linear(batch["x"], weight, model.head.bias), batch["y"])


def batches() -> list[dict[str, torch.Tensor]]:
    rows = [(torch.randn(ROWS, 6).double(), torch.randint(0, 3, (ROWS,))) for _ in range(STEPS)]
    return [{"x": x, "y": y} for x, y in rows]


def seeded(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def never() -> bool:
    return False


def by_python() -> bool:
    return random.random() < 0.5


def by_torch() -> bool:
    return bool(torch.rand([]) < 0.5)


@pytest.mark.parametrize(
    ("leaves_out", "loss_fn", "options"),
    [
        (by_python, cross_entropy, {"micro_batch_size": 5}),
        (by_torch, cross_entropy, {"micro_batch_size": 5}),
        (by_python, cross_entropy, {"memory": "10KiB"}),
        (by_torch, cross_entropy, {"memory": "10KiB"}),
        (never, scaled, {"micro_batch_size": 5}),
        (never, masked, {"micro_batch_size": 5}),
        (never, noisy_weights, {"micro_batch_size": 5}),
    ],
    ids=["Python's layers", "torch's layers", "Python's, planned", "torch's, planned", "scale", "mask", "weights"],
)
def test_what_is_drawn_once_for_the_batch_is_that_of_the_whole_batch(
    leaves_out: Callable[[], bool], loss_fn: Losses, options: dict[str, Any]
) -> None:
    seeded(0)
    whole, given = Layers(leaves_out).double(), batches()
    model = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    seeded(1)
    for batch in given:
        optimizer.zero_grad()
        loss_fn(whole, batch).backward()
        optimizer.step()
    after = (random.random(), np.random.random(), torch.rand(()).item())
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), **options)
    seeded(1)
    for batch in given:
        out = step(batch)
    assert out.micro_batches > 1
    assert out.proof is not None
    assert out.proof.exact
    assert "drawn once for the batch is the same in all micro-batches" in out.proof.note
    assert (random.random(), np.random.random(), torch.rand(()).item()) == after
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("leaves_out", [by_python, by_torch], ids=["Python", "torch"])
def test_samples_keep_numbers_of_their_own(leaves_out: Callable[[], bool]) -> None:
    """Dropout beside it draws other masks in each micro-batch, also where layers are left out for all of them."""
    seeded(0)
    model, masks, (batch, *_) = Layers(leaves_out, dropout=0.5).double(), list[torch.Tensor](), batches()
    model.dropout.register_forward_hook(lambda _, __, output: masks.append(output.detach() == 0))
    seeded(2)
    out = anybatch.backward(model, cross_entropy, batch, micro_batch_size=11)
    assert out.proof is not None
    is_alike = "the same in all micro-batches" in out.proof.note
    assert is_alike == (leaves_out is by_python)
    assert is_alike or "torch draws something once for the batch" in out.proof.note
    first, second = masks[-len(masks[-2:]) :]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("loss", ["numpy", "python", "torch"])
def test_what_is_drawn_for_each_sample_is_drawn_anew(loss: str) -> None:
    draws: dict[str, Callable[[int], Any]] = {
        "numpy": lambda rows: np.random.uniform(0.5, 1.5, (rows, 1)),
        "python": lambda rows: [[random.uniform(0.5, 1.5)] for _ in range(rows)],
        "torch": lambda rows: torch.rand(rows, 1),
    }

    def each(model: Any, batch: Any) -> torch.Tensor:
        drawn = torch.as_tensor(draws[loss](len(batch["x"])))
        return F.cross_entropy(model(batch["x"] * drawn), batch["y"])

    seeded(0)
    model, (batch, *_) = Layers(never).double(), batches()
    out = anybatch.backward(model, each, batch, micro_batch_size=5)
    assert out.proof is None or "the same in all micro-batches" not in out.proof.note


def test_phases_in_which_samples_draw_are_proved_again() -> None:
    seeded(0)
    model, (batch, *_) = Layers(by_torch, dropout=0.5).double(), batches()
    model.dropout.eval()
    step = anybatch.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=5)
    out = step(batch)
    assert out.proof is not None
    assert out.proof.alike == (True, False)
    model.dropout.train()
    out = step(batch)
    assert out.proof is not None
    assert out.proof.alike == (False, False)
