"""A step without a plan calls few functions of the engine; a count, since no load of the machine changes it."""

import sys

from source_tree import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import calls


def test_a_step_calls_few_functions_of_the_engine() -> None:
    fixed, each = calls.counts()
    assert fixed <= 185
    assert each <= 20


def test_a_backward_is_few_functions_away_from_the_step() -> None:
    assert calls.depth() <= 9
