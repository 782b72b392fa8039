"""Several processes under one doctor: those of a launcher each write a record; others are only mentioned."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.doctor_child import PROCESSES, of_rank
from anybatch.doctor.policy import Policy
from anybatch.records.findings import Finding
from anybatch.records.runs import Run, load_run

_LAUNCHERS = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
_SCRIPTS = frozenset({"torchrun", "accelerate"})


def launches_ranks(command: Sequence[str]) -> bool:
    """Whether a command is a launcher of ranks, such as torchrun."""
    if command[0] == "-m":
        return command[1] in _LAUNCHERS
    return Path(command[0]).name in _SCRIPTS


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
