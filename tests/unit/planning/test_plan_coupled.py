"""Plans of coupled losses: micro-batches and kept graphs that fit, the fastest of them, and the bytes that were said.

How they could be silently wrong: a phase of the pass is left out of the sum, so that it is the peak when nobody
expects it; the loss is traced on a micro-batch and not on all samples; the number of graphs does not reach the engine;
planning takes more than the budget; a faster way that fits is not found.
"""

import functools
from typing import Any

import pytest
import torch

import anybatch
from anybatch.batch.batches import Splittable
from anybatch.planning.coupledsearch import CoupledSearch
from anybatch.planning.devices import Target
from anybatch.planning.following import Follower
from anybatch.planning.planner import Planner
from coupled_models import FACTORIES, CoupledSubject, contrast, encode_pair, pairs, subject_of
from planning_referee import Cap, alive_in, peak_of
from reference import assert_bitwise, assert_float64, gradients_of

ROWS, FEW_ROWS = 16, 8
PERCENT = (101, 45)


def plan_of(subject: CoupledSubject, batch: Any, memory: int) -> anybatch.Plan:
    options = {name: value for name, value in subject.options.items() if name != "verify"}  # which changes no bytes
    return anybatch.plan(subject.model, subject.loss_fn, batch, subject.optimizer(), memory=memory, **options)


def peak_of_step(step: anybatch.TrainStep, batch: Any) -> int:
    step(batch)
    return peak_of(functools.partial(step, batch), alive_in(step.model, step._optimizers, batch))


def planned(result: anybatch.StepResult) -> anybatch.Plan:
    assert result.plan is not None
    return result.plan


@functools.cache
def whole_bytes(name: str, rows: int = ROWS) -> int:
    subject = subject_of(name)
    return peak_of_step(subject.step(), subject.batch(rows))


def assert_refused_rightly(error: anybatch.DoesNotFit, budget: int) -> None:
    assert error.needed is not None
    assert 0.98 * budget < error.needed < 10 * budget


@pytest.mark.parametrize("percent", [pytest.param(PERCENT[0], marks=pytest.mark.slow), *PERCENT[1:]])
@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_it_stays_within_and_the_peak_is_the_one_that_was_said(name: str, percent: int) -> None:
    subject = subject_of(name)
    rows = ROWS if name == "clip_in_rows" else FEW_ROWS  # a loss in blocks of rows has two
    batch, budget = subject.batch(rows), whole_bytes(name, rows) * percent // 100
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
    assert results[-1].micro_batches == plan.micro_batches


@pytest.mark.parametrize("name", ["clip", "clip_with_dropout", "supcon", "texts_by_cost"])
def test_every_number_of_graphs_takes_what_is_said(name: str) -> None:
    """Among the other ways of a plan are those that keep none, one, some and all."""
    subject = subject_of(name)
    batch = subject.batch(ROWS)
    whole = plan_of(subject, batch, 2**40)
    rows = [row for row in whole.alternatives if row.micro_batches > 1]
    assert len(rows) >= 2
    for row in rows[:: max(1, len(rows) // 4)]:
        plan = anybatch.Plan.from_dict({**whole.to_dict(), "chosen": row.to_dict()})
        measured = peak_of_step(subject_of(name).step(plan=plan), batch)
        assert abs(row.peak_bytes / measured - 1) <= subject.tolerance, f"{row}: measured {measured}"


def test_gradients_are_those_of_the_whole_batch() -> None:
    batch = {name: value.double() if value.is_floating_point() else value for name, value in pairs(ROWS).items()}
    whole = subject_of("clip")
    whole.loss_fn(whole.model.double(), batch).backward()
    for percent in (55,):
        subject = subject_of("clip")
        subject.model.double()
        result = subject.step(memory=2 * whole_bytes("clip") * percent // 100)(batch)
        assert planned(result).micro_batches > 1
        assert_float64(gradients_of(subject.model), gradients_of(whole.model))


def test_planning_changes_nothing() -> None:
    """With dropout the first step is bitwise that of a step that was given the same size and number."""
    subject, other = subject_of("clip_with_dropout"), subject_of("clip_with_dropout")
    batch = subject.batch(ROWS)
    budget = whole_bytes("clip_with_dropout") // 2
    torch.manual_seed(5)
    plan = planned(subject.step(memory=budget)(batch))
    torch.manual_seed(5)
    other.loss_fn.keep = plan.kept_graphs
    other.step(micro_batch_size=plan.micro_batch_size)(batch)
    assert_bitwise(gradients_of(subject.model), gradients_of(other.model))


@pytest.mark.parametrize("name", ["supcon", "segmentation"])
def test_what_does_not_fit_can_not_be_done_by_hand(name: str) -> None:
    subject = subject_of(name)
    batch = subject.batch(ROWS)
    with pytest.raises(anybatch.DoesNotFit) as caught:
        plan_of(subject, batch, 2**10)
    needed, floor = caught.value.needed, 2**60
    for size in (1, 2, 8):
        for keep in (0, 1):
            by_hand = subject_of(name)
            by_hand.loss_fn.keep = keep
            floor = min(floor, peak_of_step(by_hand.step(micro_batch_size=size), batch))
    assert needed is not None
    assert needed <= 1.002 * floor
    plan = plan_of(subject, batch, needed)
    assert peak_of_step(subject_of(name).step(plan=plan), batch) <= needed


@pytest.mark.parametrize("percent", [90, 50])
def test_what_a_loss_needs_that_was_stopped_is_not_claimed_to_be_known(percent: int) -> None:
    """It can't be traced, so that it is run and stopped at the budget: what it takes in the end is more than that."""

    def few(model: Any, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs @ outputs.T)[batch["y"] < 2].logsumexp(1).mean()

    def encode(model: Any, batch: Any) -> Any:
        return model(batch["x"])

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 6))
    batch = {"x": torch.randn(24, 8), "y": torch.arange(24) % 3}
    loss_fn, optimizer = anybatch.Coupled(encode, few), torch.optim.SGD(model.parameters(), lr=0.1)
    smallest = anybatch.plan(model, loss_fn, batch, optimizer, memory="1GiB").smallest_bytes
    with pytest.raises(anybatch.DoesNotFit, match=r"at least, possibly more; .*Coupled.row_block") as caught:
        anybatch.plan(model, loss_fn, batch, optimizer, memory=smallest * percent // 100)
    assert caught.value.needed is not None
    assert smallest * percent // 100 < caught.value.needed <= smallest


def test_what_does_not_fit_says_what_was_tried_and_needs_what_a_plan_calls_the_smallest() -> None:
    subject = subject_of("supcon")
    batch = subject.batch(ROWS)
    smallest = plan_of(subject, batch, 2**40).smallest_bytes
    for budget in (2**10, 99 * smallest // 100):
        with pytest.raises(anybatch.DoesNotFit, match=r"torch.optim.SGD without momentum needs") as caught:
            plan_of(subject, batch, budget)
        assert caught.value.needed == smallest
    assert plan_of(subject, batch, smallest).peak_bytes <= smallest


def test_no_way_on_the_grid_is_faster_by_the_times_that_were_measured() -> None:
    subject = subject_of("supcon")
    batch = subject.batch(ROWS)
    target = Target("cpu", "cpu", 0, True)
    for percent in (75, 60):
        budget = whole_bytes("supcon") * percent // 100
        step = subject.step()
        resolved = step._subject(Splittable([batch]))
        planner = Planner(resolved, target, patience=0.3)
        plan = planner.plan(budget)
        search = planner._search
        assert isinstance(search, CoupledSearch)
        grid = [search.row_of(one, kept) for one in search.splittings for kept in range(len(one.parts) + 1)]
        fitting = [row for row in grid if row.peak_bytes <= budget]
        assert fitting
        assert plan.seconds is not None
        assert all(row.seconds is not None and plan.seconds <= row.seconds * 1.0001 for row in fitting)


def test_memory_that_really_ends_there() -> None:
    subject = subject_of("clip")
    batch, budget = subject.batch(ROWS), whole_bytes("clip") * 60 // 100
    step = subject.step(memory=budget)
    with Cap(budget, alive_in(subject.model, step._optimizers, batch)) as cap:
        for _ in range(2):
            step(batch)
    assert cap.raised == 0


def test_an_encoder_that_runs_for_real_is_stopped_at_the_budget() -> None:
    """Its loss reads values, so that nothing is traced on fake tensors."""
    subject = subject_of("triplets")
    batch, budget = subject.batch(FEW_ROWS), whole_bytes("triplets", FEW_ROWS) * 45 // 100
    with Cap(budget, alive_in(subject.model, [], batch)) as cap, pytest.raises(anybatch.DoesNotFit):
        plan_of(subject, batch, budget)
    assert cap.raised == 0


class RunsOut:
    """An encoder that runs out of memory for real as often as it is told."""

    def __init__(self) -> None:
        self.times = 0
        self.sizes: list[tuple[int, bool]] = []

    def __call__(self, model: Any, batch: Any) -> Any:
        if type(batch["a"]) is torch.Tensor:
            self.sizes.append((len(batch["a"]), torch.is_grad_enabled()))
            if self.times:
                self.times -= 1
                raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return encode_pair(model, batch)


def refuse(budget: int, *, race: bool = True) -> anybatch.Plan:
    raise anybatch.DoesNotFit("nothing is smaller", needed=budget + 1, budget=budget, modules=[])


def test_out_of_memory_takes_a_smaller_plan_and_then_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = RunsOut()
    subject = subject_of("clip")
    step = anybatch.TrainStep(
        subject.model, anybatch.Coupled(encode, contrast), subject.optimizer(), memory=whole_bytes("clip") * 70 // 100
    )
    batch = subject.batch(ROWS)
    first = planned(step(batch))
    encode.times = 1
    smaller = planned(step(batch))
    assert smaller.peak_bytes <= 0.85 * first.peak_bytes
    assert step._settings.kept_graphs == smaller.kept_graphs
    assert isinstance(step._follower, Follower)
    monkeypatch.setattr(step._follower._planner, "plan", refuse)
    encode.times = 1
    halved = step(batch)
    assert halved.micro_batches > smaller.micro_batches
    assert step._settings.kept_graphs == 1


def test_the_number_of_graphs_reaches_the_engine() -> None:
    encode = RunsOut()
    subject = subject_of("clip")
    step = anybatch.TrainStep(
        subject.model, anybatch.Coupled(encode, contrast), subject.optimizer(), memory=whole_bytes("clip") * 60 // 100
    )
    batch = subject.batch(ROWS)
    plan = planned(step(batch))
    encode.sizes.clear()
    step(batch)
    count, kept = plan.micro_batches, plan.kept_graphs
    assert kept is not None
    assert 0 < kept < count
    assert len(encode.sizes) == 2 * count - kept
    assert f"encode {count - kept} of {count} twice" in str(plan)


def test_a_loss_that_caches_a_mask_runs_afterwards() -> None:
    """A mask that was made while the loss was traced has no numbers."""
    masks: dict[int, Any] = {}

    def loss(model: Any, outputs: Any) -> Any:
        n = len(outputs)
        if n not in masks:
            masks[n] = torch.eye(n)
        return ((outputs @ outputs.T - masks[n]) ** 2).mean()

    subject = subject_of("supcon")
    step = anybatch.TrainStep(
        subject.model, anybatch.Coupled(lambda model, batch: model(batch["a"]), loss), subject.optimizer(),
        memory=whole_bytes("supcon"),
    )  # fmt: skip
    assert step(subject.batch(ROWS)).losses


def test_batchnorm_is_not_split_unless_that_is_said() -> None:
    subject = subject_of("batchnorm")
    batch = subject.batch(ROWS)
    assert plan_of(subject, batch, 2**40).micro_batches == 1
    plan = anybatch.plan(
        subject.model, subject.loss_fn, batch, subject.optimizer(), memory=whole_bytes("batchnorm") * 60 // 100,
        batch_norm="frozen",
    )  # fmt: skip
    assert plan.micro_batches > 1


def test_bytes_of_many_micro_batches_follow_from_a_pass_of_few() -> None:
    """Of eight micro-batches at most six run in a trace; to the byte for every number of graphs."""
    subject = subject_of("clip_with_dropout")
    batch = subject.batch(ROWS)
    planner = Planner(subject.step()._subject(Splittable([batch])), Target("cpu", "cpu", 0, True))
    search = planner._search
    assert isinstance(search, CoupledSearch)
    search.look_within(2**40, 2**40)
    splitting = next(one for one in search.splittings if len(one.parts) == 8)
    for keep in (0, 1, 2, 4, 8):
        other = subject_of("clip_with_dropout")
        other.loss_fn.keep = keep
        said = search.row_of(splitting, keep).peak_bytes
        assert said == peak_of_step(other.step(micro_batch_size=2), batch)


def test_graphs_that_are_alike_are_let_go_of_one_after_the_other() -> None:
    """The peak is in the backward of the second, whose activations go while those of the others are all there."""

    def encode(model: Any, batch: Any) -> Any:
        return model(batch["x"]), model(batch["y"])

    def loss(model: Any, outputs: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs[0] @ outputs[1].T, torch.arange(len(outputs[0])))

    def step(keep: int | None = None, **options: Any) -> anybatch.TrainStep:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 128), torch.nn.GELU())
        model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 4))
        coupled = anybatch.Coupled(encode, loss, keep=keep)
        return anybatch.TrainStep(model, coupled, torch.optim.AdamW(model.parameters()), **options)

    batch = {name: torch.randn(64, 32) for name in "xy"}
    search = Planner(step()._subject(Splittable([batch])), Target("cpu", "cpu", 0, True))._search
    assert isinstance(search, CoupledSearch)
    search.look_within(2**40, 2**40)
    splitting = next(one for one in search.splittings if len(one.parts) == 8)
    for keep in (0, 1, 2, 5, 8):
        assert search.row_of(splitting, keep).peak_bytes == peak_of_step(step(keep, micro_batch_size=8), batch)


def test_the_smallest_is_the_whole_batch_where_activations_are_few() -> None:
    """Optimizer state and weights are most of it, beside which outputs that are kept take more than graphs."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), *layers, torch.nn.Linear(128, 10)).double()
    optimizer = torch.optim.Adam(model.parameters())
    batch = {name: torch.randn(64, 32).double() for name in ("a", "b")}
    loss_fn = anybatch.Coupled(
        lambda model, batch: (model(batch["a"]), model(batch["b"])),
        lambda model, out: torch.nn.functional.cross_entropy(out[0] @ out[1].T, torch.arange(len(out[0]))),
    )
    found = anybatch.plan(model, loss_fn, batch, optimizer, memory="4GiB")
    assert found.smallest_bytes <= found.whole_bytes
    with pytest.raises(anybatch.DoesNotFit) as caught:
        anybatch.plan(model, loss_fn, batch, optimizer, memory=found.smallest_bytes - 1)
    assert caught.value.needed == found.smallest_bytes
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=found.smallest_bytes)
    assert peak_of_step(step, batch) <= found.smallest_bytes
