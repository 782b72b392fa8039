"""Facts that are like an earlier one: all but the few entries that differ from step to step are read from that one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anybatch.records.events import Backward, Cleared, Forward, Stepped
from anybatch.records.lines import Fact, fact, to_line
from anybatch.records.lossfacts import LossCall

DIFFERING: Mapping[type[Fact], tuple[str, ...]] = {
    Forward: ("seconds",),
    LossCall: ("value",),
    Backward: ("value", "loss_calls"),
    Cleared: (),
    Stepped: ("number", "lrs"),
}
"""For each kind that may be repeated, the entries that a repetition has of its own."""
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)
_LEFT_OUT: Mapping[type[Fact], Mapping[str, Any]] = {
    Backward: {"touched": None, "kept": None},
    Stepped: {"without": None},
}
"""Entries that are recorded where they differ from the fact before."""


@fact("repeats")
@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats(Fact):
    """Facts that are like earlier ones.

    Args:
        rows: of each: the number of the one that it is like, its own number, its step, and the entries that
            ``DIFFERING`` names.
    """

    rows: tuple[tuple[Any, ...], ...] = ()


def repeated(like: Fact, at: int, step: int, values: Iterable[Any]) -> Fact:
    """A fact that is like another one.

    Args:
        like: the other one.
        at: its own number.
        step: its own step.
        values: of the entries that differ.

    Example:
        >>> repeated(Stepped(optimizer=0, with_grad=2, at=3), 8, 1, (1, [0.1]))
        Stepped(at=8, step=1, optimizer=0, number=1, lrs=(0.1,), with_grad=2, without=None, without_count=0, \
zero=None, closure=False, by='step', file='', line=0, edited=0)
    """
    kind = type(like)
    own = {
        name: tuple([float(one) if isinstance(one, str) else one for one in value])
        if isinstance(value, list)
        else value
        for name, value in zip(DIFFERING[kind], values, strict=True)
    }
    return replace(like, at=at, step=step, **_LEFT_OUT.get(kind, {}), **own)


def line_of(rows: Sequence[Sequence[Any]]) -> str:
    """A line of JSON with repetitions, as ``to_line`` has it and a good deal faster.

    Args:
        rows: as in ``Repeats``, at least one.
    """
    try:
        values = _ENCODER.encode(rows)
    except ValueError:  # a number that is not finite
        return to_line(Repeats(rows=tuple([tuple(row) for row in rows]), at=rows[-1][1], step=rows[-1][2]))
    return f'{{"kind":"repeats","at":{rows[-1][1]},"step":{rows[-1][2]},"rows":{values}}}'


def with_repeats(facts: Iterable[Fact]) -> list[Fact]:
    """All facts of a record in order, those among them that are only said to be like others.

    Args:
        facts: as they were written.

    Returns:
        The facts; what is like one that is missing is left out.
    """
    found, rows = list[Fact](), list[tuple[Any, ...]]()
    for one in facts:
        if isinstance(one, Repeats):
            rows += one.rows
        else:
            found.append(one)
    if not rows:
        return found
    by_number = {one.at: one for one in found if type(one) in DIFFERING}
    found += [repeated(by_number[of], at, step, values) for of, at, step, *values in rows if of in by_number]
    return sorted(found, key=lambda one: one.at)
