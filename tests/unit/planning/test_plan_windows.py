"""Plans for windows of several batches, which may each be padded to a length of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.batch.windowing import Window
from diagonals import diagonals

Batch = dict[str, Tensor]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.rnn(x)[0])
        return found


class Looking(nn.Module):
    """Looks from one sequence at another, each of a length of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there, self.out = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        found: Tensor = self.out(torch.softmax(self.here(x) @ self.there(seen).mT, -1) @ self.there(seen))
        return found


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def loss_fn(model: Any, batch: Any) -> Tensor:
    inputs = [batch[name] for name in ("x", "seen") if name in batch]
    return F.cross_entropy(model(*inputs).mean(1), batch["y"])


def batch_of(rows: int, length: int, seen: int = 0) -> Batch:
    found = {"x": torch.randn(rows, length, 16), "y": torch.randint(4, (rows,))}
    return {**found, "seen": torch.randn(rows, seen, 16)} if seen else found


def window_of(batches: list[Batch]) -> Window:
    return next(iter(anybatch.windows(batches, batches=len(batches))))


def peak_of(step: anybatch.TrainStep, batch: Any, kept: Any) -> int:
    return anybatch.measure(lambda: step(batch), model=step.model, batch=kept).peak_bytes


def test_the_whole_of_a_window_is_its_batches_joined() -> None:
    torch.manual_seed(0)
    batches = [batch_of(16, 20) for _ in range(4)]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = anybatch.plan(model, loss_fn, window_of(batches), optimizer, memory="1GiB")
    assert found.micro_batches % 4 == 0  # of each batch as many, by what was measured
    assert found.whole_bytes == peak_of(anybatch.TrainStep(model, loss_fn, optimizer), whole, whole)


def test_batches_that_can_not_be_joined_have_no_whole() -> None:
    model = perceptron()
    window = window_of([batch_of(4, length) for length in (5, 9)])
    assert anybatch.plan(model, loss_fn, window, memory="1GiB").whole_bytes == 0


KINDS: dict[str, tuple[Callable[[], nn.Module], list[list[tuple[int, ...]]]]] = {
    "two lengths": (perceptron, [[(16, 10), (16, 80)], [(4, 80), (16, 10)], [(16, 80), (4, 10)]]),
    "many lengths": (perceptron, [[(16, 10), (4, 40), (8, 60), (16, 70)], [(3, 70), (16, 66), (8, 5)], [(16, 69)]]),
    "recurrent": (Recurrent, [[(16, 10), (4, 40), (8, 60), (16, 70)], [(3, 70), (16, 66), (8, 5)], [(16, 69)]]),
    "two sequences": (Looking, [[(8, 10, 50), (8, 50, 10), (4, 50, 50)], [(8, 50, 50)], [(8, 12, 50), (2, 60, 60)]]),
}


@pytest.mark.parametrize(("kind", "share"), diagonals([*KINDS], [0.8, 0.5]))
def test_no_budget_is_exceeded_whichever_batch_is_the_longest(kind: str, share: float) -> None:
    torch.manual_seed(0)
    make, sizes = KINDS[kind]
    model, many = make(), [[batch_of(*size) for size in window] for window in sizes]
    plain = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    budget = int(share * max(peak_of(plain, window_of(batches), batches) for batches in many))
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory=budget)
    for batches in [*many, *many]:
        assert peak_of(step, window_of(batches), batches) <= budget


def test_a_window_within_the_plan_is_not_planned_for_again() -> None:
    torch.manual_seed(0)
    model = perceptron()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory="400KiB")
    first = step(window_of([batch_of(8, length) for length in (10, 20, 40)])).plan
    assert step(window_of([batch_of(8, length) for length in (40, 11, 19)])).plan is first
    assert step(batch_of(4, 39)).plan is first


def test_gradients_of_such_a_window_are_those_of_its_batches() -> None:
    torch.manual_seed(0)
    model = perceptron().double()
    batches = [batch_of(rows, length) for rows, length in ((16, 10), (4, 80), (9, 33))]
    for batch in batches:
        batch["x"] = batch["x"].double()
    total = sum(len(batch["y"]) for batch in batches)
    sum((loss_fn(model, batch) * len(batch["y"]) / total for batch in batches), torch.zeros(())).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert anybatch.TrainStep(model, loss_fn, optimizer, memory="500KiB")(window_of(batches)).micro_batches > 3
    found = [parameter.grad for parameter in model.parameters()]
    assert all(
        torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(found, expected, strict=True) if a is not None
    )


@pytest.mark.parametrize("share", [pytest.param(0.8, marks=pytest.mark.slow), 0.4])
def test_a_coupled_loss_over_such_a_window_stays_within_its_budget(share: float) -> None:
    torch.manual_seed(0)
    coupled = anybatch.Coupled(
        lambda model, batch: model(batch["x"]).mean(1),
        lambda model, outputs: F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))),
    )
    model, many = perceptron(), [[batch_of(8, length) for length in lengths] for lengths in ((10, 80, 20), (80, 9))]
    many.append([batch_of(2, 60), batch_of(8, 40)])
    plain = anybatch.TrainStep(model, coupled, torch.optim.SGD(model.parameters(), lr=0.1))
    budget = int(share * max(peak_of(plain, window_of(batches), batches) for batches in many))
    step = anybatch.TrainStep(model, coupled, torch.optim.SGD(model.parameters(), lr=0.1), memory=budget)
    for batches in [*many, *many]:
        assert peak_of(step, window_of(batches), batches) <= budget
