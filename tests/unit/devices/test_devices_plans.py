"""``devices=`` with ``memory=`` or ``plan=``: the same gradient, and no device holds more than was planned."""

import copy
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.records.plans import Plan, PlanRow
from device_bytes import device_peaks
from device_models import THREE, TWO
from diagonals import diagonals
from memory_steps import Net, plan_of, points, sgd, square
from reference import (
    RELATIVE_FLOAT64,
    as_float64,
    assert_bitwise,
    assert_float32,
    distance,
    gradients_of,
    norm,
    whole_gradients,
)

WORDS, LENGTH = 400, 12
SLACK = 1024  # bytes: numbers of losses, which the update finds still there


class Language(nn.Module):
    """Blocks in a sequence, a wide output layer, and a buffer that no forward writes to."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)) for _ in range(3))
        )
        self.head = nn.Linear(16, WORDS)
        self.register_buffer("table", torch.zeros(500))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.embed(x)))
        return found


def language(*, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Language:
    torch.manual_seed(0)
    return Language(dropout).to(dtype)


def texts(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {name: torch.randint(WORDS, (rows, LENGTH), generator=generator) for name in ("x", "y")}


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


OPTIMIZATIONS = [
    PlanRow(5, 7),
    PlanRow(5, 7, recompute=("blocks.0", "blocks.1:3")),
    PlanRow(5, 7, head="head", loss_chunks=4),
    PlanRow(5, 7, offload=("blocks.1",)),
    PlanRow(17, 2, recompute=("blocks.0:3",), head="head", loss_chunks=8),
]


@pytest.mark.parametrize("devices", [TWO, THREE, {"cpu": 2, "cpu:0": 1}])
@pytest.mark.parametrize("row", OPTIMIZATIONS, ids=str)
def test_optimizations_on_the_copies_leave_the_gradient_of_the_whole_batch(row: PlanRow, devices: Any) -> None:
    batch = texts(33)
    model = language(dtype=torch.float64)
    expected, values = whole_gradients(model, cross_entropy, batch)
    step = anybatch.TrainStep(model, cross_entropy, still(model), plan=Plan(row, samples=33), devices=devices)
    for _ in range(2):  # one micro-batch at a time, then side by side
        out = step(batch)
        assert distance(gradients_of(model), expected) <= RELATIVE_FLOAT64 * norm(expected)
        assert out.loss == pytest.approx(values["loss"])
        assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("row", OPTIMIZATIONS[1:4], ids=str)
def test_recomputing_and_offloading_change_no_bit(row: PlanRow, dropout: float) -> None:
    found = []
    for given in (PlanRow(5, 7), row):
        model = language(dropout=dropout)
        torch.manual_seed(5)
        step = anybatch.TrainStep(model, cross_entropy, sgd(model), plan=Plan(given, samples=33), devices=TWO)
        for _ in range(3):
            step(texts(33))
        found.append([*gradients_of(model), *(p.detach() for p in model.parameters())])
    if row.loss_chunks == 1:
        assert_bitwise(*found)
    else:
        assert distance(*found) <= 1e-5 * norm(found[0])


@functools.cache
def smallest_of(make: Any) -> int:
    """The smallest budget on one device."""
    model = language()
    return anybatch.plan(model, cross_entropy, texts(33), make(model), memory=2**40).smallest_bytes


def test_float32_is_as_near_as_the_whole_batch() -> None:
    batch, model = texts(33), language()
    budget = int(1.1 * smallest_of(sgd))
    whole, _ = whole_gradients(model, cross_entropy, batch)
    exact, _ = whole_gradients(as_float64(model), cross_entropy, batch)
    step = anybatch.TrainStep(model, cross_entropy, still(model), memory=budget, devices=TWO)
    for _ in range(2):
        out = step(batch)
        assert_float32(gradients_of(model), whole, exact, out.micro_batches)


@pytest.mark.parametrize(
    ("share", "make", "devices"),
    diagonals([1.02, 1.6, 1000.0], [sgd, adamw], [TWO, {"cpu": 1, "cpu:0": 3}, THREE], each=2),
)
def test_no_device_holds_more_than_planned(share: float, make: Any, devices: Any) -> None:
    model, batch = language(), texts(33)
    optimizer = make(model)
    budget = int(share * smallest_of(make)) + 4 * 500  # the second copy of the buffer, which several devices keep
    step = anybatch.TrainStep(model, cross_entropy, optimizer, memory=budget, clip_norm=1.0, devices=devices)
    step(batch)
    step(batch)
    peaks, planned = device_peaks(step, batch), plan_of(step).peak_bytes
    assert planned <= budget
    assert max(peaks) <= planned + SLACK
    if isinstance(devices, list):  # with speeds the first device may run fewer micro-batches than another
        assert max(peaks) == peaks[0] >= planned - SLACK
    assert sum(plan_of(step).at_peak.values()) == planned


def test_optimizations_make_the_other_devices_smaller_too() -> None:
    batch, found = texts(32), {}
    for row in (PlanRow(16, 2), PlanRow(16, 2, recompute=("blocks.0:3",), head="head", loss_chunks=8)):
        model = language()
        step = anybatch.TrainStep(model, cross_entropy, sgd(model), plan=Plan(row, samples=32), devices=TWO)
        step(batch)
        step(batch)
        found[row.loss_chunks] = device_peaks(step, batch)
    assert all(small < 0.5 * large for small, large in zip(found[8], found[1], strict=True))


def test_autocast_and_low_precision_hold_no_more() -> None:
    batch = texts(480)
    more = sum(t.nbytes for t in texts(240).values())
    for dtype, autocast in ((torch.float32, torch.bfloat16), (torch.bfloat16, None)):
        model = language(dtype=dtype)
        step = anybatch.TrainStep(
            model,
            cross_entropy,
            adamw(model),
            memory=(535 if autocast else 455) * 1024 + more,
            devices=TWO,
            autocast=autocast,
        )
        step(batch)
        step(batch)
        peaks, plan = device_peaks(step, batch), plan_of(step)
        assert plan.micro_batches > 9  # from where on low precision is added up in float32
        assert 0.9 * plan.peak_bytes < max(peaks) <= plan.peak_bytes + SLACK


@pytest.mark.parametrize("count", [anybatch.count_samples, anybatch.count_tokens("y")])
def test_samples_of_several_lengths_hold_no_more(count: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(WORDS, (n,), generator=generator) for n in torch.randint(2, 30, (40,)).tolist()]

    def collate(chosen: list[Tensor]) -> dict[str, Tensor]:
        padded = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        return {
            "x": padded,
            "y": padded,
            "unused": torch.zeros(len(chosen), 4000),
        }  # all are made before the first runs

    model = language()
    step = anybatch.TrainStep(
        model, cross_entropy, adamw(model), memory="3MiB", devices=TWO, collate=collate, cost=len,
        count=count, verify="off",  # padding is a target, too
    )  # fmt: skip
    step(samples)
    step(samples)
    plan = plan_of(step)
    assert plan.micro_batches > 2
    assert max(device_peaks(step, samples)) <= plan.peak_bytes + SLACK


def test_the_first_call_stays_under_the_budget() -> None:
    model, batch = Net(), points(23)
    optimizer = sgd(model)
    budget = int(1.3 * anybatch.plan(model, square, batch, optimizer, memory=2**40).smallest_bytes)
    step = anybatch.TrainStep(model, square, optimizer, memory=budget, devices=TWO)
    assert max(device_peaks(step, batch)) <= budget


def test_each_device_gets_one_micro_batch_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # each micro-batch takes as long as another
    model, batch = Net(), points(24)
    step = anybatch.TrainStep(model, square, sgd(model), memory="1GiB", devices=THREE)
    out = step(batch)
    assert (out.micro_batches, plan_of(step).micro_batch_size) == (3, 8)
    assert not plan_of(step).chosen.optimizations
    assert step.evaluate(batch).micro_batches == 3
    assert step(points(5)).micro_batches == 3  # fewer samples follow the same plan
    assert step(points(1)).micro_batches == 1


def test_a_plan_for_one_device_holds_on_each_of_several(tmp_path: Path) -> None:
    model, batch = Net(), points(24)
    optimizer = sgd(model)
    budget = int(1.3 * anybatch.plan(model, square, batch, optimizer, memory=2**40).smallest_bytes)
    plan = anybatch.plan(model, square, batch, optimizer, memory=budget)
    plan.save(tmp_path / "plan.json")
    step = anybatch.TrainStep(model, square, optimizer, plan=Plan.load(tmp_path / "plan.json"), devices=TWO)
    out = step(batch)
    assert (out.micro_batches, out.plan) == (plan.micro_batches, plan)
    step(batch)
    assert max(device_peaks(step, batch)) <= plan.peak_bytes + SLACK
    with_memory = anybatch.TrainStep(model, square, optimizer, plan=plan, memory=budget, devices=TWO)
    with_memory(batch)
    assert plan_of(with_memory).fingerprint["devices"] == "2"


def test_a_plan_for_several_devices_is_for_as_many(tmp_path: Path) -> None:
    model, batch = Net(), points(24)
    made = anybatch.TrainStep(model, square, sgd(model), memory="1GiB", devices=TWO)
    made(batch)
    plan_of(made).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    again = anybatch.TrainStep(model, square, sgd(model), plan=plan, devices=TWO)
    assert again(batch).plan == plan
    for devices in (None, THREE, {"cpu": 2, "cpu:0": 1}):
        other = anybatch.TrainStep(model, square, sgd(model), plan=plan, devices=devices)
        with pytest.raises(anybatch.PlanMismatch) as caught:
            other(batch)
        assert list(caught.value.changed) == ["devices"]
        assert other.updates == 0


@pytest.mark.parametrize("in_turns", [True, False])
def test_memory_that_runs_out_on_a_device_makes_a_smaller_plan_for_all(in_turns: bool) -> None:
    model, batch = language(), texts(32)
    step = anybatch.TrainStep(model, cross_entropy, sgd(model), memory="1GiB", devices=TWO)
    for _ in range(0 if in_turns else 2):
        step(batch)
    updates = step.updates
    planned = anybatch.TrainStep(model, cross_entropy, still(model), memory="1GiB", devices=TWO)(batch).plan
    assert planned is not None
    device_peaks(step, batch, most=int(0.8 * planned.peak_bytes))
    second = plan_of(step)
    assert step.updates == updates + 1
    assert second.peak_bytes <= 0.85 * planned.peak_bytes
    assert second.fingerprint["devices"] == "2"


class RunsOut:
    """A cross-entropy that runs out of memory once, when it is told to."""

    row: int | None = None

    def __call__(self, model: Any, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        if self.row is not None and int(batch["row"][0]) == self.row:
            self.row = None
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return loss


@pytest.mark.parametrize("placement", [0, 1])
def test_after_memory_ran_out_it_is_bitwise_as_if_begun_so(placement: int) -> None:
    batch = {**texts(32), "row": torch.arange(32)}
    model, loss_fn = language(dropout=0.3), RunsOut()
    torch.manual_seed(3)
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory="1GiB", devices=TWO)
    plans = [step(batch).plan]
    loss_fn.row = 16 * placement
    out = step(batch)
    plans.append(out.plan)
    assert [(attempt.outcome, attempt.samples) for attempt in out.attempts] == [("out of memory", 0), ("done", 32)]
    assert (step.updates, step.samples, out.count) == (2, 64, 32)
    found = [*gradients_of(model), *(p.detach() for p in model.parameters())]
    model = language(dropout=0.3)
    torch.manual_seed(3)
    for plan in plans:
        anybatch.TrainStep(model, RunsOut(), sgd(model), plan=plan, devices=TWO)(batch)
    assert_bitwise(found, [*gradients_of(model), *(p.detach() for p in model.parameters())])


def test_a_budget_that_nothing_fits_in_changes_nothing() -> None:
    model, batch = language(), texts(32)
    before = copy.deepcopy(model.state_dict())
    step = anybatch.TrainStep(model, cross_entropy, adamw(model), memory="64KiB", devices=TWO)
    with pytest.raises(anybatch.DoesNotFit) as caught:
        step(batch)
    assert (caught.value.needed or 0) > 64 * 1024
    assert step.updates == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_run_goes_on_with_its_plan() -> None:
    batch = texts(33)

    def trained(is_interrupted: bool) -> list[Tensor | None]:
        model = language(dropout=0.2)
        torch.manual_seed(1)
        plan = Plan(PlanRow(5, 7, recompute=("blocks.0:3",)), samples=33, fingerprint={"devices": "2"})
        step = anybatch.TrainStep(model, cross_entropy, sgd(model), plan=plan, devices=TWO)
        step(batch)
        if is_interrupted:
            state = step.state_dict()
            step = anybatch.TrainStep(model, cross_entropy, sgd(model), memory="1GiB", devices=TWO)
            step.load_state_dict(state)
        step(batch)
        return [parameter.detach() for parameter in model.parameters()]

    assert_bitwise(trained(True), trained(False))
