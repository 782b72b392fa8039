"""The models and the data of the overhead benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Batch, LanguageModel, LossFunction, classification_loss, language_loss
from torch import nn


@dataclass(frozen=True)
class Size:
    """One model with its data: ``windows`` logical batches of ``micro_batches * micro`` samples.

    Without a target it only shows what is left of a step when there is next to nothing to compute.
    """

    name: str
    build: Callable[[], nn.Module]
    rows: Callable[[int], Batch]
    loss_fn: LossFunction
    micro: int
    micro_batches: int
    windows: int = 4
    has_target: bool = True

    @property
    def logical(self) -> int:
        return self.micro * self.micro_batches


def _mlp(inputs: int, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def _tiny_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) if at % 2 == 0 else nn.Tanh() for at in range(400)])


def _transformer() -> nn.Module:
    return LanguageModel(vocabulary=256, width=64, heads=4, layers=4, length=64)


def _vectors(width: int, classes: int) -> Callable[[int], Batch]:
    return lambda count: {"x": torch.randn(count, width), "y": torch.randint(classes, (count,))}


def _texts(count: int) -> Batch:
    tokens = torch.randint(256, (count, 64))
    return {"tokens": tokens, "labels": tokens.clone()}


SIZES = (
    Size("MLP", _mlp(784, 512), _vectors(784, 10), classification_loss, micro=64, micro_batches=8),
    Size("200 layers", _tiny_layers, _vectors(16, 16), classification_loss, micro=8, micro_batches=4),
    Size("transformer", _transformer, _texts, language_loss, micro=4, micro_batches=4),
    Size("tiny MLP", _mlp(64, 128), _vectors(64, 10), classification_loss, micro=16, micro_batches=8, has_target=False),
)
