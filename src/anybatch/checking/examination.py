"""The course of a check: the whole batch against splits of it, and then, step by step, what makes the difference."""

import dataclasses
import gc
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.accelerators import release_cache
from anybatch.batch.counting import count_samples
from anybatch.checking.candidates import even_labels
from anybatch.checking.carriedstate import State, shown_iterators
from anybatch.checking.causes import reason
from anybatch.checking.comparison import Case, Comparison, Comparisons
from anybatch.checking.denominators import Denominators
from anybatch.checking.diagnosis import Diagnosis
from anybatch.checking.measuring import Outcome, Rig, check_gradient
from anybatch.checking.subjects import Subject
from anybatch.checking.substitution import Draw
from anybatch.errors import AnyBatchError, DoesNotFit
from anybatch.loss.coupling import Coupled
from anybatch.records.certificates import Certificate, Reason
from anybatch.tensors.sideeffects import Effect
from anybatch.tensors.spectral import power_iteration
from anybatch.update.batchnorm import BatchNormPolicy
from anybatch.update.refusals import without_statistics
from anybatch.update.transaction import is_out_of_memory

T = TypeVar("T")

TOLERANCE = 1e-9
_PRECISIONS: tuple[tuple[torch.dtype | None, bool], ...] = ((torch.float64, True), (None, True), (None, False))


def examine(subject: Subject) -> Certificate:
    """Checks a subject, or the first samples of it that fit in memory.

    Args:
        subject: a model, a loss and a batch.

    Returns:
        The certificate; everything is as before.

    Raises:
        DoesNotFit: not even two samples fit.
        LossError, CountError: the loss or the count fail on the whole batch already.
    """
    total = subject.rows
    while True:
        try:
            return _examined(subject, total)
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            text = str(error)
        gc.collect()  # outside of the except block, where no traceback holds tensors any more
        release_cache()
        if subject.rows <= 2:
            raise DoesNotFit(
                f"a check of two samples runs out of memory, got: {text}. It runs in float64, which takes twice the "
                "bytes; check a smaller model of the same kind, or on the host"
            )
        subject = subject.first(max(2, subject.rows // 2))


def _examined(subject: Subject, total: int) -> Certificate:
    with ExitStack() as stack:
        rig, whole, refused = _opened(subject, stack)
        check_gradient(rig, whole)
        return Examination(rig, whole, total, refused).certificate()


def _opened(subject: Subject, stack: ExitStack) -> tuple[Rig, Outcome, str]:
    """Runs the whole batch in float64, or in the model's own precision where that can't run."""
    refused = ""
    for dtype, substitutes in _PRECISIONS:
        with ExitStack() as trial:
            rig = Rig(subject, dtype, substitutes=substitutes)
            try:
                whole = rig.open(trial)
            except BaseException as error:
                is_last = (dtype, substitutes) == _PRECISIONS[-1]
                if is_last or not isinstance(error, Exception) or isinstance(error, AnyBatchError):
                    raise
                if is_out_of_memory(error):
                    raise
                refused = refused or f"{type(error).__name__}: {error}"
                continue
            stack.push(trial.pop_all())
            return rig, whole, refused
    raise AnyBatchError("unreachable")


class Examination(Case):
    """One check of a subject that fits in memory.

    Args:
        rig: opened.
        whole: what the whole batch gave.
        total: samples of the user's batch.
        refused: why float64 could not run, empty if it did.
    """

    def __init__(self, rig: Rig, whole: Outcome, total: int, refused: str) -> None:
        super().__init__(rig, whole, rig.splits(), TOLERANCE)
        self.subject = rig.subject
        self.reasons: list[Reason] = []
        self._total = total
        self._refused = refused

    def certificate(self) -> Certificate:
        """Runs the check."""
        changed, effects = self._changed_buffers(), self.rig.effects.found()
        self._drawn = self.rig.has_drawn(torch_too=False)
        self._note_what_is_checked()
        if self._refused:
            self.tolerance = self._own_tolerance(self.subject.autocast)
        if not self.whole.is_finite:
            shown = ", ".join(f"{name} {value:g}" for name, value in self.whole.losses.items())
            self.reasons.append(reason("not finite", "loss", {"losses": dict(self.whole.losses)}, shown=shown))
            return self._certificate(math.inf, math.inf)
        comparisons = self.compared()
        if self.rig.substitution is not None and self.rig.substitution.lowered:
            names = sorted(self.rig.substitution.lowered)
            self.notes.append(reason("lower precision", "model", {"operations": names}, shown=", ".join(names[:5])))
            self.tolerance = max(self.tolerance, self._own_tolerance(torch.float32))
        if comparisons.error <= self.tolerance:
            was = comparisons
            comparisons = self.searched("other counts", lambda: self._with_overlooked_split(was), was)
        if comparisons.error > self.tolerance:
            comparisons = self._reconsidered(comparisons)
        self.searched("random numbers", lambda: self._examine_random_numbers(effects), None)
        error = max(
            comparisons.error,
            self.searched("BatchNorm", self._examine_batch_norm, 0.0),
            self.searched("buffers", lambda: self._examine_buffers(changed), 0.0),
            self.searched("state in Python", lambda: self._examine_state(effects), 0.0),
        )
        self._examine_optimizer_hooks()
        if not self.reasons and comparisons.loss_error > max(self.tolerance, 1e-6):
            self.notes.append(reason("value", "loss", {"loss_error": comparisons.loss_error}))
        self.searched("whether all samples weigh the same", self._note_even_batch, None)
        return self._certificate(error, comparisons.loss_error)

    def _note_what_is_checked(self) -> None:
        subject, model = self.subject, type(self.subject.model).__name__
        if subject.rows < self._total:
            evidence = {"samples": subject.rows, "samples_in_batch": self._total}
            self.notes.append(reason("part of the batch", "batch", evidence))
        if self._refused and self.rig.dtype is None:
            self.notes.append(reason("own precision", model, refused=self._refused.splitlines()[0]))
        if isinstance(subject.model, torch.nn.Module) and not subject.model.training:
            self.notes.append(reason("evaluation mode", model))
        if len(self.splits) == 1:
            self.notes.append(reason("one split", "batch", rows=subject.rows))

    def _certificate(self, error: float, loss_error: float) -> Certificate:
        precision = self.rig.dtype or next((p.dtype for p in self.rig.parameters), torch.get_default_dtype())
        return Certificate(
            model=type(self.subject.model).__name__,
            samples=self.subject.rows,
            samples_in_batch=self._total,
            splits=tuple(tuple(len(part.samples) for part in parts) for parts in self.splits),
            dtype=str(precision).removeprefix("torch."),
            tolerance=self.tolerance,
            error=error,
            loss_error=loss_error,
            reasons=tuple(self.reasons),
            notes=tuple(self.notes),
        )

    def _reconsidered(self, comparisons: Comparisons) -> Comparisons:
        """Finds the reasons, or that there are none.

        A difference may come from numbers that stand in for random ones, if which sample they belong to can't be told,
        or if the loss is a mean over as many items as are drawn. With one number for a whole draw neither matters.
        """
        substitution = self.rig.substitution
        if substitution is not None and substitution.draws:
            drawn = comparisons
            substitution.numbers.constant = True
            whole = self.rig.run()
            if whole.is_finite:
                comparisons = self.compared(whole=whole)
            else:
                substitution.numbers.constant = False
            if substitution.numbers.constant and comparisons.error <= self.tolerance:
                substitution.numbers.constant = False
                self.rig.run()
                reasons = Diagnosis(self).losses(drawn)
                if all(one.code == "count" for one in reasons):
                    self.reasons += map(_drawn_count, reasons)
                    return drawn
                return comparisons
            self.whole = comparisons.whole
        self.forgive_cancellation(comparisons)
        if comparisons.error > self.tolerance and (size := self._wrong_row_block()):
            self.reasons.append(reason("rows", "loss", {"row_block": size, "error": comparisons.error}))
        elif comparisons.error > self.tolerance and (names := self._written_weights()):
            self.reasons.append(reason("weight", names[0], {"weights": names, "error": comparisons.error}))
        elif comparisons.error > self.tolerance and not comparisons.breaks and (moves := self._moves_unseen()):
            self.reasons.append(moves)
        elif comparisons.error > self.tolerance:
            reasons = Diagnosis(self).reasons(comparisons)
            drew = substitution is not None and bool(substitution.draws) and not substitution.numbers.constant
            self.reasons += [_drawn_count(r) if drew and "weights" in r.evidence else r for r in reasons]
        return comparisons

    def _with_overlooked_split(self, comparisons: Comparisons) -> Comparisons:
        """Compares one more split if those so far happen to weigh the samples as another count would."""
        overlooked = Denominators(self).overlooked()
        if overlooked is None:
            return comparisons
        self.splits = [*self.splits, overlooked]
        return self.compared()

    def _wrong_row_block(self) -> int:
        """The rows in a block of a coupled loss that is the whole batch's only if it is computed for all rows."""
        coupled = self.subject.loss_fn
        if not isinstance(coupled, Coupled) or coupled.row_block is None:
            return 0
        one_block = Coupled(coupled.encode, coupled.loss, row_block=self.subject.rows)
        return coupled.row_block if self.is_exact(loss_fn=one_block) else 0

    def _written_weights(self) -> list[str]:
        """The weights that the forward or the loss writes to, which other micro-batches find changed."""
        own = {
            f"{name}.{inner}".strip("."): parameter
            for name, module in self.rig.modules.items()
            for inner, parameter in module._parameters.items()
            if parameter is not None
        }
        before = {name: parameter.detach().clone() for name, parameter in own.items()}
        self.rig.run()
        return [name for name, parameter in own.items() if not torch.equal(parameter.detach(), before[name])]

    def _moves_unseen(self) -> Reason | None:
        """Whether random numbers that nothing stands in for make the difference, or something else that moves."""
        again = self.rig.run()
        differs = self.error_of(again.gradients) > self.tolerance
        if self.rig.has_drawn() and (differs or self.rig.draws_by_size()):
            return reason("not held")
        where, what = shown_iterators(self.rig.effects.found())
        return reason("moves", where, what=what) if differs else None

    def _changed_buffers(self) -> list[str]:
        """The buffers that the whole batch's forward has just changed, but for those of BatchNorm and spectral norm."""
        changed = {id(buffer) for buffer in self.rig.isolation.changed_buffers()}
        changed -= {id(one) for module in self.rig.modules.values() for one in power_iteration(module)}
        coupling = {id(module) for module in self.rig.coupling().values()}
        return [
            f"{name}.{inner}".strip(".")
            for name, module in self.rig.modules.items()
            if id(module) not in coupling
            for inner, buffer in module._buffers.items()
            if id(buffer) in changed
        ]

    def _examine_buffers(self, changed: Sequence[str]) -> float:
        """Lets buffers go over from one micro-batch to the next, as they do in training."""
        if not changed or self.reasons:
            return 0.0
        error = self.compared(fresh=False).error
        if error <= self.tolerance:
            self.notes.append(reason("buffer", changed[0], {"buffers": list(changed)}))
            return 0.0
        owner, _, name = changed[0].rpartition(".")
        evidence = {"buffers": list(changed), "error": error}
        said = {"name": name, "code": changed[0], "owner": owner or "model"}
        self.reasons.append(reason("moving buffer", changed[0], evidence, **said))
        return error

    def _examine_state(self, changed: Sequence[Effect]) -> float:
        """Lets what a run changes in Python go over from one micro-batch to the next, as it does in training."""
        if not changed:
            return 0.0
        state = State(self, changed)
        found = state.reason()
        if found is not None:
            self.reasons.append(found)
        elif (note := state.note()) is not None:
            self.notes.append(note)
        return state.error if found is not None else 0.0

    def _examine_batch_norm(self) -> float:
        if self.subject.batch_norm == "frozen":
            return 0.0
        modules = self.rig.coupling()
        if not modules:
            return 0.0
        whole = self.rig.run(batch_norm="ghost")
        errors = []
        for parts in self.splits:
            outcome = self.attempt(parts, batch_norm="ghost")
            errors.append(Comparison(whole, parts, outcome).error if isinstance(outcome, Outcome) else 0.0)
        # What has no running statistics can't be frozen, as the comparison before has it, and is refused there.
        said = ("module", "refused") if without_statistics(modules) else ("module",)
        kept = [r for r in self.reasons if r.code not in said or (r.code == "module" and r.where not in modules)]
        self.reasons = kept
        self.reasons.append(_batch_norm(modules, max(errors), self.subject.batch_norm))
        return max(errors)

    def _examine_optimizer_hooks(self) -> None:
        names = [n for n, p in zip(self.rig.names, self.rig.parameters, strict=True) if self.rig.has_optimizer_hook(p)]
        if names:
            self.reasons.append(reason("optimizer hook", names[0], {"hooks": names}))

    def _examine_random_numbers(self, changed: Sequence[Effect]) -> None:
        substitution = self.rig.substitution
        draws = [] if substitution is None else list(substitution.draws)
        draws += [Draw("numpy or Python", "loss")] if self._drawn else []
        if not draws or any(one.code == "random" for one in self.reasons):
            return
        if self.rig.repeats_draws(self.splits[0], changed):
            self.reasons.append(reason("seeded"))
            return
        places, modules = list(dict.fromkeys(draw.where for draw in draws)), self.rig.modules
        shown = [f"`{p or 'model'}` ({type(modules[p]).__name__})" if p in modules else "the loss" for p in places]
        evidence = {"modules": places, "operations": sorted({draw.operation for draw in draws})}
        self.notes.append(reason("drawn", places[0] or "model", evidence, shown=shown))

    def _note_even_batch(self) -> None:
        subject = self.subject if self.subject.collate is None else self.subject.collated()
        if self.reasons or subject is None or subject.count is not count_samples:
            return
        path, number = even_labels(subject.batch, subject.broadcast)
        if path:
            self.notes.append(reason("even batch", path, {"labels_per_sample": number}, path=path))

    def _own_tolerance(self, dtype: torch.dtype | None = None) -> float:
        """The bound on the error against the whole: 3 roundings of the whole, and the sum over micro-batches."""
        kinds = [p.dtype for p in self.rig.parameters if p.is_floating_point()]
        unit = max((torch.finfo(kind).eps / 2 for kind in ([dtype] if dtype else kinds)), default=2.0**-24)
        parts = max(len(split) for split in self.splits)
        return 3 * max(self._rounding(unit), 16 * unit) + unit * math.sqrt(parts)

    def _rounding(self, unit: float) -> float:
        """Estimates the relative rounding error of the whole's gradient: every weight is changed by one rounding."""
        before = [parameter.data for parameter in self.rig.parameters]
        generator = torch.Generator().manual_seed(0)
        try:
            for parameter in self.rig.parameters:
                signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
                parameter.data = parameter.data + parameter.data * (signs * (2 * unit)).to(parameter.dtype)
            moved = self.rig.run()
        finally:
            for parameter, values in zip(self.rig.parameters, before, strict=True):
                parameter.data = values
        return self.error_of(moved.gradients)


def _drawn_count(found: Reason) -> Reason:
    """A reason of a loss that is a mean over as many items as are drawn."""
    message = f"{found.message} How many items there are depends on the random numbers that are drawn."
    return dataclasses.replace(found, message=message, remedies=found.remedies[:1])


def _batch_norm(modules: Mapping[str, torch.nn.Module], error: float, policy: BatchNormPolicy) -> Reason:
    norms = [module for module in modules.values() if isinstance(module, _BatchNorm)]
    what = "normalises each sample by statistics of all samples of a batch" if norms else "keeps such statistics"
    accepted = " It was accepted with batch_norm='ghost'." if policy == "ghost" else ""
    shown = [f"`{name}` ({type(module).__name__})" for name, module in modules.items()]
    names = list(modules)
    evidence = {"modules": names, "error": error}
    found = reason("BatchNorm", names[0], evidence, shown=shown, what=what, accepted=accepted)
    if all(module.running_mean is not None for module in norms):
        return found
    return dataclasses.replace(found, remedies=tuple(line for line in found.remedies if "frozen" not in line))
