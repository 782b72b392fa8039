"""The engine on an accelerator: the test device ``sim``, whose allocator refuses what does not fit."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anybatch
from accelerator import sim
from anybatch.accelerators import segments_of
from anybatch.memory.allocator import CachingAllocator
from anybatch.records.plans import PlanRow

MIB = 2**20


def mlp(width: int = 32, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)
    )


def batch_of(rows: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 16, dtype=dtype, generator=made),
        "y": torch.randint(0, 4, (rows,), generator=made),
    }


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def several(model: Any, batch: Any) -> Any:
    with anybatch.cut(model[:3](batch["x"])) as features:
        yield "first", F.cross_entropy(model[3:](features), batch["y"])
        yield "second", model[3:](features).square().mean()


def on_device(made: Any) -> nn.Module:
    module: nn.Module = copy.deepcopy(made).to("sim")
    return module


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(16, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.rnn(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])
        return found


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": mlp,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "convolutional": convolutional,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_micro_batches_are_those_of_the_whole_batch_on_the_host(device: Any, name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]().double(), batch_of(22)
    there = on_device(model)
    loss_fn(model, batch).backward()
    out = anybatch.backward(there, loss_fn, batch, micro_batch_size=8)
    assert out.micro_batches == 3
    for host, own in zip(model.parameters(), there.parameters(), strict=True):
        assert host.grad is not None
        assert own.grad is not None
        assert own.grad.device.type == "sim"
        assert torch.allclose(own.grad.cpu(), host.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "loss", [several, anybatch.Coupled(lambda m, b: m(b["x"]), lambda m, z, b: (z @ z.T).square().mean())]
)
def test_losses_in_pieces_are_exact_there(device: Any, loss: Any) -> None:
    model, batch = mlp().double(), batch_of(12)
    there = on_device(model)
    anybatch.backward(model, loss, batch, micro_batch_size=12, verify="off")
    anybatch.backward(there, loss, batch, micro_batch_size=5)
    for host, own in zip(model.parameters(), there.parameters(), strict=True):
        assert torch.allclose(own.grad.cpu(), host.grad, rtol=1e-10, atol=1e-14)  # type: ignore[union-attr,arg-type]


def test_a_step_waits_for_nothing_and_moves_the_batch_once(device: Any) -> None:
    model, batch = on_device(mlp().float()), batch_of(32, torch.float32)
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8, clip_norm=1.0
    )
    step(batch)
    before = device.counters()
    out = step(batch)
    after = device.counters()
    moved = {name: after[name] - before[name] for name in after}
    assert moved["synchronisations"] == moved["from_device"] == 0
    assert moved["to_device_bytes"] == sum(one.nbytes for one in batch.values())
    assert out.micro_batches == 4
    assert out.loss > 0


def test_memory_that_runs_out_at_any_allocation_changes_nothing_of_the_result(device: Any) -> None:
    def trained(fails_at: int) -> tuple[list[torch.Tensor], bool]:
        torch.manual_seed(0)
        model = on_device(mlp(dropout=0.1).double())
        step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), verify="off")
        refused = device.stats(0)["refusals"]
        device.fail_at(0, fails_at)
        out = step(batch_of(8))
        device.fail_at(0, -1)
        assert step.updates == 1
        assert out.count == 8
        return [one.detach().cpu() for one in model.parameters()], device.stats(0)["refusals"] > refused

    whole, _ = trained(-1)
    number, refusals = 0, 0
    while True:
        found, was_refused = trained(number)
        for one, other in zip(found, whole, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), number
        if not was_refused:
            break
        number, refusals = number + 1, refusals + 1
    assert refusals > 20


def test_two_devices_give_the_gradient_of_one(device: Any) -> None:
    model, batch = mlp().double(), batch_of(24)
    one, two = on_device(model), on_device(model)
    settings: dict[str, Any] = {"micro_batch_size": 4, "verify": "off"}
    alone = anybatch.TrainStep(one, loss_fn, torch.optim.SGD(one.parameters(), lr=0.1), **settings)
    shared = anybatch.TrainStep(
        two, loss_fn, torch.optim.SGD(two.parameters(), lr=0.1), devices=["sim:0", "sim:1"], **settings
    )
    device.reset_peak(1)
    for _ in range(3):
        alone(batch), shared(batch)
    assert device.stats(1)["peak_allocated"] > 0
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(first, second, rtol=1e-10, atol=1e-14)


def test_draws_are_of_the_device_and_are_replayed_after_memory_ran_out(device: Any) -> None:
    losses = []
    for refused in (-1, 12):
        torch.manual_seed(5)
        model = on_device(mlp(dropout=0.5).double())
        step = anybatch.TrainStep(
            model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2, verify="off"
        )
        host = torch.get_rng_state()
        device.fail_at(0, refused)
        out = step(batch_of(8))
        device.fail_at(0, -1)
        assert torch.equal(torch.get_rng_state(), host)
        losses.append(float(step(batch_of(8)).loss) if out.micro_batches == 4 else 0.0)
    assert losses[0] > 0
    assert losses[1] in (losses[0], 0.0)


def test_the_allocator_rounds_caches_splits_and_refuses_as_that_of_cuda(device: Any) -> None:
    device.set_limit(1, 24 * MIB)
    first = torch.empty(700, dtype=torch.uint8, device="sim:1")
    assert device.stats(1)["allocated"] == 1024
    assert device.stats(1)["reserved"] == 2 * MIB
    second = torch.empty(3 * MIB, dtype=torch.uint8, device="sim:1")
    assert device.stats(1)["reserved"] == 22 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="SIM out of memory"):
        torch.empty(18 * MIB, dtype=torch.uint8, device="sim:1")
    del second
    third = torch.empty(20 * MIB, dtype=torch.uint8, device="sim:1")
    assert device.stats(1)["reserved"] == 22 * MIB
    del first, third
    torch.accelerator.memory.empty_cache() if hasattr(torch.accelerator, "memory") else device.empty_cache()
    assert device.stats(1)["reserved"] == 0


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 20))])
def test_the_model_of_the_allocator_reserves_what_the_device_does_to_the_byte(
    device: Any, seed: int, expandable: bool
) -> None:
    limit = None if seed % 2 else 96 * MIB
    device.set_limit(1, limit or 0)
    device.set_share(1, limit or 0)  # which is looked at before pages are, so that the stricter of both decides
    device.set_expandable(expandable)
    device.empty_cache()
    device.reset_peak(1)
    model = CachingAllocator(limit, expandable=expandable)
    held: dict[int, torch.Tensor] = {}
    draws = random.Random(seed)
    for number in range(400):
        if held and draws.random() < 0.5:
            name = draws.choice(sorted(held))
            del held[name]
            model.free(name)
        else:
            size = int(2 ** draws.uniform(2, draws.choice((12, 20, 24))))
            try:
                held[number] = torch.empty(size, dtype=torch.uint8, device="sim:1")
            except torch.OutOfMemoryError:
                with pytest.raises(MemoryError, match="can't reserve"):
                    model.allocate(number, size)
            else:
                model.allocate(number, size)
        stats = device.stats(1)
        assert (stats["allocated"], stats["reserved"]) == (model.allocated, model.reserved)
    assert (device.stats(1)["peak_allocated"], device.stats(1)["peak_reserved"]) == (
        model.peak_allocated, model.peak_reserved
    )  # fmt: skip
    held.clear()


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_the_model_goes_on_from_what_the_device_holds(device: Any, seed: int, expandable: bool) -> None:
    device.set_expandable(expandable)
    device.empty_cache()
    draws, held = random.Random(seed), dict[int, torch.Tensor]()

    def taken() -> int:
        return int(2 ** draws.uniform(2, draws.choice((12, 20, 24))))

    for number in range(60):
        held[number] = torch.empty(taken(), dtype=torch.uint8, device="sim:1")
    for number in draws.sample(sorted(held), 40):
        del held[number]
    device.empty_cache()
    found = segments_of(torch.device("sim", 1))
    assert found is not None
    assert all(one.is_expandable is expandable for one in found)
    model = CachingAllocator(expandable=expandable)
    model.adopt(found)
    new: dict[int, torch.Tensor] = {}
    for number in range(200):
        stats = device.stats(1)
        assert (stats["allocated"], stats["reserved"]) == (model.allocated, model.reserved)
        if new and draws.random() < 0.45:
            name = draws.choice(sorted(new))
            del new[name]
            model.free(name)
        else:
            size = taken()
            new[number] = torch.empty(size, dtype=torch.uint8, device="sim:1")
            model.allocate(number, size)
    held.clear()
    new.clear()


def plan_of(samples: int, batch: int, **changes: Any) -> anybatch.Plan:
    return anybatch.Plan(PlanRow(batch, -(-samples // batch), **changes), samples=samples)


class Blocks(nn.Module):
    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.last(x)
        return found


def test_what_is_offloaded_goes_and_comes_back_as_predicted_and_nothing_waits(device: Any) -> None:
    rows, size, width, micro_batches = 32, 8, 64, 4
    torch.manual_seed(0)
    model = Blocks(width)
    plain, offloaded = on_device(model), on_device(model)
    batch = batch_of(rows, torch.float32)
    counted = []
    for one, offload in ((plain, ()), (offloaded, ("blocks.1", "blocks.2"))):
        step = anybatch.TrainStep(
            one, loss_fn, torch.optim.SGD(one.parameters(), lr=0.1), plan=plan_of(rows, size, offload=offload)
        )
        step(batch)
        before = device.counters()
        step(batch)
        counted.append({name: value - before[name] for name, value in device.counters().items()})
    without, with_it = counted
    # Each block keeps its input for the weight of its layer and the layer's result for GELU.
    copies, saved = 2 * 2 * micro_batches, 4 * size * width
    assert without["from_device"] == 0
    assert without["to_device_bytes"] == sum(one.nbytes for one in batch.values())
    assert with_it["from_device"] == with_it["to_device"] - without["to_device"] == copies
    assert with_it["from_device_bytes"] == copies * saved
    assert with_it["to_device_bytes"] - without["to_device_bytes"] == copies * saved
    assert with_it["synchronisations"] == without["synchronisations"] == 0
    assert all(map(torch.equal, plain.parameters(), offloaded.parameters()))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(share=st.floats(0.02, 1.0))
def test_memory_that_runs_out_at_any_byte_changes_nothing_of_the_result(share: float) -> None:
    device, rows, results = sim.load(), 64, []
    for is_limited in (False, True):
        torch.manual_seed(0)
        model = on_device(mlp(1024).double())
        step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), verify="off")
        step(batch_of(2))
        device.empty_cache()
        held = device.stats(0)["reserved"]
        device.set_limit(0, held + int(share * 24 * MIB) if is_limited else 0)
        try:
            out = step(batch_of(rows))
        except anybatch.DoesNotFit:
            assert is_limited
            return
        finally:
            device.set_limit(0, 0)
        assert (step.updates, out.count) == (2, rows)
        results.append([one.detach().cpu() for one in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "waits"), [(torch.bfloat16, 0), (torch.float16, 1)])
def test_lower_precision_waits_once_at_most_and_is_near(device: Any, dtype: torch.dtype, waits: int) -> None:
    model, batch = mlp().float(), batch_of(24, torch.float32)
    there = on_device(model)
    step = anybatch.TrainStep(
        there, loss_fn, torch.optim.SGD(there.parameters(), lr=0.0), micro_batch_size=8, autocast=dtype, clip_norm=1e9
    )
    step(batch)
    before = device.counters()["synchronisations"]
    out = step(batch)
    assert device.counters()["synchronisations"] - before == waits
    assert not out.skipped
    loss_fn(model, batch).backward()
    for host, own in zip(model.parameters(), there.parameters(), strict=True):
        assert host.grad is not None
        assert own.grad is not None
        assert float((own.grad.cpu() - host.grad).norm()) < 0.02 * float(host.grad.norm()) + 1e-4


def test_evaluation_keeps_a_size_of_its_own_when_memory_runs_out(device: Any) -> None:
    model, batch = mlp().double(), batch_of(12)
    there = on_device(model)
    step = anybatch.TrainStep(there, loss_fn, torch.optim.SGD(there.parameters(), lr=0.1), verify="off")
    device.fail_at(0, 5)
    out = step.evaluate(batch)
    assert out.micro_batches > 1
    assert float(out.loss) == pytest.approx(float(loss_fn(model, batch).detach()), rel=1e-10)
    assert step(batch).micro_batches == 1


def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(device: Any) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, anybatch.TrainStep]:
        torch.manual_seed(0)
        model = on_device(mlp(dropout=0.3).double())
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=4, verify="off")

    model, optimizer, step = made()
    step(batch_of(10))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    for _ in range(2):
        step(batch_of(10))
    again, other, resumed = made()
    torch.manual_seed(99)
    again.load_state_dict(state[0])
    other.load_state_dict(state[1])
    resumed.load_state_dict(state[2])
    for _ in range(2):
        resumed(batch_of(10))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("devices", [["sim:0", "sim:1"], {"sim:0": 1, "cpu": 1}])
def test_devices_share_the_samples(device: Any, devices: Any) -> None:
    rows, size = 128, 4
    model, batch = mlp().double(), batch_of(rows)
    there = on_device(model)
    seen: dict[str, int] = {}

    def counted(model: Any, batch: Any) -> torch.Tensor:
        name = str(batch["x"].device)
        seen[name] = seen.get(name, 0) + len(batch["x"])
        return loss_fn(model, batch)

    step = anybatch.TrainStep(
        there,
        counted,
        torch.optim.SGD(there.parameters(), lr=0.0),
        micro_batch_size=size,
        devices=devices,
        verify="off",
    )
    for _ in range(2):
        seen.clear()
        step(batch)
    loss_fn(model, batch).backward()
    assert sum(seen.values()) == rows
    if "cpu" not in devices:
        assert seen["sim:0"] == pytest.approx(seen["sim:1"], rel=0.05)
    for host, own in zip(model.parameters(), there.parameters(), strict=True):
        assert torch.allclose(own.grad.cpu(), host.grad, rtol=1e-9, atol=1e-13)  # type: ignore[union-attr,arg-type]


@pytest.fixture
def _as_default(device: Any) -> Iterator[None]:
    torch.set_default_device("sim")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_as_default")
def test_what_a_loss_makes_lies_on_the_default_device_and_has_the_default_precision(device: Any) -> None:
    def noisy(model: Any, batch: Any) -> Any:
        weights = torch.ones(4) + 0.1 * torch.arange(4)
        assert (weights.device.type, weights.dtype) == ("sim", torch.float64)
        noise = torch.rand(len(batch["x"]), 1)
        return F.cross_entropy(model(batch["x"] + 0.1 * noise), batch["y"], weight=weights, reduction="none").mean()

    model, batch = mlp().to("sim"), {name: one.to("sim") for name, one in batch_of(12).items()}
    certificate = anybatch.check(model, noisy, batch, micro_batch_size=4)
    assert certificate.exact, certificate
    out = anybatch.backward(model, noisy, batch, micro_batch_size=4)
    assert out.micro_batches == 3
    assert "the same gradient, by comparison" in str(out.proof)
    blocks = Blocks().to("sim")
    step = anybatch.TrainStep(
        blocks, noisy, torch.optim.SGD(blocks.parameters(), lr=0.1), plan=plan_of(12, 4, offload=("blocks.1",))
    )
    assert step(batch).micro_batches == 3
    with pytest.raises(anybatch.DoesNotFit):
        anybatch.plan(blocks, noisy, batch, memory=MIB)
