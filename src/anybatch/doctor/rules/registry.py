"""How a rule is declared, and the list of them."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from anybatch.doctor import rules
from anybatch.records.findings import Finding, Severity
from anybatch.records.runs import Run

Judge = Callable[[Run], Iterable[Finding]]

FAMILIES = {
    "wiring": 101, "graph": 201, "order": 301, "accumulation": 351, "amp": 401, "modes": 451, "schedule": 501,
    "numerics": 551, "loss": 601, "data": 651, "memory": 701, "ranks": 751, "probes": 801, "crashes": 901,
}  # fmt: skip
"""The families, each a module of this package, and the first of the fifty codes that each has."""

WITHOUT_RULE = {
    "LR_NOT_SCALED": "what the learning rate was made for is nowhere to be seen; LR_TOO_HIGH says how it goes with the "
    "batch",
    "LABEL_MISALIGNED": "labels that belong to other inputs look like any others; CANNOT_FIT_BATCH (--active) is what "
    "they leave behind",
}
"""Names of faults that have no rule, and why."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule.

    Args:
        code: stable, such as ``"AB101"``; never given to another rule.
        name: such as ``"OPT_PARAM_MISSING"``.
        severity: of its findings unless they say otherwise.
        explains: names of findings that may follow from this one; where both are found, and this one is not later,
            those hang under it.
        judge: the function.
    """

    code: str
    name: str
    severity: Severity
    explains: tuple[str, ...]
    judge: Judge

    @property
    def title(self) -> str:
        """What is wrong, in a few words: the heading of its page."""
        return _text(self.code).partition("\n")[0].removeprefix("# ")

    @property
    def page(self) -> str:
        """The Markdown of ``anybatch explain``: what is seen, why it matters, what to change, when it is fine."""
        return _text(self.code).partition("\n\n")[2]

    def findings(self, run: Run) -> list[Finding]:
        """What it finds in a run, the earliest first.

        Args:
            run: the facts.
        """
        found = [
            replace(one, code=self.code, name=self.name, severity=one.severity or self.severity)
            for one in self.judge(run)
        ]
        return sorted(found, key=lambda one: one.at)


_RULES: dict[str, Rule] = {}
_PAGES = Path(__file__).parents[1] / "pages"


@cache
def _text(code: str) -> str:
    return (_PAGES / f"{code}.md").read_text(encoding="utf-8")


def rule(code: str, name: str, severity: Severity, *, explains: tuple[str, ...] = ()) -> Callable[[Judge], Judge]:
    """Declares a rule; its title and its page are the file ``pages/<code>.md`` beside this package.

    Args:
        code: see ``Rule``.
        name: see ``Rule``.
        severity: see ``Rule``.
        explains: see ``Rule``.

    Returns:
        A decorator for the function that takes a run and yields findings, without code and name.
    """

    def declared(judge: Judge) -> Judge:
        if name in _RULES or any(code == one.code for one in _RULES.values()):
            raise ValueError(f"the rule {code} {name} is declared twice; give each its own code and name")
        _RULES[name] = Rule(code, name, severity, explains, judge)
        return judge

    return declared


def all_rules() -> dict[str, Rule]:
    """All rules by name, in the order of their codes."""
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")
    return dict(sorted(_RULES.items(), key=lambda entry: entry[1].code))
