"""Which functions of the sources give advice, so that each can be asked for a test that follows it."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from source_tree import PACKAGE

T = TypeVar("T", bound=Callable[..., Any])


def sites(paths: Iterable[Path], classes: frozenset[str]) -> set[str]:
    """The functions that make an object of one of some classes, as ``folder/file.function``."""
    return {site for path in paths for site in _sites(path, classes)}


def _sites(path: Path, classes: frozenset[str]) -> Iterator[str]:
    where = path.relative_to(PACKAGE).with_suffix("").as_posix()

    def walk(node: ast.AST, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in classes:
                yield f"{where}.{function}"
            yield from walk(child, inside)

    return walk(ast.parse(path.read_text(encoding="utf-8")), "")


class Register:
    """Which tests follow the advice of which functions."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}

    def follows(self, *names: str) -> Callable[[T], T]:
        """Marks a test that does what the text of some functions says, and finds that it helps."""

        def mark(test: T) -> T:
            for name in names:
                self.known.setdefault(name, []).append(test.__name__)
            return test

        return mark
