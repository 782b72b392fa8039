"""Side effects of a run: changed attributes, closures, globals, containers, tensors and random generators.

The values of everything reachable from the model and the loss are saved, and compared afterwards. Of code only the
names of globals are read, so that rather too much is looked at than too little.
"""

import collections
import contextlib
import copy
import functools
import inspect
import itertools
import math
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anybatch.tensors.dispatch import unseen

LARGEST_COPY = 2**28  # bytes; a larger tensor, such as a whole data set, is not saved
_LARGEST_OF_DATA = 2**16  # bytes, the same for what a data set may be behind, which has many
_MOST_HOLDERS = 20_000
_MOST_ITEMS = 10_000  # a larger container is not looked into
INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"} | {"forward"}  # saved elsewhere
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (
    dict,
    list,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
_MISSING: Any = object()


@dataclass(frozen=True)
class Place:
    """Where a value is."""

    code: str  # the expression in the user's code, such as ``self.steps``
    owner: str  # a text that follows it, such as `` of Warmup``

    def at(self, suffix: str) -> "Place":
        """The place of a value within this one."""
        return Place(self.code + suffix, self.owner)


@dataclass(frozen=True, eq=False)
class Effect:
    """A value that was changed."""

    place: Place
    before: Any
    after: Any
    is_generator: bool  # the state of a random generator
    is_iterator: bool  # an iterator that advanced, which can't be undone
    _holder: "_Holder"
    _key: Any

    @property
    def is_number(self) -> bool:
        """Whether both values are numbers."""
        return all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in (self.before, self.after)
        )

    @property
    def is_growth(self) -> bool:
        """Whether a list has one more item."""
        return self.before is _MISSING and isinstance(self._key, int)

    def set(self, value: Any) -> None:
        """Sets another value."""
        self._holder.write({**self._holder.read(), self._key: value})

    def repeat(self, times: int) -> None:
        """Appends the item that a list has more once more, some times."""
        self._holder.write({**self._holder.read(), **dict.fromkeys(range(self._key, self._key + times), self.after)})

    def again(self) -> Any:
        """The value now."""
        return self._holder.read().get(self._key)


@dataclass(eq=False)
class _Holder:
    """A mutable object: its saved values, and how to read and to write them."""

    read: Callable[[], dict[Any, Any]]
    write: Callable[[Mapping[Any, Any]], None]
    place: Callable[[Any], Place]
    is_generator: bool = False
    is_iterator: bool = False
    kind: type | None = None  # whose attributes an object has until it gets its own

    def __post_init__(self) -> None:
        self.saved = self.read()

    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        now = self.read()
        for key in dict.fromkeys([*self.saved, *now]):
            before, after = self.saved.get(key, _MISSING), now.get(key, _MISSING)
            if before is _MISSING and type(of_class := getattr(self.kind, str(key), None)) in (int, float):
                before = of_class
            if before is not after and not same(before, after):
                yield key, before, after


def _accessors(holder: _Holder) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: holder.read()[""], lambda state: holder.write({"": state})


class SideEffects:
    """Saves everything that a model and a loss function can reach.

    Args:
        tensors: whether to save the values of tensors; else only which storage each has, parameters included.
        of_data: further ones, which may reach a data set: of their own tensors and arrays only small ones are saved.

    Example:
        >>> __name__, calls = "__main__", [0]  # as in a script
        >>> def loss_fn(model, batch):
        ...     calls[0] += 1
        ...     return model(batch).mean()
        >>> model = torch.nn.Linear(3, 1)
        >>> effects = SideEffects([model, loss_fn])
        >>> _ = loss_fn(model, torch.zeros(2, 3))
        >>> [(effect.place.code, effect.before, effect.after) for effect in effects.found()]
        [('calls[0]', 0, 1)]
        >>> effects.restore()
        True
        >>> calls
        [0]
    """

    @unseen
    def __init__(self, roots: Iterable[Any], *, tensors: bool = True, of_data: Iterable[Any] = ()) -> None:
        self._tensors, self._largest = tensors, LARGEST_COPY
        self._holders: list[_Holder] = []
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no other one gets the same id
        self._classes: set[type] = set()
        self._globals: set[tuple[int, str]] = set()
        with contextlib.suppress(RecursionError):
            for root in roots:
                self._visit(root, Place("loss_fn", ""))
            self._largest = _LARGEST_OF_DATA
            for root in of_data:
                self._visit(root, Place("loss_fn", ""))

    @unseen
    def found(self) -> list[Effect]:
        """The changes since this was made, in the order in which they are reached."""
        return [
            Effect(holder.place(key), before, after, holder.is_generator, holder.is_iterator, holder, key)
            for holder in self._holders
            for key, before, after in holder.changed()
        ]

    @unseen
    def restore(self, keep: Collection[Effect] = (), *, generators: bool = True) -> bool:
        """Restores saved values, but for changes to keep; returns whether anything but generators was changed."""
        is_changed = False
        kept = {(id(effect._holder), effect._key) for effect in keep}
        for holder in self._holders:
            if holder.is_generator and not generators:
                continue
            now, wanted = holder.read(), holder.saved
            if kept:
                wanted = {key: value for key, value in wanted.items() if (id(holder), key) not in kept}
                wanted |= {key: value for key, value in now.items() if (id(holder), key) in kept}
            if now.keys() != wanted.keys() or any(now[key] is not value for key, value in wanted.items()):
                holder.write(wanted)
                is_changed = is_changed or not holder.is_generator
        return is_changed

    def generators(self) -> list[Any]:
        """The states now of the random generators that were reached."""
        return [holder.read()[""] for holder in self._holders if holder.is_generator]

    def accessors(self) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
        """Pairs of functions that get and set the state of each generator that was reached."""
        return [_accessors(holder) for holder in self._holders if holder.is_generator]

    def drew(self) -> tuple[bool, bool]:
        """Whether a reached ``torch.Generator``, and whether one of Python or NumPy, was drawn from."""
        held = [holder for holder in self._holders if holder.is_generator]
        moved = [isinstance(before, torch.Tensor) for holder in held for _, before, _ in holder.changed()]
        return any(moved), not all(moved)

    def _hold(self, read: Any, write: Any, place: Callable[[Any], Place], **options: Any) -> dict[Any, Any]:
        holder = _Holder(read, write, place, **options)
        self._holders.append(holder)
        return holder.saved

    def _hold_value(self, get: Callable[[], Any], put: Callable[[Any], Any], place: Place, **options: Any) -> Any:
        return self._hold(lambda: {"": get()}, lambda saved: put(saved[""]), lambda _: place, **options)[""]

    def _hold_each(self, read: Any, write: Any, place: Callable[[Any], Place]) -> None:
        for key, value in self._hold(read, write, place).items():
            self._visit(value, place(key))

    def _visit(self, value: Any, place: Place) -> None:
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen or len(self._holders) > _MOST_HOLDERS:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, place)
        elif isinstance(value, (dict, list, set, collections.deque, tuple)):
            self._visit_container(value, place)
        elif (state := _state_of_generator(value)) is not None:
            self._hold_value(*state, place, is_generator=True)
        elif isinstance(value, itertools.count):
            self._hold_value(lambda: repr(value), lambda _: None, place, is_iterator=True)
        elif isinstance(value, functools.partial):
            for inner in (value.func, value.args, value.keywords):
                self._visit(inner, place)
        elif inspect.ismethod(value) or inspect.isbuiltin(value) or isinstance(value, types.MethodWrapperType):
            self._visit(value.__self__, place)
            self._visit(getattr(value, "__func__", None), place)
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            self._visit_array(value, place)
        elif inspect.isfunction(value):
            self._visit_function(value)
        elif isinstance(value, types.ModuleType):
            pass  # its names are visited with the function that reads them
        elif isinstance(value, type):
            self._visit_class(value)
        elif not inspect.isroutine(value) and not isinstance(value, torch.jit.ScriptModule):
            self._visit_object(value)

    def _visit_tensor(self, value: torch.Tensor, place: Place) -> None:
        if not self._tensors and type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            data = value.data
            self._hold_value(
                lambda: data if value.data_ptr() == data.data_ptr() else value.data,
                functools.partial(setattr, value, "data"),
                place,
            )
            return
        if value.requires_grad or value.is_meta or value.is_inference() or value.layout is not torch.strided:
            return
        if value.numel() * value.element_size() <= self._largest:
            known = value.detach().to("cpu", copy=True)  # on the CPU: the device's memory is budgeted
            version = value._version

            def get() -> torch.Tensor:
                nonlocal known, version
                if value._version != version:
                    now, version = value.detach().to("cpu", copy=True), value._version
                    known = known if same(known, now) else now
                return known

            self._hold_value(get, torch.no_grad()(value.copy_), place)

    def _visit_array(self, value: Any, place: Place) -> None:
        if value.nbytes <= self._largest and value.flags.writeable:
            saved = self._hold_value(value.copy, functools.partial(value.__setitem__, ...), place)
            for item in saved.flat if value.dtype.hasobject and value.size <= _MOST_ITEMS else ():
                self._visit(item, place)

    def _visit_container(self, value: Any, place: Place) -> None:
        def write(saved: Mapping[Any, Any]) -> None:
            value.clear()
            if isinstance(value, dict):
                value.update(saved)
            elif isinstance(value, set):
                value.update(saved[""])
            else:
                value.extend(saved[position] for position in sorted(saved))

        def read() -> dict[Any, Any]:
            if isinstance(value, dict):
                return dict(value)
            return {"": frozenset(value)} if isinstance(value, set) else dict(enumerate(value))

        if len(value) > _MOST_ITEMS:
            return
        if type(value) in _CONTAINERS:
            self._hold(read, write, lambda key: place if isinstance(value, set) else place.at(f"[{key!r}]"))
        for key, item in () if isinstance(value, set) else read().items():
            self._visit(item, place.at(f"[{key!r}]"))

    def _visit_function(self, function: Any) -> None:
        if not is_users(function.__module__):
            for inner in getattr(function, "user_functions", ()):
                self._visit(inner, Place("loss_fn", ""))
            return
        name = "the loss function" if function.__name__ == "<lambda>" else f"`{function.__name__}`"
        for inner, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._visit_cell(cell, Place(inner, f", a variable outside of {name},"))
        names = [inner for inner in dict.fromkeys(names_in(function.__code__)) if not inner.startswith("__")]
        self._visit_names(function.__globals__, names, "")
        for module in [function.__globals__.get(inner) for inner in names]:
            if isinstance(module, types.ModuleType) and is_users(module.__name__):
                self._visit_names(vars(module), names, f"{module.__name__}.")
        for inner, value in defaults_of(function):
            self._visit(value, Place(inner, f", a default of {name},"))
        self._attributes(vars(function), function.__name__, "")

    def _visit_cell(self, cell: types.CellType, place: Place) -> None:
        def read() -> dict[str, Any]:
            try:
                return {"": cell.cell_contents}
            except ValueError:  # empty
                return {}

        def write(saved: Mapping[str, Any]) -> None:
            if saved:
                cell.cell_contents = saved[""]
            elif read():
                del cell.cell_contents

        self._hold_each(read, write, lambda _: place)

    def _visit_names(self, home: dict[str, Any], names: list[str], prefix: str) -> None:
        """Saves the globals of some names, also of those that do not exist yet."""

        names = [name for name in names if (id(home), name) not in self._globals]
        self._globals.update((id(home), name) for name in names)
        self._hold_items(home, lambda: names, lambda name: Place(f"{prefix}{name}", ", a global,"))

    def _visit_class(self, kind: type) -> None:
        """Saves the class attributes of a class of the user, and what its methods read."""
        for base in kind.__mro__:
            if not is_users(base.__module__) or base in self._classes:
                continue
            self._classes.add(base)
            held = {name: value for name, value in vars(base).items() if not name.startswith("__")}
            for value in vars(base).values():
                for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
                    if inspect.isfunction(function):
                        self._visit(function, Place("", ""))
            kinds = (*_PLAIN, dict, list, set, torch.Tensor)
            names = [name for name, value in held.items() if isinstance(value, kinds)]
            self._hold_named(base, names, Place(base.__name__, ""))

    def _visit_object(self, value: Any) -> None:
        kind, attributes = type(value), getattr(value, "__dict__", None)
        if kind.__module__.partition(".")[0] == "anybatch":  # its own state is saved elsewhere
            for inner in getattr(value, "user_functions", ()):
                self._visit(inner, Place("loss_fn", ""))
            return
        is_open = isinstance(value, torch.nn.Module) or is_users(kind.__module__)
        if is_open:
            self._visit_class(kind)
        if isinstance(attributes, dict):
            skipped = INTERNALS if isinstance(value, torch.nn.Module) else frozenset()
            self._attributes(attributes, "self", f" of {kind.__name__}", skipped, is_open=is_open, kind=kind)
        if isinstance(value, torch.nn.Module):
            parameters = [parameter for parameter in value._parameters.values() if parameter is not None]
            for parameter in parameters if not self._tensors else ():
                self._visit(parameter, Place("", ""))
            tables = [getattr(one, "_backward_hooks", None) or {} for one in parameters]
            tables += [held for name, held in vars(value).items() if name.endswith("_hooks") and isinstance(held, dict)]
            for inner in (*(hook for table in tables for hook in table.values()), *value._modules.values()):
                self._visit(inner, Place("", ""))
        if is_open:
            self._hold_named(value, _slots(kind), Place("self", f" of {kind.__name__}"))

    def _attributes(
        self, home: dict[str, Any], code: str, owner: str, skipped: frozenset[str] = frozenset(), *,
        is_open: bool = True, kind: type | None = None,
    ) -> None:  # fmt: skip
        def names() -> list[str]:
            return [
                name for name, one in home.items() if (name not in skipped if is_open else type(one) in (int, float))
            ]

        self._hold_items(home, names, lambda name: Place(f"{code}.{name}", owner), kind=kind, visits=is_open)

    def _hold_items(
        self, home: dict[str, Any], names: Callable[[], list[str]], place: Callable[[str], Place], *,
        kind: type | None = None, visits: bool = True,
    ) -> None:  # fmt: skip
        """Saves the items of a dictionary at some names, also at those that do not exist yet."""

        def read() -> dict[str, Any]:
            return {name: home[name] for name in names() if name in home}

        def write(saved: Mapping[str, Any]) -> None:
            for name in read():
                if name not in saved:
                    del home[name]
            home.update(saved)

        for name, value in self._hold(read, write, place, kind=kind).items():
            if visits:
                self._visit(value, place(name))

    def _hold_named(self, owner: Any, names: list[str], place: Place) -> None:
        """Saves attributes that are not written through a ``__dict__``: of a class, or in slots."""

        def read() -> dict[str, Any]:
            return {name: getattr(owner, name) for name in names if hasattr(owner, name)}

        def write(saved: Mapping[str, Any]) -> None:
            for name, value in saved.items():
                setattr(owner, name, value)

        if names:
            self._hold_each(read, write, lambda name: place.at(f".{name}"))


def _slots(kind: type) -> list[str]:
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__ if is_users(base.__module__)]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    return [name for name in names if not name.startswith("__")]


def names_in(code: types.CodeType) -> list[str]:
    """The names of globals and attributes in a code object and its inner functions."""
    found = [*code.co_names]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += names_in(constant)
    return found


def defaults_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The arguments of a function that have a default, with the default."""
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _state_of_generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Functions that get and set the state of a random generator; ``None`` for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, torch.quasirandom.SobolEngine):
        names = ("num_generated", "quasi")  # the second is written to in place
        return lambda: copy.deepcopy([getattr(value, one) for one in names]), lambda state: vars(value).update(
            zip(names, copy.deepcopy(state), strict=True)
        )
    drawing = sys.modules.get("numpy.random")  # loaded on first use
    if drawing is not None and isinstance(value, drawing.Generator):
        return lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state)
    if drawing is not None and isinstance(value, drawing.RandomState):
        return value.get_state, value.set_state
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same type and are equal; NaN equals NaN.

    Example:
        >>> same([1, torch.ones(2)], [1, torch.ones(2)]), same(1, True)
        (True, False)
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))
    try:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one.detach(), other.detach())
        if isinstance(one, (tuple, list, collections.deque)):
            return len(one) == len(other) and all(map(same, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
        if isinstance(one, (set, frozenset)):
            return bool(one == other)
        return type(one).__module__ == "numpy" and one.dtype == other.dtype and bool((one == other).all())
    except (RuntimeError, RecursionError, TypeError, ValueError, AttributeError):
        return False


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether a module, by name, is the user's own code and not a library."""
    name = module or ""
    if name == "__main__":
        return True
    if name.partition(".")[0] in {"anybatch", *sys.stdlib_module_names}:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"} & set(Path(file).parts)
