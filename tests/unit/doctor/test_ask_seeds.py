"""Generators that are seeded again and again in a training are told, and seeds that do no harm are not."""

import ast
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.doctor.ask import source
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.samples.draws import Streams
from anybatch.records.lossfacts import Probed

Seeds = Callable[[int], None]


def back(seeds: Seeds, draws: Callable[[], object], trainings: int = 1) -> set[str]:
    """The generators that went back in a training, at whose steps something draws and something may seed."""
    streams = Streams()
    torch.manual_seed(0)
    random.seed(0)
    for training in range(trainings):
        for step in range(12):
            seeds(step)
            for _ in range(1 + step % 3):
                draws()
            streams.look(training)
    return {name for name, times in streams.back.items() if times >= 3}


@pytest.mark.parametrize(
    ("seeds", "draws", "expected"),
    [
        (lambda step: torch.manual_seed(1), lambda: torch.rand(3), {"torch"}),
        (lambda step: random.seed(1), random.random, {"random"}),
        (lambda step: torch.manual_seed(1), lambda: None, set()),  # nothing is drawn
        (lambda step: None, lambda: torch.rand(3), set()),
    ],
)
def test_a_generator_that_stands_after_the_same_draws_is_seen(
    seeds: Seeds, draws: Callable[[], object], expected: set[str]
) -> None:
    streams = Streams()
    torch.manual_seed(0)
    random.seed(0)
    for step in range(12):
        seeds(step)
        draws()
        streams.look(0)
    assert {name for name in ("torch", "random") if streams.stood[name] >= 3} == expected


def kept_apart(step: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.rand(9)


@pytest.mark.parametrize(
    ("seeds", "draws", "expected"),
    [
        (lambda step: random.seed(1), random.random, {"random"}),
        (lambda step: torch.manual_seed(1), lambda: torch.rand(3), {"torch"}),
        (lambda step: torch.manual_seed(1), lambda: torch.rand(2000), {"torch"}),
        (torch.manual_seed, lambda: torch.rand(3), set()),
        (lambda step: None, lambda: (torch.rand(300), random.random()), set()),
        (kept_apart, lambda: torch.rand(3), set()),
    ],
)
def test_a_generator_that_goes_back_is_seen(seeds: Seeds, draws: Callable[[], object], expected: set[str]) -> None:
    before = random.getstate(), torch.get_rng_state()
    assert back(seeds, draws) == expected
    random.setstate(before[0])
    torch.set_rng_state(before[1])


def test_a_seed_before_each_of_several_trainings_is_none() -> None:
    assert back(lambda step: random.seed(0) if step == 0 else None, random.random, trainings=5) == set()


def seen(kept_batches: list[torch.Tensor], stood: int, text: str, monkeypatch: pytest.MonkeyPatch) -> list[Probed]:
    """What is told of a training with such batches, whose generator stood so often, by a script."""
    streams = Streams()
    streams.stood["torch"] = stood
    kept: Any = SimpleNamespace(streams=streams, batches={0: [(one, "loss", {}) for one in kept_batches]})
    run: Any = None
    monkeypatch.setattr(source, "scripts", lambda _: [("train.py", ast.parse(text))])
    return list(source.about_seeds(kept, run))


GET = "def get():\n  torch.manual_seed(7)\n  return draw()\nget()\nfor _ in range(9):\n  f({}).backward()\n"


def test_a_seed_that_gives_every_step_one_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = seen([torch.ones(4, 2)] * 5, 6, GET.format("get()"), monkeypatch)
    assert (one.line, one.evidence["times"]) == (2, 6)


@pytest.mark.parametrize(
    ("batches", "stood", "text"),
    [
        ([torch.ones(4, 2)] * 5, 6, GET.format("x")),  # seeded once, and one batch is meant
        ([torch.ones(4, 2)] * 5, 1, GET.format("get()")),
        ([torch.ones(4, 2) * k for k in range(5)], 6, GET.format("get()")),
    ],
)
def test_a_seed_that_gives_no_step_its_batch_is_not_told(
    batches: list[torch.Tensor], stood: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen(batches, stood, text, monkeypatch) == []


def test_a_look_changes_nothing() -> None:
    before, of_torch = random.getstate(), torch.get_rng_state()
    with Doctor():
        Streams().look(0)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), of_torch)


def test_a_function_that_holds_the_loop_and_a_method_of_its_name_are_not_of_each_step() -> None:
    text = "def train():\n  seed(0)\n  for i in range(9):\n    model.train()\n    f(i).backward()\ntrain()\n"
    assert source.lines_of_steps(ast.parse(text)) == {3, 4, 5}
    text = "def batch(self):\n  seed(0)\nfor i in range(9):\n  self.batch()\n  f(i).backward()\n"
    assert source.lines_of_steps(ast.parse(text)) >= {2, 4}
