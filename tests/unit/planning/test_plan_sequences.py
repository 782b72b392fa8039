"""Plans of losses over time: the longest chunks that fit, never more than the budget, and the bytes that were said.

How they could be silently wrong: the middle chunks that a trace leaves out would hold more than what stands in for
them; the plan's length would not reach the engine; the user's loss would be changed by the planning; real probes would
take more than the budget; a longer chunk that fits would not be found.
"""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch
from anybatch.planning.overtimesearch import InChunks, Shape
from anybatch.planning.recipe import FEW, Chunks
from planning_referee import Cap, alive_in, peak_of
from reference import assert_float64, gradients_of
from sequence_models import SequenceSubject, subject_of

ROWS, STEPS = 4, 40


def plan_of(subject: SequenceSubject, batch: Any, memory: int) -> anybatch.Plan:
    return anybatch.plan(subject.model, subject.loss_fn, batch, subject.optimizer(), memory=memory)


@functools.cache
def whole_bytes(name: str) -> int:
    """Of all steps in one chunk, measured."""
    subject = subject_of(name)
    batch = subject.batch(ROWS, STEPS)
    subject.loss_fn.chunk = STEPS if subject.loss_fn.mode == "exact" else subject.loss_fn.chunk
    step = subject.step()
    step(batch)
    return peak_of(functools.partial(step, batch), alive_in(subject.model, step._optimizers, batch))


def planned(result: anybatch.StepResult) -> anybatch.Plan:
    assert result.plan is not None
    return result.plan


def assert_refused_rightly(error: anybatch.DoesNotFit, budget: int) -> None:
    assert error.needed is not None
    assert 0.98 * budget < error.needed < 10 * budget


@pytest.mark.parametrize("percent", [pytest.param(101, marks=pytest.mark.slow), 55])
@pytest.mark.parametrize("name", ["cell", "hand", "last", "carried", "lstm", "gru", "truncated"])
def test_it_stays_within_and_the_peak_is_the_one_that_was_said(name: str, percent: int) -> None:
    subject = subject_of(name)
    batch, budget = subject.batch(ROWS, STEPS), whole_bytes(name) * percent // 100
    step = subject.step(memory=budget)
    results: list[anybatch.StepResult] = []

    def call() -> None:
        results.append(step(batch))

    try:
        first = peak_of(call, alive_in(subject.model, step._optimizers, batch))
    except anybatch.DoesNotFit as error:
        assert_refused_rightly(error, budget)
        return
    second = peak_of(call, alive_in(subject.model, step._optimizers, batch))
    plan = planned(results[-1])
    assert first <= budget
    assert second <= budget
    assert abs(plan.peak_bytes / second - 1) <= subject.tolerance, f"said {plan.peak_bytes}, measured {second}"
    assert [len(result.attempts) for result in results] == [1, 1]
    assert (plan.chunk_length is None) == (name == "truncated")


def test_the_gradient_is_that_of_all_steps() -> None:
    for percent in (75,):
        subject, whole = subject_of("hand"), subject_of("hand")
        batch = {
            name: value.double() if value.is_floating_point() else value
            for name, value in subject.batch(ROWS, STEPS).items()
        }
        loss = whole.loss_fn(whole.model.double(), batch)
        (loss.total / loss.count).backward()
        step = subject_of_double(subject).step(memory=2 * whole_bytes("hand") * percent // 100)
        result = step(batch)
        assert planned(result).chunk_length < STEPS  # type: ignore[operator]  # it is a number here
        assert_float64(gradients_of(subject.model), gradients_of(whole.model))


def subject_of_double(subject: SequenceSubject) -> SequenceSubject:
    subject.model.double()
    return subject


def test_a_longer_chunk_would_not_fit() -> None:
    """All lengths are tried by hand."""
    budget = whole_bytes("hand") * 80 // 100
    subject = subject_of("hand")
    batch = subject.batch(ROWS, STEPS)
    chosen = plan_of(subject, batch, budget).chunk_length
    fits = []
    for length in sorted({-(-STEPS // chunks) for chunks in range(1, 11)}):
        other = subject_of("hand")
        other.loss_fn.chunk = length
        step = other.step()
        step(batch)
        if peak_of(functools.partial(step, batch), alive_in(other.model, step._optimizers, batch)) <= budget:
            fits.append(length)
    assert chosen == max(fits)


@pytest.mark.slow
def test_what_does_not_fit_needs_no_more_than_what_is_found_by_hand() -> None:
    subject = subject_of("hand")
    batch = subject.batch(ROWS, STEPS)
    with pytest.raises(anybatch.DoesNotFit) as caught:
        plan_of(subject, batch, 2**10)
    floor = 2**60
    for length in (1, 2, 4, 8, 20):
        other = subject_of("hand")
        other.loss_fn.chunk = length
        step = other.step(micro_batch_size=1)
        step(batch)
        floor = min(floor, peak_of(functools.partial(step, batch), alive_in(other.model, step._optimizers, batch)))
    needed = caught.value.needed
    assert needed is not None
    assert needed <= 1.01 * floor
    plan = plan_of(subject, batch, needed)  # which has many chunks
    step = subject_of("hand").step(plan=plan)
    step(batch)
    measured = peak_of(functools.partial(step, batch), alive_in(step.model, step._optimizers, batch))
    assert measured <= needed
    assert abs(plan.peak_bytes / measured - 1) <= subject.tolerance


def test_under_a_cap_nothing_runs_out() -> None:
    subject = subject_of("hand")
    batch, budget = subject.batch(ROWS, STEPS), whole_bytes("hand") * 75 // 100
    step = subject.step(memory=budget)
    with Cap(budget, alive_in(subject.model, step._optimizers, batch)) as cap:
        for _ in range(2):
            step(batch)
    assert cap.raised == 0


def test_planning_leaves_the_users_loss_as_it_is() -> None:
    subject = subject_of("carried")
    before = dict(subject.loss_fn.__dict__)
    plan_of(subject, subject.batch(ROWS, STEPS), whole_bytes("carried") // 2)
    assert {name: value for name, value in subject.loss_fn.__dict__.items() if before[name] is not value} == {}
    assert subject.loss_fn.carried is None
    assert not subject.loss_fn.known_dims


def test_the_length_reaches_the_engine_and_a_longer_batch_is_planned_again() -> None:
    subject = subject_of("hand")
    seen: list[int] = []
    inner = subject.loss_fn.chunk_loss

    def noted(model: Any, chunk: Any, state: Any) -> Any:
        if type(chunk["x"]) is torch.Tensor:
            seen.append(chunk["x"].shape[1])
        return inner(model, chunk, state)

    subject.loss_fn.chunk_loss = noted
    step = subject.step(memory=whole_bytes("hand") * 80 // 100)
    first = planned(step(subject.batch(ROWS, STEPS)))
    seen.clear()
    assert planned(step(subject.batch(ROWS, STEPS))) is first
    assert max(seen) == first.chunk_length
    shorter = planned(step(subject.batch(ROWS, STEPS // 2)))
    assert shorter is first
    longer = subject_of("hand").step(memory=2**20)
    one = planned(longer(subject.batch(ROWS, 8)))
    assert planned(longer(subject.batch(ROWS, 12))) is not one


@given(st.integers(1, 5000), st.floats(1, 1e5), st.floats(0, 1e5), st.floats(0, 1e6))
def test_the_length_with_the_least_memory(steps: int, step: float, state: float, fixed: float) -> None:
    shape = Shape(steps, fixed, step, state)
    assert shape.peak(shape.best) == min(shape.peak(length) for length in shape.lengths)
    assert shape.lengths[0] == steps
    assert shape.lengths[-1] == 1


@given(st.integers(1, 400), st.integers(1, 400))
def test_few_chunks_end_as_many_do(total: int, length: int) -> None:
    """What is looked at has the last chunk that the whole has, and the one before it is a full one."""
    loss = anybatch.OverTime(lambda model, chunk, state: (None, state), lambda model, batch: None)
    shown, left_out = InChunks(loss, Chunks(length)).shown(total)
    chunks = -(-total // length)
    assert -(-shown // length) == min(chunks, FEW)
    assert left_out == chunks - min(chunks, FEW)
    assert shown % length == total % length


def test_where_no_chunk_of_all_samples_fits_as_many_run_at_once_as_do(constant_times: None) -> None:
    subject = subject_of("lstm")
    batch = subject.batch(8, 60)
    smallest = plan_of(subject, batch, 2**30).smallest_bytes
    splits = [plan_of(subject, batch, smallest * percent // 100).micro_batches for percent in (100, 105, 120, 150)]
    assert splits[-1] <= 4


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


def of_normed(model: Any, chunk: Any, state: Any) -> tuple[torch.Tensor, Any]:
    return (model(chunk["x"])[..., 0] - chunk["y"]).square().mean(), state


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"chunk": 40, "mode": "truncated"}])
def test_batch_norm_sees_all_steps_and_all_samples_at_once(options: Any) -> None:
    torch.manual_seed(0)
    model, batch = Normed().double(), {"x": torch.randn(6, 40, 3).double(), "y": torch.randn(6, 40).double()}
    of_normed(model, batch, None)[0].backward()
    expected = gradients_of(model)
    over_time = anybatch.OverTime(of_normed, lambda model, batch: None, **options)
    step = anybatch.TrainStep(model, over_time, torch.optim.SGD(model.parameters(), lr=0.0), memory="1MiB")
    model.norm.reset_running_stats()
    out = step(batch)
    assert out.micro_batches == 1
    assert_float64(gradients_of(model), expected)
    smallest = planned(out).peak_bytes
    tight = anybatch.TrainStep(model, over_time, torch.optim.SGD(model.parameters(), lr=0.0), memory=smallest // 2)
    with pytest.raises(anybatch.DoesNotFit, match=r"norm \(BatchNorm1d\) is in training mode"):
        tight(batch)
