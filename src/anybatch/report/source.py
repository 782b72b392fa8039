"""The user's line at a finding, with its faulty part marked."""

import linecache
import re
import unicodedata
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePath
from urllib.parse import quote

from anybatch.records.findings import Finding, Place
from anybatch.records.sources import line_at
from anybatch.report.tables import clean

_LONGEST = 300
_CODE = re.compile(r"""(?:"[^"]*"|'[^']*'|[^#"'])*""")


@dataclass(frozen=True, slots=True)
class Source:
    """A line of code with a marked part.

    Example:
        >>> print(Source(7, "step(lr=3)", 5, 9).marked)
        7 | step(lr=3)
          |      ^^^^
    """

    line: int
    text: str  # the line without its indentation
    start: int  # the index in ``text`` at which the marked part begins
    end: int  # the index after its end

    @property
    def marked(self) -> str:
        """The line with its number, and carets below the marked part."""
        bar = " " * len(str(self.line)) + " | "
        carets = "^" * max(1, _width(self.text[self.start : self.end]))
        return f"{self.line} | {self.text}\n{bar}{' ' * _width(self.text[: self.start])}{carets}"


def source_of(finding: Finding, since: float = 0.0) -> Source | None:
    """Reads the line of a finding; ``None`` if it is unknown, too long, not on this machine, or may have changed.

    A file that changed after the start of the run may have another line there; 0 accepts any file.
    """
    file, number = finding.place.file, finding.place.line
    if not _is_cell(file) and not (file.endswith(".py") and _is_older(file, since)):
        return None
    text = clean(line_at(file, number).rstrip()).expandtabs().strip()
    if not text or len(text) > _LONGEST:
        return None
    return Source(number, text, *_meant(text, finding))


def link_to(place: Place) -> str:
    """The ``vscode:`` address of a line; empty if the path is not absolute or the line is in a notebook cell."""
    path = place.file.replace("\\", "/")
    if not PurePath(place.file).is_absolute() or place.line <= 0 or _is_cell(place.file):
        return ""
    return f"vscode://file/{quote(path.lstrip('/'), errors='replace')}:{place.line}"


def _is_cell(file: str) -> bool:
    """Whether a file is a cell of a notebook."""
    return file in linecache.cache and not Path(file).is_file()


def _width(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def _is_older(file: str, since: float) -> bool:
    try:
        return not since or Path(file).stat().st_mtime <= since
    except (OSError, ValueError):
        return False


def _meant(text: str, finding: Finding) -> tuple[int, int]:
    """The part to mark: what the patch changes, else an argument or module of the finding, else all but a comment."""
    removed = [line[1:].strip() for line in finding.patch.splitlines() if re.match(r"-(?!-- )", line)]
    added = [line[1:].strip() for line in finding.patch.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    if text in removed and len(removed) == len(added):
        other = added[removed.index(text)]
        start = _alike(text, other)
        end = len(text) - min(_alike(text[::-1], other[::-1]), len(text) - start)
        return start, max(end, start + 1)
    names = [rf"\b{re.escape(name)}\s*=\s*[^,()]+" for name in finding.evidence if name.isidentifier()]
    module = finding.place.module
    names += [rf"(?<![\w.]){re.escape(name)}\b" for name in (module, module.rpartition(".")[2]) if name.isidentifier()]
    found = next((match for name in names if (match := re.search(name, text))), None)
    if found:
        return found.span()
    code = _CODE.match(text)
    return 0, len((code[0] if code else text).rstrip()) or len(text)


def _alike(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
