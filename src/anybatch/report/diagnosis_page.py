"""A diagnosis as an HTML page: first what to change, then all measurements as charts and tables."""

import bisect
import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from anybatch.records.diagnoses import Diagnosis
from anybatch.records.findings import Finding, Place, is_code
from anybatch.records.runs import Run
from anybatch.report import diagnosis as words
from anybatch.report.flow import Flow
from anybatch.report.loop import Call, StepOfLoop, step_of_loop
from anybatch.report.pages import Picture, render_page, unit_of_bytes
from anybatch.report.series import Output, Series, series_of
from anybatch.report.source import Source, link_to, source_of
from anybatch.report.svg import Axis, Curve, fan_chart, heat_chart, line_chart
from anybatch.report.tables import TextTable, clean, number_text
from anybatch.units import format_bytes

MOST_FINDINGS = 60
_COLUMNS_OF_NUMBERS = 6
_FEWEST_MOMENTS = 2
_MOST_MARKS = 3
_MOST_FIX = 4000

SHADES = 10
_LEAST_DECADES = 6  # a range of less would make small differences look large
_ODD = (("zero", "exactly zero"), ("none", "no gradient"), ("odd", "not finite"))
# About a thousandth of the weights is the usual size of an update (Karpathy, "A recipe for training neural networks");
# the first steps of Adam are larger, the end of a schedule smaller.
_RATIOS = (1e-5, 1e-4, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True, slots=True)
class Card:
    """A finding as the page shows it."""

    finding: Finding
    label: str  # its severity, code and name
    place: str
    evidence: tuple[tuple[str, str], ...]  # terms and their texts
    fix: str
    is_code: bool  # whether the fix is code; otherwise it is a sentence
    follows: tuple["Card", ...]  # its consequences
    source: Source | None  # the user's line, if it is known
    link: str  # the address that opens the line in an editor; empty if its path is unknown


def page(diagnosis: Diagnosis, run: Run) -> str:
    """Renders the page of a diagnosis; deterministic."""
    series = series_of(run)
    grave, notes = words.grave_and_notes(diagnosis)
    crash, cost = words.crash_of(run), words.cost_of(diagnosis, run)
    axis = axis_of_run(series)
    text = render_page(
        "diagnosis.html.j2",
        title=f"anybatch doctor: {words.title_of(diagnosis)}",
        verdict=sentence(words.verdict_of(diagnosis, run)),
        mood=words.mood_of(diagnosis, run),
        facts=facts_of(diagnosis, run),
        crash=crash,
        crash_place=f"{crash.file}:{crash.line}" if crash and crash.file else "",
        crash_link=link_to(Place(file=crash.file, line=crash.line)) if crash else "",
        crash_known=crash is not None and any(one.name == crash.name for one in diagnosis.findings if crash.name),
        cards=[_card(knot, run) for knot in grave[:MOST_FINDINGS]],
        left_out=max(0, len(grave) - MOST_FINDINGS),
        notes=[_card(knot, run) for knot in notes[:MOST_FINDINGS]],
        step=_loop_of(step_of_loop(run, [knot.finding for knot in grave])),
        cells=words.cells_table(diagnosis) if diagnosis.cells else None,
        flows=flow_pictures(series.flow, axis),
        flow_numbers=_flow_numbers(series.flow),
        pictures=_pictures(series, axis, [knot.finding for knot in grave]),
        outputs=_outputs_table(series.outputs, axis),
        outputs_caption=_outputs_caption(series),
        calls=_calls_table(series.calls, diagnosis.steps),
        remarks=[*([sentence(cost)] if cost else []), *diagnosis.notes],
    )
    return clean(text)


def axis_of_run(*runs: Series) -> Axis:
    """The axis of steps that all charts of a page share."""
    last = [step for one in runs for step in (*one.flow.steps, *(step for curve in one.losses for step in curve.steps))]
    return Axis(0, max(1, *last, 1))


def _card(knot: words.Knot, run: Run) -> Card:
    finding = knot.finding
    fix = textwrap.dedent(finding.fix).strip("\n")[:_MOST_FIX]
    return Card(
        finding, words.label_of(finding), str(finding.place), words.evidence_of(finding), fix,
        "\n" in fix or is_code(fix), tuple(_card(one, run) for one in knot.follows),
        source_of(finding, run.started.time), link_to(finding.place),
    )  # fmt: skip


def _loop_of(loop: StepOfLoop | None) -> dict[str, object] | None:
    """The values with which the template draws a step."""
    if loop is None or len(loop.moments) < _FEWEST_MOMENTS:
        return None
    links = [link_to(Place(file=one.file, line=one.line)) for one in loop.moments]
    return {"loop": loop, "links": links}


def facts_of(diagnosis: Diagnosis, run: Run) -> list[tuple[str, str]]:
    """Facts about the run, as pairs of a term and its text."""
    started = run.started
    trained = [one for one in run.parameters.values() if one.root >= 0]
    numel = sum(one.numel for one in trained)
    facts = [
        ("steps", str(diagnosis.steps) if diagnosis.steps else ""),
        ("models", ", ".join(f"{one.variable or '?'} ({one.cls})" for one in run.roots.values())),
        ("parameters", f"{numel:,} elements in {len(trained)} tensors" if trained else ""),
        ("optimizers", ", ".join(f"{one.variable or '?'} ({one.cls})" for one in run.optimizers.values())),
        ("device", diagnosis.device or started.device),
        ("torch", started.torch),
    ]
    return [(term, text[:400]) for term, text in facts if text]


def sentence(text: str) -> str:
    """A text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def flow_pictures(flow: Flow, axis: Axis, *others: Flow) -> list[Picture]:
    """Heat maps of the gradient norm and of the update-to-weight ratio, layers by steps; empty without samples.

    The range of shades covers ``others``, too, so that maps can be compared.
    """
    if not flow.rows or not flow.steps:
        return []
    caption = (
        "One row per layer, in forward order; one cell per sampled step, on the axis that all charts share. "
        "The shades are logarithmic."
    )
    if flow.layers > len(flow.rows):
        caption += f" {flow.layers} layers are merged into {len(flow.rows)} rows."
    if flow.total > len(flow.steps):
        caption += f" {len(flow.steps)} of {flow.total} sampled steps are shown."
    low, high = decades_of(value for one in (flow, *others) for row in one.rows for value in row.values)
    legend = [(f"h{shade}", {0: f"1e{low}", SHADES - 1: f"1e{high}"}.get(shade, "")) for shade in range(SHADES)]
    limits = [10 ** (low + (high - low) * shade / SHADES) for shade in range(1, SHADES)]
    svg = heat_chart(
        [(row.name, row.values) for row in flow.rows], flow.steps, axis=axis,
        shade=lambda value: shade_of(value, "h", limits), said=norm_text,
    )  # fmt: skip
    found = [Picture("The flow of the gradient", svg, caption, _flow_said(flow), (*legend, *_ODD))]
    if any(value is not None for row in flow.rows for value in row.ratios):
        found.append(_moves_picture(flow, axis))
    return found


def _flow_said(flow: Flow) -> str:
    dark = [row.name for row in flow.rows if all(value is None for value in row.values)]
    zero = [row.name for row in flow.rows if not any(row.values) and row.name not in dark]
    odd = next(
        (f"{row.name} at step {step}" for column, step in enumerate(flow.steps) for row in flow.rows
         if (value := row.values[column]) is not None and value - value != 0), "",
    )  # fmt: skip
    said = [
        f"{len(flow.rows)} rows of layers, {len(flow.steps)} sampled steps from {flow.steps[0]} to {flow.steps[-1]}."
    ]
    first, last = (flow.rows[index] for index in (0, -1))
    said += [f"{row.name or 'the model'}: {norm_text(row.values[0])} at first, {norm_text(row.values[-1])} at last."
             for row in dict.fromkeys((first, last))]  # fmt: skip
    said += [f"No gradient in {words.value_text(dark)}."] if dark else []
    said += [f"Exactly zero in {words.value_text(zero)}."] if zero else []
    return " ".join(said + ([f"The first gradient that is not finite: {odd}."] if odd else []))


def _moves_picture(flow: Flow, axis: Axis) -> Picture:
    svg = heat_chart(
        [(row.name, row.ratios) for row in flow.rows], flow.steps, axis=axis,
        shade=lambda value: shade_of(value, "r", _RATIOS), said=_ratio_text,
    )  # fmt: skip
    last = [(row.ratios[-1], row.name or "the model") for row in flow.rows if row.ratios[-1] is not None]
    least = ""
    if last:
        (low, lowest), (high, highest) = min(last), max(last)
        ends = f"least in {lowest} ({_ratio_text(low)}), most in {highest} ({_ratio_text(high)})"
        least = f" At the last sampled step: {ends}."
    still = [row.name for row in flow.rows if not any(row.ratios) and any(value == 0 for value in row.ratios)]
    said = f"The size of each of {len(flow.rows)} layers' update relative to its weights.{least}"
    said += f" Never updated: {words.value_text(still)}." if still else ""
    caption = f"Norm of an update over the norm of the weights. About 0.001 is usual.{least}"
    named = {0: "below 1e-5", 2: "usual", len(_RATIOS): "above 1"}
    legend = [(f"r{shade}", named.get(shade, "")) for shade in range(len(_RATIOS) + 1)]
    legend += [("zero", "not updated"), ("none", "unknown")]
    return Picture("Update over weight", svg, caption, said, tuple(legend))


def decades_of(norms: Iterable[float | None]) -> tuple[int, int]:
    """The lowest and the highest power of ten of the shades for some norms, at least 6 apart."""
    found = [value for value in norms if value is not None and 0 < value < math.inf]
    if not found:
        return -_LEAST_DECADES, 0
    high = math.ceil(math.log10(max(found)) - 1e-9)
    return min(math.floor(math.log10(min(found))), high - _LEAST_DECADES), high


def shade_of(value: float | None, kind: str, limits: Sequence[float]) -> str:
    """The CSS class of a cell: ``kind`` with a number of its shade, ``zero``, ``none`` or ``odd`` (not finite)."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "odd"
    return f"{kind}{bisect.bisect_right(limits, value)}" if value else "zero"


def norm_text(value: float | None, none: str = "no gradient", zero: str = "exactly 0") -> str:
    """A norm in words; a missing gradient differs from one that is exactly zero."""
    return none if value is None else zero if value == 0 else number_text(value)


_ratio_text = functools.partial(norm_text, none="unknown", zero="not updated")


def _flow_numbers(flow: Flow) -> TextTable | None:
    if not flow.rows or not flow.steps:
        return None
    count = min(_COLUMNS_OF_NUMBERS, len(flow.steps))
    columns = sorted({index * (len(flow.steps) - 1) // max(1, count - 1) for index in range(count)})
    header = ("layer", *(f"step {flow.steps[column]}" for column in columns))
    rows = [(row.name or "(the model)", *(norm_text(row.values[column]) for column in columns)) for row in flow.rows]
    return TextTable(header, tuple(rows))


def _pictures(series: Series, axis: Axis, findings: Sequence[Finding]) -> list[Picture]:
    levels = [("the best constant guess", series.guess)] if series.guess is not None else []
    marks = [(f"{one.code or one.name} from here", one.step) for one in findings[:_MOST_MARKS] if one.step <= axis.last]
    caption = "The loss passed to each call of backward, and the loss of evaluations; the mean within a step."
    caption += " A dashed vertical line marks the step at which a finding was first seen." if marks else ""
    drawn = curve_picture("Loss", series.losses, axis, caption, levels, marks)
    changing = [one for one in series.rates if len(set(one.values)) > 1]
    drawn += curve_picture("Learning rate", changing, axis, "One curve per distinct schedule of a parameter group.")
    clips = [(f"clipped to {limit:g}", limit) for limit in series.clips]
    drawn += curve_picture("Norm of the gradient", series.norms, axis, "Over all parameters.", clips, marks)
    drawn += _memory_picture(series.memory, axis)
    if any(any(curve.values) for curve in series.graphs):
        caption = "The number of earlier steps whose graph was still alive."
        drawn += curve_picture("Graphs kept alive", series.graphs, axis, caption)
    return drawn


def curve_picture(
    title: str, curves: Sequence[Curve], axis: Axis, caption: str, levels: Sequence[tuple[str, float]] = (),
    marks: Sequence[tuple[str, float]] = (), *, log: bool | None = None,
) -> list[Picture]:  # fmt: skip
    """A chart of curves over steps; empty without curves."""
    if not curves:
        return []
    svg = line_chart(curves, x_label="step", axis=axis, is_logarithmic=log, levels=levels, marks=marks)
    said = [f"{curve.name}: {_course(curve)}." for curve in curves]
    said += [f"{name}: {number_text(value)}." for name, value in levels]
    said += [f"{name}: step {step:g}." for name, step in marks]
    return [Picture(title, svg, caption, f"{title} over steps. {' '.join(said)}")]


def _memory_picture(curves: Sequence[Curve], axis: Axis) -> list[Picture]:
    if not curves:
        return []
    factor, unit = unit_of_bytes(max((value for curve in curves for value in curve.values), default=0.0))
    scaled = [Curve(one.name, one.steps, tuple(value / factor for value in one.values)) for one in curves]
    said = [f"{curve.name}: {_course(curve, format_bytes)}." for curve in curves]
    caption = f"Memory of the process, and of the device if there is one, in {unit}."
    svg = line_chart(scaled, x_label="step", axis=axis, least_span=0.1)
    return [Picture(f"Memory, {unit}", svg, caption, " ".join([f"Memory, {unit}", *said]))]


def _course(curve: Curve, number: Callable[[float], str] = number_text) -> str:
    finite = [value for value in curve.values if value - value == 0]
    odd = [step for step, value in zip(curve.steps, curve.values, strict=True) if value - value != 0]
    ends = f"{number(curve.values[0])} at step {curve.steps[0]}, {number(curve.values[-1])} at step {curve.steps[-1]}"
    lost = f"; not finite from step {odd[0]}" if odd else ""
    return f"{ends}, between {number(min(finite))} and {number(max(finite))}{lost}" if finite else f"not finite{lost}"


_COLUMNS: tuple[tuple[str, Callable[[Output], str]], ...] = (
    ("module", lambda one: one.module or "(the model)"),
    ("class", lambda one: one.cls),
    ("standard deviation", lambda one: " to ".join(map(number_text, (one.first_std, one.last_std)[: one.samples]))),
    ("largest", lambda one: number_text(one.absmax)),
    ("zeros", lambda one: f"{one.zeros:.0%}"),
    ("dead units", lambda one: f"{one.dead:.0%}"),
    ("saturated", lambda one: "-" if one.saturated is None else f"{one.saturated:.0%}"),
    ("spread", lambda one: number_text(one.spread)),
    ("percentiles", lambda one: ", ".join(map(number_text, one.percentiles[-1][::2])) if one.percentiles else "-"),
)
"""What the table of outputs says of a module."""


def _outputs_table(outputs: Sequence[Output], axis: Axis) -> tuple[TextTable, list[str]] | None:
    if not outputs:
        return None
    rows = tuple(tuple(text(one) for _, text in _COLUMNS) for one in outputs)
    fans = [fan_chart(one.steps, one.percentiles, axis) if one.percentiles else "" for one in outputs]
    odd = frozenset(index for index, one in enumerate(outputs) if one.stands_out)
    return TextTable(tuple(name for name, _ in _COLUMNS), rows, odd), fans


def _outputs_caption(series: Series) -> str:
    caption = (
        "Outputs of modules on sampled steps. Dead units were zero in every sample; saturated entries are within "
        "0.001 of a limit; spread is the standard deviation over the batch, relative to the mean absolute value; the "
        "chart has the 5th, 25th, 50th, 75th and 95th percentile over the steps, the numbers are the 5th, 50th and "
        "95th at the last sampled step."
    )
    rest = series.modules - len(series.outputs)
    return f"{caption} {rest} modules are not shown." if rest else caption


def _calls_table(calls: Sequence[Call], steps: int) -> TextTable | None:
    if not calls:
        return None
    rows = [
        (call.what, call.where, str(call.times), number_text(call.times / steps) if steps else "-") for call in calls
    ]
    return TextTable(("call", "line", "times", "per step"), tuple(rows))
