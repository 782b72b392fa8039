"""What a run takes longer for while `anybatch watch` follows it from a second process.

    python benchmarks/doctor/watching.py                       # 20,000 steps, two or three minutes
    python benchmarks/doctor/watching.py --steps 2000

A doctor records the training of an MLP. The second process follows the record from the first step to the last, but is
held (SIGSTOP) in every second turn of 500 steps. The figure is the CPU time of the training process in the turns that
are watched over that of the turns beside them that are not; and beside it what the turns that are not watched are to
each other.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import psutil
import torch
from torch.nn import functional as F

import anybatch

TURN = 500
WATCH = "from anybatch.cli.main import main; main(prog_name='anybatch')"


def seconds_of_turns(steps: int, record: Path) -> tuple[list[float], float]:
    """The CPU seconds of each turn, the odd ones watched, and what the watching process took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 32), torch.randint(10, (64,))
    watch = subprocess.Popen([sys.executable, "-c", WATCH, "watch", str(record)], stdout=subprocess.DEVNULL)
    turns = []
    try:
        with anybatch.Doctor(model, optimizer, path=record):
            for turn in range(steps // TURN):
                watch.send_signal(signal.SIGCONT if turn % 2 else signal.SIGSTOP)
                began = time.process_time()
                for _ in range(TURN):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                turns.append(time.process_time() - began)
        return turns, sum(psutil.Process(watch.pid).cpu_times()[:2])
    finally:
        watch.send_signal(signal.SIGCONT)
        watch.terminate()
        watch.wait()


@click.command()
@click.option("--steps", type=click.IntRange(min=6 * TURN), default=20_000, show_default=True)
def main(steps: int) -> None:
    """Prints the ratio of both sides."""
    with tempfile.TemporaryDirectory() as folder:
        turns, watching = seconds_of_turns(steps, Path(folder) / "run.jsonl")
    alone = turns[2::2]  # the first turn has the steps that the doctor looks at most
    ratios = [seen / ((a + b) / 2) for seen, a, b in zip(turns[3::2], alone, alone[1:], strict=False)]
    between = [later / earlier for earlier, later in itertools.pairwise(alone)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{len(turns) * TURN} steps, {1000 * statistics.median(alone) / TURN:.2f} ms a step without being watched")
    print(f"watched over not watched: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} turns)")
    print(f"not watched over not watched: {statistics.median(between):.3f}")
    print(f"the watching process took {watching:.1f} s of its own")


if __name__ == "__main__":
    main()
