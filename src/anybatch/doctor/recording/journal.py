"""Takes the facts of a run: in memory, or in a file of JSON lines that is written in batches."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anybatch.accelerators import synchronize
from anybatch.records.events import Backward, Cleared, Clipped, DropoutCall, Ended, Forward, Scaler, Scheduled, Stepped
from anybatch.records.lines import Fact, to_line
from anybatch.records.lossfacts import LossCall
from anybatch.records.repeats import DIFFERING, by_steps, line_of, repeated
from anybatch.records.runs import Run, load_run
from anybatch.tensors.dispatch import has_numbers, item_of, unseen

FREQUENT = (Forward, Backward, Cleared, Clipped, Scaler, Stepped, Scheduled, LossCall, DropoutCall)
"""Kinds of facts that come every step, which are left out once a record has reached its greatest size."""
_SIZE_IN_MEMORY = 160  # bytes that a fact is counted as that was not written
_SIZE_OF_ROW = 64
_BATCH = 1024
_SECONDS = 0.5


@dataclass(slots=True)
class Counter:
    """Where in the run it is."""

    at: int = -1  # the number of the last event
    step: int = 0  # how many steps the optimizer that stepped most has done


class _File:
    """A file that is opened anew for each batch of lines, and only written to as long as it is the one that was begun.

    No descriptor is held: a script may close descriptors that it does not know, as daemons do, and open files of its
    own in their place, in which it would find lines of the record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        with path.open("wb") as file:
            self._identity = _identity(file.fileno())

    def append(self, lines: bytes) -> None:
        """Writes at the end.

        Raises:
            OSError: the file is gone, is another one, or takes no more.
        """
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if _identity(descriptor) != self._identity:
                raise OSError(f"{self._path} is another file now")
            written = 0
            while written < len(lines):
                written += os.write(descriptor, lines[written:])
            self._identity = _identity(descriptor)
        finally:
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int]:
    """What tells a file; its size too, since the number of a file that was removed may be given to the next one."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size


class Journal:
    """The facts of one run, numbered as they come; in memory without a ``path``, only rare ones past ``max_bytes``."""

    def __init__(self, counter: Counter, path: Path | None, max_bytes: int) -> None:
        self.counter, self.path, self.max_bytes = counter, path, max_bytes
        self.dropped = 0  # how many facts were left out for that
        self.is_full = False  # whether that is so by now
        self._facts: list[Fact] = []
        # facts that are like earlier ones: the other one, the number and the step of this one, and the entries that
        # differ, see ``records.repeats.DIFFERING``; hooks add to it themselves
        self.rows: list[list[Any]] = []
        self._size = 0
        self._pid = os.getpid()
        self._written = time.perf_counter()
        self._waiting: list[tuple[Fact | list[Any], str, torch.Tensor, Callable[[float], Any]]] = []
        self.lost = ""  # why nothing is written to the file any more; empty as long as it is
        self._file = None if path is None else _File(path)

    def emit(self, fact: Fact) -> int:
        """Numbers a fact and keeps it."""
        counter = self.counter
        counter.at += 1
        object.__setattr__(fact, "at", counter.at)
        object.__setattr__(fact, "step", counter.step)
        if (self.is_full or self._size > self.max_bytes) and isinstance(fact, FREQUENT):
            self.is_full = True
            self.dropped += 1
        else:
            self._facts.append(fact)
            if self._file is None:
                self._size += _SIZE_IN_MEMORY
        return counter.at

    def later(
        self, fact: Fact | list[Any], name: str, value: torch.Tensor, read: Callable[[float], Any] = float
    ) -> None:
        """Fills an entry of a fact or a row with a number of a tensor: at once on a CPU, else at the next flush.

        It is copied before anything overwrites it, nothing waits for it; without a number, as on meta, it is skipped.
        """
        if not has_numbers(value):
            return
        if value.is_cpu:
            _enter(fact, name, read(item_of(value)))
        else:
            self._waiting.append((fact, name, _on_its_way(value), read))
            self._device = value.device

    def due(self) -> bool:
        """Whether the facts should be written now."""
        if self._file is None and len(self.rows) * _SIZE_OF_ROW + self._size > self.max_bytes:
            self.is_full = True
        return self._file is not None and (
            len(self._facts) + len(self.rows) >= _BATCH or time.perf_counter() - self._written >= _SECONDS
        )

    def resolve(self) -> None:
        """Waits for the numbers that were on their way from a device."""
        if self._waiting:
            synchronize(self._device)
            for fact, name, value, read in self._waiting:
                _enter(fact, name, read(item_of(value)))
            self._waiting.clear()

    def flush(self) -> None:
        """Writes what is in memory to the file, in this process only."""
        if self._file is None or os.getpid() != self._pid:
            return
        self.resolve()
        texts = [to_line(fact) for fact in self._facts]
        if self.rows:
            texts.append(line_of(by_steps(self.rows)))
        lines = "".join([f"{text}\n" for text in texts]).encode()
        self._facts.clear()
        self.rows.clear()
        self._size += len(lines)
        self.is_full = self._size > self.max_bytes
        try:
            self._file.append(lines)
        except OSError as error:
            self.lost = f"the record can't be written any more: {error.strerror or error}"
            self._file, self.is_full, self.max_bytes = None, True, 0
        self._written = time.perf_counter()

    def close(self, ended: Ended) -> None:
        """Records the end and closes the file."""
        self.emit(ended)
        self.resolve()
        if self._file is not None:
            self.flush()
            self._file = None

    def run(self) -> Run:
        """Everything that was recorded so far."""
        if os.getpid() == self._pid:
            self.resolve()
            self.flush()
        if self.path is not None and not self.lost:
            return load_run(self.path)
        again = [repeated(like, at, step, values) for like, at, step, *values in self.rows]
        return Run(sorted([*self._facts, *again], key=lambda fact: fact.at))


@unseen
def _on_its_way(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", non_blocking=True, copy=True)


def _enter(fact: Fact | list[Any], name: str, value: Any) -> None:
    if isinstance(fact, list):
        fact[3 + DIFFERING[type(fact[0])].index(name)] = value
    else:
        object.__setattr__(fact, name, value)
