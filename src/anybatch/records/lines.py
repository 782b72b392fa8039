"""Facts as lines of JSON: each names its kind, and unknown kinds and fields of a later version are passed over."""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

FORM = 1
"""The version of the form of a record."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that was seen in a run.

    Args:
        at: the number of the event, counted over the whole run; facts are in this order.
        step: how many optimizer steps were done before it: the most that any optimizer of the run has done.
    """

    at: int = 0
    step: int = 0


F = TypeVar("F", bound=type[Fact])
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)
KINDS: dict[str, type[Fact]] = {}
_NAMES: dict[type[Fact], str] = {}


def fact(kind: str) -> Callable[[F], F]:
    """Gives a kind of fact the name that its lines bear.

    Args:
        kind: the name.

    Returns:
        A decorator for the dataclass.
    """

    def named(cls: F) -> F:
        KINDS[kind] = cls
        _NAMES[cls] = kind
        return cls

    return named


def to_line(one: Fact) -> str:
    """A fact as a line of JSON; entries that have their default are left out.

    Args:
        one: the fact.

    Returns:
        The line, without its end. Numbers that are not finite are written as texts (``"nan"``, ``"inf"``, ``"-inf"``).
    """
    kind = {"kind": _NAMES[type(one)]}
    try:
        return _AS_IT_IS.encode(kind | _own(one))
    except ValueError:  # a number that is not finite
        return _ENCODER.encode(kind | _values(one))


def from_line(line: str) -> Fact | None:
    """Reads what ``to_line`` gave.

    Args:
        line: of JSON.

    Returns:
        The fact, or ``None`` for a kind that this version does not know.
    """
    values = json.loads(line)
    cls = KINDS.get(values.pop("kind", ""))
    return None if cls is None else typing.cast(Fact, _read(cls, values))


def _own(one: Any) -> dict[str, Any]:
    """The entries of a fact that are not their defaults."""
    if not dataclasses.is_dataclass(one):
        raise TypeError(f"got a {type(one).__name__} in a fact; expected what JSON has, and dataclasses of it")
    found = {}
    for name, default in _defaults(typing.cast(Any, type(one))).items():
        value = getattr(one, name)
        if value is not default and (value != default or type(value) is not type(default)):
            found[name] = value
    return found


_AS_IT_IS = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_own)


def _values(one: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in _own(one).items()}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return _values(value) if dataclasses.is_dataclass(value) else value


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    missing = dataclasses.MISSING
    return {
        field.name: field.default_factory() if field.default_factory is not missing else field.default
        for field in dataclasses.fields(cls)
    }


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read(hint: Any, value: Any) -> Any:
    """A value of JSON as what the annotation of its field asks for."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return None if value is None else _read(kinds[0], value)
    if dataclasses.is_dataclass(hint):
        hints = _hints(typing.cast(Any, hint))
        read = {name: _read(hints[name], entry) for name, entry in value.items() if name in hints}
        return typing.cast(Any, hint)(**read)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_read(inner[0], entry) for entry in value)
        return tuple(_read(kind, entry) for kind, entry in zip(inner, value, strict=True))
    if typing.get_origin(hint) is not None and issubclass(typing.get_origin(hint), Mapping):
        kind = typing.get_args(hint)[1]
        return {name: _read(kind, entry) for name, entry in value.items()}
    return float(value) if hint is float else value
