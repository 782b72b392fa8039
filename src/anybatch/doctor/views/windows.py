"""The events of a run between the steps of one optimizer, and which gradients each step used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anybatch.doctor.views.courses import updates
from anybatch.doctor.views.measures import gradients
from anybatch.records.events import Backward, Cleared, Clipped, Epoch, Forward, Scaler, Stepped
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall, Walk
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Norms, Written
from anybatch.records.tables import OptimizerFacts, ParameterFacts

MANY = 32
"""Optimizers of one run, of more of which less is looked at: meta-learning makes one for each task."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One backward with the sets that its record may leave to an earlier one."""

    fact: Backward  # the backward
    touched: frozenset[int] | None  # numbers of the parameters that got gradient, ``None`` where they are not known
    # those of them whose gradient an earlier step had used and nobody had cleared; ``None`` if not known
    kept: frozenset[int] | None
    forwards: int  # how many forwards with gradient were between the backward before and this one

    @property
    def spot(self) -> tuple[str, int]:
        """The user's line."""
        return self.fact.file, self.fact.line

    def reaches(self, members: frozenset[int]) -> bool:
        """Whether it gave gradient to some parameters; assumed where it is not known."""
        return bool(self.touched & members) if self.touched is not None else self.fact.touched_count > 0


@remembered
def passes(run: Run) -> list[Pass]:
    """All calls of ``backward`` of a run; calls of ``autograd.grad`` leave no gradient and are left out."""
    found: list[Pass] = []
    seen: dict[tuple[str, int], tuple[frozenset[int] | None, frozenset[int] | None]] = {}
    forwards = 0
    for one in run.facts:
        if isinstance(one, Forward):
            forwards += one.grad
        if not isinstance(one, Backward) or one.function != "backward":
            continue
        spot = (one.file, one.line)
        before = seen.get(spot, (None, None))
        touched = _resolved(one.touched, before[0], one.touched_count)
        kept = _resolved(one.kept, before[1], one.kept_count)
        if kept is None and touched is not None and one.kept_count == len(touched):
            kept = touched
        seen[spot] = (touched, kept)
        found.append(Pass(one, touched, kept, forwards))
        forwards = 0
    return found


def _resolved(recorded: tuple[int, ...] | None, before: frozenset[int] | None, count: int) -> frozenset[int] | None:
    if recorded is not None:
        return frozenset(recorded)
    if count == 0:
        return frozenset()
    return before if before is not None and len(before) == count else None


@remembered
def walked(run: Run) -> dict[int, tuple[Walk, Backward]]:
    """The graphs of losses that were gone through, each with the backward behind it, by the event of that."""
    found: dict[int, tuple[Walk, Backward]] = {}
    walk: Walk | None = None
    for one in run.of(Walk, Backward):
        if isinstance(one, Walk):
            walk = one
        elif isinstance(one, Backward) and walk is not None:
            found[one.at], walk = (walk, one), None
    return found


@remembered
def members(run: Run) -> dict[int, frozenset[int]]:
    """The parameters that each optimizer has had at any time."""
    found: dict[int, set[int]] = {}
    for one in run.of(OptimizerFacts):
        found.setdefault(one.optimizer, set()).update(*(group.parameters for group in one.groups))
    return {number: frozenset(parameters) for number, parameters in found.items()}


@remembered
def ever_touched(run: Run) -> frozenset[int]:
    """The parameters that got a gradient from any backward."""
    return frozenset().union(*(one.touched for one in passes(run) if one.touched is not None))


@remembered
def with_gradient(run: Run) -> frozenset[int]:
    """The parameters that had a gradient: from a backward, or set by the user's code and seen at a step."""
    return ever_touched(run).union(*(gradients(one) for one in run.of(Norms)))


@remembered
def written(run: Run) -> frozenset[int]:
    """The parameters whose values changed outside of the steps of optimizers that have them."""
    by_hand = (one.parameters for one in run.of(Written))
    return frozenset().union(*(one.since for one in run.of(Norms)), *by_hand)


@dataclass(slots=True)
class Window:
    """What happened between two steps of one optimizer."""

    optimizer: int  # its number
    step: Stepped | None = None  # the step that ends it; ``None`` for what comes after the last one
    skipped: bool = False  # whether a scaler left that step out because gradients had overflowed
    # of it, in order: forwards, clearing that concerns the optimizer, clipping, scaler, epochs
    events: list[Fact] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)  # the backwards that gave gradient to its parameters
    # of these, the ones after the last clearing: what the step used of this window
    used: list[Pass] = field(default_factory=list)
    clears: int = 0  # how many clearings were between the first backward and the step

    @property
    def borders(self) -> int:
        """How many ends of a ``DataLoader`` lie between its backwards, or behind the last one."""
        if not self.passes:
            return 0
        first = self.passes[0].fact.at
        return sum(isinstance(one, Epoch) and one.ended and one.at > first for one in self.events)

    @property
    def of_one_line(self) -> bool:
        """Whether its backwards were all called from one line, each after a forward of its own."""
        return len({one.spot for one in self.passes}) <= 1 and all(one.forwards > 0 for one in self.passes[1:])


@remembered
def windows_of(run: Run, optimizer: int) -> list[Window]:
    """Cuts a run at the steps of one optimizer, those left out by a scaler included.

    The last window has no step, and is left out where no backward is in it.
    """
    every = members(run)
    own = every.get(optimizer, frozenset())
    passed = by_event(run)
    found: list[Window] = []
    current = Window(optimizer)
    for one in _within(run, optimizer):
        if isinstance(one, Backward):
            reached = passed.get(id(one))
            if reached is not None and reached.reaches(own):
                current.events.append(one)
                current.passes.append(reached)
                current.used.append(reached)
        elif isinstance(one, Cleared):
            if concerns(run, one, optimizer, every):
                current.events.append(one)
                current.clears += bool(current.passes)
                current.used.clear()
        elif isinstance(one, Stepped) and one.optimizer == optimizer:
            current.step = one
            found.append(current)
            current = Window(optimizer)
        elif isinstance(one, Scaler) and one.call == "step" and one.optimizer == optimizer and one.skipped:
            if current.passes or not found:
                current.skipped = True
                found.append(current)
                current = Window(optimizer)
            else:
                found[-1].skipped = True
        elif isinstance(one, Forward | Clipped | Epoch | Scaler):
            current.events.append(one)
    if current.passes:
        found.append(current)
    return found


@remembered
def by_event(run: Run) -> Mapping[int, Pass]:
    """The backwards by the ``id`` of their facts."""
    return {id(one.fact): one for one in passes(run)}


def _within(run: Run, optimizer: int) -> Sequence[Fact]:
    """The facts that an optimizer's windows are cut from; where there are many, those up to its last step."""
    if len(stepping(run)) <= MANY:
        return run.facts
    begin, end = _lives(run).get(optimizer, (0, 0))
    return run.facts[begin:end]


@remembered
def _lives(run: Run) -> dict[int, tuple[int, int]]:
    """For each optimizer where its facts begin, behind the step before its first one, and end, with its last step."""
    found: dict[int, tuple[int, int]] = {}
    before = 0
    for place, one in enumerate(run.facts, 1):
        if isinstance(one, Stepped):
            found[one.optimizer] = found.get(one.optimizer, (before, 0))[0], place
            before = place
    return found


def concerns(run: Run, clear: Cleared, optimizer: int, every: Mapping[int, frozenset[int]]) -> bool:
    """Whether a clearing took away gradients of an optimizer's parameters."""
    own = every.get(optimizer, frozenset())
    if clear.by == "optimizer":
        if clear.number == optimizer or clear.number < 0:
            return True
        return bool(every.get(clear.number, frozenset()) & own)
    if clear.by == "module" and clear.number >= 0:
        return any(run.parameters[one].root == clear.number for one in own if one in run.parameters)
    return True


@remembered
def stepping(run: Run) -> list[int]:
    """The numbers of the optimizers that stepped."""
    return sorted({one.optimizer for one in run.of(Stepped)})


@remembered
def trained_on(run: Run) -> frozenset[int]:
    """The forwards whose backward a step used, by the number of their event.

    Others were to evaluate, or for gradients of something else, as in adversarial training.
    """
    windows = [window for number in stepping(run) for window in windows_of(run, number) if window.step is not None]
    used = {one.fact.at for window in windows for one in window.used}
    used |= set() if run.optimizers else set(updates(run))  # by hand
    found, waiting = set[int](), list[int]()
    for one in run.of(Forward, Backward, Stepped):
        if isinstance(one, Forward):
            waiting += [one.at] * one.grad
        else:
            found.update(waiting if one.at in used else ())
            waiting = []  # what ran before a step is mostly not gone back through after it
    return frozenset(found)


def usual_count(found: list[Window], least: int = 3) -> int:
    """How many backwards a step usually uses, 0 where there is no such number.

    At least ``least`` windows have that many: in a row, or all that lie within one epoch, or most of all.
    """
    whole = [one for one in found if one.step is not None or one.skipped]
    counts = [len(one.used) for one in whole]
    rows = {
        counts[start]
        for start in range(len(counts) - least + 1)
        if len(set(counts[start : start + least])) == 1
    }  # fmt: skip
    if rows:
        return max(rows, key=counts.count)
    within = [len(one.used) for one in whole if not one.borders]
    if len(within) >= least and len(set(within)) == 1:
        return within[0]
    common = max(counts, key=counts.count, default=0)
    return common if counts.count(common) >= max(least, 0.6 * len(counts)) else 0


def by_closure(run: Run, window: Window) -> bool:
    """Whether a window ends in a step that calls its closure as often as it likes."""
    facts = run.optimizers.get(window.optimizer)
    own = facts is not None and (facts.cls == "LBFGS" or not facts.is_torchs)
    return window.step is not None and window.step.closure and own


@remembered
def optimized(run: Run) -> frozenset[int]:
    """The parameters that any optimizer has had at any time."""
    return frozenset().union(*members(run).values())


def trained_forwards(run: Run, root: int) -> list[Forward]:
    """The forwards of a root with gradient that a backward into its optimized parameters followed."""
    return _trained_forwards(run).get(root, [])


@remembered
def _trained_forwards(run: Run) -> dict[int, list[Forward]]:
    """The same of all roots, which may be thousands."""
    wanted = optimized(run)
    if not run.optimizers and updates(run):  # by hand
        wanted = frozenset(number for number, one in run.parameters.items() if one.requires_grad)
    own = grouped((run.parameters[number].root, number) for number in wanted & run.parameters.keys())
    members_of = {root: frozenset(numbers) for root, numbers in own.items()}
    passed, found = by_event(run), dict[int, list[Forward]]()
    waiting: dict[int, list[Forward]] = {}
    for one in run.facts:
        if isinstance(one, Forward) and one.grad and not one.inference:
            waiting.setdefault(one.root, []).append(one)
        elif isinstance(one, Backward) and id(one) in passed:
            for root, forwards in waiting.items():
                if passed[id(one)].reaches(members_of.get(root, frozenset())):
                    found.setdefault(root, []).extend(forwards)
            waiting = {}
    return found


@remembered
def forwards_by_root(run: Run) -> dict[int, list[Forward]]:
    """The forwards of each root."""
    return grouped((one.root, one) for one in run.of(Forward))


@remembered
def parameters_by_root(run: Run) -> dict[int, list[ParameterFacts]]:
    """The parameters of each root, as they were recorded last."""
    return grouped((one.root, one) for one in run.parameters.values())


@remembered
def _loss_calls(run: Run) -> dict[int, LossCall]:
    return {one.at: one for one in run.of(LossCall)}


def calls_of(run: Run, backward: Backward) -> list[LossCall]:
    """The calls of loss functions that a backward was of."""
    every = _loss_calls(run)
    return [every[number] for number in backward.loss_calls if number in every]
