"""Reads the sources of anybatch: which modules there are, and what each imports, where, without running any of it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "anybatch"


class Import(NamedTuple):
    """One import: the full dotted name, the line, and whether it happens when the importing module is loaded."""

    target: str
    line: int
    at_load: bool


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """Returns the dotted name of a source file: ``src/anybatch/records/means.py`` is ``anybatch.records.means``."""
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Returns the path of every module of the package by its dotted name."""
    return {module_name(path, package): path for path in sorted(package.rglob("*.py"))}


@cache
def imports(path: Path, package: Path = PACKAGE) -> tuple[Import, ...]:
    """Returns every import of a file, those inside functions and under ``TYPE_CHECKING`` too."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return tuple(_found(tree, path, package, at_load=True))


def _found(node: ast.AST, path: Path, package: Path, *, at_load: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, at_load)
    elif isinstance(node, ast.ImportFrom):
        base = _base(node, path, package)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            # `from package import name` loads the module `package.name` where there is one, else it takes an attribute.
            yield Import(name if name in modules(package) else base, node.lineno, at_load)
    elif isinstance(node, ast.Call) and _dynamic(node) is not None:
        yield Import(str(_dynamic(node)), node.lineno, at_load)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for only_for_types in node.body:
            yield from _found(only_for_types, path, package, at_load=False)
        for otherwise in node.orelse:
            yield from _found(otherwise, path, package, at_load=at_load)
        return
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _found(child, path, package, at_load=at_load and not inside)


def _base(node: ast.ImportFrom, path: Path, package: Path) -> str:
    """Returns the absolute name of what a ``from`` import imports from."""
    if node.level == 0:
        return node.module or ""
    folder = (package.name, *path.parent.relative_to(package).parts)
    parts = folder[: len(folder) - node.level + 1]
    return ".".join((*parts, node.module) if node.module else parts)


def _dynamic(node: ast.Call) -> str | None:
    """Returns the name that ``importlib.import_module("name")`` imports, where it is written out."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function in {"import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return None
