"""``anybatch estimate``: how much memory would training a known model take, on a device that need not be here?"""

import sys
from pathlib import Path
from typing import Any

import click

from anybatch.cli.options import json_option
from anybatch.cli.plan import show_ways
from anybatch.cli.reporting import Outputs
from anybatch.records.plans import Plan
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
    kept = {what: one.to_dict() if isinstance(one, Plan) else {"error": one} for what, one in found.items()}
    outputs.write({"version": 1, "kind": "anybatch estimate", "model": model, "trained": kept})
    terminal = Terminal(outputs.console())
    terminal.words(f"{model}: a batch of {batch} within {memory}, {optimizer}, {dtype}", style="bold")
    for what, one in found.items():
        if isinstance(one, str):
            terminal.words(f"{what}: {one}")
            continue
        terminal.heading(what)
        show_ways(one, terminal, _MOST_ROWS, "--json")
        if one.smallest_bytes:
            terminal.words(f"The smallest budget with a plan: {format_bytes(one.smallest_bytes)}")
    if all(isinstance(one, str) for one in found.values()):
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
