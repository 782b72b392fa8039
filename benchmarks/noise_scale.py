"""What measuring the gradient noise scale costs a step, and how near the truth it is.

    python benchmarks/noise_scale.py                 # prints two tables
    python benchmarks/noise_scale.py --quick

Cost: a TrainStep with NoiseScale beside the same step without, in the same round. Accuracy: at fixed weights, against
the covariance of the gradients of all samples. See benchmarks/README.md.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from common import facts, markdown, quartiles, seconds, write_json, write_text
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

BUILDS = 5
AGAIN = "not measured, again"
SIDES: dict[str, int | None] = {"every 16th batch": 16, "every batch": 1, AGAIN: None}
COST_NOTES = (
    "Ratio: time of 16 updates with NoiseScale over 16 without, in the same round; under 1 is faster. Not measured,",
    "again: a second copy, 1.00 but for noise. Peak: the most bytes of live tensors in a measured step, over those of",
    "one that is not.",
)
ACCURACY_NOTES = (
    "Weights are fixed. Each history is some measurements of random batches of 64 samples, drawn from 4096 with",
    "replacement, in micro-batches of the sizes named. Value: the median over histories, over the truth, which is",
    "computed from all 4096 gradients; spread: the quartiles of it. Covered: the share of histories whose interval",
    "of 90 % holds the truth. Usual: the formula for equal micro-batches on the same norms, averaged in the same way.",
)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def deep() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(200):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 10))


@dataclass(frozen=True)
class Size:
    """A model and the shape of its batches.

    Args:
        name: in the table.
        build: makes the model.
        width: of an input.
        rows: samples of a micro-batch.
        micro_batches: of a logical batch.
    """

    name: str
    build: Callable[[], nn.Module]
    width: int
    rows: int
    micro_batches: int


SIZES = (
    Size("MLP", perceptron, 784, 64, 8),
    Size("200 layers", deep, 16, 8, 4),
    Size("tiny MLP", tiny, 64, 16, 8),
)
CUTS = {"16 16 16 16": (16, 16, 16, 16), "3 13 1 15 8 8 11 5": (3, 13, 1, 15, 8, 8, 11, 5)}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Side:
    """One copy of a model with its step.

    Args:
        model: is copied.
        size: its shapes.
        every: how often it is measured; ``None`` for never.
    """

    def __init__(self, model: nn.Module, size: Size, every: int | None) -> None:
        self.model = copy.deepcopy(model)
        rows = size.rows * size.micro_batches
        home = next(self.model.parameters()).device
        self.batch = {"x": torch.randn(rows, size.width, device=home), "y": torch.randint(10, (rows,), device=home)}
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.step = anybatch.TrainStep(self.model, loss_fn, optimizer, micro_batch_size=size.rows, clip_norm=1.0)
        self.noise = None if every is None else anybatch.NoiseScale(self.step, every=every)

    def sixteen(self) -> None:
        """Sixteen updates."""
        for _ in range(16):
            self.step(self.batch)


def cost(size: Size, name: str, pairs: int, device: torch.device) -> dict[str, Any]:
    """Times one side beside the same step without measuring."""
    ratios, own_times, their_times = [], [], []
    peaks = [1.0, 1.0]
    for number in range(min(BUILDS, pairs)):
        torch.manual_seed(number)
        model = size.build().to(device)
        own, theirs = Side(model, size, SIDES[name]), Side(model, size, None)
        for side in (own, theirs):
            side.sixteen()
        gc.collect()
        for pair in range(math.ceil(pairs / BUILDS)):
            order = (own, theirs) if pair % 2 else (theirs, own)
            times = {side: seconds(functools.partial(side.sixteen), device) for side in order}
            ratios.append(times[own] / times[theirs])
            own_times.append(times[own])
            their_times.append(times[theirs])
        if number == 0 and device.type == "cpu":
            peaks = [float(anybatch.measure(side.sixteen, model=side.model).peak_bytes) for side in (own, theirs)]
    low, middle, high = quartiles(ratios)
    return {
        "model": size.name, "side": name, "ratio": middle, "lower quartile": low, "upper quartile": high,
        "pairs": len(ratios), "ms": quartiles(own_times)[1] * 1e3 / 16,
        "ms without": quartiles(their_times)[1] * 1e3 / 16, "peak ratio": peaks[0] / peaks[1],
    }  # fmt: skip


def problem() -> tuple[nn.Module, dict[str, Tensor], float]:
    """A network at some weights, its data in float64, and the noise scale of all of its samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 10)).double()
    x = torch.randn(4096, 16, dtype=torch.float64)
    data = {"x": x, "y": (x @ torch.randn(16, 10, dtype=torch.float64)).argmax(1)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = anybatch.TrainStep(model, loss_fn, optimizer)
    for _ in range(20):
        step(data)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(values, data["x"], data["y"])
    gradients = torch.cat([gradient.flatten(1) for gradient in each.values()], 1)
    signal = gradients.mean(0).square().sum()
    trace = gradients.square().sum(1).mean() - signal  # drawn with replacement
    return model, data, float(trace / signal)


class Usual:
    """The formula for equal micro-batches, averaged as NoiseScale does it."""

    def __init__(self) -> None:
        self.trace = self.signal = 0.0

    def update(self, norms_sq: Sequence[float], counts: Sequence[float], total: float) -> None:
        """Takes a measurement."""
        large, small, mean = sum(counts), sum(counts) / len(counts), sum(norms_sq) / len(norms_sq)
        self.trace = 0.9 * self.trace + (mean - total) / (1 / small - 1 / large)
        self.signal = 0.9 * self.signal + (large * total - small * mean) / (large - small)


def accuracy(name: str, length: int, histories: int) -> dict[str, Any]:
    """Histories of measurements against the truth."""
    model, data, truth = problem()
    values, usual, covered = [], [], 0
    for _ in range(histories):
        noise, other = anybatch.NoiseScale(None), Usual()
        for _ in range(length):
            rows = torch.randint(4096, (64,))
            gradients = []
            for part in rows.split(CUTS[name]):
                loss = loss_fn(model, {key: tensor[part] for key, tensor in data.items()})
                found = torch.autograd.grad(loss, list(model.parameters()))
                gradients.append(torch.cat([gradient.flatten() for gradient in found]))
            counts = CUTS[name]
            whole = sum(count / 64 * gradient for count, gradient in zip(counts, gradients, strict=True))
            norms = [float(gradient.square().sum()) for gradient in gradients]
            total = float(torch.as_tensor(whole).square().sum())
            noise.update(norms, counts, total)
            other.update(norms, counts, total)
        low, high = noise.interval
        covered += low <= truth <= high
        values.append((noise.value or 0.0) / truth)
        usual.append(other.trace / other.signal / truth)
    low, middle, high = quartiles(values)
    return {
        "micro-batches": name, "measurements": length, "value": middle, "lower quartile": low, "upper quartile": high,
        "covered": covered / histories, "usual": quartiles(usual)[1], "histories": histories, "truth": truth,
    }  # fmt: skip


def shown_cost(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "model": row["model"],
        "side": row["side"],
        "ratio (median)": f"{row['ratio']:.3f}",
        "quartiles": f"{row['lower quartile']:.3f} to {row['upper quartile']:.3f}",
        "pairs": str(row["pairs"]),
        "ms an update": f"{row['ms']:.3f}",
        "ms without": f"{row['ms without']:.3f}",
        "peak ratio": f"{row['peak ratio']:.4f}",
    }


def shown_accuracy(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "micro-batches": row["micro-batches"],
        "measurements": str(row["measurements"]),
        "value / truth": f"{row['value']:.3f}",
        "spread": f"{row['lower quartile']:.3f} to {row['upper quartile']:.3f}",
        "covered": f"{row['covered']:.3f}",
        "usual / truth": f"{row['usual']:.2f}",
        "histories": str(row["histories"]),
        "truth": f"{row['truth']:.2f}",
    }


@click.command(help="Measures what the gradient noise scale costs, and how near the truth it is.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda, for the cost.")
@click.option("--quick", is_flag=True, help="Few pairs and histories; for a first look.")
@click.option("--pairs", type=click.IntRange(min=1), help="Pairs for each side.")
@click.option("--histories", type=click.IntRange(min=1), help="Histories for each row of the accuracy.")
@click.option("--size", "chosen", multiple=True, type=click.Choice([size.name for size in SIZES]))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the tables here, as Markdown.")
def main(
    device: str,
    quick: bool,
    pairs: int | None,
    histories: int | None,
    chosen: tuple[str, ...],
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the tables and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    where = torch.device(device)
    costs = []
    for size in SIZES:
        if chosen and size.name not in chosen:
            continue
        for name in SIDES:
            costs.append(cost(size, name, pairs or (5 if quick else 40), where))
            click.echo(f"{size.name}, {name}: {costs[-1]['ratio']:.3f}", err=True)
    torch.manual_seed(1)
    near = [accuracy(name, length, histories or (10 if quick else 200)) for name in CUTS for length in (5, 20)]
    known = {name: value for name, value in facts(where).items() if name not in ("accelerate", "lightning")}
    text = markdown("What the noise scale costs", known, COST_NOTES, [shown_cost(row) for row in costs])
    rows = [shown_accuracy(row) for row in near]
    text += "\n" + markdown("How near the noise scale is", {}, ACCURACY_NOTES, rows)
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, [*costs, *near])


if __name__ == "__main__":
    main()
