"""What the doctor said about a program, beside what is true."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
ALARMS = ("error", "warning")


@dataclass(frozen=True)
class Truth:
    """What is wrong with a program, and where; the fields are those of truth.toml."""

    name: str = ""
    also: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    crash: bool = False
    clock: bool = False


@dataclass(frozen=True)
class Program:
    """A script of the benchmark.

    Args:
        key: such as ``"f07"``.
        path: of the script.
        truth: what is wrong with it; nothing with a healthy one.
    """

    key: str
    path: Path
    truth: Truth

    @property
    def healthy(self) -> bool:
        """Whether it is one of those without a fault and without a twin."""
        return self.key.startswith("p")


@dataclass(frozen=True)
class Verdict:
    """How near the findings of one run are to the truth.

    Args:
        first: the name of the first finding, or a dash.
        first_code: whether it is the right one.
        first_place: whether it is in the right place, too.
        in_three: whether the right one is among the first three.
        step: the step at which the right one was found.
        alarms: names of the errors and warnings.
        message: of the first finding, with its place.
    """

    first: str
    first_code: bool
    first_place: bool
    in_three: bool
    step: int | None
    alarms: tuple[str, ...]
    message: str


def programs(wanted: Sequence[str] = ()) -> list[Program]:
    """The programs in order.

    Args:
        wanted: beginnings of keys, such as ``"f07"`` or ``"p"``; all programs if it is empty.

    Returns:
        Those whose key begins so.
    """
    known = tomllib.loads((HOME / "truth.toml").read_text(encoding="utf-8"))
    found = []
    for folder in ("faulty", "healthy"):
        for path in sorted((HOME / folder).glob("[fpr][0-9][0-9]_*.py")):
            key = path.name[:3]
            if not wanted or key.startswith(tuple(wanted)):
                values = {name: tuple(v) if isinstance(v, list) else v for name, v in known.get(key, {}).items()}
                found.append(Program(key, path, Truth(**values)))
    return found


def words(name: str) -> list[str]:
    """The parts of a qualified name: ``"blocks[0].weight"`` has ``blocks``, ``0`` and ``weight``."""
    return [word for word in re.split(r"[.\[\]]+", name) if word]


def within(name: str, place: str) -> bool:
    """Whether a qualified name is that of a place, or of something below it."""
    parts, wanted = words(name), words(place)
    return any(parts[at : at + len(wanted)] == wanted for at in range(len(parts) - len(wanted) + 1))


def statement(path: Path, line: int) -> str:
    """The source of the innermost statement that a line belongs to; of a compound one its head."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    best = (line, line)
    size = len(lines) + 1
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            last = node.end_lineno or node.lineno
            body = getattr(node, "body", None)
            if body:
                last = max(node.lineno, min(last, body[0].lineno - 1))
            if node.lineno <= line <= last and last - node.lineno < size:
                best, size = (node.lineno, last), last - node.lineno
    return "\n".join(lines[best[0] - 1 : best[1]])


def right_place(program: Program, place: Mapping[str, Any]) -> bool:
    """Whether a place names a right module, parameter, optimizer or statement."""
    truth = program.truth
    names = [place.get("module") or "", *(place.get("parameters") or ())]
    if any(within(name, wanted) for name in names if name for wanted in truth.modules):
        return True
    if any(within(place.get("optimizer") or "", wanted) for wanted in truth.optimizers):
        return True
    line = place.get("line") or 0
    if not line or Path(place.get("file") or "").name != program.path.name:
        return False
    return any(text in statement(program.path, line) for text in truth.text)


def judge(program: Program, findings: Sequence[Mapping[str, Any]]) -> Verdict:
    """Compares findings with the truth.

    Args:
        program: that they are about.
        findings: in order of rank, as ``anybatch doctor --json`` writes them.

    Returns:
        The verdict; of a healthy program only its alarms count.
    """
    accepted = {program.truth.name, *program.truth.also} - {""}
    right = [one["name"] in accepted and right_place(program, one["place"]) for one in findings]
    first = findings[0] if findings else None
    return Verdict(
        first=first["name"] if first else "-",
        first_code=bool(first) and first["name"] in accepted,
        first_place=bool(right) and right[0],
        in_three=any(right[:3]),
        step=next((one["step"] for one, good in zip(findings, right, strict=True) if good), None),
        alarms=tuple(one["name"] for one in findings if one["severity"] in ALARMS),
        message=f"{first['message']} [{first['place'].get('text', '')}]" if first else "",
    )
