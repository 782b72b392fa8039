"""Runs the code of a Markdown page from top to bottom, the way a reader would.

- A ```` ```python ```` block runs; the blocks of one page share their names.
- A ```` ```python no-run ```` block must compile, and does not run.
- A block whose first line starts with ``>>>``, marked ``python`` or ``pycon``, is a doctest.
- ``<!-- raises: ErrorName -->`` on the line before a block says that the block ends with that error.
- A line ``<!-- setup`` opens a block that runs and is not shown; a line ``-->`` ends it.
"""

import doctest
import linecache
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
RAISES = re.compile(r"<!--\s*raises:\s*([\w.]+)\s*-->")
FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<info>.*?)\s*$")
RUNNABLE = frozenset({"python", "py", "python3", "pycon"})


class Block(NamedTuple):
    """A block of code: its text, the line its text starts on, what its fence says, and the error it announces."""

    text: str
    line: int
    info: str
    raises: str

    @property
    def is_doctest(self) -> bool:
        return self.text.lstrip().startswith(">>>")


class PageError(AssertionError):
    """A page's code does not do what the page says."""


def blocks(text: str) -> Iterator[Block]:
    """Yields the blocks of Python of a page, the hidden ones too, in order."""
    lines = iter(enumerate(text.splitlines(), start=1))
    raises = ""
    for number, line in lines:
        if line.strip() == "<!-- setup":
            yield Block(_until(lines, "-->"), number + 1, "python", raises)
            raises = ""
        elif opening := FENCE.match(line):
            body = _until(lines, opening["fence"], len(opening["indent"]))
            if opening["info"].split(" ")[0] in RUNNABLE:
                yield Block(body, number + 1, opening["info"], raises)
            raises = ""
        elif announced := RAISES.fullmatch(line.strip()):
            raises = announced[1]
        elif line.strip() and raises:
            raise PageError(f"line {number}: a comment 'raises: {raises}' stands before {line!r}, not before code")
    if raises:
        raise PageError(f"a comment 'raises: {raises}' ends the page; expected a block of code after it")


def _until(lines: Iterator[tuple[int, str]], end: str, indent: int = 0) -> str:
    body: list[str] = []
    for _, line in lines:
        if line.strip() == end:
            return "\n".join(body) + "\n"
        body.append(line[indent:] if not line[:indent].strip() else line)
    raise PageError("the last block of code has no end")


def run_page(text: str, name: str) -> int:
    """Runs a page and returns how many of its blocks ran.

    Raises:
        PageError: a doctest printed something else, a block did not raise what it announces, or a fence is unknown.
    """
    module = types.ModuleType("page")
    ran = 0
    sys.modules["page"] = module  # dataclasses and pickle look a class's module up by its name
    try:
        for block in blocks(text):
            if block.info not in {*RUNNABLE, "python no-run"}:
                raise PageError(f"{name}:{block.line}: got ```{block.info}, expected ```python or ```python no-run")
            code = _compiled(block, name)
            if block.info == "python no-run":
                continue
            _run(block, code, module.__dict__, name)
            ran += 1
    finally:
        del sys.modules["page"]
    return ran


def _compiled(block: Block, name: str) -> types.CodeType:
    # Tracebacks then show the page's own lines, and inspect.getsource works on what a page defines.
    source = "\n" * (block.line - 1) + ("" if block.is_doctest else block.text)
    file = f"<{name}:{block.line}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")


def _run(block: Block, code: types.CodeType, names: dict[str, Any], name: str) -> None:
    if block.is_doctest:
        _run_doctest(block, names, name)
        return
    try:
        exec(code, names)
    except Exception as error:
        if type(error).__name__ != block.raises.rpartition(".")[2]:
            raise
    else:
        if block.raises:
            raise PageError(f"{name}:{block.line}: the block raised nothing, expected {block.raises}")


def _run_doctest(block: Block, names: dict[str, Any], name: str) -> None:
    if block.raises:
        raise PageError(f"{name}:{block.line}: a doctest shows its traceback; take away 'raises: {block.raises}'")
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(block.text, names, f"{name}:{block.line}", name, block.line - 1)
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append, clear_globs=False)
    names.update(test.globs)  # get_doctest copies the names it is given
    if said:
        raise PageError("".join(said))


def pages(root: Path) -> list[Path]:
    """Returns the README and every page of the documentation."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in found if "_build" not in page.parts]
