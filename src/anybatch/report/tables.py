"""Texts and tables of text, for the terminal and for a page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SHORTEST_RUN = 3


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()


def number_text(value: float | None) -> str:
    """A number with three significant digits.

    Example:
        >>> [number_text(value) for value in (0.0, 0.5, 12345.6, 3.2e-9, float("nan"), None)]
        ['0', '0.5', '12346', '3.2e-09', 'nan', '-']
    """
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def clean(text: str) -> str:
    """A text with control characters and lone surrogates escaped, so that it is safe for terminals and pages.

    Example:
        >>> clean("a\\x1b[31mb\\ud800")
        'a\\\\x1b[31mb\\\\ud800'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character.isspace():
        return " "
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def in_runs(names: Sequence[str]) -> Iterator[str]:
    """The names; three or more that differ in one number, which counts up, become ``first to last``.

    Example:
        >>> list(in_runs(["h.0.mlp", "h.1.mlp", "h.2.mlp", "head"]))
        ['h.0.mlp to h.2.mlp', 'head']
    """
    start = 0
    while start < len(names):
        end, place = start + 1, -1
        while end < len(names) and (next_place := _counted(names[end - 1], names[end])) >= 0:
            if place not in (-1, next_place):
                break
            end, place = end + 1, next_place
        if end - start < _SHORTEST_RUN:
            yield names[start]
            start += 1
        else:
            first, counted, _ = names[start].partition(" (")
            last = names[end - 1]
            yield f"{first} to {last[:-1]} each)" if counted else f"{first} to {last}"
            start = end


def _counted(first: str, second: str) -> int:
    """The index of the only differing piece of two names if it counts up by one; -1 otherwise."""
    pieces, others = first.split("."), second.split(".")
    if len(pieces) != len(others):
        return -1
    differing = [place for place, pair in enumerate(zip(pieces, others, strict=True)) if pair[0] != pair[1]]
    if len(differing) != 1:
        return -1
    before, after = pieces[differing[0]], others[differing[0]]
    counts = before.isdecimal() and after.isdecimal() and int(after) == int(before) + 1
    return differing[0] if counts else -1
