"""Whether a step would take the micro-batches that a plan lists, which few samples show."""

import contextlib
import logging
from typing import Any

from anybatch.checking.proving import Proofs
from anybatch.errors import NotSplittable
from anybatch.interception import gradients_aside
from anybatch.loss.losses import InPieces
from anybatch.options import Verify
from anybatch.planning.running import undisturbed
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan
from anybatch.tensors.dispatch import without_user_modes
from anybatch.update.passes import Task
from anybatch.update.transaction import Snapshot

logger = logging.getLogger(__name__)


def split_of(found: Plan, loss_fn: Any) -> float:
    """The size of the first micro-batches that a plan lists, which have to be proved; 0 where it lists none.

    Of a loss in pieces, which has no plan of the whole batch instead, they are those that it chose.
    """
    rows = (found.chosen,) if isinstance(loss_fn, InPieces) else (found.chosen, *found.alternatives)
    return next((row.micro_batch_size for row in rows if row.micro_batches > 1), 0.0)


def half_of(subject: Subject) -> float:
    """The size of two micro-batches, to prove where no plan says another one; 0 where the batch is not split."""
    splittable = subject.splittable
    if not subject.splits or splittable.rows < 2:
        return 0.0
    return splittable.largest / 2 if splittable.has_costs else splittable.largest // 2


def refusal_of(subject: Subject, size: float, verify: Verify) -> NotSplittable | None:
    """Why a step would refuse micro-batches of a size, as few samples show; ``None`` where none do."""
    settings, parameters = subject.settings, [subject.parameters[place] for place in subject.wanted]
    if settings.reducer.is_shared:  # which prove it together
        return None
    try:
        with without_user_modes(), gradients_aside(), undisturbed(subject, is_fake=True):
            before = Snapshot(subject.roots, None, subject.loss_fn)
            parts, given = subject.splittable.plan(size, oversized="alone"), (subject.count, settings)
            task = Task(
                subject.model, subject.loss_fn, *given, subject.batch_norm, subject.splittable, size, "backward"
            )
            Proofs(verify).look(task, parts, parameters, contextlib.nullcontext, before)
    except NotSplittable as error:
        return error
    except Exception as error:  # noqa: BLE001 - the plan is there already, and the step will show it
        logger.info("the split is not proved (%s: %.200s)", type(error).__name__, error)
    return None
