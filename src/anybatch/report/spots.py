"""The place of a finding for other programs: a path relative to the working directory, line and column from 1."""

from pathlib import Path
from typing import NamedTuple

from anybatch.records.findings import Finding
from anybatch.records.sources import Sources


class Spot(NamedTuple):
    """A place in a file."""

    file: str  # with slashes; relative to the working directory if inside it, else absolute; empty if there is none
    line: int = 1  # from 1
    column: int = 1  # of the first character of the line that is not a space, from 1
    text: str = ""  # the line, stripped


def spot_of(finding: Finding, script: str, sources: Sources) -> Spot:
    """The place of a finding; without a file, the beginning of the script.

    Example:
        >>> spot_of(Finding("no gradient"), "train.py", Sources())
        Spot(file='train.py', line=1, column=1, text='')
    """
    place = finding.place
    if not place.file:
        return Spot(_relative(script) if script and not script.startswith("-m ") else "")
    line = max(1, place.line)
    return Spot(
        _relative(place.file), line, sources.column(place.file, line) if place.line else 1,
        sources.text(place.file, line),
    )  # fmt: skip


def one_line(text: str) -> str:
    """A text with each run of white space replaced by one space.

    Example:
        >>> one_line("a  b\\n   c")
        'a b c'
    """
    return " ".join(text.split())


def _relative(file: str) -> str:
    path, here = Path(file).absolute(), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()
