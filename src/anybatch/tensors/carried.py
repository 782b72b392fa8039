"""What a loss function keeps in Python from call to call: attributes, variables of its closure, globals it sets."""

import collections
import copy
import dis
import functools
import sys
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from anybatch.tensors.modules import modules_of

_ABSENT: Any = object()
_MOST_ITEMS = 100_000  # of a list or another container that is compared
_CONTAINERS = (list, dict, set, collections.deque, collections.defaultdict, collections.Counter)
_DEPTH = 3
# What torch.nn.Module keeps for itself; none of it is a plain attribute.
_OWN = frozenset(torch.nn.Module().__dict__) - {"training"}
_Space = tuple[dict[str, Any], dict[str, tuple[Any, Any]], Callable[[str], bool]]


class Carried:
    """Puts back what the objects and variables that a loss function reaches were set to.

    These are the object whose method it is, objects and modules in its closure, and what those have; no further. Lists,
    dictionaries and sets get their items back. What tensors hold is none of it.

    Args:
        modules: whose attributes and parameters are put back too.
        functions: the user's.

    Example:
        >>> def loss_fn(model, batch):
        ...     loss_fn.calls += 1
        ...     loss_fn.values.append(loss_fn.calls)
        >>> loss_fn.calls, loss_fn.values = 0, []
        >>> carried = Carried([], [loss_fn])
        >>> loss_fn(None, None)
        >>> carried.restore()
        >>> loss_fn.calls, loss_fn.values
        (0, [])
    """

    def __init__(self, modules: Iterable[torch.nn.Module], functions: Iterable[Any]) -> None:
        self._spaces: list[_Space] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        for module in modules:
            self._add_module(module)
        for function in functions:
            self._visit(function, _DEPTH)

    def restore(self) -> None:
        """Sets everything as it was."""
        for space, before, wanted in self._spaces:
            _put_back(space, before, wanted)
        for cell, value in self._cells:
            if _content(cell) is not value:
                cell.cell_contents = value
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data

    def _visit(self, value: Any, depth: int) -> None:
        if depth == 0 or id(value) in self._seen or isinstance(value, type):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            for module in (one for one in modules_of(value) if one is value or id(one) not in self._seen):
                self._add_module(module)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._visit(one, depth)
        elif isinstance(value, FunctionType):
            self._add_function(value, depth)
        elif (owner := getattr(value, "__self__", None)) is not None and callable(value):
            self._visit(getattr(value, "__func__", None), depth)
            self._visit(owner, depth)
        elif isinstance(value, (list, tuple)) and len(value) < _MOST_ITEMS:
            for one in value:
                if isinstance(one, (torch.nn.Module, torch.Tensor)):
                    self._visit(one, depth - 1)
        elif isinstance(value, torch.Tensor):
            self._add_data(value)
        elif _is_users(value):
            self._add_space(vars(value), _is_any)
            for one in list(vars(value).values()):
                self._visit(one, depth - 1)
            self._visit(getattr(type(value), "__call__", None), depth)  # noqa: B004 - its code, which may set globals
        else:  # of Coupled and OverTime, say
            for one in getattr(value, "user_functions", ()):
                self._visit(one, depth)

    def _add_function(self, function: FunctionType, depth: int) -> None:
        if vars(function):
            self._add_space(vars(function), _is_any)
        if names := _globals_set_by(function.__code__):
            self._add_space(function.__globals__, names.__contains__)
        for cell in function.__closure__ or ():
            value = _content(cell)
            if value is not _ABSENT:
                self._cells.append((cell, value))
                self._visit(value, depth - 1)

    def _add_module(self, module: torch.nn.Module) -> None:
        self._seen.add(id(module))
        self._add_space(module.__dict__, _is_plain)
        for tensor in module._parameters.values():
            if tensor is not None:
                self._add_data(tensor)

    def _add_data(self, tensor: torch.Tensor) -> None:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            self._data.append((tensor, tensor.data))

    def _add_space(self, space: dict[str, Any], wanted: Callable[[str], bool]) -> None:
        self._spaces.append((space, {name: (one, _items(one)) for name, one in space.items() if wanted(name)}, wanted))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return _ABSENT


def _is_any(name: str) -> bool:
    return True


def _is_plain(name: str) -> bool:
    return name not in _OWN


def _is_users(value: Any) -> bool:
    """Whether a value is an object, with attributes, of a class that is not of a library."""
    return hasattr(value, "__dict__") and not isinstance(value, ModuleType) and _is_of_user(type(value).__module__)


def _is_of_user(name: str) -> bool:
    """Whether a module of Python is not of a library."""
    if name.partition(".")[0] in ("builtins", "torch", "anybatch"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and name.partition(".")[0] not in sys.stdlib_module_names


@functools.lru_cache(maxsize=256)
def _globals_set_by(code: CodeType) -> frozenset[str]:
    return frozenset(str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")


def _items(value: Any) -> Any:
    """A copy of a container whose items are put back."""
    return copy.copy(value) if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS else None


def _put_back(space: dict[str, Any], before: dict[str, tuple[Any, Any]], wanted: Callable[[str], bool]) -> None:
    for name in [name for name in space if name not in before and wanted(name)]:
        del space[name]
    for name, (value, items) in before.items():
        if space.get(name, _ABSENT) is not value:
            space[name] = value
        if items is not None:
            _refill(value, items)


def _refill(value: Any, items: Any) -> None:
    if not _is_same(items, value):
        value.clear()
        value.extend(items) if isinstance(value, (list, collections.deque)) else value.update(items)


def _is_same(items: Any, value: Any) -> bool:
    """Whether a container still holds the very same things, of which some may be tensors."""
    if isinstance(items, dict):
        return list(items) == list(value) and all(value[key] is item for key, item in items.items())
    if isinstance(items, set):
        return bool(items == value)
    return len(items) == len(value) and all(a is b for a, b in zip(items, value, strict=True))
