"""A diagnosis: the findings of a run, ranked, and which of its gradients and parameters changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anybatch.records.findings import Finding
from anybatch.records.lossfacts import ALL_ASKED
from anybatch.records.reading import Plain
from anybatch.records.showing import Shown

CELLS = {
    1: "gradients change, parameters change",
    2: "gradients change, parameters do not",
    3: "neither changes",
    4: "parameters change, gradients do not",
}
"""What each of the four cells means."""
SEVERAL_THREADS = "several threads"
"""An entry of ``unexamined``: two threads trained at once, and nothing after that was recorded."""

Verdict = Literal["learning", "not learning", "faults", "undecided", "crashed", "checked"]
"""``"faults"``: there is an error or a warning. ``"undecided"``: nothing was found, and learning was not seen either.
``"checked"``: the report is of a certificate, and the verdict is in ``reason``."""
INTERRUPTED = 130
"""The exit code after Ctrl-C or ``--timeout``."""
_MOST_RULES = 8


def missing_of(unexamined: Sequence[str]) -> str:
    """Says what could not be examined.

    Example:
        >>> missing_of(["AB101 OPT_PARAM_MISSING", "the run"])
        '1 rule failed (AB101 OPT_PARAM_MISSING) and the recorder met an error of its own'
    """
    several = ["several threads trained at once"] if SEVERAL_THREADS in unexamined else []
    if "all rules" in unexamined:
        return "".join(several) or "the diagnosis failed"
    rules = [one for one in unexamined if one not in ("the run", ALL_ASKED, SEVERAL_THREADS)]
    more = f" and {len(rules) - _MOST_RULES} more" if len(rules) > _MOST_RULES else ""
    listed = ", ".join(rules[:_MOST_RULES]) + more
    said = [*several, *([f"{len(rules)} rule{'s' * (len(rules) > 1)} failed ({listed})"] if rules else [])]
    if ALL_ASKED in unexamined:
        said.append("not all questions were asked")
    if "the run" in unexamined:
        said.append("the recorder met an error of its own")
    return " and ".join(said)


@dataclass(frozen=True, slots=True)
class Cell(Plain):
    """Parameters of one module that share two answers: do their gradients change, and are they updated?"""

    cell: int  # 1 to 4, see ``CELLS``; 0 if too little was seen
    module: str = ""  # the qualified name of the module; with several models, it begins with the variable of its model
    parameters: tuple[str, ...] = ()  # the names of the parameters
    numel: int = 0  # the number of their elements
    # the cause, such as ``"in no optimizer"``, ``"frozen"`` or ``"weight decay"``; empty where all is well
    why: str = ""
    shrinking: bool = False  # whether the gradients at the end are less than a thousandth of those at the start
    frozen: bool = False  # whether none of the parameters requires a gradient
    # the norm of their gradients at the first sampled step; ``None`` if they had none
    first_gradient: float | None = None
    last_gradient: float | None = None  # the norm at the last sampled step
    first_ratio: float | None = None  # the update-to-weight ratio of the first sampled update; ``None`` if unknown
    last_ratio: float | None = None  # the ratio of the last sampled update

    @property
    def meaning(self) -> str:
        """The meaning of the cell, in words."""
        return CELLS.get(self.cell, "too little was seen")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, and ``meaning``."""
        return Plain.to_dict(self) | {"meaning": self.meaning}


@dataclass(frozen=True, slots=True)
class Suppressed(Plain):
    """A finding that the user has suppressed."""

    finding: Finding  # the finding
    # what suppressed it: a comment on its ``"line"``, the ``"settings"`` of the project or the command, or a
    # ``"baseline"`` that contains it
    by: Literal["line", "settings", "baseline"]
    reason: str = ""  # the reason that the comment gives, or the name of the setting


@dataclass(frozen=True, slots=True)
class Diagnosis(Shown):
    """What the doctor says about one run.

    Example:
        >>> found = (Finding("head.weight is in no group.", severity="error", name="A"),)
        >>> diagnosis = Diagnosis(found, steps=3, verdict="faults")
        >>> diagnosis.healthy, Diagnosis.from_dict(diagnosis.to_dict()) == diagnosis
        (False, True)
    """

    findings: tuple[Finding, ...] = ()  # ranked: each root cause is followed by its consequences
    cells: tuple[Cell, ...] = ()  # every parameter, grouped by module, in the order of the model
    steps: int = 0  # the number of optimizer steps; with several optimizers, that of the one that stepped most
    # the doctor's own time divided by the rest of the run's; ``None`` if it was not measured
    overhead: float | None = None
    script: str = ""  # the path of the script as the user wrote it; empty if the doctor was attached in code
    arguments: tuple[str, ...] = ()  # the arguments of the script
    device: str = ""  # the device of the run
    exit_code: int | None = None  # the exit code of the script; ``None`` if the doctor was attached in code
    seconds: float = 0.0  # the duration of the run
    notes: tuple[str, ...] = field(default=())  # remarks about the diagnosis itself, such as rules that failed
    # what could not be examined: codes and names of rules that failed; ``"all rules"`` if the diagnosis as a whole
    # failed or could not be made; ``SEVERAL_THREADS``; ``"the run"`` if the recorder itself failed
    unexamined: tuple[str, ...] = field(default=())
    verdict: Verdict = "undecided"  # the outcome of the run
    reason: str = ""  # how the verdict is known, or why it is not; the end of a sentence
    # findings that the user has suppressed; the verdict does not count them
    suppressed: tuple[Suppressed, ...] = field(default=())

    @property
    def faulty(self) -> bool:
        """Whether there is an error or a warning."""
        return any(finding.severity != "info" for finding in self.findings)

    @property
    def healthy(self) -> bool | None:
        """``True`` if the run was seen to learn without a fault, ``False`` after a fault, ``None`` if undecided."""
        if self.faulty or self.verdict in ("crashed", "not learning", "faults"):
            return False
        return True if self.verdict == "learning" else None

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The errors and warnings that are not consequences of another error or warning."""
        grave = {finding.name for finding in self.findings if finding.severity != "info"}
        follows = {finding.consequence_of for finding in self.findings if finding.consequence_of in grave} - {""}
        return tuple(one for one in self.findings if one.severity != "info" and one.consequence_of not in follows)

    @property
    def roots(self) -> tuple[Finding, ...]:
        """The findings that are not consequences of another."""
        return tuple(finding for finding in self.findings if not finding.consequence_of)

    def consequences(self, root: Finding) -> tuple[Finding, ...]:
        """The findings that are consequences of ``root``."""
        return tuple(finding for finding in self.findings if finding.consequence_of == root.name)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, and ``healthy``."""
        return Shown.to_dict(self) | {"healthy": self.healthy}
