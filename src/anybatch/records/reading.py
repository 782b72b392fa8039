"""Reads values by type annotations and refuses others with the path to them; and records as plain values for JSON."""

import dataclasses
import functools
import inspect
import itertools
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast

Reader = Callable[[Any], Any]
_NUMBERS = 2**63  # what a count stays below
_NOT_FINITE = ("nan", "inf", "-inf")  # as records write them, since JSON has no such numbers


class Malformed(ValueError):
    """A value does not have the type of its annotation.

    Attributes:
        path: the path to it, such as ``['chosen']['micro_batches']``; empty for the value as a whole.
        expected: what was expected, in words.
    """

    def __init__(self, problem: str, expected: str = "") -> None:
        super().__init__()
        self.path, self.expected = "", expected
        self._problem = problem

    def __str__(self) -> str:
        return f"{self.path} {self._problem}{self.expected and f', expected {self.expected}'}".lstrip()

    def within(self, key: Any) -> "Malformed":
        """The same error, with the key of the surrounding container in front of its path."""
        self.path = f"[{key!r:.80}]{self.path}"
        return self


def _wrong(got: Any, expected: str) -> Malformed:
    return Malformed(f"is {reprlib.repr(got)}", expected)


class Least(typing.NamedTuple):
    """The lower bound of a finite number, as in ``Annotated[int, Least(0)]``."""

    value: float


def read(kind: Any, value: Any) -> Any:
    """Reads a value as an annotation demands; lists become tuples where the annotation has a tuple.

    Args:
        kind: the annotation: plain types, ``Literal``, unions, tuples, lists, mappings, dataclasses, ``TypedDict`` s.
        value: as JSON gives it.

    Example:
        >>> read(tuple[int, ...], [1, 2])
        (1, 2)
        >>> try:
        ...     read(Mapping[str, typing.Annotated[int, Least(0)]], {"updates": "5"})
        ... except Malformed as error:
        ...     print(error)
        ['updates'] is '5', expected an integer of at least 0
    """
    return reader(kind)(value)


@functools.cache
def reader(kind: Any) -> Reader:
    """The function that reads values of one annotation; see ``read``."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        return _union([reader(one) for one in inner], has_none=type(None) in inner)
    if origin in (typing.Required, typing.NotRequired):
        return reader(inner[0])
    if origin is typing.Literal:
        return _checked(lambda value: type(value) in map(type, inner) and value in inner, f"one of {inner}")
    if origin is typing.Annotated:
        return _at_least(inner[0], inner[1].value)
    if origin is tuple and inner[-1] is not Ellipsis:
        return _sequence(tuple, [reader(one) for one in inner], is_fixed=True)
    if origin in (tuple, list):
        return _sequence(origin, [reader(inner[0])], is_fixed=False)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*map(reader, inner))
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return kind.from_dict if "from_dict" in vars(kind) else fields_of(kind)
    if kind in (int, float):
        return _number(kind)
    words = {type(None): "None", bool: "true or false", str: "a text"}
    return _checked(lambda value: isinstance(value, kind), words.get(kind, f"a {kind.__name__}"))


def _checked(accepts: Callable[[Any], bool], expected: str) -> Reader:
    def check(value: Any) -> Any:
        if not accepts(value):
            raise _wrong(value, expected)
        return value

    return check


def _number(kind: type) -> Reader:
    kinds, expected = ((int,), "an integer") if kind is int else ((int, float), "a number")

    def check(value: Any) -> Any:
        if type(value) in kinds and (type(value) is float or abs(value) < _NUMBERS):
            return value
        if kind is float and isinstance(value, str) and value in _NOT_FINITE:
            return float(value)
        raise _wrong(value, expected)

    return check


def _at_least(kind: Any, least: float) -> Reader:
    expected = f"{'an integer' if kind is int else 'a finite number'} of at least {least:g}"
    most = {int: _NUMBERS, float: math.inf}  # and no integer that is beyond a float
    return _checked(lambda value: type(value) in (int, kind) and least <= value < most[type(value)], expected)


def _union(readers: list[Reader], *, has_none: bool) -> Reader:
    def check(value: Any) -> Any:
        if value is None and has_none:
            return None
        found: list[Malformed] = []
        for one in readers:
            try:
                return one(value)
            except Malformed as error:
                found.append(error)
        deepest = max(found, key=lambda error: len(error.path))
        if not deepest.path:
            raise _wrong(value, " or ".join(error.expected for error in found))
        raise deepest

    return check


def _inside(one: Reader, key: Any, value: Any) -> Any:
    try:
        return one(value)
    except Malformed as error:
        raise error.within(key) from None


def _sequence(kind: Any, readers: list[Reader], *, is_fixed: bool) -> Reader:
    """Of as many values as there are readers, or of any number that one reader reads."""

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple) or (is_fixed and len(value) != len(readers)):
            raise _wrong(value, f"{len(readers)} values" if is_fixed else "a list")
        pairs = zip(readers if is_fixed else itertools.repeat(readers[0]), value, strict=False)
        return kind([_inside(one, at, item) for at, (one, item) in enumerate(pairs)])

    return check


def _mapping(key_of: Reader, one: Reader) -> Reader:
    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(value, "a mapping")
        return {_inside(key_of, key, key): _inside(one, key, item) for key, item in value.items()}

    return check


@functools.cache
def fields_of(kind: Any) -> Reader:
    """The function that reads a dataclass or a typed dictionary from a mapping; unknown names are ignored."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        needed = [name for name in hints if name in kind.__required_keys__]
    else:
        taken = inspect.signature(kind).parameters.values()
        hints = {one.name: hints[one.name] for one in taken}
        needed = [one.name for one in taken if one.default is one.empty]

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(value, f"a mapping with {', '.join(hints)}")
        found = {}
        for name, hint in hints.items():
            if name in value:
                found[name] = _inside(reader(hint), name, value[name])
            elif name in needed:
                raise Malformed("is missing").within(name)
        return kind(**found)

    return check


class Plain:
    """Base of dataclasses that are written to, and read from, mappings of plain values."""

    __slots__ = ()
    _not_finite: ClassVar[Callable[[float], Any]] = float  # gives what stands for a float that is not finite

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        itself, instead = cast(Any, self), type(self)._not_finite
        return {one.name: plain(getattr(self, one.name), instead) for one in dataclasses.fields(itself)}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Reads what ``to_dict`` gave; unknown fields are ignored.

        Raises:
            ValueError: a field without a default is missing, or a value does not have the type of its field.
        """
        kind: Any = cls
        found: Self = fields_of(kind)(values)
        return found


def plain(value: Any, not_finite: Callable[[float], Any] = float) -> Any:
    """Converts a value to the types of JSON.

    Args:
        value: mappings, sequences, sets, dataclasses and named tuples are converted with all that they contain; any
            other object becomes its ``str``.
        not_finite: gives what stands for a float that is not finite; such floats stay as they are by default.

    Example:
        >>> plain({"sizes": (1, 2), "error": math.inf}, str)
        {'sizes': [1, 2], 'error': 'inf'}
    """
    if isinstance(value, Plain):
        value = value.to_dict()
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(entry, not_finite) for name, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry, not_finite) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return not_finite(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def nothing(_: float) -> None:
    """Gives ``None`` for a number that is not finite; for ``plain``."""
