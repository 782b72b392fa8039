"""The output of ``anybatch plan``, over ranks too: tables for a terminal, plain text in a pipe."""

import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from anybatch.records.plans import Plan
from anybatch.records.rankplans import RankPlan
from anybatch.report import frontier
from anybatch.report.frontier import micro_batches
from anybatch.report.tables import TextTable
from anybatch.units import format_bytes

_MOST_ROWS = 12
_MOST_MODULES = 8
_BAR_WIDTH = 30
_TERM_WIDTH = 12
_TEXT_WIDTH = 100
_GAP = "  "


def show_plan(plan: Plan, console: Console, notes: Iterable[str] = ()) -> None:
    """Prints a plan."""
    show_choice(plan, console, notes)
    heading(console, "Configurations, fastest first")
    show_ways(plan, console, _MOST_ROWS)
    _show_peak(plan, console)
    if plan.modules:
        heading(console, "The blocks that hold the most, activations of one micro-batch")
        print_table(console, frontier.modules_table(plan, _MOST_MODULES), left=(0,))
        _print_rest(console, len(plan.modules) - _MOST_MODULES, "--json or --html")


def show_choice(plan: Plan, console: Console, notes: Iterable[str] = ()) -> None:
    """Prints the chosen configuration and its costs."""
    print_words(console, frontier.summary_of(plan), style="bold green")
    console.print()
    for term, text in (*frontier.facts_of(plan), *(("note", note) for note in notes)):
        print_words(console, f"{term:<{_TERM_WIDTH}}{text}", indent=" " * _TERM_WIDTH)


def show_ways(plan: Plan, console: Console, most: int, elsewhere: str = "--json or --html") -> None:
    """Prints the table of configurations; ``most`` rows, and the chosen one."""
    rows = frontier.rows_of(plan)
    shown = [row for index, row in enumerate(rows) if index < most or row == plan.chosen]
    print_table(console, frontier.rows_table(plan, shown), left=(0, 7))
    _print_rest(console, len(rows) - len(shown), elsewhere)
    print_words(console, "; ".join(frontier.rows_notes(plan, shown)))


def _print_rest(console: Console, count: int, elsewhere: str) -> None:
    if count > 0:
        _print_line(console, f"and {count} more: {elsewhere}")


def _show_peak(plan: Plan, console: Console) -> None:
    heading(console, f"At the peak of {format_bytes(plan.peak_bytes)}")
    mark = "#" if console.options.ascii_only else "█"
    shares = frontier.shares_of(plan)
    width = max((len(name) for name, _, _ in shares), default=0)
    for name, count, part in shares:
        bar = mark * round(part * _BAR_WIDTH)
        line = Text(f"{name:<{width}}  {format_bytes(count):>10}  {part:>4.0%}")
        console.print(line.append(f"  {bar}" if bar else "", style="cyan"), soft_wrap=True)
    if plan.binding:
        print_words(console, plan.binding)


def print_table(console: Console, content: TextTable, *, left: tuple[int, ...]) -> None:
    """Prints a table without wrapping its lines."""
    rows = [content.header, *content.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(content.header))]
    for index, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        style = "cyan" if index == 0 else "bold green" if index - 1 in content.marked else ""
        _print_line(console, _GAP.join(cells).rstrip(), style)


def _print_line(console: Console, text: str, style: str = "") -> None:
    """Writes a line that is not wrapped, so that columns stay columns and names can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


def print_words(console: Console, text: str, indent: str = "", style: str = "") -> None:
    """Prints a sentence, wrapped at 100 columns or the width of the terminal."""
    width = min(console.width, _TEXT_WIDTH)
    for line in textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False):
        _print_line(console, line, style)


def heading(console: Console, text: str) -> None:
    """Prints a heading after an empty line."""
    console.print()
    console.print(Text(text, style="bold"))


_MOST_UNITS = 8
_WAYS = {
    "ddp": "each with the whole model",
    "fsdp2": "each block and the whole under fully_shard",
    "fsdp2-kept": "each block and the whole under fully_shard, gathered throughout a step",
}


def show_rank_plan(plan: RankPlan, console: Console, notes: Iterable[str] = ()) -> None:
    """Prints a plan over ranks."""
    row = plan.plan.chosen
    optimizations = f", {row.optimizations}" if row.optimizations else ""
    print_words(
        console,
        f"{plan.ranks} ranks, {_WAYS[plan.shard]}: {micro_batches(row)} on each{optimizations}",
        style="bold green",
    )
    console.print()
    print_words(
        console, f"A step is over {plan.samples} samples: the batch of the script, {plan.plan.samples}, on each."
    )
    print_words(
        console,
        f"A rank takes up to {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget)}, and sends "
        f"{format_bytes(plan.sent_bytes)} a step.",
    )
    for note in notes:
        print_words(console, note)
    sections: tuple[tuple[str, tuple[str, ...], list[tuple[str, ...]]], ...] = (
        ("What a rank holds at its peak", ("", "bytes", "share"),
         [(name, format_bytes(size), f"{size / max(plan.peak_bytes, 1):.0%}") for name, size in plan.at_peak.items()]),
        ("What goes over the network in a step", ("", "times", "whole", "sent by a rank"),
         [(one.name, str(one.count), format_bytes(one.payload_bytes), format_bytes(one.sent_bytes))
          for one in plan.traffic]),
        ("What is gathered and reduced together", ("", "parameters", "on a rank"),
         [(unit.name or "what is in no block", format_bytes(unit.whole_bytes), format_bytes(unit.rank_bytes))
          for unit in plan.units[:_MOST_UNITS]]),
    )  # fmt: skip
    for title, header, rows in sections:
        if rows:
            heading(console, title)
            print_table(console, TextTable(header, tuple(rows)), left=(0,))
    if len(plan.units) > _MOST_UNITS:
        print_words(console, f"and {len(plan.units) - _MOST_UNITS} more: --json")
