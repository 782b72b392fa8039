"""What dropout costs whose masks do not depend on the split into micro-batches.

    python benchmarks/dropout.py                     # prints a table
    python benchmarks/dropout.py --quick

Each side is the forward and backward of one logical batch in micro-batches, by hand; one of them runs inside of
SampleDropout. See benchmarks/README.md.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from common import facts, markdown, quartiles, seconds, write_json, write_text
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.tensors.dropouts import SampleDropout

RATE = 0.1
BUILDS = 5
SPLIT, AGAIN, OFF = "SampleDropout", "torch's dropout again", "SampleDropout, rates 0"
SIDES = (SPLIT, AGAIN, OFF)
NOTES = (
    "Ratio: time of the forwards and backwards of one logical batch over the same with torch's own dropout beside it,",
    "in the same round; under 1 is faster. Peak: the same for the most bytes of live tensors, what operations allocate",
    "within themselves left out. Torch's dropout again: a second copy, 1.00 but for noise. Rates 0: no side drops.",
)


class Attention(nn.Module):
    """Attention whose weights are dropped out, written by hand: ``[B, T, width]`` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.of_weights, self.of_output = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.project_in(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.of_weights(torch.softmax(query @ key.transpose(2, 3) * query.shape[-1] ** -0.5, -1))
        out: Tensor = self.of_output(self.project_out((weights @ value).transpose(1, 2).reshape(rows, length, width)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block with dropout in the three usual places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(RATE))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


def perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for width in (784, 512):
        layers += [nn.Linear(width, 512), nn.ReLU(), nn.Dropout(RATE)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def tiny() -> nn.Module:
    layers: list[nn.Module] = []
    for width in (64, 128):
        layers += [nn.Linear(width, 128), nn.ReLU(), nn.Dropout(RATE)]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Dropout(RATE)]
    return nn.Sequential(*layers, nn.Dropout2d(RATE), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def transformer() -> nn.Module:
    blocks = [Block(128, 4) for _ in range(4)]
    return nn.Sequential(nn.Embedding(1000, 128), nn.Dropout(RATE), *blocks, nn.LayerNorm(128), nn.Linear(128, 1000))


@dataclass(frozen=True)
class Size:
    """A model and its data.

    Args:
        name: in the table.
        build: makes the model.
        shape: of a sample; of tokens if it is empty but for their number.
        rows: samples of a micro-batch.
        micro_batches: of a logical batch.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    micro_batches: int

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a logical batch."""
        count = self.rows * self.micro_batches
        if self.name.startswith("transformer"):
            tokens = torch.randint(1000, (count, *self.shape))
            return tokens, tokens.roll(-1, 1)
        return torch.randn(count, *self.shape), torch.randint(10, (count,))


SIZES = (
    Size("MLP", perceptron, (784,), 64, 8),
    Size("small conv net", convolutions, (3, 16, 16), 16, 4),
    Size("transformer", transformer, (64,), 4, 4),
    Size("tiny MLP", tiny, (64,), 16, 8),
)


class Side:
    """One copy of a model and its logical batch.

    Args:
        model: is copied.
        data: inputs and targets.
        rows: samples of a micro-batch.
        splits: whether the masks are those of SampleDropout.
    """

    def __init__(self, model: nn.Module, data: tuple[Tensor, Tensor], rows: int, *, splits: bool) -> None:
        self.model, self.data, self.rows, self.splits = copy.deepcopy(model), data, rows, splits

    def step(self) -> None:
        """The gradient of the logical batch."""
        inputs, targets = self.data
        with SampleDropout(int(torch.randint(2**62, ())), [self.model]) if self.splits else nullcontext() as masks:
            for start in range(0, len(inputs), self.rows):
                if masks is not None:
                    masks.begin(range(start, min(start + self.rows, len(inputs))))
                output = self.model(inputs[start : start + self.rows])
                target = targets[start : start + self.rows]
                loss = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum") / targets.numel()
                loss.backward()
        self.model.zero_grad()

    def steps(self, count: int) -> None:
        """Several of them."""
        for _ in range(count):
            self.step()


def build(size: Size, name: str, device: torch.device, number: int) -> tuple[Side, Side]:
    """The side and torch's own dropout beside it."""
    torch.manual_seed(number)
    model = size.build()
    if name == OFF:
        for module in model.modules():
            if isinstance(module, nn.Dropout | nn.Dropout2d):
                module.p = 0.0
    inputs, targets = size.data()
    data = inputs.to(device), targets.to(device)
    model.to(device)
    return Side(model, data, size.rows, splits=name != AGAIN), Side(model, data, size.rows, splits=False)


def measured(size: Size, name: str, pairs: int, block: float, device: torch.device) -> dict[str, Any]:
    """One row: the median of the ratios of alternated pairs, shared out among several builds."""
    ratios, own_times, their_times, peaks = [], [], [], []
    for number in range(min(BUILDS, pairs)):
        own, theirs = build(size, name, device, number)
        for side in (own, theirs):
            side.steps(2)
        count = max(1, round(block / max(1e-9, seconds(theirs.step, device))))
        gc.collect()
        for pair in range(pairs // BUILDS + (number < pairs % BUILDS) or 1):
            order = (own, theirs) if pair % 2 else (theirs, own)
            times = {side: seconds(functools.partial(side.steps, count), device) / count for side in order}
            ratios.append(times[own] / times[theirs])
            own_times.append(times[own])
            their_times.append(times[theirs])
        if number == 0:
            peaks = [anybatch.measure(side.step, model=side.model).peak_bytes for side in (own, theirs)]
    low, middle, high = quartiles(ratios)
    return {
        "model": size.name, "side": name, "ratio": middle, "lower quartile": low, "upper quartile": high,
        "pairs": len(ratios), "ms": quartiles(own_times)[1] * 1e3, "ms with torch's": quartiles(their_times)[1] * 1e3,
        "peak ratio": peaks[0] / peaks[1], "peak bytes": peaks[0],
    }  # fmt: skip


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "model": row["model"],
        "side": row["side"],
        "ratio (median)": f"{row['ratio']:.3f}",
        "quartiles": f"{row['lower quartile']:.3f} to {row['upper quartile']:.3f}",
        "pairs": str(row["pairs"]),
        "ms": f"{row['ms']:.3f}",
        "ms with torch's": f"{row['ms with torch' + chr(39) + 's']:.3f}",
        "peak ratio": f"{row['peak ratio']:.3f}",
    }


def run_all(sizes: Sequence[Size], names: Sequence[str], pairs: int, block: float, device: torch.device) -> Any:
    """All rows, unrounded."""
    rows = []
    for size in sizes:
        for name in names:
            rows.append(measured(size, name, pairs, block, device))
            click.echo(f"{size.name}, {name}: {rows[-1]['ratio']:.3f}", err=True)
    return rows


@click.command(help="Measures what dropout costs whose masks do not depend on the split.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--quick", is_flag=True, help="Fewer and shorter pairs; for a first look.")
@click.option("--pairs", type=click.IntRange(min=1), help="Pairs for each side.")
@click.option("--block", type=float, help="About how many seconds one block of steps takes.")
@click.option("--size", "chosen", multiple=True, type=click.Choice([size.name for size in SIZES]))
@click.option("--side", "names", multiple=True, type=click.Choice(list(SIDES)))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    device: str,
    quick: bool,
    pairs: int | None,
    block: float | None,
    chosen: tuple[str, ...],
    names: tuple[str, ...],
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    where = torch.device(device)
    sizes = [size for size in SIZES if not chosen or size.name in chosen]
    rows = run_all(sizes, names or SIDES, pairs or (5 if quick else 40), block or (0.02 if quick else 0.05), where)
    known = {name: value for name, value in facts(where).items() if name not in ("accelerate", "lightning")}
    text = markdown("Dropout that does not depend on the split", known, NOTES, [shown(row) for row in rows])
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, rows)


if __name__ == "__main__":
    main()
