"""BatchNorm under a budget: memory, time and error of the ways to train a residual network with 17 BatchNorms.

    python benchmarks/batchnorm.py                        # on the CPU, about three minutes
    python benchmarks/batchnorm.py --quick                # about one
    python benchmarks/batchnorm.py --json batchnorm.json -o batchnorm.md

Each way takes one logical batch of 64 images of 32 x 32. Peaks count the bytes of live tensors on the device in an
update after the first; what is offloaded is counted apart, as bytes on the host. Errors are against the whole batch in
float64.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from common import Batch, classification_loss, facts, markdown, quartiles, seconds, to_device, write_json, write_text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.memory.application import apply_optimizations
from anybatch.memory.offloading import HostPool

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from batchnorm_models import ResNet, norms_of, pictures
from planning_referee import alive_in, peak_of

SAMPLES, SIDE, CLASSES, MICRO_BATCH = 64, 32, 10, 8
MODELS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "three stages": ((16, 32, 64), (3, 3, 2)),
    "ResNet-18": ((16, 32, 64, 128), (2, 2, 2, 2)),
}
BUDGET = 0.55
MIB = 2**20
NOTES = (
    f"A logical batch of {SAMPLES} images of {SIDE} x {SIDE}, SGD, float32; micro-batches have {MICRO_BATCH} samples.",
    "Both models have 17 BatchNorms in 8 blocks. three stages: (3, 3, 2) blocks of 16, 32 and 64 channels, as in the",
    "CIFAR networks of He et al. 2016. ResNet-18: (2, 2, 2, 2) blocks of 16 to 128 channels. Peak: the most bytes of",
    "live tensors on the device in an update after the first, with weights, gradients and the batch; in brackets as a",
    "share of the plain whole batch. Host: bytes of the buffers that offloaded activations wait in. Time: medians and",
    "the quartiles, in times of the plain whole batch in the same round; on the CPU the copies of offloading take the",
    "time of the one core. Gradient error: the L2 norm of the difference to the float64 whole batch, over all",
    "parameters, relative to that gradient. Statistics error: the same for running means and variances, relative to",
    "what the whole batch changes in them. Counted: by how much num_batches_tracked grows in an update, at most, over",
    "the BatchNorms. By hand: plain loops.",
)

Update = Callable[[], object]


@dataclass
class Way:
    """One way to make an update.

    Args:
        name: in the table.
        how: what was chosen.
        model: its own copy.
        optimizer: of the model.
        update: makes one.
        on_device: makes one that only allocates what is on the device, where ``update`` also allocates on the host.
        pool: host memory, if it is used.
    """

    name: str
    how: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    update: Update
    on_device: Update | None = None
    pool: HostPool | None = None


Maker = Callable[[nn.Module, Batch, int, float], Way]


def make_model(name: str, device: torch.device) -> tuple[nn.Module, Batch]:
    """A model whose running statistics have seen some batches, and a batch."""
    torch.manual_seed(0)
    widths, depths = MODELS[name]
    model = ResNet(widths, classes=CLASSES, depths=depths).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        classification_loss(model, to_device(_images(), device)).backward()
        optimizer.step()
    model.zero_grad()
    return model, to_device(_images(), device)


def _images() -> Batch:
    """Images of classes that differ in their mean colour."""
    batch = pictures(SAMPLES, SIDE, CLASSES, torch.float32)
    batch["x"] += torch.linspace(-2, 2, CLASSES)[batch["y"], None, None, None]
    return batch


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, size: int) -> Update:
    """The loop that people write, each micro-batch weighted by its share."""

    def update() -> None:
        optimizer.zero_grad()
        for start in range(0, SAMPLES, size):
            part = {key: tensor[start : start + size] for key, tensor in batch.items()}
            (classification_loss(model, part) * (len(part["x"]) / SAMPLES)).backward()
        optimizer.step()

    return update


def by_hand(model: nn.Module, batch: Batch, whole: int, rate: float) -> Way:
    """The whole batch."""
    optimizer = _optimizer(model, rate)
    return Way("whole batch", "plain loop", model, optimizer, _loop(model, optimizer, batch, SAMPLES))


def checkpointed(model: nn.Module, batch: Batch, whole: int, rate: float) -> Way:
    """The whole batch with ``torch.utils.checkpoint`` around each block."""
    for name in _blocks(model):
        module = model.get_submodule(name)
        module.forward = _checkpointed(module.forward)  # type: ignore[method-assign]
    optimizer = _optimizer(model, rate)
    return Way(
        "checkpoint by hand", "torch.utils.checkpoint around each block", model, optimizer,
        _loop(model, optimizer, batch, SAMPLES),
    )  # fmt: skip


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def accumulated(model: nn.Module, batch: Batch, whole: int, rate: float) -> Way:
    """Micro-batches as they are written by hand."""
    optimizer = _optimizer(model, rate)
    return Way(
        "micro-batches by hand", "plain accumulation", model, optimizer, _loop(model, optimizer, batch, MICRO_BATCH)
    )


def planned(model: nn.Module, batch: Batch, whole: int, rate: float) -> Way:
    """``TrainStep`` under a budget."""
    optimizer = _optimizer(model, rate)
    step = anybatch.TrainStep(model, classification_loss, optimizer, memory=int(BUDGET * whole))
    plan = step(batch).plan
    how = "" if plan is None else f"recompute {', '.join(plan.recompute)}"
    return Way(f"memory={BUDGET:g} of it", how, model, optimizer, lambda: step(batch))


def offloaded(model: nn.Module, batch: Batch, whole: int, rate: float) -> Way:
    """``TrainStep`` with all convolutions, norms and activations offloaded."""
    optimizer, pool = _optimizer(model, rate), HostPool()
    step = anybatch.TrainStep(model, classification_loss, optimizer)
    names = [name for name, module in model.named_modules() if name and name != "fc" and not list(module.children())]

    def update() -> None:
        with apply_optimizations(model, offload=names, pool=pool):
            step(batch)

    def on_device() -> None:
        with apply_optimizations(model, offload=names, simulate_offload=True):
            step(batch)

    return Way("offload", f"offload {len(names)} layers", model, optimizer, update, on_device, pool)


def _split(policy: Any) -> Maker:
    def make(model: nn.Module, batch: Batch, whole: int, rate: float) -> Way:
        optimizer = _optimizer(model, rate)
        step = anybatch.TrainStep(
            model, classification_loss, optimizer, micro_batch_size=MICRO_BATCH, batch_norm=policy
        )
        return Way(f'batch_norm="{policy}"', "TrainStep in micro-batches", model, optimizer, lambda: step(batch))

    return make


WAYS: dict[str, Maker] = {
    "whole": by_hand, "checkpoint": checkpointed, "plan": planned, "offload": offloaded, "by hand": accumulated,
    "ghost": _split("ghost"), "frozen": _split("frozen"),
}  # fmt: skip


def _blocks(model: nn.Module) -> list[str]:
    return [
        f"{stage}.{name}" for stage, child in model.named_children() if stage.startswith("layer")
        for name, _ in child.named_children()
    ]  # fmt: skip


def _left(model: nn.Module) -> dict[str, list[Tensor]]:
    """Gradients and running statistics, in float64."""
    norms = norms_of(model)
    return {
        "gradient": [p.grad.double().clone() for p in model.parameters() if p.grad is not None],
        "statistics": [t.double().clone() for n in norms for t in (n.running_mean, n.running_var)],
        "counted": [n.num_batches_tracked.double().clone() for n in norms],
    }


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return float(sum((a - b).square().sum() for a, b in zip(one, other, strict=True)) ** 0.5)


def exact_of(model: nn.Module, batch: Batch, *, frozen: bool = False) -> dict[str, list[Tensor]]:
    """What the whole batch leaves in float64."""
    model = copy.deepcopy(model).double()
    for norm in norms_of(model) if frozen else ():
        norm.eval()
    classification_loss(model, {"x": batch["x"].double(), "y": batch["y"]}).backward()
    return _left(model)


def errors_of(name: str, model: nn.Module, batch: Batch, whole: int) -> dict[str, float]:
    """The errors of one update of a way, which does not move the weights."""
    before, exact = _left(model), exact_of(model, batch)
    made = WAYS[name](copy.deepcopy(model), batch, whole, 0.0)
    # A plan is made in the first update; statistics begin anew for the one that is compared.
    made.model.load_state_dict(model.state_dict())
    made.update()
    found = _left(made.model)
    norm = _distance(exact["gradient"], [torch.zeros_like(tensor) for tensor in exact["gradient"]])
    errors = {
        "gradient error": _distance(found["gradient"], exact["gradient"]) / norm,
        "statistics error": _distance(found["statistics"], exact["statistics"])
        / _distance(exact["statistics"], before["statistics"]),
        "counted": max(float(a - b) for a, b in zip(found["counted"], before["counted"], strict=True)),
    }
    if name == "frozen":
        own = exact_of(model, batch, frozen=True)["gradient"]
        norm = _distance(own, [torch.zeros_like(tensor) for tensor in own])
        errors["error to the frozen whole batch"] = _distance(found["gradient"], own) / norm
    return errors


def measure(name: str, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Measures all ways on one model; one row a way, unrounded."""
    model, batch = make_model(name, device)
    first = by_hand(copy.deepcopy(model), batch, 0, 1e-6)
    first.update()
    whole = peak_of(first.update, alive_in(first.model, [first.optimizer], batch))
    ways, rows = {}, []
    for key, make in WAYS.items():
        way = ways[key] = make(copy.deepcopy(model), batch, whole, 1e-6)
        way.update()
        peak = peak_of(way.on_device or way.update, alive_in(way.model, [way.optimizer], batch))
        host = 0 if way.pool is None else way.pool.bytes
        row: dict[str, Any] = {"model": name, "way": way.name, "how": way.how, "peak": peak, "share": peak / whole}
        rows.append(row | {"host": host} | errors_of(key, model, batch, whole))
        click.echo(f"{name}, {way.name}: {peak / whole:.3f}", err=True)
    times: dict[str, list[float]] = {key: [] for key in ways}
    for turn in range(rounds):
        for key in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            times[key].append(seconds(lambda way=ways[key]: way.update(), device))  # type: ignore[misc]
    for key, row in zip(ways, rows, strict=True):
        ratios = [own / plain for own, plain in zip(times[key], times["whole"], strict=True)]
        row |= {"ms an update": quartiles(times[key])[1] * 1e3, "ratio": quartiles(ratios)[1]}
        row["ratio quartiles"] = quartiles(ratios)[::2]
    return rows


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    low, high = row["ratio quartiles"]
    own = row.get("error to the frozen whole batch")
    return {
        "model": row["model"],
        "way": row["way"],
        "how": row["how"],
        "peak MiB": f"{row['peak'] / MIB:.1f} ({row['share']:.3f})",
        "host MiB": f"{row['host'] / MIB:.1f}" if row["host"] else "",
        "time": f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
        "gradient error": f"{row['gradient error']:.1e}" + (f" (to the frozen whole batch {own:.1e})" if own else ""),
        "statistics error": f"{row['statistics error']:.1e}",
        "counted": f"{row['counted']:g}",
    }


@click.command(help="Measures the ways to train a network with BatchNorm in less memory.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda")
@click.option("--quick", is_flag=True, help="Fewer rounds; for a first look.")
@click.option("--rounds", type=click.IntRange(min=1), help="Updates of each way that are timed.")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(MODELS)))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    device: str,
    quick: bool,
    rounds: int | None,
    chosen: tuple[str, ...],
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    where = torch.device(device)
    rows = [row for name in chosen or MODELS for row in measure(name, rounds or (3 if quick else 11), where)]
    known = {key: value for key, value in facts(where).items() if key not in ("accelerate", "lightning")}
    text = markdown("BatchNorm under a budget", known, NOTES, [shown(row) for row in rows])
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, [{**row, "ratio quartiles": list(row["ratio quartiles"])} for row in rows])


if __name__ == "__main__":
    main()
