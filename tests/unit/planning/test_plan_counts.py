"""What count= holds while it runs on the whole batch is in the plan, and nothing of it is left for micro-batches."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from planning_referee import alive_in, peak_of

WEIGHTS = torch.linspace(0.1, 1.0, 50)
CLASSES = len(WEIGHTS)


class Tagger(nn.Module):
    """Gives each token a class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks at each token by itself."""
        found: Tensor = self.last(torch.tanh(self.embed(tokens)))
        return found


def weighted(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["t"]).flatten(0, 1), batch["y"].flatten(), weight=WEIGHTS)


def tokens(rows: int = 100, length: int = 60) -> dict[str, Tensor]:
    torch.manual_seed(0)
    t, y = torch.randint(CLASSES, (2, rows, length))
    return {"t": t, "y": y.clone()}


def by_class(batch: Any) -> Tensor:
    return WEIGHTS.double()[batch["y"]].sum()


def by_one_hot(batch: Any) -> Tensor:
    return (F.one_hot(batch["y"], CLASSES) * WEIGHTS.double()).sum()


def by_selection(batch: Any) -> float:
    labels = batch["y"]
    return float(WEIGHTS.double()[labels[labels >= 0]].sum())


def by_number(batch: Any) -> float:
    return float(sum(row @ WEIGHTS.double() for row in F.one_hot(batch["y"], CLASSES).double().sum(1)))


COUNTS: list[Callable[[Any], Any]] = [by_class, by_one_hot, by_selection, by_number]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_no_budget_is_exceeded_by_a_count(count: Callable[[Any], Any], share: float) -> None:
    model, batch = Tagger(), tokens()
    plan = anybatch.plan(model, weighted, batch, sgd(model), memory=2**30, count=count)
    budget = int(plan.smallest_bytes + share * max(0, plan.whole_bytes - plan.smallest_bytes))
    optimizer = sgd(model)
    step = anybatch.TrainStep(model, weighted, optimizer, memory=budget, count=count)
    for _ in range(2):
        run = functools.partial(step, batch)
        assert anybatch.measure(run, model=model, optimizer=optimizer, batch=batch).peak_bytes <= budget


def test_the_bytes_of_a_count_are_known_exactly() -> None:
    model, batch = Tagger(), tokens()
    budget = anybatch.plan(model, weighted, batch, sgd(model), memory=2**30, count=by_one_hot).smallest_bytes
    optimizer = sgd(model)
    step = anybatch.TrainStep(model, weighted, optimizer, memory=budget, count=by_one_hot)
    memory = anybatch.measure(functools.partial(step, batch), model=model, optimizer=optimizer, batch=batch)
    assert memory.peak_bytes == budget


def test_the_error_says_that_the_count_needs_it() -> None:
    model, batch = Tagger(), tokens()
    with pytest.raises(anybatch.DoesNotFit, match="count= of the whole batch alone takes this") as error:
        anybatch.plan(model, weighted, batch, sgd(model), memory="300KiB", count=by_one_hot)
    assert error.value.needed is not None
    plan = anybatch.plan(model, weighted, batch, sgd(model), memory=error.value.needed, count=by_one_hot)
    assert "count" in plan.binding
    assert plan.smallest_bytes == error.value.needed


def test_counts_of_several_losses_and_batches() -> None:
    model, batches = Tagger(), [tokens(40), tokens(80)]
    window = next(anybatch.windows(batches, batches=2))

    def losses(model: Any, batch: Any) -> dict[str, Tensor]:
        return {"tags": weighted(model, batch), "size": model(batch["t"]).square().mean()}

    counts = {"tags": by_one_hot, "size": anybatch.count_samples}
    plan = anybatch.plan(model, losses, window, sgd(model), memory=2**30, count=counts)
    assert plan.smallest_bytes > 80 * 60 * CLASSES * 8
    optimizer = sgd(model)
    step = anybatch.TrainStep(model, losses, optimizer, memory=plan.smallest_bytes, count=counts)
    run = functools.partial(step, window)
    alive = {"first": batches[0], "second": batches[1]}
    memory = anybatch.measure(run, model=model, optimizer=optimizer, batch=alive)
    assert memory.peak_bytes <= plan.smallest_bytes


@pytest.mark.parametrize("as_number", [False, True])
def test_counts_that_all_differ_leave_nothing_behind(as_number: bool) -> None:
    """Each micro-batch has a weight of its own, which is a tensor as long as the micro-batch runs."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(400, 8), "y": torch.randint(5, (400,)), "w": torch.rand(400, dtype=torch.float64)}
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        total: Tensor = (each * batch["w"]).sum() / batch["w"].sum()
        return total

    def count(batch: Any) -> Any:
        return float(batch["w"].sum()) if as_number else batch["w"].sum()

    optimizer = sgd(model)
    budget = anybatch.plan(model, loss_fn, batch, optimizer, memory=2**30, count=count).smallest_bytes
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget, count=count)
    memory = anybatch.measure(functools.partial(step, batch), model=model, optimizer=optimizer, batch=batch)
    assert memory.peak_bytes <= budget
    with pytest.raises(anybatch.CountError, match="adds up over samples"):
        anybatch.TrainStep(model, loss_fn, optimizer, memory=budget, count=lambda batch: batch["w"].max())(batch)


def named(loss_fn: Any, model: Any, batch: Any) -> Any:
    return {"a": loss_fn(model, batch)}


def yielded(loss_fn: Any, model: Any, batch: Any) -> Any:
    yield "a", loss_fn(model, batch)


def with_metrics(loss_fn: Any, model: Any, batch: Any) -> Any:
    return loss_fn(model, batch), {"rows": anybatch.Mean(batch["t"].sum(), len(batch["t"]))}


@pytest.mark.parametrize("form", [None, named, yielded, with_metrics])
def test_the_count_of_a_mean_is_read_by_the_step_and_not_by_its_plan(form: Any, constant_times: None) -> None:
    """It is a tensor without numbers there, so that a step whose plan read it would have to run for real."""

    def loss_fn(model: Any, batch: Any) -> Any:
        is_there = batch["y"] > 3
        losses = F.cross_entropy(model(batch["t"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
        return anybatch.Mean((losses * is_there.flatten()).sum(), is_there.sum())

    model, batch = Tagger(), tokens(4, 8)
    used = loss_fn if form is None else functools.partial(form, loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = anybatch.plan(model, used, batch, optimizer, memory="1GiB")
    step = anybatch.TrainStep(model, used, optimizer)
    step(batch)
    measured = peak_of(functools.partial(step, batch), alive_in(model, [optimizer], batch))
    assert plan.confidence == "predicted"
    assert abs(plan.peak_bytes / measured - 1) <= 0.005
