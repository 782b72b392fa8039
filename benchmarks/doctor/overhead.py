"""What the doctor costs a training loop.

    python benchmarks/doctor/overhead.py -o FILE                    # all models, about half an hour
    python benchmarks/doctor/overhead.py --steps 500 --runs 1 --model MLP --allocator system

A process trains a model in turns of some steps: in every second turn a doctor is attached, which is there from before
the first step to behind the last and writes its record to a file as the command does; in the others all that it has put
in place is taken off. It asks no questions at the end: ``memory.py`` has their time. Times are CPU time of the process,
which is bound to one core.

Both sides share the process because two processes differ by as much as what is looked for. Where tensors happen to
lie makes a step of a few milliseconds faster or slower for as long as a process lives, by a percent or two depending on
what it has allocated before (``layouts.py`` measures that). This is therefore not in the figures, whoever allocates.

The allocator disturbs such steps as well: glibc gives memory back to the system and takes it again within a step or
does not, as it comes. So this starts itself again with thresholds that have glibc keep what it has, unless
``--allocator system`` is given. The calls of Python functions that a step which is not measured adds are counted as
well, and those are the same every time. See benchmarks/README.md.
"""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from training import MODELS, Times, Training, calls, turn_of, worker

FIRST = 25
ALL = slice(None)
COLUMNS = (
    *("model", "numbers", "tensors", "ms a step", "steps", "runs", "overhead", "each run", "first 500", "first 25"),
    *("middle step", "own", "calls", "noise"),
)
NOTES = (
    "Overhead: what the doctor adds to a whole run, attaching and writing the record included: CPU time of the steps",
    "that it sees over that of as many that it does not see, which take turns in one process; in brackets what every",
    "second turn without it adds to the others. Each run: the overhead of each process. First 500, first 25: what it",
    "adds to those steps. Middle step: what it adds to the median step, one that it does not measure. Own: what the",
    "doctor says that it took, of its run. Calls: of its Python functions in a step that it does not measure. Noise:",
    "the figure in brackets, for each process.",
)
USUAL = {
    "MLP": (2000, 10),
    "MLP, clipped, with a schedule": (2000, 4),
    "MLP, scaled, clipped": (2000, 4),
    "200 layers": (2000, 4),
    "transformer": (500, 3),
    "CNN": (500, 3),
}
"""Steps and runs of each model."""
KEPT = {f"MALLOC_{name}_": str(2**32) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
"""What has glibc keep the memory that it has."""


@dataclass(frozen=True)
class Measured:
    """One model.

    Args:
        model: its name.
        numel: of all parameters.
        tensors: how many there are.
        ms: the median step that the doctor does not see.
        steps: of each run.
        overhead: of all runs, as a share.
        each: overhead of each run.
        short: overhead of the first 500 steps.
        first: added to the first steps.
        middle: added to the median step.
        own: the share of its own run that the doctor says it took.
        calls: of its functions in a step that it does not measure.
        again: what every second turn without the doctor adds to the others, all together.
        noise: the same in each run.
        sampled_less: samples that the doctor left out to stay cheap.
        findings: what it said in the end.
    """

    model: str
    numel: int
    tensors: int
    ms: float
    steps: int
    overhead: float
    each: list[float]
    short: float
    first: float
    middle: float
    own: float
    calls: float
    again: float
    noise: list[float]
    sampled_less: int
    findings: tuple[str, ...]


def run(name: str, steps: int, record: Path) -> Times:
    """One run of one model, in a process of its own.

    Args:
        name: of the model.
        steps: that the doctor sees, and as many that it does not see.
        record: for the doctor to write to.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=worker, args=(far, name, steps, record))
    process.start()
    far.close()  # so that a process that fails ends this one too
    times: Times = near.recv()
    process.join()
    return times


def added(runs: Sequence[Times], steps: slice) -> float:
    """What the doctor adds to some steps of runs, as a share; to all of them its end belongs."""
    ends = sum(one.ending.seconds for one in runs) if steps == ALL else 0.0
    return (ends + sum(sum(one.own[steps]) for one in runs)) / sum(sum(one.plain[steps]) for one in runs) - 1


def between_turns(runs: Sequence[Times]) -> float:
    """What every second turn without the doctor adds to the others, as a share of a step."""
    halves = [
        [seconds for one in runs for step, seconds in enumerate(one.plain) if turn_of(step) % 2 == half]
        for half in (0, 1)
    ]
    return statistics.mean(halves[1]) / statistics.mean(halves[0]) - 1


def measure(name: str, steps: int, runs: int, folder: Path) -> Measured:
    """Times one model with and without the doctor.

    Args:
        name: of the model.
        steps: of each run.
        runs: how many.
        folder: for the records.
    """
    times = [run(name, steps, folder / f"{number}.jsonl") for number in range(runs)]
    parameters = list(Training(name).model.parameters())

    def middle(steps: Callable[[Times], list[float]]) -> float:
        return statistics.median(seconds for one in times for seconds in steps(one))

    return Measured(
        model=name, numel=sum(p.numel() for p in parameters), tensors=len(parameters),
        ms=1e3 * middle(lambda one: one.plain), steps=len(times[0].own), overhead=added(times, ALL),
        each=[added([one], ALL) for one in times], short=added(times, slice(500)), first=added(times, slice(FIRST)),
        middle=middle(lambda one: one.own) / middle(lambda one: one.plain) - 1,
        own=statistics.median(one.ending.own for one in times),
        calls=calls(name, folder / "calls.jsonl"), again=between_turns(times),
        noise=[between_turns([one]) for one in times], sampled_less=times[-1].ending.sampled_less,
        findings=times[-1].ending.findings,
    )  # fmt: skip


def percent(value: float) -> str:
    """A share with its sign."""
    return f"{100 * value:+.1f} %"


def several(values: Sequence[float]) -> str:
    """Shares, in order of size."""
    return ", ".join(f"{100 * value:+.1f}" for value in sorted(values))


def shown(one: Measured) -> str:
    """A line of the table."""
    cells = [
        one.model, f"{one.numel / 1e6:.2f} M", str(one.tensors), f"{one.ms:.1f}", str(one.steps), str(len(one.each)),
        f"{percent(one.overhead)} ({percent(one.again)})", several(one.each), percent(one.short), percent(one.first),
        percent(one.middle), f"{100 * one.own:.1f} %", f"{one.calls:.0f}",
        several(one.noise),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


@click.command(help="Measures what the doctor costs a training loop on the CPU.")
@click.option("--steps", type=click.IntRange(min=50), help="Steps of each side of a run.  [default: 500 or 2000]")
@click.option("--runs", type=click.IntRange(min=1), help="Processes.  [default: 3 or 4]")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(MODELS)), help="Only this model.")
@click.option(
    "--allocator",
    type=click.Choice(["kept", "system"]),
    default="kept",
    show_default=True,
    help="Whether glibc keeps the memory that it has.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    steps: int | None,
    runs: int | None,
    chosen: tuple[str, ...],
    allocator: str,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    if allocator == "kept" and not KEPT.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT)
    found = []
    for name in MODELS:
        if not chosen or name in chosen:
            usual = USUAL[name]
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(name, steps or usual[0], runs or usual[1], Path(folder)))
            click.echo(shown(found[-1]), err=True)
    lines = ["# What the doctor costs", ""]
    lines += [f"- device: {platform.machine()} CPU, one thread, CPU time"]
    lines += [f"- python: {platform.python_version()}", f"- torch: {torch.__version__}"]
    held = " ".join(f"{name}={value}" for name, value in KEPT.items())
    lines += [f"- allocator: {held if allocator == 'kept' else 'the system as it is'}"]
    lines += [f"- date: {dt.date.today().isoformat()}"]
    lines += [f"- command: {shlex.join(['python', 'benchmarks/doctor/overhead.py', *sys.argv[1:]])}"]
    lines += ["", *NOTES, ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *map(shown, found)]
    text = "\n".join(lines) + "\n"
    click.echo(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
