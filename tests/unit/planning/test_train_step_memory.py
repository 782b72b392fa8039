"""TrainStep keeps to its budget: it plans once and says so, what comes stays under it, and optimizations come off."""

import copy
import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import anybatch
from anybatch.records.plans import Plan
from faults import different, facts
from memory_steps import (
    WIDTH,
    Fake,
    Net,
    Tokens,
    like,
    optimizations_are_off,
    padded,
    peak_of_call,
    plan_of,
    points,
    sgd,
    smallest_of,
    square,
    varied,
)
from planning_referee import alive_in, peak_of
from reference import RELATIVE_FLOAT64, whole_gradients


def test_it_plans_once_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="anybatch")
    model = Net()
    step = anybatch.TrainStep(model, square, sgd(model), memory="1GiB")
    outs = [step(points(16)) for _ in range(3)]
    assert [record.getMessage()[:8] for record in caplog.records] == ["planned:"]
    assert outs[0].plan is outs[1].plan is outs[2].plan is plan_of(step)
    step(points(16, 8))
    texts = [record.getMessage() for record in caplog.records[1:]]
    assert len(texts) == 2
    assert texts[0].startswith("planning again: batch['x'] has shape [rows, 8, 32]")


@pytest.mark.parametrize("share", [1.05, 1.6, 4.0])
def test_every_call_stays_under_the_budget_whatever_comes(share: float) -> None:
    model = Net()
    budget = int(smallest_of(model, square, points(12)) * share)
    optimizer = sgd(model)
    step = anybatch.TrainStep(model, square, optimizer, memory=budget)
    step(points(12))
    planned = [plan_of(step)]
    for rows, length in ((12, 6), (5, 6), (1, 6), (12, 4)):
        batch = points(rows, length)
        assert peak_of_call(step, batch) <= budget, (rows, length)
        planned.append(plan_of(step))
    assert len(set(map(id, planned))) == 1
    for batch in (points(12, 7), points(15, 7)):
        try:
            step(batch)
        except anybatch.DoesNotFit as error:
            found = (error.budget, (error.needed or 0) > budget)
        else:
            found = (budget, peak_of_call(step, batch) <= budget)
        assert found == (budget, True)


def test_the_gradient_is_that_of_the_whole_batch_under_any_plan() -> None:
    model = Net().double()
    batch = {"x": torch.randn(11, 5, WIDTH, dtype=torch.float64)}
    expected, values = whole_gradients(model, square, batch)
    smallest = smallest_of(model, square, batch)
    for budget in (int(1.01 * smallest), int(1.5 * smallest), 2**30):
        own = copy.deepcopy(model)
        step = anybatch.TrainStep(own, square, torch.optim.SGD(own.parameters(), lr=0.0), memory=budget)
        out = step(batch)
        for parameter, wanted in zip(own.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert wanted is not None
            assert (parameter.grad - wanted).norm() <= RELATIVE_FLOAT64 * wanted.norm()
        assert out.loss == pytest.approx(values["loss"])
        assert optimizations_are_off(own)


def test_a_batch_that_does_not_fit_leaves_everything_as_it_was() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step = anybatch.TrainStep(model, square, optimizer, memory=2 * smallest_of(model, square, points(8)))
    step(points(8))
    plan = plan_of(step)
    long, many, usual = points(8, 200), points(5000, 1), points(8)
    before = facts(model, [optimizer], step=step)
    for batch in (long, many, long, many):
        with pytest.raises(anybatch.DoesNotFit):
            step(batch)
        assert different(before, facts(model, [optimizer], step=step), but=("gradient",)) == []
        assert plan_of(step) is plan
    step(usual)
    assert plan_of(step) is plan
    assert step.updates == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_loss_takes_the_optimizations_off(error: type[BaseException]) -> None:
    model = Net()
    broken = False

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = square(model, batch)
        if broken and not isinstance(loss, Fake):
            raise error("bomb")
        return loss

    batch = points(8)
    made = anybatch.plan(model, loss_fn, batch, sgd(model), memory=2**30)
    step = anybatch.TrainStep(model, loss_fn, sgd(model), plan=like(made, 4, 2, 1000, ("blocks.0", "blocks.2")))
    on: list[bool] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: on.append("forward" in model.blocks[0].__dict__))
    step(batch)
    assert any(on)
    assert optimizations_are_off(model)
    before = facts(model, step._optimizers, step=step)
    broken = True
    with pytest.raises(error):
        step(batch)
    assert optimizations_are_off(model)
    assert different(before, facts(model, step._optimizers, step=step), but=("gradient",)) == []


def test_the_logical_batch_is_let_go_after_the_call() -> None:
    gc.collect()
    model = Net()
    step = anybatch.TrainStep(model, square, sgd(model), memory=2**30)
    gone = []
    for rows in (16, 16, 7, 20):
        batch = points(rows)
        gone.append(weakref.ref(batch["x"]))
        step(batch)
        del batch
        gc.collect()
        assert gone[-1]() is None
    samples = [torch.randint(20, (n,)) for n in (3, 9, 5, 7)]
    other = Tokens()
    step = anybatch.TrainStep(
        other, lambda model, x: model(x).mean(), sgd(other), memory=2**30,
        collate=lambda some: pad_sequence(some, batch_first=True), cost=len, verify="off",  # it averages padding
    )  # fmt: skip
    gone = [weakref.ref(sample) for sample in samples]
    step(samples)
    del samples
    gc.collect()
    assert [one() for one in gone] == [None] * 4


def test_a_sample_that_costs_more_than_a_micro_batch_is_planned_for_again() -> None:
    """It may fit by itself, but a limit in costs refuses it."""
    model = Tokens()
    step = anybatch.TrainStep(
        model, lambda model, x: model(x).mean(), sgd(model), memory=2**30,
        collate=lambda some: pad_sequence(some, batch_first=True), cost=len, verify="off",  # it averages padding
    )  # fmt: skip
    first = step([torch.ones(5, dtype=torch.long)] * 4).plan
    assert step._follower is not None
    step._follower.value = 15
    again = step([torch.ones(length, dtype=torch.long) for length in (21, 3)]).plan
    assert again is not first
    assert again is not None
    assert again.micro_batch_size >= 21


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("costs", [False, True])
def test_raw_samples_of_any_length_stay_under_the_budget(counts: bool, costs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    model = Tokens()
    optimizer = sgd(model)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        squares = model(batch["x"]).square().mean(-1) * batch["mask"]
        of_samples = squares.sum(1) / batch["mask"].sum(1)
        loss: Tensor = squares.sum() / batch["mask"].sum() if counts else of_samples.mean()
        return loss

    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        return {**padded(samples), "mask": pad_sequence([torch.ones(len(one)) for one in samples], batch_first=True)}

    options: dict[str, Any] = {"collate": collate}
    if costs:
        options["cost"] = len
    if counts:
        options["count"] = lambda batch: batch["mask"].sum()
    epoch = [varied(generator, rows, longest) for rows, longest in ((8, 12), (3, 12), (8, 24), (1, 9))]
    budget = int(1.6 * smallest_of(model, loss_fn, epoch[2], **options))
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget, **options)
    for batch in epoch:
        step(batch)  # it may plan again here
        assert peak_of_call(step, batch) <= budget, len(batch)


def test_items_of_lists_that_grow_longer_are_planned_for_again() -> None:
    model = Tokens()
    optimizer = sgd(model)

    def loss_fn(model: Any, batch: Any) -> Any:
        mask = pad_sequence([torch.ones(len(text)) for text in batch["t"]], batch_first=True)
        squares = model(pad_sequence(list(batch["t"]), batch_first=True)).square().mean(-1) * mask
        return (squares.sum(1) / mask.sum(1)).mean()

    def texts(longest: int) -> dict[str, Any]:
        return {"t": [torch.randint(20, (length,)) for length in (2, 3, 2, 3, 2, longest, 3, 2)]}

    budget = int(1.3 * smallest_of(model, loss_fn, texts(20)))
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget)
    for longest in (4, 20, 4, 20):
        batch = texts(longest)
        step(batch)
        assert peak_of_call(step, batch) <= budget, longest


def test_a_given_plan_is_followed_exactly() -> None:
    model = Net()
    batch = points(12)
    made = anybatch.plan(model, square, batch, sgd(model), memory=int(1.05 * smallest_of(model, square, batch)))
    step = anybatch.TrainStep(model, square, sgd(model), plan=Plan.from_dict(made.to_dict()))
    out = step(batch)
    assert out.micro_batches == made.micro_batches
    assert out.plan == made
    assert peak_of_call(step, batch) <= made.budget


CHANGES: dict[str, Callable[[], tuple[nn.Module, Any, dict[str, Any]]]] = {
    "model": lambda: (Net(2), square, {}),
    "loss": lambda: (Net(), lambda model, batch: model(batch["x"]).exp().sum(), {}),
    "precision": lambda: (Net(), square, {"autocast": torch.bfloat16}),
    "BatchNorm": lambda: (Net(), square, {"batch_norm": "ghost"}),
    "optimizer": lambda: (Net(), square, {"kind": torch.optim.Adam}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_plan_for_something_else_is_refused_before_anything_changes(what: str) -> None:
    planned = Net()
    plan = anybatch.plan(planned, square, points(8), sgd(planned), memory=2**30)
    model, loss_fn, options = CHANGES[what]()
    optimizer = options.pop("kind", torch.optim.SGD)(model.parameters(), lr=0.01)
    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    batch = points(8)
    before = facts(model, [optimizer], step=step)
    for _ in range(2):
        with pytest.raises(anybatch.PlanMismatch) as caught:
            step(batch)
        assert what in caught.value.changed
        assert different(before, facts(model, [optimizer], step=step)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "1GiB", "micro_batch_size": 4},
        {"memory": 0},
        {"memory": -5},
        {"memory": True},
        {"memory": 1.5},
        {"memory": 0.0},
        {"memory": float("nan")},
        {"memory": "much"},
        {"memory": "150%"},
        {"memory": [1]},
        {"plan": "plan.json"},
        {"plan": {"micro_batch_size": 3}},
        {"memory": "1GiB", "blocks": ["nothing"]},
    ],
    ids=str,
)
def test_what_is_no_budget_or_no_plan_is_refused(options: dict[str, Any]) -> None:
    model = Net()
    batch = points(4)
    before = facts(model)
    with pytest.raises(anybatch.BatchError):
        anybatch.TrainStep(model, square, sgd(model), **options)(batch)
    assert different(before, facts(model)) == []


def test_a_plan_and_a_size_are_refused_together() -> None:
    model = Net()
    plan = anybatch.plan(model, square, points(8), sgd(model), memory=2**30)
    with pytest.raises(anybatch.BatchError, match="leave one of them out"):
        anybatch.TrainStep(model, square, sgd(model), plan=plan, micro_batch_size=4)


@pytest.mark.parametrize("first", [True, False])
def test_evaluation_goes_with_a_budget(first: bool) -> None:
    model = Net(dropout=0.1)
    optimizer = sgd(model)
    budget = int(1.3 * smallest_of(model, square, points(16)))
    step = anybatch.TrainStep(model, square, optimizer, memory=budget)
    if not first:
        step(points(16))
    batch = points(12)
    expected = square(model.eval(), batch).item()
    model.train()
    before = facts(model, [optimizer], step=step)
    assert step.evaluate(batch).loss == pytest.approx(expected, rel=1e-5)
    assert different(before, facts(model, [optimizer], step=step)) == []
    assert optimizations_are_off(model)
    batch = points(16)
    step(batch)
    assert peak_of_call(step, batch) <= budget
    assert peak_of(functools.partial(step.evaluate, batch), alive_in(model, [optimizer], batch)) <= budget


def test_batchnorm_is_not_split_and_its_statistics_move_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
                )
                for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    batch = {"x": torch.randn(64, WIDTH)}
    plain = Normed()
    model = copy.deepcopy(plain)
    square(plain, batch).backward()
    budget = int(1.02 * smallest_of(model, square, batch))
    step = anybatch.TrainStep(model, square, torch.optim.SGD(model.parameters(), lr=0.0), memory=budget)
    out = step(batch)
    assert out.micro_batches == 1
    assert plan_of(step).recompute
    one, other = facts(plain), facts(model)
    assert different(one, other, but=("random", "module")) == []


def test_packed_sequences_are_planned_by_their_lengths() -> None:
    model = Net()
    # However they are split, the micro-batch with the most in it is not the first, which finds no gradients yet.
    sequences = [torch.randn(2 + 7 * row % 29, WIDTH) for row in reversed(range(24))]
    batch = {"x": pack_sequence(sequences, enforce_sorted=False)}

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch["x"].data).square().mean()

    optimizer = sgd(model)
    options: dict[str, Any] = {"count": lambda batch: batch["x"].data.shape[0]}
    for budget in (2**30, int(1.3 * smallest_of(model, loss_fn, batch, **options))):
        plan = anybatch.plan(model, loss_fn, batch, optimizer, memory=budget, **options)
        step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan, **options)
        step(batch)
        assert peak_of(functools.partial(step, batch), alive_in(model, [optimizer], batch["x"].data)) <= budget
        assert plan.peak_bytes == pytest.approx(peak_of_call(step, batch), rel=0.01)
