"""Budgets over ranks: each plans for its own batch and memory, and no rank waits for one that has given up."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import anybatch
from memory_steps import WIDTH, Net, RunsOut, constant_times, like, peak_of_call, plan_of, smallest_of, square
from ranks_running import (
    Case,
    assert_same_everywhere,
    assert_weights_same,
    counted,
    everywhere,
    hashed,
    raised,
    run_cases,
)
from reference import assert_float64, whole_gradients

Batch = dict[str, torch.Tensor]


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def batches_of(rows: tuple[int, ...], length: int = 6, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(n, length, WIDTH, generator=generator, dtype=torch.float64)} for n in rows]


def joined(batches: list[Batch]) -> Batch:
    return {"x": torch.cat([batch["x"] for batch in batches])}


def still(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def other_budgets(rank: int, world: int, *, wrap: Any = None, rows: tuple[int, ...] = (40, 24)) -> None:
    """Each rank stays under its own budget, in micro-batches of its own size, and the gradient is that of all."""
    model, batches = build(), batches_of(rows)
    with_others = model if wrap is None else wrap(model)
    smallest = smallest_of(build(), square, batches[rank])
    step = anybatch.TrainStep(
        with_others, square, still(model), memory=int((1.5 if rank == 0 else 4.0) * smallest) + 8 * 2**20
    )
    for seed in (1, 2):
        batches = batches_of(rows, seed=seed)
        with counted() as numbers:
            out = step(batches[rank])
        assert numbers == {"all_reduce": 1, "all_gather": 2, "broadcast": 0}, numbers
        expected, values = whole_gradients(build(), square, joined(batches))
        assert_float64(gradients(model), expected)
        assert abs(out.loss - values["loss"]) < 1e-10
        assert out.plan is plan_of(step)
    assert_weights_same(model)


def under_its_budget(rank: int, world: int) -> None:
    """The live bytes of a step stay under the budget, those that gradients travel in included."""
    model, batch = build(), batches_of((64, 64), length=12)[rank]
    smallest = smallest_of(build(), square, batch)
    budget = int((1.3 + rank) * smallest)
    step = anybatch.TrainStep(model, square, still(model), memory=budget)
    with constant_times():
        step(batch)
    assert peak_of_call(step, batch) <= budget
    sizes = everywhere(plan_of(step).micro_batch_size)
    assert sizes[0] < sizes[1], sizes


def does_not_fit(rank: int, world: int) -> None:
    """What fits nowhere on one rank ends the step on all of them, with the bytes that are needed."""
    model, batches = build(), batches_of((8, 8))
    step = anybatch.TrainStep(model, square, still(model), memory="1GiB" if rank == 0 else 20_000)
    before = hashed(model.parameters())
    error = raised(lambda: step(batches[rank]))
    assert type(error) is anybatch.DoesNotFit, error
    assert error.needed is not None
    assert error.needed > 20_000
    assert error.budget == 20_000
    assert "nothing fits into 19.5 KiB: " in str(error), error
    assert "buckets and workspaces of libraries" in str(error), error
    assert rank == 1 or str(error).startswith("rank 1: ")
    assert_same_everywhere([error.needed, error.budget])
    assert hashed(model.parameters()) == before
    assert step.updates == 0
    error = raised(lambda: step.evaluate(batches[rank]))
    assert type(error) is anybatch.DoesNotFit, error
    roomy = anybatch.TrainStep(model, square, still(model), memory="1GiB")
    assert roomy(batches[rank]).skipped == ""


def least_budget(rank: int, world: int) -> None:
    """What an error says is needed is the smallest budget that does, buckets included; the error about a plan too."""
    batch = batches_of((8, 8))[rank]
    for memory in (1, 20_000):  # less than the buckets, and more
        error = raised(partial(planned_within, batch, memory))
        assert type(error) is anybatch.DoesNotFit, error
        assert error.budget == memory
        needed = error.needed or 0
        assert type(raised(partial(planned_within, batch, needed - 1))) is anybatch.DoesNotFit
        found = planned_within(batch, needed)
        assert found.budget == found.peak_bytes < needed


def planned_within(batch: Any, memory: int) -> anybatch.Plan:
    model = build()
    return anybatch.plan(model, square, batch, still(model), memory=memory)


def error_while_planning(rank: int, world: int) -> None:
    """An error of the user's while one rank plans and the other has a plan ends the step on both."""
    model, batches = build(), batches_of((8, 8))

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if batch["x"].shape[1] > 20:
            raise ValueError("a bad sample")
        return square(model, batch)  # type: ignore[no-any-return]

    step = anybatch.TrainStep(model, loss_fn, still(model), memory="1GiB")
    step(batches[rank])
    error = raised(lambda: step(batches_of((8, 8), length=24 if rank else 6)[rank]))
    assert isinstance(error, ValueError if rank else anybatch.AnyBatchError), error
    assert "a bad sample" in str(error)
    step(batches[rank])
    assert step.updates == 2


def longer_sequences(rank: int, world: int) -> None:
    """One rank plans again for a longer sequence while the others come to the next round by themselves."""
    model = build()
    step = anybatch.TrainStep(
        model, square, still(model), memory=int(5 * smallest_of(model, square, batches_of((16,))[0]))
    )
    plans = []
    for length in (6, 6, 9, 6, 12):
        batches = batches_of((16, 16))
        batches[1] = batches_of((16, 16), length=length)[1]
        step(batches[rank])
        plans.append(plan_of(step))

        def loss(model: Any, batches: Any) -> torch.Tensor:
            parts = [square(model, batch) * 16 for batch in batches]
            return torch.stack(parts).sum() / 32

        assert_float64(gradients(model), whole_gradients(build(), loss, batches)[0])
    number = len({id(plan) for plan in plans})
    assert number == (3 if rank == 1 else 1), number


def runs_out(rank: int, world: int, *, times: int = 1, where: int = 1) -> None:
    """The rank that runs out under its plan takes a smaller one, the others start again with theirs."""
    model, batches = build(), batches_of((64, 64))
    loss_fn = RunsOut()
    step = anybatch.TrainStep(model, loss_fn, still(model), memory="1GiB")
    step(batches[rank])
    first = plan_of(step)
    expected, _ = whole_gradients(build(), square, joined(batches))
    if rank == where:
        loss_fn.times = times
    out = step(batches[rank])
    assert loss_fn.times == 0
    assert len(out.attempts) >= 2
    assert_same_everywhere([one.outcome for one in out.attempts])
    assert f"rank {where}" in out.attempts[0].where or rank == where
    assert_float64(gradients(model), expected)
    assert (plan_of(step) is first) == (rank != where)
    assert plan_of(step).peak_bytes < first.peak_bytes or rank != where
    assert_weights_same(model)
    for _ in range(33):
        step(batches[rank])
    assert plan_of(step) is first
    assert_same_everywhere(step.updates)


def nothing_smaller(rank: int, world: int) -> None:
    """Single samples that run out on one rank are DoesNotFit on all, and the plans are kept for the next batch."""
    model, batches = build(), batches_of((4, 4))
    loss_fn = RunsOut()
    step = anybatch.TrainStep(model, loss_fn, still(model), memory="1GiB")
    step(batches[rank])
    loss_fn.times = 10**6 * rank
    error = raised(lambda: step(batches[rank]))
    assert type(error) is anybatch.DoesNotFit, error
    assert_same_everywhere(str(error))
    loss_fn.times = 0
    step(batches[rank])
    assert step.updates == 2


def without_rows(rank: int, world: int) -> None:
    """A rank that begins without samples plans when it has some."""
    model = build()
    step = anybatch.TrainStep(model, square, still(model), memory="1GiB")
    for rows in ((6, 0), (0, 4), (3, 0), (3, 3)):
        batches = batches_of(rows)
        out = step(batches[rank])
        assert out.count == sum(rows)
        assert_float64(gradients(model), whole_gradients(build(), square, joined(batches))[0])
    again = anybatch.TrainStep(model, square, still(model), memory="1GiB")
    batches = batches_of((6, 0))
    expected = square(model, batches[0])
    assert abs(again.evaluate(batches[rank]).loss - float(expected.detach())) < 1e-10


def given_plans(rank: int, world: int) -> None:
    """A plan for DistributedDataParallel is made on each rank, may differ, and is followed by the step and backward."""
    model, batches = build(), batches_of((24, 24))
    wrapped = DistributedDataParallel(model)
    made = anybatch.plan(wrapped, square, batches[rank], still(model), memory="1GiB")
    blocks = ("module.blocks.0", "module.blocks.1")
    plan = like(made, 5 + rank, 5, made.peak_bytes, blocks if rank == 0 else ())
    expected, _ = whole_gradients(build(), square, joined(batches))
    step = anybatch.TrainStep(wrapped, square, still(model), plan=plan)
    out = step(batches[rank])
    assert out.micro_batches == (5, 4)[rank]
    assert_float64(gradients(model), expected)
    for parameter in model.parameters():
        parameter.grad = None
    out = anybatch.backward(wrapped, square, batches[rank], plan=plan)
    assert out.micro_batches == (5, 4)[rank]
    assert_float64(gradients(model), expected)
    other = like(made, 5, 5, made.peak_bytes)
    if rank == 1:
        values = other.to_dict()
        values["fingerprint"]["loss"] = "another"
        other = anybatch.Plan.from_dict(values)
    step = anybatch.TrainStep(wrapped, square, still(model), plan=other)
    error = raised(lambda: step(batches[rank]))
    assert isinstance(error, anybatch.PlanMismatch if rank == 1 else anybatch.AnyBatchError), error
    assert "rank 1 failed" in str(error) or rank == 1


def resuming(rank: int, world: int) -> None:
    """A step goes on with the plan of its own rank, bitwise."""
    memory = int((6 + rank) * smallest_of(build(), square, batches_of((16,))[0]))

    def start(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, anybatch.TrainStep]:
        model = build(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, anybatch.TrainStep(model, square, optimizer, memory=memory)

    model, optimizer, step = start(0)
    for number in range(2):
        step(batches_of((16, 16), seed=number)[rank])
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), step.state_dict()])
    again, its_optimizer, its_step = start(5)
    for one, state in zip((again, its_optimizer, its_step), states, strict=True):
        one.load_state_dict(state)  # type: ignore[attr-defined]
    for number in (2, 3):
        step(batches_of((16, 16), seed=number)[rank])
        its_step(batches_of((16, 16), seed=number)[rank])
        assert plan_of(its_step) == plan_of(step)
    assert hashed(again.parameters()) == hashed(model.parameters())
    assert_weights_same(again)


def certificates(rank: int, world: int) -> None:
    """check looks at the batch of its own rank, without any communication."""
    batch = batches_of((6, 8))[rank]
    for wrap in (lambda model: model, DistributedDataParallel):
        model = wrap(build())
        before = hashed(model.parameters())
        with counted() as numbers:
            found = anybatch.check(model, square, batch, micro_batch_size=2 + rank)
            wrong = anybatch.check(model, lambda model, batch: model(batch["x"]).sum(), batch)
        assert set(numbers.values()) == {0}
        assert found.exact
        assert not wrong.exact
        assert hashed(model.parameters()) == before
    assert rank or raised(lambda: anybatch.check(build(), square, {"x": batch["x"][:1]})) is not None
    anybatch.backward(build(), square, batch)


CASES: Mapping[str, Case] = {
    "other budgets": other_budgets,
    "other budgets, DistributedDataParallel": partial(other_budgets, wrap=DistributedDataParallel, rows=(24, 40)),
    "under its budget": under_its_budget,
    "DoesNotFit": does_not_fit,
    "the least budget": least_budget,
    "an error": error_while_planning,
    "longer sequences": longer_sequences,
    "runs out": runs_out,
    "runs out twice": partial(runs_out, times=2, where=0),
    "nothing smaller": nothing_smaller,
    "without rows": without_rows,
    "plan=": given_plans,
    "resuming": resuming,
    "check": certificates,
}
FOUR: Mapping[str, Case] = {"four ranks": partial(other_budgets, rows=(16, 3, 1, 24))}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


@pytest.mark.slow  # two ranks see most, and four in test_ranks_exact.py and test_sharding_lockstep.py
def test_four_ranks(tmp_path: Any) -> None:
    results = run_cases("test_ranks_plans", 4, tmp_path, "FOUR")
    assert not any(results.values()), results
