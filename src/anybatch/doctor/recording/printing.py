"""Sees what the script prints of its own evaluation, such as ``test accuracy: 0.61``."""

import re
import sys
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from anybatch.doctor.recording.patches import hidden, raised
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.lossfacts import Printed
from anybatch.userlines import user_place

_MOST_LINES = 256  # of the script, from which numbers are printed
_MOST_KEPT = 64  # texts of one of them
_LONGEST = 400
_NUMBER = re.compile(r"([A-Za-z][\w \-/.@]*?)[\s:=(\[\"']+(-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])\s*(%?)")


@dataclass(slots=True)
class _Line:
    """What one line of the script has printed: some of its texts, evenly over the run, and the last one."""

    count: int = 0
    every: int = 1
    kept: list[tuple[int, str]] = field(default_factory=list)
    last: tuple[int, str] = (0, "")

    def add(self, step: int, text: str) -> None:
        self.last = step, text
        if self.count % self.every == 0:
            self.kept.append(self.last)
            if len(self.kept) > _MOST_KEPT:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.count += 1


class PrintedNumbers:
    """Has texts seen that are written to the standard output, and notes their numbers at the end.

    The stream stays the object that it is; for the time being it has a ``write`` of its own.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lines: dict[tuple[str, int], _Line] = {}
        self._begun: dict[int, str] = {}  # by thread: what was printed of its line so far
        self._stream: Any = None
        self._write: Any = None

    def attach(self) -> None:
        """Puts the seam in place, where there is a stream that can have one."""
        stream, note = sys.stdout, self._recording.guarded(self._note, everywhere=True)
        original = getattr(stream, "write", None)
        if original is None or "write" in getattr(stream, "__dict__", {"write": None}):
            return

        def write(text: Any, /) -> Any:
            try:
                result = original(text)
            except BaseException as error:
                raised(error)
                raise
            note(text)
            return result

        hidden(write)
        write.__doc__, write.__name__, write.__qualname__ = original.__doc__, "write", original.__qualname__
        write.__module__ = original.__module__
        try:
            stream.write = write  # type: ignore[method-assign]
        except (AttributeError, TypeError):
            return
        self._stream, self._write = stream, write

    def detach(self) -> None:
        """Takes the seam off, and notes what was seen."""
        if self._stream is None:
            return
        if vars(self._stream).get("write") is self._write:
            del self._stream.write
        self._stream = self._write = None
        lines, self._lines = self._lines, {}
        for (file, line), printed in lines.items():
            for label, series in _series(printed).items():
                steps, values = zip(*series, strict=True)
                self._recording.emit(Printed(label=label, steps=steps, values=values, file=file, line=line))

    def _note(self, text: Any) -> None:
        if type(text) is not str:
            return
        me = get_ident()
        before = self._begun.pop(me, "")
        head, newline, rest = text.partition("\n")
        if not newline:
            self._begun[me] = (before + text)[:_LONGEST]
            return
        line = (before + head)[:_LONGEST]
        if line and any(map(str.isdigit, line)):
            place = user_place(3)
            known = self._lines.get(place)
            if known is None and len(self._lines) < _MOST_LINES:
                known = self._lines[place] = _Line()
            if known is not None:
                known.add(self._recording.counter.step, line)
        if rest:
            self._begun[me] = rest.rpartition("\n")[2][:_LONGEST]


def _series(printed: _Line) -> dict[str, list[tuple[int, float]]]:
    """The numbers that a line printed, by what stands before each; those of the last text are the last ones."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step, text in dict.fromkeys([*printed.kept, printed.last]):
        for label, value in numbers_in(text):
            found.setdefault(label, []).append((step, value))
    return found


def numbers_in(text: str) -> list[tuple[str, float]]:
    """The numbers of a text, each with the words before it; percentages as shares.

    Example:
        >>> numbers_in("epoch 3 | train loss: 0.25 | val acc = 91.5%")
        [('epoch', 3.0), ('train loss', 0.25), ('val acc', 0.915)]
        >>> numbers_in("{'test_acc': tensor(0.61)}")
        [('test_acc', 0.61)]
    """
    found = []
    for label, number, percent in _NUMBER.findall(text.replace("tensor(", "")):
        found.append((" ".join(label.split()), float(number) / 100 if percent else float(number)))
    return found
