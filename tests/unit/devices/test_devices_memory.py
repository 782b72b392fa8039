"""Several devices in one process: none of them holds more of the activations and the outputs than another."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from anybatch.parallel.devices import ModelCopy
from anybatch.update import overdevices
from device_models import THREE, devices_of, step_of
from live_bytes import LiveBytes

ROWS, WIDTH, CLASSES = 48, 16, 400


def wide() -> torch.nn.Module:
    """Its outputs take more than its layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, CLASSES))


@contextmanager
def meters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LiveBytes]]:
    """Counts, for each device, the bytes that are alive in its thread beside parameters and gradients."""
    found: list[LiveBytes] = []
    work = overdevices._Worker.work

    def metered(worker: Any, begin: Any) -> None:
        live = LiveBytes()
        found.append(live)
        model, copy = worker._run.task.model, worker.placement.copy
        mine = list(model.parameters()) if copy is None else [one for _, one in copy.pairs]
        for parameter in mine:  # parameters and gradients are not activations
            parameter.grad = torch.zeros_like(parameter)
            live._add(parameter)
            live._add(parameter.grad)
        held = live.current
        with live:
            work(worker, begin)
        live.peak -= held

    with monkeypatch.context() as patched:
        patched.setattr(overdevices._Worker, "work", metered)
        yield found


def cross_entropy(model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("size", [None, 4])
def test_the_first_device_holds_as_much_as_the_others(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.randn(ROWS, 8), "y": torch.randint(0, CLASSES, (ROWS,))}
    step = step_of(wide(), cross_entropy, devices=THREE, micro_batch_size=size)
    for _ in range(2):  # one at a time, then side by side
        with meters(monkeypatch) as found:
            step(batch)
        peaks = [live.peak for live in found]
        assert len(peaks) == 3
        assert max(peaks) <= 1.05 * min(peaks)
        outputs = (size or ROWS // 3) * CLASSES * 4
        assert min(peaks) > outputs


def test_nothing_of_a_micro_batch_outlives_the_step() -> None:
    batch = {"x": torch.randn(ROWS, 8), "y": torch.randint(0, CLASSES, (ROWS,))}
    step = step_of(wide(), cross_entropy, devices=THREE, micro_batch_size=4)
    step(batch)
    copies = [placement.copy for placement in devices_of(step).placements if placement.copy is not None]
    there = [*batch.values(), *step.model.parameters(), *(copy for one in copies for _, copy in one.pairs)]
    with LiveBytes(there) as live:
        before = live.current
        step(batch)
    gradients = sum(parameter.nbytes for parameter in step.model.parameters())
    assert live.current - before <= gradients + 1000  # and the values of the losses
    assert all(copy.grad is None for one in copies for _, copy in one.pairs)
    assert all(not one._modules for one in copies)


def test_weights_are_sent_once_a_step_into_tensors_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.randn(ROWS, 8), "y": torch.randint(0, CLASSES, (ROWS,))}
    step = step_of(wide(), cross_entropy, devices=THREE, micro_batch_size=2)
    step(batch)
    before = [
        copy.data_ptr()
        for placement in devices_of(step).placements[1:]
        if placement.copy
        for _, copy in placement.copy.pairs
    ]
    refreshed: list[torch.device] = []
    refresh = ModelCopy.refresh

    def counted(copy: ModelCopy, models: Any) -> None:
        refreshed.append(copy.device)
        refresh(copy, models)

    monkeypatch.setattr(ModelCopy, "refresh", counted)
    step(batch)
    assert len(refreshed) == 2
    after = [
        copy.data_ptr()
        for placement in devices_of(step).placements[1:]
        if placement.copy
        for _, copy in placement.copy.pairs
    ]
    assert before == after
