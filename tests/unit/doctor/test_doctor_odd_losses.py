"""The values of losses in steps of which only what differs is recorded.

How it could be silently wrong: the loss that a backward runs for is taken for the one that a loss function gave, though
it was written to in between, or is another tensor in the same place of memory; a loss of several numbers, or of whole
ones, that ends the run instead of the following; a loss under a transform.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Doctor
from anybatch.records.events import Backward
from anybatch.records.lossfacts import LossCall
from odd_loops import STEPS
from test_doctor_odd_calls import compared, recorded

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def as_it_is(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, labels)


def written_to(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, labels).mul_(0.5)


def divided(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, labels) / 4


def in_the_same_place(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The tensor of the first loss is gone when the second one is made, which may be given its place."""
    F.cross_entropy(output, labels)
    return (output * output).mean()


def the_first_of_two(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first = F.cross_entropy(output, labels)
    F.mse_loss(output, torch.zeros_like(output))
    return first


def of_each_sample(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, labels, reduction="none").mean()


def of_one_number(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:1], labels[:1], reduction="none").squeeze(0)


def of_half_precision(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.bfloat16(), torch.zeros_like(output).bfloat16())


def under_a_transform(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    both: torch.Tensor = torch.vmap(lambda row: F.mse_loss(row, torch.zeros_like(row)))(output)
    return both.mean()


ALL = (
    as_it_is, written_to, divided, in_the_same_place, the_first_of_two, of_each_sample, of_one_number,
    of_half_precision, under_a_transform,
)  # fmt: skip


def looping(loss_of: Callable[[int], Losses], values: list[float] | None = None) -> Callable[[Doctor], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loop(doctor: Doctor) -> None:
        for step in range(STEPS):
            loss = loss_of(step)(model(torch.randn(8, 4)), torch.randint(3, (8,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if values is not None:
                values.append(loss.item())

    return loop


@pytest.mark.parametrize("loss_of", ALL, ids=lambda one: one.__name__)
def test_the_record_is_that_of_a_run_in_full(loss_of: Losses) -> None:
    compared(lambda: looping(lambda step: loss_of))


@pytest.mark.parametrize("odd", ALL, ids=lambda one: one.__name__)
@pytest.mark.parametrize("usual", [as_it_is, written_to, divided], ids=lambda one: one.__name__)
def test_one_loss_that_differs(usual: Losses, odd: Losses) -> None:
    compared(lambda: looping(lambda step: odd if step == 37 else usual))


@pytest.mark.parametrize("loss_of", [as_it_is, written_to, divided, the_first_of_two], ids=lambda one: one.__name__)
def test_the_values_are_those_of_the_losses_that_were_differentiated(loss_of: Losses) -> None:
    values: list[float] = []
    facts, rows = recorded(looping(lambda step: loss_of, values))
    assert rows["step"] >= 35
    assert [fact.value for fact in facts if isinstance(fact, Backward)] == values
    called: list[Any] = [
        fact.value for fact in facts if isinstance(fact, LossCall) and fact.function == "cross_entropy"
    ]
    factor = {"written_to": 0.5, "divided": 0.25}.get(loss_of.__name__, 1.0)
    assert [pytest.approx(value * factor) for value in called] == values
