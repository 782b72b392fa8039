"""The network whose gradient noise is measured, with losses of every kind."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch

ROWS, SIZE = 22, 8
Loss = Callable[[Any, Any], Any]


class Network(nn.Module):
    """A trunk, a layer that is used twice, and two heads, one of them frozen."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=False)
        self.trunk = nn.Linear(4, 6)
        self.twice = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.to(dtype)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(self.twice(self.twice(self.trunk(self.words(tokens))).tanh()).tanh())
        return found

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.heads[0](self.features(tokens))
        return logits


def batch_of(rows: int = ROWS) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 3, (rows, 5))
    labels[torch.rand(rows, 5) < 0.4] = -100
    labels[:, 0] = 1
    return {"x": torch.randint(0, 9, (rows, 5)), "y": torch.randint(0, 3, (rows,)), "labels": labels}


def plain(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).mean(1), batch["y"])


def of_tokens(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def as_mean(model: Any, batch: Any) -> anybatch.Mean:
    logits, labels = model(batch["x"]).flatten(0, 1), batch["labels"].flatten()
    return anybatch.Mean(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum())


def several(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    features = model.features(batch["x"]).mean(1)
    return {f"head {n}": F.cross_entropy(head(features), batch["y"]) for n, head in enumerate(model.heads)}


def yielded_behind_a_cut(model: Any, batch: Any) -> Iterator[Any]:
    with anybatch.cut(model.features(batch["x"]).mean(1)) as features:
        for head in model.heads:
            yield F.cross_entropy(head(features), batch["y"])


def yielded(model: Any, batch: Any) -> Iterator[Any]:
    for head in model.heads:
        yield F.cross_entropy(head(model.features(batch["x"]).mean(1)), batch["y"])


def with_gradient_inside(model: Any, batch: Any) -> torch.Tensor:
    loss = plain(model, batch)
    (penalty,) = torch.autograd.grad(loss, model.trunk.weight, create_graph=True)
    total: torch.Tensor = loss + penalty.square().sum()
    return total


def checkpointed(model: Any, batch: Any) -> torch.Tensor:
    features = checkpoint(model.features, batch["x"], use_reentrant=False)
    return F.cross_entropy(model.heads[0](features.mean(1)), batch["y"])


def tokens_of(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def rows_of(batch: Any) -> int:
    return len(batch["x"])
