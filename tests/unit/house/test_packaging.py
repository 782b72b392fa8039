"""What is installed: the dependencies that are declared, the versions that are pinned, the command, the types."""

import importlib
import importlib.metadata
import re
import sys
import tomllib
from typing import Any

import pytest

import anybatch
from source_tree import PACKAGE, ROOT, imports, modules

# Where the name that is imported is not the name that is installed.
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    """Returns the names in a list of requirements, without versions and without anybatch's own extras."""
    return {re.split(r"[^\w.-]", line)[0].lower() for line in requirements} - {"anybatch"}


CORE = names(PROJECT["dependencies"])
EXTRAS = set().union(*(names(lines) for lines in PROJECT["optional-dependencies"].values()))
# What an optional peer brings along, or a user of an adapter has: it is there, or there is nothing to do.
PEERS = {"IPython", "numpy", "torchmetrics", "wandb"}


def third_party(at_load: bool) -> dict[str, str]:
    """Returns the distributions that the library imports, with one place for each."""
    found = {}
    for path in modules().values():
        is_adapter = path.parent.name == "integrations"  # imported by users of that very library alone
        for target, line, loads in imports(path):
            if is_adapter and at_load:
                continue
            top = target.split(".")[0]
            if (loads or not at_load) and top not in sys.stdlib_module_names and top != PACKAGE.name:
                found[DISTRIBUTIONS.get(top, top)] = f"{path}:{line}"
    return found


def test_what_is_imported_is_declared() -> None:
    missing = {name: place for name, place in third_party(at_load=False).items() if name not in CORE | EXTRAS | PEERS}
    assert not missing, f"declare in pyproject.toml: {missing}"


def test_what_is_imported_at_load_is_in_the_core() -> None:
    missing = {name: place for name, place in third_party(at_load=True).items() if name not in CORE}
    assert not missing, f"import inside the function that needs it: {missing}"


def test_every_declared_dependency_is_pinned() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.partition("==")[0].lower() for line in text.splitlines() if "==" in line}
    assert pinned >= CORE | EXTRAS, CORE | EXTRAS - pinned
    assert not re.search(r"==\S*\+", text), "a local version, such as +cpu, is on no public index"


def test_the_extra_all_holds_every_other() -> None:
    extras = PROJECT["optional-dependencies"]
    assert extras["all"] == [f"anybatch[{','.join(sorted(set(extras) - {'all'}))}]"]


def test_the_version_is_the_one_that_is_installed() -> None:
    try:
        installed = importlib.metadata.version("anybatch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("anybatch runs from its sources here")
    assert installed == anybatch.__version__


def test_the_console_script_is_there() -> None:
    module, _, function = PROJECT["scripts"]["anybatch"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
