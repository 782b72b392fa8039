"""The findings of the demonstration as tables, sentences and a page."""

import math

from anybatch.demo.facts import CurvePoint, DemoRecord, GradientComparison, TextFacts, TrainingCurve
from anybatch.records.plans import Plan
from anybatch.report.frontier import facts_of, frontier_picture, rows_notes, rows_of, rows_table, summary_of
from anybatch.report.pages import Picture, render_page
from anybatch.report.svg import Curve, bar_chart, line_chart
from anybatch.report.tables import TextTable
from anybatch.units import format_bytes, format_seconds

_NATS_PER_BIT = math.log(2)
_MEBIBYTE = 2**20


def comparison_table(comparison: GradientComparison) -> TextTable:
    """Lays out the ways to the gradient, one a row."""
    rows = [
        (
            one.name,
            str(one.micro_batches),
            f"{one.error:.1e}",
            format_bytes(one.peak_bytes),
            format_seconds(one.seconds),
        )
        for one in comparison.methods
    ]
    return TextTable(("gradient by", "passes", "error", "tensors", "time"), tuple(rows))


def comparison_notes(comparison: GradientComparison) -> tuple[tuple[str, str], ...]:
    """Says what the columns of the table are and what it shows: pairs of a term and its text."""
    size = comparison.micro_batch_size
    verdict = "within" if comparison.is_within_bound else "NOT within"
    error = (
        f"distance to the whole batch's gradient in float64, relative, over all {comparison.parameters:,} parameters. "
        f"anybatch is {verdict} the bound of {comparison.bound:.1e} that float32's rounding gives; computed in "
        f"float64, whole and split differ by {comparison.float64_difference:.1e}."
    )
    notes = [("error", error), ("tensors", _of_memory(comparison))]
    time = (
        "median of one forward and backward pass of the logical batch. Smaller micro-batches do the same arithmetic in "
        "more and smaller operations; the loop shows the cost of that alone."
    )
    if comparison.optimized:
        time += f" As planned, {comparison.split.name} also spends time to save memory, which the loop does not: "
        time += f"{comparison.optimized}."
    notes.append(("time", time))
    rest = comparison.samples % size
    if rest and comparison.loop.error > comparison.bound:
        text = f"divides by the number of micro-batches, so the last one, of {rest}, weighs as much as one of {size}."
        notes.append(("loop", text))
    return tuple(notes)


def _of_memory(comparison: GradientComparison) -> str:
    whole, split = format_bytes(comparison.whole.peak_bytes), format_bytes(comparison.split.peak_bytes)
    fits = "fit" if comparison.whole.peak_bytes <= comparison.memory_bytes else "do not fit"
    return (
        f"the most bytes alive at once. The {whole} of the whole batch {fits} into the "
        f"{format_bytes(comparison.memory_bytes)} of the simulated budget; in micro-batches of "
        f"{comparison.micro_batch_size} it takes {split}."
    )


def curve_row(point: CurvePoint) -> tuple[str, ...]:
    """Lays out a validation as one row of ``CURVE_HEADER``."""
    return (
        format_seconds(point.seconds),
        str(point.updates),
        "-" if point.training_bits is None else f"{point.training_bits:.3f}",
        f"{point.validation_bits:.3f}",
        f"{point.tokens_per_second:,.0f}" if point.tokens_per_second else "-",
        format_bytes(point.resident_bytes),
    )


CURVE_HEADER = ("time", "updates", "training", "validation", "tokens/s", "memory")


def outcome_text(text: TextFacts, plan: Plan, training: TrainingCurve) -> str:
    """Says in sentences what training reached."""
    last = training.points[-1]
    reached = (
        f"Held-out text takes {last.validation_bits:.2f} bits a byte ({last.validation_bits * _NATS_PER_BIT:.2f} nats) "
        f"after {last.updates:,} update{'' if last.updates == 1 else 's'}; "
        f"the entropy of a single byte is {text.unigram_bits:.2f} bits "
        f"({text.unigram_bits * _NATS_PER_BIT:.2f} nats)."
    )
    if training.stopped_early:
        reached = f"Stopped early. {reached}"
    if training.peak_bytes is not None:
        reached += (
            f" An update of {plan.samples} sequences, AdamW included, held at most {format_bytes(training.peak_bytes)} "
            f"of tensors, in {training.micro_batches} micro-batches; predicted were "
            f"{format_bytes(plan.peak_bytes)}, within the simulated budget of {format_bytes(plan.budget)}."
        )
    return reached


def demo_page(record: DemoRecord) -> str:
    """Renders the page of a run; the same record gives the same text."""
    comparison, training, text = record.comparison, record.training, record.text
    rows = rows_of(record.plan)
    return render_page(
        "demo.html.j2",
        title="anybatch demo: a logical batch larger than the memory",
        summary=_summary(comparison),
        plan_summary=f"{summary_of(record.plan)}.",
        plan_facts=facts_of(record.plan),
        frontier=frontier_picture(record.plan),
        ways=rows_table(record.plan, rows),
        ways_caption="; ".join(rows_notes(record.plan, rows)) + ".",
        table=comparison_table(comparison),
        notes=comparison_notes(comparison),
        memory=_memory_chart(comparison),
        errors=_error_chart(comparison),
        outcome=outcome_text(text, record.plan, training),
        losses=_training_chart(text, training),
        curve=TextTable(CURVE_HEADER, tuple(curve_row(point) for point in training.points)),
        sample=record.sample,
        run=_run_facts(record),
    )


def _summary(comparison: GradientComparison) -> str:
    verdict = "is" if comparison.is_within_bound else "is NOT"
    whole, split = format_bytes(comparison.whole.peak_bytes), format_bytes(comparison.split.peak_bytes)
    return (
        f"A byte-level transformer with {comparison.parameters:,} parameters was trained on this machine, on Python "
        f"files that were there. Its logical batch, {comparison.samples} sequences of {comparison.context} bytes, "
        f"takes {whole} of tensors whole and {split} in micro-batches of {comparison.micro_batch_size}. The gradient "
        f"{verdict} the whole batch's, up to rounding."
    )


def _memory_chart(comparison: GradientComparison) -> Picture:
    level = f"simulated budget, {format_bytes(comparison.memory_bytes)}", comparison.memory_bytes / _MEBIBYTE
    bars = [(method.name, method.peak_bytes / _MEBIBYTE) for method in comparison.methods]
    said = "Most bytes of live tensors in one forward and backward of the logical batch."
    return Picture("", bar_chart(bars, label="live tensors, MiB", level=level), said, said)


def _error_chart(comparison: GradientComparison) -> Picture:
    level = f"bound for anybatch, {comparison.bound:.1e}", comparison.bound
    dots = [(method.name, method.error) for method in comparison.methods]
    svg = bar_chart(dots, label="relative gradient error against float64", level=level, is_logarithmic=True)
    said = "Error of the gradient, on a logarithmic axis: left is better."
    return Picture("", svg, said, said)


def _training_chart(text: TextFacts, training: TrainingCurve) -> Picture:
    points = training.points
    lines = (
        Curve("training, each update", range(1, len(training.losses) + 1), training.losses),
        Curve("validation", [p.updates for p in points], [p.validation_bits for p in points]),
    )
    levels = [("entropy of a single byte", text.unigram_bits)]
    svg = line_chart(lines, x_label="updates", y_label="loss, bits per byte", levels=levels)
    said = "Loss on training text and on files that were held out."
    return Picture("", svg, said, said)


def _run_facts(record: DemoRecord) -> list[tuple[str, str]]:
    text = record.text
    return [
        *((name, str(value)) for name, value in record.versions.items()),
        ("text", text.root),
        ("training text", f"{text.train_files} files, {format_bytes(text.train_bytes)}"),
        ("held out", f"{text.validation_files} files, {format_bytes(text.validation_bytes)}"),
    ]
