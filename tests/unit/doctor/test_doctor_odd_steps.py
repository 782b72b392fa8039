"""Steps of which only what differs is recorded are read as if they had been in full, and what differs is seen.

How it could be silently wrong: a step that is not like those before is recorded as if it were; a value, a learning rate
or a number of a step is that of another one; a loss that is not finite is noticed late, when its origin is gone; a call
of an evaluation is taken for one of the training; a graph that is kept is counted too rarely; steps that wait to be
recorded are lost where the run ends, crashes or goes on in another thread; a call from another line is not seen soon.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from anybatch import Doctor
from anybatch.records.events import Backward, Cleared, Forward, Stepped
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall
from anybatch.records.samples import Memory
from diagonals import diagonals
from test_doctor_odd_calls import in_full, told

STEPS = 74  # a sample in step 75 may be left out, as times come
ODD = (
    "evaluation",
    "evaluation mode",
    "without gradient",
    "a smaller batch",
    "another loss",
    "a loss in place",
    "a second loss",
    "a scaled loss",
    "no gradients are cleared",
    "cleared twice",
    "cleared by hand",
    "a second forward",
    "a second backward",
    "retains",
    "another rate",
    "another optimizer",
    "no step",
    "a loss that is not finite",
    "a gradient that is not finite",
    "stops after the forward",
    "stops after the backward",
    "another model",
    "keyword",
    "another thread",
    "a metric",
    "a gradient of its own",
    "graph is kept",
)
LATE = {"a gradient that is not finite"}
"""What is said of a step later; ``test_doctor_late_gradients`` is about that."""


class Stopped(Exception):
    """Raised in the middle of a step, and caught by the user's loop."""


class Loop:
    """Steps that are all alike, but for the odd ones."""

    def __init__(
        self, odd: dict[int, str], *, clears: str = "after", has_loss: bool = True, steps: int = STEPS
    ) -> None:
        torch.manual_seed(0)
        self.odd, self.clears, self.has_loss, self.steps = odd, clears, has_loss, steps
        self.last = nn.Linear(6, 3)
        self.model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.ReLU(), self.last)
        self.teacher = nn.Sequential(nn.Linear(4, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.other = torch.optim.SGD(self.last.parameters(), lr=1e-4)
        self.kept: list[Any] = []

    def __call__(self, doctor: Doctor | None) -> None:
        for step in range(self.steps):
            try:
                self.step(self.odd.get(step, ""))
            except Stopped:
                self.model.train()

    def forward(self, odd: str) -> torch.Tensor:
        x = torch.randn(5 if odd == "a smaller batch" else 8, 4)
        if odd in ("evaluation", "evaluation mode"):
            self.model.eval()
        if odd in ("evaluation", "without gradient"):
            with torch.no_grad():
                F.cross_entropy(self.model(torch.randn(8, 4)), torch.randint(3, (8,)))
        if odd == "evaluation":
            self.model.train()
        if odd == "another model":
            self.teacher(torch.randn(8, 4))
        if odd == "a second forward":
            self.model(torch.randn(8, 4))
        if odd == "another thread":
            with torch.no_grad():
                thread = threading.Thread(target=lambda: self.model(torch.randn(8, 4)))
                thread.start()
                thread.join()
        output: torch.Tensor = self.model(input=x) if odd == "keyword" else self.model(x)
        return output

    def loss(self, output: torch.Tensor, odd: str) -> torch.Tensor:
        labels = torch.randint(3, (len(output),))
        if odd == "a metric":
            with torch.no_grad():
                F.l1_loss(output, torch.zeros_like(output))
        if odd == "another loss":
            return F.mse_loss(output, torch.zeros_like(output))
        if odd == "a loss that is not finite":
            output = output * float("nan")
        loss = F.cross_entropy(output, labels) if self.has_loss else output.square().mean()
        if odd == "a loss in place":
            loss.mul_(0.5)
        if odd == "a scaled loss":
            loss = loss / 3
        if odd == "a second loss":
            loss = loss + F.mse_loss(output, torch.zeros_like(output))
        if odd == "a gradient that is not finite":
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    def clear(self, odd: str) -> None:
        if odd == "cleared by hand":
            for parameter in self.model.parameters():
                parameter.grad = None
        elif odd != "no gradients are cleared":
            self.optimizer.zero_grad()
            if odd == "cleared twice":
                self.optimizer.zero_grad()

    def step(self, odd: str) -> None:
        if self.clears == "before":
            self.clear(odd)
        loss = self.loss(self.forward(odd), odd)
        if odd == "stops after the forward":
            raise Stopped
        if self.clears == "after":
            self.clear(odd)
        if odd == "a gradient of its own":
            torch.autograd.grad(loss, self.last.weight, retain_graph=True)
        if odd == "graph is kept":
            self.kept.append(loss)
        loss.backward(retain_graph=odd in ("retains", "a second backward"))
        if odd == "a second backward":
            loss.backward()
        if odd == "stops after the backward":
            raise Stopped
        if odd == "another rate":
            self.optimizer.param_groups[0]["lr"] *= 0.5
        if odd == "another optimizer":
            self.other.step()
        if odd != "no step":
            self.optimizer.step()
        if self.clears == "last":
            self.clear(odd)
        self.model.train()


def recorded(loop: Callable[[Doctor], None]) -> tuple[list[Fact], int]:
    """The facts, and how many of them were recorded as repetitions."""
    with Doctor() as doctor:
        loop(doctor)
    assert doctor.failure == ""
    return [told(fact) for fact in doctor.run.facts[1:]], len(doctor._journal.rows)


def compared(make: Callable[[], Callable[[Doctor], None]]) -> int:
    found, repeated = recorded(make())
    with in_full():
        expected, none = recorded(make())
    assert none == 0
    for one, other in zip(map(repr, found), map(repr, expected), strict=True):  # nan is not itself
        assert one == other
    return repeated


@pytest.mark.parametrize("clears", ["before", "after", "last", "never"])
@pytest.mark.parametrize("has_loss", [True, False])
def test_a_steady_run_is_recorded_as_in_full(clears: str, has_loss: bool) -> None:
    assert compared(lambda: Loop({}, clears=clears, has_loss=has_loss)) > 30


@pytest.mark.parametrize(
    ("odd", "clears", "at"),
    diagonals([one for one in ODD if one not in LATE], ["before", "after", "last"], [36, 47, 48]),
)
def test_a_step_that_differs_is_recorded_as_in_full(odd: str, clears: str, at: int) -> None:
    assert compared(lambda: Loop({at: odd}, clears=clears)) > 5


@settings(max_examples=max(5, settings().max_examples // 50), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    odd=st.dictionaries(st.integers(0, STEPS - 1), st.sampled_from(sorted({*ODD} - LATE)), max_size=10),
    clears=st.sampled_from(["before", "after", "last", "never"]),
    has_loss=st.booleans(),
    steps=st.integers(30, STEPS),
)
def test_any_steps_that_differ(odd: dict[int, str], clears: str, has_loss: bool, steps: int) -> None:
    compared(lambda: Loop(odd, clears=clears, has_loss=has_loss, steps=steps))


def test_whoever_counts_operations_sees_none_of_the_doctors() -> None:
    def flops(doctor: Doctor | None) -> int:
        loop = Loop({})
        if doctor is not None:
            loop(doctor)
        with FlopCounterMode(display=False) as mode:
            for _ in range(20):
                loop.step("")
        return int(mode.get_total_flops()) + 10**9 * sum(len(found) for found in mode.get_flop_counts().values())

    plain = flops(None)
    with Doctor() as doctor:
        assert flops(doctor) == plain
    assert doctor._journal.rows


def test_what_the_run_computes_is_bitwise_the_same() -> None:
    def weights() -> list[torch.Tensor]:
        loop = Loop({}, steps=200)
        loop(None)
        return [*loop.model.parameters(), torch.randn(3)]

    plain = weights()
    with Doctor() as doctor:
        seen = weights()
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
    assert doctor._journal.rows


def test_steps_that_wait_are_recorded_where_the_run_ends() -> None:
    doctor = Doctor()

    def stops() -> None:
        with doctor:
            Loop({}, steps=53)(doctor)
            raise KeyError

    with pytest.raises(KeyError):
        stops()
    assert [fact.step for fact in doctor.run.of(Stepped)] == list(range(53))


def test_a_graph_that_is_kept_is_counted() -> None:
    loop = Loop(dict.fromkeys(range(202), "graph is kept"), steps=202)
    with Doctor() as doctor:
        loop(doctor)
    found = {fact.step: fact.losses for fact in doctor.run.of(Memory) if fact.step >= 20}
    assert {25, 50, 100, 200} <= found.keys()
    assert all(abs(losses - step) <= 8 for step, losses in found.items()), found


@pytest.mark.parametrize("kind", [Forward, LossCall, Cleared, Backward, Stepped])
def test_a_call_from_another_line_is_seen(kind: type[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    given, labels = torch.randn(8, 4), torch.randint(3, (8,))
    with Doctor() as doctor:
        for step in range(190):
            new = kind if step >= 101 else None  # right behind a sample; the next one that is certain is in step 200
            if new is Forward:
                output = model(given)
            else:
                output = model(given)
            if new is LossCall:
                loss = F.cross_entropy(output, labels)
            else:
                loss = F.cross_entropy(output, labels)
            if new is Cleared:
                optimizer.zero_grad()
            else:
                optimizer.zero_grad()
            if new is Backward:
                loss.backward()
            else:
                loss.backward()
            if new is Stepped:
                optimizer.step()
            else:
                optimizer.step()
    facts = list(doctor.run.of(kind))
    others = [fact.step for fact in facts if fact.line != facts[0].line]
    assert others
    assert others[0] == 101
    assert others == list(range(others[0], 190))
    assert doctor._journal.rows
