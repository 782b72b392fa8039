"""Facts as lines of JSON. Each line names its kind; kinds and fields of a later version are ignored."""

import dataclasses
import functools
import json
import reprlib
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from anybatch.records.reading import Malformed, read


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One observation of a run."""

    at: int = 0  # the number of the event, counted over the whole run; facts are in this order
    step: int = 0  # the number of optimizer steps before it; of several optimizers, that of the one that stepped most


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Fact):
    """A fact that one of the user's lines caused."""

    file: str = ""  # of that line; empty if there is none
    line: int = 0


F = TypeVar("F", bound=Fact)
KINDS: dict[str, type[Fact]] = {}
_NAMES: dict[type[Fact], str] = {}


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def fact(kind: str) -> Callable[[type[F]], type[F]]:
    """A decorator that makes a class one of facts, under the name that its lines carry."""

    def named(cls: type[F]) -> type[F]:
        made = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
        KINDS[kind] = made
        _NAMES[made] = kind
        return made

    return named


def to_line(one: Fact) -> str:
    """A fact as a line of JSON; entries equal to their default are left out."""
    values = {"kind": _NAMES[type(one)]} | _own(one)
    try:
        return _ENCODER.encode(values)
    except ValueError:  # a number that is not finite becomes a text
        texts = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
        return _ENCODER.encode(json.loads(json.dumps(values, default=_own), parse_constant=texts.__getitem__))


def from_line(line: str) -> Fact | None:
    """Reads what ``to_line`` gave.

    Returns:
        The fact, or ``None`` for a kind that this version does not know.

    Raises:
        ValueError: the line is damaged; the text says how.
    """
    try:
        values = json.loads(line)
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    kind = values.pop("kind", "") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise Malformed(f"is {reprlib.repr(values)}", "a mapping with its kind")
    return read(KINDS[kind], values) if kind in KINDS else None


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


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_own)


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    missing = dataclasses.MISSING
    return {
        field.name: field.default_factory() if field.default_factory is not missing else field.default
        for field in dataclasses.fields(cls)
    }
