"""What the doctor says about a mutant, read from its record, beside what became of it."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from catalog import Base, Mutant
from forking import CACHE, Result, kept, record_path

ALARMS = ("error", "warning")
SEEDS = (0, 1, 2)
LEARNED = 0.5
"""The share of the way from the untrained to the trained base from which on a mutant counts as one that learned."""
UNLEARNED = 0.2
"""The share of that way below which it did not learn, so that the verdict that it learns deceives."""
TOLERANCE = 0.02
"""Of that way, by which an equivalent mutant may be below the worst seed of its base."""
UNDECIDED = "UNDECIDED"
"""Among the right names of an operator: to find nothing and to be undecided is right, too."""
Fate = Literal["equivalent", "weaker", "failed"]


@dataclass(frozen=True)
class Said:
    """One finding, as far as it is judged.

    Args:
        name: of its rule.
        severity: of it.
        line: of its place, 0 if it has none.
        root: whether it follows from no other finding.
        fix_kind: how sure its fix is.
        message: its sentence.
    """

    name: str
    severity: str
    line: int
    root: bool
    fix_kind: str
    message: str


@dataclass(frozen=True)
class Diagnosed:
    """What the doctor says about a run.

    Args:
        verdict: in a word.
        reason: for it.
        findings: in order of rank.
    """

    verdict: str
    reason: str
    findings: tuple[Said, ...]

    @property
    def alarms(self) -> tuple[str, ...]:
        """Names of the errors and warnings that follow from nothing else."""
        return tuple(one.name for one in self.findings if one.severity in ALARMS and one.root)


@dataclass(frozen=True)
class Scale:
    """What the metric of a base program is worth.

    Args:
        untrained: the metric without any step, the median of the seeds.
        trained: that of each seed.
    """

    untrained: float
    trained: tuple[float, ...]

    @property
    def way(self) -> float:
        """From the untrained to the trained one."""
        return sum(self.trained) / len(self.trained) - self.untrained

    def progress(self, metric: float | None) -> float:
        """The share of the way that a metric is at; nothing without a metric."""
        return (metric - self.untrained) / self.way if metric is not None and self.way > 0 else 0.0

    def fate(self, result: Result, *, hidden: bool) -> Fate:
        """What became of a mutant: as good as its base under its worst seed, weaker than that, or no learning."""
        if result.code or result.metric is None or self.progress(result.metric) < LEARNED:
            return "failed"
        lowest = min(self.trained) - TOLERANCE * self.way
        return "equivalent" if result.metric >= lowest and not hidden else "weaker"


@dataclass(frozen=True)
class Judged:
    """A mutant, what became of it and what was said about it.

    Args:
        name: of the mutant.
        family: of its operator.
        fate: what became of it; ``"base"`` for a base program.
        verdict: of the doctor; ``"none"`` if it gave none.
        first: the name of the first finding, a dash without one.
        right: whether that is a right one.
        in_three: whether a right one is among the first three.
        near: whether the first one is right and its line is within two of what was changed.
        alarms: names of errors and warnings that follow from nothing else.
        true_alarms: those of them that name the fault.
        fix_kind: of the first finding, empty without one.
        message: of the first finding.
        line: that was changed.
        elsewhere: whether the training is as it was.
        grave: whether the first finding is an error or a warning.
        progress: the share of the way of its base that it came; 0 if it ended with an error.
    """

    name: str
    family: str
    fate: str
    verdict: str
    first: str
    right: bool
    in_three: bool
    near: bool
    alarms: tuple[str, ...]
    true_alarms: tuple[str, ...]
    fix_kind: str
    message: str
    line: int
    elsewhere: bool = False
    grave: bool = False
    progress: float = 1.0

    @property
    def deceived(self) -> bool:
        """Whether the doctor saw learning where there was none."""
        return self.progress < UNLEARNED and self.verdict == "learning" and not self.elsewhere

    @property
    def missed(self) -> bool:
        """Whether no error and no warning was given."""
        return not self.alarms


@cache
def rules_stamp() -> str:
    """A hash of the code that reads records."""
    import anybatch

    root = Path(anybatch.__file__).parent
    paths = sorted(path for name in ("doctor", "records") for path in (root / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def diagnosed(source: str, seed: int = 0) -> Diagnosed | None:
    """Judges the record of a program, unless these rules have judged it before.

    Args:
        source: of the program.
        seed: of its run.

    Returns:
        The diagnosis; ``None`` without a record that can be read.
    """
    record = record_path(source, seed)
    if not record.exists():
        return None
    digest = hashlib.sha256(record.read_bytes()).hexdigest()[:20]
    path = CACHE / "diagnoses" / rules_stamp() / f"{digest}.json"
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
    else:
        values = _diagnose(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    return Diagnosed(values["verdict"], values["reason"], tuple(Said(**one) for one in values["findings"]))


def _diagnose(record: Path) -> dict[str, Any]:
    from anybatch.doctor.diagnosing import diagnosis
    from anybatch.records.runs import read_run

    with contextlib.closing(gzip.open(record, "rb")) as file:
        found = diagnosis(read_run(file))
    findings = [
        Said(one.name, one.severity, one.place.line, not one.consequence_of, one.fix_kind, one.message)
        for one in found.findings
    ]
    return {"verdict": found.verdict, "reason": found.reason, "findings": [asdict(one) for one in findings]}


def scale_of(base: Base) -> Scale | None:
    """What the metric of a base program is worth; ``None`` if it has not been run."""
    runs = [kept(base.source, seed, "plain") for seed in SEEDS]
    starts = [kept(base.source, seed, "untrained") for seed in SEEDS]
    trained = tuple(run.metric for run in runs if run is not None and run.metric is not None)
    untrained = [run.metric for run in starts if run is not None and run.metric is not None]
    if len(trained) < len(SEEDS) or len(untrained) < len(SEEDS):
        return None
    return Scale(statistics.median(untrained), trained)


def same_under_the_doctor(base: Base) -> bool:
    """Whether a base program came to the same metric, to the last digit that it prints, with and without the doctor."""
    plain, watched = kept(base.source, 0, "plain"), kept(base.source, 0, "doctor")
    return plain is not None and watched is not None and (plain.metric, plain.code) == (watched.metric, watched.code)


def judge_base(base: Base) -> Judged | None:
    """What the doctor says about a base program; ``None`` if it has not been run under it."""
    result = kept(base.source, 0, "doctor")
    if result is None:
        return None
    return _judged(base.name, "healthy", "base", diagnosed(base.source), (), (0, 0))


def judge(mutant: Mutant) -> Judged | None:
    """What the doctor says about a mutant, beside what became of it.

    Args:
        mutant: which.

    Returns:
        Both; ``None`` if it, or its base program, has not been run.
    """
    result, scale = kept(mutant.source, 0, "doctor"), scale_of(mutant.base)
    if result is None or scale is None:
        return None
    fate = scale.fate(result, hidden=mutant.operator.hidden)
    lines = (mutant.line, mutant.last)
    one = _judged(mutant.name, mutant.operator.family, fate, diagnosed(mutant.source), mutant.operator.right, lines)
    progress = 0.0 if result.code else scale.progress(result.metric)
    return replace(one, elsewhere=mutant.operator.elsewhere, progress=progress)


def _judged(
    name: str, family: str, fate: str, found: Diagnosed | None, right: Sequence[str], lines: tuple[int, int]
) -> Judged:
    findings = found.findings if found is not None else ()
    first = findings[0] if findings else None
    is_right = first is not None and first.name in right
    if not findings and found is not None and found.verdict == "undecided" and UNDECIDED in right:
        is_right = True
    alarms = found.alarms if found is not None else ()
    return Judged(
        name=name,
        family=family,
        fate=fate,
        verdict=found.verdict if found is not None else "none",
        first=first.name if first else "-",
        right=is_right,
        in_three=is_right or any(one.name in right for one in findings[:3]),
        near=is_right and first is not None and lines[0] - 2 <= first.line <= lines[1] + 2,
        alarms=alarms,
        true_alarms=tuple(one for one in alarms if one in right),
        fix_kind=first.fix_kind if first else "",
        message=first.message if first else "",
        line=lines[0],
        grave=first is not None and first.severity in ALARMS,
    )
