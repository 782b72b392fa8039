"""Tables of text, for the terminal and for a page."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text.

    Args:
        header: names of the columns.
        rows: cells.
        marked: positions of the rows that stand out.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
