"""A finding of the doctor: what is wrong, where, the evidence, and what to change."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, Self

from anybatch.records.reading import Plain

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
FixKind = Literal["tried", "tested", "suggestion"]
"""How a fix was verified: ``"tried"`` on a copy of this run, ``"tested"`` (a test of anybatch applies the printed text
to a program with this finding), or not at all (``"suggestion"``)."""


def is_code(fix: str) -> bool:
    """Whether a fix parses as Python; otherwise it is a sentence.

    Example:
        >>> is_code("for group in optimizer.param_groups: group['lr'] = 1e-3"), is_code("remove the softmax before it")
        (True, False)
    """
    try:
        ast.parse(fix)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Place(Plain):
    """Where a finding is.

    Example:
        >>> print(Place(module="encoder", parameters=("encoder.weight",), file="/home/me/train.py", line=12))
        encoder, train.py:12
    """

    module: str = ""  # the qualified name of a module; with several models, it begins with the variable of its model
    parameters: tuple[str, ...] = ()  # names of parameters
    optimizer: str = ""  # the name of an optimizer in the user's code
    group: int | None = None  # the index of one of its parameter groups
    file: str = ""  # the file of the user's line
    line: int = 0  # the number of that line

    def __str__(self) -> str:
        group = "" if self.group is None else f".param_groups[{self.group}]"
        shown = [self.module or (f"{self.optimizer}{group}" if self.optimizer else ", ".join(self.parameters[:3]))]
        if self.file:
            shown.append(f"{PurePath(self.file).name}:{self.line}")
        return ", ".join(text for text in shown if text)


@dataclass(frozen=True, slots=True)
class Finding(Plain):
    """One problem that the doctor found.

    Example:
        >>> finding = Finding("head.weight is in no group.", Place("head"), "add it", step=3, name="OPT_PARAM_MISSING")
        >>> Finding.from_dict(finding.to_dict()) == finding
        True
    """

    message: str  # what is wrong, in a sentence, with names and numbers
    place: Place = Place()  # where
    fix: str = ""  # what to change, as code in the user's own names, or in a sentence
    cause: str = ""  # why it happens and what it does, in a sentence
    evidence: Mapping[str, Any] = field(default_factory=dict)  # the numbers and names that show it
    step: int = 0  # the first step at which the evidence was complete
    at: int = 0  # the number of the first faulty event; among related findings the earliest is the root cause
    # ``"error"``, ``"warning"`` or ``"info"``; if empty, the severity of the rule applies
    severity: Severity | Literal[""] = ""
    code: str = ""  # the stable code of the rule, such as ``"AB101"``
    name: str = ""  # the name of the rule, such as ``"OPT_PARAM_MISSING"``
    consequence_of: str = ""  # the name of the finding that causes this one; empty for a root cause
    proof: str = ""  # the result of trying the fix; empty if it was not tried
    fix_kind: FixKind = "suggestion"  # how the fix was verified
    patch: str = ""  # the fix as a unified diff of the user's file, if it was tried in that form; empty otherwise

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON; an empty ``consequence_of`` becomes ``None``."""
        place = self.place.to_dict() | {"text": str(self.place)}
        follows = self.consequence_of or None
        return Plain.to_dict(self) | {"place": place, "evidence": dict(self.evidence), "consequence_of": follows}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Reads what ``to_dict`` gave.

        Raises:
            KeyError: ``consequence_of`` is missing.
            ValueError: another field is missing, or a value does not have the type of its field.
        """
        return super(Finding, cls).from_dict({**values, "consequence_of": values["consequence_of"] or ""})


TESTED = frozenset(
    {
        *("SYMMETRIC_INIT", "OPT_PARAM_UNREGISTERED", "OPT_PARAM_MISSING", "BACKWARD_TWICE", "BACKWARD_TWICE_STATE"),
        *("ZERO_GRAD_MISSING", "STEP_MISSING", "CLIP_NO_EFFECT", "LR_TOO_HIGH", "LR_TOO_LOW", "EVAL_IN_TRAINING"),
    }
)
"""Names of findings whose fix, where it is code, test_doctor_fixes.py applies as it is printed."""


def is_tested(name: str, fix: str) -> bool:
    """Whether a test applies such a fix: it is code, and of one of these findings."""
    return bool(fix) and name in TESTED and is_code(fix)
