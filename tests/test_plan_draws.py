"""Steps that run other layers, or other sizes, by random numbers: they stay within the budget whatever is drawn."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.planning.draws import Draw, drawing
from anybatch.tensors.randomness import RandomState
from memory_steps import peak_of_call
from reference import assert_float64, gradients_of

ROWS = 60
STEPS = 5

Number = Callable[[], float]
NUMBERS: dict[str, Number] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: torch.rand(()).item(),
    "torch in place": lambda: torch.empty(1).uniform_(0, 1).item(),
}


class Dropping(nn.Module):
    """Blocks of which each is left out by a number."""

    def __init__(self, number: Number, *, runs_above: bool) -> None:
        super().__init__()
        self.number, self.runs_above = number, runs_above
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if (self.number() > 0.5) is self.runs_above:
                x = x + block(x)
        found: Tensor = self.head(x)
        return found


class Resizing(nn.Module):
    """A network of images that are scaled to a size that is drawn."""

    def __init__(self, size: Callable[[], int]) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        size = self.size()
        image = F.interpolate(x.view(-1, 1, 2, 4), (size, size))
        found: Tensor = self.head(self.layers(image).mean((2, 3)))
        return found


SIZES: dict[str, Callable[[], int]] = {
    "choice": lambda: random.choice([4, 6, 8, 12, 16]),
    "python's randint": lambda: random.randint(4, 15),
    "numpy's randint": lambda: int(np.random.randint(4, 13)),
    "torch's randint": lambda: int(torch.randint(4, 16, (1,)).item()),
}


def loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(rows: int = ROWS) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {"x": torch.randn(rows, 8, dtype=torch.float64), "y": torch.randint(3, (rows,))}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def most_of(model: nn.Module, share: float) -> int:
    """A share of the way from the smallest budget to what the whole batch takes."""
    seed(0)
    plan = anybatch.plan(model, loss, batch_of(), sgd(model), memory=2**30)
    assert plan.confidence == "measured"
    return int(plan.smallest_bytes + share * (plan.whole_bytes - plan.smallest_bytes))


def stays_within(model: nn.Module, share: float) -> None:
    budget = most_of(model, share)
    seed(1)
    step = anybatch.TrainStep(model, loss, sgd(model), memory=budget)
    peaks = [peak_of_call(step, batch_of()) for _ in range(STEPS)]
    assert max(peaks) <= budget


@pytest.mark.parametrize(
    ("kind", "runs_above", "share"),
    [("python", True, 0.4), *((kind, above, 0.0) for kind in NUMBERS for above in (True, False))],
)
def test_layers_that_are_left_out(kind: str, runs_above: bool, share: float) -> None:
    stays_within(Dropping(NUMBERS[kind], runs_above=runs_above).double(), share)


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_that_are_drawn(kind: str) -> None:
    stays_within(Resizing(SIZES[kind]).double(), 0.1)


def test_the_gradient_is_that_of_the_micro_batches_as_they_were_drawn() -> None:
    model = Dropping(random.random, runs_above=False).double()
    budget, batch = most_of(model, 0.1), batch_of()
    seed(5)
    step = anybatch.TrainStep(model, loss, sgd(model), memory=budget)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seed(5)
    size = -(-ROWS // step(batch).micro_batches)
    got = gradients_of(model)
    model.load_state_dict(before)
    seed(5)
    model.zero_grad()
    for start in range(0, ROWS, size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        (loss(model, part) * len(part["y"]) / ROWS).backward()
    assert_float64(got, gradients_of(model))


def test_random_numbers_that_decide_nothing_leave_a_plan_exact() -> None:
    def jittered(model: Any, batch: Any) -> Any:
        return loss(model, {**batch, "x": batch["x"] * (1 + random.random())})

    model = nn.Linear(8, 3).double()
    assert anybatch.plan(model, jittered, batch_of(), sgd(model), memory=2**30).confidence == "predicted"


def test_planning_draws_nothing_of_what_the_user_draws() -> None:
    batch = batch_of()
    for kind in NUMBERS:
        model = Dropping(NUMBERS[kind], runs_above=True).double()
        seed(3)
        anybatch.plan(model, loss, batch, sgd(model), memory=2**30)
        after = [random.random(), np.random.rand(), torch.rand(1).item()]
        seed(3)
        assert after == [random.random(), np.random.rand(), torch.rand(1).item()]


@pytest.mark.parametrize(("kind", "low", "high"), [("small", 0.0, 0.01), ("large", 0.99, 1.0)])
def test_generators_give_the_first_numbers_as_wanted(kind: str, low: float, high: float) -> None:
    before = RandomState()
    try:
        with drawing(Draw(kind), is_fake=False) as drawn:
            for _ in range(30):
                for number in NUMBERS.values():
                    assert low <= number() <= high
            assert drawn.scalars
        assert drawn.outside
    finally:
        before.restore()


@pytest.mark.parametrize("kind", ["small", "large"])
def test_loops_that_wait_for_a_number_end(kind: str) -> None:
    before = RandomState()
    try:
        with drawing(Draw(kind), is_fake=False):
            assert len(random.sample(range(1000), 5)) == 5
            np.random.randn(5)
            while not 0.4 < random.random() < 0.6 or not 0.4 < torch.rand(1).item() < 0.6:
                pass
    finally:
        before.restore()
