"""Six losses on one trunk: memory and time of the ways to differentiate them.

    python benchmarks/heads.py                          # on the CPU, about six minutes
    python benchmarks/heads.py --quick                  # a small model, some seconds
    python benchmarks/heads.py -o heads.md --json heads.json

A trunk of 12 layers and six heads of 6 layers each, linear and GELU, and a classifier on each head. All sides make the
same update by the same optimizer; they go in turn in one process, in alternating order from round to round. The ratio
is the median over the rounds of a side's time over that of the summed backward in the same round.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from common import facts, markdown, quartiles, seconds, write_json, write_text
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

SUMMED = "summed backward"
TARGETS = {"peak": 0.45, "time": 1.02}
NOTES = (
    "Peak: the most bytes of live tensors in an update after the first, parameters and all that a training step holds",
    "included. Of summed: the peak over that of the summed backward. Ratio: time over that of the summed backward in",
    "the same round. Trunk: how often a backward goes through it. Error: distance of the gradient to the float64",
    "gradient of the sum, relative to the norm of that; it may be twice the summed backward's own and a rounding for",
    "each head. Sides that weigh the losses with UPGrad have another gradient on purpose.",
    "Targets for the cut and for TrainStep: at most 45 % of the peak, at most 1.02 of the time.",
)


CLASSES = 10


class ManyHeads(nn.Module):
    """A trunk of layers, and heads of layers that end in a classifier."""

    def __init__(self, width: int, trunk: int, heads: int, depth: int) -> None:
        super().__init__()
        self.trunk = _layers(width, trunk)
        self.heads = nn.ModuleList(
            [nn.Sequential(_layers(width, depth), nn.Linear(width, CLASSES)) for _ in range(heads)]
        )


def _layers(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(width, width), nn.GELU())])


@dataclass
class Case:
    """A model, its batch and its optimizer, the same for each side.

    Args:
        width: of the layers.
        rows: samples in the batch.
        heads: how many losses there are.
    """

    width: int
    rows: int
    heads: int
    device: torch.device
    model: Any = field(init=False)
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = ManyHeads(self.width, 12, self.heads, 6).to(self.device)
        self.x = torch.randn(self.rows, self.width, device=self.device)
        self.y = torch.randint(CLASSES, (self.rows,), device=self.device)
        # Without momentum, and so small that the weights stay what they are for every side.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-30)

    def losses(self, features: Tensor) -> Iterator[Tensor]:
        """The losses, each made when it is asked for."""
        for head in self.model.heads:
            yield F.cross_entropy(head(features), self.y)


Update = Callable[[], None]


def by_hand(case: Case, differentiate: Callable[[], None]) -> Update:
    """An update in a loop of one's own."""

    def update() -> None:
        case.optimizer.zero_grad()
        differentiate()
        case.optimizer.step()

    return update


def summed(case: Case) -> Update:
    """One backward of the sum of all losses."""
    return by_hand(case, lambda: torch.stack(list(case.losses(case.model.trunk(case.x)))).sum().backward())


def retained(case: Case) -> Update:
    """A backward for each loss of one forward; all but the last retain the graph."""

    def differentiate() -> None:
        losses = list(case.losses(case.model.trunk(case.x)))
        for loss in losses:
            loss.backward(retain_graph=loss is not losses[-1])

    return by_hand(case, differentiate)


def one_by_one(case: Case) -> Update:
    """The heads in a loop, each made when its turn comes; all but the last retain the trunk."""

    def differentiate() -> None:
        features = case.model.trunk(case.x)
        for k, head in enumerate(case.model.heads, start=1):
            F.cross_entropy(head(features), case.y).backward(retain_graph=k < case.heads)

    return by_hand(case, differentiate)


def cut(case: Case, **options: Any) -> Update:
    """The heads one at a time, from a cut."""

    def differentiate() -> None:
        with anybatch.cut(case.model.trunk(case.x), **options) as features:
            for loss in case.losses(features):
                loss.backward()
                del loss

    return by_hand(case, differentiate)


def train_step(case: Case) -> Update:
    """The same, yielded to a step."""

    def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        with anybatch.cut(model.trunk(batch[0])) as features:
            for head in model.heads:
                yield F.cross_entropy(head(features), batch[1])

    step = anybatch.TrainStep(case.model, loss_fn, case.optimizer)

    def update() -> None:
        step((case.x, case.y))

    return update


def mtl_backward(case: Case, aggregator: str) -> Update:
    """TorchJD: the rows of the shared parameters, combined by an aggregator."""
    autojac = importlib.import_module("torchjd.autojac")
    combine = getattr(importlib.import_module("torchjd.aggregation"), aggregator)()

    def differentiate() -> None:
        features = case.model.trunk(case.x)
        autojac.mtl_backward(list(case.losses(features)), features=features)
        autojac.jac_to_grad(list(case.model.trunk.parameters()), combine)

    return by_hand(case, differentiate)


def weighted(case: Case) -> Update:
    """TorchJD's aggregator on the rows of the cut."""
    return cut(case, weighting=importlib.import_module("torchjd.aggregation").UPGrad())


SIDES: Mapping[str, Callable[[Case], Update]] = {
    SUMMED: summed,
    "sequential, retain_graph": retained,
    "heads in a loop, retain_graph": one_by_one,
    "anybatch.cut": cut,
    "anybatch.TrainStep": train_step,
    "anybatch.cut, per_loss": lambda case: cut(case, per_loss=True),
    "TorchJD mtl_backward, Sum": lambda case: mtl_backward(case, "Sum"),
    "TorchJD mtl_backward, UPGrad": lambda case: mtl_backward(case, "UPGrad"),
    "anybatch.cut, TorchJD UPGrad": weighted,
}


@dataclass
class Found:
    """What was measured of one side."""

    update: Update
    peak: int = 0
    passes: int = 0
    error: float | None = None
    within: bool | None = None
    seconds: list[float] = field(default_factory=list)


def torchjd() -> str:
    """The version of TorchJD, or ``not installed``."""
    try:
        importlib.import_module("torchjd.autojac")
        return importlib.metadata.version("torchjd")
    except ImportError:
        return "not installed"


def truth(case: Case) -> list[Tensor]:
    """The gradient of the sum, in float64."""
    double = Case(case.width, case.rows, case.heads, case.device)
    double.model.double()
    double.x = double.x.double()
    summed(double)()
    return [p.grad for p in double.model.parameters()]


def errors(case: Case, exact: Sequence[Tensor]) -> tuple[float, float]:
    """The distance of ``.grad`` to the exact gradient, and the norm of the latter."""
    pairs = zip(case.model.parameters(), exact, strict=True)
    distance = math.sqrt(sum(float((p.grad.double() - e).square().sum()) for p, e in pairs))
    return distance, math.sqrt(sum(float(e.square().sum()) for e in exact))


def look_at(case: Case, found: Mapping[str, Found]) -> None:
    """Measures gradient, peak and passes of each side, once and after an update that does not count."""
    exact = truth(case)
    passes: list[int] = []
    handle = case.model.trunk[0].weight.register_hook(lambda _: passes.append(1))
    allowed = 0.0
    for name, one in found.items():
        one.update()
        passes.clear()
        memory = anybatch.measure(one.update, model=case.model, optimizer=case.optimizer, batch=(case.x, case.y))
        one.peak, one.passes = memory.peak_bytes, len(passes)
        if "UPGrad" in name:
            continue
        distance, size = errors(case, exact)
        if name == SUMMED:
            allowed = 2 * distance + 2.0**-24 * math.sqrt(case.heads) * size
        one.error, one.within = distance / size, distance <= allowed
    handle.remove()


def rows_of(found: Mapping[str, Found], missing: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row a side, unrounded; first the sides that ran."""
    base = found[SUMMED]
    rows: list[dict[str, Any]] = []
    for name, one in found.items():
        low, middle, high = quartiles([own / other for own, other in zip(one.seconds, base.seconds, strict=True)])
        rows.append(
            {
                "side": name, "peak": one.peak, "of summed": one.peak / base.peak, "passes": one.passes,
                "seconds": quartiles(one.seconds)[1], "ratio": middle, "quartiles": (low, high), "error": one.error,
                "within": one.within, "missing": "",
            }
        )  # fmt: skip
    return [*rows, *({"side": name, "missing": reason} for name, reason in missing.items())]


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    if row["missing"]:
        return {"side": row["side"], **dict.fromkeys(COLUMNS, ""), COLUMNS[0]: row["missing"]}
    low, high = row["quartiles"]
    error = "" if row["error"] is None else f"{row['error']:.1e}{'' if row['within'] else ' TOO LARGE'}"
    values = (
        f"{row['peak'] / 2**20:.1f}", f"{row['of summed']:.1%}", str(row["passes"]), f"{row['seconds']:.3f}",
        f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})", error,
    )  # fmt: skip
    return {"side": row["side"], **dict(zip(COLUMNS, values, strict=True))}


COLUMNS = ("peak MiB", "of summed", "trunk", "s an update", "ratio (quartiles)", "error")


def run_all(case: Case, names: Sequence[str], rounds: int, missing: Mapping[str, str]) -> list[dict[str, Any]]:
    """Measures the sides; returns one row for each, unrounded."""
    found = {name: Found(SIDES[name](case)) for name in names}
    look_at(case, found)
    for turn in range(rounds):
        sides = list(found.values())
        for one in sides if turn % 2 == 0 else reversed(sides):
            one.seconds.append(seconds(one.update, case.device))
    return rows_of(found, missing)


@click.command(help="Measures memory and time of several losses on one trunk.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--quick", is_flag=True, help="A small model and few rounds; for a first look.")
@click.option("--rounds", type=click.IntRange(min=1), help="Updates of each side that are timed.")
@click.option("--batch", "batch_size", type=click.IntRange(min=1), help="Samples in the batch.")
@click.option("--width", type=click.IntRange(min=1), help="Of each layer.")
@click.option("--heads", default=6, show_default=True, type=click.IntRange(min=1))
@click.option("--side", "names", multiple=True, type=click.Choice(list(SIDES)), help="The summed backward always runs.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    device: str,
    quick: bool,
    rounds: int | None,
    batch_size: int | None,
    width: int | None,
    heads: int,
    names: tuple[str, ...],
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    case = Case(width or (32 if quick else 256), batch_size or (512 if quick else 4096), heads, torch.device(device))
    version = torchjd()
    chosen = [name for name in SIDES if name == SUMMED or not names or name in names]
    missing = {name: version for name in chosen if "TorchJD" in name and version == "not installed"}
    rows = run_all(case, [name for name in chosen if name not in missing], rounds or (5 if quick else 15), missing)
    facts_of_all = facts(case.device)
    known = {
        **{key: facts_of_all[key] for key in ("device", "python", "torch")}, "torchjd": version,
        "model": f"trunk of 12 layers, {heads} heads of 6 and a classifier, width {case.width}, batch {case.rows}",
        **{key: facts_of_all[key] for key in ("date", "command")},
    }  # fmt: skip
    text = markdown("Several losses on one trunk", known, NOTES, [shown(row) for row in rows])
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, rows)


if __name__ == "__main__":
    main()
