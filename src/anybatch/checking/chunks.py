"""Whether what a loss over time gives is the same wherever time is cut.

A few sequences run in the chunks of the step and in others, of which none has a larger graph than a chunk of a whole
micro-batch: all steps at once, or several chunks in one. What differs counts where it does in float64, too.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from anybatch.batch.batches import Part
from anybatch.checking.causes import reason, unexplained
from anybatch.checking.cuts import MOST, Cut, Cuts
from anybatch.checking.examination import opened
from anybatch.checking.failures import in_one_line, is_own
from anybatch.checking.proving import Split
from anybatch.checking.trial import Found, Trial
from anybatch.errors import AnyBatchError
from anybatch.loss.sequence import OverTime
from anybatch.memory.meter import OverBudget
from anybatch.records.certificates import Reason
from anybatch.records.proofs import Proof
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)

_APART = 1e-6  # an error in float64 that is no rounding
_APART_IN_SINGLE = 1e-2  # where the model can't run in float64


def proof_of_chunks(trial: Trial, split: Split) -> Found:
    """What a few sequences show in the chunks of a step that cuts time, and in others."""
    task = split.task
    loss, (length, total) = cast(OverTime, task.loss_fn), cast(tuple[int, float], task.cut_of_time)
    cut, other = _other_way(task, length, total, split.parts)
    note = "one sequence does not fit in a longer chunk"
    if other != length:
        try:
            in_chunks = [loss.in_chunks(one) for one in (length, other)]
            difference = trial.of_losses_alike(cut, in_chunks, in_value=loss.mode == "truncated")
            proof = difference.proof("exact", "comparison", chunks=(length, other))
            if difference.is_none:
                return proof, None
            try:
                found = trial.isolated(cut, lambda own: _found(own, loss, length, other))
            except Exception as error:
                is_other = isinstance(error, (AnyBatchError, OverBudget)) or is_out_of_memory(error)
                if loss.mode == "exact" and is_own(error) and not is_other:
                    return replace(proof, outcome="not exact"), unexplained(difference.error, error)
                raise
            if found is None:
                return replace(proof, by="certificate"), None
            shown, is_same_loss = found
            is_chosen = loss.chunk is None or task.settings.chunk_length is not None
            if loss.mode == "exact" and (is_chosen or is_same_loss):
                return replace(proof, outcome="not exact"), shown
            note = f"in chunks of {length} steps, which have another loss than those of {other}"
            logger.warning("\n    ".join((shown.message, *shown.remedies)))
            return replace(proof, note=note), None  # they may be part of the loss, as its author has given them
        except AnyBatchError as error:
            note = str(error)
        except Exception as error:  # noqa: BLE001 - the loss may run chunks of some lengths only
            note = f"in chunks of {other} steps it fails ({in_one_line(error)})"
            Failure(error).release()
    return Proof("undecided", note=f"whether it matters where time is cut is not known: {note}"), None


def _other_way(task: Task, length: int, total: float, parts: Sequence[Part]) -> tuple[Cut, int]:
    """A few rows of the largest micro-batch, and the length of chunks that take no more than this has in one."""
    batch, own = max(Cuts(task.splittable, parts).own_rows(), key=lambda one: max(map(len, one[1]), default=0))
    rows = max(own, key=len)
    fit = int(len(rows) * length // total)  # sequences that fit with all steps at once
    few = min(MOST, fit or max(1, len(rows) // 2))
    other = int(total) if fit else len(rows) // few * length
    chosen = rows[:: len(rows) // few][:few]
    return Cut(task.splittable.chosen(chosen, batch), (few,)), other if other > length else max(1, length // 2)


def _found(task: Task, loss: OverTime, length: int, other: int) -> tuple[Reason, bool] | None:
    """What makes a difference in float64, and whether the loss is the same all the same; ``None`` if nothing does."""
    with ExitStack() as stack:
        rig, _, refused = opened(replace(task, loss_fn=loss.in_chunks(length)), stack)
        if rig.stand_ins is not None:
            rig.stand_ins.held.constant = True
        whole, ran = rig.run(), rig.run(loss_fn=loss.in_chunks(other))
        error, off = ran.error(whole), ran.value_error(whole)
        least = _APART_IN_SINGLE if refused else _APART
        worst = off if loss.mode == "truncated" else max(error, off)
        if worst <= least or not math.isfinite(worst):
            return None
        evidence = {"error": worst, "loss_error": off, "length": length, "other": other}
        return reason("time" if off > least else "time of the gradient", "chunk_loss", evidence), off <= least
