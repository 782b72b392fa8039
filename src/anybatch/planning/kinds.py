"""Which planner a kind of loss asks for."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from anybatch.errors import BatchError
from anybatch.gradient.coupling import Coupled
from anybatch.gradient.reducing import Reducer
from anybatch.gradient.sequence import OverTime
from anybatch.planning.coupledplanner import CoupledPlanner
from anybatch.planning.sequenceplanner import SequencePlanner
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import Times
from anybatch.records.plans import Plan, PlanRow
from anybatch.tensors.batches import Splittable


class AnyPlanner(Protocol):
    """What follows a plan asks of what makes it; see ``Planner``."""

    subject: Subject
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


def refuse_joined(loss_fn: Any, reducer: Reducer) -> None:
    """Refuses a plan for a loss that sees the samples of other processes, whose memory a plan does not know.

    Raises:
        BatchError: it does.
    """
    if isinstance(loss_fn, Coupled) and loss_fn.joins(reducer):
        raise BatchError(
            "memory= or plan= was given with Coupled over several ranks; the loss sees the samples of all ranks, whose "
            "memory a plan of one rank does not know. Pass micro_batch_size=, or let each rank's loss see its own "
            "samples: Coupled(..., gather=False)"
        )
