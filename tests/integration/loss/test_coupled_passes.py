"""Whatever keeps its graph and whatever runs again, the gradient is bitwise that of one pass over the micro-batches."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import anybatch
from coupled_losses import CASES, Batch, Case, Towers, by_hand, clip, run, samples, towers, views
from faults import different, facts
from reference import Gradients, assert_bitwise, assert_float64, distance, gradients_of

ROWS = 10
KEEPS = (0, 1, 2, 3, 4, 99)


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    rows = len(batch["image"])
    return [{key: value[at : at + size] for key, value in batch.items()} for at in range(0, rows, size)]


def noisy(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Draws from all three generators, and drops."""
    image, text = towers(model, batch)
    noise = random.random() + float(np.random.rand()) + float(np.random.randn()) + random.gauss(0, 1)
    return image + 0.1 * noise * torch.rand_like(image), F.dropout(text, 0.3)


def seeded(run_it: Callable[[], Gradients]) -> tuple[Gradients, tuple[Any, ...]]:
    """The gradient, and what the generators give next."""
    random.seed(5), np.random.seed(5)
    gradients = run_it()
    return gradients, (random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist())


@pytest.mark.parametrize("encode", [towers, views, noisy])
def test_bitwise_equal_to_one_pass_for_every_number_of_kept_graphs(encode: Any) -> None:
    model, batch = Towers(dropout=0.4), samples(ROWS)
    case = Case(encode, clip)
    expected, after = seeded(lambda: by_hand(case, model, micro_batches(batch, 3)))
    for keep in KEEPS:
        found, now = seeded(lambda: run(case.coupled(keep=keep), model, batch, 3))  # noqa: B023
        assert_bitwise(found, expected)
        assert now == after  # random numbers are drawn once


def test_bitwise_equal_to_one_graph_where_a_micro_batch_uses_each_parameter_once() -> None:
    model, batch = Towers(dropout=0.4), samples(ROWS)
    one = copy.deepcopy(model)
    torch.manual_seed(3)
    encoded = [towers(one, part) for part in micro_batches(batch, 3)]
    clip(one, (torch.cat([a for a, _ in encoded]), torch.cat([b for _, b in encoded]))).backward()
    for keep in (0, 2, 4):
        assert_bitwise(run(CASES["clip"].coupled(keep=keep), model, batch, 3), gradients_of(one))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(2, 9), size=st.integers(1, 9), keep=st.integers(0, 9), row_block=st.none() | st.integers(1, 9))
def test_bitwise_for_any_size(rows: int, size: int, keep: int, row_block: int | None) -> None:
    model, batch = Towers(dropout=0.4), samples(rows)
    expected = run(CASES["clip"].coupled(keep=99, row_block=row_block), model, batch, size)
    assert_bitwise(run(CASES["clip"].coupled(keep=keep, row_block=row_block), model, batch, size), expected)
    if row_block is None:
        assert_bitwise(expected, by_hand(CASES["clip"], model, micro_batches(batch, size)))


def test_without_replayed_random_numbers_it_would_be_another_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of schemes that run the encoder twice and forget the random state; here it does not stay silent."""
    from anybatch.tensors.randomness import RandomState

    model, batch = Towers(dropout=0.4), samples(ROWS)
    monkeypatch.setattr(RandomState, "restore", lambda _: None)
    with pytest.raises(anybatch.LossError, match=r"has different values when encode runs again"):
        run(CASES["clip"].coupled(), model, batch, 3)


def test_with_masks_by_sample_the_gradient_does_not_depend_on_the_split() -> None:
    def loss(model: Any, outputs: Any) -> Tensor:
        image, text = outputs
        return clip(model, (model.of_image(image), model.of_text(text)))

    model, batch = Towers(dropout=0.4), samples(ROWS)
    model.of_image, model.of_text = torch.nn.Dropout(0.2), torch.nn.Dropout(0.2)
    expected = run(anybatch.Coupled(towers, loss), model, batch, None, dropout="per-sample")
    for size in (1, 3, 5):
        for keep in (0, 2, 99):
            found = run(anybatch.Coupled(towers, loss, keep=keep), model, batch, size, dropout="per-sample")
            assert_float64(found, expected)


class Normalised(nn.Module):
    """Buffers that a forward changes: those of BatchNorm, of a spectral norm, and a counter that it computes with."""

    calls: Tensor
    large: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
        self.image = nn.Sequential(self.spectral, nn.Tanh(), self.norm, nn.Linear(6, 3))
        self.text = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("large", torch.zeros(300, 100))
        self.double()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.large += 0.01  # more than a small buffer, so that it is seen to change by its version
        return self.image(batch["image"]) * (1 + 0.1 * self.calls), self.text(batch["text"]) * (1 + self.large[0, 0])


@pytest.mark.parametrize("policy", ["ghost", "frozen"])
def test_buffers_change_once(policy: Any) -> None:
    batch = samples(ROWS)
    found = []
    for keep in (99, 0, 1, 2):
        model = Normalised()
        for _ in range(2):
            anybatch.backward(model, CASES["clip"].coupled(keep=keep), batch, micro_batch_size=4, batch_norm=policy)
        found.append(facts(model))
    assert not [name for other in found[1:] for name in different(found[0], other)]
    assert float(found[0]["buffer calls"]) == 6
    assert int(found[0]["buffer norm.num_batches_tracked"]) == (2 if policy == "ghost" else 0)


def test_statistics_are_those_of_the_whole_batch_in_one_micro_batch() -> None:
    batch, kept = samples(ROWS), []
    for keep in (0, 1):
        model, whole = Normalised(), Normalised()
        anybatch.backward(model, CASES["clip"].coupled(keep=keep), batch)
        clip(whole, towers(whole, batch)).backward()
        for (name, one), other in zip(model.named_buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
        assert_float64(gradients_of(model), gradients_of(whole))
        kept.append(facts(model))
    assert not different(*kept)


def test_training_batch_norm_is_not_split_by_default() -> None:
    with pytest.raises(anybatch.NotSplittable, match="norm"):
        anybatch.backward(Normalised(), CASES["clip"].coupled(), samples(ROWS), micro_batch_size=4)


def test_autocast() -> None:
    torch.manual_seed(1)
    model, batch = Towers(dropout=0.4).float(), {key: value.float() for key, value in samples(ROWS).items()}
    one = copy.deepcopy(model)
    torch.manual_seed(3)
    encoded = []
    for part in micro_batches({**batch, "label": samples(ROWS)["label"]}, 3):
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            encoded.append(towers(one, part))
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        loss = clip(one, (torch.cat([a for a, _ in encoded]), torch.cat([b for _, b in encoded])))
    loss.backward()
    for keep in KEEPS:
        found = run(CASES["clip"].coupled(keep=keep), model, batch, 3, autocast=torch.bfloat16)
        assert_bitwise(found, gradients_of(one))
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):  # the user's own, around everything
        for keep in KEEPS:
            assert_bitwise(run(CASES["clip"].coupled(keep=keep), model, batch, 3), gradients_of(one))


def test_a_scaler() -> None:
    model, batch = Towers(dropout=0.4), samples(ROWS)
    expected = run(CASES["clip"].coupled(keep=99), model, batch, 3)
    for keep in KEEPS:
        for row_block in (None, 4):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            coupled = CASES["clip"].coupled(keep=keep, row_block=row_block)
            found = run(coupled, model, batch, 3, scaler=scaler)
            unscaled = [None if g is None else g / 1024 for g in found]
            assert_float64(unscaled, expected)
            if row_block is None:
                assert_bitwise(unscaled, expected)


def test_a_step_with_a_scaler_skips_an_overflow_once() -> None:
    def overflowing(model: Any, outputs: Any) -> Tensor:
        return clip(model, outputs) * (torch.inf if len(seen) == 1 else 1.0)

    for keep in (0, 2):
        seen: list[int] = []
        model = Towers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        step = anybatch.TrainStep(
            model, anybatch.Coupled(towers, overflowing, keep=keep), optimizer, micro_batch_size=3, scaler=scaler,
            clip_norm=1.0,
        )  # fmt: skip
        before = copy.deepcopy(model.state_dict())
        seen.append(1)
        assert step(samples(ROWS)).skipped
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert scaler.get_scale() == 32.0
        seen.append(2)
        assert not step(samples(ROWS)).skipped


@pytest.mark.parametrize("row_block", [None, 1])
def test_low_precision_is_accumulated_in_float32(row_block: int | None) -> None:
    torch.manual_seed(0)
    model = Towers().to(torch.bfloat16)
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in samples(24).items()}
    exact = copy.deepcopy(model).double()
    clip(exact, towers(exact, {key: value.double() for key, value in batch.items()})).backward()

    def error(**options: Any) -> float:
        found = run(CASES["clip"].coupled(keep=2, row_block=row_block), model, batch, 1, **options)
        return distance(found, gradients_of(exact))

    assert error(accumulate="fp32") < error(accumulate="native")
    assert error() == error(accumulate="fp32")  # 24 micro-batches and the loss are more than 8
    model.scale.grad = None
    out = anybatch.backward(model, CASES["clip"].coupled(row_block=row_block), batch, micro_batch_size=1)
    assert out.accumulator_bytes >= 4 * sum(p.numel() for p in model.parameters())


def test_an_encoder_that_is_compiled() -> None:
    model, batch = Towers(), samples(ROWS)
    expected = run(CASES["clip"].coupled(keep=99), model, batch, 5)
    compiled = copy.deepcopy(model)
    compiled.image = torch.compile(compiled.image, backend="aot_eager", dynamic=False)  # type: ignore[assignment]
    torch.manual_seed(3)
    anybatch.backward(compiled, CASES["clip"].coupled(keep=0), batch, micro_batch_size=5)
    assert_float64(gradients_of(compiled), expected)


def test_checkpoints_in_the_encoder() -> None:
    model, batch = Towers(dropout=0.4), samples(ROWS)

    def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        image = torch.utils.checkpoint.checkpoint(model.image, batch["image"], use_reentrant=False)
        return F.normalize(image, dim=1), F.normalize(model.text(batch["text"]), dim=1)

    expected = run(CASES["clip"].coupled(keep=99), model, batch, 3)
    for keep in (0, 2, 99):
        assert_bitwise(run(anybatch.Coupled(encode, clip, keep=keep), model, batch, 3), expected)


def test_a_plan_says_how_many_graphs_are_kept() -> None:
    from anybatch.loss.accumulate import Settings
    from anybatch.loss.coupling import CoupledPass
    from anybatch.loss.weights import Weights

    model, batch = Towers(), samples(8)
    parts = micro_batches(batch, 2)
    for kept, keep, expected in ((None, None, 1), (None, 3, 3), (2, 3, 2), (0, 3, 0), (9, None, 4)):
        calls: list[bool] = []

        def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
            calls.append(torch.is_grad_enabled())  # noqa: B023
            return towers(model, batch)

        run_once = CoupledPass(
            model, anybatch.Coupled(encode, clip, keep=keep), Weights([{"": 8}]), list(model.parameters()),
            Settings(torch.device("cpu"), kept_graphs=kept), samples=[range(i, i + 2) for i in range(0, 8, 2)],
        )  # fmt: skip
        run_once.run(parts, parts.__getitem__, lambda: batch)
        assert len(calls) == 4 + (4 - expected)
        model.zero_grad()
