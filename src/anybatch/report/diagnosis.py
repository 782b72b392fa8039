"""The texts of a diagnosis: verdict, findings with their consequences, evidence, and which parameters changed."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from anybatch.doctor.views.naming import counted, listed
from anybatch.records.diagnoses import INTERRUPTED, Cell, Diagnosis
from anybatch.records.events import Crashed, Ended
from anybatch.records.findings import SEVERITIES, Finding
from anybatch.records.paths import cut_off, wholes
from anybatch.records.runs import Run, grouped
from anybatch.report.tables import TextTable, in_runs, number_text
from anybatch.units import format_seconds

_WHOLE = "(the model)"
_MOST_ENTRIES = 8
_MOST_TEXT = 400
_DEAR, _SHORT_RUN, _FEW_SECONDS = 0.03, 200, 20.0
_LEAST_ASKED = 0.1  # seconds of questions that are worth a word
_UNEXPLAINED = "UNCLASSIFIED"  # the finding that says no more than the traceback
_CRASHED = frozenset({"error", "text"})  # what the evidence of every crash has
_IN_TRACEBACK = frozenset({"error", "text", "code", "origin_file", "origin_line"})
_NOUNS = {"error": "error", "warning": "warning", "info": "note"}


@dataclass(frozen=True, slots=True)
class Knot:
    """A node of the tree of findings."""

    finding: Finding
    follows: tuple["Knot", ...] = ()  # its consequences, ranked


def knots_of(diagnosis: Diagnosis) -> tuple[Knot, ...]:
    """Arranges findings as trees, consequences below their cause; each finding appears exactly once."""
    found = diagnosis.findings
    first = {one.name: index for index, one in reversed(list(enumerate(found)))}
    parents = {
        index: first.get(one.consequence_of, -1) if one.consequence_of else -1 for index, one in enumerate(found)
    }
    for index in parents:
        seen, here = set(), index
        while here >= 0 and here not in seen:
            seen.add(here)
            here = parents[here]
        if here == index:
            parents[index] = -1
    children = grouped((parent, index) for index, parent in parents.items())

    def knot(index: int) -> Knot:
        return Knot(found[index], tuple(knot(child) for child in children.get(index, ())))

    return tuple(knot(index) for index in children.get(-1, ()))


def verdict_of(diagnosis: Diagnosis, run: Run) -> str:
    """One sentence without its full stop: whether the run is healthy, and if not, its first cause."""
    if diagnosis.verdict == "checked":
        return diagnosis.reason
    # errors and warnings that were suppressed are named, so that a silent report is not taken for a clean run
    codes = dict.fromkeys(one.finding.code for one in diagnosis.suppressed if one.finding.severity != "info")
    others = f" (not reported: {', '.join(codes)})" if codes else ""
    if diagnosis.faulty:
        counts = {kind: sum(one.severity == kind for one in diagnosis.causes) for kind in SEVERITIES}
        said = " and ".join(counted(counts[kind], _NOUNS[kind]) for kind in ("error", "warning") if counts[kind])
        leading = next(knot.finding for knot in knots_of(diagnosis) if _is_grave(knot))
        return f"{said}: {_first_sentence(leading.message)}{others}"
    number = len(grave_and_notes(diagnosis)[1])
    notes = (f" ({counted(number, 'note')})" if number else "") + others
    steps = f"in {counted(diagnosis.steps, 'step')}"
    if (crash := crash_of(run)) is not None:
        text = crash.text.strip().split("\n")[0].rstrip(".")  # whole: its remedy may be the second sentence
        said = _first_sentence(crash.message) if crash.message else f"{crash.error}: {text}"
        return f"the script crashed: {said}{notes}"
    if diagnosis.exit_code and diagnosis.exit_code != INTERRUPTED:
        return f"the script ended with exit code {diagnosis.exit_code}; nothing found {steps}{notes}"
    if not diagnosis.steps and not diagnosis.unexamined:
        return f"nothing to judge: no optimizer stepped{notes}"
    found = "nothing found" if "all rules" not in diagnosis.unexamined else "not diagnosed"
    found = "no error and no warning" if notes and found == "nothing found" else found
    if diagnosis.verdict == "learning":
        because = f"; {diagnosis.reason}" if diagnosis.reason else ""
        return f"healthy: {found} {steps}{because}{notes}"
    reason = diagnosis.reason or "whether it learns was not seen"
    return f"{found}{'' if 'too few' in reason else f' {steps}'}, but {reason}{notes}"


def mood_of(diagnosis: Diagnosis, run: Run) -> str:
    """The style of the verdict: ``"error"``, ``"warning"``, ``"unknown"`` or ``"healthy"``."""
    if diagnosis.faulty:
        return "error" if any(one.severity == "error" for one in diagnosis.causes) else "warning"
    if crash_of(run) is not None or diagnosis.exit_code not in (None, 0, INTERRUPTED):
        return "error"
    return "healthy" if diagnosis.verdict == "learning" else "unknown"


def crash_of(run: Run) -> Crashed | None:
    """The exception that ended the script; ``None`` if there was none."""
    return next(iter(list(run.of(Crashed))[-1:]), None)


def _is_grave(knot: Knot) -> bool:
    return knot.finding.severity != "info" or any(_is_grave(one) for one in knot.follows)


def grave_and_notes(diagnosis: Diagnosis) -> tuple[tuple[Knot, ...], tuple[Knot, ...]]:
    """Root findings in two groups: those that are, or lead to, an error or a warning; and the notes.

    An unclassified crash without consequences is in neither group: the verdict reports it.
    """
    knots = tuple(knot for knot in knots_of(diagnosis) if knot.finding.name != _UNEXPLAINED or knot.follows)
    return tuple(filter(_is_grave, knots)), tuple(knot for knot in knots if not _is_grave(knot))


def label_of(finding: Finding) -> str:
    """The severity, code and name of a finding on one line; ``info`` is shown as ``note``."""
    return " ".join(filter(None, (_NOUNS.get(finding.severity, finding.severity), finding.code, finding.name)))


def fix_term(finding: Finding) -> str:
    """The heading of a fix: ``"suggestion"`` if it was neither tried nor tested, else ``"fix"``."""
    return "suggestion" if finding.fix_kind == "suggestion" else "fix"


def evidence_of(finding: Finding) -> tuple[tuple[str, str], ...]:
    """The evidence of a finding, as pairs of a term and its text; for a crash, without what its traceback shows."""
    evidence = dict(finding.evidence)
    if evidence.keys() >= _CRASHED:
        evidence = {name: value for name, value in evidence.items() if name not in _IN_TRACEBACK}
        renamed = {"from": evidence.pop("origin_code", ""), "raised at": PurePath(evidence.pop("raised_at", "")).name}
        evidence |= {name: value for name, value in renamed.items() if value}
    found: list[tuple[str, str]] = []
    for name, value in evidence.items():
        if name == "of" and found:  # how many there are in all, of what stands before it
            found[-1] = (found[-1][0], f"{found[-1][1]} of {value_text(value)}")
        else:
            found.append((name.replace("_", " "), value_text(value)))
    return tuple(found)


def value_text(value: Any) -> str:
    """A short text of a JSON value; after 8 entries of a list, the others are counted."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, Mapping):
        return listed((f"{name} {value_text(entry)}" for name, entry in value.items()), _MOST_ENTRIES)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return listed(map(value_text, value), _MOST_ENTRIES)
    text = str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def cost_of(diagnosis: Diagnosis, run: Run) -> str:
    """The overhead of the doctor and the gaps of the record, without a final full stop; empty if unknown."""
    ended = next(run.of(Ended), None)
    said = []
    if ended is not None and ended.seconds > 0:
        says_little = diagnosis.overhead is None or diagnosis.overhead > 1  # of a script that did next to nothing
        share = "" if says_little else f" ({diagnosis.overhead:.1%} of the script's own time)"
        own, took = format_seconds(ended.own_seconds), format_seconds(ended.seconds)
        after = f", and {format_seconds(ended.asked_seconds)} for its questions after the script"
        said.append(f"the doctor took {own} of {took}{share}" + after * (ended.asked_seconds >= _LEAST_ASKED))
    elif diagnosis.overhead is not None:
        said.append(f"the doctor took {diagnosis.overhead:.1%} of the run's own time")
    short = diagnosis.steps < _SHORT_RUN or (ended is not None and ended.seconds < _FEW_SECONDS)
    if said and (diagnosis.overhead or 0.0) > _DEAR and short:
        said.append("it measures every one of the first steps, so the overhead is largest in short runs")
    if ended is not None and ended.thinned:
        said.append("to limit the overhead, it measured fewer steps")
    if ended is not None and ended.dropped:
        said.append(f"{counted(ended.dropped, 'line')} left out because the record had reached its size limit")
    if ended is not None and ended.failure and not any(ended.failure in note for note in diagnosis.notes):
        said.append(f"the recorder had an internal error, so facts may be missing: {ended.failure}")
    return "; ".join(said)


def tool_of(diagnosis: Diagnosis) -> str:
    """The command that made the findings."""
    return "anybatch check" if diagnosis.verdict == "checked" else "anybatch doctor"


def title_of(diagnosis: Diagnosis) -> str:
    """The script and its arguments on one line."""
    return title_of_run(diagnosis.script, diagnosis.arguments)


def title_of_run(script: str, arguments: Sequence[str]) -> str:
    """A script and its arguments on one line."""
    return " ".join([PurePath(script).name or "this run", *arguments])


def _first_sentence(text: str) -> str:
    """The first sentence without its full stop; a dot within a name, or a colon, does not end it."""
    line = " ".join(text.strip().split("\n")[:1])
    return re.split(r"\. (?=[A-Z])", line, maxsplit=1)[0].strip().rstrip(".")


def cells_table(diagnosis: Diagnosis) -> TextTable:
    """The table of which gradients and parameters change: one row for all modules with the same state."""
    named = _named(diagnosis)
    groups = grouped(((one.cell, one.shrinking, one.frozen, one.why), (one, names)) for one, names in named)
    rows: list[tuple[str, ...]] = []
    marked = set()
    for key in sorted(groups):
        kind, shrinking, frozen, why = key
        if shrinking or (kind in (2, 3, 4) and not frozen):
            marked.add(len(rows))
        names = _joined(groups[key], named)
        numel = f"{sum(cell.numel for cell, _ in groups[key]):,}"
        reason = why or ("frozen" if frozen else "")
        rows.append((*_yes_no(kind, shrinking), numel, f"{names}: {reason}" if reason else names))
    return TextTable(("gradients", "parameters", "elements", "where"), tuple(rows), frozenset(marked))


_Named = list[tuple[Cell, tuple[str, ...]]]


def _named(diagnosis: Diagnosis) -> _Named:
    """Cells with their names: the module, or the parameters if the module is split over several cells."""
    times = Counter(cell.module for cell in diagnosis.cells)
    own = [cell.parameters if times[cell.module] > 1 else () for cell in diagnosis.cells]
    return [(cell, names or (cell.module or _WHOLE,)) for cell, names in zip(diagnosis.cells, own, strict=True)]


def _joined(cells: _Named, among: _Named) -> str:
    """The names of some cells of all."""
    return modules_joined(
        [name for _, names in cells for name in names], [name for _, names in among for name in names]
    )


_DO, _DO_NOT = "changing", "unchanged"


def _yes_no(kind: int, shrinking: bool) -> tuple[str, str]:
    texts = {1: (_DO, _DO), 2: (_DO, _DO_NOT), 3: (_DO_NOT, _DO_NOT), 4: (_DO_NOT, _DO)}
    gradients, parameters = texts.get(kind, ("?", "?"))
    return ("shrinking" if shrinking else gradients), parameters


def modules_joined(names: Collection[str], among: Collection[str]) -> str:
    """Lists modules: all parts of a container, and runs of numbered modules, are shown as one entry.

    At most 12 entries are shown, the others are counted.
    """
    return cut_off(list(in_runs(wholes(names, among))))
