"""A diagnosis in words: the verdict, findings with their consequences, evidence, and what changed in which layers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from anybatch.records.diagnoses import INTERRUPTED, Diagnosis
from anybatch.records.events import Crashed, Ended
from anybatch.records.findings import SEVERITIES, Finding
from anybatch.records.runs import Run
from anybatch.units import format_seconds

_MOST_ENTRIES = 8
_MOST_TEXT = 400
_DEAR, _SHORT_RUN, _FEW_SECONDS = 0.03, 200, 20.0
_UNEXPLAINED = "UNCLASSIFIED"  # the finding that says no more than the traceback
_CRASHED = frozenset({"error", "text"})  # what the evidence of every crash has
_IN_TRACEBACK = frozenset({"error", "text", "code", "origin_file", "origin_line"})
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
        >>> verdict_of(Diagnosis(steps=200, verdict="learning", reason="the loss fell from 2 to 1"), Run([]))
        'healthy: nothing found in 200 steps; the loss fell from 2 to 1'
        >>> verdict_of(Diagnosis(steps=9, reason="9 steps are too few to see whether it learns"), Run([]))
        'nothing found, but 9 steps are too few to see whether it learns'
        >>> verdict_of(Diagnosis((Finding("The head is in no group.", severity="error"),), steps=9), Run([]))
        '1 error: The head is in no group'
    """
    others = _suppressed(diagnosis)
    if diagnosis.faulty:
        counts = {kind: sum(one.severity == kind for one in diagnosis.causes) for kind in SEVERITIES}
        said = " and ".join(_count(counts[kind], _NOUNS[kind]) for kind in ("error", "warning") if counts[kind])
        return f"{said}: {_first_sentence(_leading(diagnosis).message)}{others}"
    number = len(grave_and_notes(diagnosis)[1])
    notes = (f" ({_count(number, 'note')})" if number else "") + others
    if (crash := crash_of(run)) is not None:
        text = crash.text.strip().split("\n")[0].rstrip(".")  # whole: its remedy may be the second sentence
        said = _first_sentence(crash.message) if crash.message else f"{crash.error}: {text}"
        return f"the script crashed: {said}{notes}"
    if diagnosis.exit_code and diagnosis.exit_code != INTERRUPTED:
        return f"the script ended with exit code {diagnosis.exit_code}; nothing found in {_steps(diagnosis)}{notes}"
    if not diagnosis.steps and not diagnosis.unexamined:
        return f"nothing to judge: no optimizer stepped{notes}"
    found = "nothing found" if "all rules" not in diagnosis.unexamined else "not diagnosed"
    found = "no error and no warning" if notes and found == "nothing found" else found
    if diagnosis.verdict == "learning":
        because = f"; {diagnosis.reason}" if diagnosis.reason else ""
        return f"healthy: {found} in {_steps(diagnosis)}{because}{notes}"
    reason = diagnosis.reason or "whether it learns was not seen"
    steps = "" if "too few" in reason else f" in {_steps(diagnosis)}"
    return f"{found}{steps}, but {reason}{notes}"


def _suppressed(diagnosis: Diagnosis) -> str:
    """What was found and is not reported, so that nobody takes its silence for a finding of its own."""
    codes = dict.fromkeys(one.finding.code for one in diagnosis.suppressed if one.finding.severity != "info")
    return f" (not reported: {', '.join(codes)})" if codes else ""


def mood_of(diagnosis: Diagnosis, run: Run) -> str:
    """What the verdict is: ``"error"``, ``"warning"``, ``"unknown"`` or ``"healthy"``."""
    if diagnosis.faulty:
        return "error" if any(one.severity == "error" for one in diagnosis.causes) else "warning"
    if crash_of(run) is not None or diagnosis.exit_code not in (None, 0, INTERRUPTED):
        return "error"
    return "healthy" if diagnosis.verdict == "learning" else "unknown"


def crash_of(run: Run) -> Crashed | None:
    """The exception that ended the script, if one did."""
    return next(iter(list(run.of(Crashed))[-1:]), None)


def _leading(diagnosis: Diagnosis) -> Finding:
    return next(knot.finding for knot in knots_of(diagnosis) if _is_grave(knot))


def _is_grave(knot: Knot) -> bool:
    return knot.finding.severity != "info" or any(_is_grave(one) for one in knot.follows)


def grave_and_notes(diagnosis: Diagnosis) -> tuple[tuple[Knot, ...], tuple[Knot, ...]]:
    """The roots that are errors or warnings or lead to one, and the notes; a crash is no note to itself."""
    knots = tuple(knot for knot in knots_of(diagnosis) if knot.finding.name != _UNEXPLAINED or knot.follows)
    return tuple(filter(_is_grave, knots)), tuple(knot for knot in knots if not _is_grave(knot))


def noun_of(finding: Finding) -> str:
    """Its severity as it is shown: an ``info`` is a note."""
    return _NOUNS.get(finding.severity, finding.severity)


def label_of(finding: Finding) -> str:
    """Its severity, code and name on one line."""
    return " ".join(text for text in (noun_of(finding), finding.code, finding.name) if text)


def fix_term(finding: Finding) -> str:
    """What its fix is called: one that nobody has applied is a suggestion."""
    return "suggestion" if finding.fix_kind == "suggestion" else "fix"


def place_of(finding: Finding) -> str:
    """Where it is, with the step from which it was known."""
    return str(finding.place)


def evidence_of(finding: Finding) -> tuple[tuple[str, str], ...]:
    """Its evidence: pairs of a term and its text; of a crash without what its traceback and its place say."""
    evidence = dict(finding.evidence)
    if evidence.keys() >= _CRASHED:
        evidence = {name: value for name, value in evidence.items() if name not in _IN_TRACEBACK}
        renamed = {"from": evidence.pop("origin_code", ""), "raised at": PurePath(evidence.pop("raised_at", "")).name}
        evidence |= {name: value for name, value in renamed.items() if value}
    return tuple((name.replace("_", " "), value_text(value)) for name, value in evidence.items())


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
    short = diagnosis.steps < _SHORT_RUN or (ended is not None and ended.seconds < _FEW_SECONDS)
    if said and (diagnosis.overhead or 0.0) > _DEAR and short:
        said.append("the first steps are all measured, so it costs most in short runs")
    if ended is not None and ended.thinned:
        said.append("to stay cheap, it measured more rarely")
    if ended is not None and ended.dropped:
        said.append(f"{_count(ended.dropped, 'line')} of the record left out, it had reached its greatest size")
    if ended is not None and ended.failure:
        said.append(f"the recorder met an error of its own, so something may be missing: {ended.failure}")
    return "; ".join(said)


def title_of(diagnosis: Diagnosis) -> str:
    """What was run: the script and its arguments."""
    return title_of_run(diagnosis.script, diagnosis.arguments)


def title_of_run(script: str, arguments: Sequence[str]) -> str:
    """A script and its arguments on one line.

    Args:
        script: its path, empty without one.
        arguments: of it.
    """
    return " ".join([PurePath(script).name or "this run", *arguments])


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
    """The first sentence without its full stop; a point within a name, and a colon, end none."""
    line = " ".join(text.strip().split("\n")[:1])
    head = next((line[:i] for i in _ends(line) if line[i + 2 : i + 3].isupper()), line)
    return head.strip().rstrip(".")


def _ends(line: str) -> Iterable[int]:
    return (index for index in range(len(line)) if line.startswith(". ", index))
