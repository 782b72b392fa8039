"""The start of a doctor is linear in modules, and a part of a model that is called is no root of its own."""

import copy
import cProfile
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch import Doctor
from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recording.numbering import Numbering
from anybatch.records.events import Forward
from anybatch.records.samples import Activations
from rule_runs import RunBuilder


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions are called in the meantime, those of the interpreter included."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return sum(one.callcount for one in profile.getstats())


def chained(model: nn.Sequential, x: torch.Tensor) -> Any:
    return model(x)


def one_by_one(model: nn.Sequential, x: torch.Tensor) -> Any:
    for layer in model:
        x = layer(x) + x
    return x


def listed(model: nn.Sequential, x: torch.Tensor) -> Any:
    layers = dict(enumerate(model))
    for layer in layers.values():
        x = layer(x) + x
    return x


def end(size: int) -> int:
    torch.manual_seed(0)
    model = Residual(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    doctor = Doctor()
    with doctor:
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 4)).backward()
            optimizer.step()
        calls = calls_of(lambda: run_probes(doctor, seconds=1e6))
    assert doctor.failure == ""
    return calls


def start(size: int, forward: Callable[[nn.Sequential, torch.Tensor], Any]) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        forward(model, torch.ones(4, 4)).mean().backward()
        optimizer.step()

    with Doctor() as doctor:
        calls = calls_of(train)
    assert doctor.failure == ""
    return calls


class Residual(nn.Module):
    """Layers that are called one by one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


def test_the_questions_of_twice_as_many_modules_take_twice_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 0.1).__next__)  # some train for a number of seconds
    end(10)  # what is loaded on first use
    few, twice = end(150), end(300)  # so many that those questions are left out that are asked of small models only
    assert twice < 2.5 * few


@pytest.mark.parametrize("forward", [chained, one_by_one, listed])
def test_twice_as_many_modules_take_twice_as_many_calls(forward: Callable[[nn.Sequential, torch.Tensor], Any]) -> None:
    start(10, forward)  # what is loaded on first use
    few, twice, four = (start(size, forward) for size in (50, 100, 200))
    assert four - twice < 2.5 * (twice - few)


def test_of_many_models_those_at_even_distances_are_looked_at_closely() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(200)]
    optimizer = torch.optim.SGD([one for layer in layers for one in layer.parameters()], lr=0.01)
    with Doctor() as doctor:
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            for layer in layers:
                x = x + 0.01 * layer(x)
            F.mse_loss(x, torch.zeros(8, 4)).backward()
            optimizer.step()
    assert doctor.failure == ""
    assert len(doctor.run.roots) == 200
    looked_at = [one.root for one in doctor.run.of(Activations) if one.step == 5]
    assert looked_at == list(range(0, 200, 4))
    assert {one.root for one in doctor.run.of(Activations) if one.step == 0} >= set(range(64))


def slices(model: nn.Sequential, x: torch.Tensor) -> None:
    with torch.no_grad():
        model[:2](x)


def containers(model: nn.Sequential, x: torch.Tensor) -> None:
    with torch.no_grad():
        nn.Sequential(model[0], nn.ReLU())(x)


@pytest.mark.parametrize("part", [slices, containers])
def test_a_part_of_a_model_that_is_made_for_each_call_is_no_root(
    part: Callable[[nn.Sequential, torch.Tensor], None],
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Doctor() as doctor:
        for _ in range(40):
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            F.cross_entropy(model(x), torch.randint(4, (16,))).backward()
            optimizer.step()
            part(model, x)
    assert doctor.failure == ""
    assert list(doctor.run.roots) == [0]
    kinds = Counter(type(fact).__name__ for fact in doctor.run.facts)
    assert kinds["Root"] == 1
    assert kinds["ParameterFacts"] <= 2 * 4
    assert {one.names for one in doctor.run.parameters.values()} == {
        ("0.weight",),
        ("0.bias",),
        ("2.weight",),
        ("2.bias",),
    }


def test_a_container_that_is_made_for_each_step_stays_one_root() -> None:
    trunk, head = nn.Linear(8, 16), nn.Linear(16, 4)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.05)
    with Doctor() as doctor:
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(nn.Sequential(trunk, head)(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
            optimizer.step()
    assert doctor.failure == ""
    assert list(doctor.run.roots) == [0]
    assert sum(type(fact).__name__ in ("Root", "ParameterFacts") for fact in doctor.run.facts) <= 2 * 5


def test_a_wrapper_takes_the_place_of_what_it_wraps() -> None:
    model = nn.Sequential(nn.Linear(4, 2))

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, x: torch.Tensor) -> Any:
            return self.inside(x)

    with Doctor() as doctor:
        model(torch.ones(3, 4)).sum().backward()
        wrapper = Wrapper()
        wrapper(torch.ones(3, 4)).sum().backward()
    assert [root.cls for root in doctor.run.roots.values()] == ["Wrapper"]


def operations_of(run: Callable[[], Any]) -> int:
    """How many operations of the interpreter the rules take in the meantime."""
    count = 0

    def look(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if "rules" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def diagnosis_of_copies(number: int) -> int:
    """What the rules take for a run that trains a copy of its model at each step, as meta-learning does."""
    built = RunBuilder()
    for root in range(number):
        own = built.model(("encoder.weight", "encoder.bias"), root=root)
        built.forward(root=root, training=True, trained=1)
        built.backward(own)
        built.optimizer(own)
        built.step()
    run = built.run
    return operations_of(lambda: diagnose(run))


def test_a_diagnosis_is_linear_in_the_copies_of_a_model() -> None:
    diagnosis_of_copies(10)  # what is made once
    few, some, many = map(diagnosis_of_copies, (50, 100, 150))
    assert many - some < 1.2 * (some - few)


def test_copies_that_are_gone_are_not_tracked() -> None:
    model, numbering = nn.Linear(4, 4), Numbering(lambda fact: None)
    numbering.root(model)
    for _ in range(50):
        numbering.root(copy.deepcopy(model))
    numbers, _ = numbering.references()
    assert len(numbers) == len(numbering._tracked) == 2


def test_of_models_that_come_and_go_a_bounded_number_is_recorded() -> None:
    class Net(nn.Linear):
        """Calls of one's own class are seen at every step."""

    model, other = Net(4, 1), nn.Bilinear(4, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Doctor() as doctor:
        for _ in range(400):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(8, 4)), copy.deepcopy(model)(torch.ones(8, 4)).detach()).backward()
            optimizer.step()
    run = doctor.run
    assert doctor.failure == ""
    assert run.steps == 400
    assert 256 <= len(doctor.numbering.models) <= 260
    assert doctor.numbering.is_one_of_many(model)
    assert not doctor.numbering.is_one_of_many(other)
    assert any(one.root == 0 and one.grad for one in run.of(Forward))
