"""TrainStep keeps to its budget: it plans once, plans again when it has to, and comes back from running out of memory."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch
from anybatch.planning.following import Follower
from anybatch.records.plans import Plan
from anybatch.tensors.batches import Splittable
from faults import different, facts
from planning_referee import alive_in, peak_of
from reference import RELATIVE_FLOAT64, whole_gradients

Fake = torch._subclasses.FakeTensor
WIDTH = 32
SEED = 3


class Net(nn.Module):
    """Blocks that keep four times what they are given."""

    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(20, WIDTH), Net(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(self.embed(x))
        return y


def square(model: Any, batch: Any) -> Any:
    return model(batch["x"]).square().mean()


def points(rows: int, length: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, WIDTH)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def smallest_of(model: nn.Module, loss_fn: Any, batch: Any, **options: Any) -> int:
    return anybatch.plan(model, loss_fn, batch, sgd(model), memory=2**40, **options).smallest_bytes


def plan_of(step: anybatch.TrainStep) -> Plan:
    follower = step._follower
    assert follower is not None
    assert follower.plan is not None
    return follower.plan


def levers_are_off(model: nn.Module) -> bool:
    return all("forward" not in module.__dict__ and not module._forward_hooks for module in model.modules())


class RunsOut:
    """A loss that runs out of memory on real tensors of some samples on, as often as it is told."""

    def __init__(self, times: int = 0, rows: int = 1) -> None:
        self.times, self.rows = times, rows

    def __call__(self, model: Any, batch: Any) -> Any:
        x = batch["x"]
        out = model(x)
        if self.times and not isinstance(x, Fake) and len(x) >= self.rows:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return out.square().mean()


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
    budget = int(smallest_of(model, square, points(24)) * share)
    optimizer = sgd(model)
    step = anybatch.TrainStep(model, square, optimizer, memory=budget)
    step(points(24))
    planned = [plan_of(step)]
    for rows, length in ((24, 6), (5, 6), (1, 6), (24, 4), (24, 6)):
        batch = points(rows, length)
        assert peak_of(lambda b=batch: step(b), alive_in(model, [optimizer], batch)) <= budget, (rows, length)
        planned.append(plan_of(step))
    assert len(set(map(id, planned))) == 1
    for rows, length in ((24, 7), (30, 7)):
        batch = points(rows, length)
        try:
            step(batch)
        except anybatch.DoesNotFit as error:
            assert error.budget == budget
            assert error.needed > budget
            continue
        assert peak_of(lambda b=batch: step(b), alive_in(model, [optimizer], batch)) <= budget, (rows, length)


def test_the_gradient_is_that_of_the_whole_batch_under_any_plan() -> None:
    model = Net().double()
    batch = {"x": torch.randn(21, 5, WIDTH, dtype=torch.float64)}
    expected, values = whole_gradients(model, square, batch)
    smallest = smallest_of(model, square, batch)
    for budget in (smallest, int(1.2 * smallest), 2 * smallest, 2**30):
        own = copy.deepcopy(model)
        step = anybatch.TrainStep(own, square, torch.optim.SGD(own.parameters(), lr=0.0), memory=budget)
        out = step(batch)
        for parameter, wanted in zip(own.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert wanted is not None
            assert (parameter.grad - wanted).norm() <= RELATIVE_FLOAT64 * wanted.norm()
        assert out.loss == pytest.approx(values["loss"])
        assert levers_are_off(own)


def test_a_batch_that_does_not_fit_leaves_everything_as_it_was() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step = anybatch.TrainStep(model, square, optimizer, memory=2 * smallest_of(model, square, points(8)))
    step(points(8))
    plan = plan_of(step)
    long, many, usual = points(8, 400), points(20_000, 1), points(8)
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
def test_an_exception_in_the_loss_takes_the_levers_off(error: type[BaseException]) -> None:
    model = Net()
    budget = int(1.02 * smallest_of(model, square, points(8)))
    broken = False

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = square(model, batch)
        if broken and not isinstance(loss, Fake):
            raise error("bomb")
        return loss

    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=budget)
    batch = points(8)
    step(batch)
    before = facts(model, step._optimizers, step=step)
    broken = True
    with pytest.raises(error):
        step(batch)
    assert levers_are_off(model)
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
        collate=lambda some: pad_sequence(some, batch_first=True), cost=len,
    )  # fmt: skip
    gone = [weakref.ref(sample) for sample in samples]
    step(samples)
    del samples
    gc.collect()
    assert [one() for one in gone] == [None] * 4


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
        self.subject: Any = None

    def plan(self, budget: int, **_: Any) -> Plan:
        if self.found.peak_bytes > budget:
            raise anybatch.DoesNotFit("made up", needed=1, budget=budget)
        return self.found

    def attend(self, splittable: Any) -> None:
        pass


def like(plan: Plan, size: int, micro_batches: int, peak: int, recompute: tuple[str, ...] = ()) -> Plan:
    values = plan.to_dict()
    values["chosen"] |= {
        "micro_batch_size": size, "micro_batches": micro_batches, "peak_bytes": peak, "recompute": list(recompute)
    }  # fmt: skip
    return Plan.from_dict(values)


@pytest.mark.parametrize(("first_size", "smaller_size"), [(8, 2), (8, 8), (8, 16), (8, 3), (32, 1)])
def test_only_planned_ways_are_run_until_the_first_plan_is_back(first_size: int, smaller_size: int) -> None:
    """Twice the micro-batch of a smaller plan under the levers of the smaller plan is a way that nobody planned."""
    model = Net()
    loss_fn = RunsOut()
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=2**30)
    step(points(32))
    follower: Any = step._follower
    assert isinstance(follower, Follower)
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


def varied(generator: torch.Generator, rows: int, longest: int) -> list[Tensor]:
    lengths = torch.randint(2, longest, (rows,), generator=generator).tolist()
    return [torch.randint(20, (length,), generator=generator) for length in lengths]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"x": pad_sequence(samples, batch_first=True)}


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("costs", [False, True])
def test_raw_samples_of_any_length_stay_under_the_budget(counts: bool, costs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    model = Tokens()
    optimizer = sgd(model)
    options: dict[str, Any] = {"collate": padded}
    if costs:
        options["cost"] = len
    if counts:
        options["count"] = lambda batch: batch["x"].numel()
    epoch = [varied(generator, rows, longest) for rows, longest in ((8, 12), (8, 12), (3, 12), (8, 24), (1, 9), (9, 24))]
    budget = int(1.6 * smallest_of(model, square, epoch[-1], **options))
    step = anybatch.TrainStep(model, square, optimizer, memory=budget, **options)
    for batch in epoch:
        step(batch)  # it may plan again here
        assert peak_of(lambda b=batch: step(b), alive_in(model, [optimizer], batch)) <= budget, len(batch)


def test_items_of_lists_that_grow_longer_are_planned_for_again() -> None:
    model = Tokens()
    optimizer = sgd(model)

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(pad_sequence(list(batch["t"]), batch_first=True)).square().mean()

    def texts(longest: int) -> dict[str, Any]:
        return {"t": [torch.randint(20, (length,)) for length in (2, 3, 2, 3, 2, longest, 3, 2)]}

    budget = int(1.3 * smallest_of(model, loss_fn, texts(20)))
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget)
    for longest in (4, 20, 4, 20):
        batch = texts(longest)
        step(batch)
        assert peak_of(lambda b=batch: step(b), alive_in(model, [optimizer], batch)) <= budget, longest


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
    follower._splittable = Splittable([points(32)])
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
    step = anybatch.TrainStep(model, square, optimizer, memory=budget, **options)
    step(short)
    again = anybatch.TrainStep(model, square, optimizer, memory=budget, **options)
    again.load_state_dict(step.state_dict())
    again(long)
    assert peak_of(lambda: again(long), alive_in(model, [optimizer], long)) <= budget


def test_a_given_plan_is_followed_exactly() -> None:
    model = Net()
    batch = points(24)
    made = anybatch.plan(model, square, batch, sgd(model), memory=int(1.05 * smallest_of(model, square, batch)))
    step = anybatch.TrainStep(model, square, sgd(model), plan=Plan.from_dict(made.to_dict()))
    out = step(batch)
    assert out.micro_batches == made.micro_batches
    assert out.plan == made
    assert peak_of(lambda: step(batch), alive_in(model, [], batch)) <= made.budget


CHANGES: dict[str, Callable[[], tuple[nn.Module, Any, dict[str, Any]]]] = {
    "model": lambda: (Net(5), square, {}),
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
        {"memory": "0.5"},
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
    assert levers_are_off(model)
    batch = points(16)
    step(batch)
    assert peak_of(lambda: step(batch), alive_in(model, [optimizer], batch)) <= budget
    assert peak_of(lambda: step.evaluate(batch), alive_in(model, [optimizer], batch)) <= budget


def test_batchnorm_is_not_split_and_its_statistics_move_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
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
