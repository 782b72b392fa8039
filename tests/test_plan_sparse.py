"""Budgets hold with sparse gradients, whose bytes follow from the indices of the whole batch and a table's rows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.gradient.accumulate import Settings
from anybatch.planning.sparsegradients import Entries
from anybatch.planning.sparseupdates import SparseUpdates
from anybatch.planning.subjects import Subject
from anybatch.planning.updates import trace_update
from anybatch.tensors.batches import Splittable
from memory_steps import peak_of_call, plan_of
from planning_referee import alive_in, peak_of
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


Optimizers = Callable[[nn.Module], Any]


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adagrad(model: nn.Module) -> Any:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def sparse_adam(model: nn.Module) -> Any:
    tables = [p for name, p in model.named_parameters() if not name.startswith("out")]
    return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.SGD(model.out.parameters(), lr=0.1)]  # type: ignore[union-attr]


def least_of(model: nn.Module, batch: Any, optimizer: Any) -> int:
    return anybatch.plan(model, loss_fn, batch, optimizer, memory="1GiB").smallest_bytes


def assert_within(model: nn.Module, batch: Any, make: Optimizers, *shares: float) -> anybatch.Plan:
    """Steps three times under each share of the least budget; gives the last plan."""
    least = least_of(model, batch, make(model))
    for share in shares:
        budget, optimizer = int(least * share), make(model)
        expected, _ = whole_gradients(model, loss_fn, batch)
        step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget)
        for call in range(3):
            peak = peak_of_call(step, batch)
            assert peak <= budget, f"call {call} took {peak} of {budget} bytes: {plan_of(step)}"
            if not call:
                assert_float64(gradients_of(model), expected)
        plan = plan_of(step)
        del step, optimizer
    return plan


@pytest.mark.parametrize("make", [sgd, adagrad, sparse_adam])
@pytest.mark.parametrize("rows", [40, 4000], ids=["small table", "large table"])
def test_every_call_stays_within_its_budget(make: Optimizers, rows: int) -> None:
    torch.manual_seed(0)
    plan = assert_within(Looking(rows).double(), numbers(rows, 32), make, 1.0, 1.4)
    assert plan.confidence == "estimated"


@pytest.mark.parametrize("kind", ["bag", "two", "twice", "functional", "shared"])
def test_so_does_every_way_to_look_into_tables(kind: str) -> None:
    torch.manual_seed(1)
    assert_within(Looking(90, kind).double(), numbers(90, 40), sparse_adam if kind == "two" else sgd, 1.1)


def test_rows_that_pad_have_no_entries() -> None:
    torch.manual_seed(2)
    batch = numbers(300, 40)
    batch["x"][torch.rand(batch["x"].shape) < 0.4] = 0
    assert_within(Looking(300, "padded").double(), batch, sgd, 1.1)


def test_the_bound_is_reached_where_every_row_is_looked_up() -> None:
    torch.manual_seed(3)
    model, batch = Looking(20).double(), numbers(20, 200)
    step = anybatch.TrainStep(model, loss_fn, adagrad(model), memory=least_of(model, batch, adagrad(model)))
    peaks = [peak_of_call(step, batch) for _ in range(2)]
    assert max(peaks) <= plan_of(step).peak_bytes <= 1.15 * max(peaks)


def test_a_large_table_is_not_planned_for_as_if_its_gradient_were_dense() -> None:
    torch.manual_seed(4)
    model, batch = Looking(20_000), numbers(20_000, 60)
    optimizer = sgd(model)
    whole = anybatch.measure(
        lambda: (loss_fn(model, batch).backward(), optimizer.step(), optimizer.zero_grad()),
        model=model, optimizer=optimizer, batch=batch,
    ).peak_bytes  # fmt: skip
    dense = 2 * sum(p.nbytes for p in model.parameters())
    assert whole < dense
    plan = anybatch.plan(model, loss_fn, batch, optimizer, memory=int(1.02 * whole))
    assert plan.micro_batches == 1
    assert plan.peak_bytes <= 1.02 * whole


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


@pytest.mark.parametrize("make", [sgd, adagrad, sparse_adam])
@pytest.mark.parametrize("is_summed", [True, False], ids=["each row once", "rows several times"])
def test_the_update_is_extrapolated_from_small_tables(make: Optimizers, is_summed: bool) -> None:
    torch.manual_seed(8)
    distinct, rows = 50, 70 if is_summed else 50
    model = Looking(rows)
    optimizers = made if isinstance(made := make(model), list) else [made]
    named = torch.arange(distinct) if is_summed else torch.arange(distinct).repeat(6)
    values = torch.ones(len(named), WIDTH)
    subject = Subject(model, loss_fn, Settings(torch.device("cpu")), Splittable([numbers(rows, 4)]), optimizers)
    [position] = subject.sparse
    trained = range(len(subject.parameters))
    updates = SparseUpdates(subject, trace_update(subject, trained, {position}), trained, [position])
    found = updates.at([Entries(position, rows, len(named), is_summed)])

    def steps() -> None:
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        subject.parameters[position].grad = torch.sparse_coo_tensor(
            named[None], values, (rows, WIDTH), is_coalesced=is_summed or None, check_invariants=False
        )
        peak = peak_of(steps, alive_in(model, optimizers, ()))
    assert updates.is_traced
    assert peak <= found.peak <= 1.1 * peak + 2**10


def test_a_momentum_that_is_sparse_itself_is_not_promised_a_bound() -> None:
    torch.manual_seed(9)
    model, batch = Looking(40), numbers(40, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert anybatch.plan(model, loss_fn, batch, optimizer, memory="1GiB").confidence == "estimated"
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory="1MiB")
    before = model.table.weight.detach().clone()  # type: ignore[operator]
    step(batch)
    step(batch)
    assert not torch.equal(before, model.table.weight)  # type: ignore[arg-type]


def test_losses_that_are_yielded_stay_within_their_budget() -> None:
    torch.manual_seed(13)
    model, batch = Looking(60), numbers(60, 24)

    def yielded(model: Any, batch: Any) -> Any:
        yield "one", loss_fn(model, batch)
        yield "two", model(batch["x"]).square().mean()

    least = anybatch.plan(model, yielded, batch, sgd(model), memory="1GiB").smallest_bytes
    step = anybatch.TrainStep(model, yielded, sgd(model), memory=int(1.2 * least))
    assert max(peak_of_call(step, batch) for _ in range(2)) <= 1.2 * least


def test_samples_of_several_lengths_stay_within_their_budget() -> None:
    torch.manual_seed(12)
    lengths = torch.randint(2, 20, (24,)).tolist()
    samples = [{"x": torch.randint(200, (length,)), "y": torch.randint(5, ())} for length in lengths]
    model = Looking(200)
    options: dict[str, Any] = {"collate": padded, "memory": "1GiB"}
    least = anybatch.plan(model, loss_fn, samples, sgd(model), **options).smallest_bytes
    step = anybatch.TrainStep(model, loss_fn, sgd(model), collate=padded, memory=least)
    assert max(peak_of_call(step, samples) for _ in range(3)) <= least


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
    return {"x": x, "y": torch.stack([sample["y"] for sample in samples])}


def test_a_coupled_loss_stays_within_its_budget() -> None:
    torch.manual_seed(10)
    model, batch = Looking(60).double(), numbers(60, 40)
    coupled = anybatch.Coupled(
        lambda model, batch: model(batch["x"]),
        lambda model, outputs, batch: nn.functional.cross_entropy(outputs - outputs.mean(0), batch["y"]),
    )
    optimizer = sgd(model)
    least = anybatch.plan(model, coupled, batch, optimizer, memory="1GiB").smallest_bytes
    expected, _ = whole_gradients(model, coupled_whole, batch)
    step = anybatch.TrainStep(model, coupled, optimizer, memory=int(1.1 * least))
    peaks = [peak_of_call(step, batch)]
    assert_float64(gradients_of(model), expected)
    peaks += [peak_of_call(step, batch) for _ in range(2)]
    assert max(peaks) <= 1.1 * least


def coupled_whole(model: Any, batch: Any) -> Tensor:
    outputs = model(batch["x"])
    return nn.functional.cross_entropy(outputs - outputs.mean(0), batch["y"])


def test_several_devices_add_sparse_gradients_up() -> None:
    torch.manual_seed(11)
    model, batch = Looking(30, "two").double(), numbers(30, 24)
    expected, _ = whole_gradients(model, loss_fn, batch)
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=3, devices=["cpu", "cpu"]
    )
    step(batch)
    assert_float64(gradients_of(model), expected)
