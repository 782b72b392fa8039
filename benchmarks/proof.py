"""What it costs that a step proves itself: its first call beside later ones, and these beside a step without proof.

    python benchmarks/proof.py                       # prints a table
    python benchmarks/proof.py --quick

See benchmarks/README.md.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import click
import torch
from common import facts, markdown, quartiles, seconds, write_json, write_text
from dropout import SIZES, Size, transformer
from torch import nn
from torch.nn import functional as F

import anybatch

NOTES = (
    "Proof: the time of the first step with verify='first' less that of the first step with verify='off', in",
    "micro-batches of that step, each with its own round of both; a forward and a backward of one micro-batch is 1.",
    "First / later: the time of the first step over that of a later one, with the proof and without. Afterwards: the",
    "time of later steps with verify='first' over the same with 'off', 1.00 but for noise. The process is warm: its",
    "very first step imports the proof, too.",
)


LARGE = Size("transformer, 16 samples", transformer, (64,), 16, 4)
"""A micro-batch that takes as long as those that people train with; beside it what a proof takes at least is little."""


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def step_of(model: nn.Module, rows: int, verify: Any) -> anybatch.TrainStep:
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    return anybatch.TrainStep(own, loss_fn, optimizer, micro_batch_size=rows, verify=verify)


def measured(size: Size, rate: float, rounds: int, device: torch.device) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    model = size.build().to(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = rate
    inputs, targets = size.data()
    batch = {"x": inputs.to(device), "y": targets.to(device)}
    found: dict[str, list[float]] = {name: [] for name in ("proof", "first", "without", "afterwards")}
    for number in range(rounds + 1):
        steps = {
            verify: step_of(model, size.rows, verify) for verify in (("first", "off"), ("off", "first"))[number % 2]
        }
        first = {verify: seconds(functools.partial(step, batch), device) for verify, step in steps.items()}
        later = {verify: min(seconds(functools.partial(step, batch), device) for _ in range(3)) for verify, step in
                 [*steps.items()]}  # fmt: skip
        if number:  # the first round is there to warm up
            found["proof"].append((first["first"] - first["off"]) / (later["off"] / size.micro_batches))
            found["first"].append(first["first"] / later["first"])
            found["without"].append(first["off"] / later["off"])
            found["afterwards"].append(later["first"] / later["off"])
    low, middle, high = quartiles(found["proof"])
    return {
        "model": size.name, "dropout": rate, "micro-batches": size.micro_batches, "samples": size.rows,
        "side": "proof", "proof": middle, "lower quartile": low, "upper quartile": high, "rounds": rounds,
        **{name: quartiles(found[name])[1] for name in ("first", "without", "afterwards")},
    }  # fmt: skip


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "model": row["model"],
        "dropout": f"{row['dropout']:g}",
        "micro-batches": f"{row['micro-batches']} of {row['samples']}",
        "proof, in micro-batches": f"{row['proof']:.2f}",
        "quartiles": f"{row['lower quartile']:.2f} to {row['upper quartile']:.2f}",
        "first / later": f"{row['first']:.2f}",
        "without proof": f"{row['without']:.2f}",
        "afterwards": f"{row['afterwards']:.3f}",
    }


@click.command(help="Measures what it costs that a step proves itself.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--quick", is_flag=True, help="Fewer rounds; for a first look.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds for each row.")
@click.option("--size", "chosen", multiple=True, type=click.Choice([size.name for size in (*SIZES, LARGE)]))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    device: str, quick: bool, rounds: int | None, chosen: tuple[str, ...], json_path: Path | None, output: Path | None
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    where = torch.device(device)
    rows = []
    for size in [size for size in (*SIZES, LARGE) if not chosen or size.name in chosen]:
        for rate in (0.0, 0.1):
            rows.append(measured(size, rate, rounds or (5 if quick else 40), where))
            click.echo(f"{size.name}, dropout {rate:g}: {rows[-1]['proof']:.2f} micro-batches", err=True)
    known = {name: value for name, value in facts(where).items() if name not in ("accelerate", "lightning")}
    text = markdown("What the proof of the first split costs", known, NOTES, [shown(row) for row in rows])
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, rows)


if __name__ == "__main__":
    main()
