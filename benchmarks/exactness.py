"""How far the accumulated gradient is from the gradient of the whole batch.

    python benchmarks/exactness.py                       # about a minute
    python benchmarks/exactness.py --quick               # one seed
    python benchmarks/exactness.py --device cuda --json exactness.json -o exactness.md

The error is the L2 norm of the difference over all parameters, relative to the norm of the float64 gradient of the
whole logical batch. The peers run as their documentation tells to by default; their gradients are read when they are
complete, before the optimizer's step. The learning rate is zero, so that all sides see the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import peers
import torch
from common import (
    IGNORED,
    Batch,
    LanguageModel,
    LossFunction,
    classification_loss,
    cut_rows,
    facts,
    language_loss,
    loader,
    markdown,
    missing,
    quartiles,
    to_device,
    write_json,
    write_text,
)
from torch import Tensor, nn

import anybatch

Gradient = list[Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data, and how the data reach it; the gradient of the last update is compared.

    Args:
        rows: all samples, in order.
        micro: samples in each micro-batch that the loader of the peers yields.
        window: micro-batches for each update.
        windowed: whether our side, too, is fed micro-batches, through ``anybatch.windows``.
    """

    name: str
    model: nn.Module
    rows: Batch
    loss_fn: LossFunction
    micro: int
    window: int
    count: Callable[[Batch], Any] = anybatch.count_samples
    windowed: bool = False

    @property
    def last(self) -> Batch:
        """The samples of the last update."""
        micro_batches = cut_rows(self.rows, self.micro)
        first = (len(micro_batches) - 1) // self.window * self.window * self.micro
        return {name: tensor[first:] for name, tensor in self.rows.items()}


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


def _points(count: int) -> Batch:
    return {"x": torch.randn(count, 16), "y": torch.randint(5, (count,))}


def uneven_last() -> Case:
    """22 samples in micro-batches of 8: 8, 8 and 6."""
    return Case("22 samples in micro-batches of 8", _classifier(), _points(22), classification_loss, micro=8, window=3)


def masked_tokens() -> Case:
    """16 texts of 2 to 48 tokens, padded to 48; the padding is not trained on."""
    tokens = torch.randint(64, (16, 48))
    lengths = torch.randint(2, 49, (16, 1))
    labels = tokens.masked_fill(torch.arange(48) >= lengths, IGNORED)
    model = LanguageModel(vocabulary=64, width=32, heads=4, layers=2, length=48)
    count = anybatch.count_tokens("labels", ignore_index=IGNORED, shift=1)
    rows = {"tokens": tokens, "labels": labels}
    return Case("masked tokens", model, rows, language_loss, micro=4, window=4, count=count)


def short_window() -> Case:
    """7 batches of 8 in windows of 4: the second window has 3."""
    rows = _points(56)
    return Case("short last window", _classifier(), rows, classification_loss, micro=8, window=4, windowed=True)


def low_precision() -> Case:
    """bfloat16 parameters and data, 512 micro-batches of 4."""
    rows = _points(2048)
    rows["x"] = rows["x"].bfloat16()
    return Case("bf16, 512 micro-batches", _classifier().bfloat16(), rows, classification_loss, micro=4, window=512)


CASES: dict[str, Callable[[], Case]] = {
    "uneven": uneven_last,
    "masked": masked_tokens,
    "window": short_window,
    "bf16": low_precision,
}


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def _gradients(model: nn.Module) -> Gradient:
    return [p.grad.detach().double().clone() for p in model.parameters() if p.grad is not None]


def whole(case: Case, device: torch.device, dtype: torch.dtype) -> Gradient:
    """The gradient of the whole last logical batch in one pass, in ``dtype``."""
    model = copy.deepcopy(case.model).to(device, dtype)
    case.loss_fn(model, to_device(_cast(case.last, dtype), device)).backward()
    return _gradients(model)


def by_hand(case: Case, device: torch.device) -> Gradient:
    """The loop that people write: every micro-batch's loss over the number of micro-batches of a full window."""
    model = copy.deepcopy(case.model).to(device)
    micro_batches = loader(case.rows, case.micro)
    found: Gradient = []
    for at, batch in enumerate(micro_batches):
        loss = case.loss_fn(model, to_device(batch, device)) / case.window
        loss.backward()
        if (at + 1) % case.window == 0 or at + 1 == len(micro_batches):
            found = _gradients(model)
            model.zero_grad()
    return found


def _ours(case: Case) -> Iterable[Any]:
    if case.windowed:
        return anybatch.windows(loader(case.rows, case.micro), batches=case.window)
    return loader(case.rows, case.micro * case.window)


def with_backward(case: Case, device: torch.device) -> Gradient:
    """``anybatch.backward``."""
    model = copy.deepcopy(case.model).to(device)
    for batch in _ours(case):
        model.zero_grad()
        anybatch.backward(model, case.loss_fn, batch, micro_batch_size=case.micro, count=case.count)
    return _gradients(model)


def with_step(case: Case, device: torch.device) -> Gradient:
    """``anybatch.TrainStep``; the gradient stays readable after the update."""
    model = copy.deepcopy(case.model).to(device)
    step = anybatch.TrainStep(model, case.loss_fn, _still(model), micro_batch_size=case.micro, count=case.count)
    for batch in _ours(case):
        step(batch)
    return _gradients(model)


def _still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _with_peer(loop: Any) -> Callable[[Case, torch.device], Gradient]:
    def run(case: Case, device: torch.device) -> Gradient:
        model = copy.deepcopy(case.model).to(device)
        found: list[Gradient] = []
        loop(
            model,
            case.loss_fn,
            _still(model),
            loader(case.rows, case.micro),
            window=case.window,
            clip_norm=None,
            device=device,
            before_step=lambda: found.append(_gradients(model)),
        ).epoch()
        return found[-1]

    return run


SIDES: dict[str, Callable[[Case, torch.device], Gradient]] = {
    "whole batch in float32": lambda case, device: whole(case, device, torch.float32),
    "whole batch in bfloat16": lambda case, device: whole(case, device, torch.bfloat16),
    "hand-written": by_hand,
    "anybatch.backward": with_backward,
    "anybatch.TrainStep": with_step,
    "Accelerate": _with_peer(peers.AccelerateLoop),
    "Lightning": _with_peer(peers.LightningLoop),
}


def relative_error(gradient: Gradient, reference: Gradient) -> float:
    """L2 norm of the difference over all parameters, over the norm of the reference."""
    difference = sum(float((one - two).square().sum()) for one, two in zip(gradient, reference, strict=True))
    return float((difference / sum(float(two.square().sum()) for two in reference)) ** 0.5)


def _applies(side: str, case: Case) -> bool:
    low = any(parameter.dtype == torch.bfloat16 for parameter in case.model.parameters())
    return low or side != "whole batch in bfloat16"


def errors(make: Callable[[], Case], names: Iterable[str], seeds: int, device: torch.device) -> list[dict[str, Any]]:
    """Runs one case with several seeds.

    Args:
        make: makes the case from the seeded generator.
        names: keys of ``SIDES``.
        seeds: how many seeds, from 0.
        device: where the models lie.

    Returns:
        One row for each side: median, smallest and largest error.
    """
    found: dict[str, list[float]] = {}
    case_name = ""
    for seed in range(seeds):
        torch.manual_seed(seed)
        case = make()
        case_name = case.name
        reference = whole(case, device, torch.float64)
        for name in names:
            if _applies(name, case):
                found.setdefault(name, []).append(relative_error(SIDES[name](case, device), reference))
    return [
        {"case": case_name, "side": name, "error": quartiles(values)[1], "least": min(values), "most": max(values)}
        for name, values in found.items()
    ]


def shown(row: dict[str, Any], seeds: int) -> dict[str, str]:
    """Rounds one row for the table."""
    return {
        "case": row["case"],
        "side": row["side"],
        "error (median)": f"{row['error']:.2g}",
        "least to most": f"{row['least']:.2g} to {row['most']:.2g}",
        "seeds": str(seeds),
    }


@click.command(help="Measures how far the accumulated gradient is from the gradient of the whole batch.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--quick", is_flag=True, help="One seed.")
@click.option("--seeds", type=click.IntRange(min=1), help="Seeds for each case.  [default: 5]")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)))
@click.option("--side", "names", multiple=True, type=click.Choice(list(SIDES)))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    device: str,
    quick: bool,
    seeds: int | None,
    cases: tuple[str, ...],
    names: tuple[str, ...],
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    where = torch.device(device)
    left_out = missing(names or SIDES)
    for side in left_out:
        click.echo(str(side))
    usable = [name for name in names or SIDES if name not in {side.side for side in left_out}]
    repeats = seeds or (1 if quick else 5)
    rows = [row for name in cases or CASES for row in errors(CASES[name], usable, repeats, where)]
    notes = [
        "Error: L2 norm over all parameters of the difference to the float64 gradient of the whole logical batch,",
        "relative to that gradient's norm; 0.14 is 14 % off. The peers accumulate by their default.",
        *(f"{side}." for side in left_out),
    ]
    known = facts(where)
    known["device"] = known["device"].split(",")[0]
    text = markdown(
        "Gradient error against the whole batch in float64", known, notes, [shown(row, repeats) for row in rows]
    )
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, rows)


if __name__ == "__main__":
    main()
