"""What a run shows of one optimizer: its parameters, steps, samples, windows and losses."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from anybatch.doctor.views.courses import Course, course, groups_of
from anybatch.doctor.views.fading import Faded, faded
from anybatch.doctor.views.growing import Lost, lost
from anybatch.doctor.views.naming import at_line, optimizer_variable
from anybatch.doctor.views.windows import MANY, Window, by_closure, members, stepping, windows_of
from anybatch.records.events import Stepped
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Norms
from anybatch.records.tables import GroupFacts, OptimizerFacts


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

    def rate_at(self, step: int) -> float:
        """The learning rate at one of its steps, the largest of the groups."""
        lrs = [max(one.lrs) for one in self.steps if one.lrs and one.number <= step + 1]
        return lrs[-1] if lrs else max((group.lr for group in self.facts.groups), default=self.facts.default_lr)

    def with_rate(self, lr: float) -> str:
        """Code that gives it another learning rate, and leaves its other settings what the user made them."""
        return f"for group in {self}.param_groups: group['lr'] = {lr:g}"


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
