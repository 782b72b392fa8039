"""The output of ``anybatch plan --ranks``: what each rank does, holds and sends in a step."""

from collections.abc import Iterable

from rich.console import Console

from anybatch.cli.plan_screen import heading, print_table, print_words
from anybatch.records.rankplans import RankPlan
from anybatch.report.frontier import micro_batches
from anybatch.report.tables import TextTable
from anybatch.units import format_bytes

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
    heading(console, "What a rank holds at its peak")
    rows = [(name, format_bytes(size), f"{size / max(plan.peak_bytes, 1):.0%}") for name, size in plan.at_peak.items()]
    print_table(console, TextTable(("", "bytes", "share"), tuple(rows)), left=(0,))
    if plan.traffic:
        heading(console, "What goes over the network in a step")
        rows4 = [
            (one.name, str(one.count), format_bytes(one.payload_bytes), format_bytes(one.sent_bytes))
            for one in plan.traffic
        ]
        print_table(console, TextTable(("", "times", "whole", "sent by a rank"), tuple(rows4)), left=(0,))
    if plan.units:
        heading(console, "What is gathered and reduced together")
        shown = [
            (unit.name or "what is in no block", format_bytes(unit.whole_bytes), format_bytes(unit.rank_bytes))
            for unit in plan.units[:_MOST_UNITS]
        ]
        print_table(console, TextTable(("", "parameters", "on a rank"), tuple(shown)), left=(0,))
        if len(plan.units) > _MOST_UNITS:
            print_words(console, f"and {len(plan.units) - _MOST_UNITS} more: --json")
