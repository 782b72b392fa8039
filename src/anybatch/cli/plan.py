"""``anybatch plan``: what is the fastest configuration of the user's training step within a memory budget?"""

import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.text import Text

from anybatch.cli import options
from anybatch.cli.reporting import Outputs, write_whole
from anybatch.cli.script import Ending, run_until_first_call
from anybatch.errors import BatchError
from anybatch.records.memory import Timeline
from anybatch.records.plans import SHARDS, Plan, RankPlan, Shard
from anybatch.report import frontier
from anybatch.report.frontier import micro_batches
from anybatch.report.terminal import Terminal
from anybatch.units import at_lines, format_bytes, read_budget

_WIDTH = 80
_KIND_BYTES = 200  # within which a file of anybatch says what it is
_TOO_LARGE = "anybatch does not fit"
"""The kind of the JSON where nothing fits."""

_THROUGH = {"transformers": "ExactTrainer", "trl": "ExactTraining", "lightning": "ExactGradient",
            "pytorch_lightning": "ExactGradient"}  # fmt: skip
"""The adapters of libraries that take the steps, which plan by themselves."""

_LEAST = 128  # bytes of a budget without a unit; what is less was meant as GiB


def memory_of(ctx: click.Context, param: click.Parameter, value: str | None) -> str | float | None:
    """Reads a budget, so that a wrong one is refused before the script runs; a share of the device as a float."""
    if value is None:
        return None
    try:
        budget = read_budget(value)
    except BatchError:
        raise click.BadParameter(
            f"got {value!r}; expected a size such as 8GiB or 500MB, a part such as 0.5 or 50%, or free"
        ) from None
    if isinstance(budget, int) and budget < _LEAST and not value.strip()[-1].isalpha():
        many = "1 byte" if budget == 1 else f"{budget} bytes"
        raise click.BadParameter(f"got {value!r}, which is {many}; expected a unit, such as {value.strip()}GiB")
    return budget if isinstance(budget, float) else value


@click.command(
    "plan", cls=options.ScriptCommand, short_help="What is the fastest configuration within a memory budget?"
)
@options.of_script
@click.option(
    "--memory",
    metavar="SIZE",
    callback=memory_of,
    help="The memory budget of a step: 8GiB, a share of the device such as 0.5, or free.  [default: that of the "
    "script, else free]",
)
@click.option(
    "--device", metavar="NAME", help="Plan for another card: its name such as h200, or its size such as 24GiB."
)
@click.option(
    "--batch-norm",
    type=click.Choice(["ghost", "frozen"]),
    help=(
        "Split batches of a model with BatchNorm: ghost uses the statistics of each micro-batch, frozen the "
        "running ones.  [default: that of the script, else batches are not split]"
    ),
)
@click.option(
    "--ranks",
    metavar="N",
    type=click.IntRange(min=1),
    help="Plan for N ranks, each with the script's batch: what each one does and holds.",
)
@click.option(
    "--shard",
    type=click.Choice(SHARDS),
    help="How ranks hold the model: a copy each, fully_shard of each block, or that with "
    "reshard_after_forward=False.  [default with --ranks: ddp]",
)
@options.page_option
@options.file_option("--patch", help="For a plain loop: write the lines to change as a patch, for patch -p1.")
@options.json_option("the plan, for anybatch.Plan.load,")
@options.force_option
@options.timeout_option
def plan_command(
    target: options.Target,
    memory: str | float | None,
    device: str | None,
    batch_norm: str | None,
    ranks: int | None,
    shard: Shard | None,
    output: Path | None,
    patch: Path | None,
    json_path: Path | None,
    force: bool,
    timeout: float | None,
) -> None:
    """Finds the fastest configuration of SCRIPT's training step within a memory budget.

    SCRIPT runs unchanged, with the arguments after it, until it first calls anybatch.TrainStep or anybatch.backward; a
    plain loop runs until its first optimizer step. anybatch plans for the model, loss, batch and optimizer found there,
    and prints the configurations that fit and the lines of the loop to change. Then the process ends: nothing is
    trained, and no finally block or exit handler of the script runs.

    With --ranks the script still runs as one process, without a process group.

    If the step refuses micro-batches, since their gradient would be another one, the plan is of the whole batch.

    Exit codes: 0 for a plan, 1 if nothing fits in the budget or OverTime refuses its chunks, 2 if the script never
    reached a step.
    """
    if shard is not None and ranks is None:
        raise click.UsageError("--shard says how the model is sharded over ranks; add --ranks N")
    if ranks is not None and (output or patch):
        raise click.UsageError("a plan over ranks is shown, and written with --json; leave -o and --patch out")
    outputs = Outputs(json_path, page=output, force=force)
    options.check_file(outputs.json_path, "plan", _is_own_plan, force=force)
    options.check_file(patch, "patch", options.is_patch, force=force)
    question: dict[str, Any] = {
        "verb": "plan", "memory": memory, "device": device, "ranks": ranks, "shard": shard or "ddp",
        "batch_norm": batch_norm, "saved": None if outputs.json_path is None else str(outputs.json_path),
        "timeline": output is not None,
    }  # fmt: skip
    ending = run_until_first_call(target, timeout, question)
    if ending.status == "too-large":
        _end_too_large(ending.facts, target.name, outputs)
    if ranks is not None:
        ranked = RankPlan.from_dict(ending.facts["plan"])
        show = partial(show_rank_plan, ranked, notes=_notes(ending))
        outputs.write(ranked.to_dict(), show)
        return
    _report(ending, target.name, question, patch, outputs)


def _is_own_plan(path: Path) -> bool:
    """Whether a file is a plan, or what was written where nothing fitted; an empty one has nothing to lose."""
    with path.open("rb") as file:
        start = file.read(_KIND_BYTES)
    return not start or any(f'"kind": "{kind}'.encode() in start for kind in ("anybatch plan", _TOO_LARGE))


def _report(ending: Ending, script: str, question: Mapping[str, Any], patch: Path | None, outputs: Outputs) -> None:
    """Writes a plan to all places; one that can't be written takes none of the others away."""
    from anybatch.report.frontier import plan_page

    plan, notes, facts = Plan.from_dict(ending.facts["plan"]), _notes(ending), ending.facts
    refusal = facts.get("refusal", "")
    is_refused = bool(refusal) and not facts["is_whole"]  # a loss in pieces has no plan of the whole batch
    use = _use_of(plan, question["memory"], question["batch_norm"], question["saved"], facts)
    steps = {name: Timeline.from_dict(one) for name, one in facts.get("steps", {}).items()}

    def show(console: Console) -> None:
        if refusal:
            show_choice(plan, Terminal(console), notes)
            if facts["is_whole"]:
                console.print(f"\nMicro-batches are refused: {refusal}", markup=False, soft_wrap=True)
        else:
            show_plan(plan, console, notes)
        if not is_refused:
            _show_use(console, use, facts, patch)

    def to_patch() -> None:
        if patch is not None and facts.get("change"):
            write_whole(patch, facts["change"])

    outputs.write(
        plan.to_dict(), show, lambda: plan_page(plan, Path(script).name, notes, steps),
        to_patch,
    )  # fmt: skip
    if is_refused:
        raise click.ClickException(f"the step can't be split as planned: {refusal}")


def _notes(ending: Ending) -> list[str]:
    """What has to be known about the figures."""
    notes = []
    size = ending.facts["micro_batch_size"]
    if size is not None:
        notes.append(f"The script sets micro_batch_size={size:g}; the plan has its own.")
    if not ending.facts["updates"]:
        notes.append("anybatch.backward has no optimizer, so its state and its step are not in the figures.")
    if lines := ending.facts.get("other_backwards"):
        notes.append(
            f"The figures are of the loss whose backward() is called at {ending.facts['found']} alone. The loop "
            f"calls backward() for other losses, too ({at_lines(lines)}); where they belong to the same update, "
            'have one loss function return them in a mapping, as in: return {"first": first, "second": second}'
        )
    if ending.facts.get("refusal"):
        notes.append(
            "This is a plan of the whole batch: micro-batches are refused, for the reason given below."
            if ending.facts["is_whole"]
            else "The step refuses these micro-batches: they would not give the whole batch's gradient."
        )
    elif ending.facts.get("unproved"):
        notes.append(f"It is not proved that micro-batches have the whole batch's gradient: {ending.facts['unproved']}")
    elif ending.facts.get("obstacle"):
        batch = f" The batch is {ending.facts['batch']}." if "batch" in ending.facts else ""
        notes.append(f"The batch counts as one sample, since it can't be split: {ending.facts['obstacle']}.{batch}")
    return notes


def _show_use(console: Console, use: str, facts: dict[str, Any], patch: Path | None) -> None:
    """Writes how to run what was planned: the call, or the lines of a loop that change."""
    change = facts.get("change", "")
    if not change:
        console.print(f"\nTo use it: {use}", markup=False, soft_wrap=True)
        if "found" in facts:
            console.print(f"The loop has to be changed by hand: {facts['trouble']}", markup=False, soft_wrap=True)
        if patch is not None:
            why = "the loop has to be changed by hand" if "found" in facts else "the script calls anybatch itself"
            console.print(f"No patch was written: {why}.", markup=False, soft_wrap=True)
        return
    behind = f", or: patch -p1 < {patch}" if patch is not None else ""
    console.print(f"\nTo use it, change the loop at {facts['found']}{behind}\n", markup=False, soft_wrap=True)
    console.print(change.rstrip("\n"), markup=False, soft_wrap=True)
    if "anybatch.Plan.load" in change:
        console.print("\nSave the plan that it loads with --json plan.json", markup=False)


def _use_of(
    plan: Plan, memory: str | float | None, batch_norm: str | None, saved: str | None, facts: dict[str, Any]
) -> str:
    """How to run what was planned."""
    verb = "TrainStep" if facts["updates"] else "backward"
    count = f", count={facts['count']}" if facts.get("count") else ""
    adapter = _THROUGH.get(facts.get("library", ""), "")
    if saved is not None and not adapter:
        return f'anybatch.{verb}(..., plan=anybatch.Plan.load("{saved}"){count})'
    is_whole = bool(facts.get("refusal")) and not adapter  # with a budget the step would look at the split again
    if (is_whole or not facts["updates"]) and plan.chosen.optimizations:
        return f'save it with --json plan.json, then anybatch.{verb}(..., plan=anybatch.Plan.load("plan.json"))'
    if is_whole:
        return f"anybatch.{verb}(...) without memory= and micro_batch_size=, since the whole batch fits"
    if not facts["updates"]:
        return f"anybatch.backward(..., micro_batch_size={plan.micro_batch_size:g}{count})"
    if memory is None and facts["plans_itself"]:
        return f"run the script: its {adapter or 'TrainStep'} makes the plan"
    wish = memory if isinstance(memory, float) else f'"{memory or "free"}"'
    norm = f', batch_norm="{batch_norm}"' if batch_norm else ""
    return f"{adapter or 'anybatch.TrainStep'}(..., memory={wish}{norm}{count})"


def _end_too_large(facts: dict[str, Any], script: str, outputs: Outputs) -> NoReturn:
    """Says what is missing, and ends with 1."""
    outputs.write({"version": 1, "kind": _TOO_LARGE, **facts})
    lines = textwrap.wrap(
        f"the step of {script} does not fit: {facts['error']}", _WIDTH, break_long_words=False, break_on_hyphens=False
    )
    if facts["needed"] is not None and facts["budget"] is not None:
        lines.append(f"needed: {format_bytes(facts['needed'])}, allowed: {format_bytes(facts['budget'])}")
    if facts["modules"]:
        lines.append(f"held by: {', '.join(facts['modules'])}")
    if 'batch_norm="ghost"' in facts["error"]:
        lines.append(f"the lines for statistics of micro-batches: anybatch plan --batch-norm ghost {script} ...")
    if facts.get("refusal"):
        lines.append(f"why it is not split: {facts['refusal']}")
    raise click.ClickException("\n".join(lines))


_MOST_ROWS = 12
_MOST_MODULES = 8
_BAR_WIDTH = 30
_ELSEWHERE = "--json or --output"


def show_plan(plan: Plan, console: Console, notes: Iterable[str] = ()) -> None:
    """Prints a plan."""
    terminal = Terminal(console)
    show_choice(plan, terminal, notes)
    terminal.heading("Configurations, fastest first")
    show_ways(plan, terminal, _MOST_ROWS)
    _show_peak(plan, terminal)
    if plan.modules:
        terminal.heading("The blocks that hold the most, activations of one micro-batch")
        terminal.table(frontier.modules_table(plan, _MOST_MODULES))
        terminal.rest(len(plan.modules) - _MOST_MODULES, _ELSEWHERE)


def show_choice(plan: Plan, terminal: Terminal, notes: Iterable[str] = ()) -> None:
    """Prints the chosen configuration and its costs."""
    terminal.words(frontier.summary_of(plan), style="bold green")
    terminal.line()
    for name, text in (*frontier.facts_of(plan), *(("note", note) for note in notes)):
        terminal.term(name, text)


def show_ways(plan: Plan, terminal: Terminal, most: int, elsewhere: str = _ELSEWHERE) -> None:
    """Prints the table of configurations; ``most`` rows, and the chosen one."""
    rows = frontier.rows_of(plan)
    shown = [row for index, row in enumerate(rows) if index < most or row == plan.chosen]
    terminal.table(frontier.rows_table(plan, shown), left=(0, 7))
    terminal.rest(len(rows) - len(shown), elsewhere)
    if notes := frontier.rows_notes(plan, shown):
        terminal.words("; ".join(notes))


def _show_peak(plan: Plan, terminal: Terminal) -> None:
    console = terminal.console
    terminal.heading(f"At the peak of {format_bytes(plan.peak_bytes)}")
    mark = "#" if console.options.ascii_only else "█"
    shares = frontier.shares_of(plan.at_peak)
    width = max((len(name) for name, _, _ in shares), default=0)
    for name, count, part in shares:
        bar = mark * round(part * _BAR_WIDTH)
        line = Text(f"{name:<{width}}  {format_bytes(count):>10}  {part:>4.0%}")
        console.print(line.append(f"  {bar}" if bar else "", style="cyan"), soft_wrap=True)
    if plan.binding:
        terminal.words(plan.binding)


_WAYS = {
    "ddp": "each with the whole model",
    "fsdp2": "each block and the whole under fully_shard",
    "fsdp2-kept": "each block and the whole under fully_shard, gathered throughout a step",
}


def show_rank_plan(plan: RankPlan, console: Console, notes: Iterable[str] = ()) -> None:
    """Prints a plan over ranks."""
    row = plan.plan.chosen
    optimizations = f", {row.optimizations}" if row.optimizations else ""
    terminal = Terminal(console)
    terminal.words(
        f"{plan.ranks} ranks, {_WAYS[plan.shard]}: {micro_batches(row)} on each{optimizations}",
        style="bold green",
    )
    terminal.line()
    terminal.words(f"A step is over {plan.samples} samples: the batch of the script, {plan.plan.samples}, on each.")
    terminal.words(f"A rank takes up to {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget)}.")
    for note in notes:
        terminal.words(note)
    terminal.heading("What a rank holds at its peak")
    terminal.table(frontier.shares_table(plan.at_peak))
