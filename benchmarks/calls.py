"""How many Python functions of the engine a step calls, which no load of the machine changes.

python benchmarks/calls.py                # the counts
python benchmarks/calls.py --functions    # and which functions they are
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import click
import torch
import torch.nn.functional as F  # as everywhere
from torch import nn

import anybatch

ROWS = 8


def step_of(micro_batches: int) -> tuple[anybatch.TrainStep, dict[str, torch.Tensor]]:
    """A step that has run, and its batch of so many micro-batches of 8 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    step = anybatch.TrainStep(
        model,
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        torch.optim.AdamW(model.parameters()),
        micro_batch_size=ROWS,
        clip_norm=1.0,
    )
    rows = ROWS * micro_batches
    batch = {"x": torch.randn(rows, 64), "y": torch.randint(10, (rows,))}
    for _ in range(3):
        step(batch)
    return step, batch


def calls_of(micro_batches: int) -> Counter[tuple[str, str]]:
    """How often each function of the engine is called in one step, comprehensions among them."""
    step, batch = step_of(micro_batches)
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        _, inside, file = frame.f_code.co_filename.rpartition("/src/anybatch/")
        if event == "call" and inside:
            found[file, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        step(batch)
    finally:
        sys.setprofile(None)
    return found


def counts() -> tuple[float, float]:
    """The calls that a step makes whatever the number of micro-batches, and those of each micro-batch."""
    one, ten = (sum(calls_of(micro_batches).values()) for micro_batches in (1, 10))
    each = (ten - one) / 9
    return one - each, each


def depth() -> int:
    """The functions of the engine between ``TrainStep.__call__`` and autograd, both ends of the engine counted."""
    step, batch = step_of(2)
    found: list[int] = []
    backward = torch.autograd.backward

    def seen(*args: Any, **kwargs: Any) -> None:
        frame, frames = sys._getframe(1), 0
        while frame is not None:
            frames += "/src/anybatch/" in frame.f_code.co_filename
            frame = frame.f_back  # type: ignore[assignment]
        found.append(frames)
        backward(*args, **kwargs)

    torch.autograd.backward = seen
    try:
        step(batch)
    finally:
        torch.autograd.backward = backward
    return max(found)


@click.command(help="Counts the calls of the engine in one step.")
@click.option("--functions", is_flag=True, help="Also list the functions.")
def main(*, functions: bool) -> None:
    """Prints the counts."""
    fixed, each = counts()
    click.echo(f"calls of the engine in a step: {fixed:.0f}, and {each:.0f} in each micro-batch")
    click.echo(f"functions from TrainStep.__call__ to torch.autograd.backward: {depth()}")
    if functions:
        one, ten = calls_of(1), calls_of(10)
        for key in sorted(one.keys() | ten.keys(), key=lambda key: -ten[key]):
            click.echo(f"{one[key]:4d} {ten[key]:4d}  {key[0]}: {key[1]}")


if __name__ == "__main__":
    main()
