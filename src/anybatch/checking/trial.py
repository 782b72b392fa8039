"""Runs some samples as a step would run them, whole or in parts, and leaves nothing of it."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from anybatch.batch.batches import Part
from anybatch.checking.cuts import Cut
from anybatch.checking.gradients import Kept, distance, kept_of, relative
from anybatch.checking.proving import Split
from anybatch.checking.reach import modules_of as reached_modules
from anybatch.checking.reach import own_optimizers_put_back, parameters_of, reached_by
from anybatch.checking.rig import announced, is_flag, scaled
from anybatch.checking.sharedbounds import Bounds, bound_of_samples
from anybatch.checking.standins import SINGLE, StandIns, Turns, Wider
from anybatch.interception import unobserved
from anybatch.loss.losses import InPieces, LossFunction, as_coupled
from anybatch.loss.reducing import ALONE, Reducer
from anybatch.loss.sums import values_of
from anybatch.loss.weights import FORWARD
from anybatch.memory.meter import OverBudget, Recording
from anybatch.memory.overwritten import Overwritten, memory_of
from anybatch.parallel.ranks import reducer_for
from anybatch.records.certificates import Certificate, Proof, Reason
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import devices_among, is_scripted, modules_of
from anybatch.tensors.precision import LOW_PRECISION
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import SideEffects
from anybatch.update.batchnorm import BatchNormPolicy
from anybatch.update.passes import Progress, Task, run_pass
from anybatch.update.transaction import Failure, Snapshot, is_out_of_memory

_ROUNDINGS = 128
"""Roundings of the precision that two gradients may be apart, relative to the whole: sums in another order."""
_FREE = 16 << 20  # bytes that a proof may take
_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_OF_OTHERS = ("torch.utils.checkpoint", "torch._library.autograd")  # backwards of torch that run what the user wrote
_LOUDER = 1e4
_STIRRED = 0.1  # of a weight, by which it is moved
_IN_FLOAT64 = 1e-10
_LOW = 2.0**-9
"""The unit of bfloat16, whose gradients differ by some of them where they are computed in low precision."""
T = TypeVar("T")
Found = tuple[Proof, Reason | None]


@dataclass(frozen=True)
class Difference:
    """How far the two gradients of a cut are apart."""

    error: float  # relative to the whole's; infinite if one is not finite
    value_error: float  # of the worst loss
    dtype: torch.dtype  # the lowest precision of what has a gradient
    is_single: bool  # whether everything was computed in float32 at least
    draws: bool  # whether random numbers are drawn
    cut: Cut
    # the operation that bounds what the samples give together, as a clamp of their mean; ``""`` for none
    bound: str = ""
    # how far off the gradient is where two micro-batches really draw the same numbers, and what draws them
    seeded: tuple[float, Sequence[str]] | None = None
    apart: float = 0.0  # the norm of the parts' gradient where the whole's is 0 within rounding; else 0

    @property
    def tolerance(self) -> float:
        """The bound of rounding, up to which error they count as the same.

        Sums over a whole batch and over its parts are added in another order, and a backward hands that rounding on
        from layer to layer: up to 20 units (2^-24 in float32) were seen. Where two parts have other gradients, a count
        that is off by 1 in 1000 makes some thousand units. Gradients that are kept in low precision are rounded once
        for each part and once for the sum, however they are computed.
        """
        if self.dtype is torch.float64:
            return _IN_FLOAT64
        unit = torch.finfo(self.dtype).eps / 2
        if self.is_single:
            return _ROUNDINGS * unit if unit < _LOW else 2 * unit
        return 16 * max(unit, _LOW)

    @property
    def is_none(self) -> bool:
        """Whether they are the same within rounding."""
        return self.error <= self.tolerance and self.value_error <= (1e-5 if self.is_single else 0.05)

    def proof(self, outcome: Any, by: Any, certificate: Certificate | None = None, **others: Any) -> Proof:
        """What is proved of the cut, by the numbers of a certificate where there is one."""
        found, sizes = self if certificate is None else certificate, self.cut.sizes
        dtype = str(found.dtype).removeprefix("torch.")
        return Proof(outcome, by, sum(sizes), sizes, found.error, found.tolerance, dtype, apart=found.apart, **others)


class _Hooks(TorchFunctionMode):
    """Notes the modules of Python from which hooks are put on tensors."""

    def __init__(self, modules: set[str]) -> None:
        super().__init__()
        self._modules = modules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook:
            self._modules.add(str(getattr(args[1], "__module__", "")))
        return func(*args, **(kwargs or {}))


class Ran(NamedTuple):
    """What a run gave: the gradient, the leaves that have one, the losses, and which random numbers were drawn."""

    gradient: Kept
    leaves: list[torch.Tensor]
    losses: dict[str, float]
    drew_torch: bool
    drew_others: bool

    def value_error(self, whole: "Ran", *, without: float = 0.0) -> float:
        """How far the losses are from those of the whole, in the worst of them."""
        pairs = ((self.losses.get(name, 0.0), value) for name, value in whole.losses.items())
        return max((abs(one - value) / abs(value or 1.0) for one, value in pairs), default=without)


class Trial:
    """Runs cuts of a logical batch, and leaves nothing of it.

    Args:
        reducer: the processes that run the same cuts together; ``None`` for this one alone.
    """

    def __init__(self, split: Split, reducer: Reducer | None = None) -> None:
        task = split.task
        self._reducer = reducer_for(task.model, False, task.settings.device) if reducer is None else reducer
        self._is_shared = reducer is not None
        self._task, self.parameters, self._optimizations = task, list(split.parameters), split.optimizations
        of_loss = reached_by(task.loss_fn)
        reached = (*task.modules, *reached_modules(task.model, task.loss_fn, of_loss).values())
        self._modules = list({id(one): one for one in reached}.values())
        self._every_module = modules_of(*self._modules)
        devices = devices_among(self._every_module)
        self._has_moved = False
        self.counts: bool | None = None  # whether a run counts in Python; ``None`` as long as nothing was run
        # whether a run moves buffers, or there is a flag among them
        self.has_state = any(map(is_flag, _buffers(self._every_module)))
        self._changers: set[str] = set()  # modules of Python from which gradients on their way are changed
        self.ranks = False  # whether samples are put in an order, so that more of them may show something else
        self.room = 0  # bytes that samples with their gradients have taken
        self.written: dict[int, torch.Tensor] = {}  # weights that the forward or the loss writes to, by identity
        self._draws = True  # until a run has drawn nothing
        self.draws_elsewhere = False  # whether NumPy or Python draws numbers
        self.draws_shared = False  # whether torch draws numbers that are of no sample
        self._may_write = not any(map(is_scripted, self._every_module))  # to tensors that nobody else puts back
        # the weights of TorchScript that writes to something, which no mode sees; until a run has moved none of them
        self._scripted = [one for module in self._every_module if _writes(module) for one in module.parameters()]
        functions = [task.loss_fn, *getattr(task.loss_fn, "user_functions", ()), task.splittable.collate, task.count]
        self.effects = SideEffects([*self._modules, *functions], tensors=False)
        self._own_optimizers = partial(own_optimizers_put_back, task.model, of_loss)
        self._before, self._random = Snapshot(self._modules, devices, task.loss_fn), RandomState(devices)

    def difference(self, cut: Cut, *, in_single: bool) -> Difference:
        """Runs a cut whole and in parts; ``in_single`` what is of low precision is computed in float32."""
        wider = SINGLE if in_single else None
        in_pieces = isinstance(self._task.loss_fn, InPieces)  # whose pieces have no numbers of their samples
        numbers = StandIns(wider) if in_single or not in_pieces else None
        of_whole, of_parts = Bounds(), Bounds()
        with Recording() if self._task.is_planned else contextlib.nullcontext() as recording:
            whole, numbers = self._whole(cut, numbers, wider, bounds=of_whole)
        if recording is not None:
            self.room = max(self.room, recording.most)
        self.ranks = self.ranks or of_whole.ranks
        self.draws_elsewhere = self.draws_elsewhere or whole.drew_others
        self._draws = draws = bool(numbers is not None and numbers.draws) or whole.drew_others
        watched = of_parts if of_whole.met else None
        split = self.run(cut, cut.parts, numbers if in_single or draws else None, bounds=watched)
        found = self._compared(cut, whole, split, draws=draws, in_single=in_single)
        self.draws_shared |= numbers is not None and numbers.in_parts.is_shared and not numbers.in_parts.is_uneven
        if not found.is_none:
            return found
        seeded = None if in_pieces or not (draws or whole.drew_torch) else self._seeded(cut, numbers)
        if seeded is not None or whole.drew_others:
            return replace(found, seeded=seeded)
        return replace(found, bound=bound_of_samples(of_whole.met, of_parts.met, len(cut.sizes)))

    def _seeded(self, cut: Cut, numbers: StandIns | None) -> tuple[float, Sequence[str]] | None:
        """How far off a gradient is whose parts draw the same numbers, and the operations; ``None`` if none do."""
        task = self._task
        if self._is_shared or numbers is None or task.count == FORWARD or as_coupled(task.loss_fn) is not None:
            return None  # or what counts by a forward draws its numbers again
        ran = numbers.repeated(*(partial(self.run, cut, parts, numbers) for parts in (cut.whole, cut.parts)))
        operations = [draw.operation for draw in numbers.draws]
        return None if ran is None else (self._compared(cut, *ran).error, operations)

    def _compared(
        self, cut: Cut, whole: Ran, other: Ran, *, draws: bool = False, in_single: bool = False
    ) -> Difference:
        """How far another run is from the whole."""
        # Leaves that a loss makes itself, or that stand for cut tensors, are others in each run.
        lasting = {id(one) for one in self.parameters} | set(map(id, whole.leaves)) & set(map(id, other.leaves))
        counted = [one for one in [*whole.leaves, *other.leaves] if id(one) in lasting]
        off, norm = distance(other.gradient, whole.gradient, of=counted), distance(whole.gradient, of=counted)
        found = self.judged(
            cut, counted, relative(off, norm), other.value_error(whole), draws=draws, in_single=in_single
        )
        is_of_nothing = math.isfinite(off) and norm <= found.tolerance * off
        return replace(found, apart=off) if is_of_nothing else found

    def is_the_same(self, cut: Cut) -> bool:
        """Whether the first part of a cut has the gradient of the whole cut, which then is not of its samples."""
        alone = cut.alone(cut.parts[0])
        whole, part = self.run(cut, cut.whole), self.run(alone, alone.whole)
        return replace(self._compared(cut, whole, part), value_error=0.0).is_none

    def moves(self, cut: Cut) -> bool:
        """Whether the very same samples give something else each time that they run, from the same random state.

        What only the first run makes, such as a cache, has been made by then.
        """
        one, other = (self.run(cut, cut.whole) for _ in range(2))
        found = self._compared(cut, one, other)
        is_number = math.isfinite(found.error) and math.isfinite(found.value_error)
        return is_number and not (one.drew_others or other.drew_others or found.is_none)

    def carries(self, cut: Cut) -> Difference | None:
        """How far the parts of a cut are from the same parts in another order; ``None`` where anything else moves."""
        backwards = Cut(cut.backwards.splittable, cut.sizes[::-1])
        one, other, again = (self.run(way, way.parts) for way in (cut, backwards, cut))
        moves = one.drew_torch or one.drew_others or not self._compared(cut, one, again).is_none
        return None if moves else replace(self._compared(cut, one, other), value_error=0.0)

    def regrouped(self, cut: Cut, other: Cut) -> Difference | None:
        """How far the parts of another cut of the same samples are from them at once; ``None`` where numbers differ."""
        whole, parts = self.run(cut, cut.whole), self.run(other, other.parts)
        draws = any(one.drew_torch or one.drew_others for one in (whole, parts))
        return None if draws else self._compared(cut, whole, parts)

    def _whole(
        self, cut: Cut, numbers: StandIns | None, wider: Wider | None = None, **options: Any
    ) -> tuple[Ran, StandIns | None]:
        """Runs a cut whole, once more where numbers turn out to be drawn; with what stands in for these."""
        whole = self.run(cut, cut.whole, numbers, **options)
        if numbers is None and whole.drew_torch:
            numbers = StandIns(wider)
            whole = self.run(cut, cut.whole, numbers, **options)
        return whole, numbers

    def judged(
        self,
        cut: Cut,
        leaves: Iterable[torch.Tensor],
        error: float,
        off: float,
        *,
        draws: bool,
        in_single: bool = False,
    ) -> Difference:
        """A difference of the gradients of leaves and of the losses, by the precision in which it was computed."""
        kinds = [leaf.dtype for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
        lowest = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
        is_low = self._task.settings.autocast is not None or lowest in LOW_PRECISION
        return Difference(error if math.isfinite(error) else math.inf, off, lowest, in_single or not is_low, draws, cut)

    def of_losses(self, cut: Cut) -> Difference:
        """Compares the losses of parts that together may fit only without their gradients.

        Raises:
            OverBudget: they take more than one does with its gradient, which is measured.
        """
        rooms = (self._measured(cut.alone(part)) for part in cut.parts)
        return self._of_losses(cut, next(filter(None, rooms), 0))[0]  # what has no room counts nothing, and was not run

    def _measured(self, cut: Cut) -> int:
        """The bytes that a cut takes with its gradient."""
        with Recording() as recording:
            self.run(cut, cut.whole)
        most: int = recording.most
        self.room = max(self.room, most)
        return most

    def fitting(self, part: Part, most: int) -> tuple[int, int]:
        """How many micro-batches there is room for without their gradients, up to a number, and the bytes of it."""
        alone = Cut(self._task.splittable.chosen([*part.samples], part.batch), (len(part.samples),))
        most_of_one = self._measured(alone)
        room = most_of_one if self._task.is_planned else max(most_of_one, _FREE)
        with Recording() as light:
            self.of_losses_beside(alone, room)
        held = sum(one.nbytes for one in self._weights())  # once, whatever the samples
        return min(most, (room - held) // max(1, light.most - held)), room

    def of_losses_beside(self, cut: Cut, room: int | None = None) -> Difference | None:
        """The same of whole micro-batches, for which a plan has the room of the gradients, or of fewer with theirs.

        Returns:
            The first difference that a cut makes, or the last one; ``None`` where numbers are drawn that nothing stands
            in for, which no two runs share.

        Raises:
            OverBudget: they take more than a plan has room for.
        """
        reserved = max(self.room, sum(one.nbytes for one in self.parameters if one.grad is None))
        limit = room or (reserved if self._task.is_planned else None)
        try:
            difference, drew_others = self._of_losses(cut, limit)
        except OverBudget:
            raise
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            Failure(error).release()  # the loss may differentiate by itself, which takes a graph
            difference, drew_others = self._of_losses(cut, limit, differentiate=True)
        return None if drew_others else difference

    def _of_losses(self, cut: Cut, limit: int | None, *, differentiate: bool = False) -> tuple[Difference, bool]:
        with contextlib.nullcontext() if limit is None else Recording(limit=limit):
            whole, numbers = self._whole(cut, StandIns() if self._draws else None, differentiate=differentiate)
        draws = bool(numbers is not None and numbers.draws) or whole.drew_others

        def orders() -> Iterator[Cut]:
            yield cut
            if self._has_moved and not draws:  # a largest value so far may be the first micro-batch's
                yield cut.backwards

        for other in orders():
            split = self.run(other, other.parts, numbers if draws else None, differentiate=differentiate)
            off = split.value_error(whole, without=math.inf)
            error = self._compared(other, whole, split).error if differentiate else off
            difference = self.judged(other, self.parameters, error, off, draws=draws)
            if not difference.is_none:
                break
        return difference, whole.drew_others

    def of_losses_alike(self, cut: Cut, losses: Sequence[LossFunction], *, in_value: bool = False) -> Difference:
        """Compares two losses that should be the same, in their gradients unless only the values count."""
        numbers, ran = StandIns(in_order=False), list[Ran]()
        numbers.held.constant = True
        for loss_fn in losses:
            with self._as(loss_fn, settings=replace(self._task.settings, chunk_length=None)):
                ran.append(self.run(cut, cut.whole, numbers))
        whole, other = ran
        found = self._compared(cut, whole, other, draws=whole.drew_others or other.drew_others)
        return replace(found, error=0.0) if in_value else found

    @contextlib.contextmanager
    def _as(self, loss_fn: LossFunction, **others: Any) -> Iterator[None]:
        """Runs another loss in the block."""
        task = self._task
        self._task = replace(task, loss_fn=loss_fn, **others)
        try:
            yield
        finally:
            self._task = task

    def run(
        self,
        cut: Cut | None,
        parts: list[Part] | None,
        numbers: StandIns | None = None,
        *,
        differentiate: bool = True,
        bounds: Bounds | None = None,
    ) -> Ran:
        """Runs a cut in parts, or none, as a logical batch over the processes that this trial is made with."""
        task, samples = self._task, [part.samples for part in parts or [Part((), 0)]]
        turns = Turns(numbers, 0 if cut is None else cut.splittable.rows, samples)
        is_of_no_sample = numbers is None or numbers.held.constant
        in_pieces = is_of_no_sample and not self._is_shared
        kept = task.settings.kept_graphs if self._is_shared or numbers is None else len(samples)
        own = replace(
            task, devices=None, optimizations=None, on_loss=None,
            settings=replace(task.settings, scaler=None, policy="native", reducer=self._reducer, kept_graphs=kept),
            splittable=task.splittable.chosen([]) if cut is None else turns.collated(cut.splittable),
            batch_norm="frozen" if task.batch_norm == "ghost" else task.batch_norm,
            loss_fn=announced(task.loss_fn, turns.begin, turns.begin_whole, in_pieces=in_pieces),
        )  # fmt: skip
        own.splittable.is_copied = task.splittable.is_copied or not task.is_planned
        own.splittable.are_arrays_copied = True
        outside = None if self._is_shared else OutsideLeaves(self.parameters)
        is_drawn = self._is_shared or (numbers is not None and numbers.drawn is not None)
        no_dropout = contextlib.nullcontext() if is_drawn else _without_dropout(self._every_module)
        with self.undisturbed(outside, numbers, bounds), no_dropout:
            with self._optimizations():
                _, sums = run_pass(
                    own, parts or [], self.parameters, Progress(), outside=outside, differentiate=differentiate
                )
            if self._is_shared:
                self._reducer.reduce_(sums, self.parameters)
                self._reducer.listen()
            found = [] if outside is None else [leaf for leaf, _ in outside.found]
            self._changers.update(() if outside is None else outside.functions)
            leaves = [one for one in [*self.parameters, *found] if one.grad is not None]
            with without_modes():
                moved = (any(both) for both in zip(self._random.moved(), self.effects.drew(), strict=True))
                return Ran(kept_of(leaves), leaves, values_of(sums), *moved)

    @contextlib.contextmanager
    def undisturbed(
        self, outside: OutsideLeaves | None = None, numbers: StandIns | None = None, bounds: Bounds | None = None
    ) -> Iterator[None]:
        """Puts everything back that the block changes: gradients, buffers, attributes, variables, random state."""
        loss_fn = self._task.loss_fn
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        own = _attributes_of(loss_fn)
        buffers = _versions(self._every_module)
        for parameter in self.parameters:
            parameter.grad = None
        if isinstance(loss_fn, InPieces) and getattr(loss_fn, "carried", None) is not None:
            loss_fn.carried = None  # type: ignore[attr-defined]  # of other rows
        run = None if numbers is None else numbers.__torch_dispatch__  # one mode instead of three, for speed
        if bounds is not None:
            bounds.run, run = run, bounds.__torch_dispatch__
        written = Overwritten(_buffers(self._every_module), run) if self._may_write else None
        scripted = [(one, one._version, one.detach().clone()) for one in self._scripted]
        places = [(one, memory_of(one)) for one in self._weights()]  # another tensor may be put in .data
        try:
            seen = _Hooks(self._changers) if self.counts is None else contextlib.nullcontext()  # each run puts the same
            with seen, written or bounds or numbers or contextlib.nullcontext(), self._own_optimizers():
                yield
        finally:
            for parameter, gradient in [*gradients, *(outside.found if outside is not None else ())]:
                parameter.grad = gradient
            if own:
                vars(loss_fn).update(own)
            self.written.update((id(one), one) for one, place in places if memory_of(one) != place)
            if written is not None:
                self.written.update((id(one), one) for one, _ in places if written.holds(one))
                self._may_write = bool(written.bytes)  # what one run does not write to, none does
                written.restore()
            self._scripted = [one for one, version, _ in scripted if one._version != version]
            for one, _, values in scripted if self._scripted else ():
                one.data.copy_(values)
            self.written.update((id(one), one) for one in self._scripted)
            moves_buffers = _versions(self._every_module) != buffers
            self.has_state = self.has_state or moves_buffers
            is_moved = (written is not None and self._may_write) or moves_buffers
            if self.counts is None:
                self.counts = any(one.is_number or one.is_growth for one in self.effects.found())
            self._has_moved = self.effects.restore() or is_moved
            self._before.restore(warns=False)

    def written_by_name(self) -> dict[str, torch.Tensor]:
        """The weights that the forward or the loss writes to, as they are written in code next to the loss."""
        weights = parameters_of(reached_modules(self._task.model, self._task.loss_fn))
        return {name: one for name, one in weights.items() if id(one) in self.written}

    def _weights(self) -> Iterator[torch.Tensor]:
        for module in self._every_module:
            yield from (one for one in module._parameters.values() if one is not None)

    @property
    def has_hooks(self) -> bool:
        """Whether hooks may change gradients."""
        hooks = (getattr(one, name, None) for one in self._every_module for name in _HOOKS)
        own = any(one.partition(".")[0] not in ("torch", "anybatch") or one in _OF_OTHERS for one in self._changers)
        return own or any(one._backward_hooks for one in self.parameters) or any(hooks)

    def louder(self) -> AbstractContextManager[None]:
        """Multiplies the loss, since a hook that clamps shows nothing below its bound."""
        return self._as(scaled(self._task.loss_fn, _LOUDER))

    @contextlib.contextmanager
    def stirred(self) -> Iterator[None]:
        """Moves the weights that are written to, since an average shows nothing while it is what it averages."""
        before = [(one, one.detach().clone()) for one in self.written.values() if one.is_floating_point()]
        generator = torch.Generator("cpu").manual_seed(0)
        try:
            for one, values in before:
                noise = torch.randn(one.shape, generator=generator, device="cpu").to(one.device, one.dtype)
                one.data.add_(noise * _STIRRED * (values.square().mean().sqrt() + _STIRRED))
            yield
        finally:
            for one, values in before:
                one.data.copy_(values)

    def isolated(self, cut: Cut, examined: Callable[[Task], T]) -> T:
        """What is found of a cut, as a task in full precision that runs alone; nothing is left of it."""
        task = self._task
        settings = replace(
            task.settings, autocast=None, scaler=None, policy="auto", reducer=ALONE, kept_graphs=None, chunk_length=None
        )
        batch_norm: BatchNormPolicy = "frozen" if task.batch_norm == "ghost" else task.batch_norm
        own = replace(
            task, settings=settings, splittable=cut.splittable, batch_norm=batch_norm, micro_batch_size=cut.sizes[0],
            devices=None, optimizations=None, on_loss=None,
        )  # fmt: skip
        known = self._may_write, self.has_state
        try:
            with self.undisturbed(), self._reducer.apart(self._modules):
                return examined(own)
        finally:
            self._may_write, self.has_state = known  # of copies nobody can tell

    def certificate(self, cut: Cut, loss_fn: LossFunction | None = None) -> Certificate:
        """The certificate of the samples of a cut, in float64, with the loss of the task or another one."""
        from anybatch.checking.examination import examine

        return self.isolated(cut, lambda own: examine(own if loss_fn is None else replace(own, loss_fn=loss_fn)))


@contextlib.contextmanager
def tolerated() -> Iterator[None]:
    """Goes on behind a block that fails, without what its failure holds in memory."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what the user's program may raise where some samples run
        Failure(error).release()


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """What is on during a proof: nothing is compiled for it, no mode and no doctor sees it, and it warns of nothing.

    The default device stays, since the loss may make tensors there.
    """
    with unobserved(), warnings.catch_warnings(), without_modes(), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


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


def _writes(module: torch.nn.Module) -> bool:
    """Whether a module is TorchScript with operations in place."""
    return is_scripted(module) and hasattr(module, "inlined_graph") and "_(" in str(module.inlined_graph)


def _buffers(modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def _versions(modules: Sequence[torch.nn.Module]) -> list[tuple[int, int]]:
    return [(id(one), 0 if one.is_inference() else one._version) for one in _buffers(modules)]


def _attributes_of(loss_fn: Any) -> dict[str, Any]:
    """What a loss function of anybatch's own learns from running."""
    if type(loss_fn).__module__.partition(".")[0] != "anybatch":
        return {}
    return {name: copy.copy(one) if isinstance(one, dict) else one for name, one in vars(loss_fn).items()}
