"""A logical batch counts once: what fails leaves everything as it was, and an update is never applied twice."""

import itertools
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from faults import Bomb, CtrlCAt, Line, different, facts, half_square, press_ctrl_c, quick_collections
from reference import set_torch_random, torch_random

ROWS, SIZE = 10, 4  # three micro-batches


@pytest.fixture(autouse=True, scope="module")
def collections() -> Iterator[None]:
    with quick_collections():
        yield


@pytest.fixture(autouse=True)
def usual_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the test runner has changed that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Network(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.head = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.shape[0]
        y: torch.Tensor = self.head(self.trunk(x))
        return y


class Metrics(Mapping[str, Any]):
    """Metrics that are computed when they are read."""

    def __init__(self, bomb: Bomb, values: torch.Tensor) -> None:
        self.bomb, self.values_ = bomb, values

    def __getitem__(self, name: str) -> torch.Tensor:
        self.bomb("metric")
        return self.values_

    def __iter__(self) -> Iterator[str]:
        return iter(["logit"])

    def __len__(self) -> int:
        return 1


def losses(bomb: Bomb) -> tuple[Any, Any]:
    """A plain loss and a generator, both with bombs, that draw from all generators."""

    def plain(model: Network, batch: dict[str, torch.Tensor]) -> Any:
        noise = 1 + 0.1 * (random.random() + float(np.random.rand()))
        bomb("before the forward")
        logits = model(batch["x"] * noise)
        bomb("after the forward")
        return F.cross_entropy(logits, batch["y"]), Metrics(bomb, logits[:, 0])

    def generator(model: Network, batch: dict[str, torch.Tensor]) -> Any:
        model.seen = model.seen + 1
        with anybatch.cut(model.trunk(batch["x"] * (1 + random.random()))) as features:
            yield "class", F.cross_entropy(model.head(features), batch["y"])
            bomb("inside of the cut")
            yield "size", 0.1 * model.head(features).pow(2).mean()
            bomb("at the end of the cut")
        bomb("after the cut")

    return plain, generator


PLACES = ["before the forward", "after the forward", "metric", "count", "collate"]
PLACES_IN_GENERATOR = ["inside of the cut", "at the end of the cut", "after the cut", "count", "collate"]
KINDS = [(place, False) for place in PLACES] + [(place, True) for place in PLACES_IN_GENERATOR]


class Trainee:
    """A model that is trained on raw samples with everything that has state."""

    def __init__(self, bomb: Bomb, as_generator: bool) -> None:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        self.bomb = bomb
        self.model = Network()
        self.loss = losses(bomb)[as_generator]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.samples = [{"x": torch.randn(4), "y": torch.tensor(number % 2)} for number in range(ROWS)]
        self.options: dict[str, Any] = {
            "micro_batch_size": SIZE, "collate": self.collate, "count": self.count, "batch_norm": "ghost",
            "verify": "off",  # it counts its forwards in a buffer, which no split repeats
        }  # fmt: skip
        self.step = anybatch.TrainStep(
            self.model, self.loss, self.optimizer, scaler=self.scaler, scheduler=self.scheduler, clip_norm=1.0,
            **self.options,
        )  # fmt: skip

    def collate(self, samples: list[Any]) -> Any:
        self.bomb("collate")
        return {key: torch.stack([sample[key] for sample in samples]) for key in ("x", "y")}

    def count(self, batch: Any) -> int:
        np.random.rand()
        self.bomb("count")
        return len(batch["y"])

    def facts(self) -> dict[str, Any]:
        return facts(self.model, [self.optimizer], step=self.step, scaler=self.scaler, scheduler=self.scheduler)


@pytest.mark.parametrize("passes", range(3))
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("place", "as_generator"), KINDS)
def test_an_exception_leaves_everything_as_it_was(
    place: str, as_generator: bool, error: type[BaseException], passes: int
) -> None:
    bomb = Bomb()
    trainee = Trainee(bomb, as_generator)
    smooth = Trainee(Bomb(), as_generator)
    for _ in range(2):  # the first step, and one with state
        before = trainee.facts()
        bomb.arm(place, error, passes)
        with pytest.raises(error, match=f"bomb in {place}"):
            trainee.step(trainee.samples)
        without_gradient = {name: None for name in before if name.startswith("gradient")}
        assert not different({**before, **without_gradient}, trainee.facts())
        state = torch_random(), random.getstate(), np.random.get_state()
        out = trainee.step(trainee.samples)
        assert len(out.attempts) == 1
        after = trainee.facts()
        set_torch_random(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
        other = smooth.step(smooth.samples)
        assert not different(smooth.facts(), after)
        assert out.to_dict() == other.to_dict()


@pytest.mark.parametrize("passes", range(3))
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("place", "as_generator"), KINDS)
def test_an_exception_leaves_the_gradient_of_backward_as_it_was(
    place: str, as_generator: bool, error: type[BaseException], passes: int
) -> None:
    trainee = Trainee(Bomb(place, error, passes), as_generator)
    for number, parameter in enumerate(trainee.model.parameters()):
        parameter.grad = None if number == 1 else torch.full_like(parameter, 0.3)
    gradients = [parameter.grad for parameter in trainee.model.parameters()]
    before = trainee.facts()
    with pytest.raises(error):
        anybatch.backward(trainee.model, trainee.loss, trainee.samples, **trainee.options)
    assert not different(before, trainee.facts())
    assert all(p.grad is old for p, old in zip(trainee.model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_evaluation_leaves_everything_as_it_was(error: type[BaseException]) -> None:
    trainee = Trainee(Bomb("after the forward", error, 1), as_generator=False)
    trainee.step._evaluation_limit.value = 4
    trainee.model.trunk[1].eval()
    before = trainee.facts()
    with pytest.raises(error):
        trainee.step.evaluate(trainee.samples)
    assert not different(before, trainee.facts())


@pytest.mark.parametrize("passes", [1, 99])
def test_inputs_do_not_outlast_the_pass(passes: int) -> None:
    """A cut in a loop of one's own reaches upstream after a pass that was restricted, and that may have failed."""
    trunk, head = nn.Linear(4, 3), nn.Linear(3, 1)
    bomb = Bomb("loss", KeyError, passes)

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        bomb("loss")
        return model(batch).mean()

    try:
        anybatch.backward(
            nn.Sequential(trunk, head), loss, torch.ones(4, 4), micro_batch_size=2, inputs=head.parameters()
        )
    except KeyError:
        assert head.weight.grad is None
    assert bomb.has_exploded is (passes == 1)
    assert trunk.weight.grad is None
    with anybatch.cut(trunk(torch.ones(4, 4))) as features:
        head(features).mean().backward()
    assert trunk.weight.grad is not None


def test_a_buffer_that_was_none_is_none_again() -> None:
    class Running(nn.Linear):
        mean: torch.Tensor | None

        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("mean", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            new = x.detach().mean()
            self.mean = new if self.mean is None else 0.9 * self.mean + 0.1 * new
            return super().forward(x)

    bomb = Bomb("loss")

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        y: torch.Tensor = model(batch).mean()
        bomb("loss")
        return y

    model = Running()
    with pytest.raises(ValueError, match="bomb"):
        anybatch.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(4, 4))
    assert model.mean is None


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_the_update_waits_until_it_is_complete() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = anybatch.TrainStep(model, half_square, optimizer, scheduler=scheduler, micro_batch_size=1)
    handle = optimizer.register_step_pre_hook(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        step(torch.zeros(3))
    assert float(model.w.detach()) == pytest.approx(0.9, abs=1e-7)
    assert (step.updates, step.samples, scheduler.last_epoch) == (1, 3, 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    handle.remove()
    step(torch.zeros(3))
    assert float(model.w.detach()) == pytest.approx(0.9 - 0.05 * 0.9, abs=1e-7)
    assert step.updates == 2


def test_ctrl_c_in_the_loss_rolls_back_at_once() -> None:
    model = Line()
    calls = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) == 2:
            press_ctrl_c()
        return half_square(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, loss, optimizer, micro_batch_size=1, verify="off")
    with pytest.raises(KeyboardInterrupt):
        step(torch.zeros(3))
    assert (len(calls), float(model.w.detach()), model.w.grad, step.updates) == (2, 1.0, None, 0)


def test_ctrl_c_is_not_lost_when_the_update_is_tried_again() -> None:
    model = Line()

    class OutOfMemoryOnce(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 1:
                press_ctrl_c()
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().step(closure)

    step = anybatch.TrainStep(model, half_square, OutOfMemoryOnce(model.parameters(), lr=0.1))
    with pytest.raises(KeyboardInterrupt):
        step(torch.zeros(4))
    assert (float(model.w.detach()), step.updates) in ((1.0, 0), (pytest.approx(0.9), 1))


def test_ctrl_c_while_a_failed_attempt_is_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee(Bomb("after the forward", torch.OutOfMemoryError, 1), as_generator=False)
    before = trainee.facts()

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("gc.collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainee.step(trainee.samples)
    assert not different(before, trainee.facts())


def outcomes_of_ctrl_c(run: Any, start: Any, complete: Any, each: int) -> set[str]:
    """Presses Ctrl-C at operations in turn; nothing but the state before and the state after may come of it."""
    seen: set[str] = set()
    for number in itertools.count(1, each):
        trainee, before = start()
        with CtrlCAt(number) as keys:
            try:
                run(trainee)
            except KeyboardInterrupt:
                after = trainee.facts()
            else:
                after = None
        if not keys.has_raised:
            return seen
        assert after is not None, f"Ctrl-C at {number} {keys.operations[number - 1]} was lost"
        names = [name for name, state in (("before", before), ("after", complete)) if not different(state, after)]
        assert names, f"{number} {keys.operations[number - 1]}: {different(before, after)} {different(complete, after)}"
        seen.update(names)
    return seen


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_ctrl_c_at_every_operation_of_a_step(each: int) -> None:
    def start() -> tuple[Trainee, dict[str, Any]]:
        trainee = Trainee(Bomb(), as_generator=False)
        return trainee, trainee.facts()

    whole, _ = start()
    whole.step(whole.samples)
    seen = outcomes_of_ctrl_c(lambda trainee: trainee.step(trainee.samples), start, whole.facts(), each)
    assert seen == {"before", "after"}


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_ctrl_c_at_every_operation_of_backward(each: int) -> None:
    def start() -> tuple[Trainee, dict[str, Any]]:
        trainee = Trainee(Bomb(), as_generator=True)
        for number, parameter in enumerate(trainee.model.parameters()):
            parameter.grad = None if number == 1 else torch.full_like(parameter, 0.3)
        return trainee, trainee.facts()

    def run(trainee: Trainee) -> None:
        anybatch.backward(trainee.model, trainee.loss, trainee.samples, **trainee.options)

    whole, _ = start()
    run(whole)
    assert "before" in outcomes_of_ctrl_c(run, start, whole.facts(), each)


def test_ctrl_c_of_somebody_else_is_left_alone() -> None:
    pressed: list[int] = []

    def mine(number: int, frame: Any) -> None:
        pressed.append(number)

    signal.signal(signal.SIGINT, mine)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(press_ctrl_c)
    anybatch.TrainStep(model, half_square, optimizer)(torch.zeros(3))
    assert pressed == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine


def test_a_step_runs_outside_of_the_main_thread() -> None:
    model = Line()
    step = anybatch.TrainStep(model, half_square, torch.optim.SGD(model.parameters(), lr=0.1))
    thread = threading.Thread(target=step, args=(torch.zeros(3),))
    thread.start()
    thread.join()
    assert step.updates == 1
