"""What the doctor adds to the first steps of models of many layers.

    python benchmarks/doctor/starting.py -o FILE

Each round trains every model twice for some steps, without a doctor and with one that is attached before the first
step, in one process. Times are CPU seconds of the process: the difference in the first step, with attaching, in the
second one and in a later one that is still measured, and what it takes to judge the record at the end.
"""

from __future__ import annotations

import datetime as dt
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Doctor

STEPS = 4
COLUMNS = ("model", "first step", "second", "fourth", "judging", "a plain step")
NOTES = (
    "CPU seconds that the doctor adds to a step, as median and in brackets the quartiles of the rounds; those of",
    "judging the record at the end, and of a step without the doctor.",
)


class Residual(nn.Module):
    """Layers that are called one by one.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(size))

    def forward(self, x: Tensor) -> Tensor:
        return one_by_one(self.layers, x)


def one_by_one(layers: nn.ModuleList | nn.Sequential, x: Tensor) -> Tensor:
    """Calls each layer itself."""
    for layer in layers:
        x = x + 0.01 * layer(x)
    return x


def chain(size: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "1000 layers in a module, called one by one": (lambda: Residual(1000), lambda model, x: model(x)),
    "1000 layers that the script calls one by one": (lambda: chain(1000), one_by_one),  # type: ignore[dict-item]
    "5000 layers in a Sequential": (lambda: chain(5000), lambda model, x: model(x)),
}


def times(name: str, *, watched: bool) -> list[float]:
    """CPU seconds of each step, and of judging the record.

    Args:
        name: of the model.
        watched: whether a doctor is attached.
    """
    torch.manual_seed(0)
    build, run = MODELS[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found, start = list[float](), time.process_time()
    doctor = Doctor(ask=False) if watched else None
    if doctor is not None:
        doctor.attach()
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(run(model, torch.ones(4, 4)), torch.zeros(4, 4)).backward()
        optimizer.step()
        now = time.process_time()
        found.append(now - start)
        start = now
    if doctor is not None:
        doctor.close()
        assert not doctor.failure, doctor.failure
        assert isinstance(doctor.findings, tuple)
    return [*found, time.process_time() - start]


def several(values: Sequence[float]) -> str:
    """A median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@click.command(help="Measures what the doctor adds to the first steps of models of many layers.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=2))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(rounds: int, output: Path | None) -> None:
    """Measures, prints the table and writes the file."""
    torch.set_num_threads(1)
    for name in MODELS:
        times(name, watched=True)  # what is loaded at first use
    lines = ["# What the doctor adds to the first steps", ""]
    lines += [f"- device: {platform.machine()} CPU, one thread, CPU time"]
    lines += [f"- python: {platform.python_version()}", f"- torch: {torch.__version__}"]
    lines += [f"- date: {dt.date.today().isoformat()}"]
    lines += [f"- command: {shlex.join(['python', 'benchmarks/doctor/starting.py', *sys.argv[1:]])}", "", *NOTES, ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for name in MODELS:
        pairs = [(times(name, watched=False), times(name, watched=True)) for _ in range(rounds)]
        added = [[own[step] - plain[step] for plain, own in pairs] for step in (0, 1, 3)]
        cells = [*map(several, added), several([own[-1] for _, own in pairs]), several([one[1] for one, _ in pairs])]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        click.echo(lines[-1], err=True)
    text = "\n".join(lines) + "\n"
    click.echo(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
