"""A step without a plan calls few functions of the engine; a count, since no load of the machine changes it."""

import importlib

import pytest

from source_tree import ROOT


def test_a_step_calls_few_functions_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    fixed, each = importlib.import_module("calls").counts()
    assert fixed <= 185
    assert each <= 20


def test_a_backward_is_few_functions_away_from_the_step() -> None:
    assert calls.depth() <= 9
