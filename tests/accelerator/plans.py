"""Plans on an accelerator: the allocator of the test device refuses nothing under them."""

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from accelerator.engine import MIB, batch_of, loss_fn, mlp, on_device, plan_of
from anybatch.accelerators import release_cache
from anybatch.memory.allocator import CachingAllocator
from anybatch.planning import reserved, search
from anybatch.planning.recipe import splittings
from anybatch.records.plans import PlanRow
from diagonals import diagonals


def test_a_budget_is_held_on_each_of_several_devices(device: Any) -> None:
    def made(limit: int, **settings: Any) -> anybatch.TrainStep:
        gc.collect()
        device.empty_cache()
        torch.manual_seed(0)
        model = on_device(mlp(1024))
        for index in range(2):
            device.set_limit(index, limit)
            device.reset_peak(index)
        optimizer = torch.optim.AdamW(model.parameters())
        return anybatch.TrainStep(model, loss_fn, optimizer, devices=["sim:0", "sim:1"], **settings)

    device.set_idle(True)
    budget, batch = 48 * MIB, batch_of(4096, torch.float32)
    before = [device.stats(index)["refusals"] for index in range(2)]
    step = made(budget, memory=budget)
    for _ in range(3):
        plan = step(batch).plan
    assert plan is not None
    assert plan.micro_batches > 1
    for index in range(2):
        assert 0 < device.stats(index)["peak_reserved"] <= plan.reserved_bytes <= budget
    del step
    step = made(plan.reserved_bytes, plan=plan)  # as little as the plan says is enough
    for _ in range(3):
        assert step(batch).micro_batches == plan.micro_batches
    assert [device.stats(index)["refusals"] for index in range(2)] == before


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(16 + 256, 256), nn.Linear(256, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.new_zeros(())
        for step in range(x.shape[1]):
            state = torch.tanh(self.cell(torch.cat([x[:, step], state], 1)))
            total = total + self.head(state).square().sum()
        return total, state


def over_time() -> anybatch.OverTime:
    def chunk_loss(model: Any, chunk: Any, state: torch.Tensor) -> Any:
        total, state = model(chunk["x"], state)
        return anybatch.Mean(total, chunk["x"].shape[0] * chunk["x"].shape[1]), state

    return anybatch.OverTime(chunk_loss, lambda model, batch: batch["x"].new_zeros(len(batch["x"]), 256))


@pytest.mark.parametrize(
    ("steps", "budget", "is_known"), [(12, 64, True), pytest.param(64, 32, False, marks=pytest.mark.slow)]
)
def test_a_plan_over_time_holds_and_is_estimated_where_not_all_chunks_were_traced(
    device: Any, steps: int, budget: int, is_known: bool
) -> None:
    device.set_idle(True)
    device.empty_cache()
    torch.manual_seed(0)
    model, batch = on_device(Unrolled()), {"x": torch.randn(512, steps, 16)}
    device.set_limit(0, budget * MIB)
    device.reset_peak(0)
    refused = device.stats(0)["refusals"]
    step = anybatch.TrainStep(
        model, over_time(), torch.optim.AdamW(model.parameters()), memory=budget * MIB, verify="off"
    )
    for _ in range(2):
        plan = step(batch).plan
    assert plan is not None
    assert device.stats(0)["refusals"] == refused
    assert plan.confidence == ("predicted" if is_known else "estimated")
    assert device.stats(0)["peak_reserved"] <= (plan.reserved_bytes if is_known else budget * MIB)


def test_a_plan_of_a_coupled_loss_holds_and_is_estimated(device: Any) -> None:
    device.set_idle(True)
    device.empty_cache()
    torch.manual_seed(0)
    model, budget = on_device(mlp(256)), 40 * MIB
    coupled = anybatch.Coupled(lambda m, b: m(b["x"]), lambda m, z, b: (z @ z.T).square().mean())
    device.set_limit(0, budget)
    refused = device.stats(0)["refusals"]
    step = anybatch.TrainStep(model, coupled, torch.optim.SGD(model.parameters(), lr=0.0), memory=budget, verify="off")
    for _ in range(2):
        plan = step(batch_of(1024, torch.float32)).plan
    assert plan is not None
    assert (plan.confidence, device.stats(0)["refusals"]) == ("estimated", refused)
    assert 0 < plan.peak_bytes <= plan.reserved_bytes <= budget


class Listed(CachingAllocator):
    """An allocator that knows the most bytes it gave at once, each rounded, and not in blocks with room to spare."""

    most = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._given = dict[Any, int]()

    def allocate(self, name: Any, size: int, stream: int = 0) -> None:
        self._given[name] = -(-size // 512) * 512
        Listed.most = max(Listed.most, sum(self._given.values()))
        super().allocate(name, size, stream)

    def free(self, name: Any) -> None:
        self._given.pop(name, None)
        super().free(name)


@pytest.mark.parametrize(
    "rows", [pytest.param(2048, marks=pytest.mark.slow), 2047]
)  # the last micro-batch is as large as the others, and smaller
def test_a_replay_takes_what_the_device_gives(device: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(search, "splittings", lambda subject: [one for one in splittings(subject) if one.count == 64])
    monkeypatch.setattr(reserved, "CachingAllocator", Listed)
    monkeypatch.setattr(Listed, "most", 0)
    torch.manual_seed(0)
    model, batch = on_device(mlp(256)), batch_of(rows, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = anybatch.plan(model, loss_fn, batch, optimizer=optimizer, memory=64 * MIB, allow=())
    assert plan.micro_batches == 64
    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan, verify="off")
    device.note(0, True)
    for _ in range(3):
        out = step(batch)
    noted = device.noted(0)
    device.note(0, False)
    assert out.micro_batches == 64
    given, most = dict[int, int](), 0
    for address, size in noted:
        given.pop(address, None) if size < 0 else given.update({address: -(-size // 512) * 512})
        most = max(most, sum(given.values()))
    assert most == pytest.approx(Listed.most, abs=8 * 1024)


class Language(nn.Module):
    """Layers whose input is not contiguous, and gradients of tensors with several uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)
        layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)]
        self.blocks = nn.Sequential(*layers, nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.blocks(self.embedding(x))).transpose(1, 2)
        return scores


def _ordered(changes: list[int]) -> list[int]:
    """What is given back one after the other by size, since the order makes no difference."""
    runs = itertools.groupby(changes, lambda one: one < 0)
    return [one for is_free, run in runs for one in (sorted(run) if is_free else run)]


def _force(monkeypatch: pytest.MonkeyPatch, row: PlanRow) -> None:
    """Has a search find nothing but one way."""
    traced, count = search.Search.traced, row.micro_batches
    monkeypatch.setattr(search, "splittings", lambda subject: [s for s in splittings(subject) if s.count == count])
    monkeypatch.setattr(search.Search, "traced", lambda self, other: traced(self, row))


@pytest.mark.parametrize(
    ("chunks", "rows"),
    [pytest.param(1, 48, marks=pytest.mark.slow), (8, 48), pytest.param(1, 110, marks=pytest.mark.slow)],
)  # seven micro-batches, of which one has 14
def test_a_replay_follows_the_device_from_one_allocation_to_the_next(
    device: Any, monkeypatch: pytest.MonkeyPatch, chunks: int, rows: int
) -> None:
    large, replayed = 2**17, list[list[tuple[Any, int]]]()  # nothing but activations is as large

    class Noted(CachingAllocator):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._given = dict[Any, int]()
            replayed.append([])

        def allocate(self, name: Any, size: int, stream: int = 0) -> None:
            super().allocate(name, size, stream)
            self._given[name] = -(-size // 512) * 512
            replayed[-1].append((name, self._given[name]))

        def free(self, name: Any) -> None:
            super().free(name)
            replayed[-1].append((name, -self._given.pop(name, 0)))

    device.set_idle(True)
    torch.manual_seed(0)
    model, words = Language().to("sim"), torch.randint(0, 500, (rows, 64))
    batch, optimizer = {"x": words, "y": words}, torch.optim.AdamW(model.parameters())
    row = plan_of(rows, 16, head="head" if chunks > 1 else "", loss_chunks=chunks).chosen
    _force(monkeypatch, row)
    monkeypatch.setattr(reserved, "_MICRO_BATCHES", 7)
    monkeypatch.setattr(reserved, "CachingAllocator", Noted)
    made = anybatch.plan(model, loss_fn, batch, optimizer=optimizer, memory=256 * MIB).chosen
    assert (made.micro_batches, made.loss_chunks) == (row.micro_batches, chunks)
    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=anybatch.Plan(made, samples=rows), verify="off")
    for number in range(3):
        device.note(0, number == 2)
        device.reset_peak(0)
        step(batch)
    noted, given = list[int](), dict[int, int]()
    for address, size in device.noted(0):
        change = -given.pop(address, 0) if size < 0 else given.setdefault(address, -(-size // 512) * 512)
        noted += [change] if abs(change) >= large else []
    device.note(0, False)
    found = [change for name, change in max(replayed, key=len) if name[:2] == ("own", 2) and abs(change) >= large]
    assert _ordered(noted) == _ordered(found)
    assert device.stats(0)["peak_asked"] == pytest.approx(made.peak_bytes, rel=0.005)


def autoencoder() -> nn.Module:
    """Widths that differ, so that blocks of many sizes come and go."""
    widths = (512, 1024, 300, 2000, 64, 700, 512)
    return nn.Sequential(*[layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())])


def rebuilt(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch), batch)


def test_a_plan_runs_in_the_fewest_bytes_that_its_replay_asks_for(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mean squared error keeps as many bytes as its samples have, and the last micro-batch is smaller."""
    device.set_idle(True)
    gc.collect()
    device.empty_cache()
    model, batch, plan = autoencoder().to("sim"), torch.randn(3000, 512), plan_of(3000, 429)
    _force(monkeypatch, plan.chosen)
    monkeypatch.setattr(reserved.Replay, "needed", lambda self, limit, needed=reserved.Replay.needed: needed(self, 0))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = anybatch.plan(model, rebuilt, batch, optimizer=optimizer, memory=256 * MIB)
    assert plan.micro_batches == 7
    device.set_limit(0, plan.reserved_bytes)
    refused = device.stats(0)["refusals"]
    step = anybatch.TrainStep(model, rebuilt, optimizer, plan=plan)
    for _ in range(3):
        assert step(batch).micro_batches == 7
    assert device.stats(0)["refusals"] == refused


@pytest.mark.parametrize(
    ("optimizer", "way"),
    diagonals([torch.optim.AdamW, torch.optim.SGD], [(0.45, False), (0.6, False), (0.8, False), (0.5, True)]),
)
def test_the_allocator_refuses_nothing_under_a_plan(device: Any, optimizer: Any, way: tuple[float, bool]) -> None:
    share, expandable = way
    device.set_idle(True)  # only memory is looked at
    device.set_expandable(expandable)
    torch.manual_seed(0)
    model, batch = autoencoder().to("sim"), torch.randn(2000, 512)
    gc.collect()
    device.empty_cache()
    budget = int(share * 160) * MIB
    device.set_limit(0, budget)
    refused = device.stats(0)["refusals"]
    step = anybatch.TrainStep(model, rebuilt, optimizer(model.parameters()), memory=budget, verify="off")
    for _ in range(3):
        plan = step(batch).plan
        release_cache()
        device.reset_peak(0)
    step(batch)
    assert plan is not None
    assert device.stats(0)["refusals"] == refused
    assert plan.reserved_bytes == pytest.approx(device.stats(0)["peak_reserved"], rel=0.05)
    assert 0 < plan.peak_bytes <= plan.reserved_bytes <= budget
    assert f"{plan.reserved_bytes / MIB:.1f} MiB reserved" in str(plan)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, pytest.param(torch.optim.SGD, marks=pytest.mark.slow)])
def test_what_a_row_reserves_is_enough_also_after_the_cache_was_emptied(device: Any, optimizer: Any) -> None:
    def made() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model, batch = autoencoder().to("sim"), torch.randn(2000, 512)
        gc.collect()
        device.empty_cache()
        return model, batch, optimizer(model.parameters())

    device.set_idle(True)
    asked: dict[int, int] = {}
    for budget in (112, 128, 132):  # of the whole batch at once: just enough, too little after it, and enough
        model, batch, stepped = made()
        plan = anybatch.plan(model, rebuilt, batch, optimizer=stepped, memory=budget * MIB)
        del model, stepped  # so that the weights of the next one lie where these lay
        for row in (plan.chosen, *plan.alternatives):
            if row.reserved_bytes and not row.recompute:
                asked[int(row.micro_batch_size)] = row.reserved_bytes
    for size, limit in asked.items():
        model, batch, stepped = made()
        device.set_limit(0, limit)
        refused = device.stats(0)["refusals"]
        step = anybatch.TrainStep(model, rebuilt, stepped, micro_batch_size=size, verify="off")
        for is_emptied in (False, False, True, True, False):
            if is_emptied:
                release_cache()
            step(batch)
        assert device.stats(0)["refusals"] == refused, (size, limit / MIB)
        device.set_limit(0, 0)
        del step, model, stepped


def test_what_else_lies_on_the_device_is_not_taken_from_the_budget(device: Any) -> None:
    device.set_idle(True)
    others = torch.empty(40 * MIB, dtype=torch.uint8, device="sim")
    torch.manual_seed(0)
    model, budget = mlp(256).to("sim"), 24 * MIB
    refused = device.stats(0)["refusals"]
    step = anybatch.TrainStep(model, loss_fn, torch.optim.AdamW(model.parameters()), memory=budget)
    out = step(batch_of(512, torch.float32))
    assert out.plan is not None
    assert out.plan.reserved_bytes <= budget
    assert device.stats(0)["refusals"] == refused
    assert len(others) == 40 * MIB
