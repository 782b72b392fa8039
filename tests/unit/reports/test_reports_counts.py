"""Public reports of wrong weights: the loop as it was reported, and the same batch with anybatch.

Each test has the hand-written loop of the report first and shows that it is wrong, then that ours is the whole batch's.
The number is that of the report in ``docs/reports.md``.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from reference import assert_float64, assert_value64, distance, gradients_of, norm, whole_gradients

Batch = dict[str, torch.Tensor]
TOKENS = anybatch.count_tokens("labels")


class Tagger(nn.Module):
    """A label for each token; the smallest model that tells weights of tokens apart."""

    def __init__(self, words: int = 16, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(tokens).tanh())
        return found


def texts(lengths: list[int], seed: int = 1) -> Batch:
    """Tokens padded to the longest; the labels of the padding are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 16, (len(lengths), max(lengths)), generator=generator)
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    return {"tokens": tokens, "labels": tokens.roll(1, 1).masked_fill(padding, -100)}


def token_mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parts(batch: Batch, size: int) -> list[Batch]:
    rows = len(batch["labels"])
    return [{name: value[at : at + size] for name, value in batch.items()} for at in range(0, rows, size)]


def by_hand(model: nn.Module, losses: Iterator[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient that a loop with a backward for each of these losses leaves."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return gradients_of(model)


def ours(model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, **options: Any) -> list[torch.Tensor | None]:
    model.zero_grad()
    anybatch.backward(model, loss_fn, batch, **options)
    return gradients_of(model)


def off(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> float:
    return distance(found, expected) / norm(expected)


def test_3_texts_of_very_different_lengths_one_at_a_time() -> None:
    model, batch = Tagger(), texts([1, 40, 3, 2, 30, 1, 5, 2])
    expected, _ = whole_gradients(model, token_mean, batch)
    loop = by_hand(model, (token_mean(model, part) / 8 for part in parts(batch, 1)))
    assert off(loop, expected) > 0.3
    assert_float64(ours(model, token_mean, batch, micro_batch_size=1, count=TOKENS), expected)


def test_4_the_loss_that_is_reported_does_not_grow_with_the_number_of_micro_batches() -> None:
    model, batch = Tagger(), texts([6] * 8)
    expected, losses = whole_gradients(model, token_mean, batch)
    summed = sum(token_mean(model, part).item() for part in parts(batch, 2))  # no division any more: four times as much
    assert summed > 3 * losses["loss"]
    out = anybatch.backward(model, token_mean, batch, micro_batch_size=2, count=TOKENS)
    assert_value64(out.loss, losses["loss"])
    assert_float64(gradients_of(model), expected)


class IgnoresItems(nn.Module):
    """A head that takes any keyword and drops the count that it is given, as dozens do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tagger()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return token_mean(self.body, {"tokens": tokens, "labels": labels})


def test_8_a_head_that_drops_the_count_that_it_is_given() -> None:
    model, batch = IgnoresItems(), texts([9, 2, 4, 9, 1, 7])

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        return model(**batch)  # type: ignore[no-any-return]

    expected, _ = whole_gradients(model, loss_fn, batch)
    items = TOKENS(batch)
    loop = by_hand(model, (model(**part, num_items_in_batch=items) for part in parts(batch, 1)))
    assert norm(loop) > 4 * norm(expected)  # six micro-batches, and nobody divides
    assert_float64(ours(model, loss_fn, batch, micro_batch_size=1, count=TOKENS), expected)
    remedy = anybatch.check(model, loss_fn, batch).reasons[0].remedy
    assert remedy == 'count=anybatch.count_tokens("labels")'


def policy_loss(model: Any, batch: Batch) -> torch.Tensor:
    """The mean over all generated tokens of advantage times log-probability (DAPO)."""
    chosen = model(batch["tokens"]).log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    mask = batch["labels"] != -100
    found: torch.Tensor = -(chosen * batch["advantages"][:, None] * mask).sum() / mask.sum()
    return found


@pytest.mark.parametrize("batches", [2, 4, 3])
def test_11_and_12_a_policy_loss_over_tokens_in_windows_of_any_number_of_batches(batches: int) -> None:
    model, whole = Tagger(), texts([3, 9, 2, 5, 8, 1])
    whole["advantages"] = torch.linspace(-1, 1, 6, dtype=torch.float64)
    loader = parts(whole, 2)  # three batches: 2 and 1 to a window, 3 of 4, all
    windows = list(anybatch.windows(loader, batches=batches))
    rows = [torch.arange(6)[2 * i * batches : 2 * (i + 1) * batches] for i in range(len(windows))]
    for window, chosen in zip(windows, rows, strict=True):
        logical = {name: value[chosen] for name, value in whole.items()}
        expected, _ = whole_gradients(model, policy_loss, logical)
        loop = by_hand(model, (policy_loss(model, part) / batches for part in parts(logical, 2)))
        if len(chosen) > 2 or batches > 1:
            assert off(loop, expected) > 0.05  # equal shares, and of a full window
        assert_float64(ours(model, policy_loss, window, count=TOKENS), expected)


def test_14_a_micro_batch_with_no_valid_target_is_no_nan() -> None:
    model, batch = Tagger(), texts([5, 3, 4, 6])
    batch["labels"][1] = -100
    expected, _ = whole_gradients(model, token_mean, batch)
    loop = [token_mean(model, part) / 4 for part in parts(batch, 1)]
    assert math.isnan(sum(loss.item() for loss in loop))
    assert off(by_hand(model, iter(loop)), expected) > 0.1
    out = anybatch.backward(model, token_mean, batch, micro_batch_size=1, count=TOKENS)
    assert math.isfinite(out.loss)
    assert_float64(ours(model, token_mean, batch, micro_batch_size=1, count=TOKENS), expected)


class TwoHeads(nn.Module):
    """Predicts the next token and the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.later = Tagger(), nn.Linear(6, 16).double()


def next_two(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    hidden = model.body.embed(batch["tokens"]).tanh()
    losses = {}
    for name, head, shift in (("next", model.body.head, 1), ("later", model.later, 2)):
        logits, labels = head(hidden)[:, :-shift], batch["labels"][:, shift:]
        losses[name] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return losses


def test_18_the_loss_of_a_second_head_is_not_scaled_by_the_count_of_the_first() -> None:
    model, batch = TwoHeads(), texts([9, 3, 6, 4, 8])
    expected, _ = whole_gradients(model, next_two, batch)

    def share(part: Batch) -> float:
        return float(anybatch.count_tokens("labels", shift=1)(part) / anybatch.count_tokens("labels", shift=1)(batch))

    loop = by_hand(model, (share(p) * torch.stack([*next_two(model, p).values()]).sum() for p in parts(batch, 2)))
    assert off(loop, expected) > 1e-3
    counts = {"next": anybatch.count_tokens("labels", shift=1), "later": anybatch.count_tokens("labels", shift=2)}
    assert_float64(ours(model, next_two, batch, micro_batch_size=2, count=counts), expected)


def test_19_a_loss_without_its_normaliser_is_said_to_be_a_sum() -> None:
    model, batch = Tagger(), texts([3, 5, 1, 2])

    def summed(model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    assert [reason.code for reason in anybatch.check(model, summed, batch).reasons] == ["sum"]

    def counted(model: Any, batch: Batch) -> anybatch.Mean:
        return anybatch.Mean(summed(model, batch), TOKENS(batch))

    expected, _ = whole_gradients(model, token_mean, batch)
    assert_float64(ours(model, counted, batch, micro_batch_size=1), expected)


class Experts(nn.Module):
    """Two experts and a router whose choices are to be balanced over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate = self.router(x).softmax(-1)
        chosen = F.one_hot(gate.argmax(-1), 2).to(gate.dtype) * gate
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return (chosen[..., None] * out).sum(1), gate


def balanced(outputs: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """The loss, and the product of how often an expert is chosen and its mean probability."""
    logits, gate = outputs
    often = F.one_hot(gate.argmax(-1), 2).to(gate.dtype).mean(0)
    return F.cross_entropy(logits, y) + 2 * (often * gate.mean(0)).sum()


def test_24_a_load_balancing_loss_sees_the_whole_batch_as_coupled() -> None:
    model = Experts()
    generator = torch.Generator().manual_seed(3)
    batch = {
        "x": torch.randn(10, 4, generator=generator, dtype=torch.float64),
        "y": torch.randint(3, (10,), generator=generator),
    }

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        return balanced(model(batch["x"]), batch["y"])

    expected, _ = whole_gradients(model, loss_fn, batch)
    assert off(ours(model, loss_fn, batch, micro_batch_size=3, verify="off"), expected) > 1e-3
    assert [reason.code for reason in anybatch.check(model, loss_fn, batch).reasons] == ["not-additive"]
    coupled = anybatch.Coupled(
        lambda model, batch: (*model(batch["x"]), batch["y"]), lambda model, found: balanced(found[:2], found[2])
    )
    assert_float64(ours(model, coupled, batch, micro_batch_size=3), expected)
