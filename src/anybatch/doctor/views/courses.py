"""How the loss went: the phases of a run, and the values of its loss in each."""

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median

from anybatch.records.events import Backward, Stepped
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Written
from anybatch.records.tables import GroupFacts, OptimizerFacts

_TOGETHER = 0.9
"""Steps, as a share, that optimizers of one loss do together: a scaler may skip some, and a run may end within one."""


@remembered
def groups_of(run: Run, optimizer: int) -> dict[int, tuple[int, GroupFacts]]:
    """For each parameter of an optimizer the index of its group, and the group."""
    facts = run.optimizers.get(optimizer, OptimizerFacts(optimizer=optimizer))
    return {number: (index, group) for index, group in enumerate(facts.groups) for number in group.parameters}


@remembered
def passes(run: Run) -> list[Backward]:
    """The backwards that steps come from: calls of ``backward``, or of ``autograd.grad`` where there are none."""
    every = list(run.of(Backward))
    return [one for one in every if one.function == "backward"] or [one for one in every if not one.create]


@remembered
def updates(run: Run) -> list[int]:
    """The events at which parameters were changed: steps; or, of updates by hand without any optimizer, backwards."""
    steps = [one.at for one in run.of(Stepped)]
    if steps or run.optimizers or not any(run.of(Written)):
        return steps
    return [one.at for one in passes(run)]


@dataclass(frozen=True)
class Course:
    """The loss over the steps; without slots, so that what is read often is computed once."""

    ats: tuple[int, ...] = ()  # numbers of the events
    steps: tuple[int, ...] = ()  # how many steps had been done
    values: tuple[float, ...] = ()  # of the loss; summed over losses of one step, averaged over micro-batches
    # the loss of a constant guess as far as the targets tell: of classes at most the logarithm of their number, of
    # numbers their variance; ``None`` if it is not known
    prior: float | None = None

    @cached_property
    def finite(self) -> list[float]:
        """The values that are finite."""
        return [value for value in self.values if math.isfinite(value)]

    @cached_property
    def first(self) -> float:
        """The loss at the start: the median of the first three values."""
        return median(self.finite[:3]) if self.finite else math.nan

    @cached_property
    def last(self) -> float:
        """The loss at the end: the median of the last quarter, not of the first values."""
        count = max(1, min(len(self.finite) // 4, 50))
        return median(self.finite[-count:]) if self.finite else math.nan

    @cached_property
    def noise(self) -> float:
        """How much the loss differs from one step to the next in the second half of the run."""
        half = self.finite[len(self.finite) // 2 :]
        return median([abs(one - next_) for one, next_ in itertools.pairwise(half)]) if len(half) > 1 else 0.0

    @property
    def diverged(self) -> bool:
        """Whether a value that is not finite ended it."""
        return bool(self.values) and not math.isfinite(self.values[-1])

    @property
    def fell(self) -> bool:
        """Whether the model learned something: half of the loss is gone, or much more than its noise."""
        if self.diverged or not self.finite or self._guesses:
            return False
        gone = self.first - self.last
        return gone > 0 and (gone > 0.5 * abs(self.first) or (gone > 4 * self.noise and gone > 0.1 * abs(self.first)))

    @property
    def converged(self) -> bool:
        """Whether less than a twentieth of the loss is left; a loss that may be negative converged when it fell."""
        if not self.finite or self.diverged or self._guesses:
            return False
        if min(self.finite) < 0:
            return self.fell
        return self.last <= 0.05 * max(self.finite[:3]) or self.last < 1e-6

    @property
    def is_positive(self) -> bool:
        """Whether it has values and none is below zero, so that it can be compared with its start."""
        return bool(self.finite) and self.first > 0 and min(self.finite) >= 0

    @property
    def stands(self) -> bool:
        """Whether it is there, and neither fell nor was lost."""
        return bool(self.finite) and not (self.fell or self.converged or self.diverged)

    @property
    def _guesses(self) -> bool:
        """Whether it ends where a constant guess would."""
        return self.prior is not None and self.prior > 1e-6 and self.last > 0.95 * self.prior

    def since(self, at: int) -> "Course":
        """The part from an event on."""
        first = bisect_left(self.ats, at)
        return Course(self.ats[first:], self.steps[first:], self.values[first:], self.prior)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run in which the same optimizers step: pretraining and fine-tuning are two."""

    start: int  # the number of its first event
    end: int  # of its last one
    optimizers: frozenset[int]  # that step in it
    parameters: frozenset[int]  # of these
    lines: frozenset[tuple[str, int]]  # where backward was called


@remembered
def taking_turns(run: Run) -> list[tuple[int, frozenset[int]]]:
    """The optimizers that step by turns, with their last event; those that step one after the other are apart."""
    spans: dict[int, tuple[int, int]] = {}
    for one in run.of(Stepped):
        spans[one.optimizer] = (spans.get(one.optimizer, (one.at, 0))[0], one.at)
    found: list[tuple[int, frozenset[int]]] = []
    for number, (first, last) in sorted(spans.items(), key=lambda entry: entry[1]):
        if found and first <= found[-1][0]:
            found[-1] = (max(last, found[-1][0]), found[-1][1] | {number})
        else:
            found.append((last, frozenset({number})))
    return found


@remembered
def phases(run: Run) -> list[Phase]:
    """The parts of a run; an optimizer that is made anew for the same parameters and the same loop begins none."""
    found: list[Phase] = []
    for end, members in taking_turns(run):
        start = found[-1].end + 1 if found else 0
        parameters = frozenset(one for number in members for one in groups_of(run, number))
        lines = frozenset((one.file, one.line) for one in run.of(Backward) if start <= one.at <= end)
        if found and found[-1].parameters == parameters and found[-1].lines & lines:
            before = found.pop()
            found.append(Phase(before.start, end, before.optimizers | members, parameters, before.lines | lines))
        else:
            found.append(Phase(start, end, members, parameters, lines))
    if found:
        found[-1] = replace(found[-1], end=max((one.at for one in run.facts), default=0))
    return found


def _phase_of(run: Run, optimizer: int | None) -> Phase | None:
    """The phase of an optimizer, or the last one."""
    parts = phases(run)
    return next((one for one in parts if optimizer in one.optimizers), parts[-1] if parts else None)


@remembered
def course(run: Run, optimizer: int | None = None) -> Course:
    """How the loss went while an optimizer stepped; without one, in the last phase of the run.

    Empty where several optimizers play against each other, and no single loss has to fall.
    """
    part = _phase_of(run, optimizer)
    start, end = (part.start, part.end) if part is not None else (0, math.inf)
    if optimizer is not None and part is not None and not adversarial(run, optimizer):
        own = [one.at for one in run.of(Stepped) if one.optimizer == optimizer]
        others = [one.at for one in run.of(Stepped) if own and one.at < own[0]]
        start = max([start, *(at + 1 for at in others[-1:])])
        end = own[-1] if own and part is not phases(run)[-1] else end
    by_line: dict[tuple[str, int], dict[int, list[Backward]]] = {}
    counts: dict[int, int] = {}
    windows: dict[int, int] = {}
    by_step, seen = any(run.of(Stepped)), {one.at for one in passes(run)}
    for one in run.of(Backward, Stepped):
        if not start <= one.at <= end:
            continue
        if isinstance(one, Stepped):
            counts[one.optimizer] = counts.get(one.optimizer, 0) + 1
        elif isinstance(one, Backward) and one.at in seen and one.value is not None:
            window = sum(counts.values()) if by_step else len(by_line.get((one.file, one.line), ()))
            windows[window] = max(counts.values(), default=0) if by_step else window
            by_line.setdefault((one.file, one.line), {}).setdefault(window, []).append(one)
    if len(by_line) > 1 and adversarial(run, optimizer):
        return Course()
    whole = [one for one in windows if sum(one in line for line in by_line.values()) == len(by_line)] or [*windows]
    ats, values, sign = [], [], run.sign(optimizer)
    for window in whole:
        taken = [line[window] for line in by_line.values() if window in line]
        ats.append(min(one.at for part_ in taken for one in part_))
        values.append(sign * sum(fmean(one.value for one in part_ if one.value is not None) for part_ in taken))
    return Course(tuple(ats), tuple(windows[one] for one in whole), tuple(values), _prior(run, start, end))


def _prior(run: Run, start: float, end: float) -> float | None:
    calls = [one for one in run.of(LossCall) if one.reduction == "mean" and start <= one.at <= end]
    if len({one.function for one in calls}) != 1:
        return None
    heads = grouped((one.classes or one.input_shape[1:], one) for one in calls)
    guesses = {head: _guess(of) for head, of in heads.items()}
    known = [guesses[one.classes or one.input_shape[1:]] for one in _summed(run, calls, start, end)]
    whole = sum(one for one in known if one is not None)
    return whole if whole and None not in known else max((one for one in guesses.values() if one), default=None)


def _guess(calls: list[LossCall]) -> float | None:
    classes, seen = (max(getattr(one, name) for one in calls) for name in ("classes", "target_classes"))
    classes = min(classes, seen) if seen > 1 else classes  # one class only: a contrast, not a class
    if calls[0].function == "cross_entropy":
        return math.log(classes) if classes > 1 else None
    if calls[0].function != "mse_loss" or any(one.target_requires_grad for one in calls):
        return None
    return max((one.target_std**2 for one in calls if one.target_std), default=None)


def _summed(run: Run, calls: list[LossCall], start: float, end: float) -> list[LossCall]:
    """The calls of a loss function that the first backward is of, where its value is their sum."""
    first = next((one for one in run.of(Backward) if start <= one.at <= end and one.value is not None), None)
    mine = [one for one in calls if first is not None and one.at < first.at]
    values = [one.value for one in mine if one.value is not None]
    is_sum = (
        first is not None and len(values) == len(mine) and math.isclose(sum(values), first.value or 0, rel_tol=1e-3)
    )
    return mine if is_sum else []


@remembered
def adversarial(run: Run, optimizer: int | None = None) -> bool:
    """Whether optimizers with different parameters step by turns, in the phase of one of them or in the last.

    Those that all step behind each backward of one line share its loss.
    """
    part = _phase_of(run, optimizer)
    if part is None or len({frozenset(groups_of(run, number)) for number in part.optimizers}) < 2:
        return False
    turns, lines = list[set[int]](), set[tuple[str, int]]()
    for one in run.of(Backward, Stepped):
        if isinstance(one, Stepped) and turns and part.start <= one.at <= part.end:
            turns[-1].add(one.optimizer)
        elif isinstance(one, Backward) and part.start <= one.at <= part.end:
            lines.add((one.file, one.line))
            turns = turns if turns and not turns[-1] else [*turns, set()]
    together = sum(frozenset().union(*(groups_of(run, one) for one in turn)) == part.parameters for turn in turns)
    return len(lines) > 1 or together < _TOGETHER * len(turns)
