"""Sparse gradients are summed exactly; no plan is made for them, since their bytes depend on the indices in a batch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from reference import assert_bitwise, assert_float64, gradients_of, whole_gradients

WIDTH = 16


class Looking(nn.Module):
    """One table, looked into once or twice in a forward, or two, and a layer with dense gradients."""

    def __init__(self, rows: int, kind: str = "one") -> None:
        super().__init__()
        self.kind = kind
        self.table: nn.Module = nn.Embedding(rows, WIDTH, sparse=True, padding_idx=0 if kind == "padded" else None)
        if kind == "bag":
            self.table = nn.EmbeddingBag(rows, WIDTH, mode="mean", sparse=True)
        if kind == "two":
            self.other = nn.Embedding(3 * rows, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bag":
            y: Tensor = self.out(self.table(x))
            return y
        if self.kind == "functional":
            features = nn.functional.embedding(x, self.table.weight, sparse=True).mean(1)  # type: ignore[arg-type]
        else:
            features = self.table(x).mean(1)
        if self.kind == "twice":
            features = features * self.table(x.flip(1)[:, :3]).sum(1)
        elif self.kind == "two":
            features = features + self.other(x * 3).mean(1)
        elif self.kind == "shared":  # rows that every micro-batch looks up
            features = features + self.table(torch.arange(4)).mean(0)
        result: Tensor = self.out(features)
        return result


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def numbers(rows: int, samples: int, length: int = 8) -> dict[str, Tensor]:
    x = torch.randint(rows, (samples, length))
    return {"x": x, "y": torch.randint(5, (samples,))}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["one", "bag", "functional"])
def test_no_plan_is_made_and_the_way_out_is_named(kind: str) -> None:
    """Of a function that nothing announces it shows in the first trace."""
    torch.manual_seed(0)
    model, batch = Looking(40, kind).double(), numbers(40, 32)
    if kind == "functional":
        model.table.sparse = False  # type: ignore[assignment]
    with pytest.raises(anybatch.LossError, match=r"sparse gradients.*pass micro_batch_size= instead of memory="):
        anybatch.plan(model, loss_fn, batch, sgd(model), memory="1GiB")
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory="1GiB")
    with pytest.raises(anybatch.LossError, match="sparse gradients"):
        step(batch)
    expected, _ = whole_gradients(model, loss_fn, batch)
    anybatch.TrainStep(model, loss_fn, sgd(model), micro_batch_size=8)(batch)
    assert_float64(gradients_of(model), expected)


def test_a_table_that_is_not_trained_is_planned() -> None:
    torch.manual_seed(0)
    model, batch = Looking(40).double(), numbers(40, 32)
    model.table.weight.requires_grad_(False)
    assert anybatch.plan(model, loss_fn, batch, sgd(model), memory="1GiB").confidence == "predicted"


def test_one_micro_batch_has_the_gradient_of_torch_bitwise() -> None:
    torch.manual_seed(5)
    model, batch = Looking(30), numbers(30, 20)
    other = copy.deepcopy(model)
    anybatch.backward(model, loss_fn, batch)
    loss_fn(other, batch).backward()
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert expected.grad is not None
        assert one.grad.layout == expected.grad.layout
        if one.grad.layout is torch.sparse_coo:
            assert not one.grad.is_coalesced()
            assert torch.equal(one.grad._indices(), expected.grad._indices())
            assert_bitwise([one.grad._values()], [expected.grad._values()])


@pytest.mark.parametrize("size", [1, 7, 19])
@pytest.mark.parametrize("rows", [3, 50, 5000])
def test_sums_have_each_row_once_and_in_order(size: int, rows: int) -> None:
    torch.manual_seed(6)
    model, batch = Looking(rows, "two").double(), numbers(rows, 20)
    expected, _ = whole_gradients(model, loss_fn, batch)
    anybatch.backward(model, loss_fn, batch, micro_batch_size=size)
    assert_float64(gradients_of(model), expected)
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.sparse_coo:
            named = gradient.indices()[0]
            assert named.tolist() == sorted(set(named.tolist()))
            assert named.numel() <= rows * 3


def test_sums_of_low_precision_are_rounded_once() -> None:
    torch.manual_seed(7)
    model, batch = Looking(6).bfloat16(), numbers(6, 64)
    exact, _ = whole_gradients(copy.deepcopy(model).double(), loss_fn, batch)
    anybatch.backward(model, loss_fn, batch, micro_batch_size=2)
    gradient = model.table.weight.grad
    assert isinstance(gradient, Tensor)
    assert exact[0] is not None
    assert gradient.dtype is torch.bfloat16
    error = (gradient.to_dense().double() - exact[0].to_dense()).norm() / exact[0].to_dense().norm()
    assert float(error) < 2**-6  # what the forwards round; 32 sums in bfloat16 would add to it


def test_several_devices_add_sparse_gradients_up() -> None:
    torch.manual_seed(11)
    model, batch = Looking(30, "two").double(), numbers(30, 24)
    expected, _ = whole_gradients(model, loss_fn, batch)
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=3, devices=["cpu", "cpu"]
    )
    step(batch)
    assert_float64(gradients_of(model), expected)
