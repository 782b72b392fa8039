"""The numbers, flags and texts that a loss and a model go by, which a training loop may set for another phase."""

import contextlib
import functools
import inspect
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from anybatch.batch.layout import Constant, Rows
from anybatch.checking.reach import variables_of
from anybatch.tensors.modules import modules_of

_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = (int, float)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPENED = (list, tuple, ModuleType)  # whose kind says nothing
_FEW = 8  # numbers in a list that may be settings
_OFTEN, _RARELY = 64, 8  # the first steps, in which modules are looked at, and then which of them
_SIDES = 16  # of a number, between others, each of which is seen at once
_NONE = object()  # for what is none
_LIBRARIES = ("torch", "anybatch", "numpy")
_DEPTH = 3
_INNER = 2
_MOST = 64  # attributes: what has more is no settings
_Key = tuple[object, object]  # what a value is of, be it made anew in each step, and the name


class Switches:
    """Says when what a loss goes by is not what it was: at the 1st, 2nd, 4th, 8th … change of each value.

    A schedule changes in each step, and turns something on at one of them: so a number counts at once, too, where it
    gets to the other side of another one, of those in the code and of the settings that stay.
    """

    def __init__(self) -> None:
        self._latest: dict[_Key, Any] = {}
        self._changes: Counter[_Key] = Counter()
        self._looks = 0
        # numbers that a schedule may be compared with, in their order; those of a module only for its own
        self._bounds: dict[object, Sequence[float]] = {}
        self._sides = defaultdict[_Key, set[tuple[Any, ...]]](set)  # between which of them a number has been

    def note(self, model: Any, loss_fn: Any, nodes: Sequence[Rows | Constant] = ()) -> None:
        """Keeps the values as they are now, when a split is proved."""
        with contextlib.suppress(Exception):  # what the user's objects raise when they are looked at ends no step
            known = set[Any]()
            self._latest = _values(model, loss_fn, nodes, known)
            own = defaultdict[object, set[float]](set)
            for name, value in self._latest.items():
                if name not in self._changes and type(value) in _NUMBERS:
                    own[_module_of(name)].add(value)
            code = _numbers_in(known, [type(loss_fn), *map(type, modules_of(model))])
            own[None].update(one for one in code if type(one) in _NUMBERS)
            self._bounds = {module: sorted(numbers | own[None]) for module, numbers in own.items()}
            self._is_beyond(self._latest, self._latest)

    def forget(self) -> None:
        """Counts changes from the first one again."""
        self._changes.clear()

    def are_turned(self, model: Any, loss_fn: Any, nodes: Sequence[Rows | Constant] = ()) -> bool:
        """Whether a value is another than the last time, as often as its changes are a power of two.

        The modules of a large model take a millisecond to look at, so that later this is not done in each step.

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
        self._looks += 1
        of = model if self._looks <= _OFTEN or self._looks % _RARELY == 0 else None
        try:
            before, now = self._latest, _values(of, loss_fn, nodes)
        except Exception:  # noqa: BLE001 - as above
            return False
        if now == before:
            return False
        changed = [name for name, value in now.items() if name in before and before[name] != value]
        self._latest = before | now if of is None else now
        if not changed:
            return False
        self._changes.update(changed)
        is_beyond = self._is_beyond(changed, now)
        return is_beyond or any(self._changes[name].bit_count() == 1 for name in changed)

    def _is_beyond(self, names: Iterable[_Key], values: Mapping[_Key, Any]) -> bool:
        """Whether a number is between two others where it has never been; this is noted.

        After a number of times, only at each power of two: what jumps about among many others is no schedule.
        """
        is_beyond, shared = False, self._bounds.get(None, ())
        for name in names:
            if type(value := values[name]) in _NUMBERS:
                bounds = self._bounds.get(_module_of(name), shared)
                below, above = bisect_left(bounds, value), bisect_right(bounds, value)
                side = (*bounds[max(0, below - 1) : below], None, *bounds[above : above + 1])
                sides = self._sides[name]
                if side not in sides:
                    sides.add(side)
                    is_beyond = is_beyond or len(sides) <= _SIDES or len(sides).bit_count() == 1
        return is_beyond


def _module_of(name: _Key) -> object:
    """The module, by identity, that a number is an attribute of, or in one; ``None`` for others."""
    home = name[0]
    while type(home) is tuple:
        home = home[0]
    return home if type(home) is int else None


def _numbers_in(known: Iterable[Any], kinds: Iterable[type]) -> Iterator[Any]:
    """What is constant in the code of functions among what is known, and of the methods of classes of the user's."""
    own = [kind for kind in {*kinds} if kind.__module__.partition(".")[0] not in _LIBRARIES]
    functions = *known, *(one for kind in own for one in vars(kind).values())
    codes = [one.__code__ for one in functions if type(one) is FunctionType]
    for code in codes:  # to which those within it are added
        for one in code.co_consts:  # from Python 3.14 on without small whole numbers
            if type(one) is CodeType:
                codes.append(one)
            elif type(one) in (tuple, frozenset):  # such as that of `in {3, 5}`, or of milestones
                yield from one
            else:
                yield one


def _values(
    model: Any, loss_fn: Any, nodes: Sequence[Rows | Constant], known: set[Any] | None = None
) -> dict[_Key, Any]:  # fmt: skip
    known = set() if known is None else known  # so that nothing is looked at twice
    found = dict(_of(loss_fn, _DEPTH, known))
    for node in nodes:
        if type(node) is Constant and (value := _shown(node.value)) is not _NONE:
            found["batch", node.label] = value
    if not isinstance(model, torch.nn.Module):
        return found
    modules, hooks, kinds, forwards = modules_of(model), 0, dict[type, None](), list[Any]()
    for module in modules:
        own = vars(module)
        if "forward" in own:
            forwards.append(_known_by(own["forward"]))
        for name in _HOOKS:
            hooks += len(own.get(name, ()))
        for parameter in own.get("_parameters", {}).values():
            if parameter is not None and parameter._backward_hooks:
                hooks += len(parameter._backward_hooks)
        if not type(module).__module__.startswith("torch."):
            found.update(_attributes(module, id(module), known))
            kinds[type(module)] = None
    for kind in kinds:
        forwards.append(getattr(kind.forward, "__code__", None))  # type: ignore[attr-defined]
        found.update(_of(kind.forward, 1, known))  # type: ignore[attr-defined]
    found["model", "modules"], found["model", "hooks"] = [*map(type, modules)], hooks
    found["model", "forwards"] = forwards
    return found


def _known_by(forward: Any) -> Any:
    """What a ``forward`` is known by that is put on a model, and may hold it, so that nothing keeps the model."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return getattr(forward, "__code__", None) or (type(forward), id(forward))  # that of a method, too


def _shown(value: Any) -> Any:
    """What a setting is compared by; ``_NONE`` for what is no setting."""
    kind = type(value)
    if kind in _PLAIN:
        return value if value == value else "nan"  # which would be another one each time
    if kind is FunctionType:
        return value.__code__
    if kind is torch.Tensor:
        return _shown(value.item()) if value.dim() == 0 and value.device.type == "cpu" else _NONE
    if kind.__module__ == "numpy" and getattr(value, "shape", _NONE) == ():
        item = value.item()
        return _shown(item) if type(item) in _PLAIN else _NONE  # a longdouble gives itself
    if kind in (list, tuple) and 1 < len(value) <= _FEW and {*map(type, value)} <= {*_PLAIN}:
        return tuple(map(_shown, value))
    return _NONE


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    """Which tensor it is, and how often it was written to, as a training loop does with weights of samples."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _of(function: Any, depth: int, known: set[Any]) -> Iterator[tuple[_Key, Any]]:
    if isinstance(function, functools.partial):
        if depth <= 0:
            return
        yield from _of(function.func, depth, known)
        given = [*enumerate(function.args), *function.keywords.items()]
        yield from _inside(_numbered("partial", known), given, depth, known)
    elif inspect.ismethod(function):
        yield from _attributes(function.__self__, _numbered(type(function.__self__), known), known)
        yield from _of(function.__func__, depth, known)
    elif inspect.isfunction(function):
        if depth <= 0 or function in known or (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return
        known.add(function)
        yield from _inside(_numbered(function.__code__, known), [*variables_of(function).items()], depth, known)
    else:
        yield from _attributes(function, _numbered(type(function), known), known)
        if inspect.isfunction(call := vars(type(function)).get("__call__")):
            yield from _of(call, depth, known)
        for one in getattr(function, "user_functions", ()):
            yield from _of(one, depth, known)


def _numbered(kind: object, known: set[Any]) -> object:
    """The first, second … of a kind in one look, such as of the functions that one ``def`` has made."""
    number = 0
    while (kind, number) in known:
        number += 1
    known.add((kind, number))
    return kind, number


def _inside(home: object, reached: list[tuple[Any, Any]], depth: int, known: set[Any]) -> Iterator[tuple[_Key, Any]]:
    kinds = list[type]()
    for name, value in reached:
        shown = _shown(value)
        if shown is not _NONE:
            yield (home, name), shown
        elif type(value) not in _OPENED:
            kinds.append(type(value))
            if type(value) is torch.Tensor:
                yield (home, name), _written(value)
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            yield from _of(value, depth - 1, known)
        elif shown is _NONE and not isinstance(value, type):
            yield from _attributes(value, (home, name), known)
    if kinds:
        yield (home, _NONE), tuple(kinds)


def _attributes(value: Any, home: object, known: set[Any], depth: int = _INNER) -> Iterator[tuple[_Key, Any]]:
    try:
        marked = value if type(value) in (list, tuple, dict) else getattr(value, "__dict__", None)
        own = dict(enumerate(value[:_FEW])) if type(value) in (list, tuple) else marked
    except Exception:  # noqa: BLE001 - a proxy of nothing; the look at all other objects goes on
        return
    package = type(value).__module__.partition(".")[0]  # of anybatch, attributes change as it runs
    if type(own) is not dict or len(own) >= _MOST or package == "anybatch" or (package == "torch" and depth < _INNER):
        return
    if id(marked) in known:
        return
    known.add(id(marked))
    is_module = isinstance(value, torch.nn.Module)
    kinds = list[type]()
    for key, one in own.items():
        shown = _shown(one)
        if shown is not _NONE:
            yield (home, key), shown
        elif type(one) not in _OPENED:
            kinds.append(type(one))
            if type(one) is torch.Tensor:
                yield (home, key), _written(one)
        if shown is _NONE and depth > 1 and not (is_module and key[0] == "_"):
            yield from _attributes(one, (home, key), known, depth - 1)
    if type(value) is not ModuleType:  # a first call may make what is moved later, in one of many places
        plain = type(value) is list and {*map(type, own.values())} <= {*_PLAIN}  # a log of numbers
        yield (home, _NONE), plain or (len(own), *kinds)
    for key, one in own["_buffers"].items() if is_module and "_buffers" in own else ():
        if (shown := _shown(one)) is not _NONE:
            yield (home, key), shown
