"""What a step holds from operation to operation as it was planned, and with the whole batch at once."""

import logging
from typing import Any

from anybatch.errors import AnyBatchError
from anybatch.interception import unobserved
from anybatch.loss.coupling import Coupled
from anybatch.loss.sequence import OverTime
from anybatch.memory.measuring import LinedRecording
from anybatch.planning.blocks import blocks_of
from anybatch.planning.entrance import subject_of
from anybatch.planning.memorytrace import NotFake, Tracer
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import left_as_it_was
from anybatch.planning.subjects import Subject
from anybatch.records.memory import INPUTS, OPTIMIZER, Timeline
from anybatch.records.plans import Plan, PlanRow
from anybatch.tensors.dispatch import without_user_modes

logger = logging.getLogger(__name__)


def timelines(
    plan: Plan, model: Any, loss_fn: Any, batch: Any, *, device: Any = None, **options: Any
) -> dict[str, Timeline]:
    """Traces a forward and a backward of one micro-batch on fake tensors, before and after planning.

    The optimizer's step is no part of it; its state, and the batch, are there all the time. The arguments are those of
    ``anybatch.plan``. The timelines are by what is written over them; there are none of a step that does not run on
    fakes.
    """
    if isinstance(loss_fn, (Coupled, OverTime)):
        return {}
    with unobserved(), without_user_modes():
        subject, _ = subject_of(batch, device, model=model, loss_fn=loss_fn, memory=plan.budget, **options)
        if subject.is_recurrent or subject.is_scripted:
            return {}
        beside = {kind: count for kind in (OPTIMIZER, INPUTS) if (count := plan.at_peak.get(kind, 0))}
        whole = PlanRow(plan.samples, 1, autocast=plan.chosen.autocast)
        planned = f"as planned: a micro-batch of {plan.micro_batch_size:g}"
        ways = {"before: the whole batch at once": whole} | ({planned: plan.chosen} if plan.chosen != whole else {})
        with left_as_it_was(subject):
            try:
                return {name: _traced(subject, row, beside) for name, row in ways.items()}
            except (AnyBatchError, NotFake) as error:
                logger.info("no timeline of the step: %s", error)
                return {}


def _traced(subject: Subject, row: PlanRow, beside: dict[str, int]) -> Timeline:
    made: list[LinedRecording] = []

    def recording(**given: Any) -> LinedRecording:
        made.append(LinedRecording(**given))
        return made[-1]

    tracer = Tracer(subject, blocks_of(subject.model, subject.blocks), recording, is_fake=True, may_probe=False)
    part = max(subject.splittable.plan(row.micro_batch_size), key=lambda one: len(one.samples))
    tracer.trace([part], Recipe.of(row), split=row.micro_batches > 1)
    return made[-1].timeline(beside=beside)
