#!/usr/bin/env python3
"""What only a GPU can show, for `gpu.sh`: plans in reserved bytes, time against memory, copies behind computation.

    python benchmarks/gpu.py -o FOLDER              # on the accelerator of this machine
    python benchmarks/gpu.py --dry -o FOLDER        # every part with small models, on the test accelerator

Models by their configuration, with random numbers as data: a transformer of GPT-2's size, a network of ResNet-50's
size, and an LSTM. Each part is a table; one that fails says so in its row, and the others go on.
"""

import argparse
import contextlib
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import facts, markdown, write_text
from torch import nn

import anybatch
from anybatch.accelerators import capacity_of, forget_peaks, memory_of, module_of, release_cache, reserving_at_most
from anybatch.records.plans import PlanRow

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

GIB, MIB = 2**30, 2**20
Row = dict[str, str]


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.GroupNorm(8, 4 * width),
        )  # fmt: skip
        same = stride == 1 and before == 4 * width
        self.short = nn.Identity() if same else nn.Conv2d(before, 4 * width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both ways."""
        return F.relu(self.way(x) + self.short(x))


def resnet(width: int, depths: tuple[int, ...]) -> nn.Module:
    """ResNet-50 with width 64 and depths 3, 4, 6, 3, and GroupNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            layers.append(Bottleneck(before, width << stage, 2 if stage and not number else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


class Language(nn.Module):
    """A decoder of GPT-2's kind."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        block = [
            nn.TransformerEncoderLayer(
                width, width // 64 or 1, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        ]
        self.blocks, self.head = nn.ModuleList(block), nn.Linear(width, words, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores of the next token."""
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.head(x)
        return scores


class Recurrent(nn.Module):
    """An LSTM with a head on its last state."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(width, width, layers, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores."""
        scores: torch.Tensor = self.head(self.rnn(x)[0][:, -1])
        return scores


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    """Cross entropy, of tokens too."""
    scores = model(batch["x"])
    return F.cross_entropy(scores.flatten(0, -2), batch["y"].flatten())


class Case(NamedTuple):
    """A model and its batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]


def cases(dry: bool) -> list[Case]:
    """The models, small ones to try the script."""
    width, layers, words, length, texts = (64, 2, 100, 16, 16) if dry else (768, 12, 50257, 1024, 64)
    tokens = torch.randint(words, (texts, length))
    side, images = (32, 16) if dry else (224, 512)
    steps, features, many = (8, 32, 32) if dry else (256, 1024, 512)
    depths = (1, 1) if dry else (3, 4, 6, 3)
    return [
        Case("GPT-2", lambda: Language(width, layers, words, length), {"x": tokens, "y": tokens.roll(-1, 1)}),
        Case(
            "ResNet-50", lambda: resnet(8 if dry else 64, depths),
            {"x": torch.randn(images, 3, side, side), "y": torch.randint(1000, (images,))},
        ),
        Case(
            "LSTM", lambda: Recurrent(features, 2),
            {"x": torch.randn(many, steps, features), "y": torch.randint(10, (many,))},
        ),
    ]  # fmt: skip


class Bench:
    """A device, and how long things take there."""

    def __init__(self, device: torch.device, dry: bool, budgets: tuple[int, ...] = (8, 12, 24)) -> None:
        self.device, self.dry = device, dry
        self.steps = 1 if dry else 5
        small, total = (64 * MIB,), capacity_of(device)[1]
        self.budgets = small if dry else [n * GIB for n in budgets if n * GIB < total]
        self.autocast = None if dry else torch.bfloat16

    def made(self, case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model there, with its optimizer."""
        gc.collect()
        release_cache()
        torch.manual_seed(0)
        model = case.make().to(self.device)
        return model, torch.optim.AdamW(model.parameters())

    def seconds(self, step: Callable[[], Any], steps: int = 0, *, warm: bool = True) -> float:
        """Of one of some steps, after a first one that is not measured."""
        if warm:
            step()
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(steps or self.steps):
            step()
        torch.accelerator.synchronize()
        return (time.perf_counter() - start) / (steps or self.steps)

    def refusals(self) -> int:
        """How often the allocator refused an allocation so far, and gave its cache back to go on."""
        found = getattr(module_of(self.device), "memory_stats", lambda _: {})(self.device)
        return int(found.get("num_ooms", 0)) + int(found.get("num_alloc_retries", 0))


def planned(bench: Bench) -> Iterator[Row]:
    """What a plan says and what the allocator did, beside accumulation by hand with the largest size that fits."""
    for case in cases(bench.dry):
        rows = len(case.batch["x"])
        for budget in bench.budgets:
            row = {"model": case.name, "budget, MiB": f"{budget / MIB:.0f}"}
            columns = ("plan", "plan, MiB", "plan reserved, MiB", "allocated", "reserved", "refused", "samples/s")
            row |= dict.fromkeys((*columns, "by hand", "by hand, samples/s", "Accelerate, samples/s"), "")
            model, optimizer = bench.made(case)
            step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget, autocast=bench.autocast)
            before = bench.refusals()
            with tried(row, "plan"):
                forget_peaks(bench.device)
                with reserving_at_most(budget, bench.device):
                    seconds, seen = bench.seconds(lambda: step(case.batch)), memory_of(bench.device)  # noqa: B023
                plan = step(case.batch).plan
                assert plan is not None
                row |= {
                    "plan": f"{plan.micro_batches} x {plan.micro_batch_size:g} {plan.chosen.optimizations}".strip(),
                    "plan, MiB": f"{plan.peak_bytes / MIB:.0f}",
                    "plan reserved, MiB": f"{plan.reserved_bytes / MIB:.0f}",
                    "allocated": f"{seen.peak_allocated / MIB:.0f}", "reserved": f"{seen.peak_reserved / MIB:.0f}",
                    "refused": str(bench.refusals() - before), "samples/s": f"{rows / seconds:.1f}",
                }  # fmt: skip
            step = model = optimizer = None  # type: ignore[assignment]
            for title, search in (("by hand", by_hand), ("Accelerate", with_accelerate)):
                with tried(row, f"{title}, samples/s"):
                    size, seconds = search(bench, case, budget)
                    row |= {f"{title}, samples/s": f"{rows / seconds:.1f}"}
                    if title == "by hand":
                        row["by hand"] = str(size)
            yield row


def accumulated(bench: Bench, case: Case, size: int) -> float:
    """The seconds of a hand-written loop over micro-batches of a size."""
    model, optimizer = bench.made(case)
    parts = [{k: v[i : i + size] for k, v in case.batch.items()} for i in range(0, len(case.batch["x"]), size)]

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            there = {name: value.to(bench.device, non_blocking=True) for name, value in part.items()}
            with torch.autocast(bench.device.type, bench.autocast or torch.bfloat16, bench.autocast is not None):
                loss = loss_fn(model, there) / len(parts)
            loss.backward()
        optimizer.step()

    return bench.seconds(step)


def by_hand(bench: Bench, case: Case, budget: int) -> tuple[int, float]:
    """The best of all powers of two that fit, found by trial."""
    found: dict[float, int] = {}
    size = len(case.batch["x"])
    while size and len(found) < 2:
        with contextlib.suppress(torch.OutOfMemoryError), reserving_at_most(budget, bench.device):
            found[accumulated(bench, case, size)] = size
        size //= 2
    return found[min(found)], min(found)


def with_accelerate(bench: Bench, case: Case, budget: int) -> tuple[int, float]:
    """The size that Accelerate's search ends with."""
    from accelerate.utils import find_executable_batch_size

    with reserving_at_most(budget, bench.device):
        run = find_executable_batch_size(starting_batch_size=len(case.batch["x"]))(
            lambda size: (size, accumulated(bench, case, size))
        )
        found: tuple[int, float] = run()
    return found


def hidden(bench: Bench) -> Iterator[Row]:
    """How much of the copies to the host and back runs behind the computation."""
    case = cases(bench.dry)[0]
    rows, found = len(case.batch["x"]), list[float]()
    size = max(1, rows // 8)
    model = case.make()
    names = tuple(f"blocks.{number}" for number in range(len(model.blocks)))  # type: ignore[arg-type]
    for offload in ((), names):
        model, optimizer = bench.made(case)
        plan = anybatch.Plan(PlanRow(size, -(-rows // size), offload=offload), samples=rows)
        step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan, autocast=bench.autocast)
        forget_peaks(bench.device)
        found += [bench.seconds(lambda: step(case.batch)), float(memory_of(bench.device).peak_allocated)]  # noqa: B023
    plain, held, with_it, less = found
    saved = saved_by_blocks(bench, case, size)
    there = torch.empty(saved, dtype=torch.uint8, device=bench.device)
    host = torch.empty_like(there, device="cpu", pin_memory=True)
    alone = 2 * -(-rows // size) * bench.seconds(lambda: host.copy_(there, non_blocking=True))
    yield {
        "model": case.name, "plain, ms": f"{1000 * plain:.1f}", "offloaded, ms": f"{1000 * with_it:.1f}",
        "copies, MiB": f"{2 * -(-rows // size) * saved / MIB:.0f}", "copies alone, ms": f"{1000 * alone:.1f}",
        "at best, ms": f"{1000 * max(plain, alone):.1f}",  # with the shorter of the two wholly behind the longer
        "peak, MiB": f"{held / MIB:.0f}",
        "offloaded, MiB": f"{less / MIB:.0f}",
        "hidden": f"{100 * (plain + alone - with_it) / max(min(plain, alone), 1e-9):.0f} %",
    }  # fmt: skip


def saved_by_blocks(bench: Bench, case: Case, size: int) -> int:
    """The bytes that the blocks keep for the backward of a micro-batch, besides weights."""
    model, _ = bench.made(case)
    held = {p.untyped_storage()._cdata for p in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held and storage.nbytes() >= 1024:
            found[storage._cdata] = storage
        return tensor

    part = {name: value[:size].to(bench.device) for name, value in case.batch.items()}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    enabled = bench.autocast is not None
    with torch.autocast(bench.device.type, bench.autocast or torch.bfloat16, enabled), torch.enable_grad():
        x = model.words(part["x"]) + model.places  # type: ignore[operator]
        with hooks:
            for block in model.blocks:  # type: ignore[union-attr]
                x = block(x, src_mask=model.mask, is_causal=True)
    return sum(storage.nbytes() for storage in found.values())


def compiled(bench: Bench) -> Iterator[Row]:
    """The step as it is, with ``torch.compile``, and a micro-batch's forward and backward as a CUDA graph."""
    for case in cases(bench.dry):
        rows = len(case.batch["x"])
        size = max(1, rows // 8)
        row = {"model": case.name} | dict.fromkeys(("eager, ms", "compiled, ms", "graph, ms", "micro-batch, ms"), "")
        for title, wrap in (("eager, ms", lambda m: m), ("compiled, ms", torch.compile)):
            with tried(row, title):
                model, optimizer = bench.made(case)
                module = model if title == "eager, ms" or bench.dry else wrap(model)
                step = anybatch.TrainStep(module, loss_fn, optimizer, micro_batch_size=size, autocast=bench.autocast)
                row[title] = f"{1000 * bench.seconds(lambda: step(case.batch)):.1f}"  # noqa: B023
        with tried(row, "graph, ms"):
            row |= graphed(bench, case, size)
        yield row


def graphed(bench: Bench, case: Case, size: int) -> Row:
    """A micro-batch of one shape, eager and replayed from a CUDA graph."""
    model, _ = bench.made(case)
    part = {name: value[:size].to(bench.device) for name, value in case.batch.items()}

    def micro_step() -> None:
        with torch.autocast(bench.device.type, bench.autocast or torch.bfloat16, bench.autocast is not None):
            loss = loss_fn(model, part)
        loss.backward()

    row = {"micro-batch, ms": f"{1000 * bench.seconds(micro_step):.1f}"}
    if bench.device.type != "cuda":
        return row | {"graph, ms": "no graphs there"}
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            micro_step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        micro_step()
    return row | {"graph, ms": f"{1000 * bench.seconds(graph.replay):.1f}"}


def doctored(bench: Bench) -> Iterator[Row]:
    """A loop of one's own with a doctor and without, its first steps and later ones, and how often each waits."""
    first, later = (2, 3) if bench.dry else (50, 450)
    for case in cases(bench.dry):
        model, optimizer = bench.made(case)
        part = {name: value[: max(1, len(value) // 8)].to(bench.device) for name, value in case.batch.items()}

        def step() -> None:
            optimizer.zero_grad()  # noqa: B023
            with torch.autocast(bench.device.type, bench.autocast or torch.bfloat16, bench.autocast is not None):
                loss = loss_fn(model, part)  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023

        alone = [bench.seconds(step, first)]
        row = {"model": case.name, "alone, ms": "", "waits in 25 steps alone": str(waits(bench, step))}
        with anybatch.Doctor():
            early, late = bench.seconds(step, first, warm=False), bench.seconds(step, later, warm=False)
            row["waits in 25 steps"] = str(waits(bench, step))
        alone.append(bench.seconds(step, first))
        usual = sum(alone) / 2
        whole = (first * early + later * late) / (first + later)
        yield row | {
            "alone, ms": " and ".join(f"{1000 * one:.2f}" for one in alone),
            f"first {first} steps": f"{100 * (early / usual - 1):+.1f} %",
            f"{later} more": f"{100 * (late / usual - 1):+.1f} %",
            "all of them": f"{100 * (whole / usual - 1):+.1f} %",
        }


def waits(bench: Bench, step: Callable[[], None]) -> int:
    """How often the host waits for the device in 25 steps, as far as torch tells."""
    if bench.device.type != "cuda":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(25):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in found)


@contextlib.contextmanager
def tried(row: Row, column: str) -> Iterator[None]:
    """Lets a measurement fail, and says so in its column."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a table with a gap is worth more than none
        row[column] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:80]
        sys.stderr.write(f"{row}\n")


PARTS: dict[str, tuple[str, Callable[[Bench], Iterator[Row]]]] = {
    "plans": ("Plans, in allocated and reserved bytes", planned),
    "offload": ("Copies behind the computation", hidden),
    "compile": ("torch.compile and CUDA graphs", compiled),
    "doctor": ("The doctor's cost", doctored),
}


def main() -> None:
    """Runs the parts and writes their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--machine", default="", help="name of the card in the names of the files")
    parser.add_argument("--part", action="append", choices=[*PARTS], default=[])
    parser.add_argument("--budget", action="append", type=int, default=[], metavar="GIB", help="default: 8, 12 and 24")
    parser.add_argument("--dry", action="store_true", help="small models, on the test accelerator")
    arguments = parser.parse_args()
    if arguments.dry:
        from accelerator import sim

        sim.load()
    device = torch.accelerator.current_accelerator()
    if device is None:
        parser.error("torch finds no accelerator here; expected one, or --dry")
    bench, failed = Bench(torch.device(device.type, 0), arguments.dry, tuple(arguments.budget) or (8, 12, 24)), []
    for name in arguments.part or PARTS:
        title, part = PARTS[name]
        try:
            rows = []
            for row in part(bench):
                rows.append(row)
                sys.stderr.write(f"{row}\n")  # what is known by now, should the time run out
        except Exception as error:  # noqa: BLE001 - the other parts go on
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        text = markdown(title, facts(bench.device), [], rows)
        sys.stdout.write(text)
        write_text(arguments.output / f"{name}_{arguments.machine or device.type}_{time.strftime('%F')}.md", text)
    if failed:
        parser.exit(1, "\n".join(failed) + "\n")


if __name__ == "__main__":
    main()
