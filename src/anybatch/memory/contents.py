"""What objects hold: the items of their lists, dicts and sets, and their attributes, noted and put back in place."""

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_DEPTH = 5  # of objects within an object
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_HELD: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    # for each kind how its items are noted, taken out, and put back
    list: (list, list.clear, list.extend),
    set: (set, set.clear, set.update),
    deque: (list, deque.clear, deque.extend),
    OrderedDict: (lambda held: [*OrderedDict.items(held)], OrderedDict.clear, OrderedDict.update),
    dict: (lambda held: [*dict.items(held)], dict.clear, dict.update),
}


class Contents:
    """What some objects hold now, a few levels deep; the objects, tensors and modules themselves are not copied.

    Args:
        values: objects that may be changed by what they are given to, such as a cache of keys and values.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._noted: list[tuple[Any, Any, type]] = []
        seen = set[int]()
        waiting = [(value, _DEPTH) for value in values]
        while waiting:
            value, depth = waiting.pop()
            if type(value) in _PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) is tuple:
                waiting += [(one, depth - 1) for one in value if depth]
                continue
            for held, kind in _holders_of(value):
                items = _HELD[kind][0](held)
                self._noted.append((held, items, kind))
                inner = [one for _, one in items] if issubclass(kind, dict) else items
                waiting += [(one, depth - 1) for one in inner if depth]

    @contextmanager
    def as_noted(self) -> Iterator[None]:
        """Has the objects hold within a block what they held when this was made."""
        now = [(held, _HELD[kind][0](held), kind) for held, _, kind in self._noted]
        _put(self._noted, now)
        try:
            yield
        finally:
            _put(now, [(held, _HELD[kind][0](held), kind) for held, _, kind in self._noted])


def _holders_of(value: Any) -> Iterator[tuple[Any, type]]:
    """What of an object holds others: itself, and its attributes."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or callable(value):
        return
    kind = next((kind for kind in _HELD if isinstance(value, kind)), None)
    if kind is not None:
        yield value, OrderedDict if isinstance(value, OrderedDict) else kind
    own = getattr(value, "__dict__", None)
    if type(own) is dict and type(value).__module__.partition(".")[0] not in ("torch", "numpy"):
        yield own, dict


def _put(wanted: Sequence[tuple[Any, Any, type]], present: Sequence[tuple[Any, Any, type]]) -> None:
    for (held, items, kind), (_, now, _) in zip(wanted, present, strict=True):
        flat, other = (_flat(one, kind) for one in (items, now))
        if len(flat) != len(other) or not all(map(operator.is_, flat, other)):
            _, clear, fill = _HELD[kind]
            clear(held)
            fill(held, items)


def _flat(items: Any, kind: type) -> list[Any]:
    return [one for pair in items for one in pair] if issubclass(kind, dict) else [*items]
