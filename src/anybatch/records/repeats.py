"""Compression of a record: a fact like an earlier one is written as a reference to it and the entries that differ."""

import functools
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

from anybatch.records.events import Backward, Cleared, Clipped, Forward, Scaler, Scheduled, Stepped
from anybatch.records.lines import Fact, fact, to_line
from anybatch.records.lossfacts import LossCall
from anybatch.records.reading import Reader, read, reader

DIFFERING: Mapping[type[Fact], tuple[str, ...]] = {
    Forward: ("seconds",),
    LossCall: ("value",),
    Backward: ("value", "loss_calls"),
    Cleared: (),
    Clipped: ("norm",),
    Stepped: ("number", "lrs"),
    Scheduled: ("number", "before", "after"),
    Scaler: ("scale", "after", "skipped"),
}
"""For each kind that may be repeated, the entries that a repetition does not take from the earlier fact."""
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)
_LEFT_OUT: Mapping[type[Fact], Mapping[str, Any]] = {
    Backward: {"touched": None, "kept": None},
}
"""Entries that a repetition leaves out, because they equal those of the fact before."""


@fact("repeats")
class Repeats(Fact):
    """Facts that repeat earlier ones."""

    # A row is one fact: the number of the earlier fact, its own number, its step, and the entries that ``DIFFERING``
    # names. Or it is all facts of a step: the numbers of the earlier facts, the number of the first fact, the step, and
    # a list of the entries that differ, in order, without the seconds of forwards and the loss calls of backwards.
    rows: tuple[tuple[Any, ...], ...] = ()


def repeated(like: Fact, at: int, step: int, values: Iterable[Any]) -> Fact:
    """A fact that repeats another one.

    Args:
        values: the entries that ``DIFFERING`` names, in its order.

    Example:
        >>> repeated(Stepped(optimizer=0, with_grad=2, at=3), 8, 1, (1, [0.1]))
        Stepped(at=8, step=1, file='', line=0, optimizer=0, number=1, lrs=(0.1,), with_grad=2, zero=None, \
closure=False, by='step', edited=0)
    """
    kind: Any = type(like)
    readers = _readers(kind)
    own = {name: as_read(value) for (name, as_read), value in zip(readers, values, strict=True)}
    return replace(like, at=at, step=step, **_LEFT_OUT.get(kind, {}), **own)


@functools.cache
def _readers(kind: Any) -> list[tuple[str, Reader]]:
    """The name and the reader of each entry that differs."""
    hints = get_type_hints(kind)
    return [(name, reader(hints[name])) for name in DIFFERING[kind]]


def step_repeated(likes: Sequence[Fact], at: int, step: int, values: Iterable[Any]) -> Iterator[Fact]:
    """The facts of a step that repeats another one.

    Args:
        values: the entries that differ, without the seconds of forwards and the loss calls of backwards.

    Example:
        >>> [one.at for one in step_repeated([Forward(root=0, at=3), Stepped(optimizer=0, at=4)], 8, 1, [1, [0.1]])]
        [8, 9]
    """
    given, calls = iter(values), list[int]()
    for number, like in enumerate(likes, start=at):
        if isinstance(like, Forward):
            own: list[Any] = [like.seconds]
        elif isinstance(like, Backward):
            own, calls = [next(given), tuple(calls)], []
        else:
            own = [next(given) for _ in DIFFERING[type(like)]]
            calls += [number] if isinstance(like, LossCall) else []
        yield repeated(like, number, step, own)


def by_steps(rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Rows as they are written: a step with the same facts as an earlier step of the list becomes one row.

    Example:
        >>> forward, stepped = Forward(root=0, at=3), Stepped(optimizer=0, at=4)
        >>> rows = [[forward, 8, 1, 0.5], [stepped, 9, 1, 1, (0.1,)]]
        >>> by_steps(rows + [[forward, 10, 2, 0.5], [stepped, 11, 2, 2, (0.1,)]])
        [[3, 8, 1, 0.5], [4, 9, 1, 1, (0.1,)], [[3, 4], 10, 2, [2, (0.1,)]]]
    """
    found, known, step = list[Sequence[Any]](), set[tuple[int, ...]](), list[Sequence[Any]]()
    for row in rows:
        step.append(row)
        if type(row[0]) is not Stepped:
            continue
        likes, first = tuple([one[0].at for one in step]), step[0]
        if likes in known and row[1] - first[1] == len(step) - 1 and row[2] == first[2] and _in_order(step):
            values = [value for one in step for value in one[3 : 4 if type(one[0]) is Backward else None]
                      if type(one[0]) is not Forward]  # fmt: skip
            found.append([list(likes), first[1], first[2], values])
        else:
            known.add(likes)
            found += [[one[0].at, *one[1:]] for one in step]
        step = []
    return found + [[one[0].at, *one[1:]] for one in step]


def _in_order(rows: Sequence[Sequence[Any]]) -> bool:
    """Whether the loss calls of each backward of a step are those recorded since the backward before it."""
    calls = list[int]()
    for row in rows:
        if type(row[0]) is LossCall:
            calls.append(row[1])
        elif type(row[0]) is Backward:
            if list(row[4]) != calls:
                return False
            calls = []
    return True


def line_of(rows: Sequence[Sequence[Any]]) -> str:
    """The line of a ``Repeats``, as ``to_line`` gives it, but faster."""
    try:
        values = _ENCODER.encode(rows)
    except ValueError:  # a number that is not finite
        return to_line(Repeats(rows=tuple([tuple(row) for row in rows]), at=rows[-1][1], step=rows[-1][2]))
    return f'{{"kind":"repeats","at":{rows[-1][1]},"step":{rows[-1][2]},"rows":{values}}}'


def with_repeats(facts: Iterable[Fact], damaged: list[str]) -> list[Fact]:
    """All facts of a record in order, with repetitions expanded; errors in repetitions are added to ``damaged``."""
    found, rows = list[Fact](), list[tuple[Any, ...]]()
    for one in facts:
        if isinstance(one, Repeats):
            rows += one.rows
        else:
            found.append(one)
    by_number = {one.at: one for one in found if type(one) in DIFFERING}
    for row in rows:
        try:
            of, at, step, *values = row
            place = read(int, at), read(int, step)
            numbers = of if isinstance(of, (list, tuple)) else [of]
            likes = [by_number[one] for one in numbers if one in by_number]
            if len(likes) == len(numbers):
                if numbers is of:
                    found += step_repeated(likes, *place, values[0])
                else:
                    found.append(repeated(likes[0], *place, values))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:  # RuntimeError: too few values
            damaged.append(f"the repetition {reprlib.repr(row)}: {error}")
    return sorted(found, key=lambda one: one.at)
