"""Reads a record while another process writes it."""

import os
from pathlib import Path

from anybatch.records.events import Ended
from anybatch.records.lines import Fact, from_line
from anybatch.records.repeats import DIFFERING, Repeats, with_repeats
from anybatch.records.runs import Run
from anybatch.records.samples import NonFinite
from anybatch.records.tables import OptimizerFacts, ParameterFacts, Root, SchedulerFacts, Started

_TABLES = (Started, Root, ParameterFacts, OptimizerFacts, SchedulerFacts)
_MOST = 1000  # the most facts, and the most repeated rows, that ``recent`` uses


class Tail:
    """Follows a record that another process writes.

    Args:
        path: the file; it need not exist yet.

    Attributes:
        not_finite: whether a value that is not finite was recorded.
        ended: the end of the run; ``None`` while it goes on.

    Example:
        >>> tail = Tail(Path("no_such_run.jsonl"))
        >>> tail.read(), tail.step
        (False, 0)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.renewals = 0  # how often the file was replaced or truncated; what was read before is then discarded
        self._file: tuple[int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self.step = 0
        self.not_finite = False
        self.ended: Ended | None = None
        self._at = 0
        self._facts: list[Fact] = []
        self._tables: list[Fact] = []
        self._likes: dict[int, Fact] = {}

    def read(self) -> bool:
        """Reads the new lines; an incomplete last line is read later, a damaged one is ignored."""
        try:
            with self.path.open("rb") as file:
                self._begin_anew_if_other(os.fstat(file.fileno()))
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            self._file = None  # a new file may get the same inode
            return False
        lines = text[: text.rfind(b"\n") + 1]
        self._at += len(lines)
        for line in lines.splitlines():
            try:
                one = from_line(line.decode()) if line.strip() else None
            except ValueError:
                continue
            if one is not None:
                self._take(one)
        return bool(lines)

    def _begin_anew_if_other(self, found: os.stat_result) -> None:
        file = found.st_dev, found.st_ino
        if self._at and (file != self._file or found.st_size < self._at):
            self.renewals += 1
            self._begin()
        self._file = file

    def _take(self, one: Fact) -> None:
        self._facts.append(one)
        self.step = max(self.step, one.step)
        self.not_finite |= isinstance(one, NonFinite)
        if isinstance(one, Ended):
            self.ended = one
        if isinstance(one, _TABLES):
            self._tables.append(one)
        if type(one) in DIFFERING:
            self._likes[one.at] = one

    def whole(self) -> Run:
        """Everything so far."""
        return Run(with_repeats(self._facts, []))

    def recent(self) -> Run:
        """The tables and the last steps; the cost does not grow with the run."""
        last = self._facts[-_MOST:]
        rows = [row for one in last if isinstance(one, Repeats) for row in one.rows][-_MOST:]
        numbers = {number for row in rows for number in (row[0] if isinstance(row[0], (list, tuple)) else [row[0]])}
        kept = {one.at: one for one in last if not isinstance(one, Repeats)}
        kept |= {number: self._likes[number] for number in numbers if number in self._likes}
        tables = [one for one in self._tables if one.at not in kept]
        return Run(with_repeats([*tables, *kept.values(), Repeats(rows=tuple(rows))], []))
