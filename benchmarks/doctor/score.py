"""How many of the faulty programs the doctor finds right, and how often it speaks about the healthy ones.

    python benchmarks/doctor/score.py                     # three seeds, all programs and twins
    python benchmarks/doctor/score.py --no-plain          # nothing without the doctor, in half the time
    python benchmarks/doctor/score.py --quick             # the same with one seed
    python benchmarks/doctor/score.py --only f07 --only p

Each program runs plainly, and then unchanged under ``anybatch doctor --json``. See benchmarks/README.md.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from judging import Program, Verdict, judge, programs
from running import Pair, run_pair

NOTES = (
    "First: the finding that the doctor puts first, where the runs of the seeds differ all of them. Right: its name is",
    "that of the root and its place is a right one; the figure counts seeds. In three: the right one is among the",
    "first three. Step: of the optimizer, at which the evidence was complete, the median. Alarms: errors and warnings",
    "on the repaired twin. Time: CPU time of the process under the doctor over that without, the median; both include",
    "importing torch, and under the doctor the report.",
)


@dataclass(frozen=True)
class Row:
    """One run of a program under the doctor.

    Args:
        program: its key.
        seed: of its random numbers.
        fixed: whether it is the repaired twin.
        verdict: what the findings are worth.
        time_ratio: CPU time under the doctor over that without.
        broken: what went wrong with the run itself; empty if nothing did.
    """

    program: str
    seed: int
    fixed: bool
    verdict: Verdict
    time_ratio: float | None
    broken: str


def trouble(program: Program, pair: Pair, *, fixed: bool) -> str:
    """Says what is wrong with the run itself."""
    crash = program.truth.crash and not fixed
    if pair.findings is None:
        return f"no diagnosis: {pair.watched.errors.strip()[-300:]}"
    if pair.plain is not None and (pair.plain.code != 0) != crash:
        return f"ended with {pair.plain.code} by itself: {pair.plain.errors.strip()[-300:]}"
    if (pair.watched.code != 0) != crash:
        return f"ended with {pair.watched.code} under the doctor"
    if not program.truth.clock and not pair.same:
        return "printed something else under the doctor"
    return ""


def score(program: Program, seed: int, *, fixed: bool, plain: bool) -> Row:
    """Runs a program and judges what the doctor said."""
    pair = run_pair(program, seed, fixed=fixed, plain=plain)
    ratio = pair.watched.seconds / pair.plain.seconds if pair.plain else None
    verdict = judge(program, pair.findings or [])
    return Row(program.key, seed, fixed, verdict, ratio, trouble(program, pair, fixed=fixed))


def names(rows: Sequence[Row]) -> str:
    """The first findings, each once."""
    return ", ".join(dict.fromkeys(row.verdict.first for row in rows)) or "-"


def alarms(rows: Sequence[Row]) -> str:
    """The errors and warnings, each once."""
    return ", ".join(dict.fromkeys(name for row in rows for name in row.verdict.alarms)) or "-"


def ratio(rows: Sequence[Row]) -> str:
    """The median of the ratios of time."""
    known = [row.time_ratio for row in rows if row.time_ratio is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def faulty_line(program: Program, rows: Sequence[Row]) -> list[str]:
    """A faulty program's line of the table."""
    wrong = [row for row in rows if not row.fixed]
    steps = [row.verdict.step for row in wrong if row.verdict.step is not None]
    return [
        program.path.stem.replace("_", " "),
        program.truth.name,
        names(wrong),
        f"{sum(row.verdict.first_place for row in wrong)}/{len(wrong)}",
        f"{sum(row.verdict.in_three for row in wrong)}/{len(wrong)}",
        str(int(statistics.median(steps))) if steps else "-",
        alarms([row for row in rows if row.fixed]),
        ratio(rows),
    ]


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [
        "| " + " | ".join(columns) + " |",
        "|" + " --- |" * len(columns),
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]


def totals(chosen: Sequence[Program], rows: Sequence[Row]) -> list[str]:
    """The sums as sentences."""
    lines = []
    for letter, title in (("f", "Faulty programs"), ("r", "Reserve")):
        keys = [program.key for program in chosen if program.key[0] == letter]
        runs = [row for row in rows if row.program in keys and not row.fixed]
        if not runs:
            continue
        first = [key for key in keys if all(row.verdict.first_place for row in runs if row.program == key)]
        three = [key for key in keys if all(row.verdict.in_three for row in runs if row.program == key)]
        code = [key for key in keys if all(row.verdict.first_code for row in runs if row.program == key)]
        lines.append(
            f"- {title}: first finding right in name and place, under every seed, on {len(first)} of {len(keys)} "
            f"(in name alone {len(code)}); among the first three on {len(three)}."
        )
    quiet = [row for row in rows if row.fixed or row.program.startswith("p")]
    if quiet:
        loud = sorted({(row.program, row.fixed) for row in quiet if row.verdict.alarms})
        said = ", ".join(f"{key}{' repaired' if fixed else ''}" for key, fixed in loud) or "none"
        pairs = len({(row.program, row.fixed) for row in quiet})
        lines.append(f"- False alarms: {len(loud)} of {pairs} healthy programs and repaired twins ({said}).")
    lines.append(f"- Time, median of all runs: {ratio(rows)}.")
    broken = [f"{row.program}{' --fixed' if row.fixed else ''} seed {row.seed}: {row.broken}" for row in rows]
    broken = [text for text, row in zip(broken, rows, strict=True) if row.broken]
    return lines + [f"- Broken: {text}" for text in broken]


def page(chosen: Sequence[Program], rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """The whole table as Markdown."""
    lines = ["# What the doctor finds", ""]
    lines += [f"- device: {platform.machine()} CPU, one thread, CPU time"]
    lines += [f"- python: {platform.python_version()}", f"- torch: {torch.__version__}"]
    lines += [f"- date: {dt.date.today().isoformat()}"]
    lines += [f"- command: {shlex.join(['python', 'benchmarks/doctor/score.py', *sys.argv[1:]])}"]
    lines += [f"- seeds: {', '.join(map(str, seeds))}", "", *totals(chosen, rows), "", *NOTES, ""]
    columns = ["program", "root", "first", "right", "in three", "step", "alarms on the twin", "time"]
    for letter, title in (("f", "Faulty programs"), ("r", "Reserve")):
        part = [program for program in chosen if program.key[0] == letter]
        if part:
            found = [faulty_line(program, [row for row in rows if row.program == program.key]) for program in part]
            lines += [f"## {title}", "", *table(columns, found)]
    part = [program for program in chosen if program.healthy]
    if part:
        found = []
        for program in part:
            own = [row for row in rows if row.program == program.key]
            found.append([program.path.stem.replace("_", " "), alarms(own), ratio(own)])
        lines += ["## Healthy programs", "", *table(["program", "alarms", "time"], found)]
    return "\n".join(lines).rstrip() + "\n"


def miss(program: Program, row: Row) -> str:
    """What is not as it should be in one run, in lines; empty if all is."""
    lines = []
    name = f"{program.path.name}{' --fixed' if row.fixed else ''} seed {row.seed}"
    if row.broken:
        lines.append(f"{name}: BROKEN, {row.broken}")
    if row.fixed or program.healthy:
        if row.verdict.alarms:
            lines.append(f"{name}: expected silence, got {', '.join(row.verdict.alarms)}: {row.verdict.message}")
    elif not row.verdict.first_place:
        near = "among the first three" if row.verdict.in_three else ("place" if row.verdict.first_code else "missed")
        text = f"{row.verdict.first}: {row.verdict.message}"
        lines.append(f"{name} ({near}): expected {program.truth.name}, got {text}")
    return "".join(f"{line}\n" for line in lines)


@click.command(help="Scores the doctor on faulty and healthy training programs.")
@click.option("--quick", is_flag=True, help="One seed, and nothing without the doctor.")
@click.option("--only", multiple=True, help="A program, or the beginning of its key: f07, p, r1.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds of each program.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Programs at a time.")
@click.option("--twins/--no-twins", default=True, help="Also the repaired twins.")
@click.option("--plain/--no-plain", default=True, help="Also each program without the doctor, for time and output.")
@click.option("--misses", "misses_path", type=click.Path(path_type=Path), help="Add what was missed to this file.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the tables here, as Markdown.")
def main(
    quick: bool,
    only: tuple[str, ...],
    seeds: int,
    jobs: int,
    twins: bool,
    plain: bool,
    misses_path: Path | None,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, runs everything, prints the tables and writes the files."""
    chosen = programs(only)
    if not chosen:
        raise click.UsageError(f"no program is called {', '.join(only)}; they are in benchmarks/doctor/faulty/")
    numbers = range(1 if quick else seeds)
    cases = [(p, seed, fixed) for seed in numbers for p in chosen for fixed in ([False, True] if twins else [False])]
    cases = [(p, seed, fixed) for p, seed, fixed in cases if not (p.healthy and fixed)]
    by_key = {program.key: program for program in chosen}
    rows: list[Row] = []
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(score, p, seed, fixed=fixed, plain=plain and not quick) for p, seed, fixed in cases]
        for done in as_completed(waiting):
            rows.append(row := done.result())
            good = not row.verdict.alarms if row.fixed or row.program[0] == "p" else row.verdict.first_place
            mark = "broken" if row.broken else ("ok" if good else "MISS")
            twin = " --fixed" if row.fixed else ""
            click.echo(f"{row.program}{twin} seed {row.seed}: {row.verdict.first} {mark}", err=True)
            if misses_path is not None:
                with misses_path.open("a", encoding="utf-8") as file:
                    file.write(miss(by_key[row.program], row))
    rows.sort(key=lambda row: (row.program, row.fixed, row.seed))
    text = page(chosen, rows, numbers)
    click.echo(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    if json_path is not None:
        values: list[dict[str, Any]] = [asdict(row) for row in rows]
        json_path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if any(row.broken for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
