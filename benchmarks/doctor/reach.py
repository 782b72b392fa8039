"""How many lines a rule of the doctor reaches: its function and all of ours that it calls, directly or not.

    python benchmarks/doctor/reach.py            # the median, and the rules that reach most
    python benchmarks/doctor/reach.py --src DIR  # of another copy of the package

A function counts with its docstring, a method where its name is used; what the framework does for every rule
(``registry.py``, ``records/``) does not count.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "anybatch"
FOLDERS = ("doctor/rules", "doctor/views")


class Code:
    """The functions and methods below some folders, by name, with their lines and the names that they use."""

    def __init__(self, src: Path) -> None:
        self.lines: dict[tuple[str, str], int] = {}
        self.uses: dict[tuple[str, str], set[str]] = {}
        self.methods: dict[str, list[tuple[str, str]]] = {}
        self.imports: dict[str, dict[str, str]] = {}
        self.rules: list[tuple[str, str]] = []
        for folder in FOLDERS:
            for path in sorted((src / folder).glob("*.py")):
                if path.stem != "registry":
                    self._read(path)

    def _read(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imports[path.stem] = {
            alias.name: node.module.rpartition(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and ".doctor." in node.module
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self._add((path.stem, node.name), node)
                if any(
                    isinstance(one, ast.Call) and getattr(one.func, "id", "") == "rule" for one in node.decorator_list
                ):
                    self.rules.append((path.stem, node.name))
            elif isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        key = (path.stem, f"{node.name}.{inner.name}")
                        self._add(key, inner)
                        self.methods.setdefault(inner.name, []).append(key)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                key = (path.stem, node.targets[0].id)
                self.lines[key], self.uses[key] = 0, _names(node)

    def _add(self, key: tuple[str, str], node: ast.FunctionDef) -> None:
        self.lines[key] = (node.end_lineno or node.lineno) - node.lineno + 1
        self.uses[key] = _names(node)

    def reached(self, start: tuple[str, str]) -> set[tuple[str, str]]:
        """What a function reaches, itself included; a method only where something of its module is used as well."""
        found: set[tuple[str, str]] = set()
        more = {start}
        while more - found:
            found |= more
            names = {key: self.uses[key] for key in found}
            known = {key[0] for key in found} | {
                self.imports[key[0]][name] for key, used in names.items() for name in used & self.imports[key[0]].keys()
            }
            for key, used in names.items():
                for name in used:
                    own, other = (key[0], name), (self.imports[key[0]].get(name, ""), name)
                    methods = [one for one in self.methods.get(name, ()) if one[0] in known]
                    more |= {one for one in (own, other, *methods) if one in self.lines}
        return found


def _names(node: ast.AST) -> set[str]:
    plain = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return plain | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--src", type=Path, default=SRC)
    code = Code(parser.parse_args().src)
    sizes = {key: sum(code.lines[one] for one in code.reached(key)) for key in code.rules}
    print(f"{len(sizes)} rules; lines that a rule reaches: median {statistics.median(sizes.values()):g}")
    for (module, name), size in sorted(sizes.items(), key=lambda entry: -entry[1])[:10]:
        print(f"{size:6} {module}.{name}")


if __name__ == "__main__":
    main()
