"""Low precision: gradients are accumulated in float32 where it matters, and the bytes it takes are told."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch import Mean
from test_exactness import MODELS, in_float64

LOW = [torch.bfloat16, torch.float16]


class OneWeight(nn.Module):
    """One weight of low precision, by which every sample is multiplied."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def mean(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


def total(model: Any, batch: torch.Tensor) -> Mean:
    return Mean(model(batch).sum(), len(batch))


def run(
    value: float, rows: int, loss_fn: Any = mean, model: OneWeight | None = None, **options: Any
) -> tuple[float, Any]:
    """The gradient of ``rows`` micro-batches of one sample that contribute ``value`` each."""
    model = model or OneWeight()
    batch = torch.full((rows, 1), value * rows, dtype=model.w.dtype)
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=1, verify="off", **options)
    assert model.w.grad is not None
    assert model.w.grad.dtype is model.w.dtype
    return model.w.grad.double().mean().item(), out


@pytest.mark.parametrize("policy", ["auto", "fp32"])
@pytest.mark.parametrize("loss_fn", [mean, total])
def test_512_contributions_of_2_to_the_minus_8(policy: Any, loss_fn: Any) -> None:
    gradient, out = run(2.0**-8, 512, loss_fn, accumulate=policy)
    assert gradient == 2.0
    assert out.accumulator_bytes == 4


def test_native_accumulation_stops_at_one() -> None:
    gradient, out = run(2.0**-8, 512, accumulate="native")
    assert gradient == 1.0
    assert out.accumulator_bytes == 0


@pytest.mark.parametrize("loss_fn", [mean, total])
def test_1024_contributions_of_a_hundredth(loss_fn: Any) -> None:
    gradient, _ = run(0.01, 1024, loss_fn)
    assert abs(gradient - 1024 * torch.tensor(0.01, dtype=torch.bfloat16).item()) <= 0.005 * 10.25


def test_1024_contributions_of_a_hundredth_stop_at_four_in_bfloat16() -> None:
    assert run(0.01, 1024, accumulate="native")[0] == 4.0


@pytest.mark.parametrize(
    ("rows", "auto", "policy"), [(8, 0, "auto"), (9, 4, "auto"), (2, 4, "fp32"), (1, 0, "fp32"), (99, 0, "native")]
)
def test_when_float32_is_used(rows: int, auto: int, policy: Any) -> None:
    assert run(1.0, rows, accumulate=policy)[1].accumulator_bytes == auto


@pytest.mark.parametrize("dtype", LOW)
def test_the_bytes_are_those_of_the_buffers(dtype: torch.dtype) -> None:
    out = run(1.0, 9, model=OneWeight(dtype, size=1000))[1]
    assert out.accumulator_bytes == 4000
    assert out.to_dict()["accumulator_bytes"] == 4000


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch (2.6 is one) has no grad_dtype")
def test_a_gradient_has_the_precision_that_its_parameter_asks_for() -> None:
    model = OneWeight()
    model.w.grad_dtype = torch.float32
    batch = torch.full((513, 1), 513 * 2.0**-8, dtype=torch.bfloat16)
    anybatch.backward(model, mean, batch, micro_batch_size=1, verify="off")
    assert model.w.grad is not None
    assert model.w.grad.dtype is torch.float32
    assert model.w.grad.item() == 513 * 2.0**-8  # which bfloat16 would round


def test_float32_parameters_take_no_buffers() -> None:
    assert run(1.0, 99, model=OneWeight(torch.float32), accumulate="fp32")[1].accumulator_bytes == 0


@pytest.mark.parametrize("loss_fn", [mean, total])
def test_a_gradient_that_was_there_is_added_once(loss_fn: Any) -> None:
    model = OneWeight()
    model.w.grad = held = torch.full_like(model.w, 4.0)
    gradient, _ = run(2.0**-8, 512, loss_fn, model)
    assert gradient == 6.0
    assert model.w.grad is held


def test_a_step_tells_the_bytes_too() -> None:
    model = OneWeight()
    step = anybatch.TrainStep(
        model, mean, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=1, verify="off"
    )
    out = step(torch.ones(512, 1, dtype=torch.bfloat16) * 2)
    assert out.accumulator_bytes == 4
    assert model.w.item() == -2.0


def test_evaluation_takes_no_buffers() -> None:
    model = OneWeight()
    step = anybatch.TrainStep(model, mean, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=1)
    assert step.evaluate(torch.ones(99, 1, dtype=torch.bfloat16)).accumulator_bytes == 0


class Mixed(nn.Module):
    """A trunk in bfloat16 under a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16).bfloat16()
        self.unused = nn.Linear(2, 2).bfloat16()
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.trunk(x.to(self.trunk.weight.dtype))).to(self.head.weight.dtype))  # type: ignore[no-any-return]


def class_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def class_total(model: Any, batch: Any) -> Mean:
    return Mean(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


@pytest.mark.parametrize("loss_fn", [class_loss, class_total])
@pytest.mark.parametrize("rows", [5, 40])
def test_models_of_mixed_precision(loss_fn: Any, rows: int) -> None:
    model = Mixed()
    batch = {"x": torch.randn(rows, 8), "y": torch.randint(0, 3, (rows,))}
    exact, losses = reference.whole_gradients(reference.as_float64(model), class_loss, in_float64(batch))
    whole, _ = reference.whole_gradients(model, class_loss, batch)
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=1)
    found = reference.gradients_of(model)
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == [torch.bfloat16] * 2 + [
        torch.float32
    ] * 2
    assert out.accumulator_bytes == (4 * (8 * 16 + 16) if rows > 8 else 0)
    assert reference.distance(found, exact) <= 2 * reference.distance(whole, exact) + 2.0**-8 * reference.norm(exact)
    assert out.loss == pytest.approx(losses["loss"], rel=0.01)


def test_float32_accumulation_is_nearer_to_the_truth() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    batch = {"x": torch.randn(512, 16).bfloat16(), "y": torch.randint(0, 4, (512,))}
    exact, _ = reference.whole_gradients(reference.as_float64(model), class_loss, in_float64(batch))
    errors = {}
    for policy in ("native", "auto"):
        reference.clear(model)
        anybatch.backward(model, class_loss, batch, micro_batch_size=1, accumulate=policy, verify="off")
        errors[policy] = reference.distance(reference.gradients_of(model), exact) / reference.norm(exact)
    assert errors["auto"] < 2.0**-8 < 0.02 < errors["native"]


def test_a_scaled_sum_over_many_items_stays_in_the_range_of_float16() -> None:
    model = OneWeight(torch.float16)
    batch = torch.full((64, 1), 2.0, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def loss_fn(model: Any, batch: torch.Tensor) -> Mean:
        return Mean(model(batch).sum() * 1000.0, 1000 * len(batch))

    anybatch.backward(model, loss_fn, batch, micro_batch_size=1, scaler=scaler)
    assert model.w.grad is not None
    assert model.w.grad.item() == 2.0 * 2.0**14


@pytest.mark.parametrize("size", [1, 4, None])
@pytest.mark.parametrize("kind", [int, float, torch.tensor])
@pytest.mark.parametrize("count", [anybatch.count_samples, "forward", {"loss": len}])
def test_every_loss_is_scaled_once(size: int | None, kind: Any, count: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = OneWeight(torch.float32)
    batch = torch.arange(6.0)[:, None]

    def mean_of(model: Any, batch: torch.Tensor) -> Mean:
        return Mean(model(batch).sum(), kind(len(batch)))

    for loss_fn in (mean, mean_of):
        model.w.grad = None
        anybatch.backward(model, loss_fn, batch, micro_batch_size=size, scaler=scaler, count=count)
        assert model.w.grad is not None
        assert model.w.grad.item() == pytest.approx(2.5 * 256, rel=1e-6)


# Autocast.


@pytest.mark.parametrize("make", MODELS[:2])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [1, 3, None])
def test_autocast_is_as_near_as_the_whole_batch_under_autocast(make: Any, dtype: torch.dtype, size: int | None) -> None:
    model, loss_fn, batch = make()
    exact, _ = reference.whole_gradients(reference.as_float64(model), loss_fn, in_float64(batch))
    seen: list[torch.dtype] = []

    def watched(model: Any, batch: Any) -> Any:
        seen.append(model[0](batch["x"]).dtype)
        return loss_fn(model, batch)

    with torch.autocast("cpu", dtype):
        loss = loss_fn(model, batch)
    loss.backward()
    whole = reference.gradients_of(model)
    reference.clear(model)
    out = anybatch.backward(model, watched, batch, micro_batch_size=size, autocast=dtype)
    assert set(seen) == {dtype}
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    noise = torch.finfo(dtype).eps * reference.norm(exact)
    assert reference.distance(reference.gradients_of(model), exact) <= 2 * reference.distance(whole, exact) + 2 * noise
    assert out.loss == pytest.approx(loss.item(), rel=4 * torch.finfo(dtype).eps)
    if size is None:
        reference.assert_bitwise(reference.gradients_of(model), whole)


@pytest.mark.parametrize("size", [1, 3, None])
def test_float16_with_its_own_scaler(size: int | None) -> None:
    model, loss_fn, batch = MODELS[0]()
    exact, _ = reference.whole_gradients(reference.as_float64(model), loss_fn, in_float64(batch))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=size, autocast=torch.float16
    )
    out = step(batch)
    assert out.skipped == ""
    moved: reference.Gradients = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
    assert reference.distance(moved, exact) <= 0.01 * reference.norm(exact)
    assert reference.distance(reference.gradients_of(model), moved) <= 1e-5 * reference.norm(moved)  # unscaled


def test_nothing_of_autocast_stays_on() -> None:
    model, loss_fn, batch = MODELS[0]()
    anybatch.backward(model, loss_fn, batch, micro_batch_size=2, autocast=torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")
    assert model(batch["x"]).dtype is torch.float32


def test_a_generator_yields_under_autocast_and_its_backward_runs_outside_of_it() -> None:
    model, loss_fn, batch = MODELS[0]()
    kind = next(model.parameters()).device.type
    inside: list[bool] = []
    outside: list[bool] = []

    def yielding(model: Any, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        loss.register_hook(lambda _: outside.append(torch.is_autocast_enabled(kind)))
        inside.append(torch.is_autocast_enabled(kind))
        yield loss
        inside.append(torch.is_autocast_enabled(kind))

    anybatch.backward(model, yielding, batch, micro_batch_size=4, autocast=torch.bfloat16)
    assert inside == [True] * 4
    assert outside == [False] * 2


def test_a_leaf_beside_the_model_is_scaled_as_its_parameters_are() -> None:
    """A Mean is divided by its count at the end; what is summed in float32 and what is not, both."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.bfloat16)
    beside = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    batch = torch.randint(-3, 4, (12, 4)).to(torch.bfloat16)

    def loss_fn(model: Any, batch: torch.Tensor) -> Mean:
        return Mean((model(batch) * beside).float().square().sum(), 3 * len(batch))

    anybatch.backward(model, loss_fn, batch, micro_batch_size=1)
    assert beside.grad is not None
    whole = loss_fn(model, batch)
    (expected,) = torch.autograd.grad(whole.total / whole.count, beside)
    assert float(beside.grad) == pytest.approx(float(expected), rel=0.02)
