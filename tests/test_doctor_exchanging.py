"""Calls of modules are seen by other code in the function that all of them go through, which is given back."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch import Doctor
from anybatch.doctor.samples.exchanging import exchange_calls_of_modules

CALL: Any = nn.Module.__call__


OUTER = nn.Linear(4, 2)


class Loose(nn.Module):
    """Calls a module that it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return OUTER(self.inner(x))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
        optimizer.step()


def seen_by(notes: list[str], name: str) -> Any:
    def make(plain: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            notes.append(name)
            return plain(module, *args, **kwargs)

        return call

    return exchange_calls_of_modules(make)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_are_taken_off_in_any_order(order: tuple[int, int]) -> None:
    own, notes = CALL.__code__, list[str]()
    ends = [seen_by(notes, "first"), seen_by(notes, "second")]
    nn.Linear(4, 2)(torch.ones(1, 4))
    assert notes == ["second", "first"]
    notes.clear()
    ends[order[0]]()
    nn.Linear(4, 2)(torch.ones(1, 4))
    assert notes == [["first", "second"][order[1]]]
    ends[order[1]]()
    assert CALL.__code__ is own
    assert nn.Linear(4, 2)(torch.ones(3, 4)).shape == (3, 2)


def test_no_class_is_changed_on_a_sampled_step() -> None:
    """From Python 3.12 on a class that was changed a thousand times is slower for ever."""
    own = CALL.__code__
    with Doctor(every=1):
        assert nn.Module.__call__ is CALL
        assert CALL.__code__ is not own
        train(Loose(), 12)
        assert nn.Module.__call__ is CALL
    assert CALL.__code__ is own


def test_the_code_is_the_own_one_between_samples() -> None:
    own = CALL.__code__
    with Doctor():
        train(Loose(), 12)
        assert CALL.__code__ is own


def test_a_module_outside_of_the_model_is_found_by_its_call() -> None:
    with Doctor() as doctor:
        train(Loose(), 3)
    assert doctor.failure == ""
    names = {finding.name for finding in doctor.findings}
    assert "OPT_PARAM_UNREGISTERED" in names, names


def test_keyword_arguments_and_errors_pass_through() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(2, 3, 1)

        def forward(self, *, first: torch.Tensor, second: torch.Tensor) -> Any:
            return self.layer(input1=first, input2=second)

    model = Named()
    with Doctor() as doctor:
        assert model(first=torch.ones(5, 2), second=torch.ones(5, 3)).shape == (5, 1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
            model(first=torch.ones(5, 2), second=torch.ones(5, 3), third=0)
    assert doctor.failure == ""
