"""What the rules on numbers have in common: update ratios, the course of the loss, names."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeVar

from anybatch.records.events import Backward, Stepped
from anybatch.records.findings import Place
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, ModuleSample, Norms
from anybatch.records.tables import GroupFacts, OptimizerFacts, ParameterFacts

T = TypeVar("T")

SMALL_WEIGHT = 1e-3
"""A tensor whose root mean square is below this was made of zeros; a change of it says nothing about its step."""

HEALTHY_RATIO = 1e-3
"""The usual length of a step, as a share of the weights (A. Karpathy, A Recipe for Training Neural Networks, 2019)."""


SQUASHING = {"Sigmoid", "Tanh", "Softsign", "Hardsigmoid", "Hardtanh", "LogSigmoid"}
"""Activations that are flat at both ends, or at one that is not zero."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one sample says of one parameter; its gradient is there and it is in the optimizer."""

    parameter: ParameterFacts
    grad: float
    weight: float
    update: float
    unchanged: float
    grad_zeros: float
    state_moved: bool | None

    @property
    def is_matrix(self) -> bool:
        """Whether a change of it can be compared with it: two dims, and not made of zeros."""
        return len(self.parameter.shape) >= 2 and self.weight > SMALL_WEIGHT * math.sqrt(self.parameter.numel)

    @property
    def ratio(self) -> float:
        """The length of the update as a share of the weights."""
        return self.update / self.weight if self.weight > 0 else math.inf


def entries(run: Run, norms: Norms) -> Iterator[Entry]:
    """What a sample says of the parameters that its optimizer steps.

    Args:
        run: the facts.
        norms: the sample.
    """
    mine = set(groups_of(run, norms.optimizer))
    for position, number in enumerate(norms.parameters):
        grad = _at(norms.grad, position, None)
        if number in mine and number in run.parameters and grad is not None:
            zeros = _at(norms.grad_zeros, position, 0.0)
            yield Entry(
                parameter=run.parameters[number],
                grad=grad,
                weight=_at(norms.weight, position, 0.0),
                update=_at(norms.update, position, 0.0),
                unchanged=_at(norms.unchanged, position, 0.0),
                grad_zeros=0.0 if zeros is None else zeros,
                state_moved=_at(norms.state_moved, position, None),
            )


def _at(values: Sequence[T], position: int, default: T) -> T:
    return values[position] if position < len(values) else default


def groups_of(run: Run, optimizer: int) -> dict[int, tuple[int, GroupFacts]]:
    """For each parameter of an optimizer the index of its group, and the group.

    Args:
        run: the facts.
        optimizer: its number.
    """
    facts = run.optimizers.get(optimizer, OptimizerFacts(optimizer=optimizer))
    return {number: (index, group) for index, group in enumerate(facts.groups) for number in group.parameters}


def ratio(run: Run, norms: Norms) -> float | None:
    """The median over matrices of the length of the update as a share of the weights.

    Args:
        run: the facts.
        norms: a sample.

    Returns:
        The median, ``inf`` if any is not finite, ``None`` if there is no matrix with a gradient.
    """
    found = [one.ratio for one in entries(run, norms) if one.is_matrix]
    if any(not math.isfinite(value) for value in found):
        return math.inf
    return median(found) if found else None


@dataclass(frozen=True, slots=True)
class Course:
    """The loss over the steps.

    Args:
        ats: numbers of the events.
        steps: how many steps had been done.
        values: of the loss; summed over losses of one step, averaged over micro-batches.
    """

    ats: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @property
    def finite(self) -> list[float]:
        """The values that are finite."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def first(self) -> float:
        """The loss at the start: the median of the first three values."""
        return median(self.finite[:3]) if self.finite else math.nan

    @property
    def last(self) -> float:
        """The loss at the end: the median of the last quarter, not of the first values."""
        count = max(1, min(len(self.finite) // 4, 50))
        return median(self.finite[-count:]) if self.finite else math.nan

    @property
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
        if self.diverged or not self.finite:
            return False
        gone = self.first - self.last
        return gone > 0 and (gone > 0.5 * abs(self.first) or (gone > 4 * self.noise and gone > 0.1 * abs(self.first)))

    @property
    def converged(self) -> bool:
        """Whether less than a twentieth of the loss is left; a loss that may be negative converged when it fell."""
        if not self.finite or self.diverged:
            return False
        if min(self.finite) < 0:
            return self.fell
        return self.last <= 0.05 * max(self.finite[:3]) or self.last < 1e-6

    def since(self, at: int) -> "Course":
        """The part from an event on.

        Args:
            at: its number.
        """
        kept = [index for index, one in enumerate(self.ats) if one >= at]
        return Course(
            tuple(self.ats[index] for index in kept),
            tuple(self.steps[index] for index in kept),
            tuple(self.values[index] for index in kept),
        )


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run in which the same optimizers step: pretraining and fine-tuning are two.

    Args:
        start: the number of its first event.
        end: of its last one.
        optimizers: that step in it.
        parameters: of these.
        lines: where backward was called.
    """

    start: int
    end: int
    optimizers: frozenset[int]
    parameters: frozenset[int]
    lines: frozenset[tuple[str, int]]


def phases(run: Run) -> list[Phase]:
    """The parts of a run; an optimizer that is made anew for the same parameters and the same loop begins none.

    Args:
        run: the facts.
    """
    spans: dict[int, tuple[int, int]] = {}
    for one in run.of(Stepped):
        spans[one.optimizer] = (spans.get(one.optimizer, (one.at, 0))[0], one.at)
    clusters: list[tuple[int, frozenset[int]]] = []
    for number, (first, last) in sorted(spans.items(), key=lambda entry: entry[1]):
        if clusters and first <= clusters[-1][0]:
            clusters[-1] = (max(last, clusters[-1][0]), clusters[-1][1] | {number})
        else:
            clusters.append((last, frozenset({number})))
    found: list[Phase] = []
    for end, members in clusters:
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


def course(run: Run, optimizer: int | None = None) -> Course:
    """How the loss went; empty where several optimizers play against each other, and no single loss has to fall.

    Args:
        run: the facts.
        optimizer: only while this one stepped; without it the last phase of the run.
    """
    parts = phases(run)
    part = next((one for one in parts if optimizer in one.optimizers), parts[-1] if parts else None)
    start, end = (part.start, part.end) if part is not None else (0, math.inf)
    if optimizer is not None and part is not None and not adversarial(run, optimizer):
        own = [one.at for one in run.of(Stepped) if one.optimizer == optimizer]
        others = [one.at for one in run.of(Stepped) if own and one.at < own[0]]
        start, end = (
            max([start, *(at + 1 for at in others[-1:])]),
            own[-1] if own[-1:] and part is not parts[-1] else end,
        )
    by_line: dict[tuple[str, int], dict[int, list[Backward]]] = {}
    counts: dict[int, int] = {}
    windows: dict[int, int] = {}
    for one in run.of(Backward, Stepped):
        if not start <= one.at <= end:
            continue
        if isinstance(one, Stepped):
            counts[one.optimizer] = counts.get(one.optimizer, 0) + 1
        elif isinstance(one, Backward) and one.function == "backward" and one.value is not None:
            window = sum(counts.values())
            windows[window] = max(counts.values(), default=0)
            by_line.setdefault((one.file, one.line), {}).setdefault(window, []).append(one)
    if len(by_line) > 1 and adversarial(run, optimizer):
        return Course()
    whole = [one for one in windows if sum(one in line for line in by_line.values()) == len(by_line)] or [*windows]
    ats, values = [], []
    for window in whole:
        taken = [line[window] for line in by_line.values() if window in line]
        ats.append(min(one.at for part_ in taken for one in part_))
        values.append(sum(fmean(one.value for one in part_ if one.value is not None) for part_ in taken))
    return Course(tuple(ats), tuple(windows[one] for one in whole), tuple(values))


def adversarial(run: Run, optimizer: int | None = None) -> bool:
    """Whether several optimizers with different parameters step by turns.

    Args:
        run: the facts.
        optimizer: in the phase of this one; without it in the last phase.
    """
    parts = phases(run)
    part = next((one for one in parts if optimizer in one.optimizers), parts[-1] if parts else None)
    return part is not None and len({frozenset(groups_of(run, number)) for number in part.optimizers}) > 1


def latest(run: Run) -> Iterator[tuple[int, list[Activations]]]:
    """For each root its samples of activations, in order.

    Args:
        run: the facts.
    """
    found: dict[int, list[Activations]] = {}
    for one in run.of(Activations):
        found.setdefault(one.root, []).append(one)
    yield from found.items()


def outputs(samples: Iterable[Activations]) -> list[tuple[Activations, ModuleSample]]:
    """The output of the root in each sample.

    Args:
        samples: of one root.
    """
    return [(one, one.modules[-1]) for one in samples if one.modules and one.modules[-1].module == ""]


def module_name(run: Run, root: int, module: str) -> str:
    """The name of a module, with the variable of its root in front where there are several roots.

    Args:
        run: the facts.
        root: its number.
        module: its qualified name within the root.
    """
    variable = run.roots[root].variable if root in run.roots and len(run.roots) > 1 else ""
    return ".".join(part for part in (variable, module) if part)


def model_name(run: Run, root: int = 0) -> str:
    """What the user's code calls a root.

    Args:
        run: the facts.
        root: its number.
    """
    return (run.roots[root].variable if root in run.roots else "") or "model"


def optimizer_name(run: Run, number: int) -> str:
    """What the user's code calls an optimizer.

    Args:
        run: the facts.
        number: of it.
    """
    return (run.optimizers[number].variable if number in run.optimizers else "") or "optimizer"


def optimizer_place(run: Run, number: int, group: int | None = None) -> Place:
    """Where an optimizer was made.

    Args:
        run: the facts.
        number: of it.
        group: the index of one of its groups.
    """
    facts = run.optimizers.get(number, OptimizerFacts(optimizer=number))
    return Place(optimizer=optimizer_name(run, number), group=group, file=facts.file, line=facts.line)


def construction(run: Run, number: int, lr: float) -> str:
    """Code that makes an optimizer with another learning rate.

    Args:
        run: the facts.
        number: of the optimizer.
        lr: the learning rate.

    Returns:
        A line such as ``optimizer = AdamW(model.parameters(), lr=3e-05)``.
    """
    facts = run.optimizers.get(number, OptimizerFacts(optimizer=number, cls="AdamW"))
    if len(facts.groups) > 1:
        return f"for group in {optimizer_name(run, number)}.param_groups: group['lr'] = {lr:g}"
    owners = {run.parameters[one].root for one in groups_of(run, number) if one in run.parameters}
    owner = model_name(run, min(owners, default=0))
    return f"{optimizer_name(run, number)} = {facts.cls or 'AdamW'}({owner}.parameters(), lr={lr:g})"


def rounded(value: float) -> float:
    """A number rounded down to 1, 2, 3 or 5 times a power of ten.

    Args:
        value: positive.

    Example:
        >>> rounded(3.6e-5), rounded(0.0199)
        (3e-05, 0.01)
    """
    if not (0 < value < math.inf):
        return value
    power = 10.0 ** math.floor(math.log10(value))
    lead = max((step for step in (1, 2, 3, 5) if step * power <= value * (1 + 1e-9)), default=1)
    return float(f"{lead * power:.3g}")
