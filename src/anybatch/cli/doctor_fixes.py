"""``anybatch doctor --fix``: tries edits of the user's lines by running the script again for some steps."""

import os
import signal
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anybatch.cli.doctor_records import completed
from anybatch.cli.doctor_trial import REFUSED
from anybatch.cli.launching import Finished, launch
from anybatch.cli.options import Target
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.findings import Finding
from anybatch.records.runs import Run, load_run

if TYPE_CHECKING:
    from anybatch.doctor.fixes.source import Edit
    from anybatch.doctor.fixes.trying import Tried

_SECONDS = 120.0  # that one trial may take, if ``--timeout`` is not less
_MOST_FINDINGS = 3
_MOST_EDITS = 4  # of one finding
_INTERRUPTED = frozenset({130, *(-getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
                                 if hasattr(signal, name))})  # fmt: skip


class _Interrupted(Exception):
    """Somebody has ended a trial, so no more are made."""


@dataclass
class Trials:
    """Trial runs of a script, on top of the edits that helped so far."""

    target: Target  # what is run
    folder: Path  # for what the trials write
    steps: int  # of an optimizer after which each ends
    seconds: float  # that each may take
    texts: dict[str, str] = field(default_factory=dict)  # of the files that were edited, by path
    count: int = 0

    def start(self, edit: "Edit | None") -> "Tried":
        """Runs the script, with one more edit if one is given."""
        from anybatch.doctor.diagnosing import diagnosis
        from anybatch.doctor.fixes.trying import Tried

        folder = self.folder / f"trial{self.count}"
        self.count += 1
        folder.mkdir()
        sources = self.texts if edit is None else {**self.texts, edit.path: edit.after}
        record = folder / "record.jsonl"
        finished = self._launched(folder, record, sources)
        if finished.code in _INTERRUPTED and finished.limit is None:
            raise _Interrupted
        completed(record, folder, self.target, finished)
        run = load_run(record)
        found = replace(diagnosis(run), exit_code=finished.shell_code)
        refused = folder / REFUSED
        why = refused.read_text(encoding="utf-8").splitlines()[0] if refused.exists() else ""
        return Tried(found, run, refused=why, late=finished.limit is not None, code=finished.code)

    def _launched(self, folder: Path, record: Path, sources: Mapping[str, str]) -> Finished:
        settings = {
            "record": str(record), "script": self.target.name, "arguments": self.target.arguments, "every": None,
            "active": False, "ask": True, "launches_ranks": False,
            "trial": {"folder": str(folder), "sources": dict(sources), "steps": self.steps},
        }  # fmt: skip
        return launch(self.target.command, folder, settings, self.seconds, is_edited=True, output=folder / "output")


def with_fixes(
    diagnosis: Diagnosis, run: Run, target: Target, folder: Path, timeout: float | None
) -> tuple[Diagnosis, str]:
    """Tries fixes of the first findings, one after the other, in trials that end after ``timeout`` or 120 seconds.

    Gives the diagnosis with the fixes that helped, and their patch, which is empty if none did.
    """
    from anybatch.doctor.fixes.trying import steps_for, with_edits

    found = with_edits(diagnosis)[:_MOST_FINDINGS]
    names = ", ".join(f"{one.code} {one.name}" for one in diagnosis.causes if one not in found)
    notes: tuple[str, ...] = (f"No fix was tried for {names}.",) if names else ()
    if not found:
        return replace(diagnosis, notes=(*diagnosis.notes, *notes)), ""
    trials = Trials(target, folder, steps_for(found), min(timeout or _SECONDS, _SECONDS))
    click.echo(
        f"anybatch doctor: trying fixes; the script runs again for up to {trials.steps} steps and "
        f"{trials.seconds:g} seconds each time, and what it writes goes to a temporary folder.", err=True,
    )  # fmt: skip
    fitting = _Fitting(trials, diagnosis, run)
    try:
        for one in found:
            fitting.try_one(one)
        for one in fitting.worth_again(found):
            fitting.try_one(one)
    except _Interrupted:
        notes += ("The trial of a fix was interrupted, and no more were made.",)
    findings = tuple(fitting.better.get(id(one), one) for one in diagnosis.findings)
    return replace(
        diagnosis, findings=findings, notes=(*diagnosis.notes, *fitting.notes.values(), *notes)
    ), fitting.patch()


class _Fitting:
    """Findings one after the other, each tried with the fixes of those before it in place."""

    def __init__(self, trials: Trials, diagnosis: Diagnosis, run: Run) -> None:
        from anybatch.doctor.fixes.scene import reader

        self._trials, self._diagnosis, self._run = trials, diagnosis, run
        self._steps = run.steps
        self._base: Tried | None = None
        self._originals: dict[str, str] = {}
        self._reader = reader
        self._before: dict[int, int] = {}  # how many fixes were in place when a finding was tried, by its identity
        self.better: dict[int, Finding] = {}
        self.notes: dict[int, str] = {}

    def try_one(self, finding: Finding) -> None:
        """Tries the edits of one finding; what is good stays in place for those behind it."""
        from anybatch.doctor.fixes.source import unified
        from anybatch.doctor.fixes.trying import tried

        self._before[id(finding)] = len(self.better)
        self.notes.pop(id(finding), None)
        now = next((one for one in self._diagnosis.findings if one.name == finding.name), None)
        if now is None:
            return  # it went with the fix of another one
        read = self._reader(is_users, self._trials.texts)
        outcome = tried(now, self._run, read, lambda: self._without(now), self._trials.start, _MOST_EDITS)
        edit = outcome.edit
        if edit is None or outcome.trial is None:
            self.notes[id(finding)] = f"{finding.code} {finding.name}: {outcome.said}."
            return
        patch = unified({edit.path: edit.before}, {edit.path: edit.after}, os.getcwd())  # noqa: PTH109
        self.better[id(finding)] = replace(finding, fix=edit.lines, fix_kind="tried", proof=outcome.said, patch=patch)
        self._originals.setdefault(edit.path, edit.before)
        self._trials.texts[edit.path] = edit.after
        self._base, self._diagnosis, self._run = outcome.trial, outcome.trial.diagnosis, outcome.trial.run

    def worth_again(self, found: Sequence[Finding]) -> list[Finding]:
        """Those whose edits were no good while a fault was there that is gone now."""
        return [one for one in found if id(one) in self.notes and self._before[id(one)] < len(self.better)]

    def _without(self, finding: Finding) -> "Tried":
        """The run with what is in place already; a whole one, if the finding does not show in some steps."""
        if self._base is None:
            self._base = self._trials.start(None)
        shows = any(one.name == finding.name for one in self._base.diagnosis.findings)
        if not shows and not self._base.unusable and self._trials.steps <= self._steps:
            self._trials.steps = self._steps + 1
            self._base = self._trials.start(None)
        return self._base

    def patch(self) -> str:
        """All edits that are good, as one patch."""
        from anybatch.doctor.fixes.source import unified

        return unified(self._originals, self._trials.texts, os.getcwd())  # noqa: PTH109


def is_users(path: str) -> bool:
    """Whether a file is the user's own: not from Python, an installed package or this library."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(str(Path(__file__).parents[1]))
    return not any(Path(path).is_relative_to(folder) for folder in folders) and "site-packages" not in path
