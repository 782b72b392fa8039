"""Lines for a terminal, or a pipe: sentences are wrapped, tables and code are not, so that they can be copied."""

import textwrap
from collections.abc import Collection

from rich.console import Console
from rich.text import Text

from anybatch.report.tables import TextTable, clean

_WIDTH = 100
_LEAST_WIDTH = 50  # behind an indentation
_TERM_WIDTH = 12
_GAP = "  "
_HEAD = "cyan"  # style of the header of a table


class Terminal:
    """Writes to a console of rich."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str = "", style: str = "") -> None:
        """Writes a line that is not wrapped."""
        self.console.print(Text(clean(text).rstrip(), style=style), soft_wrap=True)

    def words(self, text: str, *, first: str | None = None, indent: str = "", style: str = "") -> None:
        """Writes wrapped text, the first line behind ``first``, the others behind ``indent``; names are not broken."""
        start = clean(indent if first is None else first)
        lines = textwrap.wrap(
            " ".join(clean(text).split()), min(self.console.width, max(_WIDTH, len(indent) + _LEAST_WIDTH)),
            initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        for line in lines or [start]:
            self.line(line, style)

    def heading(self, text: str) -> None:
        """Writes a heading after an empty line."""
        self.line()
        self.line(text, "bold")

    def term(self, name: str, text: str, style: str = "", indent: str = "") -> None:
        """Writes a term and its text, beside each other."""
        start = f"{indent}{name:<{_TERM_WIDTH}}"
        self.words(text, first=start, indent=" " * len(start), style=style)

    def rest(self, count: int, elsewhere: str) -> None:
        """Says how many entries were left out, and what has them."""
        if count > 0:
            self.line(f"and {count} more: {elsewhere}")

    def table(
        self, content: TextTable, *, left: Collection[int] = (0,), mark: str = "bold green", wraps: bool = False
    ) -> None:
        """Writes a table, with numbers on the right of all columns that are not ``left``.

        With ``wraps`` all are texts, and the last is wrapped within its column.
        """
        rows = [content.header, *content.rows]
        columns = len(content.header) - wraps
        widths = [max(len(row[column]) for row in rows) for column in range(columns)]
        for index, row in enumerate(rows):
            pairs = enumerate(zip(row, widths, strict=False))
            cells = [text.ljust(width) if wraps or at in left else text.rjust(width) for at, (text, width) in pairs]
            style = _HEAD if index == 0 else mark if index - 1 in content.marked else ""
            if wraps:
                start = "".join(f"{cell}{_GAP}" for cell in cells)
                self.words(row[-1], first=start, indent=" " * len(start), style=style)
            else:
                self.line(_GAP.join(cells), style)
