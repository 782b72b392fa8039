"""How much the time of a small step depends on where its tensors happen to lie.

    python benchmarks/doctor/layouts.py                       # a minute

Processes train the same model, without a doctor, on one core and in turns. They differ by nothing but what each has
allocated before. What their median steps differ by, two processes of which one has a doctor differ by as well.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection

import click
import torch
from overhead import KEPT
from training import MODELS, Training

TURN = 24


def worker(pipe: Connection, name: str, amount: int) -> None:
    """Trains some steps for each number that comes in, and sends their CPU seconds; 0 is the end.

    Args:
        pipe: to who says when it is this one's turn.
        name: of the model.
        amount: of what is allocated before, in units of 400 KB.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    training, kept = Training(name), list[torch.Tensor]()
    for _ in range(5 * bool(amount)):
        kept.append(torch.empty(100_003 * amount))
        training.step()
    for _ in range(20):
        training.step()
    pipe.send(len(kept))
    while steps := pipe.recv():
        times, start = [], time.process_time()
        for _ in range(steps):
            training.step()
            now = time.process_time()
            times.append(now - start)
            start = now
        pipe.send(times)


@click.command(help="Measures how much the time of a step depends on where its tensors lie.")
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="MLP", show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=20, show_default=True)
def main(name: str, turns: int) -> None:
    """Runs the processes in turn and prints their median steps."""
    if not KEPT.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT)
    context = multiprocessing.get_context("spawn")
    amounts = (0, 0, 1, 2, 3, 5, 7)
    ends = [context.Pipe() for _ in amounts]
    processes = [
        context.Process(target=worker, args=(far, name, amount)) for (_, far), amount in zip(ends, amounts, strict=True)
    ]
    for process in processes:
        process.start()
    pipes = [near for near, _ in ends]
    for pipe in pipes:
        pipe.recv()
    times: list[list[float]] = [[] for _ in amounts]
    for turn in range(turns):
        for place in sorted(range(len(pipes)), reverse=bool(turn % 2)):
            pipes[place].send(TURN)
            times[place] += pipes[place].recv()
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()
    first = statistics.median(times[0])
    for amount, own in zip(amounts, times, strict=True):
        middle = statistics.median(own)
        click.echo(
            f"{0.4 * amount:.1f} MB allocated five times before: {1e3 * middle:.2f} ms, {middle / first - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
