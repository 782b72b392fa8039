"""The findings of the demonstration as tables and sentences."""

import math

from anybatch.demo.facts import CurvePoint, GradientComparison, TextFacts, TrainingCurve
from anybatch.records.plans import Plan
from anybatch.report.tables import TextTable
from anybatch.units import format_bytes, format_seconds

_NATS_PER_BIT = math.log(2)


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
