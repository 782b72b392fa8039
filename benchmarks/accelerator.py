#!/usr/bin/env python3
"""Plans against an allocator that refuses: five models, five budgets each, on the test accelerator.

The device has as many bytes as the budget, and its allocator rounds, caches and splits blocks as CUDA's does. A plan
that takes too much is refused an allocation, which costs a retry; one that takes too little wastes what it leaves free.
Two more tables tell what offloaded blocks copy to the host and back, and how much of a batch each of two devices runs.

    python benchmarks/accelerator.py                # prints the tables
    python benchmarks/accelerator.py -o FILE        # and writes them
    python benchmarks/accelerator.py --only LSTM --table devices
"""

import argparse
import contextlib
import gc
import sys
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
from anybatch.memory.offloading import SMALLEST
from anybatch.planning import reserved, search
from anybatch.planning.recipe import splittings
from anybatch.records.plans import PlanRow

MIB = 2**20
SHARES = (0.25, 0.4, 0.55, 0.7, 0.9)
STEPS = 5
LESS = 0.03
COLUMNS = (
    "model", "budget", "micro-batches", "optimized", "refused", "planned, allocated", "planned, reserved", "allocated",
    "reserved", "fewest", "refused there", "3 % below",
)  # fmt: skip
OFFLOADED = {  # the first half of the blocks
    "MLP": tuple(map(str, range(8))), "conv net": ("0", "1"), "transformer": ("blocks.0", "blocks.1"),
    "autoencoder": tuple(map(str, range(6))),
}  # fmt: skip
MICRO_BATCHES = (1, 4, 7)
SHARES_OF_TWO = (0.3, 0.6)


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
        reserved: the most bytes that the allocator of each device held.
        moved: copies of the last step, and their bytes, as the device counts them.
        samples: of the last step, by the device that ran them.
    """

    plan: Any
    refused: int
    allocated: int
    reserved: list[int]
    moved: dict[str, int]
    samples: Counter[str]


def run(device: Any, case: Case, limit: int, **settings: Any) -> Run:
    """Steps of a new model, from the first one on, on devices of a size that hold nothing else; 0 for any."""
    gc.collect()
    device.empty_cache()
    torch.manual_seed(0)
    model, samples, moved = case[0]().to("sim"), Counter[str](), dict[str, int]()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        samples[str(batch["x"].device)] += len(batch["x"])
        return case[1](model, batch)

    step = anybatch.TrainStep(model, loss, torch.optim.AdamW(model.parameters()), **settings)
    for index in range(2):
        device.set_limit(index, limit)
        device.reset_peak(index)
    before, plan = sum(device.stats(index)["refusals"] for index in range(2)), None
    try:
        for number in range(STEPS):
            if number == STEPS - 1:  # as a script does before it evaluates
                device.empty_cache()
            samples.clear()
            moved = device.counters()
            out = step(case[2])
        plan = out.plan
    except anybatch.AnyBatchError as error:  # nothing fits, or an update was refused what it needs
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    stats = [device.stats(index) for index in range(2)]
    moved = {name: count - moved.get(name, 0) for name, count in device.counters().items()}
    for index in range(2):
        device.set_limit(index, 0)
    return Run(plan, sum(one["refusals"] for one in stats) - before, stats[0]["peak_allocated"],
               [one["peak_reserved"] for one in stats], moved, samples)  # fmt: skip


@contextlib.contextmanager
def replays() -> Iterator[dict[tuple[int, str], reserved.Replay]]:
    """The replays of plans that are looked at meanwhile, by their micro-batches and what they optimize."""
    found, last, traced = dict[tuple[int, str], reserved.Replay](), list[reserved.Replay](), search.Search.traced

    class Kept(reserved.Replay):
        def needed(self, limit: int) -> int:
            last[:] = [self]
            return super().needed(limit)

    def keeping(self: search.Search, row: PlanRow) -> Any:
        result = traced(self, row)
        found[result[0].micro_batches, result[0].optimizations] = last[0]
        return result

    with (
        unittest.mock.patch.object(search, "Replay", Kept),
        unittest.mock.patch.object(search.Search, "traced", keeping),
    ):
        yield found


def row_of(device: Any, name: str, case: Case, budget: int) -> dict[str, str]:
    """Some steps under a budget, which is also the size of the device, and again on smaller devices."""
    row = dict.fromkeys(COLUMNS, "") | {"model": name, "budget": f"{budget / MIB:.0f}"}
    with replays() as made:
        found = run(device, case, budget, memory=budget)
    plan = found.plan
    if plan is None:
        return row | {"micro-batches": "does not fit"}
    fewest = made[plan.micro_batches, plan.chosen.optimizations].needed(0)
    row |= {
        "micro-batches": str(plan.micro_batches), "optimized": plan.chosen.optimizations, "refused": str(found.refused),
        "planned, allocated": f"{plan.peak_bytes / MIB:.1f}", "planned, reserved": f"{plan.reserved_bytes / MIB:.1f}",
        "allocated": f"{found.allocated / MIB:.1f}", "reserved": f"{found.reserved[0] / MIB:.1f}",
        "fewest": f"{fewest / MIB:.1f}",
    }  # fmt: skip
    for title, limit in (("refused there", fewest), ("3 % below", int(fewest * (1 - LESS)))):
        row[title] = str(run(device, case, limit, plan=plan).refused)
    return row


def offloading(case: Case, count: int, names: tuple[str, ...]) -> tuple[anybatch.Plan, int, list[int]]:
    """A plan that offloads blocks, in so many micro-batches.

    Returns:
        The plan, the fewest bytes that it can be run with, and the bytes of each copy that comes back in a step.
    """
    found, brought = list[PlanRow](), list[int]()

    def forced(self: search.Search, row: PlanRow) -> Any:
        own = PlanRow(row.micro_batch_size, row.micro_batches, offload=names)
        result, parts = traced(self, own), self.splitting_of(own).parts
        found.append(result[0])
        brought.clear()
        for part in parts:
            trace = self.profiles.traced(search.Recipe.of(own), part, single=count == 1).fit.trace
            # What comes back is made empty first, and nothing else is.
            made = [one.size for one in trace.allocations if trace.operations[one.born] == "empty_strided"]
            brought.extend(size for size in made if size >= SMALLEST)
        return result

    def in_as_many(subject: Any) -> Any:
        return [one for one in splittings(subject) if one.count == count]

    model = case[0]().to("sim")
    optimizer, patched = torch.optim.AdamW(model.parameters()), unittest.mock.patch.object
    with replays() as made, patched(search, "splittings", in_as_many):
        traced = search.Search.traced
        with patched(search.Search, "traced", forced):
            anybatch.plan(model, case[1], case[2], optimizer=optimizer, memory=2**33)
    plan = anybatch.Plan(found[-1], samples=len(case[2]["x"]))
    return plan, made[count, plan.chosen.optimizations].needed(0), brought


def transfers_of(device: Any, name: str, case: Case, count: int) -> dict[str, str]:
    """What a step copies that offloads half of the blocks, by the plan and by the device."""
    gc.collect()
    device.empty_cache()
    plan, fewest, brought = offloading(case, count, OFFLOADED[name])
    found, there = run(device, case, 0, plan=plan), run(device, case, fewest, plan=plan)
    moved = found.moved
    back = moved["to_device"] - len(case[2]) * count  # besides the micro-batches
    bytes_back = moved["to_device_bytes"] - sum(one.nbytes for one in case[2].values())
    return {
        "model": name, "micro-batches": str(count), "blocks": str(len(OFFLOADED[name])),
        "planned, copies": str(len(brought)), "copies out": str(moved["from_device"]), "copies back": str(back),
        "planned, bytes": f"{sum(brought) / MIB:.2f}", "bytes out": f"{moved['from_device_bytes'] / MIB:.2f}",
        "bytes back": f"{bytes_back / MIB:.2f}", "planned, reserved": f"{plan.reserved_bytes / MIB:.1f}",
        "reserved": f"{found.reserved[0] / MIB:.1f}", "fewest": f"{fewest / MIB:.1f}",
        "refused there": str(there.refused),
    }  # fmt: skip


def shared_by_two(device: Any, name: str, case: Case, budget: int) -> dict[str, str]:
    """How much of a batch each of two devices runs under a plan, and how many bytes it reserves."""
    found = run(device, case, budget, memory=budget, devices=["sim:0", "sim:1"])
    plan, (first, second) = found.plan, (found.samples[f"sim:{index}"] for index in range(2))
    row = {"model": name, "budget": f"{budget / MIB:.0f}", "micro-batches": "does not fit"} | dict.fromkeys(
        ("refused", "samples, first", "second", "first / second", "planned, reserved", "reserved, first",
         "reserved, second"), "",
    )  # fmt: skip
    return row if plan is None else row | {
        "micro-batches": str(plan.micro_batches), "refused": str(found.refused), "samples, first": str(first),
        "second": str(second), "first / second": f"{first / second:.3f}",
        "planned, reserved": f"{plan.reserved_bytes / MIB:.1f}", "reserved, first": f"{found.reserved[0] / MIB:.1f}",
        "reserved, second": f"{found.reserved[1] / MIB:.1f}",
    }  # fmt: skip


def rows(device: Any, table: str, only: list[str]) -> list[dict[str, str]]:
    """One of the tables."""
    found = []
    for name, case in cases().items():
        if (only and name not in only) or (table == "transfers" and name not in OFFLOADED):
            continue
        whole = 0 if table == "transfers" else run(device, case, 0).reserved[0]
        ways: list[Callable[[], dict[str, str]]] = {
            "budgets": [partial(row_of, device, name, case, int(whole * one) // MIB * MIB) for one in SHARES],
            "transfers": [partial(transfers_of, device, name, case, count) for count in MICRO_BATCHES],
            "devices": [
                partial(shared_by_two, device, name, case, int(whole * one) // MIB * MIB) for one in SHARES_OF_TWO
            ],
        }[table]
        for way in ways:
            gc.collect()
            found.append(way())
            sys.stderr.write(f"{found[-1]}\n")
    return found


NOTES = {
    "budgets": (
        f"MiB; peaks of the first {STEPS} calls, planning included and the cache emptied before the last one, on a "
        "device of the budget that holds nothing else. The fewest bytes are those that the replay says the plan can be "
        "run with: on a device of that size nothing is refused, and on one of 3 % less something is. None of this was "
        "measured on a GPU."
    ),
    "transfers": (
        "The last step of a plan that offloads the first half of the blocks: copies to the host and back, as the trace "
        "says and as the device counts, those of micro-batches apart; MiB."
    ),
    "devices": (
        "Two devices of the budget each: the samples that each runs in the last step, and the most MiB that each "
        "reserves, from the first call on."
    ),
}
TITLES = {
    "budgets": "Plans against an allocator that refuses",
    "transfers": "Copies of offloaded blocks",
    "devices": "Two devices",
}


def main() -> None:
    """Prints, and writes if asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a model")
    parser.add_argument("--table", action="append", default=[], choices=TITLES)
    arguments = parser.parse_args()
    device = sim.load()
    device.set_idle(True)  # only memory is looked at
    pages = []
    for table in arguments.table or TITLES:
        found = rows(device, table, arguments.only)
        if found:
            pages.append(markdown(TITLES[table], {} if pages else facts(torch.device("cpu")), [NOTES[table]], found))
    text = "\n#".join(pages)
    sys.stdout.write(text)
    if arguments.output is not None:
        write_text(arguments.output, text)


if __name__ == "__main__":
    main()
