"""Files and functions stay small enough to read at once."""

import ast
from pathlib import Path

from source_tree import ROOT

FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")
LINES_OF_A_FILE = 600
LINES_OF_A_FUNCTION = 50


def sources(root: Path = ROOT) -> list[Path]:
    """Returns the Python files of the repository."""
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]


def long_files(paths: list[Path]) -> list[str]:
    """Returns a line for every file that is too long."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{path}: {n} lines" for path, n in lengths.items() if n >= LINES_OF_A_FILE]


def long_functions(paths: list[Path]) -> list[str]:
    """Returns a line for every function that is too long without its docstring and decorators."""
    lines = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) >= LINES_OF_A_FUNCTION:
                lines.append(f"{path}:{node.lineno} {node.name}: {length(node)} lines without its docstring")
    return lines


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines from ``def`` to the end, less those of the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def test_files_are_short() -> None:
    assert sources()
    assert not (lines := long_files(sources())), "\n".join(lines)


def test_functions_are_short() -> None:
    assert not (lines := long_functions(sources())), "\n".join(lines)


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    body = "    x = 1\n"
    docstring = '    """One line.\n\n' + "    More.\n" * 60 + '    """\n'
    (tmp_path / "short.py").write_text("def f():\n" + docstring + body * 48, encoding="utf-8")
    (tmp_path / "long.py").write_text("class A:\n  def f():\n" + body * 49 + "x = 1\n" * 549, encoding="utf-8")
    short, long = [tmp_path / "short.py"], [tmp_path / "long.py"]
    assert long_files(short) == long_functions(short) == []
    assert len(long_files(long)) == len(long_functions(long)) == 1
