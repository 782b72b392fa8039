"""What a run shows of one optimizer: parameters, steps, samples, windows, losses, and what is lost."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from anybatch.doctor.views.courses import Course, course, groups_of
from anybatch.doctor.views.measures import FAR_TOO_LONG, Entry, constant_since, entries, ratio
from anybatch.doctor.views.naming import at_line, optimizer_variable
from anybatch.doctor.views.windows import MANY, Window, by_closure, members, stepping, windows_of
from anybatch.records.events import Backward, Scheduled, Stepped
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Activations, NonFinite, Norms
from anybatch.records.tables import GroupFacts, OptimizerFacts, SchedulerFacts

_GROWN = 3.0
"""How many times its first value the loss is by then."""

_GROWN_MUCH = 10.0
"""The same where the number came with the data, which only a model that makes its own data can have spoilt."""

_ENOUGH = 8
"""Values from which on the loss at the start is a median, not one value that may be small by chance."""

_JUST_BEFORE = 3
"""Steps within which one that was far too long may have made it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The first number that is not finite."""

    at: int  # the number of its event
    step: int  # of the run
    is_data: bool  # whether it came with the data, whatever the weights were


@remembered
def lost(run: Run, optimizer: int) -> Lost | None:
    """The first number that is not finite, or the first such loss; ``None`` if all were finite."""
    bad, losses = next(run.of(NonFinite), None), course(run, optimizer)
    if bad is not None:
        return Lost(bad.at, bad.step, bad.where == "input" or bad.of_data)
    first = next((index for index, value in enumerate(losses.values) if not math.isfinite(value)), None)
    if first is None or not losses.diverged:
        return None
    return Lost(losses.ats[first], losses.steps[first], is_data=False)


@remembered
def loss_grew(run: Run, optimizer: int) -> bool:
    """Whether the loss had risen when the first number was lost: not once, but in its last values."""
    losses, until = course(run, optimizer), lost(run, optimizer)
    before = []
    for at, value in zip(losses.ats, losses.values, strict=True):
        # The number is found before the backward is noted.
        if until is None or at > until.at + 1 or not math.isfinite(value):
            break
        before.append(value)
    if until is None or len(before) < 2 or min(before) < 0:
        return False
    begin = median(before[:3]) if len(before) >= _ENOUGH else before[0]
    return median(before[-min(3, len(before) - 1) :]) > (_GROWN_MUCH if until.is_data else _GROWN) * begin


def announced(run: Run, optimizer: int, limit: float) -> bool:
    """Whether too long steps can have made it: the loss had risen, or one of the last was over a limit.

    The limit is a share of the length of the weights.
    """
    until = lost(run, optimizer)
    if until is None or until.is_data or loss_grew(run, optimizer):
        return until is not None and loss_grew(run, optimizer)
    near = [
        norms for norms in run.of(Norms)
        if norms.optimizer == optimizer and norms.at < until.at and norms.step >= until.step - _JUST_BEFORE
    ]  # fmt: skip
    return any(limit < (ratio(run, norms) or 0.0) < math.inf for norms in near)


TINY = 1e-6
"""Gradients of the first module below this share of those of the last one, and updates below this, are lost."""

SMALL = 1e-4
"""The share of the last gradient below which that of the first is lost where all outputs are the same, too."""

_DEEP = 4
"""Over how many matrices a gradient has to shrink to be lost in the depth of a network, and not at one gate."""

Sampled = tuple[Norms, list[Entry]]


@dataclass(frozen=True, slots=True)
class Faded:
    """A gradient that is lost on its way back."""

    lost: list[Sampled]  # the samples in which it is, each with the matrices in the order in which they run
    early: bool  # whether it is so from the first sample on, before any update


@remembered
def faded(run: Run, optimizer: int) -> Faded | None:
    """Whether the gradients of the first layers vanish, and since when; ``None`` where they arrive, or at the end."""
    samples = [norms for norms in run.of(Norms) if norms.optimizer == optimizer]
    losses = course(run, optimizer)
    if losses.converged or not samples:
        return None
    ratios = [ratio(run, norms) or 0.0 for norms in samples]
    thrown = sum(value > FAR_TOO_LONG for value in ratios) >= 2
    chains = [(norms, _chain(run, norms, whole=thrown)) for norms in samples]
    start = max((chain[0].grad for _, chain in chains[:2] if chain), default=0.0)
    roots = {chain[0].parameter.root for _, chain in chains if chain}
    constant = any(found is not None and found.step == 0 for root in roots if (found := constant_since(run, root)))
    limit = SMALL if constant and not losses.fell else TINY
    lost = [(norms, chain) for norms, chain in chains if _is_lost(chain, start if thrown else 0.0, limit)]
    if not lost or lost[-1][0] is not chains[-1][0]:
        return None
    last = chains[-1][1]  # samples are far apart in the course of a run, and one is enough where it is beyond doubt
    far_gone = thrown and last[0].grad < SMALL * max(last[-1].grad, last[-2].grad)
    if len(lost) < (2 if thrown else 3) and not far_gone:
        return None
    begin = next(index for index, (norms, _) in enumerate(chains) if norms is lost[0][0])
    if len(lost) * 2 < len(chains) - begin:
        return None
    if 0 < begin < 3 and all(one.grad == 0 for _, chain in chains[:begin] for one in chain):
        lost, begin = [chains[0], *lost], 0  # the first outputs were zero, and so was every gradient
    if not thrown and not (_stays(chains, lost, begin) or (begin == 0 and not losses.fell and _deep(lost))):
        return None
    return Faded(lost, begin == 0)


def _chain(run: Run, norms: Norms, *, whole: bool) -> list[Entry]:
    """The matrices of an optimizer in the order in which they run: of its first root, or of the whole of it."""
    order: dict[tuple[int, str], int] = {}
    for one in run.of(Activations):
        for sample in one.modules:
            order.setdefault((one.root, sample.module), sample.order)
    found = [one for one in entries(run, norms) if len(one.parameter.shape) >= 2 and one.parameter.root >= 0]
    found = [one for one in found if len(one.parameter.names) == 1]  # a tied one has the gradient of the last layer too
    root = min((one.parameter.root for one in found), default=-1)
    found = [one for one in found if whole or one.parameter.root == root]
    places: dict[int, int] = {}
    before = -1
    for entry in sorted(found, key=lambda one: one.parameter.parameter):
        before = order.get((entry.parameter.root, entry.parameter.module), before)
        # What is not called itself, as a part of an attention, is where its neighbour is.
        places[entry.parameter.parameter] = before
    return sorted(found, key=lambda one: (one.parameter.root, places[one.parameter.parameter], one.parameter.parameter))


def _is_lost(chain: list[Entry], start: float, limit: float) -> bool:
    """Whether the first layer's gradient is lost; with a start, whether it is after steps that were far too long."""
    if len(chain) < 3 or not all(math.isfinite(one.grad) for one in chain):
        return False
    head = max(chain[-1].grad, chain[-2].grad)
    if start > 0:
        return chain[0].grad < 1e-2 * head and chain[0].grad < 1e-4 * start
    return head > 0 and chain[0].grad < limit * head


def _stays(chains: list[Sampled], lost: list[Sampled], begin: int) -> bool:
    """Whether the first layer stands still (or its gradient was lost in the run); Adam goes on for a while without."""
    if begin == 0:
        seen = [chain for _, chain in lost if any(0 < one.grad < TINY * chain[-1].grad for one in chain)]
        return all(chain[0].ratio < TINY for _, chain in lost) and bool(seen)
    before = max(chain[0].grad for _, chain in chains[:begin] if chain)
    return before > 0 and lost[-1][1][0].grad < TINY * before


def _deep(lost: list[Sampled]) -> bool:
    """Whether it shrinks from matrix to matrix; Adam moves the first ones all the same, along noise."""
    chain = lost[-1][1]
    head = max(chain[-1].grad, chain[-2].grad)
    steps = [one.grad for one in chain if 0 < one.grad < 0.1 * head]  # the first ones may be rounded down to zero
    return len(steps) >= _DEEP and max(steps) > 100 * min(steps)


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """An optimizer of a run; as a text it is what the user's code calls it."""

    run: Run = field(repr=False, compare=False)
    number: int

    def __str__(self) -> str:
        return optimizer_variable(self.run, self.number)

    @property
    def facts(self) -> OptimizerFacts:
        """Its last table; an empty one where there is none."""
        return self.run.optimizers.get(self.number, OptimizerFacts(optimizer=self.number))

    @property
    def made(self) -> str:
        """Its name, with the line that made it, or that it was first seen from."""
        where = at_line(self.facts.file, self.facts.line)
        return f"{self}{where if self.facts.is_made_there else where.replace('(', '(first seen at ', 1)}"

    @property
    def groups(self) -> dict[int, tuple[int, GroupFacts]]:
        """For each of its parameters the index of its group, and the group."""
        return groups_of(self.run, self.number)

    @property
    def own(self) -> frozenset[int]:
        """The parameters that it has had at any time."""
        return members(self.run).get(self.number, frozenset())

    @property
    def steps(self) -> list[Stepped]:
        """Its steps."""
        return _steps(self.run).get(self.number, [])

    @property
    def samples(self) -> list[Norms]:
        """What was measured at some of its steps."""
        return _samples(self.run).get(self.number, [])

    @property
    def windows(self) -> list[Window]:
        """What happened between its steps."""
        return windows_of(self.run, self.number)

    @property
    def stepped(self) -> list[tuple[Window, Stepped]]:
        """The windows that end in a step, without those whose step calls its closure as often as it likes."""
        return [(one, one.step) for one in self.windows if one.step is not None and not by_closure(self.run, one)]

    @property
    def losses(self) -> Course:
        """How the loss went while it stepped."""
        return course(self.run, self.number)

    @property
    def lost(self) -> Lost | None:
        """The first number that is not finite, or the first such loss."""
        return lost(self.run, self.number)

    @property
    def faded(self) -> Faded | None:
        """Since when the gradients of its first layers vanish."""
        return faded(self.run, self.number)

    @property
    def rated(self) -> list[Stepped]:
        """Its steps whose learning rates are known."""
        return [step for step in self.steps if step.lrs]

    @property
    def rates(self) -> list[float]:
        """The learning rates of these, the largest of the groups each."""
        return [max(step.lrs) for step in self.rated]

    def rate_at(self, step: int) -> float:
        """The learning rate at one of its steps, the largest of the groups."""
        lrs = [max(one.lrs) for one in self.steps if one.lrs and one.number <= step + 1]
        return lrs[-1] if lrs else max((group.lr for group in self.facts.groups), default=self.facts.default_lr)

    def with_rate(self, lr: float) -> str:
        """Code that gives it another learning rate, and leaves its other settings what the user made them."""
        return f"for group in {self}.param_groups: group['lr'] = {lr:g}"


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """A scheduler of a run; as a text it is what the user's code calls it."""

    facts: SchedulerFacts
    optimizer: OptimizerView
    calls: list[Scheduled]

    def __str__(self) -> str:
        return self.facts.variable or "scheduler"

    @property
    def peak(self) -> float:
        """The highest rate that it leads to, 0 if it is not known."""
        bases = self.facts.options.get("base_lrs")
        return float(self.facts.options.get("peak") or (max(bases) if isinstance(bases, list) and bases else 0.0))


@remembered
def schedules(run: Run) -> list[ScheduleView]:
    """The schedulers, with their calls."""
    calls = grouped((one.scheduler, one) for one in run.of(Scheduled))
    return [
        ScheduleView(facts, OptimizerView(run, facts.optimizer), calls.get(number, []))
        for number, facts in run.schedulers.items()
    ]


@remembered
def left_out(run: Run) -> dict[int, LossCall]:
    """For optimizers each of whose steps follows a call of a loss, with no backward between: the first such call."""
    last: LossCall | None = None
    found: dict[int, list[LossCall | None]] = {}
    for one in run.of(LossCall, Backward, Stepped):
        if isinstance(one, Stepped):
            found.setdefault(one.optimizer, []).append(last)
        last = one if isinstance(one, LossCall) else None
    return {number: calls[0] for number, calls in found.items() if calls[0] is not None and all(calls)}


@remembered
def _steps(run: Run) -> dict[int, list[Stepped]]:
    return grouped((one.optimizer, one) for one in run.of(Stepped))


@remembered
def _samples(run: Run) -> dict[int, list[Norms]]:
    return grouped((one.optimizer, one) for one in run.of(Norms))


def optimizers(run: Run, *, most: int | None = MANY) -> list[OptimizerView]:
    """The optimizers that stepped, at most those with the most steps: meta-learning makes one for each task."""
    return [OptimizerView(run, number) for number in _busiest(run, stepping(run), most)]


def measured(run: Run) -> list[OptimizerView]:
    """The optimizers that stepped or whose steps were measured; of many, those with the most steps."""
    return [OptimizerView(run, number) for number in _busiest(run, _steps(run).keys() | _samples(run).keys(), MANY)]


def _busiest(run: Run, numbers: Iterable[int], most: int | None) -> list[int]:
    steps = _steps(run)
    return sorted(sorted(numbers, key=lambda number: (-len(steps.get(number, ())), number))[:most])
