"""A step proves itself: some samples of the first batch that is split run whole, and again as two parts.

Both run as the step would run them, but that random numbers belong to the samples and that nothing is left of it. Where
the two gradients are not equal within rounding, the certificate of ``anybatch.check`` decides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, islice, repeat
from typing import NamedTuple

import torch

from anybatch.checking.causes import COUPLED, WHOLE, more, seeded, unexplained
from anybatch.checking.causes import reason as worded
from anybatch.checking.chunks import proof_of_chunks
from anybatch.checking.counts import OtherCounts
from anybatch.checking.cuts import MOST, Cut, Cuts, placed_one_by_one
from anybatch.checking.examination import later_state
from anybatch.checking.groups import another_size, in_parts_of, is_general, whole_groups
from anybatch.checking.proving import Split
from anybatch.checking.searches import misplaced, written_weights
from anybatch.checking.state import shown_iterators
from anybatch.checking.trial import Difference, Found, Trial, surroundings, tolerated
from anybatch.checking.visits import callers_seen
from anybatch.checking.wording import how_far, in_one_line, is_own
from anybatch.errors import AnyBatchError, LossError, NotSplittable
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import InPieces, as_coupled
from anybatch.memory.meter import OverBudget, Recording
from anybatch.records.certificates import Certificate, Proof, Reason
from anybatch.tensors.modules import is_scripted
from anybatch.tensors.precision import LOW_PRECISION
from anybatch.update.batchnorm import coupling_modules
from anybatch.update.refusals import Verb, without_statistics
from anybatch.update.transaction import Failure, is_out_of_memory

CERTAIN = 128
"""Times the tolerance from which a difference is no rounding, also where no certificate can be made."""
SMALL = 4
"""Samples of a micro-batch, below which two of them are compared rather than two parts of one."""
_IN_DOUBT = 0.1  # the error up to which low precision within a model may be all there is to it
_ANY = 12  # cuts of any groups: a mean over other items may by chance be the same in a few
_AGAIN = 2  # the same where other batches have shown it
_TURNS = 2  # more cuts by which other counts are told from the step's own
_APART = 0.01  # the error of two losses that is none of rounding
_TIMES = 8  # micro-batches at most whose losses are compared at once
_CERTIFIED = 32  # samples of a certificate, among which another loss is not by chance a mean over something
_ANEW = (
    "torch draws random numbers that belong to no sample, such as which layer to drop: once per micro-batch, but "
    "only once for the whole batch; draw them before the step and pass them as data, or run the whole batch at "
    "once"
)
_OTHERS = (
    "NumPy, Python or a generator of your own draws anew in each micro-batch: just as good for what is drawn per "
    "sample; draw anything that is drawn once per batch before the step"
)
_MEET = {  # by whether they do
    None: "these numbers may mix samples with others of the batch, as np.random.permutation does, which can't be "
    "told here from numbers drawn per sample",
    False: "these numbers were not seen to mix samples, so each micro-batch just draws its own",
}
_UNDECIDED = ("random", "not-finite", "fails", "refused")
_BY_VERB: dict[Verb | None, dict[str, str]] = {  # remedies that are worded for TrainStep
    "backward": {
        WHOLE: "anybatch.backward(model, loss_fn, batch)  # no micro_batch_size: the whole batch at once",
    },
    None: {
        WHOLE: "one batch for each update, without micro_batch_size= and memory=  # the whole batch at once",
        COUPLED: "anybatch.TrainStep(model, anybatch.Coupled(encode, loss), optimizer)  # in a loop of your own: exact",
    },
}

Way = Callable[[int], Iterator[Cut]]  # to cut so many samples at most
Compared = Iterator[Difference | str]


class Seen(NamedTuple):
    """What was seen of a program while its split was proved."""

    has_hooks: bool = False  # whether hooks or functions of the user's own may change gradients, which no value shows
    ranks: bool = False  # whether samples are put in an order, so that more of them may show something else
    room: int = 0  # bytes that samples with their gradients have taken
    takes_hooks: bool = False  # whether a hook on the model is compiled with nothing


def prove(
    split: Split, known: Proof | None = None, others: OtherCounts | None = None
) -> tuple[Proof, Reason | None, Seen] | None:
    """Proves that a step may split its batch.

    Args:
        known: what was proved of another batch, and may hold for this one.
        others: counts that no proof so far has told from the step's own, in which it is noted what this one does.

    Returns:
        What was found, the reason where it is not exact, or may not stay so, and what was seen of the program; ``None``
        where the step is about to refuse the split.
    """
    task, update = split.task, split.update
    if task.batch_norm == "refuse" and coupling_modules(*task.modules):
        return None
    if task.batch_norm == "ghost" and without_statistics(coupling_modules(*task.modules)):
        note = "BatchNorm without running statistics sees different samples"
        return Proof("undecided", update=update, note=note), None, Seen()
    with surroundings(), callers_seen(task.model) as takes_hooks:
        trial = Trial(split)
        over_time = None if task.cut_of_time is None else proof_of_chunks(trial, split)
        if over_time is not None and (over_time[0].outcome == "not exact" or len(split.parts) < 2):
            return replace(over_time[0], update=update), over_time[1], Seen()
        prover = _Prover(trial, split)
        proof, reason = prover.shown(known)
        if others is not None and proof.exact and reason is None and proof.group == 1:
            proof, reason = prover.by_count(others, proof.unit) or (proof, reason)
        if proof.exact and reason is None and known is None and (reason := prover.later()) is not None:
            proof = proof.with_note(f"as long as `{reason.where}` makes no difference")
        if proof.exact and trial.draws_elsewhere:
            proof = proof.with_note(_OTHERS)
        if proof.exact and trial.draws_shared:
            proof = proof.with_note(_ANEW)
        if prover.is_of_now:
            proof = proof.with_note(
                "what starts later, such as a counter that is read then, needs more, and was not seen"
            )
    if over_time is not None:
        proof = replace(proof.with_note(over_time[0].note), chunks=() if reason else over_time[0].chunks)
    if proof.exact and reason is None and prover.bound:
        proof, reason = until_crossed(proof, prover.bound)
    if proof.exact and reason is None and over_time is not None:
        reason = over_time[1]  # chunks that may be part of the loss, of which a warning tells
    return replace(proof, update=update), reason, Seen(trial.has_hooks, trial.ranks, trial.room, takes_hooks())


def prove_among_many(split: Split) -> Found | None:
    """Whether the losses of more micro-batches show what those of two do not; ``None`` if not."""
    with surroundings():
        return _Prover(Trial(split), split).among_many()


def until_crossed(proof: Proof, bound: str) -> tuple[Proof, Reason]:
    """What is said of a split that is exact until a micro-batch crosses a bound."""
    note = f"as long as no micro-batch crosses the bound of {bound}"
    return replace(proof, note=note), worded("bound", evidence={"operation": bound})


class _Prover:
    """Compares cuts of a logical batch until one shows what the split does."""

    def __init__(self, trial: Trial, split: Split) -> None:
        self.bound = ""  # the operation that bounds what the samples give together; ``""`` for none
        self._trial, self._split, self._task, self._parts = trial, split, split.task, split.parts
        self.is_of_now = False  # whether there was no room to see what begins later
        self._is_of_torch = False  # whether a part can't be run, and not because something is refused
        self._rows = [part.samples for part in self._parts]
        self._cuts = Cuts(self._task.splittable, self._parts)
        self._times = 0  # micro-batches whose losses there is room for
        self._exact: list[Cut] = []  # the cuts whose gradients were found to be the same

    def shown(self, known: Proof | None) -> Found:
        """What is found; where the user's program fails in a run of its own, that it can't be told."""
        try:
            group = 1 if known is None else known.group
            return (self.in_groups((group,), again=_AGAIN) if group > 1 else None) or self.found()
        except Exception as error:
            if isinstance(error, AnyBatchError) or is_out_of_memory(error):
                raise
            note = f"the program fails when some samples run again ({in_one_line(error)})"
            Failure(error).release()
        return Proof("undecided", note=note), None

    def found(self) -> Found:
        """What some samples show; under a plan also more of them, for which no outputs are kept."""
        found = self._moved()
        coupled = as_coupled(self._task.loss_fn)
        if coupled is not None and coupled.row_block is not None and found[0].exact and found[1] is None:
            return self._in_blocks(coupled) or found
        if not self._task.is_planned or not found[0].exact or found[1] is not None or found[0].group > 1:
            return found
        many = self.among_many()
        note = (
            "" if self._times > 1 else "the loss of two whole micro-batches does not fit in memory, and was not checked"
        )
        return many or (found[0].with_note(note), None)

    def _moved(self) -> Found:
        """What is shown as the weights are; where some are written to, with those moved, and with hooks, louder."""
        found, trial = self._found(), self._trial
        is_plain = not isinstance(self._task.loss_fn, InPieces) and as_coupled(self._task.loss_fn) is None
        others: list[Callable[[], AbstractContextManager[None]]] = [trial.stirred] if trial.written else []
        others += [trial.louder] if is_plain and self._task.settings.autocast is None and trial.has_hooks else []
        for other in others if found[0].exact and found[1] is None else ():
            with other():
                shown = self._found()
            if shown[1] is not None:
                return shown
        return found

    def _found(self) -> Found:
        """What a cut of one micro-batch, or of two, shows; what the losses say where a plan has room for no more."""
        inside, between = self._cuts.inside, self._cuts.between
        ways: list[Way] = [inside]
        if not self._task.is_planned:  # two micro-batches at once take more than a plan has room for
            ways = [between, inside] if self._cuts.largest < SMALL else [inside, between]
            if 1 < self._cuts.largest < SMALL:  # a last micro-batch may be smaller in another batch
                ways[:0] = [lambda _: self._cuts.of_groups(0, group=self._cuts.largest)]
        notes = []
        for cuts in ways:
            found = None
            for turn, tried in enumerate(self._compared(cuts)):
                if isinstance(tried, str):
                    notes.append(tried)
                    break
                proof, reason = self._judged(cuts, turn, tried)
                if found is None or reason is not None:
                    found = proof, reason
                if reason is not None or proof.by == "certificate":
                    break
            if notes and (found is None or found[1] is None):
                found = self.in_groups(range(2, self._cuts.largest + 1)) or found
            if found is not None:
                if found[1] is not None:
                    return found
                if found[0].exact and cuts is not inside:  # what smaller micro-batches give was not seen
                    whole = replace(found[0], unit=self._cuts.largest)
                    found = (whole if whole.holds_for(self._rows) else found[0]), None
                return self._as_split(found)
        uncut = self._task.splittable.obstacle
        if self._task.is_planned and uncut is None and not notes:
            return self._by_losses()
        if self._is_of_torch and uncut is None and not self._task.is_planned:
            trial, split = self._trial, self._split
            other = self._uncut() or in_parts_of(trial, split) or another_size(trial, split) or self._carried()
            if other is not None:
                return other
        alone = "a micro-batch has one sample" if uncut is None else f"the batch can't be split: {uncut}"
        return self._as_split((Proof("undecided", note=next(iter(notes), alone)), None))

    def _uncut(self) -> Found | None:
        """Whether a part runs, and adds up to the whole, once one leaf is not cut, or elsewhere; or runs, uncut."""
        runs: list[Found] = []
        for label, placed, other in placed_one_by_one(self._task.splittable):
            rows = min(3, other.rows)
            with tolerated():  # it may be another leaf
                cut = Cut(other.chosen(range(rows)), (rows - 1, 1))
                found = self._trial.difference(cut, in_single=False)
                if rows < 2 or not math.isfinite(found.value_error) or self._trial.is_the_same(cut):
                    continue  # what is no longer cut may be all the data, or need what is cut whole as well
                if None not in placed.values() and not found.is_none:
                    continue
                told = misplaced(label, placed, found.error, self._task.splittable.rows)
                runs.append((Proof("not exact", "comparison", rows, cut.sizes), told))
                if found.is_none:
                    return runs[-1]
        return runs[0] if len(runs) == 1 else None

    def _carried(self) -> Found | None:
        """Whether micro-batches that can't be cut give something else one after the other than in another order."""
        with tolerated():  # they may be of unlike sizes
            cut = self._cuts.as_split()
            difference = None if cut is None else self._trial.carries(cut)
            if difference is not None and math.isfinite(difference.error) and not difference.is_none:
                proof = difference.proof("not exact", "comparison")
                return proof, worded(
                    "one size", "model", {"error": difference.error, "order": True}, size=difference.cut.sizes[0]
                )
        return None

    def _as_split(self, found: Found, size: int | None = None) -> Found:
        """The same, unless the losses of whole micro-batches of the step show what those of few samples do not."""
        if isinstance(self._task.loss_fn, InPieces) or any(map(is_scripted, self._task.every_module)):
            return found
        is_larger = False
        try:
            is_small = self._cuts.largest < SMALL and not self._task.is_planned
            is_open, is_free = not found[0].exact, found[0].exact and not found[0].note
            cut = self._cuts.as_split(MOST if is_small else 0, is_free=is_free, size=size)
            difference = None if cut is None else self._trial.of_losses_beside(cut)
            if difference is None or not math.isfinite(difference.value_error):
                return found  # nothing counts, or is a number
            if difference.is_none:
                return (difference.proof("exact", "losses", note=found[0].note), None) if is_open else found
            if is_open:
                self._trial.run(difference.cut, difference.cut.parts)  # what fails there says why in the step itself
            proof, reason = self._decided(difference)
            if reason is None or (is_open and math.isinf(proof.error)):
                return found
            if proof.by == "certificate" or "failed" in reason.evidence:
                return proof, reason
            if is_open and difference.error > _APART:  # less may be rounding, of values near nothing
                return proof, worded("unexplained", "loss", {"error": difference.error})
            return found
        except OverBudget as error:
            is_larger = is_free and size is None  # than what fitted with its gradient
            Failure(error).release()
        except Exception as error:  # noqa: BLE001 - rows may not be picked, a loss may differentiate, memory run out
            Failure(error).release()
        return self._as_split(found, found[0].samples // 2) if is_larger else found

    def _in_blocks(self, coupled: Coupled) -> Found | None:
        """What a loss of a few rows at a time is for two blocks and for one; ``None`` if the same, or not known."""
        with tolerated():  # the loss may take blocks of some sizes only
            for cut in islice(self._cuts.inside(), 1):
                rows = sum(cut.sizes)
                halves, whole = (Coupled(coupled.encode, coupled.loss, row_block=n) for n in (rows // 2, rows))
                difference = self._trial.of_losses_alike(cut, (halves, whole))
                if not difference.is_none:
                    proof, reason = self._closed(difference, partial(self._by_rows, difference, halves))
                    return None if reason is None else (proof, reason)
        return None

    def _by_rows(self, difference: Difference, halves: Coupled) -> Found:
        certificate = self._trial.certificate(difference.cut, halves)
        reason = next((one for one in certificate.reasons if one.code == "rows"), None)
        return difference.proof("not exact", "certificate", certificate), reason

    def later(self) -> Reason | None:
        """What each micro-batch moves, and makes a difference at another value only."""
        with tolerated():  # the model may be one that can't run so
            if self._trial.counts or self._trial.has_state:
                most = 2 if self._task.is_planned else MOST
                for cut in islice(self._cuts.inside(most), 1):
                    try:
                        # Under a plan in the room that some samples have taken with their gradient.
                        with Recording(limit=self._trial.room) if self._task.is_planned else nullcontext():
                            return self._trial.isolated(cut, later_state)
                    except OverBudget:
                        self.is_of_now = True
                        raise
        return None

    def by_count(self, others: OtherCounts, unit: int) -> Found | None:
        """What samples show that another count would weigh otherwise, which gave the same in those compared so far."""
        most = min(MOST, self._cuts.largest) if self._task.is_planned else MOST
        task = replace(self._task, splittable=self._task.splittable.collated_from_copies())
        with tolerated():  # a user's count may take no such batch
            for turn in count():
                with self._trial.undisturbed():
                    cut = others.look(task, self._parts, self._exact, most, unit)
                if cut is None or turn == _TURNS:
                    break
                only = partial(repeat, cut)  # as often as it is asked for
                tried = next(self._compared(only))
                if isinstance(tried, str):
                    break
                proof, reason = self._judged(only, 0, tried)
                if reason is not None or not proof.exact:
                    return proof, reason
        return None

    def among_many(self) -> Found | None:
        """What the losses of as many micro-batches as there is room for show where those of two show nothing."""
        with tolerated():  # there may be no room, or rows may not be picked
            largest = max(self._parts, key=lambda part: len(part.samples))
            self._times, room = self._trial.fitting(largest, min(_TIMES, len(self._parts)))
            shown = self._many(self._times, room)
            if shown is None or shown.is_none:
                return None
            fewer = (self._many(fewer, room) for fewer in range(2, self._times))
            proof, reason = self._decided(next((one for one in fewer if one and not one.is_none), shown))
            is_told = proof.by == "certificate" or (reason is not None and "failed" in reason.evidence)
            return None if reason is None or not is_told else (proof, reason)
        return None

    def _many(self, times: int, room: int) -> Difference | None:
        """How the losses of some micro-batches differ; ``None`` where that is no number, or it is only one."""
        cut = self._cuts.as_split(times * self._cuts.largest, is_free=True) if times > 1 else None
        found = None if cut is None else self._trial.of_losses_beside(cut, room)
        return found if found is not None and math.isfinite(found.value_error) else None

    def _by_losses(self) -> Found:
        """What the losses of two samples say, where a plan has room for the gradient of one only."""
        found, note = None, "a micro-batch has one sample"
        if any(map(is_scripted, self._task.every_module)):
            return Proof("undecided", note=f"{note}, and two can't be measured in a torch.jit module"), None
        try:
            for cut in self._cuts.between(most=2):
                difference = self._trial.of_losses(cut)
                shown = difference.proof("exact", "losses", note="the gradient of two samples does not fit in memory")
                proof, reason = (shown, None) if difference.is_none else self._decided(difference)
                if reason is not None:
                    return proof, reason
                found = found or proof
        except OverBudget:
            note = f"{note}, and two samples do not fit in memory, not even without their gradient"
        except Exception as error:  # noqa: BLE001 - a loss may differentiate by itself, or take one sample only
            note = f"{note}, and two can't be run without their gradient ({in_one_line(error)})"
            Failure(error).release()
        return found or Proof("undecided", note=note), None

    def _judged(self, cuts: Way, turn: int, difference: Difference) -> Found:
        """What a cut shows, with the reason where that is not exact."""
        self.bound = self.bound or difference.bound
        if difference.is_none and difference.seeded is not None:
            error, operations = difference.seeded
            off = replace(difference, error=error)
            return self._closed(off, lambda: (off.proof("not exact", "comparison"), seeded(operations)))
        if difference.is_none:
            self._exact.append(difference.cut)
            return difference.proof("exact", "comparison"), None
        if not difference.is_single or (difference.dtype is torch.float32 and difference.error < _IN_DOUBT):
            only: Way = lambda most: islice(cuts(most), turn, turn + 1)  # noqa: E731
            again = next(self._compared(only, in_single=True), "")  # a model may be in autocast itself
            if not isinstance(again, str) and again.is_none:
                self.bound = self.bound or again.bound
                self._exact.append(again.cut)
                return again.proof("exact", "comparison"), None
        return self._closed(difference, partial(self._told, difference))

    def _told(self, difference: Difference) -> Found:
        """What makes the gradients differ."""
        # Before anything else runs: a warm-up may end in the proof, and be seen no more.
        if self._trial.moves(difference.cut):
            where, what = shown_iterators(self._trial.effects.found())
            reason = worded("moves", where, {"moves": True}, what=what)
            return difference.proof("not exact", "comparison"), reason
        found = self._decided(difference)
        if found[1] is None:
            return found
        in_groups = self.in_groups(range(2, self._cuts.largest + 1))
        if in_groups is None and is_general(found[1]) and not self._task.is_planned:
            trial, split = self._trial, self._split
            return in_parts_of(trial, split, found) or whole_groups(trial, split, found) or found
        return in_groups or found

    def _closed(self, difference: Difference, explain: Callable[[], Found]) -> Found:
        """What explains a difference; one that was seen is not lost where what explains it fails."""
        try:
            return explain()
        except Exception as error:
            if isinstance(error, OverBudget) or is_out_of_memory(error):
                raise
            reason = unexplained(difference.error, error)
            Failure(error).release()
        return difference.proof("not exact", "comparison"), reason

    def _compared(self, cuts: Way, *, in_single: bool | None = None) -> Compared:
        """Compares the gradients of cuts, of fewer samples where memory runs out; at last why, where it can't."""
        if in_single is None:
            is_low = any(parameter.dtype in LOW_PRECISION for parameter in self._trial.parameters)
            in_single = is_low or self._task.settings.autocast is not None
        most, largest, note = self._cuts.most, self._cuts.largest, ""
        if in_single and self._task.is_planned:  # what a plan has room for is a micro-batch in low precision
            most, in_single = (min(most, largest // 2), True) if largest >= SMALL else (most, False)
        while most >= 2:
            try:
                for cut in cuts(most):
                    yield self._trial.difference(cut, in_single=in_single)
                return
            except Exception as error:  # noqa: BLE001 - the loss may run micro-batches of one size only
                if not is_out_of_memory(error):
                    self._is_of_torch = not isinstance(error, AnyBatchError)
                    alone = "" if isinstance(error, LossError) else " without the others"
                    note = f"some of the samples can't be run{alone} ({in_one_line(error)})"
                    if not in_single:
                        break
                    in_single = False  # an operation may be there for low precision only
                    continue
                Failure(error).release()
            note, most = "memory ran out", most // 2
        yield note

    def _decided(self, difference: Difference) -> Found:
        """What a certificate says of gradients, or of losses, that differ by more than rounding."""
        return self._closed(difference, partial(self._explained, difference))

    def _explained(self, difference: Difference) -> Found:
        certificate = self._certified(difference.cut)
        if certificate is not None and certificate.exact:
            bounds = (one.evidence["operation"] for one in certificate.notes if one.code == "bound")
            self.bound = self.bound or next(bounds, "")
            return difference.proof("exact", "certificate", certificate), None
        told = () if certificate is None else certificate.reasons
        reason = next((one for one in told if one.code not in _UNDECIDED), None)
        undecided = told[0] if told and reason is None else None
        if undecided is not None and undecided.code in ("not-finite", "random"):
            is_drawn = undecided.code == "random"
            if not is_drawn or difference.draws:
                proof = difference.proof("undecided", "", note=undecided.message)
                return proof.with_note(_MEET[undecided.evidence.get("meet")]) if is_drawn else proof, None
            reason = worded("moves", evidence={"moves": True}, what=shown_iterators([])[1])
        is_empty = math.inf in (difference.error, 0.0 if certificate is None else certificate.error)
        is_of_chunk = reason is not None and isinstance(self._task.loss_fn, InPieces) and reason.code == "not-additive"
        if is_empty and reason is not None and ("moves" in reason.evidence or is_of_chunk):
            reason = None  # numbers that are none are no state
        if reason is None and difference.error <= CERTAIN * difference.tolerance:
            note = f"the gradients differ by {difference.error:.2g}, which may be rounding, and no certificate can be"
            return difference.proof("undecided", "", note=f"{note} made"), None
        if certificate is not None and reason is not None:
            if certificate.samples != sum(difference.cut.sizes):
                reason = more(reason, f" (Seen among {certificate.samples} samples.)")
            return difference.proof("not exact", "certificate", certificate), reason
        # Parts of another size that fail say what is amiss with those that ran, too.
        refused = undecided if undecided is not None and undecided.code in ("fails", "refused") else None
        other = worded("empty part" if is_empty else "unexplained", "loss", {"error": difference.error})
        if self._trial.written and certificate is None:  # as where the loss trains a net of its own
            other = written_weights(self._task, self._trial.written_by_name(), difference.error)
        return difference.proof("not exact", "comparison"), reason or refused or other

    def _certified(self, cut: Cut) -> Certificate | None:
        """The certificate of a cut, with a cause that holds among more samples where there are some."""
        try:
            certificate = self._trial.certificate(cut)
            if not certificate.exact and not self._task.is_planned and certificate.reasons[0].code in ("count", "sum"):
                for larger in self._cuts.inside(_CERTIFIED, beyond=True):
                    other = self._trial.certificate(larger)
                    return certificate if other.exact else other
            return certificate
        except AnyBatchError:
            return None
        except Exception as error:
            if is_own(error) and not isinstance(error, OverBudget) and not is_out_of_memory(error):
                raise
            Failure(error).release()  # the model may be one that can't run so
        return None

    def in_groups(self, groups: Sequence[int], again: int = _ANY) -> tuple[Proof, None] | None:
        """Whether only samples that stand together belong together, such as pairs, which the user's sizes keep."""
        if self._task.is_planned or self._task.micro_batch_size is None:
            return None
        own: Way = lambda _: self._cuts.between(4 * self._cuts.largest)  # noqa: E731
        for group in groups:
            if not Proof("exact", group=group).holds_for(self._rows):
                continue
            in_groups = self._all_the_same(partial(self._cuts.of_groups, group=group, again=again))
            if in_groups is not None and self._all_the_same(own):  # which may be of several groups each
                is_of_places = self._all_the_same(partial(self._cuts.of_groups, group=group, mixed=True)) is not None
                if not (is_of_places or self._cuts.are_marked(group)):
                    continue  # it is by chance that it makes no difference in this batch
                parted = self._cuts.of_parted_groups(group=group) if is_of_places else ()
                if any(self._all_the_same(lambda _, cut=cut: iter([cut])) for cut in parted):  # type: ignore[misc]
                    continue  # a group may be parted after all, so that it is none
                note = f"each {group} consecutive samples belong together: micro_batch_size has to keep them together"
                if not is_of_places:
                    note = f"{note}, and each batch is proved, since its values say what belongs together"
                proof = in_groups.proof("exact", "comparison", note=note)
                return replace(proof, group=group, is_of_batch=not is_of_places), None
        return None

    def _all_the_same(self, cuts: Way) -> Difference | None:
        """The first of some comparisons if no cut makes a difference; ``None`` if one does, or none could be run."""
        first: Difference | None = None
        for tried in self._compared(cuts):
            if isinstance(tried, str) or not tried.is_none:
                return None
            first = first or tried
        return first


def remedies_of(reason: Reason, verb: Verb | None, *, is_of_ranks: bool = False) -> str:
    """What to do instead, a line each, as ``refusal`` says it."""
    worded_by = _BY_VERB.get(verb, {})
    lines = (worded_by.get(line, line) for line in reason.remedies if not is_of_ranks or line != WHOLE)
    return "".join(f"\n    {line}" for line in lines)


def refusal(
    proof: Proof, reason: Reason, model: str, verb: Verb | None = "TrainStep", *, is_of_ranks: bool = False
) -> NotSplittable:
    """The error for a step that may not be split.

    Args:
        verb: what the user called, by which remedies are worded; ``None`` for the trainer of another library.
        is_of_ranks: whether each rank has a part of the batch, so that none runs it whole.
    """
    remedies = remedies_of(reason, verb, is_of_ranks=is_of_ranks)
    sizes = " + ".join(map(str, proof.parts))
    modules = [reason.where] if reason.code in ("module", "batch-norm", "buffer") else []
    found = (
        f"in micro-batches the gradient of {model} is not the whole batch's: {proof.samples} samples of this batch "
        f"give another one as {sizes} than whole ({how_far(proof.error, proof.apart)})."
    )
    if proof.chunks:
        # Truncated, only the losses are compared.
        what, error = ("gradient", proof.error) if proof.error else ("loss", reason.evidence["loss_error"])
        found = (
            f"in chunks of {proof.chunks[0]} steps the {what} of {model} is not that of all steps: in chunks of "
            f"{proof.chunks[1]} steps that of some samples of this batch is another one ({how_far(error)})."
        )
    if reason.evidence.get("order"):
        found = found.replace("than whole", "than in another order")
    if math.isnan(proof.error):
        found = f"{model} can't run {proof.samples} samples of this batch alone, as it is cut."
    kept = "Nothing was changed, except that the comparison also changed it." if reason.evidence.get("moves") else ""
    check = "" if proof.by == "certificate" else "anybatch.check(model, loss_fn, batch) looks at more samples; "
    ranks = " Even in one micro-batch, the batch of each rank is only part of the global batch." if is_of_ranks else ""
    instead = f" Instead:{remedies}" if remedies else ""
    return NotSplittable(
        f"{found} {reason.message}{ranks} {kept or 'Nothing was changed.'} {check}verify='off' splits anyway.{instead}",
        modules=modules,
    )
