"""The noise scale of a training step: what it sees is each micro-batch's gradient.

How it could be silently wrong: a gradient counted twice or not at all (shared parameters, cuts, several backwards),
scaled by a GradScaler or by weights, clipped, or a retry after running out of memory counted twice.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import NoiseScale
from anybatch.loss.differentiation import Differentiation
from anybatch.loss.sums import Sums
from anybatch.records.plans import PlanRow
from anybatch.scaling.noiseestimates import Estimate, estimate
from noise_models import (
    ROWS,
    SIZE,
    Loss,
    Network,
    as_mean,
    batch_of,
    checkpointed,
    of_tokens,
    plain,
    rows_of,
    several,
    tokens_of,
    with_gradient_inside,
    yielded,
    yielded_behind_a_cut,
)


def truth(model: nn.Module, loss_fn: Loss, batch: Any, sizes: list[int], count: Callable[[Any], int]) -> Estimate:
    """By autograd alone: the gradient of each micro-batch, and their mean."""
    parts, start = [], 0
    for size in sizes:
        parts.append({name: tensor[start : start + size] for name, tensor in batch.items()})
        start += size
    gradients = []
    for part in parts:
        result = loss_fn(model, part)
        losses = [*result.values()] if isinstance(result, dict) else [result]
        total = sum(loss.total / loss.count if isinstance(loss, anybatch.Mean) else loss for loss in losses)
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(total, wanted, allow_unused=True)
        gradients.append(torch.cat([g.to_dense().double().flatten() for g in found if g is not None]))
    counts = [count(part) for part in parts]
    whole = sum(n / sum(counts) * g for n, g in zip(counts, gradients, strict=True))
    return estimate([g.square().sum().item() for g in gradients], counts, whole.square().sum().item())  # type: ignore[union-attr]


def measured(model: nn.Module, loss_fn: Loss, batch: Any, **options: Any) -> NoiseScale:
    """One step, measured."""
    keep = options.pop("keep_gradients", False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    step = anybatch.TrainStep(model, loss_fn, optimizer, **{"micro_batch_size": SIZE, **options})
    noise = NoiseScale(step, keep_gradients=keep)
    step(batch)
    assert noise.measurements == 1
    return noise


def assert_measures(noise: NoiseScale, expected: Estimate, tolerance: float = 1e-9) -> None:
    assert noise.trace == pytest.approx(expected.trace, rel=tolerance)
    assert noise.signal == pytest.approx(expected.signal, rel=tolerance, abs=tolerance * abs(expected.trace))


CASES: dict[str, tuple[Loss, Loss, Callable[[Any], int], dict[str, Any]]] = {
    "plain": (plain, plain, rows_of, {}),
    "clipped": (plain, plain, rows_of, {"clip_norm": 1e-3}),
    "tokens": (of_tokens, of_tokens, tokens_of, {"count": anybatch.count_tokens("labels")}),
    "a Mean, counted before": (as_mean, of_tokens, tokens_of, {"count": "forward"}),
    "a Mean with a count": (as_mean, of_tokens, tokens_of, {"count": {"loss": anybatch.count_tokens("labels")}}),
    "several losses": (several, several, rows_of, {}),
    "yielded behind a cut": (yielded_behind_a_cut, several, rows_of, {}),
    "yielded, kept": (yielded, several, rows_of, {"keep_gradients": True}),
    "plain, kept": (plain, plain, rows_of, {"keep_gradients": True}),
    "a gradient in the loss": (with_gradient_inside, with_gradient_inside, rows_of, {"verify": "off"}),
    "a gradient in the loss, kept": (
        with_gradient_inside,
        with_gradient_inside,
        rows_of,
        {"keep_gradients": True, "verify": "off"},
    ),
    "checkpointed": (checkpointed, plain, rows_of, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_measured_is_what_autograd_gives(case: str) -> None:
    loss_fn, whole, count, options = CASES[case]
    model, batch = Network(), batch_of()
    expected = truth(copy.deepcopy(model), whole, batch, [8, 8, 6], count)
    noise = measured(model, loss_fn, batch, **options)
    assert_measures(noise, expected)
    assert noise.unit == ("items" if count is tokens_of else "samples")


def test_a_sparse_gradient_is_measured() -> None:
    model = Network()
    model.words = nn.Embedding(9, 4, sparse=True).double()
    batch = batch_of()
    assert_measures(measured(copy.deepcopy(model), plain, batch), truth(model, plain, batch, [8, 8, 6], rows_of))


def test_inputs_restrict_what_is_measured() -> None:
    model, batch = Network(), batch_of()
    alone = copy.deepcopy(model).requires_grad_(False)
    alone.trunk.weight.requires_grad_()
    expected = truth(alone, plain, batch, [8, 8, 6], rows_of)
    optimizer = torch.optim.SGD([model.trunk.weight], lr=0.1)
    step = anybatch.TrainStep(model, plain, optimizer, micro_batch_size=SIZE, inputs=[model.trunk.weight])
    noise = NoiseScale(step)
    step(batch)
    assert_measures(noise, expected)


def test_losses_with_counts_of_their_own_are_counted_in_samples() -> None:
    def both(model: Any, batch: Any) -> dict[str, Any]:
        return {"tokens": of_tokens(model, batch), "rows": plain(model, batch)}

    counts = {"tokens": anybatch.count_tokens("labels"), "rows": anybatch.count_samples}
    noise = measured(Network(), both, batch_of(), count=counts)
    assert noise.unit == "samples"
    assert noise.trace is not None
    assert noise.trace > 0


def test_a_window_is_measured_over_its_batches() -> None:
    model = Network()
    batches = [batch_of(rows) for rows in (5, 9, 2)]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    expected = truth(copy.deepcopy(model), plain, whole, [5, 9, 2], rows_of)
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.1))
    noise = NoiseScale(step)
    for window in anybatch.windows(batches, batches=3):
        step(window)
    assert_measures(noise, expected)


def test_over_time_is_measured_with_kept_gradients() -> None:
    model = nn.ModuleDict({"rnn": nn.GRU(3, 5, batch_first=True), "head": nn.Linear(5, 2)}).double()
    batch = {"x": torch.randn(ROWS, 12, 3).double(), "y": torch.randint(0, 2, (ROWS, 12))}

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        output, state = model["rnn"](chunk["x"], state)
        return F.cross_entropy(model["head"](output).flatten(0, 1), chunk["y"].flatten()), state

    def begin(model: Any, batch: Any) -> torch.Tensor:
        return torch.zeros(1, len(batch["x"]), 5, dtype=torch.float64)

    loss_fn = anybatch.OverTime(chunk_loss, begin, chunk=4)
    expected = truth(copy.deepcopy(model), lambda m, b: chunk_loss(m, b, begin(m, b))[0], batch, [8, 8, 6], rows_of)
    assert_measures(measured(model, loss_fn, batch, keep_gradients=True), expected)


def test_the_scale_of_a_grad_scaler_is_taken_out() -> None:
    model, batch = Network(torch.float32), batch_of()
    expected = truth(copy.deepcopy(model).double(), plain, batch, [8, 8, 6], rows_of)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    assert_measures(measured(model, plain, batch, scaler=scaler), expected, 1e-4)


@pytest.mark.parametrize("accumulate", ["fp32", "native"])
def test_low_precision_is_measured_in_float32(accumulate: str) -> None:
    model, batch = Network(torch.bfloat16), batch_of()
    expected = truth(copy.deepcopy(model).double(), plain, batch, [8, 8, 6], rows_of)
    assert_measures(measured(model, plain, batch, accumulate=accumulate), expected, 0.05)


def test_a_mean_whose_count_is_known_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Network(), batch_of()
    expected = truth(copy.deepcopy(model), of_tokens, batch, [8, 8, 6], tokens_of)
    plain_scale = Differentiation.closing_scale

    def noted(self: Differentiation) -> float | None:
        scale = plain_scale(self)
        self.sums.closing_scale = scale
        return scale

    if not hasattr(Sums(), "closing_scale"):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], 0.1)
        step = anybatch.TrainStep(twin, as_mean, optimizer, micro_batch_size=SIZE)
        noise = NoiseScale(step)
        with pytest.warns(anybatch.AnyBatchWarning, match="count='forward'"):
            step(batch)
        assert noise.measurements == 0
    monkeypatch.setattr(Differentiation, "closing_scale", noted)
    assert_measures(measured(model, as_mean, batch), expected)


def test_under_the_optimizations_of_a_plan_it_is_the_same() -> None:
    body = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(9, 6), *body, nn.Linear(6, 3)).double()
    batch = batch_of()

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    expected = truth(copy.deepcopy(model), loss_fn, batch, [8, 8, 6], tokens_of)
    row = PlanRow(8, 3, recompute=("1", "2"), offload=("3",), head="4", loss_chunks=2)
    options = {"plan": anybatch.Plan(row, samples=22), "count": anybatch.count_tokens("labels")}
    assert_measures(measured(model, loss_fn, batch, micro_batch_size=None, **options), expected)


def test_a_retry_after_running_out_of_memory_counts_once() -> None:
    def tight(model: Any, batch: Any) -> torch.Tensor:
        if len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, batch)

    model, batch = Network(), batch_of(14)
    expected = truth(copy.deepcopy(model), plain, batch, [4, 4, 4, 2], rows_of)
    step = anybatch.TrainStep(model, tight, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step, every=5)
    step(batch)
    assert noise.measurements == 1
    assert_measures(noise, expected)


def test_a_micro_batch_without_items_says_nothing() -> None:
    model, batch = Network(), batch_of()
    batch["labels"][8:16] = -100
    left = {name: torch.cat([tensor[:8], tensor[16:]]) for name, tensor in batch.items()}
    expected = truth(copy.deepcopy(model), of_tokens, left, [8, 6], tokens_of)
    assert_measures(measured(model, of_tokens, batch, count=anybatch.count_tokens("labels")), expected)


def test_norms_of_bfloat16_are_not_rounded_to_it() -> None:
    model = nn.Linear(8, 1, bias=False, dtype=torch.bfloat16)
    batch = torch.randint(-40, 40, (8, 8)).to(torch.bfloat16)
    sums = batch.double().view(4, 2, 8).sum(1)  # gradients of the sums, exact in bfloat16

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> anybatch.Mean:
        return anybatch.Mean(model(batch).sum().float(), 2 * len(batch))

    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2, accumulate="fp32",
        count={"loss": lambda batch: 2 * len(batch)},
    )  # fmt: skip
    noise = NoiseScale(step)
    step(batch)
    assert noise.trace is not None
    assert noise.signal is not None
    spread = noise.signal + noise.trace * 4 / 16  # the mean of the squared norms, whatever that of the whole is
    assert spread == pytest.approx(float((sums / 4).square().sum(1).mean()), rel=1e-6)


def test_many_small_and_some_large_parameters_are_all_seen() -> None:
    layers: list[nn.Module] = [nn.Embedding(9, 6)]
    layers += [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(70)]  # more than wait for each other
    model = nn.Sequential(*layers, nn.Linear(6, 3000), nn.Linear(3000, 3)).double()
    batch = batch_of()
    assert_measures(measured(copy.deepcopy(model), plain, batch), truth(model, plain, batch, [8, 8, 6], rows_of))


@pytest.mark.usefixtures("constant_times")
def test_batches_that_are_one_micro_batch_are_told_once_and_the_remedy_measures() -> None:
    model = Network()
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.01), memory="64MiB")
    noise = anybatch.NoiseScale(step, every=2)
    step(batch_of())
    with pytest.warns(anybatch.AnyBatchWarning, match="one.*memory= may choose so.*micro_batch_size=") as seen:
        step(batch_of())
    assert [one.filename for one in seen] == [__file__]
    for _ in range(4):  # and not again
        step(batch_of())
    assert "micro_batch_size=" in noise.advice
    assert noise.value is None
    noise.remove()
    rows = len(batch_of()["x"])
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch_size=rows // 2)
    noise = anybatch.NoiseScale(step, every=2)
    step(batch_of())
    assert noise.measurements == 1


# Whole batches.


def of_rows(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def rows_of_numbers(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 6).double(), "y": torch.arange(rows) % 3}


def halved(model: nn.Module, loss_fn: Loss, batch: Any, every: int, **options: Any) -> tuple[NoiseScale, list[int]]:
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    noise = NoiseScale(step, every=every, halves=True)
    return noise, [step(batch).micro_batches for _ in range(9)]


@pytest.mark.usefixtures("constant_times")
def test_a_batch_that_memory_leaves_whole_is_measured_as_two_halves_and_the_others_stay_whole() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(6, 3).double(), rows_of_numbers(22)
    noise, sizes = halved(model, of_rows, batch, 4, memory="1GiB")
    assert sizes == [1, 2, 1, 1, 1, 2, 1, 1, 1]
    assert noise.measurements == 2
    assert_measures(noise, truth(copy.deepcopy(model), of_rows, batch, [11, 11], rows_of))


def test_what_may_not_be_split_trains_on_as_one_and_is_told() -> None:
    torch.manual_seed(0)
    batch, model = rows_of_numbers(22), nn.Linear(6, 3).double()
    norm = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()

    def coupled(model: Any, batch: Any) -> torch.Tensor:
        total: torch.Tensor = of_rows(model, batch) + model(batch["x"]).square().mean().sqrt()
        return total

    for one, loss_fn in ((norm, of_rows), (model, coupled)):
        with pytest.warns(anybatch.AnyBatchWarning, match="measured nothing"):
            _, sizes = halved(one, loss_fn, batch, 4)
        assert set(sizes) == {1}
