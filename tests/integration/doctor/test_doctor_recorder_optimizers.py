"""Each step of an optimizer is seen once, whatever class it has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.recording.patches import HIDDEN, function_in
from anybatch.records.events import Stepped
from anybatch.records.samples import Activations, Norms
from test_doctor_recorder_events import backward, pair, seen


class Own(torch.optim.SGD):
    """Steps by way of its parent."""

    def step(self, closure: Any = None) -> Any:
        """Steps."""
        return super().step(closure)


class Alone(torch.optim.Optimizer):
    """Has a step of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


class Around(torch.optim.Optimizer):
    """Wraps another one, and never calls the constructor of ``Optimizer``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps."""
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears."""
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("kind", ["own", "alone", "around", "fused"])
def test_each_step_of_a_users_optimizer_counts_once(kind: str) -> None:
    model, plain = pair()
    torch.optim.SGD(model.parameters(), lr=0.1)  # its class is hooked by torch from here on
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "own": lambda: Own(model.parameters(), lr=0.1),
        "alone": lambda: Alone(model.parameters(), lr=0.1),
        "around": lambda: Around(plain),
        "fused": lambda: torch.optim.AdamW(model.parameters(), fused=True),
    }
    optimizer = makers[kind]()
    with Doctor(model, optimizer) as doctor:
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    assert len(seen(doctor, Stepped)) == 3
    assert "step" not in vars(Around) or vars(Around)["step"].__code__.co_filename == __file__


def test_what_has_another_one_step_is_not_a_second_optimizer_for_a_schedule() -> None:
    model, plain = pair()
    wrapper = Around(plain)
    schedule = torch.optim.lr_scheduler.StepLR(wrapper, 2)
    with Doctor() as doctor:
        for _ in range(4):
            wrapper.zero_grad()
            backward(model)
            wrapper.step()
            schedule.step()
    assert [fact.optimizer for fact in seen(doctor, Stepped)] == [0] * 4
    assert doctor.run.steps == 4


def test_a_step_that_raised_does_not_hide_the_next() -> None:
    model, optimizer = pair()

    def bad() -> torch.Tensor:
        raise ValueError("of the user")

    with Doctor() as doctor:
        backward(model)
        with pytest.raises(ValueError, match="of the user"):
            optimizer.step(bad)  # type: ignore[arg-type]
        optimizer.step()
    assert len(seen(doctor, Stepped)) == 1


def test_an_optimizer_that_comes_later_has_its_own_first_samples() -> None:
    """The steps of the run count on with it; it is sampled by its own count."""
    model, first = pair()
    with Doctor() as doctor:
        for _ in range(50):
            backward(model)
            first.step()
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(40):
            backward(model)
            second.step()
    numbers = [fact.number for fact in seen(doctor, Norms) if fact.optimizer == 1]
    assert numbers == [*range(10), 25]
    assert len(seen(doctor, Activations)) == 5 + 5
    assert [fact.step for fact in seen(doctor, Stepped)] == list(range(90))


def test_two_optimizers_in_turn_share_the_steps_of_the_run() -> None:
    model, first = pair()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    with Doctor() as doctor:
        for _ in range(20):
            for optimizer in (first, second):
                backward(model)
                optimizer.step()
    steps = [(fact.optimizer, fact.step) for fact in seen(doctor, Stepped)]
    assert steps == [one for step in range(20) for one in ((0, step), (1, step + 1))]


def test_an_optimizer_that_steps_within_the_loop_of_another_takes_over_nothing() -> None:
    """Inner steps on a copy, as in meta-learning, with a new optimizer each time."""
    model, outer = pair()
    with Doctor() as doctor:
        for _ in range(6):
            copy, inner = pair()
            backward(copy)
            inner.step()
            backward(model)
            outer.step()
    assert max(fact.step for fact in seen(doctor, Stepped)) == 5


class Holds(torch.optim.Optimizer):
    """Has several others step, and groups of none."""

    def __init__(self, *held: torch.optim.Optimizer) -> None:
        self.held = held

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears."""
        for one in self.held:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps."""
        for one in self.held:
            one.step()


def test_the_steps_of_those_that_another_holds_are_seen() -> None:
    model, first = pair()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    holds = Holds(first, second)
    with Doctor() as doctor:
        for _ in range(6):
            backward(model)
            holds.step()
    assert len(seen(doctor, Stepped)) == 12
    assert doctor.failure == ""


def test_a_doctor_that_is_attached_again_sees_steps_again() -> None:
    model, optimizer = pair()
    doctor = Doctor()
    for steps in (3, 5):
        with doctor:
            for _ in range(steps):
                backward(model)
                optimizer.step()
    assert len(seen(doctor, Stepped)) == 8


class Zeroing(torch.optim.SGD):
    """Takes more than a closure."""

    def step(self, zero: bool = False, closure: Any = None) -> Any:  # type: ignore[override]
        """Steps."""
        return super().step(closure)


def test_a_step_that_two_classes_share_is_passed_over_once() -> None:
    model, _ = pair()
    optimizer = torch.optim.AdamW(model.parameters())  # whose class then has a step of torch's around that of Adam
    step = function_in(torch.optim.Adam, "step")
    if function_in(torch.optim.AdamW, "step") is not step:
        pytest.skip("the two have steps of their own before torch 2.7")
    with Doctor() as doctor:
        assert step.__code__.co_filename.count(HIDDEN) == 1
        backward(model)
        optimizer.step()
    assert len(seen(doctor, Stepped)) == 1


def test_a_default_that_is_no_function_is_no_closure() -> None:
    model, _ = pair()
    optimizer = Zeroing(model.parameters(), lr=0.1)
    with Doctor() as doctor:
        for _ in range(3):
            backward(model)
            optimizer.step()
    assert [one.closure for one in seen(doctor, Stepped)] == [False] * 3
