"""How much memory of the host a training takes under the doctor.

    python benchmarks/doctor/memory.py -o FILE              # all trainings
    python benchmarks/doctor/memory.py --rounds 1 --only folds

Each training runs in a process of its own: plainly, under ``anybatch doctor --no-ask`` and under ``anybatch doctor``,
by turns. Peak: the most memory that the process held (``ru_maxrss``), which includes Python and torch. Close: seconds
from the last line of the script to the end of its process.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIDES: dict[str, list[str] | None] = {"plain": None, "no questions": ["--no-ask"], "questions": []}
"""The options of the doctor; ``None`` where the script runs without it."""
COLUMNS = ("training", *(f"peak, {side}" for side in SIDES), *(f"close, {side}" for side in SIDES))
NOTES = (
    "Peak: ru_maxrss of the process in MiB, Python and torch included, and in brackets its share of the plain run's.",
    "Close: seconds from the last line of the script to the end of its process. Medians of the rounds.",
)


class Blocks(nn.Module):
    """A transformer of eight blocks of width 256 over 2000 tokens.

    Args:
        checkpointed: whether activations of each block are computed again in the backward.
    """

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.tokens, self.head, self.checkpointed = nn.Embedding(2000, 256), nn.Linear(256, 2000), checkpointed
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True) for _ in range(8)
        )

    def forward(self, ids: Tensor) -> Tensor:
        values: Tensor = self.tokens(ids)
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=False) if self.checkpointed else block(values)
        logits: Tensor = self.head(values).transpose(1, 2)
        return logits


def _train(model: nn.Module, draw: Callable[[], tuple[Tensor, Tensor]], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        inputs, targets = draw()
        made = model(inputs)
        loss = F.mse_loss(made, targets) if targets.is_floating_point() else F.cross_entropy(made, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(2000, (8, 128))
    return ids, ids


def transformer() -> None:
    """Blocks whose activations are kept."""
    _train(Blocks(checkpointed=False), _tokens, steps=6)


def checkpointed() -> None:
    """The same blocks, checkpointed."""
    _train(Blocks(checkpointed=True), _tokens, steps=6)


def large_input() -> None:
    """Few weights and a batch of 240 MB, which is the target as well."""
    rows = torch.randn(1_000_000, 60)
    _train(nn.Sequential(nn.Linear(60, 4), nn.Linear(4, 60)), lambda: (rows, rows), steps=6)


def folds() -> None:
    """Five models, one after another."""
    for _ in range(5):
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
        _train(model, lambda: (torch.randn(128, 1024), torch.randint(10, (128,))), steps=12)


TRAININGS: dict[str, Callable[[], None]] = {
    "transformer": transformer,
    "transformer, checkpointed": checkpointed,
    "input of 240 MB": large_input,
    "folds": folds,
}


def run(name: str, options: Sequence[str] | None) -> tuple[float, float]:
    """The peak in MiB and the seconds after the end of a training.

    Args:
        name: of the training.
        options: of the doctor; ``None`` to run without it.
    """
    doctor = [] if options is None else ["-m", "anybatch", "doctor", "-q", *options]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *doctor, __file__, "--train", name], stdout=output, env=os.environ | threads
        )
        _, status, usage = os.wait4(process.pid, 0)
        ended, process.returncode = time.time(), os.waitstatus_to_exitcode(status)
        output.seek(0)
        if process.returncode:
            raise RuntimeError(f"{name} ended with {process.returncode}; run it with --train to see why")
        return usage.ru_maxrss / 1024, ended - float(output.read().split()[-1])


def measured(name: str, rounds: int) -> dict[str, tuple[float, float]]:
    """For each side the medians of peak and seconds.

    Args:
        name: of the training.
        rounds: how often each side runs.
    """
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, options in SIDES.items():
            found[side].append(run(name, options))
    return {
        side: (statistics.median(one for one, _ in values), statistics.median(one for _, one in values))
        for side, values in found.items()
    }


def line(name: str, sides: dict[str, tuple[float, float]]) -> str:
    """A line of the table."""
    plain = sides["plain"][0]
    peaks = [f"{peak:.0f} ({peak / plain:.2f})" for peak, _ in sides.values()]
    return "| " + " | ".join([name, *peaks, *(f"{close:.1f}" for _, close in sides.values())]) + " |"


@click.command(help="Measures the memory of trainings under the doctor.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each side.")
@click.option("--only", multiple=True, type=click.Choice(list(TRAININGS)), help="Only this training.")
@click.option("--train", type=click.Choice(list(TRAININGS)), help="Run this training and nothing else.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(rounds: int, only: tuple[str, ...], train: str | None, json_path: Path | None, output: Path | None) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    if train is not None:
        torch.manual_seed(0)
        TRAININGS[train]()
        click.echo(time.time())
        return
    rows = {name: measured(name, rounds) for name in only or TRAININGS}
    lines = ["# Memory under the doctor", "", f"- device: {platform.machine()} CPU, one thread"]
    lines += [f"- python: {platform.python_version()}", f"- torch: {torch.__version__}"]
    lines += [f"- date: {dt.date.today().isoformat()}"]
    lines += [f"- command: {shlex.join(['python', 'benchmarks/doctor/memory.py', *sys.argv[1:]])}", "", *NOTES, ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    text = "\n".join([*lines, *[line(name, sides) for name, sides in rows.items()]]) + "\n"
    click.echo(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
