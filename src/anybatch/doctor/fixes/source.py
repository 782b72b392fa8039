"""A user's source file, and edits of it by position: what is not edited keeps its every byte."""

import ast
import difflib
import os
import re
import textwrap
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from anybatch.doctor.crashing.usercode import SCOPES, Parsed, called, nodes_in

_BLOCKS = ("body", "orelse", "finalbody")
_SEPARATOR = re.compile(rb"(?:[ \t]*;[ \t]*)?")  # of statements of one line
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # as patch counts lines; splitlines also breaks at a form feed
_T = TypeVar("_T")


class UnclearEdit(Exception):
    """An edit can't be made in one way only, so it is not made."""


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that take the place of others."""

    start: int  # offset of the first byte that goes
    end: int  # offset behind the last one; ``start`` to insert
    text: str  # that comes


@dataclass(frozen=True, slots=True)
class Edit:
    """One file, changed."""

    path: str  # of the file, absolute
    before: str  # its text
    after: str  # its text with the edit
    lines: str = ""  # those that are new; where some only went, what went


class UserSource(Parsed):
    """A file that was parsed, with what is needed to change it by position."""

    def __init__(self, path: str, text: str | None = None) -> None:
        self.path = path
        try:
            data = Path(path).read_bytes() if text is None else text.encode()
            encoding, _ = tokenize.detect_encoding(iter(data.splitlines(keepends=True)).__next__)
            if encoding != "utf-8":
                raise UnclearEdit(f"{path} is not in UTF-8")
            self.text = data.decode()
            super().__init__(ast.parse(data))
        except (OSError, SyntaxError, ValueError) as error:
            raise UnclearEdit(f"{path} can't be read: {error}") from None
        self._data = data
        self._starts = [0]
        for line in data.split(b"\n")[:-1]:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._newline = "\r\n" if b"\r\n" in data else "\n"

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that a node is in."""
        return next(one for one in self.ancestors(node) if isinstance(one, SCOPES))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """The offset of its first byte."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """The offset behind its last byte."""
        if node.end_lineno is None or node.end_col_offset is None:
            raise UnclearEdit("a node has no end")
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """The text of a node."""
        return self._data[self.start(node) : self.end(node)].decode()

    def statement(self, line: int) -> ast.stmt:
        """The innermost statement that a line belongs to."""
        if (found := self.innermost(line)) is None:
            raise UnclearEdit(f"no statement is at {self.path}:{line}")
        return found

    def around(self, node: ast.expr) -> ast.stmt:
        """The innermost statement that an expression belongs to."""
        return next(one for one in self.ancestors(node) if isinstance(one, ast.stmt))

    def indent(self, node: ast.stmt) -> str:
        """The indentation of the line that a statement begins on."""
        line = self.text.split("\n")[node.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements that one stands among."""
        outer = self._parents[statement]
        for name in _BLOCKS:
            inner = getattr(outer, name, None)
            if isinstance(inner, list) and statement in inner:
                return inner
        for handler in (*getattr(outer, "handlers", ()), *getattr(outer, "cases", ())):
            if statement in handler.body:
                return list(handler.body)
        raise UnclearEdit("a statement is in no block")

    def calls(self, node: ast.AST, *names: str) -> list[ast.Call]:
        """The calls in a node whose function has one of some last names, in the order of the text."""
        return sorted((one for one in nodes_in(node, ast.Call) if not names or called(one) in names), key=self.start)

    def one_call(self, node: ast.AST, *names: str) -> ast.Call:
        """The only call of some names in a node."""
        return only(self.calls(node, *names), f"calls of {' or '.join(names)}")

    def replaced(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> Change:
        """A node with another text."""
        return Change(self.start(node), self.end(node), text)

    def behind(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> Change:
        """A text directly behind a node."""
        return Change(self.end(node), self.end(node), text)

    def inserted(self, statement: ast.stmt, code: str, *, after: bool = False) -> Change:
        """Lines before a statement, or after it, with its indentation."""
        start, end = self._whole_lines(statement)
        indent = self._data[start : self._first(statement)].decode()
        lines = "".join(
            f"{indent}{line}{self._newline}" if line.strip() else self._newline for line in code.split("\n")
        )
        at = end if after else start
        if after and not self._data[:end].endswith(b"\n"):
            lines = self._newline + lines.removesuffix(self._newline)
        return Change(at, at, lines)

    def keyword(self, call: ast.Call, name: str, value: str) -> Change:
        """A keyword of a call with another value, or a new one behind its arguments."""
        for one in call.keywords:
            if one.arg == name:
                return self.replaced(one.value, value)
        if any(one.arg is None for one in call.keywords):
            raise UnclearEdit("the keywords of the call come from a mapping")
        given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if not given:
            return Change(self.end(call) - 1, self.end(call) - 1, f"{name}={value}")
        last = max(given, key=self.end)
        if (
            isinstance(last, ast.GeneratorExp)
            and len(given) == 1
            and self.of(call).endswith(")")
            and self.end(last) == self.end(call)
        ):
            raise UnclearEdit("a bare generator is the only argument")  # f(x for x in y): its end is that of the call
        return self.behind(last, f", {name}={value}")

    def argument(self, call: ast.Call, position: int, name: str, value: str) -> Change:
        """An argument of a call with another value, in its position where it stands there, else as a keyword."""
        if len(call.args) > position:
            return self.replaced(call.args[position], value)
        return self.keyword(call, name, value)

    def without_keyword(self, call: ast.Call, name: str) -> Change:
        """A call that loses a keyword, with the comma before it."""
        gone = only([one for one in call.keywords if one.arg == name], f"keywords {name}")
        both: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        given = sorted(both, key=self.start)
        at = given.index(gone)
        if at:
            return Change(self.end(given[at - 1]), self.end(gone), "")
        return Change(self.start(gone), self.start(given[1]) if len(given) > 1 else self.end(gone), "")

    def removed(self, statement: ast.stmt) -> Change:
        """A statement that goes, with its lines, or from a line with several statements."""
        block = self.block(statement)
        if len(block) == 1:
            raise UnclearEdit("nothing else stands in the block of the statement")
        at = block.index(statement)
        if at and block[at - 1].end_lineno == statement.lineno:
            return Change(self.end(block[at - 1]), self.end(statement), "")
        if at + 1 < len(block) and block[at + 1].lineno == statement.end_lineno:
            return Change(self.start(statement), self.start(block[at + 1]), "")
        start, end = self._whole_lines(statement)
        return Change(start, end, "")

    def moved(self, statement: ast.stmt, target: ast.stmt, *, after: bool = False) -> list[Change]:
        """A statement that goes before another one, or after it."""
        self._without_long_strings(statement)
        start, _ = self._whole_lines(statement)
        own = self._data[start : self._first(statement)].decode()
        code = "\n".join(line.removeprefix(own) for line in self.of(statement).splitlines())
        return [self.removed(statement), self.inserted(target, code, after=after)]

    def commented(self, statement: ast.stmt, comment: str) -> Change:
        """A statement whose every line has a comment in its place."""
        self._whole_lines(statement)
        lines = (statement.end_lineno or statement.lineno) - statement.lineno + 1
        return Change(self._first(statement), self.end(statement), "\n".join([comment] * lines))

    def dedented(self, outer: ast.With | ast.If, comment: str = "") -> list[Change]:
        """The body of a ``with`` or an ``if`` without it, behind a comment in its place."""
        first, (start, _) = outer.body[0], self._whole_lines(outer)
        inner, ends = self._starts[first.lineno - 1], self._whole_lines(outer)[1]
        shift = first.col_offset - outer.col_offset
        lines = self._data[inner:ends].decode().splitlines(keepends=True)
        if first.lineno == outer.lineno:
            raise UnclearEdit("the block stands in the line of its head")
        if any(line.strip() and line[:shift].strip() for line in lines):
            raise UnclearEdit("a line of the block is not indented")  # of a string, as a rule
        self._without_long_strings(outer)
        head = [f"{comment}{self._newline}"] * (first.lineno - outer.lineno) if comment else []
        return [Change(start, ends, "".join([*head, *(line[shift:] if line.strip() else line for line in lines)]))]

    def _without_long_strings(self, statement: ast.stmt) -> None:
        """Refuses what would change with its indentation."""
        if any("\n" in self.of(one) for one in ast.walk(statement) if isinstance(one, ast.Constant | ast.JoinedStr)):
            raise UnclearEdit("the statement holds a string of several lines")

    def edit(self, changes: Iterable[Change]) -> Edit:
        """The file with some changes."""
        ordered = self._joined(sorted(changes, key=lambda one: (one.start, one.end)))
        if any(one.end > next_.start for one, next_ in pairwise(ordered)):
            raise UnclearEdit("the changes overlap")
        data, at, new = b"", 0, []
        for one in ordered:
            data += self._data[at : one.start]
            new.append((len(data), len(data) + len(one.text.encode())))
            data, at = data + one.text.encode(), one.end
        data += self._data[at:]
        if data == self._data:
            raise UnclearEdit("nothing changes")
        try:
            ast.parse(data)
        except (SyntaxError, ValueError) as error:
            raise UnclearEdit(f"the edit is no Python: {error}") from None
        stays = [not self._data[one.start : one.end].endswith(b"\n") for one in ordered]  # of whole lines none stays
        lines = [_lines_at(data, *span) for span, some in zip(new, stays, strict=True) if some or span[0] < span[1]]
        lines = lines or [f"# without: {_lines_at(self._data, one.start, one.end).strip()}" for one in ordered]
        return Edit(self.path, self.text, data.decode(), textwrap.dedent("\n".join(dict.fromkeys(lines))))

    def _joined(self, changes: Iterable[Change]) -> list[Change]:
        """Statements of one line that go as one change, which takes the line where nothing else is on it."""
        found: list[Change] = []
        for one in changes:
            goes_on = found and not (one.text or found[-1].text) and one.start <= found[-1].end
            last = found.pop() if goes_on else one
            start, end = last.start, max(one.end, last.end)
            first, stop = self._data.rfind(b"\n", 0, start) + 1, self._data.find(b"\n", end) + 1 or len(self._data)
            if goes_on and not self._data[first:start].strip():
                end += len(_SEPARATOR.match(self._data, end, stop)[0])  # type: ignore[index]
            beside = self._data[first:start] + self._data[end:stop]
            if not (one.text or beside.strip() or self._data[:end].endswith(b"\n")):
                start, end = first, stop
            found.append(Change(start, end, one.text))
        return found

    def _first(self, statement: ast.stmt) -> int:
        """Where a statement begins, its decorators counted."""
        decorators = getattr(statement, "decorator_list", None)
        if decorators:
            return self.start(decorators[0]) - 1
        return self.start(statement)

    def _whole_lines(self, statement: ast.stmt) -> tuple[int, int]:
        """From where to where the lines of a statement go; only a comment may stand beside it."""
        first, end = self._first(statement), self.end(statement)
        start = self._data.rfind(b"\n", 0, first) + 1
        newline = self._data.find(b"\n", end)
        stop = len(self._data) if newline < 0 else newline + 1
        rest = self._data[end:stop].strip()
        if self._data[start:first].strip() or (rest and not rest.startswith(b"#")):
            raise UnclearEdit("the statement shares its line with another one")
        return start, stop


def _lines_at(data: bytes, start: int, end: int) -> str:
    """The whole lines that some bytes lie in."""
    stop = data.find(b"\n", max(start, end - 1))
    return data[data.rfind(b"\n", 0, start) + 1 : len(data) if stop < 0 else stop].decode().strip("\r\n")


def receiver(call: ast.Call) -> ast.expr:
    """What a method is called of: ``optimizer`` of ``optimizer.step()``."""
    if not isinstance(call.func, ast.Attribute):
        raise UnclearEdit(f"{called(call) or 'what is called'} is no method")
    return call.func.value


def only(found: Sequence[_T], what: str) -> _T:
    """The one element."""
    if len(found) != 1:
        raise UnclearEdit(f"{len(found)} {what} where one is needed")
    return found[0]


def unified(before: dict[str, str], after: dict[str, str], folder: str) -> str:
    """The patch between two states of some files, as git and patch take it."""
    parts = []
    for path, text in after.items():
        if text == before[path]:
            continue
        inside = Path(path).is_relative_to(folder)
        name = Path(os.path.relpath(path, folder)).as_posix() if inside else path.lstrip("/")
        name += "\t" if " " in name else ""  # where a name ends that has spaces in it
        lines = difflib.unified_diff(_LINE.findall(before[path]), _LINE.findall(text), f"a/{name}", f"b/{name}")
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts)
