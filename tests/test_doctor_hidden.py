"""Modes of the user's see nothing of what a doctor does: those of functions, of operations, and of devices."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch


class Functions(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def trained(mode: Any, watched: bool, steps: int) -> tuple[Counter[str], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler, schedule = torch.amp.GradScaler("cpu"), torch.optim.lr_scheduler.StepLR(optimizer, 3)
    losses = []
    with anybatch.Doctor(model, optimizer) if watched else none(), mode:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(float(loss.detach()))
    return mode.seen, losses


@contextmanager
def none() -> Iterator[None]:
    yield


@pytest.mark.parametrize("kind", [Functions, Operations])
@pytest.mark.parametrize("steps", [3, 12, 60])
def test_a_mode_sees_what_it_sees_without(kind: Any, steps: int) -> None:
    plain, losses = trained(kind(), False, steps)
    seen, watched = trained(kind(), True, steps)
    assert seen == plain
    assert watched == losses


def test_a_default_device_is_for_the_user_only() -> None:
    """Whatever a doctor makes on a device that has no numbers would be of no use to it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4)
    doctor = anybatch.Doctor(model, optimizer)
    with doctor, torch.device("meta"):
        for _ in range(12):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert torch.empty(1).is_meta
    assert not doctor.failure
    assert doctor.run.steps == 12
