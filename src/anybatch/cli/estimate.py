"""``anybatch estimate``: how much memory would training a known model take, on a device that need not be here?"""

import sys
from pathlib import Path
from typing import Any

import click

from anybatch.cli.options import json_option, json_text
from anybatch.cli.reporting import Outputs
from anybatch.records.plans import Plan, PlanRow
from anybatch.report.frontier import rows_of, time_header, time_text
from anybatch.report.tables import TextTable
from anybatch.report.terminal import Terminal
from anybatch.units import format_bytes, parse_bytes

_MOST_ROWS = 6


def _size(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        parse_bytes(value)
    except ValueError:
        raise click.BadParameter(f"got {value!r}; expected a size such as 24GiB") from None
    return value


@click.command("estimate", short_help="How much memory does training a known model take?")
@click.argument("model")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Samples in a batch.")
@click.option(
    "--length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens in a sample, or pixels on a side.  [default: 512, or what the model was made for]",
)
@click.option(
    "--memory", metavar="SIZE", required=True, callback=_size, help="The memory budget of a step, such as 24GiB."
)
@click.option(
    "--device", metavar="NAME", help="The card, such as h100, to predict times.  [default: any card with that memory]"
)
@click.option(
    "--optimizer", type=click.Choice(["adamw", "adam", "sgd", "adafactor"]), default="adamw", show_default=True
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="The dtype of the weights.",
)
@click.option("--lora", type=click.IntRange(min=1), metavar="RANK", help="Plan LoRA of this rank, too.")
@json_option("the plans")
def estimate_command(
    model: str,
    batch: int,
    length: int | None,
    memory: str,
    device: str | None,
    optimizer: str,
    dtype: str,
    lora: int | None,
    json_path: Path | None,
) -> None:
    """Plans the training of MODEL within a memory budget, without its weights and without downloads.

    MODEL is a folder with a config.json of Transformers, a name in the cache of Transformers, a name of timm or
    torchvision, or module:function, which returns an nn.Module. It is built on the meta device, so it takes no memory.

    Exit codes: 0 if something fits, 1 if nothing does, 2 if there is no such model.
    """
    outputs = Outputs(json_path)
    wishes = {"rows": batch, "length": length or 0, "memory": memory, "device": device, "optimizer": optimizer,
              "dtype": dtype}  # fmt: skip
    found: dict[str, Plan | str] = {}
    for what, rank in [("all weights", None), *([(f"LoRA of rank {lora}", lora)] if lora else [])]:
        found[what] = _estimated(model, {**wishes, "lora": rank})
    plans = {what: one for what, one in found.items() if isinstance(one, Plan)}
    kept = {what: one.to_dict() if isinstance(one, Plan) else {"error": one} for what, one in found.items()}
    outputs.write(lambda _: json_text({"version": 1, "kind": "anybatch estimate", "model": model, "trained": kept}))
    terminal = Terminal(outputs.console())
    terminal.words(f"{model}: a batch of {batch} within {memory}, {optimizer}, {dtype}", style="bold")
    if plans:
        _show(plans, terminal)
    for what, one in found.items():
        if isinstance(one, str):
            terminal.words(f"{what}: {one}")
    if not plans:
        if not lora:
            terminal.words("Not tried: --lora 16, which trains thin matrices in the place of the weights.")
        sys.exit(1)


def _estimated(model: str, wishes: dict[str, Any]) -> Plan | str:
    """A plan, or why there is none."""
    from anybatch.errors import AnyBatchError, DoesNotFit
    from anybatch.planning.estimating import estimate

    try:
        return estimate(model, **wishes)
    except DoesNotFit as error:
        return f"does not fit: {error}"
    except AnyBatchError as error:
        raise click.UsageError(f"{model} can't be estimated: {error}") from None


def _show(plans: dict[str, Plan], terminal: Terminal) -> None:
    """The configurations that fit, those of each plan with the fastest first."""
    first = next(iter(plans.values()))
    header = ("trained", "micro-batches", "recompute", "offload", "loss", "peak", time_header(first))
    rows, marked = list[tuple[str, ...]](), set[int]()
    for what, plan in plans.items():
        fitting = [row for row in rows_of(plan) if row.peak_bytes <= plan.budget]
        for row in [plan.chosen, *[one for one in fitting if one != plan.chosen]][:_MOST_ROWS]:
            if row == plan.chosen:
                marked.add(len(rows))
            rows.append(_cells(what, plan, row))
    terminal.line()
    terminal.table(TextTable(header, tuple(rows), frozenset(marked)))
    smallest = [f"{what}: {format_bytes(one.smallest_bytes)}" for what, one in plans.items() if one.smallest_bytes]
    terminal.words(f"The smallest budget that a plan can be made for: {'; '.join(smallest)}")


def _cells(what: str, plan: Plan, row: PlanRow) -> tuple[str, ...]:
    blocks = (str(len(names)) if names else "-" for names in (row.recompute, row.offload))
    chunks = f"{row.loss_chunks} chunks" if row.loss_chunks > 1 else "-"
    size = f"{row.micro_batches} of {row.micro_batch_size:g}"
    return (what, size, *blocks, chunks, format_bytes(row.peak_bytes), time_text(plan, row.seconds))
