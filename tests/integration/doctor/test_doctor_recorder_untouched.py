"""A run is bitwise the same with and without the recorder, and torch is left as it was found."""

import gc
import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, dataloader

from anybatch.doctor.recorder import Doctor
from anybatch.records.events import Stepped
from doctor_programs import PROGRAMS, Outcome, mlp


def assert_same(one: Outcome, other: Outcome) -> None:
    """Compares bit by bit."""
    for state, expected in zip(one["states"], other["states"], strict=True):
        assert state.keys() == expected.keys()
        for name in state:
            assert torch.equal(state[name], expected[name]), name
    assert [repr(loss) for loss in one["losses"]] == [repr(loss) for loss in other["losses"]]
    assert torch.equal(one["random"], other["random"])


def surface() -> dict[str, Any]:
    """Returns everything that the recorder may replace, and the code of all functions of the classes concerned."""
    owners: list[Any] = [
        torch.nn.Module, torch.nn.Linear, torch.nn.Sequential, torch.optim.Optimizer, torch.optim.Adam, torch.autograd,
        torch.amp.GradScaler, DataLoader, dataloader._BaseDataLoaderIter, warnings, torch.nn.utils.clip_grad,
        torch.nn.functional, torch.Tensor, torch,
    ]  # fmt: skip
    owners += [one for one in vars(lr_scheduler).values() if inspect.isclass(one)]
    found: dict[str, Any] = {}
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if callable(value):
                cells = getattr(value, "__closure__", None) or ()
                code = getattr(value, "__code__", None)
                contents = []
                for cell in cells:
                    try:
                        contents.append(cell.cell_contents)
                    except ValueError:
                        contents.append(None)
                found[f"{owner!r}.{name}"] = (value, code, *map(id, contents))
    hooks = torch.nn.modules.module
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        found[name] = tuple(getattr(hooks, name))
    found["steps"] = (*optimizer_hooks(),)
    return found


def optimizer_hooks() -> list[Any]:
    """Returns the global hooks of optimizers."""
    module = inspect.getmodule(torch.optim.Optimizer)
    return [*module._global_optimizer_pre_hooks, *module._global_optimizer_post_hooks]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_is_bitwise_the_same(name: str) -> None:
    program = PROGRAMS[name]
    expected = program()
    with Doctor() as doctor:
        seen = program()
    assert doctor.failure == ""
    assert_same(seen, expected)
    assert len(doctor.run.facts) > 10


def test_everything_is_taken_off() -> None:
    mlp()  # what torch itself sets up on first use
    before = surface()
    doctor = Doctor()
    doctor.attach()
    mlp()
    assert surface() != before
    doctor.detach()
    after = surface()
    assert [name for name in before if before[name] != after.get(name)] == []
    assert before.keys() == after.keys()


def test_everything_is_taken_off_after_an_exception() -> None:
    mlp()
    before = surface()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes"), Doctor(model) as doctor:
        model(torch.ones(3, 5))
    assert surface() == before
    assert vars(torch.nn.Linear).get("__call__") is None
    assert doctor.run.facts


def test_two_doctors_at_once() -> None:
    mlp()
    before = surface()
    one, other = Doctor(), Doctor()
    one.attach()
    other.attach()
    mlp()
    other.detach()
    mlp()
    one.detach()
    mlp()
    assert one.failure == other.failure == ""
    assert len(list(one.run.of(Stepped))) == 24
    assert len(list(other.run.of(Stepped))) == 12
    after = surface()
    assert [name for name in before if before[name] != after.get(name)] == []


def fold(weights: list["weakref.ref[torch.Tensor]"]) -> None:
    """Trains a model of 68 MiB, which nobody holds afterwards."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 1_000_000), torch.nn.ReLU(), torch.nn.Linear(1_000_000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    weights.append(weakref.ref(next(model.parameters())))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(1, 16)).pow(2).mean().backward()
        optimizer.step()


def test_models_of_one_fold_after_the_other_do_not_stay_in_memory() -> None:
    weights: list[weakref.ref[torch.Tensor]] = []
    with Doctor():
        for count in range(1, 5):
            fold(weights)
            gc.collect()
            assert sum(one() is not None for one in weights) <= min(count, 2)


class Passing(torch.nn.Module):
    """Makes numbers that its backward does not need, and that nobody holds once it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.made: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds a number, and cuts negative ones off."""
        moved = self.inner(x) + 1
        self.made.append(weakref.ref(moved))
        return torch.relu(moved)


def test_what_a_forward_has_passed_does_not_stay_in_memory() -> None:
    model = Passing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Doctor(model, optimizer):
        for _ in range(30):
            loss = model(torch.randn(8, 4)).mean()
            assert [one() for one in model.made] == [None] * len(model.made)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
