"""What ``memory=`` means where several devices share the micro-batches: bytes on each of them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import anybatch
from anybatch.batch.batches import Part, Splittable
from anybatch.loss.accumulate import Settings
from anybatch.parallel.devices import Devices, ModelCopy, Placement
from anybatch.planning import devices, entrance
from anybatch.planning.devices import Target
from anybatch.planning.entrance import budget_for
from anybatch.planning.fingerprints import fingerprint_of
from anybatch.planning.subjects import Subject
from device_models import THREE, TWO
from memory_steps import Net, plan_of, points, sgd, square
from reference import RELATIVE_FLOAT64, distance, gradients_of, norm

CPU = Target("cpu", "cpu", 0, is_present=True)
CARDS = [torch.device("cuda:0"), torch.device("cuda:1")]


def shared(places: Sequence[torch.device], *, speeds: Sequence[float] = (1.0, 1.0)) -> Devices:
    placements = [Placement(place, speeds[n], ModelCopy(place) if n else None) for n, place in enumerate(places)]
    return Devices(placements)


def subject_of(model: nn.Module, found: Devices | None) -> Subject:
    settings = Settings(torch.device("cpu"))
    return Subject(model, square, settings, Splittable([points(8)]), [sgd(model)], devices=found)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=2**30, available=2**29)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.usefixtures("machine")
def test_devices_that_share_one_memory_get_a_part_of_it() -> None:
    model = Net()
    for places, count in ((TWO, 2), (THREE, 3)):
        step = anybatch.TrainStep(model, square, sgd(model), memory=0.5, devices=places)
        step(points(8))
        assert plan_of(step).budget == 2**29 // count
        step = anybatch.TrainStep(model, square, sgd(model), memory=2**28, devices=places)
        step(points(8))
        assert plan_of(step).budget == 2**28  # a number of bytes is what each of them may hold
        subject = subject_of(model, shared([torch.device("cpu")] * count, speeds=[1.0] * count))
        assert budget_for("free", subject, CPU) == 2**29 // count
        assert budget_for("free", subject_of(model, None), CPU) == 2**29 + subject.held_bytes


@pytest.mark.parametrize("less", [0, 1])
def test_the_device_with_the_least_memory_decides(less: int, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {str(place): 2**30 if n == less else 2**31 for n, place in enumerate(CARDS)}
    monkeypatch.setattr(entrance, "target_of", lambda _, home: Target(str(home), "cuda", totals[str(home)], True))
    monkeypatch.setattr(devices, "_free_bytes", lambda target: totals[target.name] // 4)
    subject = subject_of(Net(), shared(CARDS))
    home = Target("cuda:0", "cuda", totals["cuda:0"], is_present=True)
    assert budget_for(0.5, subject, home) == 2**29
    assert budget_for("6GiB", subject, home) == 6 * 2**30
    held = subject.held_bytes if less == 0 else 0  # of the second device nothing is taken yet
    assert budget_for("free", subject, home) == 2**28 + held


def test_what_a_copy_holds_already_counts_as_free_for_it() -> None:
    model, places = Net(), shared([torch.device("cpu")] * 2)
    copy = places.placements[1].copy
    assert copy is not None
    assert copy.nbytes == 0
    copy.refresh([model])
    assert copy.nbytes == sum(parameter.nbytes for parameter in model.parameters())


def test_the_most_micro_batches_on_one_device() -> None:
    parts = [Part([n], 1.0) for n in range(7)]
    cpus = [torch.device("cpu")] * 2
    assert shared(cpus).most_on_one(parts) == 4
    assert shared(cpus, speeds=[1.0, 3.0]).most_on_one(parts) == 5
    assert shared(cpus).seconds(parts, lambda cost: 2 * cost) == 8
    assert shared(cpus, speeds=[1.0, 3.0]).seconds(parts, lambda cost: 3 * cost) == 6
    assert subject_of(Net(), None).most_on_one(parts) == 7


def test_a_plan_knows_how_many_devices_it_is_for() -> None:
    model, cpus = Net(), [torch.device("cpu")] * 2
    found = [
        fingerprint_of(subject_of(model, one), CPU).get("devices")
        for one in (None, shared(cpus), shared(cpus, speeds=[2.0, 1.0]))
    ]
    assert found == [None, "2", "2 with speeds 2, 1"]


def test_gradients_that_are_summed_count() -> None:
    """A model whose largest parameter is most of it, under an optimizer that holds nothing."""
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 3000, bias=False))
    sizes = [parameter.nbytes for parameter in model.parameters()]
    subject = subject_of(model, shared(CARDS))
    subject.device_type = "cuda"
    rounded = [-(-size // 512) * 512 for size in sizes]
    assert subject.summed_bytes(list(model.parameters())) == 2 * sum(rounded) + 2 * max(rounded)
    subject.device_type = "cpu"
    assert subject.summed_bytes(list(model.parameters())) == 2 * sum(sizes) + max(sizes)
    assert subject_of(model, None).summed_bytes(list(model.parameters())) == 0


@pytest.mark.usefixtures("constant_times")
def test_batchnorm_is_refused_as_in_any_split() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch["x"][:, 0]).square().mean()

    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory="1GiB", devices=TWO)
    with pytest.raises(anybatch.NotSplittable, match="BatchNorm1d"):
        step(points(8))
    assert step.updates == 0
    for policy in ("ghost", "frozen"):
        step = anybatch.TrainStep(model, loss_fn, sgd(model), memory="1GiB", devices=TWO, batch_norm=policy)
        assert step(points(8)).micro_batches == 2


def test_losses_that_are_counted_in_the_forward() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        kept = model(batch["x"])[batch["x"][:, 0, 0] > -1]
        return anybatch.Mean(kept.square().sum(), kept.numel())

    model, batch = Net().double(), {"x": torch.randn(23, 6, 32, dtype=torch.float64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory="1MiB", devices=TWO, count="forward")
    whole = loss_fn(model, batch)
    expected = torch.autograd.grad(whole.total / whole.count, list(model.parameters()))
    step(batch)
    assert distance(gradients_of(model), list(expected)) <= RELATIVE_FLOAT64 * norm(expected)
