"""What the doctor costs a training loop.

    python benchmarks/doctor/overhead.py -o FILE                    # all models, about forty minutes
    python benchmarks/doctor/overhead.py --steps 500 --runs 1 --model MLP --allocator system

Three processes train the same model and take turns of a few steps: one with the doctor attached from before the first
step to behind the last, which writes its record to a file as the command does, one without, and another one without,
which shows the noise. Times are CPU time of the process. All three are bound to one core: on a shared machine a core is
now faster and now slower by half, for seconds, and whole runs one after the other showed little else.

Steps of a few milliseconds are disturbed by the allocator: glibc gives memory back to the system and takes it again
within a step or does not, as it comes, and the same loop without a doctor took from 2.7 to 4.2 seconds. So this starts
itself again with thresholds that have glibc keep what it has, unless ``--allocator system`` is given. Small steps are
also some percent faster or slower from one process to the next, which no number of steps in one process shows, so
there are several runs of each. The calls of Python functions that a step which is not measured adds are counted as
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from training import MODELS, Ending, Training, calls, worker

FIRST = 25
COLUMNS = (
    *("model", "numbers", "tensors", "ms a step", "steps", "runs", "overhead", "each run", "first 25 steps"),
    *("middle step", "own", "calls", "noise"),
)
NOTES = (
    "Overhead: what the doctor adds to a whole run, attaching and writing the record included: CPU time of all runs",
    "with it over that of all without, and in brackets what a second set of runs without it adds to the first. Each",
    "run: the overhead of each of them. First 25 steps: what it adds to those. Middle step: what it adds to the median",
    "step, one that it does not measure. Own: what the doctor says that it took, of its run. Calls: of its Python",
    "functions in a step that it does not measure. Noise: what each second run without the doctor adds to the first.",
)
USUAL = {
    "MLP": (2000, 6),
    "MLP, clipped, with a schedule": (2000, 6),
    "MLP, scaled, clipped": (2000, 6),
    "200 layers": (500, 6),
    "transformer": (500, 3),
    "CNN": (500, 3),
}
"""Steps and runs of each model."""
TURN_SECONDS = 0.1
KEPT = {f"MALLOC_{name}_": str(2**32) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
"""What has glibc keep the memory that it has."""


@dataclass(frozen=True)
class Run:
    """CPU seconds of each step of one run, the first with what came before it, and how the run ended."""

    times: list[float]
    ending: Ending

    @property
    def whole(self) -> float:
        """Seconds of all of it."""
        return sum(self.times) + self.ending.seconds


@dataclass(frozen=True)
class Measured:
    """One model.

    Args:
        model: its name.
        numel: of all parameters.
        tensors: how many there are.
        ms: the median step without the doctor.
        steps: of each run.
        overhead: of all runs, as a share.
        each: overhead of each run.
        first: added to the first steps.
        middle: added to the median step.
        own: the share of its own run that the doctor says it took.
        calls: of its functions in a step that it does not measure.
        again: what the second runs without the doctor add to the first ones, all together.
        noise: what each of them adds.
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
    first: float
    middle: float
    own: float
    calls: float
    again: float
    noise: list[float]
    sampled_less: int
    findings: tuple[str, ...]


def in_turn(name: str, steps: int, folder: Path, shift: int) -> tuple[Run, Run, Run]:
    """Three runs of one model that take turns: with the doctor, without it, and without it.

    Args:
        name: of the model.
        steps: of each.
        folder: for the record.
        shift: who begins.
    """
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(3)]
    records = (folder / f"{name} {shift}.jsonl", None, None)
    processes = [
        context.Process(target=worker, args=(far, name, record)) for (_, far), record in zip(ends, records, strict=True)
    ]
    for process in processes:
        process.start()
    pipes = [near for near, _ in ends]
    each = min(pipe.recv() for pipe in pipes)
    turn = max(1, min(25, round(TURN_SECONDS / each)))
    times: list[list[float]] = [[], [], []]
    while len(times[0]) < steps:
        for place in range(3):
            side = (place + shift) % 3
            pipes[side].send(min(turn, steps - len(times[side])))
            times[side] += pipes[side].recv()
        shift += 1
    for pipe in pipes:
        pipe.send(0)
    first, second, third = (Run(own, pipe.recv()) for own, pipe in zip(times, pipes, strict=True))
    for process in processes:
        process.join()
    return first, second, third


def added(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """What runs took more than others, as a share."""
    return sum(one.whole for one in runs) / sum(one.whole for one in others) - 1


def measure(name: str, steps: int, runs: int, folder: Path) -> Measured:
    """Times one model with and without the doctor.

    Args:
        name: of the model.
        steps: of each run.
        runs: of each side.
        folder: for the records.
    """
    own, plain, again = zip(*[in_turn(name, steps, folder, number) for number in range(runs)], strict=True)
    parameters = list(Training(name).model.parameters())

    def first(run: Run) -> float:
        return sum(run.times[:FIRST])

    def middle(run: Run) -> float:
        return statistics.median(run.times)

    return Measured(
        model=name, numel=sum(p.numel() for p in parameters), tensors=len(parameters),
        ms=1e3 * statistics.median(map(middle, plain)), steps=steps,
        overhead=added(own, plain), each=[added([a], [b]) for a, b in zip(own, plain, strict=True)],
        first=sum(map(first, own)) / sum(map(first, plain)) - 1,
        middle=sum(map(middle, own)) / sum(map(middle, plain)) - 1,
        own=statistics.median(one.ending.own for one in own), calls=calls(name, folder / "calls.jsonl"),
        again=added(again, plain), noise=[added([a], [b]) for a, b in zip(again, plain, strict=True)],
        sampled_less=own[-1].ending.sampled_less, findings=own[-1].ending.findings,
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
        f"{percent(one.overhead)} ({percent(one.again)})", several(one.each), percent(one.first), percent(one.middle),
        f"{100 * one.own:.1f} %", f"{one.calls:.0f}", several(one.noise),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


@click.command(help="Measures what the doctor costs a training loop on the CPU.")
@click.option("--steps", type=click.IntRange(min=50), help="Steps of each run.  [default: 500, or 2000 of small ones]")
@click.option("--runs", type=click.IntRange(min=1), help="Of each side.  [default: 3 or 6]")
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
