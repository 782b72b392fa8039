"""The course of a check: the whole batch against splits of it, and then, step by step, what makes the difference."""

import gc
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.accelerators import release_cache
from anybatch.batch.batches import Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.layout import lay_out, placement
from anybatch.checking.averages import Averages
from anybatch.checking.candidates import even_labels
from anybatch.checking.causes import reason, seeded
from anybatch.checking.gradients import Comparison, Outcome
from anybatch.checking.rig import Case, Rig
from anybatch.checking.searches import joined, searched, wrong_averages
from anybatch.checking.sharedbounds import Bounds, bound_of_samples
from anybatch.checking.standins import Draw
from anybatch.checking.state import Buffers, State
from anybatch.checking.wording import how_far
from anybatch.errors import AnyBatchError, BatchError, DoesNotFit
from anybatch.memory.meter import OverBudget
from anybatch.records.certificates import Certificate, Reason
from anybatch.tensors.sideeffects import Effect
from anybatch.update.passes import Task
from anybatch.update.refusals import unused, without_statistics
from anybatch.update.transaction import is_out_of_memory

_TOLERANCE = 1e-9
_NO_ERROR = (0.0, 0.0)


def examine(task: Task) -> Certificate:
    """Checks a task, or the first samples of it that fit in memory.

    Args:
        task: a model, a loss and what a step would do with them; of a window the batch with the most samples is taken.
    """
    task = replace(task, splittable=_of_one(task.splittable), devices=None, optimizations=None)
    total = task.splittable.rows
    while True:
        try:
            with ExitStack() as stack:
                rig, whole, refused = opened(task, stack)
                _refuse_unused(rig, whole)
                return Examination(rig, whole, total, refused).certificate()
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            text = str(error)
        gc.collect()  # outside of the except block, where no traceback holds tensors any more
        release_cache()
        rows = task.splittable.rows
        if rows <= 2:
            raise DoesNotFit(
                f"a check of two samples runs out of memory, got: {text}. It runs in float64, which takes twice "
                "the bytes; check a smaller model of the same kind, or check on the host"
            )
        task = replace(task, splittable=task.splittable.chosen(range(max(2, rows // 2))))


def later_state(task: Task) -> Reason | None:
    """What each micro-batch moves, in Python or in buffers, and makes a difference at other values; or ``None``."""
    with ExitStack() as stack:
        rig, whole, _ = opened(task, stack)
        buffers, case = Buffers(rig), Case(rig, whole, rig.splits(), _TOLERANCE)
        counted = State(case, rig.effects.found()).note(ahead=True)
        return counted or (buffers.later(case) if whole.is_finite else None)


def _of_one(splittable: Splittable) -> Splittable:
    """The largest of a window's batches, or all raw samples."""
    if splittable.obstacle is not None:
        raise splittable.obstacle
    if splittable.rows < 2:
        raise BatchError(
            f"the batch has {splittable.rows} sample, which can't be split, so there is nothing to compare; expected a "
            "batch of at least 2 samples"
        )
    if splittable.collate is not None:
        return splittable
    broadcast = placement(splittable.broadcast, getattr(splittable.broadcast, "dims", None))
    largest = max(splittable.batches, key=lambda one: lay_out(one, broadcast).rows)
    return Splittable([largest], broadcast=broadcast)


def _refuse_unused(rig: Rig, whole: Outcome) -> None:
    """Refuses a loss that gives no gradient to any parameter of the model, or to any of the inputs."""
    model, inputs = rig.task.model, rig.task.settings.inputs
    own = {id(p) for p in model.parameters()} if isinstance(model, torch.nn.Module) else set()
    found = [id(parameter) for parameter in rig.parameters if inputs is not None or id(parameter) in own]
    if found and whole.gradients.keys().isdisjoint(found):
        raise unused(model, len(found), are_inputs=inputs is not None)


def opened(task: Task, stack: ExitStack) -> tuple[Rig, Outcome, str]:
    """Runs the whole batch in float64, or in the model's own precision where that can't run."""
    with ExitStack() as trial:
        rig = Rig(task, torch.float64)
        try:
            whole = rig.open(trial)
        except Exception as error:
            if isinstance(error, (AnyBatchError, OverBudget)) or is_out_of_memory(error):
                raise
            refused = f"{type(error).__name__}: {error}"
        else:
            stack.push(trial.pop_all())
            return rig, whole, ""
    rig = Rig(task, None)
    return rig, rig.open(stack), refused


class Examination(Case):
    """One check of a task that fits in memory.

    Args:
        total: samples of the user's batch.
        refused: why float64 could not run, empty if it did.
    """

    def __init__(self, rig: Rig, whole: Outcome, total: int, refused: str) -> None:
        super().__init__(rig, whole, rig.splits(), _TOLERANCE)
        self.task, self.reasons, self._total, self._refused = rig.task, list[Reason](), total, refused

    def certificate(self) -> Certificate:
        """Runs the check."""
        effects, self._buffers = self.rig.effects.found(), Buffers(self.rig)
        self._drawn = self.rig.has_drawn(torch_too=False)
        self._note_what_is_checked()
        if self._refused:
            self.tolerance = self._own_tolerance(self.task.settings.autocast)
        if not self.whole.is_finite:
            shown = ", ".join(f"{name} {value:g}" for name, value in self.whole.losses.items())
            self.reasons.append(reason("not finite", "loss", {"losses": dict(self.whole.losses)}, shown=shown))
            return self._certificate(math.inf, math.inf)
        comparison = self.compared()
        if self.rig.stand_ins.lowered:
            names = sorted(self.rig.stand_ins.lowered)
            self.notes.append(reason("lower precision", "model", {"operations": names}, shown=", ".join(names[:5])))
            self.tolerance = max(self.tolerance, self._own_tolerance(torch.float32))
        if comparison.error <= self.tolerance:
            was = comparison
            comparison = self.searched("other counts", lambda: self._with_overlooked_split(was), was)
        if comparison.error > self.tolerance:
            comparison = self._reconsidered(comparison)
        self.searched("random numbers", lambda: self._examine_random_numbers(effects), None)
        errors = (  # of the gradient, and of the losses of the same run
            (comparison.error, comparison.loss_error()),
            self.searched("BatchNorm", self._examine_batch_norm, _NO_ERROR),
            self.searched("buffers", self._examine_buffers, _NO_ERROR),
            self.searched("state in Python", lambda: self._examine_state(effects), _NO_ERROR),
        )
        error, loss_error = max(errors, key=lambda one: one[0])
        named = zip(self.rig.names, self.rig.parameters, strict=True)
        if names := [name for name, parameter in named if id(parameter) in self.rig.with_optimizer_hooks]:
            self.reasons.append(reason("optimizer hook", names[0], {"hooks": names}))
        if not self.reasons and comparison.loss_error() > max(self.tolerance, 1e-6):
            self.notes.append(
                reason(
                    "value",
                    "loss",
                    {"loss_error": comparison.loss_error()},
                    off=how_far(comparison.loss_error(), comparison.apart(self.tolerance)[1]),
                )
            )
        self.searched("bounds of what the samples give together", self._note_bound, None)
        self.searched("whether all samples weigh the same", self._note_even_batch, None)
        return self._certificate(error, loss_error, *comparison.apart(self.tolerance))

    def _note_what_is_checked(self) -> None:
        rows, model = self.task.splittable.rows, type(self.task.model).__name__
        if rows < self._total:
            self.notes.append(reason("part of the batch", "batch", {"samples": rows, "samples_in_batch": self._total}))
        if self._refused and self.rig.dtype is None:
            self.notes.append(reason("own precision", model, refused=self._refused.splitlines()[0]))
        if isinstance(self.task.model, torch.nn.Module) and not self.task.model.training:
            self.notes.append(reason("evaluation mode", model))
        if len(self.splits) == 1:
            self.notes.append(reason("one split", "batch", rows=rows))

    def _certificate(self, error: float, loss_error: float, apart: float = 0.0, loss_apart: float = 0.0) -> Certificate:
        precision = self.rig.dtype or next((p.dtype for p in self.rig.parameters), torch.get_default_dtype())
        return Certificate(
            model=type(self.task.model).__name__,
            samples=self.task.splittable.rows,
            samples_in_batch=self._total,
            splits=tuple(tuple(len(part.samples) for part in parts) for parts in self.splits),
            dtype=str(precision).removeprefix("torch."),
            tolerance=self.tolerance,
            error=error,
            loss_error=loss_error,
            reasons=tuple(self.reasons),
            notes=tuple(self.notes),
            apart=apart,
            loss_apart=loss_apart,
        )

    def _reconsidered(self, comparison: Comparison) -> Comparison:
        """Finds the reasons, or that there are none.

        A difference may come from numbers that stand in for random ones, if which sample they belong to can't be told,
        or if the loss is a mean over as many items as are drawn. With one number for a whole draw neither matters.
        """
        stand_ins, drew = self.rig.stand_ins, False
        if stand_ins.draws:
            drawn = comparison
            stand_ins.held.constant = True
            whole = self.rig.run()
            drew = not whole.is_finite
            if not drew:
                comparison = self.compared(whole=whole)
            if comparison.error > self.tolerance and stand_ins.is_uneven:
                stand_ins.held.alike = True
                alike = self.rig.run()
                if any(one.any() for one in alike.gradients.values()):
                    comparison = self.compared(whole=alike)
                else:  # nothing was compared
                    stand_ins.held.alike = False
            if drew or comparison.error <= self.tolerance:
                stand_ins.held.constant = False
            if comparison.error <= self.tolerance:
                self.rig.run()
                reasons = wrong_averages(self, drawn)
                if all(one.code == "count" for one in reasons):
                    self.reasons += map(_drawn_count, reasons)
                    return drawn
                return comparison
            self.whole = comparison.whole
        self.forgive_cancellation(comparison)
        if comparison.error > self.tolerance:
            found = searched(self, comparison)
            self.reasons += [_drawn_count(one) if drew and _is_of_items(one) else one for one in found]
        return comparison

    def _with_overlooked_split(self, comparison: Comparison) -> Comparison:
        """Compares one more split if those so far happen to weigh the samples as another count would."""
        overlooked = Averages(self).overlooked()
        if overlooked is None:
            return comparison
        self.splits = [*self.splits, overlooked]
        return self.compared()

    def _examine_buffers(self) -> tuple[float, float]:
        """Lets buffers go over from one micro-batch to the next, as they do in training."""
        changed, may_be = self._buffers.changed, self._may_be_of_state
        if not changed or (self.reasons and not may_be):
            return _NO_ERROR
        moved = self.compared(fresh=False)
        error = moved.error
        if may_be and abs(error - self.compared().error) <= self.tolerance:
            return _NO_ERROR  # they are moved, and not read
        if error <= self.tolerance:
            later = self._buffers.later(self)
            self.notes.append(later or reason("buffer", changed[0], {"buffers": changed}))
            return _NO_ERROR
        owner, _, name = changed[0].rpartition(".")
        evidence = {"buffers": changed, "error": error}
        said = {"name": name, "code": changed[0], "owner": owner or "model"}
        cause = "counting buffer" if self._buffers.is_count else "moving buffer"
        self.reasons.insert(0, reason(cause, changed[0], evidence, **said))
        return error, moved.loss_error()

    @property
    def _may_be_of_state(self) -> bool:
        """Whether what was found may come of a state: weights that it makes are no count, and it may be divided by."""
        shown = (("count", "weights"), ("not-additive", "value"))
        return any(one.code == code and name in one.evidence for one in self.reasons for code, name in shown)

    def _examine_state(self, changed: Sequence[Effect]) -> tuple[float, float]:
        """Lets what a run changes in Python go over from one micro-batch to the next, as it does in training."""
        if not changed:
            return _NO_ERROR
        state = State(self, changed)
        found = state.reason()
        if found is not None:
            self.reasons.insert(0 if self._may_be_of_state or state.is_made_once else len(self.reasons), found)
        elif (note := state.note()) is not None:
            self.notes.append(note)
        return (state.error, state.loss_error) if found is not None else _NO_ERROR

    def _examine_batch_norm(self) -> tuple[float, float]:
        modules = {} if self.task.batch_norm == "frozen" else self.rig.coupling()
        if not modules:
            return _NO_ERROR
        whole = self.rig.run(batch_norm="ghost")
        found = [self.attempt(parts, batch_norm="ghost") for parts in self.splits]
        ran = [(parts, one) for parts, one in zip(self.splits, found, strict=True) if isinstance(one, Outcome)]
        comparison = Comparison(whole, ran) if ran else None
        error, loss_error = (comparison.error, comparison.loss_error()) if comparison is not None else _NO_ERROR
        # What has no running statistics can't be frozen, as the comparison before has it, and is refused there.
        said = ("module", "refused") if without_statistics(modules) else ("module",)
        kept = [r for r in self.reasons if r.code not in said or (r.code == "module" and r.where not in modules)]
        self.reasons = [*kept, _batch_norm(modules, error, self.task.batch_norm)]
        return error, loss_error

    def _examine_random_numbers(self, changed: Sequence[Effect]) -> None:
        draws = list(self.rig.stand_ins.draws)
        draws += [Draw("numpy or Python", "loss")] if self._drawn else []
        if not draws or any(one.code == "random" for one in self.reasons):
            return
        again = partial(self.rig.run, self.splits[0], fresh=False, carries=changed)
        if self.rig.stand_ins.repeated(self.rig.run, again) is not None:  # since the loss seeds a generator
            self.reasons.append(seeded(draw.operation for draw in draws))
            return
        places, modules = list(dict.fromkeys(draw.where for draw in draws)), self.rig.modules
        shown = [f"`{p or 'model'}` ({type(modules[p]).__name__})" if p in modules else "the loss" for p in places]
        evidence = {"modules": places, "operations": sorted({draw.operation for draw in draws})}
        self.notes.append(reason("drawn", places[0] or "model", evidence, shown=shown))

    def _note_bound(self) -> None:
        if self.reasons or self._drawn or not self.splits:
            return
        with Bounds() as whole:
            self.rig.run()
        with Bounds() as parts:
            self.rig.run(self.splits[0])
        if operation := bound_of_samples(whole.met, parts.met, len(self.splits[0])):
            self.notes.append(reason("bound", evidence={"operation": operation}))

    def _note_even_batch(self) -> None:
        one = None if self.reasons else joined(self.task.splittable)
        if one is None or self.task.count is not count_samples:
            return
        path, number = even_labels(one.batches[0], one.broadcast)
        if path:
            self.notes.append(reason("even batch", path, {"labels_per_sample": number}, path=path))

    def _own_tolerance(self, dtype: torch.dtype | None = None) -> float:
        """The bound on the error against the whole: 3 roundings of the whole, and the sum over micro-batches."""
        kinds = [p.dtype for p in self.rig.parameters if p.is_floating_point()]
        self.unit = unit = max((torch.finfo(kind).eps / 2 for kind in ([dtype] if dtype else kinds)), default=2.0**-24)
        parts = max(len(split) for split in self.splits)
        with self.rig.rounded(unit):  # which every weight is changed by, once
            rounding = min(self.rig.run().error(self.whole), math.sqrt(unit))  # what is more is a state that moves on
        return 3 * max(rounding, 16 * unit) + unit * math.sqrt(parts)


def _is_of_items(found: Reason) -> bool:
    """Whether a reason weighs the samples by a number of items, which are no weights of a model."""
    return "weights" in found.evidence and found.code != "weight"


def _drawn_count(found: Reason) -> Reason:
    """A reason of a loss that is a mean over as many items as are drawn."""
    message = f"{found.message} The number of items depends on the random numbers drawn."
    return replace(found, message=message, remedies=found.remedies[:1])


def _batch_norm(modules: dict[str, torch.nn.Module], error: float, policy: str) -> Reason:
    norms = [module for module in modules.values() if isinstance(module, _BatchNorm)]
    what = "normalises each sample by statistics of all samples of a batch" if norms else "keeps such statistics"
    accepted = " It was accepted with batch_norm='ghost'." if policy == "ghost" else ""
    shown = [f"`{name}` ({type(module).__name__})" for name, module in modules.items()]
    names = list(modules)
    found = reason("BatchNorm", names[0], {"modules": names, "error": error}, shown=shown, what=what, accepted=accepted)
    if all(module.running_mean is not None for module in norms):
        return found
    return replace(found, remedies=tuple(line for line in found.remedies if "frozen" not in line))
