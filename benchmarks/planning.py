"""What planning costs, and how good the chosen plan is beside everything that is tried by hand.

    python benchmarks/planning.py                    # on the CPU, about five minutes
    python benchmarks/planning.py --part cost        # the first table alone, under a minute
    python benchmarks/planning.py --json planning.json -o planning.md

Every cost is taken in a process of its own, which has imported torch and anybatch and nothing else. The chosen plan is
held against a grid: every micro-batch size that is a power of two, with none, half or all of the blocks recomputed.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from common import facts, markdown, quartiles, seconds, write_json, write_text
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.demo.transformer import make_model, next_byte_loss
from anybatch.planning.entrance import subject_of
from anybatch.planning.planner import Planner

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from planning_models import FACTORIES
from planning_truth import brute_force, names_of, peak_of_whole, recomputed

GIB = 2**30
SAMPLES = 64
MODELS = ("transformer", "cnn_groupnorm", "plain_mlp", "vision_transformer", "heterogeneous", "deep_residual")
SHARES = (0.6, 0.4, 0.25)
NOTES_COST = (
    "Seconds: CPU time of planning in a fresh process with one thread, and the wall time beside it, which other work",
    "on the machine lengthens. Growth: how far the resident memory of the process rose above what it was before.",
    "first: the whole of anybatch.plan. It imports what torch loads at the first trace, or else at the first step of",
    "an optimizer (its compiler); the last row shows that by itself.",
    "second: another budget for the same subject, with the exact traces of what is chosen; finalists are not raced.",
)
NOTES_TRUTH = (
    "Budget: as a share of the peak of the whole batch. Ratio: time of an update under the chosen plan over that of",
    "the fastest configuration of the grid that fits in the same budget, in alternating turns; the median, and the",
    "quartiles.",
)


class Norm(nn.Module):
    """The root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return x * scale.to(x.dtype) * self.weight


class Layer(nn.Module):
    """A layer of the usual language models of 7 billion parameters: rotated queries and keys, a gated MLP."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = Norm(width), Norm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, steps, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(rows, steps, self.heads, width // self.heads).transpose(1, 2)

        def rotated(y: Tensor) -> Tensor:
            one, other = y.chunk(2, -1)
            return y * cos + torch.cat((-other, one), -1) * sin

        h = self.norm_attention(x)
        query, key = rotated(split(self.query(h))), rotated(split(self.key(h)))
        mixed = F.scaled_dot_product_attention(query, key, split(self.value(h)), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, steps, width))
        h = self.norm_mlp(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Large(nn.Module):
    """A language model of 6.7 billion parameters: 32 layers of width 4096."""

    cos: Tensor
    sin: Tensor

    def __init__(self, vocabulary: int = 32000, width: int = 4096, layers: int = 32, steps: int = 2048) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, 32, 11008) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("cos", torch.zeros(steps, width // 32))
        self.register_buffer("sin", torch.zeros(steps, width // 32))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1).float(), batch["y"].flatten())


def _subject(name: str) -> tuple[Any, ...]:
    """A model, its loss, a logical batch, an optimizer, and the device that is planned for if it is not here."""
    if name == "demo":
        model: nn.Module = make_model(0)
        text = torch.randint(256, (SAMPLES, model.context + 1))
        batch, loss_fn, device = {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}, next_byte_loss, None
    else:
        with torch.device("meta"):
            model = Large().to(torch.bfloat16)
        zeros = torch.zeros(SAMPLES, 2048, dtype=torch.long)
        batch, loss_fn, device = {"x": zeros, "y": zeros}, next_token_loss, "h200"
    return model, loss_fn, batch, torch.optim.AdamW(model.parameters(), lr=1e-4), device


def resident() -> int:
    """The bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def highest_resident() -> int:
    """The most bytes of this program that were in memory at once; ``ru_maxrss`` begins with those of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def _planner(name: str) -> Planner:
    model, loss_fn, batch, optimizer, device = _subject(name)
    subject, target = subject_of(batch, device, model=model, loss_fn=loss_fn, optimizer=optimizer)
    return Planner(subject, target)


def _work(name: str, what: str, budgets: Sequence[int]) -> Callable[[], Any]:
    """What is timed."""
    if what == "import":
        return lambda: importlib.import_module("torch._dynamo")
    if what == "second":
        planner = _planner(name)
        planner.plan(budgets[0], race=False)
        return lambda: planner.plan(budgets[1], race=False)
    model, loss_fn, batch, optimizer, device = _subject(name)
    return lambda: anybatch.plan(model, loss_fn, batch, optimizer, memory=budgets[0], device=device)


def measure_here(name: str, what: str, budgets: Sequence[int]) -> dict[str, Any]:
    """Times one piece of planning in this process."""
    work = _work(name, what, budgets)
    before = resident()
    began, worked = time.perf_counter(), time.process_time()
    plan = work()
    wall, took = time.perf_counter() - began, time.process_time() - worked
    peak = highest_resident()
    chosen = str(plan.chosen) if isinstance(plan, anybatch.Plan) else ""
    whole = plan.whole_bytes if isinstance(plan, anybatch.Plan) else 0
    return {"seconds": took, "wall": wall, "growth": max(peak - before, 0), "chosen": chosen, "whole": whole}


def measure_apart(name: str, what: str, budgets: Sequence[int]) -> dict[str, Any]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--here", json.dumps([name, what, list(budgets)])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_costs(repeats: int) -> list[dict[str, Any]]:
    """One row for each cost; the shortest of several times, since only delays are added to it."""
    whole = measure_apart("demo", "first", [100 * GIB])["whole"]
    cases = [
        ("the demo's model, a quarter of the whole batch", "demo", "first", [whole // 4], "< 10 s"),
        ("the demo's model, an eighth", "demo", "second", [whole // 4, whole // 8], "0.5 s + re-trace"),
        ("7B on meta tensors, 100 GiB of an H200", "large", "first", [100 * GIB], "< 6 s, < 1 GiB"),
        ("7B on meta tensors, 80 GiB", "large", "second", [100 * GIB, 80 * GIB], "0.5 s + re-trace"),
        ("importing torch's compiler", "", "import", [], ""),
    ]
    rows = []
    for label, name, what, budgets, target in cases:
        found = [measure_apart(name, what, budgets) for _ in range(repeats)]
        best = min(found, key=lambda one: one["seconds"])
        times = [one["seconds"] for one in found]
        growth = max(one["growth"] for one in found)
        rows.append({**best, "subject": label, "what": what, "times": times, "growth": growth, "target": target})
        click.echo(f"{label}: {best['seconds']:.2f} s", err=True)
    return rows


def shown_cost(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "subject": row["subject"],
        "what": row["what"],
        "seconds": f"{row['seconds']:.2f}",
        "of": " ".join(f"{one:.2f}" for one in sorted(row["times"])),
        "wall": f"{row['wall']:.2f}",
        "growth (MiB)": f"{row['growth'] / 2**20:.0f}",
        "target": row["target"],
        "chosen": row["chosen"],
    }


def measure_truth(name: str, share: float, rounds: int) -> dict[str, Any] | None:
    """The chosen plan against the fastest configuration of the grid; ``None`` where none of the grid fits."""
    make, cpu = FACTORIES[name], torch.device("cpu")
    budget = int(share * peak_of_whole(make(), SAMPLES))
    found = brute_force(make, SAMPLES, budget, rounds=rounds)
    if found.fastest is None:
        return None
    best = found.fastest
    own, other = make(), make()
    batch = own.make_batch(SAMPLES)
    planned = own.step(memory=budget)
    by_hand = other.step(micro_batch_size=None if best.micro_batch_size == SAMPLES else best.micro_batch_size)
    times: list[tuple[float, float]] = []
    with recomputed(other.model, names_of(other, best.recomputed)):
        result = planned(batch)
        by_hand(batch)
        for turn in range(4 * rounds):
            if turn % 2:
                hand, plan = seconds(lambda: by_hand(batch), cpu), seconds(lambda: planned(batch), cpu)
            else:
                plan, hand = seconds(lambda: planned(batch), cpu), seconds(lambda: by_hand(batch), cpu)
            times.append((plan, hand))
    low, middle, high = quartiles([plan / hand for plan, hand in times])
    return {
        "model": name, "share": share, "budget": budget, "ratio": middle, "lower": low, "upper": high,
        "plan": str(result.plan.chosen) if result.plan else "", "plan seconds": quartiles([one for one, _ in times])[1],
        "grid": f"micro-batches of {best.micro_batch_size}, {best.recomputed} of the blocks recomputed",
        "grid seconds": quartiles([one for _, one in times])[1], "grid size": len(found.tried),
    }  # fmt: skip


def shown_truth(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "model": row["model"],
        "budget": f"{row['share']:.2f} ({row['budget'] / 2**20:.1f} MiB)",
        "ratio (median)": f"{row['ratio']:.3f}",
        "quartiles": f"{row['lower']:.3f} to {row['upper']:.3f}",
        "target": "<= 1.10",
        "ms by plan": f"{row['plan seconds'] * 1e3:.1f}",
        "plan": row["plan"],
        "ms by grid": f"{row['grid seconds'] * 1e3:.1f}",
        "fastest of the grid": row["grid"],
    }


def measure_truths(models: Sequence[str], shares: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    """One row for each model and budget in which the grid has something."""
    rows = []
    for name in models:
        for share in shares:
            row = measure_truth(name, share, rounds)
            click.echo(f"{name}, {share:.2f}: {'nothing fits' if row is None else round(row['ratio'], 3)}", err=True)
            rows += [] if row is None else [row]
    return rows


@click.command(help="Measures what planning costs, and the chosen plan against a grid.")
@click.option("--quick", is_flag=True, help="Once each, fewer rounds; for a first look.")
@click.option("--part", "parts", multiple=True, type=click.Choice(["cost", "truth"]))
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS))
@click.option("--share", "shares", multiple=True, type=click.FloatRange(min=0, min_open=True))
@click.option("--here", hidden=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the tables here, as Markdown.")
def main(
    quick: bool,
    parts: tuple[str, ...],
    models: tuple[str, ...],
    shares: tuple[float, ...],
    here: str | None,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the tables and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if here is not None:
        click.echo(json.dumps(measure_here(*json.loads(here))))
        return
    known, pages, rows = facts(torch.device("cpu")), [], []
    if not parts or "cost" in parts:
        costs = measure_costs(1 if quick else 3)
        rows += costs
        pages.append(markdown("What planning costs", known, NOTES_COST, [shown_cost(row) for row in costs]))
    if not parts or "truth" in parts:
        truths = measure_truths(models or MODELS, shares or SHARES, 2 if quick else 7)
        rows += truths
        shown = [shown_truth(row) for row in truths]
        pages += [markdown("The chosen plan against a grid", known, NOTES_TRUTH, shown)] if shown else []
    text = "\n".join(pages)
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, rows)


if __name__ == "__main__":
    main()
