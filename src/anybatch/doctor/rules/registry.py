"""How a rule is declared, and how what it has seen becomes a finding."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from anybatch.doctor import rules
from anybatch.doctor.views.naming import (
    Located,
    common_module,
    loss_place,
    made_at,
    names_of,
    optimizer_variable,
    qualified,
)
from anybatch.records.events import Backward
from anybatch.records.findings import Finding, Place, Severity
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

FAMILIES = {
    "wiring": 101, "graph": 201, "order": 301, "accumulation": 351, "amp": 401, "modes": 451, "schedule": 501,
    "numerics": 551, "loss": 601, "data": 651, "memory": 701, "ranks": 751, "probes": 801, "crashes": 901,
}  # fmt: skip
"""The families, and the first of the fifty codes that each has."""


LEARNS_NOTHING = ("LOSS_CONSTANT", "INPUT_IGNORED", "CANNOT_FIT_BATCH")
"""What may follow from whatever keeps a model from learning."""

STANDS_STILL = (*LEARNS_NOTHING, "LR_TOO_LOW", "VANISHING", "DEAD_UNITS", "LABELS_UNRELATED")
"""What may follow where some or all of a model is not updated."""

RUNS_AWAY = (*LEARNS_NOTHING, "LR_TOO_HIGH", "EXPLODING", "NAN_IN_FORWARD", "NAN_IN_BACKWARD", "SATURATED",
             "DEAD_UNITS", "VANISHING", "CLIP_ALWAYS_ON")  # fmt: skip
"""What may follow where updates are too long."""

NOWHERE = ("", 0)
"""The line of a finding that has none."""


class Limit(float):
    """A threshold: the default of a keyword argument of a rule, which reads it as the number it is.

    Args:
        value: the number.
        source: where it comes from.

    Example:
        >>> def judge(run: Run, *, most: float = Limit(0.9, "usual is 0.1")) -> list[Finding]: ...
        >>> {name: (limit, limit.source) for name, limit in limits_of(judge).items()}
        {'most': (0.9, 'usual is 0.1')}
    """

    source: str

    def __new__(cls, value: float, source: str) -> "Limit":
        """The number, with its source."""
        self = super().__new__(cls, value)
        self.source = source
        return self


def limits_of(judge: Callable[..., Any]) -> dict[str, Limit]:
    """The thresholds of a rule by name."""
    every = inspect.signature(judge).parameters.values()
    return {one.name: one.default for one in every if isinstance(one.default, Limit)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rule has seen; the names, the place and the code of the finding are made from it."""

    text: str  # what is wrong, in a sentence
    fix: str = ""  # what to change
    proof: str = ""  # what a trial of the fix has shown
    cause: str = ""  # how this comes about
    # the first event that was not as it should be, or its number; an answer holds from the first backward on
    since: Fact | int
    # at which the evidence was complete, a number or a fact; that of ``since`` if it is left out
    step: Fact | int | None = None
    # what has the user's line: a fact, or a file and a number; ``since`` if it is left out and has one, else the
    # optimizer. A call of a loss function, an answer and a place also tell the module.
    where: Located | tuple[str, int] | None = None
    parameters: Iterable[int] | tuple[str, ...] = ()  # numbers, or names
    optimizer: int | str = -1  # its number, or what it is called
    group: int | None = None  # the index of a group of it
    # the number of a root and the name of a module in it, or a qualified name; the innermost module that has all the
    # parameters if it is left out
    module: tuple[int, str] | str | None = None
    # numbers and names that show it; those of the answer if they are left out
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | str = ""  # another one than that of the rule

    def place(self, run: Run) -> Place:
        """Where it is, in the user's names."""
        numbers = [one for one in self.parameters if isinstance(one, int)]
        where, module, optimizer = self.where, self.module, self.optimizer
        if isinstance(optimizer, int):
            where = where or (self._line or made_at(run.optimizers.get(optimizer)) if optimizer >= 0 else None)
            optimizer = optimizer_variable(run, optimizer) if optimizer >= 0 else ""
        where = where or self._line or NOWHERE
        if isinstance(where, LossCall):
            where = loss_place(run, where)
        if module is None and isinstance(where, Probed):
            module = qualified(run, where.root, where.module) if where.module else ""
        elif module is None and isinstance(where, Place):
            module = where.module
        elif module is None:
            root, inner = common_module(run, numbers)
            module = qualified(run, root, inner) if root >= 0 else ""
        elif not isinstance(module, str):
            module = qualified(run, *module)
        file, line = where if isinstance(where, tuple) else (where.file, where.line)
        names = names_of(run, numbers) or tuple(str(one) for one in self.parameters)
        return Place(module, tuple(names), optimizer, self.group, file, line)

    @property
    def _line(self) -> Located | None:
        """What it is since, if that has a line of the user's."""
        return self.since if isinstance(self.since, Located) else None

    def finding(self, run: Run, rule: "Rule") -> Finding:
        """The finding."""
        asked = self.since if isinstance(self.since, Probed) else None
        # a wiring fault is there from the first backward on, however late it was asked for
        since = self.since if asked is None else next((one.at for one in run.of(Backward)), 0)
        seen = since if self.step is None else self.step
        return Finding(
            message=self.text,
            place=self.place(run),
            fix=self.fix,
            fix_kind="tried" if self.proof else "suggestion",
            proof=self.proof,
            cause=self.cause,
            evidence=self.evidence or (asked.evidence if asked is not None else {}),
            step=seen.step if isinstance(seen, Fact) else 0 if self.step is None else seen,
            at=since.at if isinstance(since, Fact) else since,
            severity=self.severity or rule.severity,  # type: ignore[arg-type]
            code=rule.code,
            name=rule.name,
        )


Judge = Callable[..., Iterable[Found]]


@dataclass(frozen=True)
class Rule:
    """A rule."""

    code: str  # stable, such as ``"AB101"``; never given to another rule
    name: str  # such as ``"OPT_PARAM_MISSING"``
    severity: Severity  # of its findings unless they say otherwise
    # names of findings that may follow from this one; where both are found, and this one is not later, those hang under

    explains: tuple[str, ...]
    judge: Judge  # the function
    needs: tuple[type[Fact], ...] = ()  # kinds of facts without each of which it says nothing
    # whether a model only learns less or later for it, so that it weighs less where the model learned well
    slows: bool = False

    @property
    def title(self) -> str:
        """What is wrong, in a few words: the heading of its page."""
        return _text(self.code).partition("\n")[0].removeprefix("# ")

    @property
    def page(self) -> str:
        """The Markdown of ``anybatch explain``: what is seen, why it matters, what to change, when it is fine."""
        return _text(self.code).partition("\n\n")[2]

    @property
    def decided(self) -> str:
        """What its page ends with, in Markdown: its thresholds, and the facts without which it says nothing."""
        thresholds = "".join(f"- `{name}` = {limit:g}: {limit.source}\n" for name, limit in self.limits.items())
        needs = " and ".join(f"`{kind.__name__}`" for kind in self.needs)
        return (f"\n## How it is decided\n\n{thresholds}" if thresholds else "") + (
            f"\nIt says nothing where no {needs} was recorded.\n" if needs else ""
        )

    @cached_property
    def limits(self) -> dict[str, Limit]:
        """Its thresholds by name."""
        return limits_of(self.judge)

    def findings(self, run: Run, **limits: float) -> list[Finding]:
        """What it finds in a run, the earliest first."""
        if any(next(run.of(kind), None) is None for kind in self.needs):
            return []
        found = (one.finding(run, self) for one in self.judge(run, **limits))
        return sorted(found, key=lambda one: one.at)


_RULES: dict[str, Rule] = {}
_PAGES = Path(__file__).parents[1] / "pages"


@cache
def _text(code: str) -> str:
    return (_PAGES / f"{code}.md").read_text(encoding="utf-8")


def rule(
    code: str,
    name: str,
    severity: Severity,
    *,
    explains: tuple[str, ...] = (),
    needs: tuple[type[Fact], ...] = (),
    slows: bool = False,
) -> Callable[[Judge], Judge]:
    """Declares a rule; its title and its page are the file ``pages/<code>.md`` beside this package."""

    def declared(judge: Judge) -> Judge:
        if name in _RULES or any(code == one.code for one in _RULES.values()):
            raise ValueError(f"the rule {code} {name} is declared twice; give each its own code and name")
        _RULES[name] = Rule(code, name, severity, tuple(dict.fromkeys(explains)), judge, needs, slows)
        return judge

    return declared


def all_rules() -> dict[str, Rule]:
    """All rules by name, in the order of their codes."""
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")
    return dict(sorted(_RULES.items(), key=lambda entry: entry[1].code))
