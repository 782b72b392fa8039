"""A step on a model that lies in parts proves itself on all ranks together, since none can run a micro-batch alone.

Each rank takes some samples of its own; the gradient of all of them is taken twice, once with the samples of a rank
whole and once in two parts, as two logical batches over the ranks. A rank that splits nothing takes part with
micro-batches that count nothing. All hear the same numbers, so all come to the same end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from anybatch.batch.batches import Part
from anybatch.checking.causes import explained, reason
from anybatch.checking.cuts import Cut, Cuts
from anybatch.checking.gradients import distance
from anybatch.checking.proof import CERTAIN, SMALL, until_crossed
from anybatch.checking.proving import Split
from anybatch.checking.sharedbounds import Bounds, bound_of_samples
from anybatch.checking.standins import StandIns
from anybatch.checking.trial import Trial, surroundings
from anybatch.errors import AnyBatchError
from anybatch.loss.reducing import ShortageElsewhere
from anybatch.records.certificates import Proof, Reason
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure

_NO_CUT = "a micro-batch has one sample, or the samples have no gradient"
_TRIES = 2  # once more if ranks that run other units gather everything from then on


def prove_together(split: Split) -> tuple[Proof, Reason | None]:
    """Proves that a step may split its batch; all ranks call it, whatever they split, and get the same answer."""
    task, update = split.task, split.update
    note = ""
    with surroundings():
        trial = Trial(split, task.settings.reducer)
        for _ in range(_TRIES):
            try:
                proof, why = _compared(trial, split)
                if task.cut_of_time is not None:  # each chunk gathers the weights, on all ranks at once
                    proof = proof.with_note(
                        "whether it matters where time is cut was not compared, since the model is sharded"
                    )
                return replace(proof, update=update), why
            except ShortageElsewhere as found:
                note = found.shortage.text or "the ranks run different units of the model"
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


def _compared(trial: Trial, split: Split) -> tuple[Proof, Reason | None]:
    reducer, cut, numbers = split.task.settings.reducer, _cut(split.task, split.parts), StandIns()
    if not any(one["has_cut"] for one in reducer.hear({"has_cut": cut is not None})):  # a run of no samples fails
        return Proof("undecided", note=_NO_CUT), None
    of_whole, of_parts = Bounds(), Bounds()
    whole = trial.run(cut, None if cut is None else cut.whole, numbers, bounds=of_whole)
    in_parts = trial.run(cut, None if cut is None else cut.parts, numbers, bounds=of_parts)
    heard = reducer.hear(
        {
            "distance": distance(in_parts.gradient, whole.gradient) ** 2,
            "scale": distance(whole.gradient) ** 2,
            "sizes": [] if cut is None else list(cut.sizes),
            "draws": in_parts.drew_torch or in_parts.drew_others,
            "bound": "" if cut is None else bound_of_samples(of_whole.met, of_parts.met, len(cut.sizes)),
        }
    )
    sizes: list[int] = next((one["sizes"] for one in heard if one["sizes"]), [])
    off, scale = (math.sqrt(sum(one[name] for one in heard)) for name in ("distance", "scale"))
    if not sizes or not scale:
        return Proof("undecided", note=_NO_CUT), None
    leaves, draws = (*trial.parameters, *reducer.known_leaves(trial.parameters)), any(one["draws"] for one in heard)
    difference = trial.judged(
        Cut(split.task.splittable, tuple(sizes)), leaves, off / scale, in_parts.value_error(whole), draws=draws
    )
    error, proof = difference.error, difference.proof("exact", "comparison")
    if difference.is_none:
        bound = next((one["bound"] for one in heard if one["bound"] and not draws), "")
        return until_crossed(proof, bound) if bound else (proof, None)
    if error <= CERTAIN * difference.tolerance or not math.isfinite(error) or draws:
        note = f"the gradients differ by {error:.2g}, which may be rounding or random numbers"
        return Proof("undecided", note=f"{note}, and no certificate can be made of a sharded model"), None
    return replace(proof, outcome="not exact"), explained(error, lambda: reason("in parts", "loss", {"error": error}))


def _cut(task: Task, parts: Sequence[Part]) -> Cut | None:
    if not parts or task.splittable.rows < 2 or task.splittable.obstacle is not None:
        return None
    cuts = Cuts(task.splittable, parts)
    ways = [cuts.between, cuts.inside] if cuts.largest < SMALL and not task.is_planned else [cuts.inside]
    return next((cut for way in ways for cut in way()), None)
