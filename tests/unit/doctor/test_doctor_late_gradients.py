"""A gradient that is not finite in a step that nobody looked at is reported as if somebody had.

How it could be silently wrong: it is blamed on the weights that it went into, or on nothing at all; the operation that
made it, the step, or the loss of that step is another one; weights that became too large by themselves are blamed on a
gradient; nothing is said where the run ends with that step, or of an optimizer that keeps nothing of its gradients.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Doctor
from anybatch.records.events import Backward
from anybatch.records.samples import NonFinite
from diagonals import diagonals
from test_doctor_odd_calls import in_full

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2),
}


class Lengths(nn.Module):
    """The lengths of vectors, whose derivative is infinite at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.last = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = self.first(x).square().sum(1, keepdim=True).sqrt()
        result: torch.Tensor = self.last(length)
        return result


def run(make: Callable[[Any], torch.optim.Optimizer], at: int, *, clears: str, steps: int, odd: str) -> Doctor:
    torch.manual_seed(0)
    model = Lengths()
    optimizer = make(model.parameters())
    with Doctor() as doctor:
        for step in range(steps):
            if clears == "before":
                optimizer.zero_grad()
            x = torch.zeros(8, 4) if "zeros" in odd and step == at else torch.randn(8, 4)
            output = model(x)
            loss = output.square().mean() if "no function" in odd else F.mse_loss(output, torch.ones(8, 1))
            if clears == "after":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if odd == "weights" and step == at:
                with torch.no_grad():
                    model.first.weight.mul_(float("inf"))
    assert doctor.failure == ""
    return doctor


@pytest.mark.parametrize(
    ("name", "clears", "at", "odd"),
    diagonals([*OPTIMIZERS], ["before", "after"], [30, 36, 46, 47, 48], ["zeros", "zeros, no function"], each=4),
)
def test_the_operation_is_found_in_the_next_step(name: str, clears: str, at: int, odd: str) -> None:
    doctor = run(OPTIMIZERS[name], at, clears=clears, steps=60, odd=odd)
    with in_full():
        full = run(OPTIMIZERS[name], at, clears=clears, steps=60, odd=odd)
    for one in (doctor, full):
        (found,) = one.run.of(NonFinite)
        assert (found.where, found.op, found.step - found.late) == ("gradient", "SqrtBackward0", at)
        (loss,) = [back.value for back in one.run.of(Backward) if back.step == at]
        assert (found.value, found.parameters, found.loss) == ("nan", ("first.weight",), loss)
        first = one.findings[0]
        assert (first.name, first.step, first.place.parameters) == ("NAN_IN_BACKWARD", at, ("first.weight",))


@pytest.mark.parametrize(("name", "clears", "at"), diagonals([*OPTIMIZERS], ["before", "after"], [36, 47, 48], each=2))
def test_weights_that_are_written_to_are_not_blamed_on_a_gradient(name: str, clears: str, at: int) -> None:
    doctor = run(OPTIMIZERS[name], at, clears=clears, steps=60, odd="weights")
    with in_full():
        full = run(OPTIMIZERS[name], at, clears=clears, steps=60, odd="weights")
    for one in (doctor, full):
        (found,) = one.run.of(NonFinite)
        assert (found.where, found.parameters, found.late) == ("parameter", ("first.weight",), 0)
        assert one.findings[0].name == "NAN_IN_FORWARD"


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD"])  # of which a smaller one is looked at
def test_it_is_found_where_the_run_ends_with_that_step(name: str) -> None:
    found = [
        next(run(OPTIMIZERS[name], at=36, clears="before", steps=37, odd=odd).run.of(NonFinite), None)
        for odd in ("zeros", "none")
    ]
    assert found[1] is None
    assert found[0] is not None
    assert (found[0].where, found[0].parameters, found[0].step - found[0].late) == ("gradient", ("first.weight",), 36)


def test_weights_of_no_optimizer_are_not_blamed_on_a_gradient() -> None:
    torch.manual_seed(0)
    model = Lengths()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=1e-2)
    with Doctor() as doctor:
        for step in range(40):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 1)).backward()
            optimizer.step()
            model.first.weight.grad = None
            if step == 20:
                with torch.no_grad():
                    model.first.weight.fill_(float("nan"))
    (found,) = doctor.run.of(NonFinite)
    assert (found.where, found.parameters, found.late) == ("parameter", ("first.weight",), 0)


def test_of_a_large_model_every_gradient_is_followed_between_two_samples() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(60))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = x if number == left_out else layer(x)
            return x

    model = Net()
    with Doctor(model, optimizer) as doctor:
        for step in range(20):
            optimizer.zero_grad()
            model(torch.ones(3 + step, 4), 29 if step == 15 else -1).sum().backward()
            optimizer.step()
    assert doctor.failure == ""
    counts = [fact.touched_count for fact in doctor.run.of(Backward)]
    assert counts == [118 if step == 15 else 120 for step in range(20)]
