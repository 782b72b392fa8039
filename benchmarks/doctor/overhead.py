"""What the doctor costs a training loop.

    python benchmarks/doctor/overhead.py -o FILE           # all models, about twelve minutes on a quiet machine
    python benchmarks/doctor/overhead.py --steps 500 --pairs 3 --model transformer --allocator system

Whole runs in one process, in turn and in an order that alternates: one with the doctor attached from before the first
step to behind the last, which writes its record to a file as the command does, one without, and another one without,
which shows the noise. Times are CPU time of the process, which other processes disturb less than they do a clock.

Steps of a few milliseconds are disturbed by the allocator: glibc gives memory back to the system and takes it again
within a step or does not, as it comes, and the same loop without a doctor took from 2.7 to 4.2 seconds. So this starts
itself again with thresholds that have glibc keep what it has, unless ``--allocator system`` is given. Small steps are
also some percent faster or slower from one process to the next, which no number of runs in one process shows. The
calls of Python functions that a step which is not measured adds are counted as well, and those are the same every time.
See benchmarks/README.md.
"""

from __future__ import annotations

import copy
import datetime as dt
import gc
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.records.events import Ended

FIRST = 25
COLUMNS = (
    *(
        "model",
        "numbers",
        "tensors",
        "ms a step",
        "steps",
        "pairs",
        "overhead",
        "of the least",
        "runs",
        "first 25 steps",
    ),
    *("middle step", "own", "calls", "noise"),
)
NOTES = (
    "Overhead: what the doctor adds to a whole run, attaching and writing the record included: the median over pairs",
    "of runs, the least, the most. Of the least: what the fastest run with it took over the fastest without, which",
    "other users of the machine disturb least. First 25 steps: what it adds to those. Middle step: what it adds to the",
    "median step of a run, one that it does not measure. Own: what the doctor says that it took, of its whole run.",
    "Calls: of its Python functions in a step that it does not measure. Noise: what a second run without the doctor",
    "adds to the first, and the fastest of these to the fastest: zero on a quiet machine.",
)
STEPS = {"MLP": (2000, 6), "200 layers": (500, 3), "transformer": (500, 1), "CNN": (500, 1)}
"""Steps and pairs of runs of each model, so that all of them take some minutes."""
COUNTED = 40
KEPT = {f"MALLOC_{name}_": str(2**32) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
"""What has glibc keep the memory that it has."""


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def chain() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(200)])


class Transformer(nn.Module):
    """Six blocks of width 256 over 2000 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.tokens(ids))).transpose(1, 2)
        return logits


def convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(16):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def rows(*shape: int, classes: int, width: int = 0) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches that are drawn once: tokens if ``width`` is given, else numbers."""

    def draw() -> tuple[Tensor, Tensor]:
        if width:
            return torch.randint(classes, (*shape, width)), torch.randint(classes, (*shape, width))
        return torch.randn(*shape), torch.randint(classes, (shape[0],))

    return draw


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "MLP": (perceptron, rows(64, 784, classes=10)),
    "200 layers": (chain, rows(32, 32, classes=10)),
    "transformer": (Transformer, rows(4, classes=2000, width=64)),
    "CNN": (convolutions, rows(16, 3, 32, 32, classes=10)),
}


def trained(model: nn.Module, batch: tuple[Tensor, Tensor], steps: int, record: Path | None = None) -> Run:
    """Trains a copy of a model in an ordinary loop, with the doctor if there is a place for its record."""
    own, (inputs, labels) = copy.deepcopy(model), batch
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
    gc.collect()
    start, clock = time.process_time(), time.perf_counter()
    doctor = anybatch.Doctor(own, optimizer, path=record) if record is not None else None
    if doctor is not None:
        doctor.attach()
    times = [time.process_time()]
    for _ in range(steps):
        loss = F.cross_entropy(own(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.process_time())
    if doctor is not None:
        doctor.detach()
    whole, passed = time.process_time() - start, time.perf_counter() - clock
    if doctor is not None:
        doctor.close()
    each = [after - before for before, after in itertools.pairwise(times)]
    own_seconds = sum(ended.own_seconds for ended in doctor.run.of(Ended)) if doctor is not None else 0.0
    return Run(whole, sum(each[:FIRST]), statistics.median(each), own_seconds / passed, doctor)


def calls(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """How many of the doctor's functions a step calls that is not measured."""
    own, (inputs, labels), count = copy.deepcopy(model), batch, 0
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and ("anybatch/doctor" in name or name.startswith("<anybatch doctor"))

    with anybatch.Doctor(own, optimizer):
        for step in range(COUNTED + 1):
            if step == COUNTED:
                count = 0
            sys.setprofile(see if step > COUNTED - 3 else None)
            loss = F.cross_entropy(own(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        sys.setprofile(None)
    return count


@dataclass(frozen=True)
class Run:
    """CPU seconds of one run: all of it, the first steps, the median step; its doctor, and what that says it took."""

    whole: float
    first: float
    middle: float
    own: float
    doctor: anybatch.Doctor | None


@dataclass(frozen=True)
class Measured:
    """One model.

    Args:
        model: its name.
        numel: of all parameters.
        tensors: how many there are.
        ms: the median step without the doctor.
        overhead: added to a whole run, as a share: least, median, most over the pairs.
        of_least: added by the fastest run with it to the fastest without.
        first: added to the first steps.
        middle: added to the median step.
        own: the share of its own run that the doctor says it took.
        calls: of its functions in a step that it does not measure.
        noise: what a second run without the doctor adds: the median, and the fastest to the fastest.
        steps: of each run.
        pairs: of runs.
        sampled_less: samples that the doctor left out to stay cheap.
        findings: what it said in the end.
    """

    model: str
    numel: int
    tensors: int
    ms: float
    overhead: tuple[float, float, float]
    of_least: float
    first: float
    middle: float
    own: float
    calls: int
    noise: tuple[float, float]
    steps: int
    pairs: int
    sampled_less: int
    findings: tuple[str, ...]


def measure(name: str, steps: int, pairs: int, folder: Path) -> Measured:
    """Times one model with and without the doctor.

    Args:
        name: of the model.
        steps: of each run.
        pairs: of runs.
        folder: for the records.

    Returns:
        What was found.
    """
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, batch = build(), draw()
    runs: dict[str, list[Run]] = {"own": [], "plain": [], "again": []}
    for number, record in enumerate((None, folder / "first.jsonl")):
        trained(model, batch, 12 + number, record)  # what is loaded at first use
    for number in range(pairs):
        for side in list(runs) if number % 2 else reversed(list(runs)):
            record = folder / f"{name} {number}.jsonl" if side == "own" else None
            runs[side].append(trained(model, batch, steps, record))
    own, plain, again = runs.values()
    added = [a.whole / b.whole - 1 for a, b in zip(own, plain, strict=True)]
    parameters = list(model.parameters())
    doctor = own[-1].doctor
    return Measured(
        model=name, numel=sum(p.numel() for p in parameters), tensors=len(parameters),
        ms=1e3 * statistics.median(one.middle for one in plain),
        overhead=(min(added), statistics.median(added), max(added)),
        of_least=min(one.whole for one in own) / min(one.whole for one in plain) - 1,
        first=statistics.median(a.first / b.first - 1 for a, b in zip(own, plain, strict=True)),
        middle=statistics.median(a.middle / b.middle - 1 for a, b in zip(own, plain, strict=True)),
        own=statistics.median(one.own for one in own), calls=calls(model, batch),
        noise=(
            statistics.median(a.whole / b.whole - 1 for a, b in zip(again, plain, strict=True)),
            min(one.whole for one in again) / min(one.whole for one in plain) - 1,
        ),
        steps=steps, pairs=pairs, sampled_less=sum(ended.thinned for ended in doctor.run.of(Ended)) if doctor else 0,
        findings=tuple(finding.name for finding in doctor.findings) if doctor else (),
    )  # fmt: skip


def percent(value: float) -> str:
    """A share with its sign."""
    return f"{100 * value:+.1f} %"


def shown(one: Measured) -> str:
    """A line of the table."""
    low, middle, high = one.overhead
    cells = [
        one.model, f"{one.numel / 1e6:.2f} M", str(one.tensors), f"{one.ms:.1f}", str(one.steps), str(one.pairs),
        percent(middle), percent(one.of_least), f"{percent(low)} to {percent(high)}", percent(one.first),
        percent(one.middle),
        f"{100 * one.own:.1f} %", str(one.calls), f"{percent(one.noise[0])}, {percent(one.noise[1])}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


@click.command(help="Measures what the doctor costs a training loop on the CPU.")
@click.option("--steps", type=click.IntRange(min=50), help="Steps of each run.  [default: 500, or 2000 of small ones]")
@click.option("--pairs", type=click.IntRange(min=1), help="Of runs.  [default: 1 to 6]")
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
    pairs: int | None,
    chosen: tuple[str, ...],
    allocator: str,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    if allocator == "kept" and not KEPT.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    found = []
    for name in MODELS:
        if not chosen or name in chosen:
            usual = STEPS[name]
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(name, steps or usual[0], pairs or usual[1], Path(folder)))
            click.echo(f"{name}: {percent(found[-1].overhead[1])}", err=True)
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
