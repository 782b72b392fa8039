"""What a run that spills leaves behind: no hooks and no file, and nothing is written where there is no room."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from anybatch.memory.meter import Allocation, Recording
from anybatch.memory.spilling import Spilling


def step(weight: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (weight * 2).square().sum()
    loss.backward()
    return loss


def test_where_there_is_no_room_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    weight, recording = torch.ones(100, requires_grad=True), Recording()
    with pytest.raises(OSError, match="no room"), recording, Spilling(recording, []):
        step(weight)
    step(weight)
    assert weight.grad is not None


def test_an_interrupt_at_its_start_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(hooks: object) -> None:
        raise KeyboardInterrupt

    weight, recording = torch.ones(100, requires_grad=True), Recording()
    spilling = Spilling(recording, [(weight, Allocation(0, 400, "gradients"))])
    monkeypatch.setattr("torch.autograd.graph.saved_tensors_hooks.__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spilling.__enter__()
    monkeypatch.undo()
    step(weight)
    assert weight.grad is not None  # a hook that was left would have taken it
