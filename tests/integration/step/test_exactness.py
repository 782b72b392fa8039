"""The gradient of a batch in pieces is the gradient of the whole batch: known numbers first, then whole models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import anybatch
import reference

Batch = dict[str, Any]


class OneWeight(nn.Module):
    """Multiplies by one weight, so that a sample's gradient is the sample itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def gradient_of(model: nn.Module) -> float:
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad.item()


# Ten tokens of gradient +1 in one sample, a hundred of -1 in the other.

TOKENS = {
    "x": torch.cat([torch.ones(1, 100), -torch.ones(1, 100)]).double(),
    "labels": torch.cat([torch.ones(10), torch.full((90,), -100), torch.ones(100)]).long().view(2, 100),
}


def token_mean(model: Any, batch: Batch) -> torch.Tensor:
    kept = batch["labels"] != -100
    return (model(batch["x"]) * kept).sum() / kept.sum()  # type: ignore[no-any-return]


def token_total(model: Any, batch: Batch) -> anybatch.Mean:
    kept = batch["labels"] != -100
    return anybatch.Mean((model(batch["x"]) * kept).sum(), kept.sum())


TOKEN_LOSSES: list[Any] = [
    pytest.param(token_mean, anybatch.count_tokens("labels"), id="count_tokens"),
    pytest.param(token_total, anybatch.count_samples, id="Mean"),
    pytest.param(token_total, "forward", id="Mean, counted in a forward"),
    pytest.param(
        lambda model, batch: {"a": token_mean(model, batch)}, {"a": anybatch.count_tokens("labels")}, id="map"
    ),
]


@pytest.mark.parametrize(("loss_fn", "count"), TOKEN_LOSSES)
@pytest.mark.parametrize("size", [1, 2, None])
def test_tokens_are_weighted_and_not_samples(loss_fn: Any, count: Any, size: int | None) -> None:
    model = OneWeight()
    out = anybatch.backward(model, loss_fn, TOKENS, micro_batch_size=size, count=count)
    assert gradient_of(model) == pytest.approx((10 - 100) / 110, rel=1e-12)
    assert out.count == 110


def test_a_mean_of_means_would_have_been_wrong() -> None:
    model = OneWeight()
    for i in range(2):
        (token_mean(model, {name: leaf[i : i + 1] for name, leaf in TOKENS.items()}) / 2).backward()
    assert gradient_of(model) == 0


@pytest.mark.parametrize(("loss_fn", "count"), TOKEN_LOSSES)
def test_tokens_of_random_lengths_at_every_split(loss_fn: Any, count: Any) -> None:
    model = OneWeight()
    for rows in (1, 3, 7):
        batch: Batch = {"x": torch.randn(rows, 20, dtype=torch.float64), "labels": torch.randint(0, 2, (rows, 20))}
        batch["labels"] = torch.where(torch.arange(20) < torch.randint(1, 21, (rows, 1)), batch["labels"], -100)
        (expected,), _ = reference.whole_gradients(model, token_mean, batch)
        assert expected is not None
        for size in range(1, rows + 1):
            reference.clear(model)
            anybatch.backward(model, loss_fn, batch, micro_batch_size=size, count=count)
            assert abs(gradient_of(model) - expected.item()) <= 1e-12 * abs(expected.item())


@pytest.mark.parametrize("size", [*range(1, 11), None])
def test_an_uneven_last_micro_batch(size: int | None) -> None:
    model = OneWeight()
    batch = torch.arange(1, 11).double()
    out = anybatch.backward(model, lambda model, batch: model(batch).mean(), batch, micro_batch_size=size)
    assert gradient_of(model) == pytest.approx(5.5, rel=1e-12)
    assert out.micro_batches == -(-10 // (size or 10))


def test_equal_weights_would_have_been_wrong() -> None:
    parts = torch.arange(1, 11).double().split(4)
    assert sum(part.mean().item() for part in parts) / 3 == pytest.approx(6.1667, abs=1e-4)


# One of four micro-batches has no valid target.


def masked(empty: tuple[int, ...]) -> Batch:
    labels = torch.randint(0, 5, (8, 6))
    labels[:, 4:] = -100
    for index in empty:
        labels[2 * index : 2 * index + 2] = -100
    return {"x": torch.randn(8, 6, 3, dtype=torch.float64), "labels": labels}


def token_cross_entropy(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["labels"])  # over no token this is NaN


def summed_cross_entropy(model: Any, batch: Batch) -> anybatch.Mean:
    total = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["labels"], reduction="sum")
    return anybatch.Mean(total, (batch["labels"] != -100).sum())


def summed_with_an_integer(model: Any, batch: Batch) -> anybatch.Mean:
    mean = summed_cross_entropy(model, batch)
    return anybatch.Mean(mean.total, int(mean.count))


def constant_over_nothing(model: Any, batch: Batch) -> anybatch.Mean:
    mean = summed_cross_entropy(model, batch)
    return mean if int(mean.count) else anybatch.Mean(torch.zeros((), dtype=torch.float64), mean.count)


MASKED_LOSSES: list[Any] = [
    pytest.param(token_cross_entropy, anybatch.count_tokens("labels"), id="mean"),
    pytest.param(summed_cross_entropy, anybatch.count_samples, id="Mean"),
    pytest.param(summed_cross_entropy, "forward", id="Mean, counted in a forward"),
    pytest.param(summed_with_an_integer, anybatch.count_samples, id="Mean over an int"),
    pytest.param(summed_with_an_integer, "forward", id="Mean over an int, counted in a forward"),
    pytest.param(constant_over_nothing, anybatch.count_samples, id="Mean without a gradient over nothing"),
    pytest.param(constant_over_nothing, "forward", id="Mean without a gradient over nothing, counted in a forward"),
]


@pytest.mark.parametrize(("loss_fn", "count"), MASKED_LOSSES)
@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_micro_batch_without_any_target(loss_fn: Any, count: Any, empty: int) -> None:
    model, batch = nn.Linear(3, 5).double(), masked((empty,))
    reference.assert_exact_at_every_size(model, loss_fn, batch, 8, whole_loss_fn=token_cross_entropy, count=count)
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=2, count=count)
    assert (out.count, out.micro_batches) == (24, 4)


@pytest.mark.parametrize(("loss_fn", "count"), MASKED_LOSSES)
@pytest.mark.parametrize("size", [2, None])
def test_no_target_in_the_whole_batch(loss_fn: Any, count: Any, size: int | None) -> None:
    model, batch = nn.Linear(3, 5).double(), masked((0, 1, 2, 3))
    before = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient.clone()
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=size, count=count)
    assert (out.loss, out.count) == (0.0, 0)
    reference.assert_bitwise(reference.gradients_of(model), list(before))


@pytest.mark.parametrize(("loss_fn", "count"), MASKED_LOSSES)
def test_no_target_in_the_whole_batch_is_a_skipped_step(loss_fn: Any, count: Any) -> None:
    model = nn.Linear(3, 5).double()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=2, count=count, scheduler=scheduler)
    nothing, something = masked((0, 1, 2, 3)), masked((1,))
    before = reference.everything(model, optimizer, with_gradients=False)
    out = step(nothing)
    assert "count" in out.skipped
    assert (out.loss, out.count, step.updates, step.skipped, step.samples) == (0.0, 0, 0, 1, 0)
    assert scheduler.last_epoch == 0
    reference.assert_unchanged(reference.everything(model, optimizer, with_gradients=False), before)
    out = step(something)
    assert (out.skipped, out.count, step.updates, step.samples, scheduler.last_epoch) == ("", 24, 1, 8, 1)


# Whole models.


class Transformer(nn.Module):
    """Two causal layers; the output shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), dtype=self.out.weight.dtype)
        hidden: torch.Tensor = self.layers(self.embed(tokens), mask=mask, is_causal=True)
        return self.out(hidden)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """One cell that is used twice, on sequences of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, sequences: PackedSequence) -> torch.Tensor:
        _, (hidden, _) = self.lstm(sequences)
        return self.head(self.head(hidden[-1]) @ torch.ones(2, 4, dtype=hidden.dtype))  # type: ignore[no-any-return]


def language_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["tokens"])[:, :-1]
    return F.cross_entropy(logits.reshape(-1, 11), batch["tokens"][:, 1:].reshape(-1), ignore_index=-100)


def class_loss(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mlp() -> tuple[nn.Module, Any, Batch]:
    net = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 4))
    return net, class_loss, {"x": torch.randn(7, 6), "y": torch.randint(0, 4, (7,))}


def cnn() -> tuple[nn.Module, Any, Batch]:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    return net, class_loss, {"x": torch.randn(7, 2, 6, 6), "y": torch.randint(0, 3, (7,))}


def transformer() -> tuple[nn.Module, Any, Batch]:
    return Transformer(), language_loss, {"tokens": torch.randint(0, 11, (7, 5))}


def recurrent() -> tuple[nn.Module, Any, Batch]:
    sequences = [torch.randn(length, 3) for length in (4, 1, 5, 2, 2, 3, 6)]
    return (
        Recurrent(),
        class_loss,
        {"x": pack_sequence(sequences, enforce_sorted=False), "y": torch.randint(0, 2, (7,))},
    )


MODELS = [mlp, cnn, transformer, recurrent]


def in_float64(batch: Batch) -> Batch:
    return {
        name: leaf if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() else leaf.double()
        for name, leaf in batch.items()
    }


@pytest.mark.parametrize("make", MODELS)
def test_models_at_every_size_in_float64(make: Callable[[], tuple[nn.Module, Any, Batch]]) -> None:
    model, loss_fn, batch = make()
    reference.assert_exact_at_every_size(model.double(), loss_fn, in_float64(batch), 7)


@pytest.mark.parametrize("make", MODELS)
def test_models_at_every_size_in_float32(make: Callable[[], tuple[nn.Module, Any, Batch]]) -> None:
    model, loss_fn, batch = make()
    exact, _ = reference.whole_gradients(reference.as_float64(model), loss_fn, in_float64(batch))
    whole, _ = reference.whole_gradients(model, loss_fn, batch)
    for size in range(1, 8):
        reference.clear(model)
        out = anybatch.backward(model, loss_fn, batch, micro_batch_size=size)
        reference.assert_float32(reference.gradients_of(model), whole, exact, out.micro_batches)


@pytest.mark.parametrize("make", MODELS)
def test_the_whole_batch_is_bitwise_plain_autograd(make: Callable[[], tuple[nn.Module, Any, Batch]]) -> None:
    model, loss_fn, batch = make()
    loss = loss_fn(model, batch)
    loss.backward()
    expected = reference.gradients_of(model)
    reference.clear(model)
    out = anybatch.backward(model, loss_fn, batch)
    reference.assert_bitwise(reference.gradients_of(model), expected)
    assert out.loss == loss.item()


def test_a_step_in_pieces_is_bitwise_the_loop_written_by_hand() -> None:
    model, loss_fn, _ = mlp()
    twin = mlp()[0]
    twin.load_state_dict(model.state_dict())
    batches = [{"x": torch.randn(n, 6), "y": torch.randint(0, 4, (n,))} for n in (7, 7, 5)]
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.AdamW(model.parameters(), lr=0.1), micro_batch_size=3, clip_norm=0.1
    )
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for batch in batches:
        step(batch)
        optimizer.zero_grad()
        for x, y in zip(batch["x"].split(3), batch["y"].split(3), strict=True):
            (loss_fn(twin, {"x": x, "y": y}) * (len(x) / len(batch["x"]))).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
    reference.assert_bitwise(list(model.parameters()), list(twin.parameters()))
