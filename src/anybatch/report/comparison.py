"""The comparison page of two records: findings of each, and the measurements of both on the same axes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from anybatch.records.diagnoses import Diagnosis
from anybatch.records.runs import Run
from anybatch.report import diagnosis as words
from anybatch.report.diagnosis_page import axis_of_run, curve_picture, facts_of, flow_pictures, sentence
from anybatch.report.pages import Picture, render_page
from anybatch.report.series import Series, series_of
from anybatch.report.svg import Axis, Curve
from anybatch.report.tables import TextTable, clean, number_text


class Recorded(NamedTuple):
    """A record with its diagnosis."""

    name: str  # its name on the page
    diagnosis: Diagnosis
    run: Run


def comparison_page(first: Recorded, second: Recorded) -> str:
    """Renders the comparison page of two records; deterministic."""
    both = (first, second)
    series = [series_of(one.run) for one in both]
    axis = axis_of_run(*series)
    sides = [
        {
            "name": one.name,
            "verdict": sentence(words.verdict_of(one.diagnosis, one.run)),
            "mood": words.mood_of(one.diagnosis, one.run),
            "facts": facts_of(one.diagnosis, one.run),
            "flows": flow_pictures(shown.flow, axis, *(other.flow for other in series)),
        }
        for one, shown in zip(both, series, strict=True)
    ]
    return clean(
        render_page(
            "comparison.html.j2",
            title=f"anybatch report: {first.name} and {second.name}",
            sides=sides,
            findings=_findings(both),
            calls=_calls(both, series),
            pictures=_pictures(both, series, axis),
        )
    )


def _findings(both: Sequence[Recorded]) -> TextTable:
    """A row for each finding, with the step at which each record has it."""
    found: dict[tuple[str, str], list[str]] = {}
    for side, one in enumerate(both):
        for finding in one.diagnosis.findings:
            cells = found.setdefault((words.label_of(finding), str(finding.place)), ["-", "-"])
            cells[side] = f"from step {finding.step}"
    rows = [(label, place, *cells) for (label, place), cells in found.items()]
    marked = (index for index, row in enumerate(rows) if "-" in row[2:])
    return TextTable(("finding", "where", *(one.name for one in both)), tuple(rows), frozenset(marked))


def _calls(both: Sequence[Recorded], series: Sequence[Series]) -> TextTable:
    """A row for each call of the loop, with its number per step in each record."""
    times: dict[str, list[int]] = {}
    for side, shown in enumerate(series):
        for call in shown.calls:
            times.setdefault(call.what, [0, 0])[side] += call.times
    rows = [
        (what, *(number_text(count / max(1, one.diagnosis.steps)) for one, count in zip(both, counts, strict=True)))
        for what, counts in times.items()
    ]
    marked = (index for index, row in enumerate(rows) if row[1] != row[2])
    header = ("calls per step", *(one.name for one in both))
    return TextTable(header, tuple(rows), frozenset(marked))


def _pictures(both: Sequence[Recorded], series: Sequence[Series], axis: Axis) -> list[Picture]:
    def curves(of: Callable[[Series], Sequence[Curve]]) -> list[Curve]:
        return [
            Curve(f"{one.name}: {curve.name}", curve.steps, curve.values)
            for one, shown in zip(both, series, strict=True)
            for curve in of(shown)[:2]
        ]

    levels = [(f"{one.name}: constant guess", shown.guess) for one, shown in zip(both, series, strict=True)
              if shown.guess is not None]  # fmt: skip
    return [
        *curve_picture("Loss", curves(lambda one: one.losses[:1]), axis, "The loss passed to backward.", levels),
        *curve_picture("Norm of the gradient", curves(lambda one: one.norms), axis, "Over all parameters."),
        *curve_picture("Update over weight", curves(_middles), axis, "The median of the weight matrices.", log=True),
        *curve_picture("Learning rate", curves(lambda one: one.rates), axis, "Of the groups of the optimizers."),
    ]


def _middles(series: Series) -> list[Curve]:
    if not series.ratios:
        return []
    return [Curve("median", [one.step for one in series.ratios], [one.middle for one in series.ratios])]
