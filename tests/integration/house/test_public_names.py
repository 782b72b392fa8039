"""The public names are exactly these, each documented and each shown at work."""

import doctest
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

import anybatch
import forked_python

ERRORS = {
    "AnyBatchError",
    "AnyBatchWarning",
    "BatchError",
    "CountError",
    "CutClosed",
    "DoesNotFit",
    "LossError",
    "NotSplittable",
    "PlanMismatch",
    "UpdateInterrupted",
}
WORK = {
    "Certificate",
    "Coupled",
    "Doctor",
    "Mean",
    "NoiseScale",
    "Observer",
    "OverTime",
    "Paths",
    "Plan",
    "StepResult",
    "TrainStep",
    "backward",
    "check",
    "count_samples",
    "count_tokens",
    "cut",
    "freeze",
    "measure",
    "plan",
    "rescale",
    "testing",
    "why",
    "windows",
}
MOST_NAMES_OF_WORK = 30  # errors apart


def examples(name: str) -> int:
    """Returns how many lines of doctest the public name and, for a module, its functions have."""
    value = getattr(anybatch, name)
    found = doctest.DocTestFinder(recurse=isinstance(value, ModuleType)).find(value, name)
    return sum(len(test.examples) for test in found)


def test_the_public_names_are_exactly_these() -> None:
    assert len(set(anybatch.__all__)) == len(anybatch.__all__)
    assert set(anybatch.__all__) == ERRORS | WORK | {"__version__"}
    assert len(WORK) <= MOST_NAMES_OF_WORK


@pytest.mark.parametrize("name", sorted(ERRORS | WORK))
def test_a_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(anybatch, name)
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"
    assert isinstance(value, ModuleType) == (name == "testing"), f"anybatch.{name} is {value!r}"


@pytest.mark.parametrize("name", sorted(WORK))
def test_a_public_name_shows_an_example(name: str) -> None:
    assert examples(name) > 0, f"the docstring of {name} has no doctest"


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_have_one_root(name: str) -> None:
    error = getattr(anybatch, name)
    assert issubclass(error, UserWarning if name == "AnyBatchWarning" else anybatch.AnyBatchError)
    assert error is getattr(importlib.import_module("anybatch.errors"), name)


def test_public_names_survive_the_import_of_every_module(tmp_path: Path) -> None:
    """Loading a submodule binds its name on the package, which hides a public name that is the same."""
    code = """
import importlib, pkgutil, types, anybatch
for found in pkgutil.walk_packages(anybatch.__path__, "anybatch."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
hidden = [name for name in anybatch.__all__ if isinstance(getattr(anybatch, name), types.ModuleType)]
assert hidden == ["testing"], hidden
"""
    done = forked_python.run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_star_import_and_dir_give_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from anybatch import *", namespace)
    assert set(anybatch.__all__) <= set(namespace)
    assert set(anybatch.__all__) <= set(dir(anybatch))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Acumulator'"):
        anybatch.Acumulator  # noqa: B018
