"""Texts and tables of text, for the terminal and for a page."""

import math
from dataclasses import dataclass


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
