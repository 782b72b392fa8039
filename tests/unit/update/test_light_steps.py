"""A step without a plan calls few functions of the engine; a count, since no load of the machine changes it."""

import importlib
from typing import Any

import pytest

from source_tree import ROOT


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark that counts them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("calls")


def test_a_step_calls_few_functions_of_the_engine(calls: Any) -> None:
    fixed, each = calls.counts()
    assert fixed <= 93
    assert each <= 14.5


def test_a_backward_is_few_functions_away_from_the_step(calls: Any) -> None:
    assert calls.depth() <= 9
