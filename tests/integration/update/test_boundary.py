"""What happens once a logical batch, in which order, and what comes of it."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.update import boundary
from faults import Line, OutOfMemoryAt, Straight, different, facts, half_square, mean_square, quick_collections


class Noting(torch.optim.SGD):
    """Notes its steps."""

    events: list[str]

    def step(self, closure: Any = None) -> Any:
        self.events.append("step")
        return super().step(closure)


class Recorder:
    """Doubles that do their work and note in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.note(monkeypatch, torch.autograd, "backward")
        self.note(monkeypatch, boundary.Boundary, "zero_", "zero")
        self.note(monkeypatch, boundary, "clip_", "clip")

    def note(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, event: str = "") -> None:
        function, within = getattr(owner, name), False

        def noting(*args: Any, **options: Any) -> Any:
            nonlocal within
            if within:  # torch calls what a mode is told of once more, and a default device is such a mode
                return function(*args, **options)
            self.events.append(event or name)
            within = True
            try:
                return function(*args, **options)
            finally:
                within = False

        monkeypatch.setattr(owner, name, noting)


@pytest.mark.parametrize("rows", [2, 7, 8])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_everything_happens_once_and_in_order(monkeypatch: pytest.MonkeyPatch, rows: int, with_scaler: bool) -> None:
    recorder = Recorder(monkeypatch)
    model = Straight()
    optimizer = Noting(model.parameters(), lr=0.1)
    optimizer.events = recorder.events
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu") if with_scaler else None
    recorder.note(monkeypatch, scheduler, "step", "scheduler")
    if scaler is not None:
        recorder.note(monkeypatch, scaler, "unscale_", "unscale")
        recorder.note(monkeypatch, scaler, "update", "scaler.update")

    def observer(step: anybatch.TrainStep, result: anybatch.StepResult) -> None:
        recorder.events.append(f"observer {step.updates}")

    step = anybatch.TrainStep(
        model, mean_square, optimizer, micro_batch_size=2, clip_norm=1.0, scheduler=scheduler, scaler=scaler,
        recorder=observer, verify="off",
    )  # fmt: skip
    for number in (1, 2):
        recorder.events.clear()
        out = step(torch.ones(rows, 5))
        scaled = ["unscale"] if with_scaler else []
        updated = ["scaler.update"] if with_scaler else []
        backwards = ["backward"] * -(-rows // 2)
        ends = ["scheduler", f"observer {number}"]
        assert recorder.events == ["zero", *backwards, *scaled, "clip", "step", *updated, *ends]
        assert out.micro_batches == len(backwards)


def test_a_retry_does_nothing_of_the_boundary_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    model = Straight()
    optimizer = Noting(model.parameters(), lr=0.1)
    optimizer.events = recorder.events
    failures = iter([True])

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mean_square(model, batch)

    anybatch.TrainStep(model, loss, optimizer, clip_norm=1.0, verify="off")(torch.ones(4, 5))
    assert [event for event in recorder.events if event != "zero"] == ["backward", "backward", "clip", "step"]


class Pair(nn.Module):
    """Two weights whose gradient is the mean of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def mean_loss(model: Any, batch: torch.Tensor) -> Any:
    return model(batch).mean()


@pytest.mark.parametrize("with_scaler", [False, True])
def test_clipping_sees_the_average_gradient(with_scaler: bool) -> None:
    """Gradients (3, 0) and (-3, 4): their mean (0, 2) is clipped to (0, 1); each clipped alone gives (0.2, 0.4)."""
    model = Pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if with_scaler else None
    step = anybatch.TrainStep(
        model, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=1, clip_norm=1.0, scaler=scaler
    )
    out = step(torch.tensor([[3.0, 0.0], [-3.0, 4.0]]))
    assert out.grad_norm == 2.0
    # The gradient stays readable, unscaled and clipped, until the next call.
    torch.testing.assert_close(model.w.grad, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(model.w.detach(), torch.tensor([0.0, -1.0]))
    assert step(torch.tensor([[0.5, 0.0]])).grad_norm == 0.5
    torch.testing.assert_close(model.w.grad, torch.tensor([0.5, 0.0]))


@pytest.mark.parametrize("with_scaler", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_what_no_optimizer_has_does_not_count_in_the_norm(number: int, with_scaler: bool) -> None:
    """A generator is stepped through a discriminator whose gradients are larger than its own."""
    torch.manual_seed(0)
    parts = {"maker": nn.Linear(3, 2), "more": nn.Linear(2, 2), "judge": nn.Linear(2, 1)}
    model, noise = nn.ModuleDict(parts).double(), torch.randn(6, 3, dtype=torch.float64)

    def loss_fn(model: Any, batch: Any) -> Any:
        return 5 * model["judge"](model["more"](model["maker"](batch))).mean()

    stepped = [("maker",), ("maker", "more")][number - 1]
    by_hand = copy.deepcopy(model)
    loss_fn(by_hand, noise).backward()
    wanted = nn.utils.clip_grad_norm_([p for name in stepped for p in by_hand[name].parameters()], 0.5)
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=1.0) for name in stepped]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if with_scaler else None
    step = anybatch.TrainStep(model, loss_fn, optimizers, micro_batch_size=2, clip_norm=0.5, scaler=scaler)
    assert step(noise).grad_norm == pytest.approx(wanted.item())
    for name in stepped:
        for mine, other in zip(model[name].parameters(), by_hand[name].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("with_scaler", [False, True])
def test_inputs_that_are_given_count_in_the_norm(with_scaler: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.0)
    data, given = torch.tensor([[3.0, 4.0]]), [model.weight, model.bias]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if with_scaler else None
    norms = []
    for inputs in (None, given):
        step = anybatch.TrainStep(
            model, mean_loss, optimizer, clip_norm=float("inf"), inputs=inputs, scaler=scaler
        )  # fmt: skip
        norms.append(step(data).grad_norm)
        assert model.bias.grad is not None
        assert model.bias.grad.item() == 1.0  # readable, and unscaled, also where no optimizer has it
    assert norms == [5.0, pytest.approx(26**0.5)]


def test_an_infinite_clip_norm_measures_only() -> None:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    out = anybatch.TrainStep(model, mean_loss, optimizer, clip_norm=float("inf"))(torch.tensor([[30.0, 40.0]]))
    assert out.grad_norm == 50.0
    assert model.w.tolist() == [-30.0, -40.0]
    assert anybatch.TrainStep(model, mean_loss, optimizer)(torch.tensor([[3.0, 4.0]])).grad_norm is None


def test_gradients_that_were_there_before_do_not_count() -> None:
    model = Pair()
    model.w.grad = torch.tensor([100.0, 100.0])
    anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0))(torch.tensor([[3.0, 4.0]]))
    assert model.w.tolist() == [-3.0, -4.0]


# --- fp16 ------------------------------------------------------------------------------------------------------------


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(x))
        return y


class Half:
    """Training in float16 on the CPU; a batch with an infinite row gives an infinite gradient."""

    def __init__(self) -> None:
        self.model = WithNorm()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
        self.step = anybatch.TrainStep(
            self.model, mean_square, self.optimizer, micro_batch_size=2, autocast=torch.float16, scaler=self.scaler,
            scheduler=self.scheduler, clip_norm=1.0, batch_norm="ghost",
        )  # fmt: skip
        self.good = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        self.bad = self.good.clone()
        self.bad[2, 0] = float("inf")  # in micro-batch 2 of 4

    def facts(self) -> dict[str, Any]:
        return facts(self.model, [self.optimizer], step=self.step, scheduler=self.scheduler)


@pytest.mark.parametrize("steps", [0, 2])
def test_an_infinite_gradient_skips_the_update_of_the_whole_batch(steps: int) -> None:
    half = Half()
    for _ in range(steps):
        assert half.step(half.good).skipped == ""
    before = half.facts()
    out = half.step(half.bad)
    assert out.skipped == "the gradient is not finite; the scale goes from 256 to 128"
    assert half.scaler.get_scale() == 128.0
    assert [(attempt.outcome, attempt.samples) for attempt in out.attempts] == [("skipped", 0)]
    after = half.facts()
    assert not different(before, after, but=("gradient", "random", "counters"))  # buffers too
    assert (half.step.updates, half.step.skipped, half.step.samples) == (steps, 1, 8 * steps)


def test_the_batch_after_a_skipped_one_is_clean() -> None:
    half, smooth = Half(), Half()
    half.step(half.bad)
    assert half.step(half.good).skipped == ""
    smooth.step(smooth.good)
    # The scale is a power of two, so it leaves no trace in float32; in float16 it may round differently.
    torch.testing.assert_close(half.model.state_dict(), smooth.model.state_dict(), rtol=1e-3, atol=1e-4)
    assert float(half.optimizer.state[half.model.last.weight]["step"]) == 1
    assert half.scheduler.last_epoch == 1
    assert half.step.updates == 1


def test_the_scheduler_steps_once_an_update() -> None:
    half = Half()
    for number in range(10):
        half.step(half.bad if number in (0, 3, 4) else half.good)
    assert (half.step.updates, half.step.skipped, half.scheduler.last_epoch) == (7, 3, 7)
    assert half.scaler.get_scale() == 2.0**5


def test_two_steps_share_a_scaler() -> None:
    """What one of them did to the scale is no reason for the other to take its own update for skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    models = [Pair(), Pair()]
    one, other = (
        anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
        for model in models
    )
    rows = torch.tensor([[3.0, 4.0]])
    assert other(rows).skipped == ""
    assert one(rows * float("inf")).skipped
    out = other(rows)
    assert models[1].w.tolist() == [-6.0, -8.0]
    assert (out.skipped, other.updates, other.skipped) == ("", 2, 0)


def two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]


def test_an_infinite_gradient_of_one_optimizer_skips_them_all() -> None:
    model: Any = nn.ModuleList([Pair(), Pair()])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = anybatch.TrainStep(
        model, lambda model, batch: (model[0](batch[0]) + model[1](batch[1])).mean(), two_optimizers(model),
        scaler=scaler,
    )  # fmt: skip
    rows = torch.tensor([[3.0, 4.0]])
    out = step([rows * float("inf"), rows])
    assert out.skipped
    assert [part.w.tolist() for part in model] == [[0.0, 0.0], [0.0, 0.0]]
    assert not step([rows, rows]).skipped
    assert [part.w.tolist() for part in model] == [[-3.0, -4.0], [-3.0, -4.0]]


@pytest.mark.parametrize("with_scaler", [False, True])
def test_an_optimizer_whose_parameters_get_no_gradient_has_nothing_to_do(with_scaler: bool) -> None:
    model: Any = nn.ModuleList([Pair(), Pair()])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if with_scaler else None
    step = anybatch.TrainStep(model, lambda model, batch: model[0](batch).mean(), two_optimizers(model), scaler=scaler)
    step(torch.tensor([[3.0, 4.0]]))
    assert [part.w.tolist() for part in model] == [[-3.0, -4.0], [0.0, 0.0]]
    assert step.updates == 1


# --- nothing to count, inputs, schedulers ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, lr=0.1), lambda p: torch.optim.LBFGS(p, lr=0.1)])
def test_a_batch_with_nothing_to_count_is_skipped(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = Straight()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = anybatch.TrainStep(
        model, mean_square, optimizer, count=lambda batch: int(batch.abs().sum() > 0), scheduler=scheduler
    )
    before = facts(model)
    out = step(torch.zeros(4, 5))
    assert out.skipped == "the count of the whole batch is 0"
    assert (out.loss, out.count, out.attempts[-1].samples) == (0.0, 0, 0)
    assert (step.updates, step.skipped, step.samples, scheduler.last_epoch) == (0, 1, 0, 0)
    assert [n for n in different(before, facts(model)) if not n.startswith("random")] == []


def test_only_the_inputs_get_a_gradient() -> None:
    model = Straight().eval()
    before = facts(model)
    step = anybatch.TrainStep(
        model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2, clip_norm=float("inf"),
        inputs=model.last.parameters(),
    )  # fmt: skip
    out = step(torch.ones(5, 5))
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["last.weight", "last.bias"]
    changed = [name for name in different(before, facts(model)) if name.startswith("parameter")]
    assert changed == ["parameter last.weight", "parameter last.bias"]
    norm = torch.cat([p.grad.flatten() for p in model.last.parameters() if p.grad is not None]).norm()
    assert out.grad_norm == pytest.approx(float(norm), rel=1e-6)


def test_a_scheduler_that_needs_a_metric_is_refused_with_the_line_to_write() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with pytest.raises(anybatch.BatchError, match=r"scheduler\.step\(step\.evaluate\(batch\)\.loss\)"):
        anybatch.TrainStep(model, half_square, optimizer, scheduler=plateau)
    scheduler, step = plateau, anybatch.TrainStep(model, half_square, optimizer)
    for batch in (torch.zeros(2), torch.zeros(2)):  # the line works
        scheduler.step(step.evaluate(batch).loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_sequence_of_optimizers_and_schedulers() -> None:
    model: Any = nn.ModuleList([Pair(), Pair()])
    optimizers = two_optimizers(model)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(one, 1, gamma) for one, gamma in zip(optimizers, (0.5, 0.1), strict=True)
    ]
    step = anybatch.TrainStep(
        model, lambda model, batch: (model[0](batch) + model[1](batch)).mean(), optimizers, micro_batch_size=1,
        scheduler=schedulers, clip_norm=float("inf"),
    )  # fmt: skip
    rows = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    norms = [step(rows).grad_norm for _ in range(2)]
    assert norms == pytest.approx([(2 * (1.5**2 + 2**2)) ** 0.5] * 2)  # over both
    assert model[0].w.tolist() == pytest.approx([-2.25, -3.0])
    assert model[1].w.tolist() == pytest.approx([-1.65, -2.2])


# --- LBFGS -----------------------------------------------------------------------------------------------------------


class Curved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x).tanh())
        return y


def cross_entropy(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


CURVED = {"x": torch.randn(11, 3, generator=torch.Generator().manual_seed(5)).double(), "y": torch.arange(11) % 2}


def lbfgs(model: nn.Module, search: str | None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)


@pytest.fixture
def collections() -> Iterator[None]:
    with quick_collections():
        yield


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_plain_lbfgs_on_the_whole_batch(search: str | None) -> None:
    plain, ours = Curved(), Curved()
    optimizer = lbfgs(plain, search)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(plain, CURVED)
        loss.backward()
        return loss

    step = anybatch.TrainStep(ours, cross_entropy, lbfgs(ours, search), micro_batch_size=4)
    for number in range(1, 4):
        expected = optimizer.step(closure)
        out = step(CURVED)
        assert out.loss == pytest.approx(float(expected.detach()), rel=1e-10)
        assert (out.micro_batches, out.count, step.updates) == (3, 11, number)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("collections")
@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_lbfgs_with_memory_that_runs_out(each: int) -> None:
    smooth = Curved()
    anybatch.TrainStep(smooth, cross_entropy, lbfgs(smooth, None))(CURVED)
    wrong: list[str] = []
    outcomes = {"recovered": 0, "interrupted": 0}
    for number in itertools.chain(range(1, 200, 3 * each), itertools.count(200, 17 * each)):
        model = Curved()
        step = anybatch.TrainStep(model, cross_entropy, lbfgs(model, None), micro_batch_size=4, verify="off")
        before = facts(model)
        try:
            with OutOfMemoryAt(number) as memory:
                out = step(CURVED)
            for a, b in zip(model.parameters(), smooth.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
            assert sum(attempt.samples for attempt in out.attempts) == 11
            assert out.micro_batches == out.attempts[-1].micro_batches
            outcomes["recovered"] += 1
        except anybatch.UpdateInterrupted as error:
            changed = {n.removeprefix("parameter ") for n in different(before, facts(model)) if n.startswith("param")}
            wrong += sorted(changed.difference(error.changed))
            outcomes["interrupted"] += 1
        if not memory.has_raised:
            break
    assert not wrong
    assert min(outcomes.values()) > 10 // each
