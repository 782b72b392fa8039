"""What the doctor found: what is wrong, where, how it is known, and what to change."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, Self

from anybatch.records.plainvalues import Plain

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
FixKind = Literal["tried", "tested", "suggestion"]
"""How sure a fix is: tried on a copy of this run, applied as it is printed by a test of this kind, or neither."""


def is_code(fix: str) -> bool:
    """Whether a fix is Python, or a sentence that tells what to do.

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

    Args:
        module: the qualified name of a module, with the variable of its root in front where there are several roots.
        parameters: names.
        optimizer: what the user's code calls it.
        group: the index of a group of it.
        file: of the user's line.
        line: its number.

    Example:
        >>> print(Place(module="encoder", parameters=("encoder.weight",), file="/home/me/train.py", line=12))
        encoder, train.py:12
    """

    module: str = ""
    parameters: tuple[str, ...] = ()
    optimizer: str = ""
    group: int | None = None
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        group = "" if self.group is None else f".param_groups[{self.group}]"
        shown = [self.module or (f"{self.optimizer}{group}" if self.optimizer else ", ".join(self.parameters[:3]))]
        if self.file:
            shown.append(f"{PurePath(self.file).name}:{self.line}")
        return ", ".join(text for text in shown if text)


@dataclass(frozen=True, slots=True)
class Finding(Plain):
    """One thing that is wrong.

    Args:
        message: what is wrong, in a sentence, with names and numbers.
        place: where.
        fix: what to change, as code in the user's own names, or in a sentence.
        cause: how this comes about and what it does, in a sentence.
        evidence: numbers and names that show it.
        step: the first step at which the evidence was complete.
        at: the number of the first event that was not as it should be; the earliest is the root.
        severity: ``"error"``, ``"warning"`` or ``"info"``; the rule's own where it is left out.
        code: the stable code of its rule, such as ``"AB101"``.
        name: of its rule, such as ``"OPT_PARAM_MISSING"``.
        consequence_of: the name of the finding that this one follows from; empty for a root.
        proof: what a trial of the fix has shown; empty without.
        fix_kind: how sure the fix is.
        patch: the fix as a change of the user's file, if it was tried so; empty without.

    Example:
        >>> finding = Finding("head.weight is in no group.", Place("head"), "add it", step=3, name="OPT_PARAM_MISSING")
        >>> Finding.from_dict(finding.to_dict()) == finding
        True
    """

    message: str
    place: Place = Place()
    fix: str = ""
    cause: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    at: int = 0
    severity: Severity | Literal[""] = ""
    code: str = ""
    name: str = ""
    consequence_of: str = ""
    proof: str = ""
    fix_kind: FixKind = "suggestion"
    patch: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        place = self.place.to_dict() | {"text": str(self.place)}
        follows = self.consequence_of or None
        return Plain.to_dict(self) | {"place": place, "evidence": dict(self.evidence), "consequence_of": follows}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Reads what ``to_dict`` gave."""
        return super(Finding, cls).from_dict({**values, "consequence_of": values["consequence_of"] or ""})
