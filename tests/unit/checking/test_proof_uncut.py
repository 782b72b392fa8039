"""A leaf with as many rows as there are samples that is not of the samples: seen by leaving it whole, each in turn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]
ROWS = 10


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, ROWS)).double()


def batch_of(**more: torch.Tensor) -> Batch:
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.randint(ROWS, (ROWS,))
    return {"x": x, "y": y, **more}


def weighted_outputs(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]).square() * batch["weight"]).mean()  # type: ignore[no-any-return]


def class_weights(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["weight"], reduction="sum") / len(batch["y"])


def on_a_graph(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(batch["weight"] @ model(batch["x"]), batch["y"])


WEIGHTS = torch.arange(1, ROWS + 1, dtype=torch.float64)
GRAPH = torch.arange(ROWS**2, dtype=torch.float64).view(ROWS, ROWS).sin().softmax(1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("loss_fn", "weight", "name"),
    [(weighted_outputs, WEIGHTS, "weight"), (class_weights, WEIGHTS, "weight"), (on_a_graph, GRAPH, "x")],
)
def test_it_is_named_with_the_option_that_was_tried(
    loss_fn: Callable[..., torch.Tensor], weight: torch.Tensor, name: str, size: int
) -> None:
    model, batch = net(), batch_of(weight=weight)
    with pytest.raises(anybatch.NotSplittable, match="each micro-batch needs it whole") as caught:
        anybatch.backward(model, loss_fn, batch, micro_batch_size=size)
    assert f"broadcast=({name!r},)" in str(caught.value)
    assert all(one.grad is None for one in model.parameters())
    result = anybatch.backward(model, loss_fn, batch, micro_batch_size=size, broadcast=(name,))
    assert result.proof is not None
    assert result.proof.exact


def test_it_is_named_beside_another_fault() -> None:
    def weighted_mean(model: Any, batch: Batch) -> torch.Tensor:  # over other items than samples, too
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["weight"])

    with pytest.raises(anybatch.NotSplittable, match=r"broadcast=\('weight',\)"):
        anybatch.backward(net(), weighted_mean, batch_of(weight=WEIGHTS), micro_batch_size=4)


def test_a_loss_that_runs_no_part_for_another_reason_is_not_given_it() -> None:
    def whole_only(model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"].view(ROWS, 6)), batch["y"])

    with pytest.raises(RuntimeError, match="invalid for input of size"):
        anybatch.backward(net(), whole_only, batch_of(), micro_batch_size=4)


def test_what_runs_and_is_no_number_is_not_given_it() -> None:
    def pooled(model: Any, batch: Batch) -> torch.Tensor:
        rows, home = len(batch["y"]), batch["home"]
        found = torch.zeros(rows, ROWS, dtype=torch.float64).index_add(0, home, model(batch["x"]))
        return F.cross_entropy(found / torch.bincount(home, minlength=rows)[:, None], batch["y"])

    with pytest.raises(RuntimeError, match="out of bounds"):
        anybatch.backward(net(), pooled, batch_of(home=torch.arange(ROWS)), micro_batch_size=4)


def test_one_sample_at_a_time_without_such_a_leaf_runs() -> None:
    def of_one(model: Any, batch: Batch) -> torch.Tensor:
        (row,) = batch["x"]
        return F.cross_entropy(model(row), batch["y"][0])

    model, batch = net(), batch_of()
    anybatch.backward(model, of_one, batch, micro_batch_size=1)
    assert all(one.grad is not None for one in model.parameters())


class TimeFirst(nn.Module):
    """A recurrent net of its own, that takes time in dimension 0."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[1], 8)
        for step in x:
            state = self.cell(step, state)
        out: torch.Tensor = self.head(state)
        return out


def test_as_many_steps_as_samples_are_cut_where_the_samples_are() -> None:
    torch.manual_seed(0)
    model = TimeFirst().double()
    batch = {"x": torch.randn(ROWS, ROWS, 6, dtype=torch.float64), "y": torch.randint(3, (ROWS,))}

    def loss_fn(model: Any, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    with pytest.raises(anybatch.NotSplittable, match="in dimension 1") as caught:
        anybatch.backward(model, loss_fn, batch, micro_batch_size=4)
    assert str(caught.value).endswith("layout={'x': 1}")
    result = anybatch.backward(model, loss_fn, batch, micro_batch_size=4, layout={"x": 1})
    assert result.proof is not None
    assert result.proof.exact


class Tagger(nn.Module):
    """Goes on with hidden states that are given, of as many layers as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 5, 4, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        return self.out(self.lstm(x, (h, c))[0])


def test_two_hidden_states_of_as_many_layers_as_samples_are_turned_together() -> None:
    torch.manual_seed(0)
    model, sizes = Tagger().double(), {"x": (4, 4, 3), "y": (4, 4, 1), "h": (4, 4, 5), "c": (4, 4, 5)}
    batch = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    loss_fn = lambda model, b: F.mse_loss(model(b["x"], b["h"], b["c"]), b["y"])  # noqa: E731
    for size in (2, 3):
        with pytest.raises(anybatch.NotSplittable) as caught:
            anybatch.backward(model, loss_fn, batch, micro_batch_size=size)
        assert "layout={'h': 1, 'c': 1}" in str(caught.value)
    certificate = anybatch.check(model, loss_fn, batch)
    assert [one.remedy for one in certificate.reasons] == ["layout={'h': 1, 'c': 1}"]
    result = anybatch.backward(model, loss_fn, batch, micro_batch_size=2, layout={"h": 1, "c": 1})
    assert result.proof is not None
    assert result.proof.exact


def test_a_layout_is_that_of_checks_plans_and_steps_with_a_budget() -> None:
    torch.manual_seed(0)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(4, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.layer(x)[0][-1])

    def loss_fn(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    model, layout = Reading().double(), {"x": 1}
    batch = {"x": torch.randn(10, 24, 4).double(), "y": torch.randint(3, (24,))}
    loss_fn(model, batch).backward()
    want = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    assert anybatch.check(model, loss_fn, batch, layout=layout).exact
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    smallest = anybatch.plan(model, loss_fn, batch, optimizer, memory="8MiB", layout=layout).smallest_bytes
    assert smallest is not None
    plan = anybatch.plan(model, loss_fn, batch, optimizer, memory=int(1.2 * smallest), layout=layout)
    assert plan.chosen.micro_batches > 1
    for options in ({"plan": plan}, {"memory": int(1.2 * smallest)}):
        out = anybatch.TrainStep(model, loss_fn, optimizer, layout=layout, **options)(batch)
        assert out.micro_batches > 1
        found = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        assert (found - want).norm() < 1e-10 * want.norm()
