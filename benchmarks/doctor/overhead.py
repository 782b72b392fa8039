"""What the doctor costs a training loop.

    python benchmarks/doctor/overhead.py                   # 500 steps of each model, about ten minutes
    python benchmarks/doctor/overhead.py --steps 100 --model MLP

Two copies of a model train in one process, in turn, in blocks of 25 steps whose order alternates: one with the doctor
attached for the block, one without. A block holds one step of every 25th, which the doctor measures; the first block
holds the first ten, which it measures all. See benchmarks/README.md.
"""

from __future__ import annotations

import copy
import datetime as dt
import gc
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.records.events import Ended

BLOCK = 25
COLUMNS = ("model", "numbers", "tensors", "ms a step", "overhead", "first block", "later blocks", "quartiles", "noise")
NOTES = (
    "Overhead: what the doctor adds to all steps together, the later blocks counted with their median. First block:",
    "what it adds to the first 25 steps, attaching included. Later blocks: median and quartiles of what it adds to a",
    "block of 25 steps. Noise: the same median for a second copy that trains without the doctor; it would be zero",
    "on a quiet machine.",
)


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


class Training:
    """A copy of a model with its optimizer and its batch."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        self.model = copy.deepcopy(model)
        self.inputs, self.labels = batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def steps(self, count: int) -> None:
        """Some steps of an ordinary loop."""
        for _ in range(count):
            loss = F.cross_entropy(self.model(self.inputs), self.labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def block(self, doctor: anybatch.Doctor | None, count: int = BLOCK) -> float:
        """CPU seconds of a block; attaching and detaching count."""
        start = time.process_time()
        if doctor is not None:
            doctor.attach()
        self.steps(count)
        if doctor is not None:
            doctor.detach()
        return time.process_time() - start


@dataclass(frozen=True)
class Measured:
    """One model.

    Args:
        model: its name.
        numel: of all parameters.
        tensors: how many there are.
        ms: a step without the doctor, the median of the blocks.
        overhead: added to all steps, as a share.
        first: added to the first block.
        later: added to a later block: lower quartile, median, upper quartile.
        noise: the median of what a second copy without the doctor adds.
        steps: how many were timed.
        thinned: how often the doctor made its samples rarer.
        findings: what it said in the end.
    """

    model: str
    numel: int
    tensors: int
    ms: float
    overhead: float
    first: float
    later: tuple[float, float, float]
    noise: float
    steps: int
    thinned: int
    findings: tuple[str, ...]


def measure(name: str, steps: int) -> Measured:
    """Times one model with and without the doctor.

    Args:
        name: of the model.
        steps: of each copy, rounded up to whole blocks and at least two of them.

    Returns:
        What was found.
    """
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, batch = build(), draw()
    own, plain, again = (Training(model, batch) for _ in range(3))
    doctor = anybatch.Doctor(own.model, own.optimizer)
    warm = Training(model, batch)
    warm.steps(5)
    sides: list[tuple[Training, anybatch.Doctor | None]] = [(own, doctor), (plain, None), (again, None)]
    times: list[list[float]] = [[], [], []]
    for number in range(max(2, -(-steps // BLOCK))):
        gc.collect()
        order = (0, 1, 2) if number % 2 else (2, 1, 0)
        for index in order:
            training, attached = sides[index]
            times[index].append(training.block(attached))
    doctor.close()
    run = doctor.run
    added = [with_it / without - 1 for with_it, without in zip(times[0], times[1], strict=True)]
    noise = [with_it / without - 1 for with_it, without in zip(times[2], times[1], strict=True)]
    middle = statistics.median(times[1][1:])
    first = (times[0][0] - middle) / middle
    later = quartiles(added[1:])
    parameters = list(model.parameters())
    return Measured(
        model=name, numel=sum(p.numel() for p in parameters), tensors=len(parameters), ms=1e3 * middle / BLOCK,
        overhead=(first + later[1] * (len(added) - 1)) / len(added), first=first, later=later,
        noise=statistics.median(noise[1:]), steps=len(added) * BLOCK,
        thinned=sum(ended.thinned for ended in run.of(Ended)),
        findings=tuple(finding.name for finding in doctor.findings),
    )  # fmt: skip


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Gives the lower quartile, the median and the upper quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def percent(value: float) -> str:
    """A share with its sign."""
    return f"{100 * value:+.1f} %"


def shown(one: Measured) -> str:
    """A line of the table."""
    low, middle, high = one.later
    cells = [
        one.model, f"{one.numel / 1e6:.2f} M", str(one.tensors), f"{one.ms:.1f}", percent(one.overhead),
        percent(one.first), percent(middle), f"{percent(low)} to {percent(high)}", percent(one.noise),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


@click.command(help="Measures what the doctor costs a training loop on the CPU.")
@click.option("--steps", type=click.IntRange(min=50), default=500, show_default=True, help="Steps of each copy.")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(MODELS)), help="Only this model.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(steps: int, chosen: tuple[str, ...], json_path: Path | None, output: Path | None) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    found = []
    for name in MODELS:
        if not chosen or name in chosen:
            found.append(measure(name, steps))
            click.echo(f"{name}: {percent(found[-1].overhead)}", err=True)
    lines = ["# What the doctor costs", ""]
    lines += [f"- device: {platform.machine()} CPU, one thread, CPU time"]
    lines += [f"- python: {platform.python_version()}", f"- torch: {torch.__version__}"]
    lines += [f"- date: {dt.date.today().isoformat()}"]
    lines += [f"- command: {shlex.join(['python', 'benchmarks/doctor/overhead.py', *sys.argv[1:]])}"]
    lines += [f"- steps: {found[0].steps} of each copy", "", *NOTES, ""]
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
