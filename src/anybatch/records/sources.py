"""The user's source at a finding: the text of its line, and the comments of its statement."""

import io
import tokenize
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Sources:
    """Reads Python files, each once, for their lines and comments; a file that can't be read counts as empty.

    Example:
        >>> Sources().text("no_such_file.py", 3)
        ''
    """

    _lines: dict[str, list[str]] = field(default_factory=dict)
    _comments: dict[str, list[tuple[range, int, str]]] = field(default_factory=dict)

    def text(self, file: str, line: int) -> str:
        """A line, stripped; empty if there is no such line."""
        return self._raw(file, line).strip()

    def column(self, file: str, line: int) -> int:
        """The column of the first character of a line that is not a space, from 1."""
        raw = self._raw(file, line)
        return len(raw) - len(raw.lstrip()) + 1

    def comments(self, file: str) -> list[tuple[range, int, str]]:
        """The comments of a file: for each the lines of its statement, its own line, and its text."""
        if file not in self._comments:
            self._comments[file] = _comments("".join(self._read(file)))
        return self._comments[file]

    def _raw(self, file: str, line: int) -> str:
        lines = self._read(file)
        return lines[line - 1] if 0 < line <= len(lines) else ""

    def _read(self, file: str) -> list[str]:
        if file not in self._lines:
            try:
                with tokenize.open(file) if Path(file).is_file() else io.StringIO() as opened:
                    self._lines[file] = opened.readlines()
            except (OSError, SyntaxError, UnicodeDecodeError):
                self._lines[file] = []
        return self._lines[file]


def _comments(text: str) -> list[tuple[range, int, str]]:
    found: list[tuple[range, int, str]] = []
    waiting: list[tuple[int, str]] = []
    first = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                waiting.append((token.start[0], token.string))
            elif token.type in (tokenize.NEWLINE, tokenize.NL) and (token.type == tokenize.NEWLINE or not first):
                found += [(range(first or line, token.start[0] + 1), line, comment) for line, comment in waiting]
                waiting, first = [], 0
            elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
                first = first or token.start[0]
    except (tokenize.TokenError, SyntaxError):
        pass  # for example a notebook's magic command: the comments before it count
    return found
