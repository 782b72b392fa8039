"""A budget and a plan as the user gave them."""

from typing import Any

import torch

from anybatch.errors import BatchError
from anybatch.planning.devices import Target, budget_of
from anybatch.records.plans import Plan


def check_plan(memory: Any, plan: Any, micro_batch_size: Any) -> None:
    """Refuses what is no budget or no plan before anything is changed.

    Raises:
        BatchError: the budget is none, the plan is none, or a size is given besides.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise BatchError(f"plan is a {type(plan).__name__}; expected a Plan, from anybatch.plan or Plan.load")
    if micro_batch_size is not None and (memory is not None or plan is not None):
        raise BatchError(
            "micro_batch_size was given together with memory= or plan=, which choose it; leave one of them out"
        )
    if memory is not None and not (isinstance(memory, float) or memory == "free"):
        budget_of(memory, Target("", "cpu", 0, True), 0)
    elif isinstance(memory, float) and not 0 < memory <= 1:
        raise BatchError(f"memory={memory!r}; a float is a share of the device, above 0 and at most 1.0")


def precision_of(plan: Plan | None) -> torch.dtype | None:
    """The precision that a plan asks for, ``None`` for the user's own."""
    return None if plan is None else {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(plan.chosen.autocast)
