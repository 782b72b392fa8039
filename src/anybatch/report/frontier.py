"""A plan as sentences, tables and a page: the chosen configuration, its alternatives, and the memory by category."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from anybatch.records.memory import CATEGORIES, Timeline
from anybatch.records.plans import Confidence, Plan, PlanRow
from anybatch.report.pages import Picture, render_page, unit_of_bytes
from anybatch.report.svg import dot_chart, stack_chart
from anybatch.report.tables import TextTable, in_runs
from anybatch.units import format_bytes, format_seconds

_CONFIDENCES: dict[Confidence, str] = {
    "predicted": "the bytes follow from the shapes of the tensors",
    "measured": "the bytes are extrapolated from measured steps",
    "estimated": "some bytes can't be seen; they are bounded or left out",
}
_UNITS_OF_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_LEAST_CHOICE = 2
_FAR = 4.0  # a budget this many times larger than every peak would squeeze the dots of the chart together


def rows_of(plan: Plan) -> tuple[PlanRow, ...]:
    """All configurations of a plan, each once: the chosen one, those within the budget (fastest first), the others."""
    rows: dict[PlanRow, PlanRow] = {}
    for row in (plan.chosen, *plan.alternatives):
        rows.setdefault(replace(row, peak_bytes=0, reserved_bytes=0, seconds=None, confidence="estimated"), row)
    return tuple(sorted(rows.values(), key=lambda row: (row != plan.chosen, not _fits(row, plan), *_speed(row))))


def facts_of(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The memory optimizations and the costs of a plan, as pairs of a term and its text."""
    chosen = plan.chosen
    facts = [(verb, ", ".join(in_runs(names))) for verb, names in _blocks(chosen) if names]
    if chosen.loss_chunks > 1:
        facts.append(("loss", f"of {chosen.head or 'the output layer'} in {chosen.loss_chunks} chunks"))
    if chosen.autocast:
        facts.append(("autocast", chosen.autocast))
    if chosen.kept_graphs is not None:
        twice = chosen.micro_batches - chosen.kept_graphs
        facts.append(("graphs", f"of {chosen.kept_graphs} micro-batches kept, {twice} encoded twice"))
    if chosen.chunk_length is not None:
        facts.append(("time steps", f"{chosen.chunk_length} in a chunk"))
    facts.append(("peak", f"{format_bytes(chosen.peak_bytes)} predicted, {format_bytes(plan.budget)} allowed"))
    if chosen.reserved_bytes:
        facts.append(("reserved", f"{format_bytes(chosen.reserved_bytes)} by the device's allocator"))
    if plan.whole_bytes:
        facts.append(("", f"{format_bytes(plan.whole_bytes)} for the whole batch at once without memory optimizations"))
    if plan.smallest_bytes:
        facts.append(("", f"{format_bytes(plan.smallest_bytes)} is the smallest budget with a plan"))
    if chosen.seconds is not None and not plan.relative_time:
        facts.append(("time", f"{format_seconds(chosen.seconds)} for a logical batch, without the optimizer"))
    facts.append(("confidence", f"{chosen.confidence}: {_CONFIDENCES[chosen.confidence]}"))
    return tuple(facts)


def rows_table(plan: Plan, rows: Sequence[PlanRow]) -> TextTable:
    """The table of configurations, one per row; the chosen one is marked."""
    kind, text = _own_column(plan)
    time = "relative" if plan.relative_time else "time"
    header = ("", "micro-batches", "recompute", "offload", kind, "peak", time, "confidence")
    cells = tuple(
        (
            _mark(row, plan),
            f"{row.micro_batches} of {row.micro_batch_size:g}",
            str(len(row.recompute) or "-"),
            str(len(row.offload) or "-"),
            text(row),
            format_bytes(row.peak_bytes),
            time_text(plan, row.seconds),
            row.confidence,
        )
        for row in rows
    )
    return TextTable(header, cells, frozenset(index for index, row in enumerate(rows) if row == plan.chosen))


def _own_column(plan: Plan) -> tuple[str, Callable[[PlanRow], str]]:
    """The column specific to the kind of loss: its header, and the function that gives its cells."""
    if plan.chosen.kept_graphs is not None:
        return "kept", lambda row: "-" if row.kept_graphs is None else str(row.kept_graphs)
    if plan.chosen.chunk_length is not None:
        return "steps", lambda row: "-" if row.chunk_length is None else str(row.chunk_length)
    return "chunks", lambda row: str(row.loss_chunks) if row.loss_chunks > 1 else "-"


def rows_notes(plan: Plan, rows: Sequence[PlanRow]) -> tuple[str, ...]:
    """The legend of the table of configurations: its marks, columns and times."""
    marks = {_mark(row, plan) for row in rows}
    notes = [f"* is chosen, the fastest within {format_bytes(plan.budget)}"]
    if "~" in marks:
        room = "" if plan.device == "cpu" else "leaves less room than the allocator may need, or "
        notes.append(f"~ may be faster, but {room}its time was only predicted")
    if "!" in marks:
        notes.append("! exceeds the budget")
    if plan.chosen.kept_graphs is not None:
        notes.append("kept: micro-batches whose graph is kept for the loss; the others are encoded twice")
    if plan.chosen.chunk_length is not None:
        notes.append("steps: time steps in a chunk")
    if plan.relative_time:
        notes.append("times are estimated, relative to the chosen one")
    return tuple(notes)


def time_text(plan: Plan, seconds: float | None) -> str:
    """A time of a plan as text; a factor if its times are only relative."""
    if seconds is None:
        return "unknown"
    if not plan.relative_time:
        return format_seconds(seconds)
    return f"{seconds / _reference(plan):.2f}x"


def shares_of(at_peak: Mapping[str, int]) -> tuple[tuple[str, int, float], ...]:
    """The memory at a peak by category, the largest first: name, bytes, and share of the total."""
    total = sum(at_peak.values()) or 1
    largest = sorted(at_peak.items(), key=lambda item: -item[1])
    return tuple((name, count, count / total) for name, count in largest if count)


def shares_table(at_peak: Mapping[str, int]) -> TextTable:
    """The table of the memory at a peak by category."""
    rows = tuple((name, format_bytes(count), f"{part:.0%}") for name, count, part in shares_of(at_peak))
    return TextTable(("", "bytes", "share"), rows)


def modules_table(plan: Plan, most: int) -> TextTable:
    """The table of the ``most`` blocks of the model with the most parameter and activation bytes."""
    held = sorted(plan.modules, key=lambda share: -(share.parameter_bytes + share.activation_bytes))
    timed = any(share.seconds is not None for share in held)
    header = ("block", "parameters", "activations", *(["forward"] if timed else []), "optimized")
    rows = []
    for share in held[:most]:
        time = "" if share.seconds is None else time_of_block(plan, share.seconds)
        rows.append(
            (
                share.name,
                format_bytes(share.parameter_bytes),
                format_bytes(share.activation_bytes),
                *([time] if timed else []),
                ", ".join(verb for verb, names in _blocks(plan.chosen) if _covers(names, share.name)) or "-",
            )
        )
    return TextTable(header, tuple(rows))


def time_of_block(plan: Plan, seconds: float) -> str:
    """The time of one block as text; its share of all blocks if times are only relative."""
    if not plan.relative_time:
        return format_seconds(seconds)
    return f"{seconds / (sum(share.seconds or 0.0 for share in plan.modules) or 1.0):.0%}"


def plan_page(
    plan: Plan, script: str, notes: Iterable[str] = (), steps: Mapping[str, Timeline] = MappingProxyType({})
) -> str:
    """Renders the page of a plan; deterministic. ``steps`` are the bytes in a step by the name of the configuration."""
    rows = rows_of(plan)
    return render_page(
        "plan.html.j2",
        title=f"anybatch plan: {script}",
        summary=" ".join([f"{summary_of(plan)}.", *notes]),
        facts=facts_of(plan),
        frontier=frontier_picture(plan),
        explorer=_explorer(plan),
        ways=rows_table(plan, rows),
        ways_caption="; ".join(rows_notes(plan, rows)) + ".",
        binding=plan.binding,
        shares=shares_table(plan.at_peak),
        steps=timeline_pictures(steps),
        modules=modules_table(plan, len(plan.modules)),
        modules_caption="The blocks of the model, the largest first; activations are those of one micro-batch.",
        fingerprint=[(name, value) for name, value in plan.fingerprint.items()],
    )


def _timed(plan: Plan) -> list[PlanRow]:
    return [row for row in rows_of(plan) if row.seconds is not None]


def frontier_picture(plan: Plan) -> Picture | None:
    """The chart of time against memory, with the Pareto front; ``None`` if the time of the plan is unknown."""
    timed = _timed(plan)
    if plan.chosen.seconds is None:
        return None
    is_far = plan.budget > _FAR * max(row.peak_bytes for row in timed)
    factor, unit = unit_of_bytes(max(row.peak_bytes for row in timed))
    longest = max(row.seconds or 0.0 for row in timed)
    second, unit_of_time = next((one for one in _UNITS_OF_SECONDS if longest >= one[0]), _UNITS_OF_SECONDS[-1])
    if plan.relative_time:
        second, unit_of_time = _reference(plan), "relative to the plan"
    svg = dot_chart(
        [(row.peak_bytes / factor, (row.seconds or 0.0) / second) for row in timed],
        chosen=timed.index(plan.chosen), x_label=f"predicted peak memory, {unit}", y_label=f"time, {unit_of_time}",
        names=[str(row) for row in timed],
        level=None if is_far else (f"budget, {format_bytes(plan.budget)}", plan.budget / factor),
    )  # fmt: skip
    caption = "The shortest time, measured or predicted, for each amount of memory; the large dot is the plan. "
    caption += (
        f"The budget, {format_bytes(plan.budget)}, is far to the right of this chart."
        if is_far
        else "Configurations left of the dashed line are predicted to fit."
    )
    ends = (min(timed, key=lambda row: row.peak_bytes), min(timed, key=_speed))
    said = " and ".join(
        f"{time_text(plan, row.seconds)} with {format_bytes(row.peak_bytes)}" for row in dict.fromkeys(ends)
    )
    alternative = (
        f"{len(timed)} configurations, time against memory. The smallest and the fastest take {said}; the chosen "
        f"one takes {time_text(plan, plan.chosen.seconds)} with {format_bytes(plan.chosen.peak_bytes)}; the budget "
        f"is {format_bytes(plan.budget)}. The table below has the numbers."
    )
    return Picture("", svg, caption, alternative)


def _explorer(plan: Plan) -> dict[str, Any] | None:
    """The data with which the page picks a configuration for another budget; ``None`` if there is no choice."""
    timed = _timed(plan)
    if plan.chosen.seconds is None or len(timed) < _LEAST_CHOICE:
        return None
    factor, unit = unit_of_bytes(max(row.peak_bytes for row in timed))
    rows = rows_of(plan)
    known = [
        {"index": rows.index(row), "peak": row.peak_bytes, "seconds": row.seconds, "text": _said(plan, row)}
        | {"untaken": _mark(row, plan) == "~"}
        for row in timed
    ]
    peaks = [row.peak_bytes for row in timed]
    values = {"rows": known, "unit": factor, "name": unit, "budget": plan.budget, "chosen": rows.index(plan.chosen)}
    said = f"budget {format_bytes(plan.budget)}: {_said(plan, plan.chosen)}"
    ends = {"least": int(0.95 * min(peaks)), "most": int(1.05 * max(peaks)), "budget": plan.budget}
    return {"plan": json.dumps(values), "said": said, "step": max(1, (max(peaks) - min(peaks)) // 500), **ends}


def _said(plan: Plan, row: PlanRow) -> str:
    parts = [micro_batches(row), row.optimizations, f"{format_bytes(row.peak_bytes)}, {time_text(plan, row.seconds)}"]
    return ", ".join(part for part in parts if part)


def timeline_pictures(steps: Mapping[str, Timeline]) -> list[tuple[Picture, str]]:
    """Charts of live bytes over operations, on one scale, and the details of each point as JSON."""
    most = max((timeline.peak_bytes for timeline in steps.values()), default=0)
    factor, unit = unit_of_bytes(most)
    found = []
    for name, timeline in steps.items():
        nothing = (0,) * len(timeline.moments)
        layers = {kind: [count / factor for count in timeline.layers.get(kind, nothing)] for kind in CATEGORIES}
        svg = stack_chart(layers, x_label="operations", y_label=unit, along=timeline.operations, most=most / factor)
        caption = (
            f"{format_bytes(timeline.peak_bytes)} at the peak. Bytes of live tensors by category; point at the chart "
            "to see the largest tensors at that operation, with the lines that allocated them."
        )
        details = [_details(timeline, place) for place in range(len(timeline.moments))]
        said = f"{name}: at the peak {'; '.join(details[timeline.peak]) if details else 'nothing'}."
        found.append((Picture(name, svg, caption, said), json.dumps(details)))
    return found


def _details(timeline: Timeline, place: int) -> list[str]:
    moment = timeline.moments[place]
    where = f" at {moment.line}" if moment.line else ""
    where += f", in {moment.module}" if moment.module else ""
    held = (f"{format_bytes(count)} {kind}, {line or 'from before'}" for count, kind, line in moment.largest)
    return [f"{format_bytes(timeline.totals[place])} after {moment.operation}{where}", *held]


def summary_of(plan: Plan) -> str:
    """One sentence without its full stop: the batch, the budget and the configuration."""
    optimizations = f", {plan.chosen.optimizations}" if plan.chosen.optimizations else ""
    samples = "1 sample" if plan.samples == 1 else f"{plan.samples} samples"
    room = f"{format_bytes(plan.budget)} on {plan.device}"
    return f"{samples} within {room}: {micro_batches(plan.chosen)}{optimizations}"


def micro_batches(row: PlanRow) -> str:
    """How a plan splits the batch, in words."""
    many = "micro-batch" if row.micro_batches == 1 else "micro-batches"
    return f"{row.micro_batches} {many} of {row.micro_batch_size:g}"


def _blocks(row: PlanRow) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("recompute", row.recompute), ("offload", row.offload)


def _mark(row: PlanRow, plan: Plan) -> str:
    if row == plan.chosen:
        return "*"
    if not _fits(row, plan):
        return "!"
    return "~" if _speed(row) < _speed(plan.chosen) else ""


def _fits(row: PlanRow, plan: Plan) -> bool:
    return row.peak_bytes <= plan.budget or row == plan.chosen


def _covers(blocks: Iterable[str], name: str) -> bool:
    """Whether a block is one of ``blocks``, is inside one, or is in a run of children such as ``"net.2:5"``."""
    for block in blocks:
        run = re.fullmatch(r"(.*?)(\d+):(\d+)", block)
        members = [f"{run[1]}{index}" for index in range(int(run[2]), int(run[3]))] if run else [block]
        if any(name == member or name.startswith(f"{member}.") for member in members):
            return True
    return False


def _speed(row: PlanRow) -> tuple[bool, float, int]:
    return row.seconds is None, row.seconds or 0.0, row.peak_bytes


def _reference(plan: Plan) -> float:
    """The time that relative times are divided by."""
    known = (row.seconds for row in (plan.chosen, *plan.alternatives) if row.seconds)
    return next(known, 1.0)
