"""The parent process follows the record of the script: it prints findings at once, and may end the run."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from anybatch.cli.doctor_ranks import records_of_ranks
from anybatch.doctor.judging import Judge, is_met, sentence_of
from anybatch.doctor.policy import Policy
from anybatch.records.findings import Finding
from anybatch.records.tailing import Tail

STOPPED = 3
"""The exit code of a run that ``--stop-on`` has ended."""


class Watcher:
    """Follows the record of a run, or those of its ranks, from outside the script's process.

    Args:
        ranks: whether each process of a launcher writes a record of its own.
        policy: what is reported.
        stop_on: ``NAN``, ``ERROR``, codes, code prefixes, names.
        is_quiet: whether findings are not printed.
        report: writes the report of what was seen so far.
    """

    def __init__(
        self, record: Path, *, ranks: bool, policy: Policy, stop_on: Sequence[str], is_quiet: bool,
        report: Callable[[Tail], None],
    ) -> None:  # fmt: skip
        self._record, self._ranks, self._policy = record, ranks, policy
        self._stop_on, self._is_quiet, self._report = stop_on, is_quiet, report
        self._tails: dict[int, tuple[Tail, Judge]] = {}
        self._told: set[str] = set()
        self.stopped: Finding | None = None  # the finding that ended the run, ``None`` if there was none

    def look(self, report_now: bool) -> bool:
        """Reads what is new and prints new findings; whether the run has to end."""
        paths = records_of_ranks(self._record) if self._ranks else {0: self._record}
        for rank, path in paths.items():
            tail, judge = self._tails.setdefault(rank, (Tail(path), Judge(self._policy)))
            tail.read()
            step = tail.step if rank == min(paths) else 0  # of the others, what is not finite is looked at
            if judge.is_due(step, not_finite=tail.not_finite) and tail.ended is None:
                self._tell(judge.news(tail.whole(), tail.step), f"rank {rank}, " if self._ranks else "")
        if report_now and self._tails:
            self._report(self._tails[min(self._tails)][0])
        return self.stopped is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report."""
        if self.stopped is None:
            return ()
        return (f"The script was interrupted in step {self.stopped.step} or soon after, as --stop-on asked for.",)

    def _tell(self, found: Sequence[Finding], whose: str) -> None:
        for one in found:
            sentence = sentence_of(one)
            if not self._is_quiet and sentence not in self._told:  # by another rank
                with contextlib.suppress(OSError, ValueError):  # of a closed stream; the run may have to end
                    click.echo(f"anybatch doctor: {whose}{sentence}", err=True)
            self._told.add(sentence)
            if self.stopped is None and is_met(one, self._stop_on):
                self.stopped = one
