"""Records after their script has ended, those of several ranks too: completed, compared, and as JSON values."""

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybatch.cli.doctor_child import ATTACHED, BEGAN, BROKEN, LEFT, LOST, PROCESSES, of_rank
from anybatch.cli.launching import Finished
from anybatch.cli.options import Target
from anybatch.doctor.policy import Policy
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.events import Ended
from anybatch.records.findings import SEVERITIES, Finding
from anybatch.records.lines import from_line, to_line
from anybatch.records.lossfacts import Replicas
from anybatch.records.reading import plain
from anybatch.records.runs import Run, load_run
from anybatch.records.samples import Norms
from anybatch.records.tables import Started
from anybatch.report.series import series_of

VERSION = 1
"""Of the form of the JSON."""

MOST = 3
"""Damaged lines of a record that are named."""
_TAIL = 1 << 20
_DDP = "DistributedDataParallel"
_SAME_NORM = 1e-6
"""Ranks that step with the same gradient have the same bits; a record has them in decimals."""


def to_complete(record: Path, folder: Path) -> Path:
    """The record; a copy where its file is no longer the recorder's, or takes no more, and is left alone then."""
    if not (folder / LOST).exists():
        return record
    copy = folder / "copied.jsonl"
    if record.is_file() and is_record(record):
        shutil.copyfile(record, copy)
    return copy


def completed(record: Path, folder: Path, target: Target, finished: Finished) -> tuple[str, ...]:
    """Writes the exit code into a record, and an end if the script wrote none; returns notes for the report."""
    notes = []
    broken = (folder / BROKEN).read_text(encoding="utf-8", errors="replace") if (folder / BROKEN).exists() else ""
    reason = next((line for line in reversed(broken.splitlines()) if line.strip()), "")
    if record.is_file() and record.stat().st_size > 0:
        if not _with_exit_code(record, finished, reason) and not broken:
            notes.append(f"The process {_how(finished.code)}; this is what was seen until then.")
    else:
        started = Started(script=target.name, arguments=target.arguments, time=time.time() - finished.seconds)
        ended = Ended(exit_code=finished.shell_code, at=1, failure=reason)  # its cost was not measured
        record.write_text(f"{to_line(started)}\n{to_line(ended)}\n", encoding="utf-8")
        if not broken:
            notes.append(_why_nothing(folder, finished.code))
    if finished.limit is not None:
        notes.append(f"The script was interrupted after {finished.limit:g} seconds, as --timeout asked for.")
    if broken:
        notes.append(f"The doctor itself failed in the script's process, which went on without it: {reason}")
    return tuple(notes)


def _why_nothing(folder: Path, code: int) -> str:
    if (folder / ATTACHED).exists():
        return f"The process {_how(code)}, and before its first step."
    if (folder / LEFT).exists():
        how = f"ended with exit code {code}" if code else "ended"
        return f"The script {how} and had not imported torch, so nothing was seen."
    if (folder / BEGAN).exists():
        return f"The process {_how(code)}, and before it had imported torch, so nothing was seen."
    return "The doctor was not in the script's process: its Python did not load sitecustomize."


def _how(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code} by os._exit or os.exec, before the doctor could end its record"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"


def _with_exit_code(record: Path, finished: Finished, failure: str) -> bool:
    """Writes the exit code into the last line; whether the record had an end."""
    with record.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        whole = tail[: tail.rfind(b"\n") + 1]  # a line that was cut off goes
        start = whole.rfind(b"\n", 0, len(whole) - 1) + 1
        last = _fact_of(whole[start:])
        if isinstance(last, Ended):
            keep, ended = start, replace(last, exit_code=finished.shell_code)
        else:
            at, step = (last.at + 1, last.step) if last is not None else (0, 0)
            keep = len(whole)
            ended = Ended(exit_code=finished.shell_code, at=at, step=step, failure=failure)
        file.seek(max(0, size - _TAIL) + keep)
        file.truncate()
        file.write(f"{to_line(ended)}\n".encode())
    return isinstance(last, Ended)


def _fact_of(line: bytes) -> Any:
    try:
        return from_line(line.decode("utf-8"))
    except (ValueError, TypeError):
        return None


def values_of(diagnosis: Diagnosis, run: Run) -> dict[str, Any]:
    """The values of a diagnosis for ``--json``."""
    ended = next(run.of(Ended), Ended())
    head = {"version": VERSION, "kind": "anybatch diagnosis"}
    tail = {"own_seconds": ended.own_seconds, "torch": run.started.torch, "python": run.started.python}
    values: dict[str, Any] = plain(head | diagnosis.to_dict() | tail | {"series": series_of(run).to_dict()}, str)
    return values


def failed_severity(diagnosis: Diagnosis, fail_on: str | None) -> bool:
    """Whether a cause, not only a consequence, meets ``--fail-on``."""
    if fail_on is None:
        return False
    failing = SEVERITIES[: [str(one) for one in SEVERITIES].index(fail_on) + 1]
    return any(finding.severity in failing for finding in diagnosis.causes)


def damage_of(run: Run) -> tuple[str, ...]:
    """A note on the lines of a record that could not be read and were left out."""
    count = len(run.damaged)
    if not count:
        return ()
    more = f"; and {count - MOST} more" if count > MOST else ""
    lines = "damaged lines of the record were" if count > 1 else "damaged line of the record was"
    return (f"{count} {lines} left out: {'; '.join(run.damaged[:MOST])}{more}.",)


def is_record(path: Path) -> bool:
    """Whether a file is a record of a run, or empty."""
    with path.open("rb") as file:
        line = file.readline(_TAIL)
    if not line:
        return True
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and "kind" in values


def records_of_ranks(record: Path) -> dict[int, Path]:
    """The records of the ranks of a run, by rank."""
    pattern = re.compile(re.escape(of_rank(record.name, "@")).replace("@", r"(\d+)"))
    beside = record.parent.iterdir() if record.parent.is_dir() else ()
    found = {int(match[1]): path for path in beside if (match := pattern.fullmatch(path.name))}
    return dict(sorted(found.items()))


def without_records_of_ranks(record: Path) -> None:
    """Removes the records of an earlier run."""
    for path in records_of_ranks(record).values():
        path.unlink()


def note_differences(ranks: dict[int, Path]) -> None:
    """Writes into the record of the first rank which weights of ``DistributedDataParallel`` the ranks do not share."""
    measured: dict[tuple[int, int], list[dict[str, float]]] = {}
    for path in reversed(ranks.values()):  # the first rank last, whose run stays
        run = load_run(path)
        own = {number for number, root in run.roots.items() if root.wrapper == _DDP}
        names = {number: one.name for number, one in run.parameters.items() if one.root in own}
        for one in run.of(Norms):
            norms = zip(one.parameters, one.weight, strict=False)
            found = {names[number]: norm for number, norm in norms if number in names}
            measured.setdefault((one.optimizer, one.number), []).append(found)
    shared = [found for found in measured.values() if len(found) == len(ranks) > 1]
    spread = [one for one in run.of(Replicas) if one.wrapper == _DDP]
    if not shared or not spread:
        return
    *others, first = shared[-1]
    differ = tuple(name for name, norm in first.items() if not all(
        math.isclose(other.get(name, norm), norm, rel_tol=_SAME_NORM) for other in others))  # fmt: skip
    if differ:
        last = run.facts[-1]
        fact = replace(spread[-1], differ=differ, at=last.at + 1, step=last.step)
        with ranks[min(ranks)].open("a", encoding="utf-8") as file:
            file.write(f"{to_line(fact)}\n")


def compared(
    first: Sequence[Finding], ranks: dict[int, Path], *, kept: bool, policy: Policy | None = None
) -> tuple[str, ...]:
    """Notes on which ranks have other findings than the first one."""
    from anybatch.doctor.diagnosing import diagnose

    number = min(ranks)
    where = f" Their records: {', '.join(path.name for path in ranks.values())}." if kept else ""
    notes = [f"{len(ranks)} processes were followed; this is rank {number}.{where}"]
    known = {_key(one) for one in first}
    for rank, path in ranks.items():
        if rank == number:
            continue
        found = diagnose(load_run(path), policy)
        more = [f"{one.code} {one.name} ({one.place})" for one in found if _key(one) not in known]
        fewer = [f"{one.code} {one.name}" for one in first if _key(one) not in {_key(other) for other in found}]
        if more:
            notes.append(f"Rank {rank} also has {', '.join(more)}.")
        if fewer:
            notes.append(f"Rank {rank} does not have {', '.join(fewer)}.")
        if not more and not fewer:
            notes.append(f"Rank {rank} has the same findings." if found else f"Rank {rank} has no findings, either.")
    return tuple(notes)


def not_followed(folder: Path, run: Run) -> tuple[str, ...]:
    """A note on how to follow processes that the script started itself, if it made no step of its own."""
    path = folder / PROCESSES
    if run.steps or not path.exists():
        return ()
    started = path.read_text(encoding="utf-8")
    return (
        (
            f"The script started {started} processes, which are not followed. If these train, run the doctor in them: "
            "with anybatch.Doctor(model, optimizer, path=f'run.rank{rank}.jsonl'): train(), and then anybatch report "
            "run.rank0.jsonl; or start them by anybatch doctor -m torch.distributed.run --nproc-per-node 2 train.py."
        ),
    )


def _key(finding: Finding) -> tuple[str, str, str, int]:
    return finding.name, finding.place.module, os.path.basename(finding.place.file), finding.place.line  # noqa: PTH119
