"""Runs some samples as a step would run them, whole or in parts, and leaves nothing of it."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.checking.beginnings import announced
from anybatch.checking.cuts import Cut
from anybatch.checking.drawing import Numbers
from anybatch.checking.reach import modules_of as reached_modules
from anybatch.checking.sketches import Sketch
from anybatch.checking.substitution import SINGLE, Substitution, promoted
from anybatch.interception import unobserved
from anybatch.loss.pieces import InPieces
from anybatch.loss.reducing import Reducer
from anybatch.loss.sums import values_of
from anybatch.memory.meter import LiveBytes, Recording
from anybatch.memory.overwritten import Overwritten
from anybatch.parallel.ranks import reducer_for
from anybatch.records.certificates import Certificate
from anybatch.tensors.dispatch import unwatched
from anybatch.tensors.graph import OutsideLeaves, in_backward
from anybatch.tensors.modules import devices_among, is_scripted, modules_of
from anybatch.tensors.precision import LOW_PRECISION
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import SideEffects
from anybatch.update.passes import Task, run_pass
from anybatch.update.progress import Progress
from anybatch.update.transaction import Snapshot

ROUNDINGS = 128
"""Roundings of the precision that two gradients may be apart, relative to the whole: sums in another order."""
_IN_FLOAT64 = 1e-10
_LOW = 2.0**-9
"""The unit of bfloat16, whose gradients differ by some of them where they are computed in low precision."""
Optimizations = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Difference:
    """How far the two gradients of a cut are apart.

    Args:
        error: relative to the whole's; infinite if one is not finite.
        value_error: of the worst loss.
        dtype: the lowest precision of what has a gradient.
        is_single: whether everything was computed in float32 at least.
        draws: whether random numbers are drawn.
    """

    error: float
    value_error: float
    dtype: torch.dtype
    is_single: bool
    draws: bool

    @property
    def tolerance(self) -> float:
        """Up to which error they count as the same."""
        return tolerance_of(self.dtype, is_single=self.is_single)

    @property
    def is_none(self) -> bool:
        """Whether they are the same within rounding."""
        return self.error <= self.tolerance and self.value_error <= (1e-5 if self.is_single else 0.05)


def tolerance_of(dtype: torch.dtype, *, is_single: bool = True) -> float:
    """The bound of rounding for a comparison.

    Sums over a whole batch and over its parts are added in another order, and a backward hands that rounding on from
    layer to layer: up to 20 units (2^-24 in float32) were seen. Where two parts have other gradients, a count that is
    off by 1 in 1000 makes some thousand units. Gradients that are kept in low precision are rounded once for each part
    and once for the sum, however they are computed.

    Args:
        dtype: of the gradients.
        is_single: whether they are computed in float32 at least.

    Example:
        >>> f"{tolerance_of(torch.float32):.1e}, {tolerance_of(torch.bfloat16):.1e}"
        '7.6e-06, 7.8e-03'
    """
    if dtype is torch.float64:
        return _IN_FLOAT64
    unit = torch.finfo(dtype).eps / 2
    if is_single:
        return ROUNDINGS * unit if unit < _LOW else 2 * unit
    return 16 * max(unit, _LOW)


class _StandIns(Substitution):
    """Numbers that stand in for random ones: in micro-batches, in a ``collate``, and in what sees all samples."""

    def __init__(self, *, in_single: bool) -> None:
        super().__init__(promotes=False, where=lambda: "")
        self._in_single = in_single
        self.in_parts, self.in_collate, self.in_whole = self.numbers, Numbers(), Numbers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_single and not (in_backward() and func is torch.ops.aten._to_copy.default):
            args, kwargs = promoted(func, args, kwargs, SINGLE)  # a gradient has the precision of what it is of
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Turns:
    """Tells numbers that stand in for random ones whose samples they belong to.

    Args:
        substitution: has the numbers; ``None`` where there are none.
        rows: of all samples.
        parts: that they are cut into.
    """

    def __init__(self, substitution: _StandIns | None, rows: int, parts: Sequence[Part]) -> None:
        self._substitution, self._rows, self._parts = substitution, rows, parts
        self._turn = self._collated = 0

    def begin(self) -> None:
        """A micro-batch begins."""
        if self._substitution is not None:
            self._substitution.numbers = self._substitution.in_parts
            self._substitution.numbers.begin(self._parts[self._turn % len(self._parts)].samples, self._rows)
        self._turn += 1

    def begin_whole(self) -> None:
        """What sees all samples begins."""
        if self._substitution is not None:
            self._substitution.numbers = self._substitution.in_whole
            self._substitution.numbers.begin(range(self._rows), self._rows)

    def collated(self, splittable: Splittable) -> Splittable:
        """The samples, with a ``collate`` whose random numbers belong to them, too.

        Args:
            splittable: the samples.
        """
        found, collate, substitution = copy.copy(splittable), splittable.collate, self._substitution
        if collate is None or substitution is None:
            return found

        def with_numbers(raw: list[Any]) -> Any:
            outside, substitution.numbers = substitution.numbers, substitution.in_collate
            substitution.numbers.begin(self._parts[self._collated % len(self._parts)].samples, self._rows)
            self._collated += 1
            try:
                return collate(raw)
            finally:
                substitution.numbers = outside

        found.collate = with_numbers
        return found


class Trial:
    """Runs cuts of a logical batch, and leaves nothing of it.

    Args:
        task: of the step.
        parameters: that get a gradient.
        optimizations: gives the memory optimizations of a plan.
        reducer: the processes that run the same cuts together; ``None`` for this one alone.
    """

    def __init__(
        self,
        task: Task,
        parameters: Sequence[torch.Tensor],
        optimizations: Optimizations,
        reducer: Reducer | None = None,
    ) -> None:
        self._reducer = reducer_for(task.model, False, task.settings.device) if reducer is None else reducer
        self._numbers: _StandIns | None = None
        self._task, self.parameters, self._optimizations = task, list(parameters), optimizations
        self._modules = list(
            {id(one): one for one in (*task.modules, *reached_modules(task.model, task.loss_fn).values())}.values()
        )
        self._every_module = modules_of(*self._modules)
        devices = devices_among(self._every_module)
        self._may_write = not any(map(is_scripted, self._every_module))  # to tensors that nobody else puts back
        functions = [task.loss_fn, *getattr(task.loss_fn, "user_functions", ()), task.splittable.collate, task.count]
        self._effects = SideEffects([*self._modules, *functions], tensors=False)
        self._before, self._random = Snapshot(self._modules, devices, task.loss_fn), RandomState(devices)

    def difference(self, cut: Cut, *, in_single: bool) -> Difference:
        """Runs a cut whole and in parts.

        Args:
            cut: the samples.
            in_single: whether what is of low precision is computed in float32.
        """
        in_pieces = isinstance(self._task.loss_fn, InPieces)  # whose pieces have no numbers of their samples
        substitution = _StandIns(in_single=in_single) if in_single or not in_pieces else None
        whole, leaves, values, moved = self._run(cut, cut.whole, substitution)
        if substitution is None and moved[0]:
            substitution = _StandIns(in_single=in_single)
            whole, leaves, values, moved = self._run(cut, cut.whole, substitution)
        draws = bool(substitution is not None and substitution.draws) or moved[1]
        split, others, parts_values, _ = self._run(cut, cut.parts, substitution if in_single or draws else None)
        # Leaves that a loss makes itself, or that stand for cut tensors, are others in each run.
        lasting = {id(one) for one in self.parameters} | ({id(one) for one in leaves} & {id(one) for one in others})
        counted = [one for one in [*leaves, *others] if id(one) in lasting]
        scale, distance = whole.distance(of=counted), split.distance(whole, of=counted)
        error = 0.0 if distance == 0 else distance / scale if scale > 0 else math.inf
        off = max((_relative(parts_values.get(name, 0.0), value) for name, value in values.items()), default=0.0)
        return self.judged(counted, error, off, in_single=in_single, draws=draws)

    def judged(
        self, leaves: Iterable[torch.Tensor], error: float, off: float, *, draws: bool, in_single: bool = False
    ) -> Difference:
        """A difference by the precision in which it was computed.

        Args:
            leaves: whose gradients were compared.
            error: of the gradients.
            off: of the losses.
            draws: whether random numbers are drawn.
            in_single: whether what is of low precision was computed in float32.
        """
        kinds = [leaf.dtype for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
        lowest = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
        is_low = self._task.settings.autocast is not None or lowest in LOW_PRECISION
        return Difference(error if math.isfinite(error) else math.inf, off, lowest, in_single or not is_low, draws)

    def of_losses(self, cut: Cut) -> Difference:
        """Compares the losses of samples that together fit only without their gradients.

        Args:
            cut: the samples.

        Raises:
            OverBudget: they take more than one does with its gradient, which is measured.
        """
        for row in range(cut.splittable.rows):
            alone = Cut(cut.splittable.chosen([row]), (1, 0))
            with LiveBytes() as live:
                self._run(alone, alone.whole, None)
            if live.peak:  # else it counts nothing, and was not run
                break
        substitution = _StandIns(in_single=False)
        with Recording(limit=live.peak):
            *_, values, moved = self._run(cut, cut.whole, substitution, differentiate=False)
        draws = bool(substitution.draws) or moved[1]
        *_, in_parts, _ = self._run(cut, cut.parts, substitution if draws else None, differentiate=False)
        error = max((_relative(in_parts.get(name, 0.0), value) for name, value in values.items()), default=math.inf)
        return self.judged(self.parameters, error, error, draws=draws)

    def _run(
        self, cut: Cut, parts: list[Part], substitution: _StandIns | None, *, differentiate: bool = True
    ) -> tuple[Sketch, list[torch.Tensor], dict[str, float], tuple[bool, bool]]:
        """The gradient of a cut in parts, the leaves that have one, the losses, and which generators have moved."""
        task, outside = self._task, OutsideLeaves(self.parameters)
        turns = _Turns(substitution, cut.splittable.rows, parts)
        settings = replace(
            task.settings, scaler=None, policy="native", reducer=self._reducer,
            kept_graphs=task.settings.kept_graphs if substitution is None else len(parts),
        )  # fmt: skip
        own = replace(
            task, settings=settings, splittable=turns.collated(cut.splittable), devices=None, optimizations=None,
            batch_norm="frozen" if task.batch_norm == "ghost" else task.batch_norm,
            loss_fn=announced(task.loss_fn, turns.begin, turns.begin_whole, in_pieces=substitution is None),
        )  # fmt: skip
        own.splittable.is_copied = task.splittable.is_copied or not task.is_planned
        no_dropout = _without_dropout(self._every_module)
        with self.undisturbed(outside), substitution or contextlib.nullcontext(), no_dropout:
            with self._optimizations():
                _, sums = run_pass(
                    own, parts, self.parameters, Progress(), outside=outside, differentiate=differentiate
                )
            leaves = [one for one in [*self.parameters, *(leaf for leaf, _ in outside.found)] if one.grad is not None]
            with unwatched():
                return Sketch(leaves), leaves, values_of(sums), self._moved()

    def shared(self, cut: Cut | None, parts: list[Part] | None) -> tuple[Sketch, dict[str, float], bool]:
        """Runs a cut as a logical batch over the processes that this trial is made with.

        Args:
            cut: the samples of this process; ``None`` for none.
            parts: how they are split.

        Returns:
            The part of the gradient that lies here, the losses of all processes, and whether numbers were drawn that
            do not belong to the samples.
        """
        task, rows = self._task, 0 if cut is None else cut.splittable.rows
        self._numbers = self._numbers or _StandIns(in_single=False)
        turns = _Turns(self._numbers, rows, parts or [Part((), 0)])
        splittable = task.splittable.chosen([]) if cut is None else turns.collated(cut.splittable)
        own = replace(
            task, settings=replace(task.settings, scaler=None, policy="native"), splittable=splittable,
            optimizations=None,
            batch_norm="frozen" if task.batch_norm == "ghost" else task.batch_norm,
            loss_fn=announced(task.loss_fn, turns.begin, turns.begin_whole, in_pieces=False),
        )  # fmt: skip
        with self.undisturbed(), self._numbers:
            with self._optimizations():
                _, sums = run_pass(own, parts or [], self.parameters, Progress())
            self._reducer.reduce_(sums, self.parameters)
            self._reducer.listen()
            with unwatched():
                values = {} if sums.shared is None else dict(sums.shared.losses)
                return Sketch(self.parameters), values, any(self._moved())

    def _moved(self) -> tuple[bool, bool]:
        """Whether generators of torch have moved, and whether others have; the user's own included."""
        (of_torch, others), (own_of_torch, own_others) = self._random.moved(), self._effects.drew()
        return of_torch or own_of_torch, others or own_others

    @contextlib.contextmanager
    def undisturbed(self, outside: OutsideLeaves | None = None) -> Iterator[None]:
        """Puts everything back that the block changes: gradients, buffers, attributes, variables, random state.

        Args:
            outside: knows leaves whose gradients are taken off in the block.
        """
        task = self._task
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        own = _attributes_of(task.loss_fn)
        for parameter in self.parameters:
            parameter.grad = None
        if isinstance(task.loss_fn, InPieces) and getattr(task.loss_fn, "carried", None) is not None:
            task.loss_fn.carried = None  # type: ignore[attr-defined]  # of other rows
        written = Overwritten(_buffers(self._every_module)) if self._may_write else None
        try:
            with written or contextlib.nullcontext():
                yield
        finally:
            for parameter, gradient in [*gradients, *(outside.found if outside is not None else ())]:
                parameter.grad = gradient
            if own:
                vars(task.loss_fn).update(own)
            if written is not None:
                self._may_write = bool(written.bytes)  # what one run does not write to, none does
                written.restore()
            self._effects.restore()
            self._before.restore(warns=False)

    def certificate(self, cut: Cut) -> Certificate:
        """The certificate of the samples of a cut, in float64.

        Args:
            cut: the samples.

        Raises:
            AnyBatchError: it can't be made.
        """
        from anybatch.checking.examination import examine
        from anybatch.checking.subjects import subject_of

        task = self._task
        subject = subject_of(
            cut.splittable.whole(), model=task.model, loss_fn=task.loss_fn, count=task.count,
            broadcast=cut.splittable.broadcast, collate=cut.splittable.collate, cost=None,
            micro_batch_size=cut.sizes[0], batch_norm="frozen" if task.batch_norm == "ghost" else task.batch_norm,
            dropout=task.settings.dropout, inputs=task.settings.inputs,
        )  # fmt: skip
        with self.undisturbed(), self._reducer.apart(self._modules):
            return examine(subject)


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """What is on during a proof: nothing is compiled for it, no mode and no doctor sees it, and it warns of nothing."""
    with ExitStack() as stack:
        stack.enter_context(unobserved())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(unwatched())
        stack.enter_context(torch.enable_grad())
        yield


def _relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other) if other else abs(one)


@contextlib.contextmanager
def _without_dropout(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Modules of torch drop nothing in the block, so that nothing has to stand in for what they draw."""
    with ExitStack() as undo:
        for module in modules:
            if isinstance(module, torch.nn.modules.dropout._DropoutNd) and not is_scripted(module):
                undo.callback(setattr, module, "training", module.training)
                module.training = False
            elif isinstance(module, (torch.nn.MultiheadAttention, torch.nn.RNNBase)) and not is_scripted(module):
                undo.callback(setattr, module, "dropout", module.dropout)
                module.dropout = 0.0
        yield


def _buffers(modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def _attributes_of(loss_fn: Any) -> dict[str, Any]:
    """What a loss function of anybatch's own learns from running."""
    if type(loss_fn).__module__.partition(".")[0] != "anybatch":
        return {}
    return {name: copy.copy(one) if isinstance(one, dict) else one for name, one in vars(loss_fn).items()}
