"""Models, losses and steps for the tests of several devices in one process."""

from typing import Any

import torch
import torch.nn.functional as F

import anybatch
from anybatch.parallel.devices import Devices, ModelCopy

TWO = ["cpu", "cpu"]
THREE = ["cpu", "cpu", "cpu"]


def small(*, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(6, 3))
    return made.to(dtype)


def batch_of(rows: int, *, dtype: torch.dtype = torch.float64, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch for it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 4, generator=generator, dtype=dtype),
        "y": torch.randint(0, 3, (rows,), generator=generator),
    }


def cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    """The mean over samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def step_of(model: torch.nn.Module, loss_fn: Any = cross_entropy, **options: Any) -> anybatch.TrainStep:
    """A step with plain SGD."""
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def devices_of(step: anybatch.TrainStep) -> Devices:
    """The devices that a step shares its micro-batches among."""
    found = step._placements
    assert found is not None
    return found


def copy_of(step: anybatch.TrainStep) -> ModelCopy:
    """The copy of the model on the second device."""
    found = devices_of(step).placements[1].copy
    assert found is not None
    return found


def weights_of(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """The weights, detached."""
    return [parameter.detach() for parameter in model.parameters()]
