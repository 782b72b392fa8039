"""What is drawn once for the batch, and anew in each micro-batch, is said."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

ROWS = 22


class Layers(nn.Module):
    """Residual layers, each of which is left out for the whole batch where ``leaves_out`` says so."""

    def __init__(self, leaves_out: Callable[[], bool], dropout: float) -> None:
        super().__init__()
        self.leaves_out, self.dropout = leaves_out, nn.Dropout(dropout)
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.leaves_out():
                x = x + self.dropout(torch.tanh(layer(x)))
        scores: torch.Tensor = self.head(x)
        return scores


def cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def masked(model: Any, batch: Any) -> torch.Tensor:
    first = int(torch.randint(0, 4, (1,)))
    return F.cross_entropy(model(batch["x"] * (torch.arange(6) != first)), batch["y"])


def noisy_weights(model: Any, batch: Any) -> torch.Tensor:
    weight = model.head.weight + 0.3 * torch.randn_like(model.head.weight)
    return F.cross_entropy(F.linear(batch["x"], weight, model.head.bias), batch["y"])


def noisy_rows(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"] + 0.3 * torch.randn_like(batch["x"])), batch["y"])


def scaled(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"] * np.random.uniform(0.9, 1.1)), batch["y"])


def never() -> bool:
    return False


def by_python() -> bool:
    return random.random() < 0.5


def by_torch() -> bool:
    return bool(torch.rand([]) < 0.5)


ONCE, ELSEWHERE = "numbers that belong to no sample", "NumPy, Python or a generator of your own"


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("leaves_out", "loss_fn", "said"),
    [
        (by_torch, cross_entropy, ONCE),
        (never, masked, ONCE),
        (never, noisy_weights, ONCE),
        (by_python, cross_entropy, ELSEWHERE),
        (never, scaled, ELSEWHERE),
        (never, noisy_rows, ""),
        (never, cross_entropy, ""),
    ],
)
def test_what_is_drawn_once_for_the_batch_is_said(
    leaves_out: Callable[[], bool], loss_fn: Callable[[Any, Any], torch.Tensor], said: str, dropout: float
) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Layers(leaves_out, dropout).double()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=5)
    proof = step({"x": torch.randn(ROWS, 6).double(), "y": torch.randint(0, 3, (ROWS,))}).proof
    assert proof is not None
    assert (ONCE in proof.note, ELSEWHERE in proof.note) == (said == ONCE, said == ELSEWHERE), str(proof)
