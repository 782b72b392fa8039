"""The arguments of the verbs."""

from typing import TYPE_CHECKING, Any

import torch

from anybatch.errors import BatchError
from anybatch.units import read_budget

if TYPE_CHECKING:
    from anybatch.records.plans import Plan


def check_plan(memory: Any, plan: Any, micro_batch_size: Any) -> None:
    """Refuses what is no budget or no plan before anything is changed.

    Raises:
        BatchError: the budget is none, the plan is none, or a size is given besides.
    """
    if plan is not None:
        from anybatch.records.plans import Plan

        if not isinstance(plan, Plan):
            raise BatchError(f"plan is a {type(plan).__name__}; expected a Plan, from anybatch.plan or Plan.load")
    if micro_batch_size is not None and (memory is not None or plan is not None):
        raise BatchError(
            "micro_batch_size was given together with memory= or plan=, which choose it; leave one of them out"
        )
    if memory is not None:
        read_budget(memory)


def precision_of(plan: "Plan | None") -> torch.dtype | None:
    """The precision that a plan asks for, ``None`` for the user's own."""
    return None if plan is None else {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(plan.chosen.autocast)
