"""The numbers, flags and texts that a loss and a model go by, which a training loop may set for another phase."""

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from anybatch.checking.reach import is_empty
from anybatch.tensors.modules import modules_of
from anybatch.tensors.sideeffects import names_in

_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 4
_MOST = 64  # attributes: what has more is no settings
_Key = tuple[object, object]  # what a value is of, be it made anew in each step, and the name


class Switches:
    """Says when what a loss goes by is not what it was: at the 1st, 2nd, 4th, 8th … change of each value."""

    def __init__(self) -> None:
        self._latest: dict[_Key, Any] = {}
        self._changes: Counter[_Key] = Counter()

    def note(self, model: Any, loss_fn: Any) -> None:
        """Keeps the values as they are now, when a split is proved."""
        self._latest = _values(model, loss_fn)

    def are_turned(self, model: Any, loss_fn: Any) -> bool:
        """Whether a value is another than the last time, as often as its changes are a power of two.

        Example:
            >>> switches, phase = Switches(), {"epoch": 0}
            >>> loss_fn = functools.partial(lambda model, batch, epoch: epoch, epoch=0)
            >>> switches.note(None, loss_fn)
            >>> found = []
            >>> for epoch in (0, 1, 1, 2, 3, 4):
            ...     loss_fn.keywords["epoch"] = epoch
            ...     found.append(switches.are_turned(None, loss_fn))
            >>> found
            [False, True, False, True, False, True]
        """
        try:
            before, now = self._latest, _values(model, loss_fn)
        except Exception:  # noqa: BLE001 - what the user's objects raise when they are looked at must not end a step
            return False
        if now == before:
            return False
        self._latest = now
        changed = [name for name, value in now.items() if name in before and before[name] != value]
        self._changes.update(changed)
        return any(self._changes[name].bit_count() == 1 for name in changed)


def _values(model: Any, loss_fn: Any) -> dict[_Key, Any]:
    found = dict(_of(loss_fn, _DEPTH))
    for module in modules_of(model) if isinstance(model, torch.nn.Module) else ():
        if not type(module).__module__.startswith("torch."):
            found.update(_attributes(module, id(module)))
    return found


def _of(function: Any, depth: int) -> Iterator[tuple[_Key, Any]]:
    if depth == 0:
        return
    if isinstance(function, functools.partial):
        yield from _of(function.func, depth - 1)
        yield from ((("partial", key), one) for key, one in function.keywords.items() if type(one) in _PLAIN)
    elif inspect.ismethod(function):
        yield from _attributes(function.__self__, type(function.__self__))
        yield from _of(function.__func__, depth - 1)
    elif inspect.isfunction(function):
        known = function.__globals__
        reached = [(one, known[one]) for one in names_in(function.__code__) if one in known]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        reached += [(one, cell.cell_contents) for one, cell in cells if not is_empty(cell)]
        for inner, value in reached:
            if type(value) in _PLAIN:
                yield (function.__code__, inner), value
            elif depth == _DEPTH and not isinstance(value, (type, torch.nn.Module)):
                yield from _attributes(value, inner)
    elif not isinstance(function, torch.nn.Module):
        yield from _attributes(function, type(function))
        for one in getattr(function, "user_functions", ()):
            yield from _of(one, depth - 1)


def _attributes(value: Any, home: object) -> Iterator[tuple[_Key, Any]]:
    own = value if type(value) is dict else getattr(value, "__dict__", None)
    is_ours = type(value).__module__.partition(".")[0] == "anybatch"  # whose attributes change as it runs
    if type(own) is dict and len(own) < _MOST and not is_ours:
        yield from (((home, key), one) for key, one in own.items() if type(one) in _PLAIN)
