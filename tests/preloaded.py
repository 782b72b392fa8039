"""Modules that a process has loaded before it forks others, which find them when they import them."""

import builtins
import copy
import importlib
import pkgutil
import sys
from collections import defaultdict
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

_MODULES: dict[str, ModuleType] = {}
_IMPORTS: defaultdict[str, set[str]] = defaultdict(set)  # by a module, while it was loaded


def load(package: str) -> None:
    """Loads torch and the modules of a package but those that take in other libraries or run as scripts."""
    before = builtins.__import__

    def noted(name: str, of: Any = None, local: Any = None, parts: Any = (), level: int = 0) -> Any:
        _IMPORTS[(of or {}).get("__name__", "")].update([name, *(f"{name}.{part}" for part in parts or ())])
        return before(name, of, local, parts, level)

    with mock.patch.object(builtins, "__import__", noted):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.startswith((f"{package}.demo", f"{package}.integrations", f"{package}.__main__")):
                importlib.import_module(found.name)
    _MODULES.update({name: module for name, module in sys.modules.items() if name.partition(".")[0] == package})
    _MODULES["torch"] = sys.modules["torch"]


def forget() -> None:
    """Lets this process import what was loaded as for the first time."""
    for name in _MODULES:
        sys.modules.pop(name, None)
    sys.meta_path[:] = [_Loaded(), *(one for one in sys.meta_path if not isinstance(one, _Loaded))]


class _Loaded:
    """Finds what has been loaded; what that has imported is then imported, too."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        module = _MODULES.get(name)
        if module is None or module.__spec__ is None:
            return None
        spec = copy.copy(module.__spec__)
        spec.loader = _Loader(module)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def __getattr__(self, name: str) -> Any:  # what ``python -m`` asks for
        return getattr(self._spec.loader, name)  # type: ignore[union-attr]

    def create_module(self, spec: Any) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        for name in sorted(_IMPORTS[module.__name__] & _MODULES.keys()):
            importlib.import_module(name)
