"""Whether gradients are better summed over ranks during the last backward or after it.

Two processes on this machine, over gloo. Three ways to take one update of the same logical batch, in turn:

- ``during``: the loop by hand with DistributedDataParallel, whose buckets go during the last backward; all other
  micro-batches run under ``no_sync``;
- ``after``: the same loop with all micro-batches under ``no_sync``, and then the buckets that anybatch makes, one after
  the other;
- ``TrainStep``: the same with its messages, counts and checks.

Times are wall times of the slower rank, as ratios to ``during`` of the same round.

    python benchmarks/ranks.py -o benchmarks/results/ranks_cpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import facts, markdown, quartiles, write_json, write_text
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import anybatch
from anybatch.parallel.buckets import Buffers

WORLD = 2
DURING = "during"
WIDTHS = (128, 512, 1024, 2048)
MICRO_BATCHES = (1, 4)
ROWS = 64  # of a micro-batch

Batch = dict[str, torch.Tensor]
Way = Callable[[], Any]
Measure = Callable[[int, int, int], dict[str, Any]]


def build(width: int) -> nn.Module:
    """Four square layers, so that the weights of a layer fill a bucket from a width of 2560 on."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def by_hand(width: int, parts: Sequence[Batch], *, during: bool) -> Way:
    """A loop with DistributedDataParallel."""
    model = DistributedDataParallel(build(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update() -> None:
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if during and is_last else model.no_sync():
                loss = loss_fn(model, part) / len(parts)
                (loss if during else loss / WORLD).backward()
        if not during:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            Buffers(gradients).sum_(gradients, None, lambda error: error)
        optimizer.step()

    return update


def by_step(width: int, batch: Batch) -> Way:
    """The same by TrainStep."""
    model = DistributedDataParallel(build(width))
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch_size=ROWS)
    return lambda: step(batch)


def timed(way: Way) -> float:
    """Seconds of the slower rank for one update."""
    dist.barrier()
    start = time.perf_counter()
    way()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def measured(width: int, micro_batches: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = ROWS * micro_batches
    batch = {
        "x": torch.randn(rows, width, generator=generator),
        "y": torch.randint(0, 10, (rows,), generator=generator),
    }
    parts = [{name: value[at : at + ROWS] for name, value in batch.items()} for at in range(0, rows, ROWS)]
    ways = {
        DURING: by_hand(width, parts, during=True),
        "after": by_hand(width, parts, during=False),
        "TrainStep": by_step(width, batch),
    }
    for way in ways.values():
        for _ in range(3):  # DistributedDataParallel makes its buckets anew after the first
            way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways) if number % 2 else list(reversed(ways))
        for name in names:
            found[name].append(timed(ways[name]))
    return found


def worker(
    rank: int, store: str, output: str, measure: Measure, widths: Sequence[int], counts: Sequence[int], rounds: int
) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=dt.timedelta(seconds=300))
    rows = []
    for width in widths:
        for micro_batches in counts:
            rows.append({"width": width, "micro-batches": micro_batches, **measure(width, micro_batches, rounds)})
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
    dist.destroy_process_group()


def shown(row: dict[str, Any], base: str, others: Sequence[str]) -> dict[str, str]:
    """A row of the table: the median and the quartiles of the ratios, and texts as they are."""
    columns = {
        "width": str(row["width"]),
        "parameters": f"{sum(p.numel() for p in build(row['width']).parameters()) / 1e6:.2f} M",
        "micro-batches": str(row["micro-batches"]),
        f"{base}, ms": f"{1000 * quartiles(row[base])[1]:.2f}",
    }
    for name in others:
        ratios = [other / own for other, own in zip(row[name], row[base], strict=True)]
        low, middle, high = quartiles(ratios)
        columns[f"{name} / {base}"] = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    return columns | {name: value for name, value in row.items() if isinstance(value, str)}


def compare(
    title: str, measure: Measure, base: str, others: Sequence[str], *, widths: Sequence[int], counts: Sequence[int],
    notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Runs two ranks as the command line says, and writes the table.

    Args:
        title: of the table.
        measure: gives the seconds of each way in each round, for a width, a number of micro-batches and of rounds.
        base: the way that the others are compared with.
        others: the other ways.
        widths: of the layers, if none is given.
        counts: of micro-batches.
        notes: more lines above the table.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--width", type=int, action="append", help="of the layers; several may be given")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "rows.json")
        spawn(
            worker, nprocs=WORLD,
            args=(f"file://{folder}/store", output, measure, tuple(options.width or widths), counts, options.rounds),
        )  # fmt: skip
        rows = json.loads(Path(output).read_text())
    known = {**facts(torch.device("cpu")), "ranks": "2 processes over gloo, one thread each, wall time of the slower"}
    lines = [f"{options.rounds} rounds, the ways in turn; ratios of the same round: median [quartiles].", *notes]
    table = markdown(title, known, lines, [shown(row, base, others) for row in rows])
    print(table)
    if options.output:
        write_text(options.output, table)
    if options.json:
        write_json(options.json, known, rows)


if __name__ == "__main__":
    compare(
        "Gradients summed during the last backward or after it", measured, DURING, ("after", "TrainStep"),
        widths=WIDTHS, counts=MICRO_BATCHES,
    )  # fmt: skip
