"""Runs edited text of the user's files in place of what the files have; loads nothing that a script might notice."""

import builtins
import importlib.machinery
import linecache
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

RUN = """\
import sys
own = sys.modules["anybatch.cli.edited"]
sys.argv[:] = sys.argv[1:]
own.run(sys.argv[0])
"""
"""What runs in place of a script, which is its first argument: Python itself takes no loader for a script."""


def use(sources: Mapping[str, str]) -> None:
    """Makes imports take the edited text of files, by path; tracebacks and ``inspect`` show it."""
    if not sources:
        return
    for path, text in sources.items():
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    get_code = importlib.machinery.SourceFileLoader.get_code

    def edited(self: Any, fullname: str) -> Any:
        path = os.path.abspath(self.path)  # noqa: PTH100
        if path in sources:
            return compile(sources[path].encode(), path, "exec", dont_inherit=True)
        return get_code(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = edited  # type: ignore[method-assign]


def run(script: str) -> None:
    """Runs a script as Python would, with its edited text."""
    path = os.path.abspath(script)  # noqa: PTH100
    if os.path.isdir(path):  # noqa: PTH112
        sys.path[0], path = path, os.path.join(path, "__main__.py")  # noqa: PTH118
    else:
        sys.path[0] = os.path.dirname(path)  # noqa: PTH120
    module = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = module
    code: Any = loader.get_code("__main__")
    exec(code, module.__dict__)
