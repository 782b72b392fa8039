"""What only a CUDA device can show: no synchronisation, real out-of-memory, its random state, prefetching."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anybatch

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(autouse=True)
def _whole_card() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def model_of(width: int = 64, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width), torch.nn.Dropout(dropout), torch.nn.Tanh(), torch.nn.Linear(width, 10)]
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def batch_of(rows: int, width: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, width, generator=generator),
        "y": torch.randint(10, (rows,), generator=generator),
    }


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    x = batch["x"].to(next(model.parameters()).dtype)
    return F.cross_entropy(model(x).float(), batch["y"])


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_with_a_host_batch_does_not_synchronise(autocast: torch.dtype | None, pinned: bool) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=16, clip_norm=1.0, autocast=autocast)
    batch = {name: leaf.pin_memory() if pinned else leaf for name, leaf in batch_of(50).items()}
    for _ in range(2):
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    results = [step(batch) for _ in range(3)]
    torch.cuda.set_sync_debug_mode("default")
    assert all(result.loss > 0 and result.grad_norm is not None for result in results)


def test_token_counts_of_a_host_batch_do_not_synchronise() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)).cuda()
    labels = torch.randint(50, (12, 20))
    labels[:, 15:] = -100

    def token_loss(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    batch = {"tokens": torch.randint(50, (12, 20)), "labels": labels}
    step = anybatch.TrainStep(
        model, token_loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=5,
        count=anybatch.count_tokens("labels"),
    )  # fmt: skip
    step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    result = step(batch)
    torch.cuda.set_sync_debug_mode("default")
    assert result.count == 12 * 15


def test_the_gradient_is_the_whole_batch_s() -> None:
    model = model_of(dropout=0.0)
    batch = batch_of(50)
    reference = copy.deepcopy(model).double()
    loss_fn(reference, {"x": batch["x"].double().cuda(), "y": batch["y"].cuda()}).backward()
    whole = copy.deepcopy(model)
    loss_fn(whole, {name: leaf.cuda() for name, leaf in batch.items()}).backward()
    anybatch.backward(model, loss_fn, batch, micro_batch_size=16)
    exact = gradients(reference)
    bound = 2 * (gradients(whole) - exact).norm() + 2**-24 * 50**0.5 * exact.norm()
    assert (gradients(model) - exact).norm() <= bound


@pytest.mark.parametrize("size", [1, 7, 16, None])
def test_batches_that_lie_on_the_device_or_on_the_host_give_the_same(size: int | None) -> None:
    there, here = model_of(dropout=0.0), model_of(dropout=0.0)
    batch = batch_of(37)
    anybatch.backward(here, loss_fn, batch, micro_batch_size=size)
    anybatch.backward(there, loss_fn, {name: leaf.cuda() for name, leaf in batch.items()}, micro_batch_size=size)
    assert torch.equal(gradients(here), gradients(there))


def test_bfloat16_gradients_are_accumulated_in_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device="cuda"))
    model = torch.nn.ParameterDict({"weight": weight})
    out = anybatch.backward(
        model,
        lambda model, batch: anybatch.Mean((model["weight"] * batch).sum(), 1 / 512),
        torch.full((512, 1), 2.0**-8, dtype=torch.bfloat16),
        micro_batch_size=1,
        verify="off",  # the count is chosen for the sum of many small gradients
    )
    assert weight.grad is not None
    assert weight.grad.item() == 2.0
    assert out.accumulator_bytes == 4


@pytest.mark.parametrize("variant", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_a_real_out_of_memory_leads_to_the_same_weights_bitwise(variant: dict[str, Any]) -> None:
    width, rows = 1024, 4096

    def wide_loss(model: Any, batch: Any) -> torch.Tensor:
        hidden = model(batch["x"])
        loss: torch.Tensor = hidden.repeat(1, 64).tanh().square().mean()
        return loss

    def run(size: int | None, limit_mib: int | None) -> tuple[list[torch.Tensor], anybatch.StepResult]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.1)).cuda()
        step = anybatch.TrainStep(
            model, wide_loss, torch.optim.AdamW(model.parameters(), **variant), micro_batch_size=size, clip_norm=1.0
        )
        if limit_mib is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(limit_mib * MIB / total)
        torch.manual_seed(5)
        result = step({"x": torch.randn(rows, width)})
        torch.cuda.set_per_process_memory_fraction(1.0)
        return [p.detach().cpu() for p in model.parameters()], result

    weights, result = run(None, 1500)
    assert [attempt.outcome for attempt in result.attempts][:1] == ["out of memory"]
    assert result.attempts[-1].outcome == "done"
    assert [attempt.samples for attempt in result.attempts[:-1]] == [0] * (len(result.attempts) - 1)
    again, straight = run(int(result.attempts[-1].micro_batch_size), None)
    assert len(straight.attempts) == 1
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_memory_is_back_at_the_baseline_after_an_out_of_memory() -> None:
    model = torch.nn.Linear(256, 256).cuda()

    def greedy(model: Any, batch: Any) -> torch.Tensor:
        hidden = model(batch)
        if len(batch) > 8:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        loss: torch.Tensor = hidden.square().mean()
        return loss

    step = anybatch.TrainStep(model, greedy, torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.randn(8, 256))
    base = torch.cuda.memory_allocated()
    for _ in range(20):
        result = step(torch.randn(64, 256))
        assert result.attempts[-1].micro_batch_size == 8
        del result
    assert torch.cuda.memory_allocated() <= base + MIB


def test_an_infinite_fp16_gradient_skips_the_update_once() -> None:
    model = model_of(dropout=0.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def overflowing(model: Any, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * (float("inf") if batch["bad"].any() else 1.0)

    step = anybatch.TrainStep(
        model, overflowing, optimizer, micro_batch_size=16, autocast=torch.float16, scaler=scaler, clip_norm=1.0
    )
    batch = {**batch_of(64), "bad": torch.zeros(64)}
    bad = {**batch, "bad": (torch.arange(64) == 20).float()}
    step(batch)
    before = [p.detach().clone() for p in model.parameters()]
    result = step(bad)
    assert result.skipped
    assert scaler.get_scale() == 2.0**13
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not step(batch).skipped
    assert (step.updates, step.skipped) == (2, 1)


def test_dropout_draws_the_same_after_a_resume() -> None:
    model = model_of(dropout=0.5)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=16)
    batch = batch_of(50)
    step(batch)
    saved = copy.deepcopy((model.state_dict(), step.state_dict()))
    step(batch)
    after = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(saved[0])
    step.load_state_dict(saved[1])
    step(batch)
    assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))
