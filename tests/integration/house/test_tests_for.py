"""``scripts/test --for`` finds the tests of a source file."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from source_tree import PACKAGE, ROOT

SCRIPT = ROOT / "scripts" / "tests_for.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tests_for", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_folder_has_tests_that_know_no_internals() -> None:
    own = script()
    tests = own.imported_by_tests()
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= own.BEHAVIOUR.keys()
    for name, begins in own.BEHAVIOUR.items():
        for begin in begins:
            assert any(Path(test).name.removeprefix("test_").startswith(begin) for test in tests), (name, begin)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("planning/knapsack.py", "tests/unit/planning/test_knapsack.py"),
        ("checking/cuts.py", "tests/unit/checking/test_proof_kin.py"),
    ],
)
def test_the_tests_of_a_file_are_found(file: str, expected: str) -> None:
    path = PACKAGE / file
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(path.relative_to(ROOT))
    assert expected in done.stdout.splitlines()


def test_what_is_no_source_file_is_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "README.md"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected a file of src/anybatch" in done.stderr


ROW = re.compile(r"^\| .+ \| `([\w/]+\.py)` \| (?:`(\w+)`)? \| `(test_\w+)` \|$", re.MULTILINE)


def test_the_table_of_where_things_are_decided_is_true() -> None:
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(rows) >= 20
    for file, name, test in rows:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(?:class |def )?{name}\b", source, re.MULTILINE), (file, name)
        assert list((ROOT / "tests").rglob(f"{test}.py")), test
