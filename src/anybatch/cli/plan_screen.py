"""The output of ``anybatch plan``, over ranks too: tables for a terminal, plain text in a pipe."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from anybatch.records.plans import Plan, RankPlan
from anybatch.report import frontier
from anybatch.report.frontier import micro_batches
from anybatch.report.terminal import Terminal
from anybatch.units import format_bytes

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
