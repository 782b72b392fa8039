"""A step follows its plan: to a smaller one when memory runs out and back again, and through a resume."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anybatch
from anybatch.batch.batches import Splittable
from anybatch.planning.following import Follower
from anybatch.planning.subjects import Behaviour
from anybatch.records.plans import Plan
from faults import different, facts
from memory_steps import (
    WIDTH,
    Net,
    RunsOut,
    Tokens,
    like,
    padded,
    peak_of_call,
    plan_of,
    points,
    sgd,
    smallest_of,
    square,
    varied,
)
from reference import RELATIVE_FLOAT64, whole_gradients


@pytest.mark.usefixtures("constant_times")
@pytest.mark.parametrize("times", [1, 2, 3])
def test_running_out_of_memory_takes_a_smaller_plan_with_the_same_gradient(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net().double()
    batch = {"x": torch.randn(32, 5, WIDTH, dtype=torch.float64)}
    loss_fn = RunsOut()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), memory=2**30)
    step(batch)
    first = plan_of(step)
    expected, _ = whole_gradients(model, square, batch)
    loss_fn.times = times
    out = step(batch)
    # The planner's measured runs may run out of memory, too; the step itself goes on from them.
    assert loss_fn.times == 0
    assert sum(attempt.outcome == "done" for attempt in out.attempts) == 1
    assert plan_of(step).peak_bytes <= 0.85**1 * first.peak_bytes
    assert out.plan is plan_of(step)
    assert any("out of memory under the plan" in record.getMessage() for record in caplog.records)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert wanted is not None
        assert (parameter.grad - wanted).norm() <= RELATIVE_FLOAT64 * wanted.norm()
    for _ in range(200):
        step(batch)
        if plan_of(step) is first:
            break
    assert plan_of(step) is first
    assert step._limit.value == first.micro_batch_size


def test_memory_that_runs_out_while_it_measures_is_no_end() -> None:
    model = Net()
    loss_fn = RunsOut(times=2, rows=16)
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=2**30)
    out = step(points(32))
    assert out.skipped == ""
    assert step.updates == 1


class Stub:
    """A planner that has one smaller plan."""

    def __init__(self, rows: int, found: Plan) -> None:
        self.rows, self.found, self.times = rows, found, None
        self.subject = SimpleNamespace(behaviour=Behaviour(writes_batch=False))

    def plan(self, budget: int, **_: Any) -> Plan:
        if self.found.peak_bytes > budget:
            raise anybatch.DoesNotFit("made up", needed=1, budget=budget)
        return self.found

    def attend(self, splittable: Any) -> None:
        pass


@pytest.mark.parametrize(("first_size", "smaller_size"), [(8, 2), (8, 8), (8, 16), (8, 3), (32, 1)])
def test_only_planned_ways_are_run_until_the_first_plan_is_back(first_size: int, smaller_size: int) -> None:
    """Twice the micro-batch of a smaller plan under its memory optimizations is a way that nobody planned."""
    model = Net()
    loss_fn = RunsOut()
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=2**30)
    step(points(32))
    follower: Any = step._follower
    first = like(plan_of(step), first_size, 32 // first_size, 1000)
    smaller = like(first, smaller_size, 32 // smaller_size, 500, ("blocks.0",))
    follower._first = first
    follower._take(first)
    follower._planner = Stub(32, smaller)
    loss_fn.times = 1
    step(points(32))
    assert plan_of(step) == smaller
    for _ in range(100):
        out = step(points(32))
        chosen = plan_of(step).chosen
        assert out.attempts[-1].micro_batch_size <= max(first_size, smaller_size)
        assert step._limit.value == chosen.micro_batch_size
        if plan_of(step) == first:
            break
    assert plan_of(step) == first


@pytest.mark.parametrize("killed_after", [0, 2, 3])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_killed(killed_after: int) -> None:
    """Memory runs out in the second batch; the first run goes on, the other one starts from what was saved."""
    batches = [points(16) for _ in range(6)]
    model = Net(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_fn = RunsOut()
    memory = 2 * smallest_of(model, square, batches[0])
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=memory)
    for index, batch in enumerate(batches[: killed_after + 1]):
        loss_fn.times = int(index == 1)
        step(batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))

    def rest(step: anybatch.TrainStep) -> list[Any]:
        outs = []
        for index, batch in enumerate(batches[killed_after + 1 :], start=killed_after + 1):
            loss_fn.times = int(index == 1)
            outs.append(step(batch))
        return [(out.micro_batches, None if out.plan is None else out.plan.chosen) for out in outs]

    goes_on, there = rest(step), facts(model, [optimizer], step=step)
    other = Net(dropout=0.2)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    again = anybatch.TrainStep(other, loss_fn, other_optimizer, memory=memory)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    resumed = rest(again)
    if killed_after > 0:  # else the smaller plan is made by each run from times of its own
        assert resumed == goes_on
        assert different(there, facts(other, [other_optimizer], step=again)) == []
    assert resumed[0][0] > 1 or goes_on[0][0] == 1


def test_a_smaller_plan_with_larger_micro_batches_survives_a_resume() -> None:
    model = Net()
    step = anybatch.TrainStep(model, square, sgd(model), memory=2**30)
    step(points(32))
    follower: Any = step._follower
    first = like(plan_of(step), 8, 4, 1000)
    follower._first = first
    follower._take(first)
    follower._planner = Stub(32, like(first, 16, 2, 500, ("blocks.0",)))
    follower.prepare(Splittable([points(32)]), lambda: None)
    step._limit.shrink(8)
    follower.release()
    again = anybatch.TrainStep(model, square, sgd(model), memory=2**30)
    again.load_state_dict(step.state_dict())
    assert again._limit.value == step._limit.value == 16
    assert plan_of(again) == plan_of(step)


def test_a_resumed_run_of_raw_samples_stays_under_the_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Tokens()
    optimizer = sgd(model)
    short, long = varied(generator, 12, 6), varied(generator, 12, 40)
    options: dict[str, Any] = {"collate": padded}
    budget = int(1.3 * smallest_of(model, square, long, **options))
    options |= {"memory": budget, "verify": "off"}  # the loss counts the padding, which is not what this is about
    step = anybatch.TrainStep(model, square, optimizer, **options)
    step(short)
    again = anybatch.TrainStep(model, square, optimizer, **options)
    again.load_state_dict(step.state_dict())
    again(long)
    assert peak_of_call(again, long) <= budget


@pytest.mark.usefixtures("constant_times")
def test_what_the_allocator_reserves_makes_the_plan_smaller_for_good() -> None:
    """The arithmetic of the confirming steps; the steps themselves need CUDA."""
    model = Net()
    step = anybatch.TrainStep(model, square, sgd(model), memory=2**20)
    batch = {"x": torch.randn(64, 5, WIDTH)}
    step(batch)
    follower, first = step._follower, plan_of(step)
    assert isinstance(follower, Follower)
    follower.prepare(Splittable([batch]), lambda: None)
    # By 1.1: the smallest plan is not far from what the optimizer's step needs. On a busy machine, where times are
    # measured, it may win itself, and none is smaller.
    follower._learn(int(1.1 * first.peak_bytes), budget=first.peak_bytes)
    assert plan_of(step).peak_bytes <= first.peak_bytes / 1.1
    assert follower.is_on_first_plan, "a quiet while would bring the larger plan back"
    smaller = plan_of(step)
    follower._learn(smaller.peak_bytes, budget=smaller.peak_bytes)
    assert plan_of(step) is smaller
