"""Models in parts by FSDP2: parameters gathered when they are used, or kept gathered during a step.

Two processes on this machine, over gloo. Four ways to take one update of the same logical batch, in turn:

- ``by hand``: the loop that FSDP2's documentation shows, whose gradients are reduced in the last backward only; blocks
  are gathered in each forward and each backward;
- ``parts``: ``TrainStep`` on the same model, which reduces in each backward too and so has no whole gradients;
- ``kept``: ``TrainStep`` after ``set_reshard_after_forward(False)``;
- ``memory=``: ``TrainStep`` in parts with a budget, once the size of its micro-batches has stopped changing.

Times are wall times of the slower rank, as ratios to ``by hand`` of the same round.

    python benchmarks/sharding.py -o benchmarks/results/sharding_cpu.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from ranks import ROWS, WORLD, Batch, Way, build, compare, loss_fn, timed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anybatch

BY_HAND = "by hand"
WIDTHS = (256, 512, 1024)
MICRO_BATCHES = (1, 4, 16)
SETTLING = 12  # steps after which sizes no longer change


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
    """Seconds of each way in each round, and the micro-batches that the budget chose."""
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
    return {**found, "micro-batches of memory=": str(step(batch).micro_batches)}


if __name__ == "__main__":
    compare(
        "FSDP2: gathered when used, or kept during a step", measured, BY_HAND, ("parts", "kept", "memory="),
        widths=WIDTHS, counts=MICRO_BATCHES,
        notes=[f"Micro-batches of {ROWS} samples, but with `memory=`, which chose their number too."],
    )  # fmt: skip
