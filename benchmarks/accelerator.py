#!/usr/bin/env python3
"""Plans against an allocator that refuses: five models, five budgets each, on the test accelerator.

The device has as many bytes as the budget, and its allocator rounds, caches and splits blocks as CUDA's does. A plan
that takes too much is refused an allocation, which costs a retry; one that takes too little wastes what it leaves free.

    python benchmarks/accelerator.py                # prints a table
    python benchmarks/accelerator.py -o FILE        # and writes it
"""

import argparse
import gc
import sys
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import itertools

from common import facts, markdown, write_text

import anybatch
from accelerator import sim
from anybatch.planning import reserved, search

MIB = 2**20
SHARES = (0.25, 0.4, 0.55, 0.7, 0.9)
STEPS = 5
LESS = 0.03
COLUMNS = (
    "model", "budget", "micro-batches", "optimized", "refused", "planned, allocated", "planned, reserved", "allocated",
    "reserved", "fewest", "refused there", "3 % below",
)  # fmt: skip


class Recurrent(nn.Module):
    """An LSTM with a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(64, 256, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores."""
        scores: torch.Tensor = self.head(self.rnn(x)[0][:, -1])
        return scores


class Language(nn.Module):
    """A small transformer that scores every token."""

    def __init__(self, width: int = 128, layers: int = 4, words: int = 2000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(layers)
            ]
        )
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores of the next token, samples first, classes second."""
        scores: torch.Tensor = self.head(self.blocks(self.embedding(x))).transpose(1, 2)
        return scores


def perceptron() -> nn.Module:
    """Eight wide layers."""
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())], nn.Linear(512, 10))


def convolutional() -> nn.Module:
    """A small network for pictures."""
    widths = (3, 32, 64, 64, 128)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in itertools.pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 4, 10))


def autoencoder() -> nn.Module:
    """Widths that differ, so that blocks of many sizes come and go."""
    widths = (512, 1024, 300, 2000, 64, 700, 512)
    return nn.Sequential(*[layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())])


def classified(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def rebuilt(model: Any, batch: Any) -> torch.Tensor:
    """Squared error of the inputs."""
    return F.mse_loss(model(batch["x"]), batch["x"])


Case = tuple[Callable[[], nn.Module], Callable[[Any, Any], torch.Tensor], dict[str, torch.Tensor]]


def cases() -> dict[str, Case]:
    """Models, losses and batches by name."""
    tokens = torch.randint(0, 2000, (48, 64))
    labels = torch.randint(0, 10, (4096,))
    return {
        "MLP": (perceptron, classified, {"x": torch.randn(4096, 512), "y": labels}),
        "conv net": (convolutional, classified, {"x": torch.randn(192, 3, 32, 32), "y": labels[:192]}),
        "LSTM": (Recurrent, classified, {"x": torch.randn(256, 24, 64), "y": labels[:256]}),
        "transformer": (Language, classified, {"x": tokens, "y": tokens}),
        "autoencoder": (autoencoder, rebuilt, {"x": torch.randn(3000, 512)}),
    }


@dataclass(frozen=True)
class Run:
    """Some steps on a device of some bytes.

    Args:
        plan: that they followed; ``None`` without one.
        refused: how often the allocator refused an allocation.
        allocated: the most bytes in tensors.
        reserved: the most bytes that the allocator held.
    """

    plan: Any
    refused: int
    allocated: int
    reserved: int


def run(device: Any, case: Case, limit: int, **settings: Any) -> Run:
    """Steps of a new model, from the first one on, on a device of a size that holds nothing else; 0 for any."""
    gc.collect()
    device.empty_cache()
    torch.manual_seed(0)
    model = case[0]().to("sim")
    step = anybatch.TrainStep(model, case[1], torch.optim.AdamW(model.parameters()), **settings)
    device.set_limit(0, limit)
    device.reset_peak(0)
    before = device.stats(0)["refusals"]
    try:
        for number in range(STEPS):
            if number == STEPS - 1:  # as a script does before it evaluates
                device.empty_cache()
            out = step(case[2])
        plan = out.plan
    except anybatch.AnyBatchError as error:  # nothing fits, or an update was refused what it needs
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        plan = None
    stats = device.stats(0)
    device.set_limit(0, 0)
    return Run(plan, stats["refusals"] - before, stats["peak_allocated"], stats["peak_reserved"])


def row_of(device: Any, name: str, case: Case, budget: int) -> dict[str, str]:
    """Some steps under a budget, which is also the size of the device, and again on smaller devices."""
    row, replays = dict.fromkeys(COLUMNS, ""), list[reserved.Replay]()
    row |= {"model": name, "budget": f"{budget / MIB:.0f}"}

    class Kept(reserved.Replay):
        def needed(self, limit: int) -> int:
            replays.append(self)
            return super().needed(limit)

    with unittest.mock.patch.object(search, "Replay", Kept):
        found = run(device, case, budget, memory=budget)
    plan = found.plan
    if plan is None:
        return row | {"micro-batches": "does not fit"}
    fewest = min(one.needed(0) for one in list(replays) if one.needed(budget) == plan.reserved_bytes)
    row |= {
        "micro-batches": str(plan.micro_batches), "optimized": plan.chosen.optimizations, "refused": str(found.refused),
        "planned, allocated": f"{plan.peak_bytes / MIB:.1f}", "planned, reserved": f"{plan.reserved_bytes / MIB:.1f}",
        "allocated": f"{found.allocated / MIB:.1f}", "reserved": f"{found.reserved / MIB:.1f}",
        "fewest": f"{fewest / MIB:.1f}",
    }  # fmt: skip
    for title, limit in (("refused there", fewest), ("3 % below", int(fewest * (1 - LESS)))):
        gc.collect()
        row[title] = str(run(device, case, limit, plan=plan).refused)
    return row


def rows(device: Any, only: list[str]) -> list[dict[str, str]]:
    """The table."""
    found = []
    for name, case in cases().items():
        if only and name not in only:
            continue
        whole = run(device, case, 0).reserved
        for share in SHARES:
            gc.collect()
            found.append(row_of(device, name, case, int(whole * share) // MIB * MIB))
            sys.stderr.write(f"{found[-1]}\n")
    return found


def main() -> None:
    """Prints, and writes if asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", action="append", default=[])
    arguments = parser.parse_args()
    device = sim.load()
    device.set_idle(True)  # only memory is looked at
    notes = (
        f"MiB; peaks of the first {STEPS} calls, planning included and the cache emptied before the last one, on a "
        "device of the budget that holds nothing else. The fewest bytes are those that the replay says the plan can be "
        "run with: on a device of that size nothing is refused, and on one of 3 % less something is. None of this was "
        "measured on a GPU."
    )
    text = markdown("Plans against an allocator that refuses", facts(torch.device("cpu")), [notes],
                    rows(device, arguments.only))  # fmt: skip
    sys.stdout.write(text)
    if arguments.output is not None:
        write_text(arguments.output, text)


if __name__ == "__main__":
    main()
