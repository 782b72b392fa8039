"""Operators, base programs and the mutants that both give, with the split into two halves."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from code_of import Code, Edit

HOME = Path(__file__).resolve().parent
Half = Literal["tune", "report"]
Sites = Callable[[Code], Iterable[list[Edit]]]
SALT = "anybatch mutants, first split"
"""In front of each name that is hashed for the split; never changed."""
FAMILIES = (
    "wiring", "order", "modes", "axes", "loss", "targets", "inputs", "rates", "initialisation", "precision",
    "accumulation", "clipping", "copies", "evaluation", "gradients",
)  # fmt: skip
MODULES = ("operators_wiring", "operators_loss", "operators_data", "operators_rates", "operators_state")
TO_COME = frozenset(
    [
        "AVERAGE_REVERSED",
        "AVERAGE_TOO_SLOW",
        "COPY_FOLLOWS_AT_ONCE",
        "COPY_IS_ALIAS",
        "COPY_UNUSED",
        "EVAL_WRONG_AXIS",
        "INPUT_NOISE",
        "LABEL_LEAK",
        "LARGE_INIT",
        "LR_CHANGES_ITSELF",
        "MOMENTUM_TOO_HIGH",
        "NLL_OF_SCORES",
        "OWN_STATE_LOST",
        "SCHED_NEVER",
        "SECOND_ORDER_LOST",
        "SMALL_INIT",
        "SMALL_INPUTS",
        "SPLIT_DIFFERS",
        "STATE_NOT_USED",
        "STEP_BEFORE_BACKWARD",
        "STEP_PER_MICROBATCH",
        "STEP_RARE",
        "STEP_UPHILL",
        "STEP_WRITES_NOTHING",
        "TARGETS_ROUNDED",
        "TARGET_IS_INPUT",
        "TEMPERATURE",
        "TERM_DOMINATES",
        "TERM_GROWS_WITH_BATCH",
        "TOO_FEW_DATA",
        "TOO_FEW_STEPS",
        "UPDATES_ROUNDED",
    ]
)
"""Names that operators call right and that no rule has: a rule to come takes its name, or it is changed here."""
MOST_SITES = 2
"""Mutants of one operator and one base program: the first and the last place where it applies."""


def half_of(name: str) -> Half:
    """The half that a base program or an operator belongs to, by the hash of its name alone."""
    return "tune" if hashlib.sha256(f"{SALT}/{name}".encode()).digest()[0] % 2 else "report"


@dataclass(frozen=True)
class Operator:
    """A way to go wrong.

    Args:
        name: of the operator.
        family: one of ``FAMILIES``.
        right: names of findings of which each is right; names that no rule has yet are there for rules to come.
        sites: gives the edits of each place where it applies.
        after: what the literature calls it; empty if it has no name there.
        hidden: whether the metric can't show the fault, so that a mutant with a good metric is no equivalent one.
        elsewhere: whether the training is as it was, and what is wrong is its evaluation, so that nobody is deceived by
            the verdict that it learns.
    """

    name: str
    family: str
    right: tuple[str, ...]
    sites: Sites
    after: str = ""
    hidden: bool = False
    elsewhere: bool = False

    @property
    def half(self) -> Half:
        """Of the split."""
        return half_of(f"operator/{self.name}")


@dataclass(frozen=True)
class Base:
    """A healthy program.

    Args:
        name: of its file.
        source: its text.
    """

    name: str
    source: str

    @property
    def half(self) -> Half:
        """Of the split."""
        return half_of(f"base/{self.name}")


@dataclass(frozen=True)
class Mutant:
    """A base program with one fault.

    Args:
        base: the program.
        operator: that changed it.
        number: of the place, from 0.
        source: with the fault.
        line: the first that was changed.
        last: the last one.
    """

    base: Base
    operator: Operator
    number: int
    source: str
    line: int
    last: int

    @property
    def name(self) -> str:
        """Names the base program, the operator and the place."""
        return f"{self.base.name}/{self.operator.name}/{self.number}"

    @property
    def half(self) -> Half | Literal["mixed"]:
        """The half that both its base program and its operator are in; ``"mixed"`` if they are in two."""
        return self.base.half if self.base.half == self.operator.half else "mixed"


_OPERATORS: dict[str, Operator] = {}


def operator(
    name: str, family: str, *right: str, after: str = "", hidden: bool = False, elsewhere: bool = False
) -> Callable[[Sites], Sites]:
    """Declares an operator; the function gives the edits of each place where it applies."""

    def declare(sites: Sites) -> Sites:
        if name in _OPERATORS or family not in FAMILIES:
            raise ValueError(f"{name} is there already, or its family {family} is none of {FAMILIES}")
        _OPERATORS[name] = Operator(name, family, right, sites, after, hidden, elsewhere)
        return sites

    return declare


@cache
def operators() -> tuple[Operator, ...]:
    """All operators."""
    for module in MODULES:
        importlib.import_module(module)
    return tuple(_OPERATORS.values())


@cache
def bases() -> tuple[Base, ...]:
    """All base programs."""
    paths = sorted((HOME / "bases").glob("*.py"))
    return tuple(Base(path.stem, path.read_text(encoding="utf-8")) for path in paths)


@lru_cache(maxsize=4)
def _code(source: str) -> Code:
    return Code(source)


def mutants_of(base: Base, one: Operator) -> Iterator[Mutant]:
    """The mutants of a base program by one operator."""
    code = _code(base.source)
    places = [edits for edits in one.sites(code) if edits and code.apply(edits) != base.source]
    if len(places) > MOST_SITES:
        places = [places[0], places[-1]]
    seen = set()
    for number, edits in enumerate(places):
        source = code.apply(edits)
        if source not in seen:
            seen.add(source)
            line = code.line_after(edits)
            yield Mutant(base, one, number, source, line, line + max(0, edits[0].text.rstrip("\n").count("\n")))


@cache
def mutants() -> tuple[Mutant, ...]:
    """All mutants."""
    return tuple(mutant for base in bases() for one in operators() for mutant in mutants_of(base, one))
