"""``anybatch tune``: the batch that fits, the batch that pays, and the learning rate that goes with it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from anybatch.cli import options
from anybatch.cli.plan import memory_of
from anybatch.cli.reporting import Outputs
from anybatch.cli.script import NoAnswer, run_until_first_call
from anybatch.records.tunings import BatchAdvice
from anybatch.report.tables import TextTable
from anybatch.report.terminal import Terminal

_BAR = 24
_LEAST = 3  # measurements that a noise scale is told from


@click.command("tune", cls=options.ScriptCommand, short_help="Which batch size and learning rate should I use?")
@options.of_script
@click.option("--memory", metavar="SIZE", callback=memory_of, help="The memory budget of a step, as in anybatch plan.")
@click.option(
    "--steps", type=click.IntRange(min=_LEAST), default=24, show_default=True, help="How many steps to measure."
)
@options.page_option
@options.json_option("the answer")
@options.force_option
@options.timeout_option
def tune_command(
    target: options.Target,
    memory: str | float | None,
    steps: int,
    output: Path | None,
    json_path: Path | None,
    force: bool,
    timeout: float | None,
) -> None:
    """Recommends a batch size that fits, one that pays, and the learning rate that goes with it.

    SCRIPT runs twice: first to its first step, to plan it, then for some steps, to measure its gradient noise scale. A
    plain loop runs with the changes that anybatch plan prints; the file stays unchanged. Then a few updates at several
    learning rates start from the state of the run, and the process ends.

    Exit codes: 0 for an answer, 1 if nothing fits in the budget, 2 if the script never reached a step or gave up (by an
    error or an exit code) before it was measured.
    """
    outputs = Outputs(json_path, page=output, force=force)
    plan, tuned = _asked(target, memory, steps, timeout)
    chosen = plan["plan"]["chosen"]
    many = f"in {chosen['micro_batches']} micro-batches of {chosen['micro_batch_size']:g}"
    way = "as it is" if chosen["micro_batches"] == 1 else many
    found = replace(BatchAdvice.from_dict(tuned), batch=plan["plan"]["samples"], way=way)
    values = {"version": 1, "kind": "anybatch tune", "answer": str(found), **found.to_dict()}
    from anybatch.report.notebook import page_of_advice

    outputs.write(values, partial(_show, found), lambda: page_of_advice(found))


def _show(found: BatchAdvice, console: Console) -> None:
    terminal = Terminal(console)
    terminal.words(str(found), style="bold green")
    _picture(found, terminal)
    _rates(found, terminal)


def _asked(
    target: options.Target, memory: str | float | None, steps: int, timeout: float | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan of the first step, and what some steps told."""
    question: dict[str, Any] = {"verb": "plan", "memory": memory, "device": None, "ranks": None, "shard": "ddp"}
    plan = run_until_first_call(target, timeout, question)
    if plan.status == "too-large":
        raise click.ClickException(f"the step of {target.name} does not fit: {plan.facts['error']}")
    if not plan.facts["updates"]:
        raise NoAnswer(
            f"{target.name} calls anybatch.backward and takes its update itself, which can't be measured; change it to "
            "anybatch.TrainStep, and tune it again"
        )
    question = {"verb": "tune", "steps": steps}
    if "found" in plan.facts:  # of a plain loop: it runs with its lines changed
        at, _, line = plan.facts["found"].rpartition(":")
        if not plan.facts["after"]:
            why = plan.facts["trouble"] or (
                "its update stays the loop's own, since it is not one zero_grad, backward and step of one optimizer "
                "in a loop, with at most a clip between whose norm is not read, and before them no line that may leave "
                "the batch out by the loss, or that has to know the model or the optimizer"
            )
            raise NoAnswer(
                f"{at}:{line} can't be measured: {why}. Call an anybatch.TrainStep in its place, and tune it again"
            )
        question["sources"] = {at: plan.facts["after"]}
    tuned = run_until_first_call(target, timeout, question)
    return plan.facts, tuned.facts


def _picture(tuned: BatchAdvice, terminal: Terminal) -> None:
    """Updates and samples to the same loss by the size of the batch."""
    if not tuned.sizes:
        return
    mark = "#" if terminal.console.options.ascii_only else "█"
    rows = []
    for size in tuned.sizes:
        updates, samples = tuned.cost(size)
        what = ("pays" if size == tuned.pays else "") + (" yours" if size == tuned.batch else "")
        rows.append((str(size), _bar(updates, mark), _bar(samples, mark), what.strip()))
    terminal.heading("What a batch costs, in updates and in samples: 1 is the least")
    marked = frozenset(place for place, size in enumerate(tuned.sizes) if size == tuned.pays)
    terminal.table(TextTable(("batch", "updates", tuned.unit, ""), tuple(rows), marked), left=(1, 2, 3))


def _bar(times: float, mark: str) -> str:
    length = min(_BAR, max(1, round(times)))
    return f"{mark * length}{'+' if times > _BAR else ''} {times:.3g}"


def _rates(tuned: BatchAdvice, terminal: Terminal) -> None:
    """What the range test found."""
    if not tuned.rated:
        terminal.words(
            f"No learning rate was tried: no step runs once the script has ended, after {tuned.steps} steps here; give "
            "a smaller --steps."
        )
        return
    falls = {factor: fall for factor, fall in tuned.rated if fall is not None and fall > 0}
    if not falls:
        terminal.words("No learning rate lowered the loss within a few updates from here.")
        return
    best, most = max(falls, key=lambda factor: falls[factor]), max(falls)
    highest = max(factor for factor, _ in tuned.rated)
    further = "no higher one was tried" if most == highest else f"it still fell at {tuned.rate * most:.3g}"
    terminal.words(
        "Learning rates tried for a few updates with your batch, from where the run was: the loss fell furthest at "
        f"{tuned.rate * best:.3g}; {further}. Yours is {tuned.rate:g}.",
    )
