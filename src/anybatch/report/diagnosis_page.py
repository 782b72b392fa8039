"""A diagnosis as one page: what to change first, then everything that was measured, as pictures and tables."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anybatch.records.diagnoses import Diagnosis
from anybatch.records.events import Crashed
from anybatch.records.findings import Finding, is_code
from anybatch.records.runs import Run
from anybatch.report import diagnosis as words
from anybatch.report.diagnosis_calls import Call, Output
from anybatch.report.diagnosis_cells import cells_lines, squares_of
from anybatch.report.diagnosis_drawing import Band, line_picture
from anybatch.report.diagnosis_flow import Flow
from anybatch.report.diagnosis_heat import heat_picture, norm_text
from anybatch.report.diagnosis_series import Curve, Series, series_of
from anybatch.report.tables import TextTable
from anybatch.units import format_bytes

MOST_FINDINGS = 60
MOST_CELLS = 200
_COLUMNS_OF_NUMBERS = 6
_MOST_FIX = 4000

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))

# About a thousandth of the weights is the usual size of an update (Karpathy, "A recipe for training neural networks");
# the first steps of Adam are larger, the end of a schedule smaller.
_USUAL = Band(1e-4, 1e-2, "usual, about 0.001")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the page.

    Args:
        title: its heading.
        svg: the text of an ``svg`` element.
        caption: below it.
        alternative: what it shows, in words, for those who can't see it.
    """

    title: str
    svg: str
    caption: str
    alternative: str


@dataclass(frozen=True, slots=True)
class Card:
    """A finding as the page shows it.

    Args:
        finding: the finding.
        label: its severity, code and name.
        place: where.
        evidence: terms and their texts.
        fix: what to change.
        is_code: whether that is code; otherwise it is a sentence.
        follows: what follows from it.
    """

    finding: Finding
    label: str
    place: str
    evidence: tuple[tuple[str, str], ...]
    fix: str
    is_code: bool
    follows: tuple["Card", ...]


def page(diagnosis: Diagnosis, run: Run) -> str:
    """Renders the page of a diagnosis; the same facts give the same text.

    Args:
        diagnosis: what to show.
        run: its facts.

    Returns:
        HTML that loads nothing.

    Raises:
        ImportError: jinja2 is not installed.
    """
    from anybatch.report.pages import render_page

    series = series_of(run)
    grave, notes = words.grave_and_notes(diagnosis)
    crash = words.crash_of(run)
    lines, left_out = cells_lines(diagnosis, MOST_CELLS)
    text = render_page(
        "diagnosis.html.j2",
        title=f"anybatch doctor: {words.title_of(diagnosis)}",
        verdict=_sentence(words.verdict_of(diagnosis, run)),
        mood=words.mood_of(diagnosis, run),
        facts=_facts(diagnosis, run),
        crash=crash,
        crash_place=_crash_place(crash),
        crash_known=crash is not None and any(one.name == crash.name for one in diagnosis.findings if crash.name),
        cards=[_card(knot) for knot in grave[:MOST_FINDINGS]],
        left_out=max(0, len(grave) - MOST_FINDINGS),
        notes=[_card(knot) for knot in notes[:MOST_FINDINGS]],
        squares=squares_of(diagnosis),
        cells=lines,
        cells_left_out=left_out,
        flow=_flow_picture(series.flow),
        flow_numbers=_flow_numbers(series.flow),
        pictures=_pictures(series),
        outputs=_outputs_table(series.outputs),
        outputs_caption=_outputs_caption(series),
        calls=_calls_table(series.calls, diagnosis.steps),
        remarks=_remarks(diagnosis, run),
    )
    return words.clean(text)


def _card(knot: words.Knot) -> Card:
    finding = knot.finding
    fix = textwrap.dedent(finding.fix).strip("\n")[:_MOST_FIX]
    return Card(
        finding, words.label_of(finding), words.place_of(finding), words.evidence_of(finding), fix,
        "\n" in fix or is_code(fix), tuple(_card(one) for one in knot.follows),
    )  # fmt: skip


def _facts(diagnosis: Diagnosis, run: Run) -> list[tuple[str, str]]:
    started = run.started
    trained = [one for one in run.parameters.values() if one.root >= 0]
    numel = sum(one.numel for one in trained)
    facts = [
        ("steps", str(diagnosis.steps) if diagnosis.steps else ""),
        ("models", ", ".join(f"{one.variable or '?'} ({one.cls})" for one in run.roots.values())),
        ("parameters", f"{numel:,} numbers in {len(trained)} tensors" if trained else ""),
        ("optimizers", ", ".join(f"{one.variable or '?'} ({one.cls})" for one in run.optimizers.values())),
        ("device", diagnosis.device or started.device),
        ("torch", started.torch),
    ]
    return [(term, text[:400]) for term, text in facts if text]


def _crash_place(crash: Crashed | None) -> str:
    return f"{crash.file}:{crash.line}" if crash is not None and crash.file else ""


def _remarks(diagnosis: Diagnosis, run: Run) -> list[str]:
    cost = words.cost_of(diagnosis, run)
    return [*([_sentence(cost)] if cost else []), *diagnosis.notes]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _flow_picture(flow: Flow) -> Picture | None:
    if not flow.rows or not flow.steps:
        return None
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
    said += [f"The first gradient that is not finite: {odd}."] if odd else []
    caption = (
        "One row for each layer, in the order of the forward, and one column for each step that was sampled. "
        "Equal shades are equal powers of ten."
    )
    if flow.layers > len(flow.rows):
        caption += f" {flow.layers} layers were put together into {len(flow.rows)} rows."
    if flow.total > len(flow.steps):
        caption += f" {len(flow.steps)} of {flow.total} sampled steps are shown."
    return Picture("The flow of the gradient", heat_picture(flow), caption, " ".join(said))


def _flow_numbers(flow: Flow) -> TextTable | None:
    if not flow.rows or not flow.steps:
        return None
    count = min(_COLUMNS_OF_NUMBERS, len(flow.steps))
    columns = sorted({index * (len(flow.steps) - 1) // max(1, count - 1) for index in range(count)})
    header = ("layer", *(f"step {flow.steps[column]}" for column in columns))
    rows = [(row.name or "(the model)", *(norm_text(row.values[column]) for column in columns)) for row in flow.rows]
    return TextTable(header, tuple(rows))


def _pictures(series: Series) -> list[Picture]:
    drawn: list[Picture] = []
    _add(drawn, "Loss", series.losses, "What was given to backward, for each line that did; the mean within a step.")
    if series.ratios:
        drawn.append(_ratio_picture(series))
    _add(drawn, "Learning rate", series.rates, "Of each group of the optimizers that differs from the others.")
    clips = [(f"clipped to {limit:g}", limit) for limit in series.clips]
    _add(drawn, "Norm of the gradient", series.norms, "Of all parameters together.", clips)
    drawn += _memory_picture(series.memory)
    if any(any(curve.values) for curve in series.graphs):
        _add(drawn, "Graphs kept alive", series.graphs, "Losses of earlier steps whose graph could not be freed.")
    _add(drawn, "Watched modules", series.watched, "Norms of what was asked for with watch.")
    return drawn


def _add(
    drawn: list[Picture], title: str, curves: Sequence[Curve], caption: str, levels: Sequence[tuple[str, float]] = (),
) -> None:  # fmt: skip
    if not curves:
        return
    svg = line_picture(curves, x_label="step", levels=levels)
    said = [f"{curve.name}: {_course(curve)}." for curve in curves]
    drawn.append(Picture(title, svg, caption, f"{title} over steps. {' '.join(said)}"))


def _memory_picture(curves: Sequence[Curve]) -> list[Picture]:
    largest = max((value for curve in curves for value in curve.values), default=0.0)
    factor, unit = next((one for one in _UNITS if largest >= one[0]), _UNITS[-1])
    scaled = [Curve(one.name, one.steps, tuple(value / factor for value in one.values)) for one in curves]
    said = [f"{curve.name}: {_course(curve, format_bytes)}." for curve in curves]
    caption = f"Of the process, and of the device if there is one, in {unit}."
    title = f"Memory, {unit}"
    return (
        [Picture(title, line_picture(scaled, x_label="step", least_span=0.1), caption, " ".join([title, *said]))]
        if curves
        else []
    )


def _course(curve: Curve, number: Callable[[float], str] = words.number_text) -> str:
    finite = [value for value in curve.values if value - value == 0]
    odd = [step for step, value in zip(curve.steps, curve.values, strict=True) if value - value != 0]
    ends = f"{number(curve.values[0])} at step {curve.steps[0]}, {number(curve.values[-1])} at step {curve.steps[-1]}"
    lost = f"; not finite from step {odd[0]}" if odd else ""
    return f"{ends}, between {number(min(finite))} and {number(max(finite))}{lost}" if finite else f"not finite{lost}"


def _ratio_picture(series: Series) -> Picture:
    steps = tuple(one.step for one in series.ratios)
    low, middle, high = (
        Curve(name, steps, tuple(getattr(one, entry) for one in series.ratios))
        for name, entry in (("least", "low"), ("median of the matrices", "middle"), ("most", "high"))
    )
    svg = line_picture([middle], x_label="step", is_logarithmic=True, area=(low, high), band=_USUAL)
    last = series.ratios[-1]
    said = (
        f"Median of update over weight: {_course(middle)}. At the last sampled step the least is "
        f"{words.number_text(last.low)} in {last.lowest}, the most {words.number_text(last.high)} in {last.highest}."
    )
    caption = (
        f"Norm of the change over the norm of the weight, for each weight matrix; the shaded area goes from the least "
        f"to the most. Last: least in {last.lowest} ({words.number_text(last.low)}), most in {last.highest} "
        f"({words.number_text(last.high)})."
    )
    return Picture("Update over weight", svg, caption, said)


def _outputs_table(outputs: Sequence[Output]) -> TextTable | None:
    if not outputs:
        return None
    number = words.number_text
    rows = tuple(
        (
            one.module or "(the model)",
            one.cls,
            number(one.first_std) if one.samples == 1 else f"{number(one.first_std)} to {number(one.last_std)}",
            number(one.absmax),
            f"{one.zeros:.0%}",
            f"{one.dead:.0%}",
            "-" if one.saturated is None else f"{one.saturated:.0%}",
            number(one.spread),
        )
        for one in outputs
    )
    header = ("module", "class", "standard deviation", "largest", "zeros", "dead units", "saturated", "spread")
    return TextTable(header, rows, frozenset(index for index, one in enumerate(outputs) if one.stands_out))


def _outputs_caption(series: Series) -> str:
    caption = (
        "What the modules put out on sampled steps. Dead units were zero in every sample; saturated entries lie within "
        "0.001 of a limit; spread is how much the output differs over the batch."
    )
    rest = series.modules - len(series.outputs)
    return f"{caption} {rest} modules are not shown." if rest else caption


def _calls_table(calls: Sequence[Call], steps: int) -> TextTable | None:
    if not calls:
        return None
    rows = [
        (call.what, call.where, str(call.times), words.number_text(call.times / steps) if steps else "-")
        for call in calls
    ]
    return TextTable(("what", "line", "times", "for each step"), tuple(rows))
