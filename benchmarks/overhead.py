"""What a step costs beside a hand-written accumulation loop, with clipping and AdamW.

    python benchmarks/overhead.py                        # on the CPU, about five minutes
    python benchmarks/overhead.py --quick                # about a minute
    python benchmarks/overhead.py --device cuda --json overhead.json -o overhead.md

Every side is measured directly beside the hand-written loop, in pairs of blocks of updates whose order alternates,
in turn in one process. The figure is the median of the ratios of the pairs: CPU time with one thread on the CPU, wall
time between two synchronizations on CUDA. ``hand-written again`` is the same loop once more: how far it is from 1.00
is what the measurement can't tell.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
import peers
import torch
from common import (
    Again,
    Batch,
    cut_rows,
    facts,
    loader,
    markdown,
    missing,
    quartiles,
    seconds,
    to_device,
    write_json,
    write_text,
)
from sizes import SIZES, Size
from torch import nn

import anybatch

CLIP_NORM = 1.0
ENDLESS = 10**9
BUILDS = 5
WARM_UP = 10  # updates; a split is proved before the first one, and again before the ninth
HAND = "hand-written"
FEEDS = ("loaders", "bare")
NOTES = (
    "Ratio: time of the side over time of the hand-written loop beside it; under 1 is faster.",
    "loaders: each side is fed by its own DataLoader, anybatch with one logical batch an item, the others with",
    "micro-batches. bare: the step alone on tensors already there, for the others already cut into micro-batches.",
)
TARGETS = {"loaders": "<= 1.00", "bare": "<= 1.03"}


class Pair(NamedTuple):
    """Seconds an update of a side, and of the hand-written loop beside it."""

    own: float
    by_hand: float


class Side(Protocol):
    """Anything that makes updates."""

    def run(self, steps: int) -> None:
        """Makes ``steps`` updates."""


@dataclass(frozen=True)
class Setup:
    """What one side needs: its own copy of the model and its own feeds."""

    size: Size
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rows: Batch
    feed: str
    device: torch.device

    @property
    def moves(self) -> bool:
        """Whether the loop has to move what its loader yields."""
        return self.feed == "loaders" and self.device.type == "cuda"

    def batches(self, samples: int) -> Iterable[Batch]:
        """An endless feed of batches of so many samples: a loader, or tensors that are already there."""
        if self.feed == "loaders":
            return loader(self.rows, samples, length=ENDLESS, pin=self.device.type == "cuda")
        return Again(cut_rows(to_device(self.rows, self.device), samples))


class Hand:
    """The loop that people write, over micro-batches of equal size."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.batches = iter(setup.batches(setup.size.micro))

    def run(self, steps: int) -> None:
        """Makes ``steps`` updates."""
        model, optimizer = self.setup.model, self.setup.optimizer
        loss_fn, count = self.setup.size.loss_fn, self.setup.size.micro_batches
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(count):
                batch = next(self.batches)
                if self.setup.moves:
                    batch = to_device(batch, self.setup.device)
                loss = loss_fn(model, batch) / count
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()


class Backward:
    """``anybatch.backward`` with the optimizer's calls by hand."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.batches: Iterator[Batch] = iter(setup.batches(setup.size.logical))

    def run(self, steps: int) -> None:
        """Makes ``steps`` updates."""
        model, optimizer, size = self.setup.model, self.setup.optimizer, self.setup.size
        for _ in range(steps):
            optimizer.zero_grad()
            anybatch.backward(model, size.loss_fn, next(self.batches), micro_batch_size=size.micro)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()


class Step:
    """``anybatch.TrainStep``."""

    def __init__(self, setup: Setup) -> None:
        self.batches: Iterator[Batch] = iter(setup.batches(setup.size.logical))
        self.step = anybatch.TrainStep(
            setup.model,
            setup.size.loss_fn,
            setup.optimizer,
            micro_batch_size=setup.size.micro,
            clip_norm=CLIP_NORM,
        )

    def run(self, steps: int) -> None:
        """Makes ``steps`` updates."""
        for _ in range(steps):
            self.step(next(self.batches))


def _peer(loop: Any) -> Callable[[Setup], Side]:
    def build(setup: Setup) -> Side:
        side: Side = loop(
            setup.model,
            setup.size.loss_fn,
            setup.optimizer,
            setup.batches(setup.size.micro),
            window=setup.size.micro_batches,
            clip_norm=CLIP_NORM,
            device=setup.device,
        )
        return side

    return build


SIDES: dict[str, Callable[[Setup], Side]] = {
    "hand-written again": Hand,
    "anybatch.backward": Backward,
    "anybatch.TrainStep": Step,
    "Accelerate": _peer(peers.AccelerateLoop),
    "Lightning": _peer(peers.LightningLoop),
}


def build_sides(size: Size, feed: str, device: torch.device, names: Sequence[str], turn: int = 0) -> dict[str, Side]:
    """Builds the hand-written loop and the named sides, each with its own copy of one model.

    Args:
        size: model and data.
        feed: ``"loaders"`` or ``"bare"``.
        device: where the models lie.
        names: keys of ``SIDES``.
        turn: by how many places the order is rotated in which they are built.

    Returns:
        The sides by name.
    """
    torch.manual_seed(0)
    model, rows = size.build().to(device), size.rows(size.logical * size.windows)
    order = [HAND, *names]
    order = order[turn % len(order) :] + order[: turn % len(order)]
    sides: dict[str, Side] = {}
    for name in order:
        own = copy.deepcopy(model)
        # A rate this small keeps the work the same from the first block to the last.
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-5)
        sides[name] = {HAND: Hand, **SIDES}[name](Setup(size, own, optimizer, rows, feed, device))
    return sides


def measure(sides: dict[str, Side], pairs: int, block_seconds: float, device: torch.device) -> dict[str, list[Pair]]:
    """Measures every side in pairs with the hand-written loop.

    Args:
        sides: as ``build_sides`` returns them.
        pairs: pairs for each side.
        block_seconds: about how long one block of updates takes.
        device: decides which clock counts.

    Returns:
        The pairs of each side but the hand-written one.
    """
    for side in sides.values():
        side.run(WARM_UP)
    hand = sides[HAND]
    steps = max(1, round(block_seconds / seconds(lambda: hand.run(3), device) * 3))
    gc.collect()
    gc.freeze()
    found: dict[str, list[Pair]] = {name: [] for name in sides if name != HAND}
    for turn in range(pairs):
        for name, took in found.items():
            side = sides[name]
            if turn % 2 == 0:
                by_hand, own = (seconds(lambda one=one: one.run(steps), device) for one in (hand, side))  # type: ignore[misc]
            else:
                own, by_hand = (seconds(lambda one=one: one.run(steps), device) for one in (side, hand))  # type: ignore[misc]
            took.append(Pair(own / steps, by_hand / steps))
    gc.unfreeze()
    return found


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """One row for the pairs of one side."""
    low, middle, high = quartiles([pair.own / pair.by_hand for pair in pairs])
    return {
        "ratio": middle,
        "lower quartile": low,
        "upper quartile": high,
        "pairs": len(pairs),
        "ms an update": quartiles([pair.own for pair in pairs])[1] * 1e3,
        "ms an update by hand": quartiles([pair.by_hand for pair in pairs])[1] * 1e3,
    }


def close(sides: dict[str, Side]) -> None:
    """Ends the sides that live in a thread."""
    for side in sides.values():
        if isinstance(side, peers.LightningLoop):
            side.close()


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "feed": row["feed"],
        "size": row["size"],
        "side": row["side"],
        "ratio (median)": f"{row['ratio']:.3f}",
        "quartiles": f"{row['lower quartile']:.3f} to {row['upper quartile']:.3f}",
        "pairs": str(row["pairs"]),
        "ms an update": f"{row['ms an update']:.3f}",
        "ms by hand": f"{row['ms an update by hand']:.3f}",
        "target": row["target"],
    }


def measure_builds(
    size: Size, feed: str, names: Sequence[str], pairs: int, block: float, device: torch.device
) -> dict[str, list[Pair]]:
    """Measures one size with one feed in several builds, among which the pairs are shared out.

    Where a model's copy happens to lie in memory makes a difference of up to a tenth, which one build can't tell from
    a difference between the sides.
    """
    found: dict[str, list[Pair]] = {name: [] for name in names}
    builds = min(BUILDS, pairs)
    for build in range(builds):
        sides = build_sides(size, feed, device, names, build)
        try:
            share = pairs // builds + (build < pairs % builds)
            for name, more in measure(sides, share, block, device).items():
                found[name] += more
        finally:
            close(sides)
    return found


def run_all(
    sizes: list[Size], feeds: list[str], names: list[str], pairs: int, block: float, device: torch.device
) -> list[dict[str, Any]]:
    """Measures all sizes with all feeds; returns one row for each side, unrounded."""
    rows = []
    for feed in feeds:
        for size in sizes:
            for name, found in measure_builds(size, feed, names, pairs, block, device).items():
                target = TARGETS[feed] if size.has_target and name == "anybatch.TrainStep" else ""
                rows.append({"feed": feed, "size": size.name, "side": name, **summary(found), "target": target})
                click.echo(f"{feed}, {size.name}, {name}: {rows[-1]['ratio']:.3f}", err=True)
    return rows


@click.command(help="Measures what a step costs beside a hand-written accumulation loop.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--quick", is_flag=True, help="Fewer and shorter pairs; for a first look.")
@click.option("--pairs", type=click.IntRange(min=1), help="Pairs for each side.")
@click.option("--block", type=float, help="About how many seconds one block of updates takes.")
@click.option("--size", "chosen", multiple=True, type=click.Choice([size.name for size in SIZES]))
@click.option("--feed", "feeds", multiple=True, type=click.Choice(FEEDS))
@click.option("--side", "names", multiple=True, type=click.Choice(list(SIDES)))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    device: str,
    quick: bool,
    pairs: int | None,
    block: float | None,
    chosen: tuple[str, ...],
    feeds: tuple[str, ...],
    names: tuple[str, ...],
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    where = torch.device(device)
    left_out = missing(names or SIDES)
    for side in left_out:
        click.echo(str(side))
    usable = [name for name in names or SIDES if name not in {side.side for side in left_out}]
    sizes = [size for size in SIZES if not chosen or size.name in chosen]
    rows = run_all(
        sizes, list(feeds or FEEDS), usable, pairs or (7 if quick else 40), block or (0.02 if quick else 0.05), where
    )
    notes = [*NOTES, *(f"{side}." for side in left_out)]
    known = facts(where)
    text = markdown("Overhead beside a hand-written accumulation loop", known, notes, [shown(row) for row in rows])
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, rows)


if __name__ == "__main__":
    main()
