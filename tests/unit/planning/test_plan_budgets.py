"""No step takes more than its budget, planning included; what is refused can't be done by hand either."""

import functools
from typing import Any

import pytest
import torch

import anybatch
from diagonals import diagonals
from planning_data import as_float64_batch
from planning_models import FACTORIES
from planning_referee import Cap, alive_in, peak_of
from planning_truth import brute_force, peak_of_first_call, peak_of_whole
from reference import Gradients, as_float64, assert_float32, gradients_of, whole_gradients

SAMPLES = 16
PERCENT = (90, 60, 40, 25, 15)
MODELS = ("vision_transformer", "cnn_groupnorm", "heterogeneous", "experts", "lstm", "deep_residual")


@functools.cache
def whole_peak(name: str) -> int:
    return peak_of_whole(FACTORIES[name](), SAMPLES)


@functools.cache
def floor(name: str) -> int:
    return brute_force(FACTORIES[name], SAMPLES).floor


@functools.cache
def truth(name: str) -> tuple[Gradients, Gradients]:
    """The gradients of the whole batch, in float32 and in float64."""
    subject = FACTORIES[name]()
    batch = subject.make_batch(SAMPLES)
    whole, _ = whole_gradients(subject.model, subject.loss_fn, batch)
    exact, _ = whole_gradients(as_float64(subject.model), subject.loss_fn, as_float64_batch(batch))
    return whole, exact


def plan_of(result: anybatch.StepResult) -> anybatch.Plan:
    assert result.plan is not None
    return result.plan


def assert_refused_rightly(name: str, budget: int, error: anybatch.DoesNotFit) -> None:
    assert error.budget is not None
    assert error.needed is not None
    assert error.budget <= budget < error.needed
    assert budget < floor(name), f"by hand it takes {floor(name)} bytes"


@pytest.mark.parametrize(("name", "percent"), diagonals(MODELS, PERCENT, each=2))
def test_it_stays_within(name: str, percent: int) -> None:
    subject = FACTORIES[name]()
    batch, budget = subject.make_batch(SAMPLES), whole_peak(name) * percent // 100
    step = subject.step(memory=budget)
    try:
        first = peak_of_first_call(step, batch)
    except anybatch.DoesNotFit as error:
        assert_refused_rightly(name, budget, error)
        return
    gradients = gradients_of(subject.model)
    results: list[anybatch.StepResult] = []
    second = peak_of(lambda: results.append(step(batch)), alive_in(step.model, step._optimizers, batch))
    plan = plan_of(results[0])
    assert first <= budget, f"the first call took {first} bytes of {budget}"
    assert second <= budget, f"the second call took {second} bytes of {budget}"
    assert plan.budget == budget
    assert abs(plan.peak_bytes / second - 1) <= subject.tolerance
    assert [attempt.outcome for attempt in results[0].attempts] == ["done"]
    assert_float32(gradients, *truth(name), results[0].micro_batches)


@pytest.mark.parametrize("percent", [97, 90, 80, 60])
def test_a_batch_that_can_not_be_split(percent: int) -> None:
    """Only recomputing is left, and what can be done by hand is found."""
    subject = FACTORIES["cnn_batchnorm"]()
    batch, budget = subject.make_batch(SAMPLES), whole_peak("cnn_batchnorm") * percent // 100
    step = subject.step(memory=budget)
    try:
        assert peak_of_first_call(step, batch) <= budget
    except anybatch.DoesNotFit as error:
        assert_refused_rightly("cnn_batchnorm", budget, error)
        return
    assert step(batch).micro_batches == 1


@pytest.mark.parametrize("name", ["long_sequence", "deep_residual"])
def test_less_than_one_sample_at_once(name: str) -> None:
    """Under a budget that not even one sample fits into, blocks are recomputed."""
    subject, alone = FACTORIES[name](), FACTORIES[name]()
    batch = subject.make_batch(8)
    one = alone.step(micro_batch_size=1)
    one(batch)
    budget = int(0.6 * peak_of(lambda: one(batch), alive_in(one.model, one._optimizers, batch)))
    step = subject.step(memory=budget)
    assert peak_of_first_call(step, batch) <= budget
    found = plan_of(step(batch))
    assert found.chosen.recompute
    assert found.peak_bytes <= budget


def test_memory_that_really_ends_there() -> None:
    """Under a cap at the budget nothing runs out, neither while it plans nor later."""
    for name in ("vision_transformer", "heterogeneous"):
        subject = FACTORIES[name]()
        batch, budget = subject.make_batch(SAMPLES), whole_peak(name) * 30 // 100
        step = subject.step(memory=budget)
        with Cap(budget, alive_in(step.model, step._optimizers, batch)) as cap:
            for _ in range(3):
                step(batch)
        assert cap.raised == 0


def test_an_impossible_budget_says_what_is_needed_and_that_is_enough() -> None:
    name = "vision_transformer"
    subject = FACTORIES[name]()
    batch = subject.make_batch(SAMPLES)
    before = [parameter.detach().clone() for parameter in subject.model.parameters()]
    with pytest.raises(anybatch.DoesNotFit) as caught:
        subject.step(memory=whole_peak(name) // 100)(batch)
    assert all(torch.equal(one, other) for one, other in zip(subject.model.parameters(), before, strict=True))
    needed: Any = caught.value.needed
    assert needed <= 1.001 * floor(name)  # numbers without dimensions, in another order
    step = subject.step(memory=needed)
    assert peak_of_first_call(step, batch) <= needed
    assert plan_of(step(batch)).peak_bytes <= needed
