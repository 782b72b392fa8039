"""The engine on an accelerator: the test device ``sim``, whose allocator refuses what does not fit."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from accelerator import sim
from accelerator.allocator import CachingAllocator

MIB = 2**20


@pytest.fixture(scope="module")
def device() -> Any:
    return sim.load()


@pytest.fixture(autouse=True)
def _without_limits(device: Any) -> Iterator[None]:
    yield
    for index in range(device.device_count()):
        device.fail_at(index, -1)
        device.set_limit(index, 0)
    device.set_expandable(False)


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
@pytest.mark.parametrize("seed", range(20))
def test_the_model_of_the_allocator_reserves_what_the_device_does_to_the_byte(
    device: Any, seed: int, expandable: bool
) -> None:
    limit = None if seed % 2 else 96 * MIB
    device.set_limit(1, limit or 0)
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
