"""``anybatch doctor``: why does the user's own script not learn? It follows the record while the script runs."""

import contextlib
import os
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from anybatch.cli import options
from anybatch.cli.doctor_records import (
    compared,
    completed,
    damage_of,
    failed_severity,
    is_record,
    not_followed,
    note_differences,
    records_of_ranks,
    to_complete,
    without_records_of_ranks,
)
from anybatch.cli.doctor_trial import REFUSED
from anybatch.cli.launching import Finished, end_as, launch
from anybatch.cli.options import ScriptCommand, Target, launches_ranks
from anybatch.cli.reporting import Wanted, reporting_options, write_whole
from anybatch.doctor.live import Judge, is_met, sentence_of
from anybatch.doctor.policy import Policy
from anybatch.records.diagnoses import INTERRUPTED, Diagnosis
from anybatch.records.findings import Finding
from anybatch.records.runs import Run, load_run
from anybatch.records.tailing import Tail

_TIMED_OUT = 124
"""What the command timeout ends with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The options of the doctor."""

    wanted: Wanted  # what is reported, and how
    record: Path | None  # what was seen
    fail_on: str | None  # the least severity that is a failure
    active: bool  # whether also probes that train a copy run
    no_ask: bool  # whether no question is asked after the script
    timeout: float | None  # in seconds
    every: int | None  # steps from one sample to the next
    fix: bool  # whether fixes are tried by running the script again
    patch: Path | None  # the file for the patch, ``None`` for standard output
    steps: int | None  # after which the run ends, ``None`` for none
    stop_on: tuple[str, ...]  # findings for which it ends


@click.command("doctor", cls=ScriptCommand, options_behind=False, short_help="Why does it not learn?")
@options.of_script
@options.file_option("--record", help="Keep the record of the run.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning"]),
    help="Exit with 1 if there is a finding of this severity or worse.",
)
@click.option("--active", is_flag=True, help="After the script, try to overfit a copy of the model on the last batch.")
@click.option("--no-ask", is_flag=True, help="Skip the experiments on copies after the script, which take up to 20 s.")
@click.option(
    "--fix", is_flag=True, help="Run the script again with each proposed change, and print a patch of those that help."
)
@options.file_option("--patch", help="Write the patch of --fix to this file.")
@reporting_options
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End the run after N steps of the optimizer.")
@click.option(
    "--stop-on", multiple=True, metavar="nan|error|CODES", help="End the run with exit code 3 when this is found."
)
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Measure every N steps.  [default: 25]")
@options.timeout_option
def doctor_command(target: Target, *, force: bool, **given: Any) -> None:
    """Watches SCRIPT train, and says what is wrong, where, and what to change.

    The script runs unchanged, to its end, with the same results. Options of the doctor stand before SCRIPT; everything
    after it belongs to the script, as in: anybatch doctor -o report.html train.py --lr 0.1. Instead of SCRIPT, -m
    MODULE runs a module.

    Standard output belongs to the script, and the report goes to standard error; with --json - the JSON takes standard
    output, and the script's output goes to standard error. While the script runs, each finding is printed as one line.

    The exit code is the script's; 124 if --timeout stopped it, 3 if --stop-on did, 1 if --fail-on found something and
    the script itself ended well.

    With --fix the script runs again for some steps with each proposed change, each time for at most 120 seconds, or
    --timeout if that is less. Such a trial writes to a temporary folder, and the script's file is never changed. The
    patch of the changes that helped goes to standard output, as in:
    anybatch doctor --fix train.py | git apply
    """
    home = Path() if target.command[0] == "-m" else Path(target.command[0]).parent
    own = {one.name: given.pop(one.name) for one in fields(Wishes) if one.name in given}
    wanted = Wanted(home, force=force, **given)
    own |= {"fail_on": own["fail_on"] or wanted.policy.fail_on, "stop_on": wanted.stops(own["stop_on"])}
    wishes = Wishes(wanted=wanted, **{**own, "fix": own["fix"] or own["patch"] is not None})
    options.check_file(wishes.record, "record that anybatch wrote", is_record, force=force)
    options.check_file(wishes.patch, "patch", options.is_patch, force=force)
    with tempfile.TemporaryDirectory(prefix="anybatch-", ignore_cleanup_errors=True) as folder:
        finished, failed, stopped = _examine(target, wishes, Path(folder).resolve())
    if finished.limit is not None:
        sys.exit(_TIMED_OUT)
    if stopped:
        sys.exit(STOPPED)
    end_as(1 if failed and finished.code == 0 else finished.code)


def _examine(target: Target, wishes: Wishes, folder: Path) -> tuple[Finished, bool, bool]:
    """Runs the script and reports; says how it ended, and whether ``--fail-on`` and ``--stop-on`` are met."""
    record = (wishes.record or folder / "record.jsonl").absolute()
    if record.is_file():
        record.unlink()
    ranks: dict[int, Path] = {}
    if several := launches_ranks(target.command):
        without_records_of_ranks(record)
    settings = {
        "record": str(record), "script": target.name, "arguments": target.arguments, "every": wishes.every,
        "active": wishes.active, "ask": not wishes.no_ask, "launches_ranks": several, "steps": wishes.steps,
    }  # fmt: skip
    to_stdout = wishes.fix and wishes.patch is None and not wishes.wanted.outputs.takes_stdout
    quiet = to_stdout or wishes.wanted.outputs.takes_stdout
    watcher = Watcher(
        record, ranks=several, policy=wishes.wanted.policy, stop_on=wishes.stop_on, is_quiet=wishes.wanted.quiet
    )  # fmt: skip
    finished = launch(target.command, folder, settings, wishes.timeout, quiet=quiet, look=watcher.look)
    try:
        if several and (ranks := records_of_ranks(record)):
            record = ranks[min(ranks)]
        record = to_complete(record, folder)
        notes = completed(record, folder, target, finished)
        if len(ranks) > 1:
            note_differences(ranks)
        run = load_run(record)
        notes = (*notes, *watcher.notes, *damage_of(run), *not_followed(folder, run))
        diagnosis = wishes.wanted.diagnosed(lambda policy: _diagnosis_of(run, target, finished, notes, policy))
        if len(ranks) > 1:
            said = compared(diagnosis.findings, ranks, kept=wishes.record is not None, policy=wishes.wanted.policy)
            diagnosis = replace(diagnosis, notes=(*diagnosis.notes, *said))
        patch = ""
        if wishes.fix:
            diagnosis, patch = _fixed(diagnosis, run, target, folder, wishes.timeout, several=several)
        console = Console(stderr=True, highlight=False)
        with contextlib.suppress(OSError):  # a standard error that is closed; the report has other places
            if not wishes.wanted.quiet:
                console.print()  # what the script wrote ends here
        wishes.wanted.write(diagnosis, run, console, {"patch": patch} if wishes.fix else {})
        if wishes.patch is not None:
            write_whole(wishes.patch, patch)
        elif to_stdout and patch:
            click.echo(patch, nl=False)
        return finished, failed_severity(diagnosis, wishes.fail_on), watcher.stopped is not None
    except BaseException as error:  # noqa: BLE001 - the script has run, and its exit code must not get lost
        with contextlib.suppress(OSError):
            click.echo(f"anybatch doctor: the report failed: {type(error).__name__}: {error}", err=True)
        return finished, wishes.fail_on is not None, watcher.stopped is not None


def _fixed(
    diagnosis: Diagnosis, run: Run, target: Target, folder: Path, timeout: float | None, *, several: bool
) -> tuple[Diagnosis, str]:
    """The diagnosis with the fixes that were tried, and their patch; whatever fails, the diagnosis stays."""
    why = "its processes are started by a launcher" if several else ""
    try:
        if not why:
            return with_fixes(diagnosis, run, target, folder, timeout)
    except Exception as error:  # noqa: BLE001 - the report has to come in any case
        why = f"{type(error).__name__}: {error}"
    return replace(diagnosis, notes=(*diagnosis.notes, f"No fix was tried: {why}.")), ""


def _diagnosis_of(run: Run, target: Target, finished: Finished, notes: tuple[str, ...], policy: Policy) -> Diagnosis:
    try:
        from anybatch.doctor.diagnosing import diagnosis

        found = diagnosis(run, policy)
    except Exception as error:  # noqa: BLE001 - what the run was is told in any case
        crashed = finished.shell_code not in (0, INTERRUPTED)
        found = Diagnosis(
            steps=run.steps, unexamined=("all rules",), verdict="crashed" if crashed else "undecided",
            reason="the diagnosis failed",
        )  # fmt: skip
        notes = (*notes, f"The diagnosis failed with {type(error).__name__}: {error}.")
    return replace(
        found,
        script=target.name,
        arguments=target.arguments,
        exit_code=finished.shell_code,
        seconds=found.seconds or finished.seconds,
        notes=(*notes, *found.notes),
    )


STOPPED = 3
"""The exit code of a run that ``--stop-on`` has ended."""


class Watcher:
    """Follows the record of a run, or those of its ranks, from outside the script's process."""

    def __init__(
        self, record: Path, *, ranks: bool, policy: Policy, stop_on: Sequence[str], is_quiet: bool
    ) -> None:  # fmt: skip
        self._record, self._ranks, self._policy = record, ranks, policy
        self._stop_on, self._is_quiet = stop_on, is_quiet
        self._tails: dict[int, tuple[Tail, Judge]] = {}
        self._told: set[str] = set()
        self.stopped: Finding | None = None  # the finding that ended the run, ``None`` if there was none

    def look(self) -> bool:
        """Reads what is new and prints new findings; whether the run has to end."""
        paths = records_of_ranks(self._record) if self._ranks else {0: self._record}
        for rank, path in paths.items():
            tail, judge = self._tails.setdefault(rank, (Tail(path), Judge(self._policy)))
            tail.read()
            step = tail.step if rank == min(paths) else 0  # of the others, what is not finite is looked at
            if judge.is_due(step, not_finite=tail.not_finite) and tail.ended is None:
                self._tell(judge.news(tail.whole(), tail.step), f"rank {rank}, " if self._ranks else "")
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
