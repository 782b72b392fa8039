"""A diagnosis: the findings of a run in order of rank, and which gradients and parameters changed in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anybatch.records.findings import Finding
from anybatch.records.plainvalues import Plain
from anybatch.records.showing import Shown

CELLS = {
    1: "gradients change, parameters change",
    2: "gradients change, parameters do not",
    3: "neither changes",
    4: "parameters change, gradients do not",
}
"""What each of the four cells means."""
SEVERAL_THREADS = "several threads"
"""Among what could not be examined: what came after two threads trained at once."""

Verdict = Literal["learning", "not learning", "faults", "undecided", "crashed", "checked"]
"""``"faults"`` if there is an error or a warning, ``"undecided"`` where nothing was found and learning was not seen;
``"checked"`` of a certificate, whose verdict is the reason."""
INTERRUPTED = 130
"""The exit code after Ctrl-C, or ``--timeout``."""
_MOST_RULES = 8


def missing_of(unexamined: Sequence[str]) -> str:
    """What could not be examined, in words.

    Example:
        >>> missing_of(["AB101 OPT_PARAM_MISSING", "the run"])
        '1 rule failed (AB101 OPT_PARAM_MISSING) and the recorder met an error of its own'
    """
    several = ["several threads trained at once"] if SEVERAL_THREADS in unexamined else []
    if "all rules" in unexamined:
        return "".join(several) or "the diagnosis failed"
    rules = [one for one in unexamined if one not in ("the run", SEVERAL_THREADS)]
    more = f" and {len(rules) - _MOST_RULES} more" if len(rules) > _MOST_RULES else ""
    listed = ", ".join(rules[:_MOST_RULES]) + more
    said = [*several, *([f"{len(rules)} rule{'s' * (len(rules) > 1)} failed ({listed})"] if rules else [])]
    if "the run" in unexamined:
        said.append("the recorder met an error of its own")
    return " and ".join(said)


@dataclass(frozen=True, slots=True)
class Cell(Plain):
    """Parameters of one module of which the same is true: do their gradients change, do they change themselves?

    Args:
        cell: 1 to 4, see ``CELLS``; 0 where too little was seen to say.
        module: the qualified name of the module, with the variable of its root in front where there are several.
        parameters: their names.
        numel: how many numbers they hold.
        why: in words, such as ``"in no optimizer"``, ``"frozen"``, ``"weight decay"``; empty where all is well.
        shrinking: whether the gradients at the end are less than a thousandth of those at the start.
        frozen: whether none of them requires a gradient.
        first_gradient: the norm of their gradients at the first sampled step, ``None`` if they had none.
        last_gradient: at the last sampled step.
        first_ratio: the norm of the first sampled change divided by that of the parameters, ``None`` if unknown.
        last_ratio: of the last sampled change.

    Example:
        >>> cell = Cell(2, "head", ("head.weight", "head.bias"), numel=20, why="in no optimizer")
        >>> cell.meaning, Cell.from_dict(cell.to_dict()) == cell
        ('gradients change, parameters do not', True)
    """

    cell: int
    module: str = ""
    parameters: tuple[str, ...] = ()
    numel: int = 0
    why: str = ""
    shrinking: bool = False
    frozen: bool = False
    first_gradient: float | None = None
    last_gradient: float | None = None
    first_ratio: float | None = None
    last_ratio: float | None = None

    @property
    def meaning(self) -> str:
        """What its cell means, in words."""
        return CELLS.get(self.cell, "too little was seen")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        return Plain.to_dict(self) | {"meaning": self.meaning}


@dataclass(frozen=True, slots=True)
class Suppressed(Plain):
    """A finding that the user does not want to hear of.

    Args:
        finding: the finding.
        by: a comment on its line, the settings of the project or of the command, or a baseline that has it.
        reason: that the comment gives, or which of the settings it was.

    Example:
        >>> one = Suppressed(Finding("frozen", code="AB108"), "line", "the teacher is meant to stay")
        >>> Suppressed.from_dict(one.to_dict()) == one
        True
    """

    finding: Finding
    by: Literal["line", "settings", "baseline"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis(Shown):
    """What the doctor says about one run.

    Args:
        findings: in order of rank: each root is followed by its consequences.
        cells: of every parameter, by module, in the order of the model.
        steps: that were done; of optimizers that step by turns those of the one that stepped most.
        overhead: the doctor's own time divided by the rest of the run's, ``None`` if it was not measured.
        script: the path as the user wrote it, empty when attached in code.
        arguments: of the script.
        device: of the run.
        exit_code: of the script, ``None`` when attached in code.
        seconds: that the run took.
        notes: about the diagnosis itself, such as rules that could not be asked.
        unexamined: what could not be examined: codes and names of rules that failed, ``"all rules"`` if the diagnosis
            itself did or could not, ``SEVERAL_THREADS``, ``"the run"`` if the recorder met an error of its own.
        verdict: what became of the run.
        reason: how that is known, or why it is not, as the end of a sentence.
        suppressed: what the user does not want to hear of; it is no part of the verdict.

    Example:
        >>> found = (Finding("head.weight is in no group.", severity="error", name="A"),)
        >>> diagnosis = Diagnosis(found, steps=3, verdict="faults")
        >>> diagnosis.healthy, Diagnosis.from_dict(diagnosis.to_dict()) == diagnosis
        (False, True)
    """

    findings: tuple[Finding, ...] = ()
    cells: tuple[Cell, ...] = ()
    steps: int = 0
    overhead: float | None = None
    script: str = ""
    arguments: tuple[str, ...] = ()
    device: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    unexamined: tuple[str, ...] = field(default=())
    verdict: Verdict = "undecided"
    reason: str = ""
    suppressed: tuple[Suppressed, ...] = field(default=())

    @property
    def faulty(self) -> bool:
        """Whether there is an error or a warning."""
        return any(finding.severity != "info" for finding in self.findings)

    @property
    def healthy(self) -> bool | None:
        """Whether it was seen to learn and nothing was found; ``None`` where neither that nor a fault was seen."""
        if self.faulty or self.verdict in ("crashed", "not learning", "faults"):
            return False
        return True if self.verdict == "learning" else None

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The errors and warnings that follow from no other one, or only from a note."""
        grave = {finding.name for finding in self.findings if finding.severity != "info"}
        follows = {finding.consequence_of for finding in self.findings if finding.consequence_of in grave} - {""}
        return tuple(one for one in self.findings if one.severity != "info" and one.consequence_of not in follows)

    @property
    def roots(self) -> tuple[Finding, ...]:
        """The findings that follow from no other one."""
        return tuple(finding for finding in self.findings if not finding.consequence_of)

    def consequences(self, root: Finding) -> tuple[Finding, ...]:
        """The findings that follow from one."""
        return tuple(finding for finding in self.findings if finding.consequence_of == root.name)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, and ``healthy``."""
        return Shown.to_dict(self) | {"healthy": self.healthy}
