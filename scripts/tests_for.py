#!/usr/bin/env python3
"""Prints the tests of some source files: those that import them, else those of the behaviour that their folder makes.

.venv/bin/python scripts/tests_for.py src/anybatch/update/boundary.py
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from source_tree import module_name, modules  # noqa: E402

BEHAVIOUR = {
    "accelerators": ("accelerator", "gpu"),
    "batch": ("batches", "layout", "windows", "trees", "whole_batches", "written"),
    "tensors": ("randomness", "precision", "fake", "dropout", "sample_dropout", "short_ways", "parameters"),
    "memory": ("optimizations", "meter", "memory_picture", "checkpointing"),
    "loss": ("losses", "several_losses", "exactness", "cut", "coupled", "overtime", "properties"),
    "options": ("bad_arguments",),
    "parallel": ("ranks", "sharding", "devices", "buckets"),
    "update": ("boundary", "transaction", "retries", "out_of_memory", "interrupted", "batchnorm", "closures", "freeze"),
    "scaling": ("noise_scale", "rescale"),
    "checking": ("proof", "certificate", "remedies"),
    "planning": ("plan", "budgets", "does_not_fit", "knapsack"),
    "doctor": ("doctor", "rules", "why"),
    "report": ("report",),
    "integrations": ("integrations",),
    "demo": ("demo",),
    "cli": ("cli",),
    "records": ("states", "plan_records", "report"),
    "step": ("train_step", "exactness", "light_steps", "retries"),
}
"""For each folder or file of the package how the names of tests begin that know no internals of it."""


def imported_by_tests() -> dict[str, set[str]]:
    """For each test file the modules of anybatch that it imports, itself or through what tests share."""
    direct: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        direct[str(path.relative_to(ROOT))] = names
    shared = {Path(name).stem: names for name, names in direct.items() if not _is_test(name)}
    return {
        name: names | {one for helper in names & shared.keys() for one in shared[helper]}
        for name, names in direct.items()
        if _is_test(name)
    }


def _is_test(name: str) -> bool:
    return Path(name).name.startswith("test_")


def tests_of(module: str) -> list[str]:
    """The test files of a module."""
    tests = imported_by_tests()
    found = [name for name, names in tests.items() if module in names]
    if found:
        return found
    begins = BEHAVIOUR.get(module.split(".")[1] if "." in module else "", ())
    return [name for name in tests if Path(name).name.removeprefix("test_").startswith(begins)] if begins else []


def main(arguments: list[str]) -> int:
    """Prints the tests of the files that are named."""
    found: list[str] = []
    for argument in arguments:
        path = Path(argument).resolve()
        name = module_name(path) if path.is_file() and path.suffix == ".py" else ""
        if name not in modules():
            sys.stderr.write(
                f"got {argument}, expected a file of src/anybatch, such as src/anybatch/update/boundary.py\n"
            )
            return 2
        found += [str(path.relative_to(ROOT)), *tests_of(name)]  # its doctests too
    sys.stdout.write("\n".join(dict.fromkeys(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
