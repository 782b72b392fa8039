"""A recorded run: its facts in order, and the tables that they refer to."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import anybatch.records.events as _events  # its kinds of facts
import anybatch.records.lossfacts as _lossfacts
import anybatch.records.samples as _samples
from anybatch.records.lines import Fact, from_line
from anybatch.records.repeats import with_repeats
from anybatch.records.tables import OptimizerFacts, ParameterFacts, Root, SchedulerFacts, Started

K = TypeVar("K", bound=Fact)
P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G")
V = TypeVar("V")

_ = _events, _lossfacts, _samples


@dataclass(slots=True)
class Run:
    """The facts of one run."""

    facts: list[Fact]  # the facts, in order
    damaged: tuple[str, ...] = ()  # for each line that could not be read, its number and the reason
    started: Started = field(init=False)  # the header of the record
    roots: dict[int, Root] = field(init=False)  # the latest table of each model, by number
    parameters: dict[int, ParameterFacts] = field(init=False)  # the latest table of each parameter, by number
    optimizers: dict[int, OptimizerFacts] = field(init=False)  # the latest table of each optimizer, by number
    schedulers: dict[int, SchedulerFacts] = field(init=False)  # the latest table of each scheduler, by number
    # results of functions decorated with ``remembered``
    memo: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    _by_kind: dict[type[Fact], list[Fact]] = field(init=False)

    def __post_init__(self) -> None:
        self._by_kind = grouped((type(one), one) for one in self.facts)
        self.started = next(self.of(Started), Started())
        self.roots = {one.root: one for one in self.of(Root)}
        self.parameters = {one.parameter: one for one in self.of(ParameterFacts)}
        self.optimizers = {one.optimizer: one for one in self.of(OptimizerFacts)}
        self.schedulers = {one.scheduler: one for one in self.of(SchedulerFacts)}

    def of(self, *kinds: type[K]) -> Iterator[K]:
        """The facts of some kinds, in order."""
        if len(kinds) == 1:
            yield from self._by_kind.get(kinds[0], ())  # type: ignore[misc]
        else:
            yield from (one for one in self.facts if isinstance(one, kinds))

    def answers(self, probe: str, *words: str) -> list[_lossfacts.Probed]:
        """The answers to a question that was put to copies: ``"yes"`` without words, else ``"no"`` or ``"unknown"``."""
        asked = [one for one in self.of(_lossfacts.Probed) if one.probe == probe]
        return [one for word in words or ("yes",) for one in asked if one.answer == word]

    @property
    def steps_of(self) -> dict[int, int]:
        """The number of steps of each optimizer that stepped."""
        counts: dict[int, int] = {}
        for one in self.of(_events.Stepped):
            counts[one.optimizer] = max(counts.get(one.optimizer, 0), one.number + 1)
        return counts

    @property
    def steps(self) -> int:
        """The number of optimizer steps; of several optimizers, that of the one that stepped most."""
        return max(self.steps_of.values(), default=0)

    def sign(self, optimizer: int | None = None) -> int:
        """-1 where an optimizer, or any, maximizes: what it minimizes is the negative of the loss."""
        every = (one for one in self.optimizers.values() if optimizer in (None, one.optimizer))
        return -1 if any(group.maximize for one in every for group in one.groups) else 1


def grouped(pairs: Iterable[tuple[G, V]]) -> dict[G, list[V]]:
    """Values by their keys, both in the order in which they come.

    Example:
        >>> grouped((len(word), word) for word in ("if", "for", "in"))
        {2: ['if', 'in'], 3: ['for']}
    """
    found: dict[G, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def remembered(function: Callable[Concatenate[Run, P], R]) -> Callable[Concatenate[Run, P], R]:
    """A decorator that caches a function of a run in that run, per value of its other arguments.

    Example:
        >>> @remembered
        ... def facts(run: Run, least: int) -> list[int]:
        ...     return [one.at for one in run.facts if one.at >= least]
        >>> run = Run([])
        >>> facts(run, 1) is facts(run, 1)
        True
    """

    @functools.wraps(function)
    def found(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (function, *args, *sorted(kwargs.items()))
        if key not in run.memo:
            run.memo[key] = function(run, *args, **kwargs)
        known: R = run.memo[key]
        return known

    return found


def read_run(lines: Iterable[str | bytes]) -> Run:
    """Reads the lines of a record.

    Damaged lines are left out and listed in ``damaged``. A last line that was cut off in writing is left out silently.
    """
    found: list[Fact] = []
    damaged: list[str] = []
    is_cut_off = False
    for number, line in enumerate(lines, start=1):
        is_cut_off = False
        if line.strip():
            try:
                one = from_line(line if isinstance(line, str) else line.decode())
            except ValueError as error:
                damaged.append(f"line {number}: {error}")
                is_no_json = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
                is_cut_off = is_no_json and line[-1:] not in ("\n", b"\n")
                continue
            if one is not None:
                found.append(one)
    if is_cut_off:
        damaged.pop()
    facts = with_repeats(found, damaged)
    return Run(facts, damaged=tuple(damaged))


def load_run(path: Path) -> Run:
    """Reads a record from a file."""
    with path.open("rb") as file:
        return read_run(file)
