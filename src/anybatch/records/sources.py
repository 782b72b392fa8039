"""The user's source at a finding: the text of its line, and the comments of its statement."""

import functools
import io
import linecache
import tokenize


def line_at(file: str, line: int) -> str:
    """A line of a file, or of a cell of a notebook, with its indentation; empty if it can't be read.

    Example:
        >>> line_at("no_such_file.py", 3)
        ''
    """
    return "".join(_lines(file)[line - 1 : line]) if line > 0 else ""


def comments_of(file: str) -> tuple[tuple[range, int, str], ...]:
    """The comments of a file: for each the lines of its statement, its own line, and its text."""
    return _comments("".join(_lines(file)))


def _lines(file: str) -> list[str]:
    try:
        linecache.checkcache(file)
        return linecache.getlines(file)
    except ValueError:  # of a path that can't be one
        return []


@functools.lru_cache(maxsize=32)
def _comments(text: str) -> tuple[tuple[range, int, str], ...]:
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
    return tuple(found)
