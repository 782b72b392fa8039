"""HTML of plans, diagnoses and other results for notebooks: a page in an iframe, so that its style stays inside."""

import math
from collections.abc import Callable
from html import escape
from typing import Any

from anybatch.records.certificates import Certificate
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.memory import CATEGORIES, Memory
from anybatch.records.paths import Paths
from anybatch.records.plans import Plan
from anybatch.records.results import StepResult
from anybatch.records.runs import Run
from anybatch.records.tunings import BatchAdvice
from anybatch.report.diagnosis_page import page
from anybatch.report.frontier import plan_page, timeline_pictures
from anybatch.report.pages import Picture, render_page
from anybatch.report.svg import Axis, Curve, line_chart
from anybatch.report.tables import TextTable, number_text
from anybatch.units import format_bytes

_TALLEST = 720
_MOST_STOPS = 50


def html_of(shown: Any) -> str:
    """The HTML that a notebook shows for a record."""
    make = next(make for kind, make in _PAGES.items() if isinstance(shown, kind))
    return framed(make(shown))


def framed(page: str) -> str:
    """A page in an iframe as tall as the page, up to 720 pixels."""
    fit = f"this.style.height=Math.min({_TALLEST},this.contentDocument.documentElement.scrollHeight+4)+'px'"
    style = "width:100%;height:6rem;border:0;color-scheme:light dark"
    return f'<iframe srcdoc="{escape(page)}" style="{style}" onload="{fit}"></iframe>'


def _small(title: str, facts: list[tuple[str, str]], table: TextTable | None = None, **more: Any) -> str:
    """A page of facts and a table; ``more`` may have ``caption``, ``verdict``, ``mood``, ``pictures``, ``steps``."""
    values = {"steps": [], "pictures": [], "mood": "", "verdict": "", "caption": ""} | more
    return render_page("small.html.j2", title=title, facts=facts, table=table, **values)


def _of_result(result: StepResult) -> str:
    facts = [("loss", number_text(result.loss)), ("count", f"{result.count:g}")]
    facts += [("micro-batches", str(result.micro_batches))]
    facts += [("norm of the gradient", number_text(result.grad_norm))] if result.grad_norm is not None else []
    facts += [("not updated", result.skipped)] if result.skipped else []
    facts += [("plan", str(result.plan.chosen))] if result.plan is not None else []
    rows = [(name, number_text(value)) for name, value in result.losses.items() if len(result.losses) > 1]
    rows += [(name, _value(value)) for name, value in result.metrics.items()]
    table = TextTable(("loss or metric", "value"), tuple(rows)) if rows else None
    return _small("A step of anybatch", facts, table)


def _value(value: Any) -> str:
    if isinstance(value, (int, float)):
        return number_text(float(value))
    return f"{type(value).__name__} of shape {tuple(value.shape)}" if hasattr(value, "shape") else str(value)[:80]


def _of_certificate(found: Certificate) -> str:
    facts = [("gradient", f"{found.figures}, in {found.dtype}"),
             ("samples", f"{found.samples} of {found.samples_in_batch}")]  # fmt: skip
    kinds = [("reason", one) for one in found.reasons] + [("note", one) for one in found.notes]
    rows = [(f"{kind}: {one.code}", one.where, one.message, "\n".join(one.remedies)) for kind, one in kinds]
    table = TextTable(("", "where", "what", "remedy"), tuple(rows)) if rows else None
    mood = "healthy" if found.exact else "error"
    return _small("anybatch check", facts, table, verdict=found.verdict, mood=mood)


def _of_memory(memory: Memory) -> str:
    facts = [("peak", format_bytes(memory.peak_bytes) + (f", after {memory.operation}" if memory.operation else "")),
             ("at the end", format_bytes(memory.end_bytes))]  # fmt: skip
    rows = tuple(
        (name, *(format_bytes(of.get(name, 0)) for of in (memory.at_peak, memory.at_end)))
        for name in CATEGORIES
        if memory.at_peak.get(name, 0) or memory.at_end.get(name, 0)
    )
    steps = timeline_pictures({"from operation to operation": memory.timeline}) if memory.timeline else []
    table = TextTable(("", "at the peak", "at the end"), rows)
    return _small("Bytes of live tensors", facts, table, steps=steps)


def _of_paths(paths: Paths) -> str:
    facts = [("reached", f"{len(paths.reached)} of {len(paths.leaves)} parameters")]
    facts += [("note", note) for note in paths.notes]
    rows = tuple((name, str(stop), stop.message) for name, stop in list(paths.stopped.items())[:_MOST_STOPS])
    more = len(paths.stopped) - _MOST_STOPS
    caption = f"{more} more are not shown." if more > 0 else ""
    table = TextTable(("parameter", "stopped by", ""), rows) if rows else None
    mood = "healthy" if not paths.stopped else "error"
    verdict = "The loss reaches every parameter."
    if paths.stopped:
        verdict = f"The loss does not reach {len(paths.stopped)} of {len(paths.leaves)} parameters."
    return _small("anybatch why", facts, table, caption=caption, verdict=verdict, mood=mood)


def page_of_advice(found: BatchAdvice) -> str:
    """The page of a recommended batch size: updates and samples to the same loss over the batch size."""
    facts = [("learning rate", f"{found.new_rate:.3g} (rule {found.rule}), {found.rate:g} of the run")]
    falls = [(f"{found.rate * factor:.3g}", number_text(fall) if fall is not None else "not finite")
             for factor, fall in found.rated]  # fmt: skip
    table = TextTable(("learning rate", "fall of the loss with your batch"), tuple(falls)) if falls else None
    pictures = []
    if found.pays is not None:
        places = [math.log2(size) for size in found.sizes]
        curves = [Curve(name, places, [found.cost(size)[which] for size in found.sizes])
                  for which, name in enumerate(("updates", found.unit))]  # fmt: skip
        svg = line_chart(
            curves, x_label=f"log2 of the batch size; yours is {found.batch}", y_label="relative to the minimum",
            axis=Axis(places[0], places[-1], is_even=True), is_logarithmic=True,
            marks=[("pays off", math.log2(found.pays))],
        )  # fmt: skip
        pictures = [Picture("Updates and samples to the same loss", svg, "After McCandlish et al. 2018.", str(found))]
    return _small("anybatch tune", facts, table, verdict=str(found), pictures=pictures)


_PAGES: dict[type, Callable[[Any], str]] = {
    Plan: lambda plan: plan_page(plan, plan.device),
    Diagnosis: lambda found: page(found, Run([])),
    StepResult: _of_result,
    BatchAdvice: page_of_advice,
    Certificate: _of_certificate,
    Memory: _of_memory,
    Paths: _of_paths,
}
