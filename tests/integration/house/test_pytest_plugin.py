"""What people's own tests get: a marker for memory, and a model that is to train."""

import importlib.metadata
import sys

import pytest
import torch
import torch.nn.functional as F

from anybatch.testing import assert_trains

pytest_plugins = ["pytester"]
INSTALLED = any(one.name == "anybatch" for one in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "anybatch.integrations.pytest_plugin")
TESTS = """
import pytest, torch

@pytest.fixture
def big():
    return torch.zeros(2**20)  # made before the test

@pytest.mark.anybatch_memory("3MiB")
def test_small(big):
    torch.zeros(2**18).add(1)

@pytest.mark.anybatch_memory("3 MiB")
@pytest.mark.parametrize("size", [2**18, 2**20])
def test_of_sizes(size):
    torch.zeros(size).mul(2).add(1)

@pytest.mark.anybatch_memory("1KiB")
class TestClass:
    def test_in_class(self):
        torch.zeros(2**18)

    def test_without_tensors(self):
        pass

@pytest.mark.anybatch_memory("8 apples")
def test_no_limit():
    pass

@pytest.mark.anybatch_memory()
def test_nothing():
    pass

@pytest.mark.anybatch_memory("1GiB")
def test_own_failure():
    assert torch.zeros(3).sum() == 1

def test_without():
    torch.zeros(2**24)
"""


def test_the_marker_fails_what_takes_more(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess(*PLUGIN, "--strict-markers")
    result.assert_outcomes(passed=4, failed=5)
    result.stdout.fnmatch_lines_random(
        [
            "*the tensors of this test take 8.0 MiB, more than 3.0 MiB: 8.0 MiB at the peak*",
            "*the tensors of this test take 1.0 MiB, more than 1.0 KiB*",
            "*got '8 apples'; expected a number of bytes*",
            '*anybatch_memory got {}; expected one limit, as in anybatch_memory("200MiB")*',
            "*assert tensor(0.) == 1*",
        ]
    )


def test_the_plugin_is_declared_and_loads_no_torch(pytester: pytest.Pytester) -> None:
    code = "import anybatch.integrations.pytest_plugin, sys; print('torch' in sys.modules)"
    assert pytester.run(sys.executable, "-c", code).outlines == ["False"]


def classify(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int, classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    inputs = [torch.randn(64, 8) for _ in range(count)]
    return [(one, one[:, :classes].argmax(1)) for one in inputs]


@pytest.mark.parametrize("count", [1, 20])
def test_a_model_that_trains(count: int) -> None:
    data = batches(count)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    before = [parameter.clone() for parameter in model.parameters()]
    found = assert_trains(model, classify, data)
    assert (found.verdict, found.steps) == ("learning", 200)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


class Cut(torch.nn.Module):
    """Its layers are in a list that torch does not know, and its head sees no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 32), torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).relu().detach() * 0)
        return out


def test_a_model_that_does_not_train_fails_with_the_diagnosis() -> None:
    with pytest.raises(AssertionError, match=r"this run: [\s\S]*GRAPH_CUT") as caught:
        assert_trains(Cut(), classify, batches(20))
    assert "test_pytest_plugin.py:" in str(caught.value)


def test_an_optimizer_that_leaves_something_out_fails() -> None:
    def of_the_head(made: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(made.parameters())[2:], 0.01)

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    with pytest.raises(AssertionError, match="AB101"):
        assert_trains(model, classify, batches(20), optimizer=of_the_head)


@pytest.mark.parametrize(("data", "steps"), [([], 30), ([1], 0)])
def test_nothing_to_train_on_is_refused(data: list[int], steps: int) -> None:
    with pytest.raises(ValueError, match="expected at least one of each"):
        assert_trains(torch.nn.Linear(1, 1), classify, data, steps=steps)
