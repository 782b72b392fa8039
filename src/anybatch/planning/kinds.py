"""Which planner a kind of loss asks for."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from anybatch.gradient.coupling import Coupled
from anybatch.gradient.overtime import OverTime
from anybatch.planning.coupledplanner import CoupledPlanner
from anybatch.planning.sequenceplanner import SequencePlanner
from anybatch.planning.timing import Times
from anybatch.records.plans import Plan, PlanRow
from anybatch.tensors.batches import Splittable


class AnyPlanner(Protocol):
    """What follows a plan asks of what makes it; see ``Planner``."""

    rows: int

    @property
    def times(self) -> list[Times | None]:
        """What was measured, for each precision."""

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none."""

    def outgrown_parts(self, splittable: Splittable, limit: float | None, row: PlanRow) -> str:
        """Says which micro-batch of raw samples would need more than the budget; empty if none would."""

    def plan(self, budget: int, *, race: bool = True) -> Plan:
        """Finds the fastest way within a budget."""


def planner_for(loss_fn: Any, usual: Callable[..., AnyPlanner]) -> Callable[..., AnyPlanner]:
    """The planner of a loss.

    Args:
        loss_fn: the user's.
        usual: the planner of a loss that adds up over micro-batches.
    """
    if isinstance(loss_fn, OverTime):
        return functools.partial(SequencePlanner, usual=usual)
    return CoupledPlanner if isinstance(loss_fn, Coupled) else usual
