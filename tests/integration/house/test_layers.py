"""The order of the house: a module imports only from floors below its own, or from its own folder."""

import ast
import importlib.util
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from source_tree import PACKAGE, imports, module_name, modules

# From the ground up. Each entry is a folder or a file directly under src/anybatch; files on one floor may import each
# other, because they lie in one folder. The package's own __init__ stands above everything: nothing imports it.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"_version", "errors", "interception", "units"}),
    frozenset({"accelerators", "torch_private", "userlines"}),
    frozenset({"records"}),
    frozenset({"batch"}),
    frozenset({"tensors"}),
    frozenset({"memory"}),
    frozenset({"loss"}),
    frozenset({"options"}),
    frozenset({"parallel"}),
    frozenset({"update"}),
    frozenset({"scaling"}),
    frozenset({"doctor"}),
    frozenset({"checking"}),
    frozenset({"planning"}),
    frozenset({"backpropagation", "certificate", "engine", "step"}),
    frozenset({"report"}),
    frozenset({"testing"}),  # what it says of a run that does not train is the doctor's report
    frozenset({"integrations"}),
    frozenset({"demo"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
ROOF = len(FLOORS)
# A notebook asks a result itself how it looks, so that these import the report, when that is asked for.
SHOWN = {"anybatch.records.showing", "anybatch.doctor.recorder"}
WITHOUT_TORCH = frozenset({"", "_version", "errors", "units", "records", "report", "cli", "__main__"})
# A module with the name of its only function is safe where nothing re-exports the function under the folder's name.
NAMED_LIKE_ITS_EXPORT = {"anybatch.cli.main": "the console script is anybatch.cli.main:main, and cli exports nothing"}


def entry(module: str) -> str:
    """Returns the folder or file directly under the package that a module belongs to; "" for the package itself."""
    return f"{module}.".split(".")[1]


def floor(module: str) -> int | None:
    """Returns the number of a module's floor, or None for one that has none yet."""
    if entry(module) == "":
        return ROOF
    return next((number for number, names in enumerate(FLOORS) if entry(module) in names), None)


def upward_imports(package: Path = PACKAGE) -> list[str]:
    """Returns a line for every import that does not go downward."""
    lines = []
    for name, path in modules(package).items():
        here = floor(name)
        if here is None:
            lines.append(f"{name}: has no floor; add {entry(name)!r} to FLOORS in {Path(__file__).name}")
            continue
        for target, line, at_load in imports(path, package):
            if name in SHOWN and entry(target) == "report" and not at_load:
                continue
            there = floor(target) if target.split(".")[0] == package.name else -1
            same_folder = here == there and here != ROOF and _folder(name, package) == _folder(target, package)
            if there is None or (there >= here and not same_folder):
                lines.append(f"{path}:{line}: {name} (floor {here}) imports {target} (floor {there})")
    return lines


def _folder(module: str, package: Path) -> str:
    """Returns what counts as one folder: the package for files directly under it, else the folder under it."""
    return entry(module) if (package / entry(module)).is_dir() else ""


def cycle(package: Path = PACKAGE) -> list[str]:
    """Returns the modules of one circle of imports at load, or nothing."""
    graph = {
        name: {found.target for found in imports(path, package) if found.at_load and found.target in modules(package)}
        for name, path in modules(package).items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def ways_to_torch(package: Path = PACKAGE) -> list[str]:
    """Returns, for every module that has to load without torch and does not, the chain of imports that loads it."""
    return [chain for name in modules(package) if entry(name) in WITHOUT_TORCH if (chain := _way(name, package, ()))]


def _way(name: str, package: Path, seen: tuple[str, ...]) -> str:
    for target, line, at_load in imports(modules(package)[name], package):
        if at_load and target.split(".")[0] == "torch":
            return " -> ".join((*seen, f"{name}:{line}", target))
        if at_load and target in modules(package) and target not in seen:
            chain = _way(target, package, (*seen, name))
            if chain:
                return chain
    return ""


def exports(path: Path) -> set[str]:
    """Returns the public names that a file defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def confusing_names(package: Path = PACKAGE) -> list[str]:
    """Returns a line for every module that bears the name of what it exports or of a standard module."""
    lines = []
    for name, path in modules(package).items():
        last = name.rpartition(".")[2]
        if last in exports(path) and name not in NAMED_LIKE_ITS_EXPORT:
            lines.append(f"{path}: importing the module hides {last!r}, which it exports; rename the file")
        if last in sys.stdlib_module_names and last != "__main__":
            lines.append(f"{path}: {last!r} is a module of the standard library; rename the file")
    return lines


def private_torch(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Returns, for every private module of torch, the modules of the package that use it."""
    users: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        dotted = {found.target for found in imports(path, package)}
        dotted |= {f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        dotted |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for text in dotted:
            match = re.match(r"torch(?:\.[a-zA-Z]\w*)*\._[a-zA-Z]\w*", text)
            if match and _is_module(match.group()):
                users.setdefault(match.group(), set()).add(module_name(path, package))
    return users


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # it lies in a module, not in a package: a private class or function
        return False


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that then fails if torch was imported."""
    code += "\nimport sys; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_imports_go_downward() -> None:
    assert len(modules()) > 10
    assert not (lines := upward_imports()), "\n".join(lines)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not (names := cycle()), " -> ".join(names)


def test_records_reports_and_the_command_line_load_no_torch() -> None:
    assert not (lines := ways_to_torch()), "\n".join(lines)


def test_no_module_bears_the_name_of_an_export_or_of_a_standard_module() -> None:
    assert not (lines := confusing_names()), "\n".join(lines)


def test_each_private_module_of_torch_is_used_in_one_place() -> None:
    shared = {name: sorted(users) for name, users in private_torch().items() if len(users) > 1}
    assert not shared, f"wrap it in one module and import that: {shared}"


def test_importing_the_package_loads_no_torch() -> None:
    done = run_without_torch("import anybatch; anybatch.__all__; anybatch.__version__; dir(anybatch)")
    assert done.returncode == 0, done.stderr


def test_the_help_of_the_command_line_loads_no_torch() -> None:
    code = """
import sys
from anybatch.cli.main import main
sys.argv = ["anybatch", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    done = run_without_torch(code)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert "check" in done.stdout


FAULTS = {
    "upward": ({"records/a.py": "from anybatch.update import b\n", "update/b.py": ""}, upward_imports),
    "upward, relative": ({"records/a.py": "from ..update import b\n", "update/b.py": ""}, upward_imports),
    "upward, in a function": ({"tensors/a.py": "def f():\n    import anybatch.step\n", "step.py": ""}, upward_imports),
    "upward, for types": (
        {"tensors/a.py": "if TYPE_CHECKING:\n    from anybatch.step import S\n", "step.py": ""},
        upward_imports,
    ),
    "upward, by name": ({"units.py": "import_module('anybatch.step')\n", "step.py": ""}, upward_imports),
    "the package itself": ({"cli/a.py": "from anybatch import TrainStep\n"}, upward_imports),
    "no floor": ({"elsewhere.py": ""}, upward_imports),
    "a circle": ({"records/a.py": "from . import b\n", "records/b.py": "import anybatch.records.a\n"}, cycle),
    "torch": ({"records/a.py": "import torch\n"}, ways_to_torch),
    "torch, further down": ({"cli/a.py": "import anybatch.step\n", "step.py": "from torch import nn\n"}, ways_to_torch),
    "own export": ({"loss/cut.py": "def cut():\n    pass\n"}, confusing_names),
    "standard module": ({"records/types.py": ""}, confusing_names),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_above_find_the_fault(fault: str, tmp_path: Path) -> None:
    files, find = FAULTS[fault]
    package = tmp_path / "anybatch"
    _write(package, files)
    assert len(find(package)) >= 1


def test_the_checks_above_let_good_code_pass(tmp_path: Path) -> None:
    package = tmp_path / "anybatch"
    lazy = "def f():\n    import torch\n\n\nif TYPE_CHECKING:\n    import torch\n    from anybatch.errors import E\n"
    _write(
        package,
        {
            "errors.py": "",
            "records/means.py": lazy,
            "records/results.py": "from anybatch.records.means import Mean\n",
            "step.py": "import torch\nfrom anybatch import certificate, errors\nfrom .records import means\n",
            "certificate.py": "from torch.utils import _pytree\n",
            "cli/main.py": "def main():\n    from anybatch.step import TrainStep\n",
        },
    )
    assert upward_imports(package) == []
    assert cycle(package) == []
    assert ways_to_torch(package) == []
    assert confusing_names(package) == []
    assert private_torch(package) == {"torch.utils._pytree": {"anybatch.certificate"}}


def _write(package: Path, files: dict[str, str]) -> None:
    for name, text in {"__init__.py": "", **files}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
