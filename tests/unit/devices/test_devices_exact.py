"""Several devices in one process: the gradient of the whole batch, however the samples and counts are spread."""

import copy
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import anybatch
from anybatch import Mean
from device_models import (
    THREE,
    TWO,
    batch_of,
    cross_entropy,
    devices_of,
    small,
    step_of,
    weights_of,
)
from reference import (
    RELATIVE_FLOAT64,
    assert_bitwise,
    assert_float32,
    assert_float64,
    assert_value64,
    gradients_of,
    whole_gradients,
)


def steps_alike(loss_fn: Any, batch: Any, devices: Any, model: torch.nn.Module | None = None, **options: Any) -> Any:
    """Asserts gradient and losses in float64 against the whole batch; gives the result."""
    model = model or small()
    expected, losses = whole_gradients(model, loss_fn, batch)
    step = step_of(model, loss_fn, devices=devices, **options)
    for _ in range(2):  # one micro-batch at a time, then side by side
        before = [p.detach().clone() for p in model.parameters()]
        out = step(batch)
        assert_float64(gradients_of(model), expected)
        for name, value in losses.items():
            assert_value64(out.losses[name], value)
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
    return out


@hypothesis.given(
    rows=st.integers(1, 17), size=st.one_of(st.none(), st.integers(1, 9)), count=st.integers(2, 4), seed=st.integers(0)
)
@hypothesis.settings(max_examples=40)
def test_uneven_sizes_and_counts_give_the_gradient_of_the_whole_batch(
    rows: int, size: int | None, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    batch = batch_of(rows, seed=seed % 2**32)
    batch["weight"] = torch.randint(0, 3, (rows,), generator=generator)
    batch["weight"][int(torch.randint(rows, (1,), generator=generator))] = 1

    def loss_fn(model: Any, batch: Any) -> Any:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * batch["weight"]
        return Mean(each.sum(), batch["weight"].sum())

    steps_alike(loss_fn, batch, ["cpu"] * count, micro_batch_size=size)


def test_counts_of_a_mapping_and_losses_by_name() -> None:
    batch = batch_of(11)
    batch["mask"] = torch.arange(11) % 3 == 0

    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        kept = out[batch["mask"]]
        square = kept.square().sum() / max(1, 3 * len(kept))
        return {"label": F.cross_entropy(out, batch["y"]), "square": square}

    count = {"label": anybatch.count_samples, "square": lambda batch: batch["mask"].sum()}
    steps_alike(loss_fn, batch, THREE, micro_batch_size=2, count=count)


def test_yielded_losses_and_a_cut() -> None:
    class Trunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.trunk = torch.nn.Linear(4, 5).double()
            self.heads = torch.nn.ModuleList(torch.nn.Linear(5, 1).double() for _ in range(3))

    def loss_fn(model: Any, batch: Any) -> Any:
        with anybatch.cut(model.trunk(batch["x"]).tanh()) as features:
            for index, head in enumerate(model.heads):
                yield f"head{index}", head(features).square().mean()

    def whole(model: Any, batch: Any) -> Any:
        features = model.trunk(batch["x"]).tanh()
        return {f"head{i}": head(features).square().mean() for i, head in enumerate(model.heads)}

    model, batch = Trunk(), batch_of(9)
    expected, _ = whole_gradients(model, whole, batch)
    step_of(model, loss_fn, devices=TWO, micro_batch_size=2)(batch)
    assert_float64(gradients_of(model), expected)


def test_means_that_only_the_forward_counts() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        chosen = (batch["x"][:, 0] > 0).double()
        first = Mean((F.cross_entropy(out, batch["y"], reduction="none") * chosen).sum(), chosen.sum())
        return {"chosen": first, "all": out.square().mean()}

    steps_alike(loss_fn, batch_of(13), TWO, micro_batch_size=3, count="forward")


@pytest.mark.parametrize("found", [[1, 1, 0, 0], [0, 0, 1, 1]])
def test_a_mean_without_gradient_on_one_device_only(found: list[int]) -> None:
    batch = batch_of(4)
    batch["found"] = torch.tensor(found)

    def loss_fn(model: Any, batch: Any) -> Any:
        kept = model(batch["x"][batch["found"] == 1])
        total = kept.square().sum() if len(kept) else torch.zeros((), dtype=torch.float64)
        return Mean(total, len(batch["x"]))

    steps_alike(loss_fn, batch, TWO)


def test_means_that_stand_alone_on_each_device_are_refused() -> None:
    """Each device sees one unknown count; together they are two, whose weights nobody knows."""

    def loss_fn(model: Any, batch: Any) -> Any:
        name = "even" if int(batch["number"][0]) % 2 == 0 else "odd"
        return {name: Mean(model(batch["x"]).square().sum(), len(batch["x"]))}

    batch = {**batch_of(2), "number": torch.arange(2)}
    model = small()
    with pytest.raises(anybatch.LossError, match="only the forward pass knows"):
        step_of(model, loss_fn, devices=TWO)(batch)


def test_metrics_and_outputs_are_joined_in_the_order_of_the_batch() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        right = (out.argmax(1) == batch["y"]).sum()
        return F.cross_entropy(out, batch["y"]), {"out": out, "right": Mean(right, len(out)), "x": batch["x"]}

    model, batch = small(), batch_of(11)
    expected = step_of(copy.deepcopy(model), loss_fn, micro_batch_size=2)(batch).metrics
    out = step_of(model, loss_fn, devices=THREE, micro_batch_size=2)(batch)
    assert torch.equal(out.metrics["x"], batch["x"])
    assert torch.equal(out.metrics["out"], expected["out"])
    assert out.metrics["right"] == expected["right"]


def test_metrics_that_differ_between_devices_are_refused() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        name = "first" if bool(batch["first"][0]) else "second"
        return cross_entropy(model, batch), {name: Mean(1, 1)}

    batch = {**batch_of(2), "first": torch.tensor([True, False])}
    with pytest.raises(anybatch.LossError, match="same metrics"):
        step_of(small(), loss_fn, devices=TWO)(batch)


def test_two_runs_are_bitwise_equal_and_the_first_step_is_as_any_other() -> None:
    runs = []
    for _ in range(2):
        model = small(dropout=0.3, dtype=torch.float32)
        torch.manual_seed(5)
        step = step_of(model, devices=THREE, micro_batch_size=2, clip_norm=1.0)
        values = [step(batch_of(13, dtype=torch.float32, seed=i)).loss for i in range(4)]
        runs.append((weights_of(model), values))
    assert_bitwise(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_side_by_side_is_bitwise_one_at_a_time() -> None:
    batch, found = batch_of(13, dtype=torch.float32), []
    for in_turns in (True, False):
        model = small(dtype=torch.float32)
        step = step_of(model, devices=TWO, micro_batch_size=3)
        devices_of(step).drew_on_host = {True: in_turns}
        step(batch)
        found.append(gradients_of(model))
    assert_bitwise(*found)


def test_one_micro_batch_is_bitwise_that_of_one_device() -> None:
    batch, found = batch_of(1, dtype=torch.float32), []
    for devices in (None, TWO):
        model = small(dtype=torch.float32)
        step_of(model, devices=devices)(batch)
        found.append(gradients_of(model))
    assert_bitwise(*found)


@pytest.mark.parametrize("devices", [TWO, {"cpu": 1, "cpu:0": 3}])
def test_float32_is_as_near_as_it_has_to_be(devices: Any) -> None:
    batch = batch_of(31, dtype=torch.float32)
    model = small(dtype=torch.float32)
    exact = copy.deepcopy(model).double()
    expected, _ = whole_gradients(exact, cross_entropy, {"x": batch["x"].double(), "y": batch["y"]})
    whole, _ = whole_gradients(model, cross_entropy, batch)
    out = step_of(model, devices=devices, micro_batch_size=3)(batch)
    assert_float32(gradients_of(model), whole, expected, out.micro_batches)


def test_low_precision_is_accumulated_in_float32_over_devices() -> None:
    """Two micro-batches are added in one order, here and there, and rounded once."""
    torch.manual_seed(0)
    batch, found = {"x": torch.randn(64, 4).bfloat16(), "y": torch.randint(0, 3, (64,))}, []
    for devices in (None, TWO):
        model = small(dtype=torch.bfloat16)
        out = step_of(model, devices=devices, micro_batch_size=32, accumulate="fp32")(batch)
        assert out.accumulator_bytes == 4 * sum(p.numel() for p in model.parameters())
        found.append(gradients_of(model))
    assert_bitwise(*found)


def test_speeds_share_the_micro_batches() -> None:
    model = small()
    step = step_of(model, devices={"cpu": 1, "cpu:0": 3})
    seen: list[tuple[bool, int]] = []

    def loss_fn(passed: Any, batch: Any) -> Any:
        seen.append((passed is model, len(batch["x"])))
        return cross_entropy(passed, batch)

    step.loss_fn = loss_fn
    step(batch_of(16))
    assert sum(rows for is_home, rows in seen if is_home) == 4
    assert sum(rows for is_home, rows in seen if not is_home) == 12


def test_every_device_gets_a_share_without_a_size() -> None:
    out = step_of(small(), devices=THREE)(batch_of(10))
    assert out.micro_batches == 3


def test_raw_samples_packed_by_cost() -> None:
    samples = [torch.ones(n, 4).double() * (i + 1) / 10 for i, n in enumerate([3, 9, 1, 4, 4, 7, 2])]

    def collate(found: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        return {"x": padded, "n": torch.tensor([len(one) for one in found])}

    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch["x"]).square().sum(-1)
        mask = torch.arange(out.shape[1])[None] < batch["n"][:, None]
        return Mean((out * mask).sum(), batch["n"].sum())

    model = small()
    expected, _ = whole_gradients(model, loss_fn, collate(samples))
    out = step_of(model, loss_fn, devices=TWO, collate=collate, cost=len)(samples)
    assert out.micro_batches >= 2
    assert_float64(gradients_of(model), expected)


def test_evaluate_and_windows() -> None:
    model, batch = small(), batch_of(12)
    step = step_of(model, devices=TWO)
    for _ in range(2):
        assert step.evaluate(batch).loss == pytest.approx(cross_entropy(model, batch).item(), rel=RELATIVE_FLOAT64)
    expected, _ = whole_gradients(model, cross_entropy, batch)
    parts = [{key: value[a : a + 5] for key, value in batch.items()} for a in (0, 5, 10)]
    (window,) = anybatch.windows(parts, batches=3)
    step(window)
    assert_float64(gradients_of(model), expected)


def test_lbfgs_several_optimizers_and_clipping() -> None:
    batch, norms, weights = batch_of(9), [], []
    for devices in (None, TWO):
        model = small()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        step = anybatch.TrainStep(model, cross_entropy, optimizer, devices=devices, micro_batch_size=2)
        step(batch)
        parts = [model[0].parameters(), model[3].parameters()]
        optimizers = [torch.optim.AdamW(part, lr=0.01) for part in parts]
        step = anybatch.TrainStep(model, cross_entropy, optimizers, devices=devices, micro_batch_size=2, clip_norm=0.1)
        norms.append(step(batch).grad_norm)
        weights.append(weights_of(model))
    assert_float64(weights[1], weights[0])
    assert norms[0] == pytest.approx(norms[1], rel=RELATIVE_FLOAT64)
