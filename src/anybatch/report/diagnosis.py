"""A diagnosis in words: the verdict, findings with their consequences, evidence, and what changed in which layers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from anybatch.records.branches import names_joined
from anybatch.records.diagnoses import CELLS, Cell, Diagnosis
from anybatch.records.events import Crashed, Ended
from anybatch.records.findings import SEVERITIES, Finding
from anybatch.records.runs import Run
from anybatch.report.tables import TextTable
from anybatch.units import format_seconds

_MOST_ENTRIES = 8
_MOST_TEXT = 400
_LONG_SENTENCE, _SHORT_SENTENCE = 160, 20
_DEAR, _SHORT_RUN = 0.03, 200
_NOUNS = {"error": "error", "warning": "warning", "info": "note"}


@dataclass(frozen=True, slots=True)
class Knot:
    """A finding and what follows from it.

    Args:
        finding: the finding.
        follows: its consequences, in order of rank.
    """

    finding: Finding
    follows: tuple["Knot", ...] = ()


def knots_of(diagnosis: Diagnosis) -> tuple[Knot, ...]:
    """Hangs each finding under the one that it follows from; none is lost and none comes twice.

    Args:
        diagnosis: has the findings.

    Returns:
        The roots, in order of rank.

    Example:
        >>> found = Finding("a", name="A"), Finding("b", name="B", consequence_of="A"), Finding("c", name="C")
        >>> [(knot.finding.name, len(knot.follows)) for knot in knots_of(Diagnosis(found))]
        [('A', 1), ('C', 0)]
    """
    found = diagnosis.findings
    first = {one.name: index for index, one in reversed(list(enumerate(found)))}
    parents = {
        index: first.get(one.consequence_of, -1) if one.consequence_of else -1 for index, one in enumerate(found)
    }
    for index in parents:
        if _circles(index, parents):
            parents[index] = -1
    children: dict[int, list[int]] = {}
    for index, parent in parents.items():
        children.setdefault(parent, []).append(index)

    def knot(index: int) -> Knot:
        return Knot(found[index], tuple(knot(child) for child in children.get(index, ())))

    return tuple(knot(index) for index in children.get(-1, ()))


def _circles(start: int, parents: Mapping[int, int]) -> bool:
    seen, here = set(), start
    while here >= 0 and here not in seen:
        seen.add(here)
        here = parents[here]
    return here == start


def verdict_of(diagnosis: Diagnosis, run: Run) -> str:
    """One sentence without its full stop: is the run healthy, and if not, what comes first.

    Args:
        diagnosis: of the run.
        run: its facts.

    Example:
        >>> verdict_of(Diagnosis(steps=200), Run([]))
        'healthy: nothing found in 200 steps'
        >>> verdict_of(Diagnosis((Finding("The head is in no group.", severity="error"),), steps=9), Run([]))
        '1 error: The head is in no group'
    """
    counts = {kind: sum(one.severity == kind for one in diagnosis.findings) for kind in SEVERITIES}
    if not diagnosis.healthy:
        said = " and ".join(_count(counts[kind], _NOUNS[kind]) for kind in ("error", "warning") if counts[kind])
        return f"{said}: {_first_sentence(_leading(diagnosis).message)}"
    notes = f" ({_count(counts['info'], 'note')})" if counts["info"] else ""
    if (crash := crash_of(run)) is not None:
        return f"the script crashed: {_first_sentence(crash.message or f'{crash.error}: {crash.text}')}{notes}"
    if diagnosis.exit_code:
        return f"the script ended with exit code {diagnosis.exit_code}; nothing found in {_steps(diagnosis)}{notes}"
    if not diagnosis.steps:
        return f"nothing to judge: no optimizer stepped{notes}"
    return f"healthy: {'no error and no warning' if notes else 'nothing found'} in {_steps(diagnosis)}{notes}"


def mood_of(diagnosis: Diagnosis, run: Run) -> str:
    """What the verdict is: ``"error"``, ``"warning"``, ``"unknown"`` or ``"healthy"``."""
    if not diagnosis.healthy:
        return "error" if any(one.severity == "error" for one in diagnosis.findings) else "warning"
    if crash_of(run) is not None or diagnosis.exit_code:
        return "error"
    return "healthy" if diagnosis.steps else "unknown"


def crash_of(run: Run) -> Crashed | None:
    """The exception that ended the script, if one did."""
    return next(iter(list(run.of(Crashed))[-1:]), None)


def _leading(diagnosis: Diagnosis) -> Finding:
    return next(knot.finding for knot in knots_of(diagnosis) if _is_grave(knot))


def _is_grave(knot: Knot) -> bool:
    return knot.finding.severity != "info" or any(_is_grave(one) for one in knot.follows)


def grave_and_notes(diagnosis: Diagnosis) -> tuple[tuple[Knot, ...], tuple[Knot, ...]]:
    """The roots that are errors or warnings or lead to one, and the notes."""
    knots = knots_of(diagnosis)
    return tuple(filter(_is_grave, knots)), tuple(knot for knot in knots if not _is_grave(knot))


def noun_of(finding: Finding) -> str:
    """Its severity as it is shown: an ``info`` is a note."""
    return _NOUNS.get(finding.severity, finding.severity)


def label_of(finding: Finding) -> str:
    """Its severity, code and name on one line."""
    return " ".join(text for text in (noun_of(finding), finding.code, finding.name) if text)


def place_of(finding: Finding) -> str:
    """Where it is, with the step from which it was known."""
    return str(finding.place)


def evidence_of(finding: Finding) -> tuple[tuple[str, str], ...]:
    """Its evidence: pairs of a term and its text."""
    return tuple((name.replace("_", " "), value_text(value)) for name, value in finding.evidence.items())


def value_text(value: Any) -> str:
    """A value of JSON in few characters; long lists end with how many there are.

    Args:
        value: a number, a text, a list or a mapping.

    Example:
        >>> value_text([1, 0.000123456, "nan", None]), value_text({"lr": 0.1}), value_text(list(range(100)))
        ('1, 0.000123, nan, none', 'lr 0.1', '0, 1, 2, 3, 4, 5, 6, 7 and 92 more')
    """
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, Mapping):
        return _listed([f"{name} {value_text(entry)}" for name, entry in value.items()])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _listed([value_text(entry) for entry in value])
    text = str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def number_text(value: float | None) -> str:
    """A number with three significant digits.

    Args:
        value: of any size; ``None`` gives a dash.

    Example:
        >>> [number_text(value) for value in (0.0, 0.5, 12345.6, 3.2e-9, float("nan"), None)]
        ['0', '0.5', '12346', '3.2e-09', 'nan', '-']
    """
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_ENTRIES} more" if len(texts) > _MOST_ENTRIES else ""
    return ", ".join(texts[:_MOST_ENTRIES]) + more


def cells_table(diagnosis: Diagnosis) -> TextTable:
    """Lays out which gradients and parameters change: a row for all modules of which the same is true.

    Args:
        diagnosis: has the cells.

    Returns:
        The table; rows that are not as they should be are marked.
    """
    groups: dict[tuple[int, bool, bool, str], list[Cell]] = {}
    for cell in diagnosis.cells:
        groups.setdefault((cell.cell, cell.shrinking, cell.frozen, cell.why), []).append(cell)
    among = [cell.module or "(the model)" for cell in diagnosis.cells]
    rows: list[tuple[str, ...]] = []
    marked = set()
    for key in sorted(groups):
        kind, shrinking, frozen, why = key
        members = groups[key]
        if _is_odd(members[0]):
            marked.add(len(rows))
        names = names_joined(
            list(dict.fromkeys(cell.module or "(the model)" for cell in members)), dict.fromkeys(among)
        )
        numel = f"{sum(cell.numel for cell in members):,}"
        reason = why or ("frozen" if frozen else "")
        rows.append((*_yes_no(kind, shrinking), numel, f"{names}: {reason}" if reason else names))
    return TextTable(("gradients", "parameters", "numbers", "where"), tuple(rows), frozenset(marked))


def _yes_no(kind: int, shrinking: bool) -> tuple[str, str]:
    texts = {1: ("change", "change"), 2: ("change", "stay"), 3: ("stay", "stay"), 4: ("stay", "change")}
    gradients, parameters = texts.get(kind, ("?", "?"))
    return ("shrink" if shrinking else gradients), parameters


def cells_lines(diagnosis: Diagnosis, most: int) -> tuple[TextTable, int]:
    """Lays out each module's gradients and changes, those that are not as they should be first.

    Args:
        diagnosis: has the cells.
        most: rows.

    Returns:
        The table, and how many rows were left out.
    """
    order = sorted(diagnosis.cells, key=lambda cell: cell.frozen or (cell.cell == 1 and not cell.shrinking))
    rows = tuple(
        (
            cell.module or "(the model)",
            *_yes_no(cell.cell, cell.shrinking),
            _from_to(cell.first_gradient, cell.last_gradient),
            _from_to(cell.first_ratio, cell.last_ratio),
            f"{cell.numel:,}",
            cell.why or ("frozen" if cell.frozen else ""),
        )
        for cell in order[:most]
    )
    header = ("module", "gradients", "parameters", "norm of gradient", "change / weight", "numbers", "why")
    marked = (index for index, cell in enumerate(order[:most]) if _is_odd(cell))
    return TextTable(header, rows, frozenset(marked)), max(0, len(order) - most)


@dataclass(frozen=True, slots=True)
class Square:
    """One of the four cells.

    Args:
        names: of its modules, empty where it has none.
        reasons: why they are in it.
        odd: whether that is not as it should be for some of them.
    """

    names: str
    reasons: str
    odd: bool


def squares_of(diagnosis: Diagnosis) -> dict[int, Square]:
    """Each of the four cells, and as number 0 that of which too little was seen.

    Args:
        diagnosis: has the cells.
    """
    among = dict.fromkeys(cell.module or "(the model)" for cell in diagnosis.cells)
    squares = {}
    for kind in (*CELLS, 0):
        cells = [cell for cell in diagnosis.cells if cell.cell == kind]
        names = names_joined(dict.fromkeys(cell.module or "(the model)" for cell in cells), among)
        groups: dict[str, dict[str, None]] = {}
        for cell in cells:
            groups.setdefault(_reason(cell), {})[cell.module or "(the model)"] = None
        reasons = [
            f"{reason}: {names_joined(members, among)}" if len(groups) > 1 else reason
            for reason, members in groups.items()
            if reason
        ]
        squares[kind] = Square(names, "; ".join(reasons), any(_is_odd(cell) for cell in cells))
    return squares


def _reason(cell: Cell) -> str:
    shrunk = "gradients shrink to less than a thousandth" if cell.shrinking else ""
    return ", ".join(text for text in (cell.why or ("frozen" if cell.frozen else ""), shrunk) if text)


def _is_odd(cell: Cell) -> bool:
    return cell.shrinking or (cell.cell in (2, 3, 4) and not cell.frozen)


def _from_to(first: float | None, last: float | None) -> str:
    if first is None and last is None:
        return "-"
    return number_text(first) if first == last else f"{number_text(first)} to {number_text(last)}"


def cost_of(diagnosis: Diagnosis, run: Run) -> str:
    """What the doctor itself took, as a sentence without its full stop; empty if that is not known."""
    ended = next(run.of(Ended), None)
    said = []
    if ended is not None and ended.seconds > 0:
        share = f" ({diagnosis.overhead:.1%} of the rest)" if diagnosis.overhead is not None else ""
        own, took = format_seconds(ended.own_seconds), format_seconds(ended.seconds)
        said.append(f"the doctor took {own} of {took}{share}")
    elif diagnosis.overhead is not None:
        said.append(f"the doctor took {diagnosis.overhead:.1%} of the run's own time")
    if said and (diagnosis.overhead or 0.0) > _DEAR and diagnosis.steps < _SHORT_RUN:
        said.append("the first steps are all measured, so it costs most in short runs")
    if ended is not None and ended.thinned:
        said.append(f"it measured less often {_count(ended.thinned, 'time')} to stay cheap")
    if ended is not None and ended.dropped:
        said.append(f"{_count(ended.dropped, 'line')} of the record left out, it had reached its greatest size")
    if ended is not None and ended.failure:
        said.append(f"the recorder met an error of its own, so something may be missing: {ended.failure}")
    return "; ".join(said)


def title_of(diagnosis: Diagnosis) -> str:
    """What was run: the script and its arguments."""
    return " ".join([PurePath(diagnosis.script).name or "this run", *diagnosis.arguments])


def clean(text: str) -> str:
    """A text without control characters and halves of characters, which no terminal or page should get.

    Args:
        text: such as a name that the user's code gave.

    Example:
        >>> clean("a\\x1b[31mb\\ud800")
        'a\\\\x1b[31mb\\\\ud800'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character.isspace():
        return " "
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def _steps(diagnosis: Diagnosis) -> str:
    return _count(diagnosis.steps, "step")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _first_sentence(text: str) -> str:
    """The first sentence without its full stop, of a long one the first part; a point within a name ends none."""
    line = " ".join(text.strip().split("\n")[:1])
    head = next((line[:i] for i in _ends(line) if line[i + 2 : i + 3].isupper()), line)
    if len(head) > _LONG_SENTENCE:
        parts = (head[:i] for i in range(_SHORT_SENTENCE, len(head)) if head[i : i + 2] in (": ", "; "))
        head = next(parts, head)
    return head.strip().rstrip(".")


def _ends(line: str) -> Iterable[int]:
    return (index for index in range(len(line)) if line.startswith(". ", index))
