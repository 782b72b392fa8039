"""Samples that meet in ``collate``, or that it pads: which of the two is said to be the cause.

How this could be silently wrong: the padding is blamed for numbers that are drawn, or the other way round, since the
batch that is padded as a whole was made in another precision or of other numbers than the one it is compared with.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anybatch
from anybatch.tensors.sideeffects import SideEffects

Order = Callable[[int], Any]


def orders() -> dict[str, Order]:
    own, python, of_torch = np.random.default_rng(5), random.Random(3), torch.Generator().manual_seed(2)
    return {
        "own": own.permutation,
        "numpy": np.random.permutation,
        "python": lambda rows: python.sample(range(rows), rows),
        "torch": torch.randperm,
        "generator": lambda rows: torch.randperm(rows, generator=of_torch),
    }


class Net(nn.Module):
    """Takes a mean over all positions, padding included, or reads the first two."""

    def __init__(self, *, is_mean: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.is_mean = nn.Linear(1, 4), nn.Linear(4, 1), is_mean

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.inner(x[..., None] if self.is_mean else x[:, :2, None]).tanh().mean(1))


def loss_fn(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) - batch["y"]).square().mean()


def samples(*, is_even: bool = False) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(4 if is_even else 2 + i % 5), torch.randn(1)) for i in range(9)]


def padded(own: list[Any]) -> dict[str, torch.Tensor]:
    x = nn.utils.rnn.pad_sequence([one for one, _ in own], batch_first=True)
    return {"x": (x - 0.1) / 0.3, "y": torch.stack([target for _, target in own])}


def told(model: nn.Module, raw: list[Any], collate: Any) -> str:
    """What ``check`` and the first step say of it, each in a process that begins alike."""
    np.random.seed(1)
    certificate = anybatch.check(model, loss_fn, raw, collate=collate, micro_batch_size=3)
    assert not certificate.exact
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), collate=collate, micro_batch_size=3
    )
    with pytest.raises(anybatch.NotSplittable) as got:
        step(raw)
    said = [one.message for one in certificate.reasons]
    assert len(said) == 1
    assert said[0] in str(got.value)
    return said[0]


def test_padding_is_told_where_collate_computes_in_floating_point() -> None:
    assert "length to which a batch is padded" in told(Net(is_mean=True), samples(), padded)


@pytest.mark.parametrize("kind", [*orders()])
@pytest.mark.parametrize("is_even", [True, False])
def test_samples_that_are_mixed_in_collate_by_a_draw_are_told(kind: str, is_even: bool) -> None:
    order = orders()[kind]

    def mixed(own: list[Any]) -> dict[str, torch.Tensor]:
        batch = padded(own)
        batch["x"] = 0.5 * batch["x"] + 0.5 * batch["x"][torch.as_tensor(order(len(own)))]
        return batch

    said = told(Net(is_mean=False), samples(is_even=is_even), mixed)
    assert "mixes samples with others of the batch" in said
    assert ("torch.randperm" if kind in ("torch", "generator") else "np.random.permutation") in said


def test_a_batch_that_is_normalised_in_collate_is_no_padding() -> None:
    def normalised(own: list[Any]) -> dict[str, torch.Tensor]:
        batch = padded(own)
        batch["x"] = batch["x"] - batch["x"].mean(0)
        return batch

    model, raw = Net(is_mean=False), samples(is_even=True)
    assert "normalising over the batch" in told(model, raw, normalised)
    batch = normalised(raw)  # as the remedies say: before the split, or without one
    assert anybatch.check(model, loss_fn, batch, micro_batch_size=3).exact
    out = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))(batch)
    assert out.micro_batches == 1


def test_samples_that_collate_knows_by_their_identity_are_checked() -> None:
    raw = [torch.randn(4) for _ in range(12)]
    targets = {id(one): float(i) for i, one in enumerate(raw)}

    def collate(own: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack(own), "y": torch.tensor([[targets[id(one)]] for one in own])}

    assert anybatch.check(nn.Linear(4, 1), loss_fn, raw, collate=collate, micro_batch_size=3).exact


def test_what_collate_raises_is_raised_by_check() -> None:
    def collate(own: list[Any]) -> Any:
        raise KeyError("no such word")

    with pytest.raises(KeyError, match="no such word"):
        anybatch.check(nn.Linear(4, 1), loss_fn, [torch.randn(4)] * 6, collate=collate, micro_batch_size=3)


class Data:
    """Has what is large, and what it counts in."""

    def __init__(self) -> None:
        self.values, self.calls = [torch.randn(300, 300) for _ in range(3)], torch.zeros((), dtype=torch.int64)

    def collate(self, own: list[Any]) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        return padded(own)


def test_a_data_set_behind_collate_is_not_copied_and_its_counters_are_put_back() -> None:
    data = Data()
    anybatch.check(Net(is_mean=False), loss_fn, samples(), collate=data.collate, micro_batch_size=3)
    assert data.calls == 0
    effects = SideEffects([], of_data=[data.collate])
    data.values[0].zero_()
    data.calls.add_(1)
    assert [(one.before, one.after) for one in effects.found()] == [(0, 1)]
