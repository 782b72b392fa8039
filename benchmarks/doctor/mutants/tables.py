"""The score of the doctor on mutants as Markdown: totals of each half, families, and the precision of each rule."""

from __future__ import annotations

import datetime as dt
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from catalog import FAMILIES, bases, mutants, operators
from comparing import UNLEARNED, Judged

NOTES = (
    "A mutant is *equivalent* if its metric is within two hundredths of the worst of three seeds of its base,",
    "measured by the way from the untrained to the trained base; it *failed* if it ended with an error or came less",
    "than half of that way, and is *weaker* else. Faulty are the last two. *Right*: the first finding is one that",
    "names the fault, or where too few steps are the fault there is none and the verdict is undecided; *in three*:",
    "one of the first three does; *near*: right, and within two lines of the change. *Deceived*: less than a fifth of",
    "the way, and the verdict is that it learns, but where only the evaluation is wrong. *Missed*: no error and no",
    "warning. *Alarms*: errors and warnings that follow from nothing else; *all true*: all of them name what was",
    "changed although it did no harm. A rule's *precision*: of its errors and warnings that came first, on mutants",
    "and base programs, the share that names the fault; its notes are counted beside.",
)


@dataclass(frozen=True)
class Part:
    """One half of the split, as far as it was judged.

    Args:
        half: its name.
        mutants: that were judged.
        bases: healthy programs that were judged.
        whole: how many mutants it has.
        programs: how many base programs it has.
        same: of how many of those judged the metric is the same with and without the doctor.
        current: how many of the records were made by the recorder that is here.
    """

    half: str
    mutants: tuple[Judged, ...]
    bases: tuple[Judged, ...]
    whole: int
    programs: int
    same: int
    current: int


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns), *rows, ""]


def share(part: int, whole: int) -> str:
    """A count with its share."""
    return f"{part} ({part / whole:.0%})" if whole else "-"


def count(rows: Iterable[Judged], name: str) -> int:
    """Of how many something is true."""
    return sum(bool(getattr(row, name)) for row in rows)


def line_of(title: str, rows: Sequence[Judged]) -> list[str]:
    """The line of a half or a family."""
    faulty = [row for row in rows if row.fate in ("failed", "weaker")]
    unlearned = [row for row in rows if row.progress < UNLEARNED and not row.elsewhere]
    equal = [row for row in rows if row.fate == "equivalent"]
    loud = [row for row in equal if row.alarms]
    return [
        title,
        str(len(faulty)),
        share(count(faulty, "right"), len(faulty)),
        share(count(faulty, "in_three"), len(faulty)),
        share(count(faulty, "near"), len(faulty)),
        share(count(faulty, "missed"), len(faulty)),
        share(count(unlearned, "deceived"), len(unlearned)),
        str(len(equal)),
        share(len(loud), len(equal)),
        str(sum(bool(row.true_alarms) and len(row.true_alarms) == len(row.alarms) for row in loud)),
    ]


COLUMNS = ("", "faulty", "first right", "in three", "near", "missed", "deceived", "equivalent", "alarms", "all true")


def families(rows: Sequence[Judged]) -> list[str]:
    """A table with a line for each family."""
    lines = [line_of(one, [row for row in rows if row.family == one]) for one in FAMILIES]
    return table(COLUMNS, [line for line in lines if line[1] != "0" or line[7] != "0"])


def rules(part: Part) -> list[str]:
    """A table with a line for each rule whose finding came first somewhere."""
    faulty = [row for row in part.mutants if row.fate != "equivalent"]
    equal = [row for row in part.mutants if row.fate == "equivalent"]
    faulty, equal = [row for row in faulty if row.grave], [row for row in equal if row.grave]
    everything = (*part.mutants, *part.bases)
    firsts = Counter(row.first for row in everything if row.grave)
    notes = Counter(row.first for row in everything if row.first != "-" and not row.grave)
    lines = [[name, "0", "0", "0", "0", "0", str(notes[name]), "-"] for name in sorted(notes.keys() - firsts.keys())]
    for name, total in sorted(firsts.items(), key=lambda entry: (-entry[1], entry[0])):
        own = [row for row in faulty if row.first == name]
        right, harmless = count(own, "right"), [row for row in equal if row.first == name]
        true = count(harmless, "right")
        lines.append([
            name, str(total), str(right), str(len(own) - right), f"{len(harmless)} ({true} true)",
            str(sum(row.first == name and row.grave for row in part.bases)), str(notes[name]),
            f"{(right + true) / total:.0%}",
        ])  # fmt: skip
    return table(("rule", "first", "right", "wrong", "on equivalent", "on healthy", "notes", "precision"), lines)


def verdicts(rows: Sequence[Judged]) -> str:
    """How often each verdict was given for each fate, in a sentence."""
    parts = []
    for fate in ("failed", "weaker", "equivalent", "base"):
        found = Counter(row.verdict for row in rows if row.fate == fate)
        if found:
            parts.append(f"{fate}: " + ", ".join(f"{name} {number}" for name, number in found.most_common()))
    return "; ".join(parts)


def fixes(rows: Sequence[Judged]) -> str:
    """How sure the fixes of first findings are, in a sentence."""
    kinds = Counter(row.fix_kind for row in rows if row.fate != "equivalent" and row.fix_kind)
    right = Counter(row.fix_kind for row in rows if row.fate != "equivalent" and row.fix_kind and row.right)
    return (
        ", ".join(f"{kind} {number} ({right[kind]} of a right finding)" for kind, number in kinds.most_common()) or "-"
    )


def section(part: Part) -> list[str]:
    """What is said about one half; of the half for reporting and of the mixed pairs totals only."""
    loud = [row for row in part.bases if row.alarms]
    lines = [f"## The half {part.half}" if part.half != "mixed" else "## Pairs from both halves", ""]
    lines += [
        f"- judged: {len(part.mutants)} of {part.whole} mutants, {len(part.bases)} of {part.programs} base programs"
    ]
    records = len(part.mutants) + len(part.bases)
    lines += [f"- records made by the present recorder: {share(part.current, records)}"]
    if part.half != "mixed":
        lines += [f"- base programs with an alarm: {share(len(loud), len(part.bases))}"]
        lines += [f"- base programs with the same metric under the doctor: {share(part.same, len(part.bases))}"]
    lines += [f"- verdicts: {verdicts((*part.mutants, *part.bases))}", f"- fixes: {fixes(part.mutants)}", ""]
    lines += table(COLUMNS, [line_of("all", part.mutants)])
    if part.half == "tune":
        lines += ["### Families", "", *families(part.mutants), "### Rules", "", *rules(part)]
    return lines


def page(parts: Sequence[Part], command: str) -> str:
    """The whole score."""
    lines = ["# The doctor on mutants", "", f"- device: {platform.machine()} CPU, one thread"]
    lines += [f"- python: {platform.python_version()}", f"- torch: {torch.__version__}"]
    lines += [f"- date: {dt.date.today().isoformat()}", f"- command: {command}"]
    lines += [f"- {len(bases())} base programs, {len(operators())} operators, {len(mutants())} mutants", "", *NOTES, ""]
    for part in parts:
        lines += section(part)
    return "\n".join(lines).rstrip() + "\n"


def listed() -> str:
    """All operators with what the literature calls them, and how many mutants each gives."""
    counts = Counter(one.operator.name for one in mutants())
    lines = [
        [one.family, one.name, one.half, one.after or "-", str(counts[one.name]), ", ".join(one.right) or "-"]
        for one in sorted(operators(), key=lambda one: FAMILIES.index(one.family))
    ]
    return "\n".join(table(("family", "operator", "half", "in the literature", "mutants", "right findings"), lines))


def misses(found: Sequence[Judged], healthy: Sequence[Judged]) -> str:
    """What was not as it should be, a line each."""
    lines = []
    for row in healthy:
        if row.alarms:
            lines.append(f"ALARM {row.name}: {', '.join(row.alarms)}: {row.message}")
    for row in found:
        if row.fate == "equivalent":
            if row.alarms:
                lines.append(f"equivalent {row.name}:{row.line}: {', '.join(row.alarms)}: {row.message}")
        elif not row.right:
            what = "DECEIVED" if row.deceived else "missed" if row.missed else "wrong"
            lines.append(f"{what} {row.fate} {row.name}:{row.line} [{row.verdict}]: {row.first}: {row.message[:150]}")
    return "\n".join(lines)
