"""Models in parts by FSDP2: parameters gathered when they are used, or kept gathered during a step.

Two processes on this machine, over gloo. Four ways to take one update of the same logical batch, in turn:

- ``by hand``: the loop that FSDP2's documentation shows, whose gradients are reduced in the last backward only; blocks
  are gathered in each forward and each backward;
- ``parts``: ``TrainStep`` on the same model, which reduces in each backward too and so has no whole gradients;
- ``kept``: ``TrainStep`` after ``set_reshard_after_forward(False)``;
- ``memory=``: ``TrainStep`` with a budget that has room for everything gathered, once it has chosen.

Times are wall times of the slower rank, as ratios to ``by hand`` of the same round.

    python benchmarks/sharding.py -o benchmarks/results/sharding_cpu.md
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import facts, markdown, quartiles, write_json, write_text
from ranks import ROWS, WORLD, Batch, Way, build, loss_fn, timed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import anybatch

BY_HAND = "by hand"
WIDTHS = (256, 512, 1024)
MICRO_BATCHES = (1, 4, 16)
SETTLING = 40  # steps after which a budget has chosen


def sharded(width: int) -> Any:
    """The model of ``ranks.py``, each layer a unit."""
    model: Any = build(width)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def by_hand(width: int, parts: Sequence[Batch]) -> Way:
    """A loop by hand."""
    model = sharded(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update() -> None:
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            (loss_fn(model, part) / len(parts)).backward()
        optimizer.step()

    return update


def by_step(width: int, batch: Batch, *, kept: bool = False, **options: Any) -> tuple[Way, anybatch.TrainStep]:
    """The same by TrainStep."""
    model = sharded(width)
    if kept:
        model.set_reshard_after_forward(False)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    return (lambda: step(batch)), step


def measured(width: int, micro_batches: int, rounds: int) -> dict[str, Any]:
    """Seconds of each way in each round, and what the budget chose."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = ROWS * micro_batches
    batch = {
        "x": torch.randn(rows, width, generator=generator),
        "y": torch.randint(0, 10, (rows,), generator=generator),
    }
    parts = [{name: value[at : at + ROWS] for name, value in batch.items()} for at in range(0, rows, ROWS)]
    budget = sum(value.nbytes for value in batch.values()) + 5 * sum(p.nbytes for p in build(width).parameters())
    chosen, step = by_step(width, batch, memory=budget)
    ways = {
        BY_HAND: by_hand(width, parts),
        "parts": by_step(width, batch, micro_batch_size=ROWS)[0],
        "kept": by_step(width, batch, micro_batch_size=ROWS, kept=True)[0],
        "memory=": chosen,
    }
    for name, way in ways.items():
        for _ in range(SETTLING if name == "memory=" else 3):
            way()
    found: dict[str, Any] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways) if number % 2 else list(reversed(ways))
        for name in names:
            found[name].append(timed(ways[name]))
    reducer = step._settings.reducer
    return {**found, "chosen": f"{'parts' if reducer.keeps_step else 'kept'}, {step(batch).micro_batches}"}


def worker(rank: int, store: str, output: str, widths: Sequence[int], rounds: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=dt.timedelta(seconds=300))
    rows = []
    for width in widths:
        for micro_batches in MICRO_BATCHES:
            rows.append({"width": width, "micro-batches": micro_batches, **measured(width, micro_batches, rounds)})
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
    dist.destroy_process_group()


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table: the median and the quartiles of the ratios."""
    columns = {
        "width": str(row["width"]),
        "parameters": f"{sum(p.numel() for p in build(row['width']).parameters()) / 1e6:.2f} M",
        "micro-batches": str(row["micro-batches"]),
        "by hand, ms": f"{1000 * quartiles(row[BY_HAND])[1]:.2f}",
    }
    for name in ("parts", "kept", "memory="):
        ratios = [other / own for other, own in zip(row[name], row[BY_HAND], strict=True)]
        low, middle, high = quartiles(ratios)
        columns[name] = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    return {**columns, "chose (micro-batches)": row["chosen"]}


def main() -> None:
    """Runs it and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--width", type=int, action="append", help="of the layers; several may be given")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "rows.json")
        arguments = (f"file://{folder}/store", output, tuple(options.width or WIDTHS), options.rounds)
        spawn(worker, args=arguments, nprocs=WORLD)
        rows = json.loads(Path(output).read_text())
    known = {**facts(torch.device("cpu")), "ranks": "2 processes over gloo, one thread each, wall time of the slower"}
    notes = [
        f"{options.rounds} rounds, the ways in turn; ratios to the loop by hand in the same round: median [quartiles].",
        f"Micro-batches of {ROWS} samples, but with `memory=`, which chose their number too.",
    ]
    table = markdown("FSDP2: gathered when used, or kept during a step", known, notes, [shown(row) for row in rows])
    print(table)
    if options.output:
        write_text(options.output, table)
    if options.json:
        write_json(options.json, known, rows)


if __name__ == "__main__":
    main()
