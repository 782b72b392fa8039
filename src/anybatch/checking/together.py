"""A step on a model that lies in parts proves itself on all ranks together, since none can run a micro-batch alone.

Each rank takes some samples of its own; the gradient of all of them is taken twice, once with the samples of a rank
whole and once in two parts, as two logical batches over the ranks. A rank that splits nothing takes part with
micro-batches that count nothing. All hear the same numbers, so all come to the same end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from anybatch.batch.batches import Part
from anybatch.checking.causes import reason, unexplained
from anybatch.checking.cuts import Cut, cuts_between, cuts_inside
from anybatch.checking.proof import CERTAIN, SMALL, until_crossed
from anybatch.checking.sharedbounds import Bounds, bound_of_samples
from anybatch.checking.standins import StandIns
from anybatch.checking.trial import Optimizations, Trial, surroundings
from anybatch.errors import AnyBatchError
from anybatch.loss.reducing import ShortageElsewhere
from anybatch.records.certificates import Reason
from anybatch.records.proofs import Proof
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure

_TRIES = 2  # once more if ranks that run other units gather everything from then on


def prove_together(
    task: Task,
    parts: Sequence[Part],
    parameters: Sequence[torch.Tensor],
    optimizations: Optimizations,
    update: int | None,
) -> tuple[Proof, Reason | None]:
    """Proves that a step may split its batch; all ranks call it, whatever they split, and get the same answer."""
    note = ""
    with surroundings():
        trial = Trial(task, parameters, optimizations, task.settings.reducer)
        for _ in range(_TRIES):
            try:
                proof, why = _compared(trial, task, parts)
                if task.cut_of_time is not None:  # each chunk gathers the weights, on all ranks at once
                    note = "where time is cut was not compared, since the model lies in parts"
                    proof = replace(proof, note="; ".join(filter(None, (proof.note, note))))
                return replace(proof, update=update), why
            except ShortageElsewhere as found:
                note = found.shortage.text or "the ranks run other units of the model"
                if found.shortage.is_memory:
                    break
            except AnyBatchError:
                raise
            except Exception as error:  # noqa: BLE001 - the loss may run micro-batches of one size only
                failure = Failure(error)
                failure.release()
                reducer = task.settings.reducer
                note = reducer.agree(0, is_final=False, where="the proof", text=failure.text or "memory ran out").text
                break
    return Proof("undecided", update=update, note=f"some samples can't be run by themselves ({note})"), None


def _compared(trial: Trial, task: Task, parts: Sequence[Part]) -> tuple[Proof, Reason | None]:
    reducer, cut, numbers = task.settings.reducer, _cut(task, parts), StandIns()
    of_whole, of_parts = Bounds(), Bounds()
    whole = trial.run(cut, None if cut is None else cut.whole, numbers, bounds=of_whole)
    split = trial.run(cut, None if cut is None else cut.parts, numbers, bounds=of_parts)
    heard = reducer.hear(
        {
            "distance": split.gradient.distance(whole.gradient) ** 2,
            "scale": whole.gradient.distance() ** 2,
            "sizes": [] if cut is None else list(cut.sizes),
            "draws": split.drew_torch or split.drew_others,
            "bound": "" if cut is None else bound_of_samples(of_whole.met, of_parts.met, len(cut.sizes)),
        }
    )
    sizes: list[int] = next((one["sizes"] for one in heard if one["sizes"]), [])
    distance, scale = (math.sqrt(sum(one[name] for one in heard)) for name in ("distance", "scale"))
    if not sizes or not scale:
        return Proof("undecided", note="a micro-batch has one sample, or the samples have no gradient"), None
    leaves, draws = (*trial.parameters, *reducer.known_leaves(trial.parameters)), any(one["draws"] for one in heard)
    difference = trial.judged(leaves, distance / scale, split.value_error(whole), draws=draws)
    error, tolerance, dtype = difference.error, difference.tolerance, str(difference.dtype).removeprefix("torch.")
    proof = Proof("exact", "comparison", sum(sizes), tuple(sizes), error, tolerance, dtype)
    if difference.is_none:
        bound = next((one["bound"] for one in heard if one["bound"] and not draws), "")
        return until_crossed(proof, bound) if bound else (proof, None)
    if error <= CERTAIN * tolerance or not math.isfinite(error) or draws:
        note = f"the gradients differ by {error:.2g}, which may be rounding or random numbers"
        return Proof("undecided", note=f"{note}, and no certificate can be made of a model in parts"), None
    try:
        told = reason("in parts", "loss", {"error": error})
    except Exception as failure:  # noqa: BLE001 - what was seen is not lost where it can't be worded
        told = unexplained(error, failure)
    return replace(proof, outcome="not exact"), told


def _cut(task: Task, parts: Sequence[Part]) -> Cut | None:
    if len(parts) < 2 or task.splittable.obstacle is not None:
        return None
    is_small = max(len(part.samples) for part in parts) < SMALL
    ways = [cuts_between, cuts_inside] if is_small and not task.is_planned else [cuts_inside]
    return next((cut for cuts in ways for cut in cuts(task.splittable, parts)), None)
