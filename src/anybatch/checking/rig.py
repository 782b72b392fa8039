"""Losses and gradients of a batch, of a split of it or of one part alone, all of the same isolated model."""

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.accelerators import has_cudnn
from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.trees import map_leaves
from anybatch.batch.writes import own_array
from anybatch.checking.causes import reason
from anybatch.checking.cuts import splits_of
from anybatch.checking.gradients import Comparison, Outcome, kept_of
from anybatch.checking.reach import modules_of, optimized_by, own_optimizers_put_back, parameters_of, reached_by
from anybatch.checking.standins import DOUBLE, StandIns, Turns
from anybatch.checking.visits import Visits
from anybatch.checking.wording import in_one_line
from anybatch.errors import CountError, LossError
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import Evaluation, InPieces, LossFunction, Piece, Place, is_nothing, unless_nothing
from anybatch.loss.sequence import OverTime
from anybatch.loss.sums import values_of
from anybatch.loss.weights import fetched
from anybatch.memory.meter import OverBudget
from anybatch.records.certificates import Reason
from anybatch.records.means import Mean
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.graph import leaves_of
from anybatch.tensors.modules import modules_behind
from anybatch.tensors.precision import in_precision
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import INTERNALS, Effect, SideEffects, same
from anybatch.update.batchnorm import coupling_modules
from anybatch.update.passes import Progress, Task, run_pass
from anybatch.update.transaction import is_out_of_memory

T = TypeVar("T")


def is_flag(buffer: torch.Tensor) -> bool:
    """Whether a buffer says no more than yes or no."""
    return buffer.dtype in (torch.bool, torch.uint8) and buffer.numel() == 1


def muted(hooks: Any, undo: ExitStack) -> None:
    """Empties a dictionary of hooks until a stack is closed."""
    if hooks:
        undo.callback(hooks.update, dict(hooks))
        hooks.clear()


class _OutsideLeaves(Exception):
    """A loss depends on leaves that no module holds."""


class Rig:
    """Runs a task in isolation, in one precision and with random numbers that do not depend on the split.

    The modules themselves run, on copies of their tensors, rather than a deep copy of the modules: not every model can
    be copied, hooks on parameters would be lost, and a loss that reaches the model by another way than its first
    argument would use another model. Afterwards all is bitwise as it was: weights, gradients, buffers, modes,
    attributes. Hooks that run an optimizer within the backward are taken off for the while.

    Args:
        dtype: the precision, ``None`` for the model's own.

    Attributes:
        task: the same; another batch may be put in its place.
    """

    def __init__(self, task: Task, dtype: torch.dtype | None) -> None:
        self.task = replace(task, splittable=task.splittable.collated_from_copies())
        self.dtype, self.device = dtype, task.settings.device
        self.roots = modules_of(task.model, task.loss_fn)
        self.modules = {
            f"{prefix}.{name}".strip("."): module
            for prefix, root in self.roots.items()
            for name, module in root.named_modules()
        }
        self.visits = Visits(self.modules)
        wider = DOUBLE if dtype is torch.float64 else None
        self.stand_ins = StandIns(wider, self.visits.where, in_order=not isinstance(task.loss_fn, OverTime))
        self.effects = SideEffects([task.model, task.loss_fn], of_data=[task.splittable.collate])  # of a run in Python
        # the buffers: their full names, their homes and keys there, and the values that they began with
        self.buffer_values: list[tuple[str, dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self._undo, self._isolated = ExitStack(), set[int]()  # the ``id`` s of what has copies of its values,
        self.with_optimizer_hooks: set[int] = set()  # and of those with hooks that run after a gradient was added
        self.parameters: list[torch.Tensor] = []  # the leaves that get a gradient
        self._trained: Collection[int] = ()  # the ``id`` s of those that the loss trains itself
        self.names: list[str] = []  # of the parameters; those that are not in the model have a description

    @property
    def splittable(self) -> Splittable:
        """The samples as the user gave them."""
        return self.task.splittable

    def open(self, stack: ExitStack) -> Outcome:
        """Isolates the model until a stack is closed, and gives what the whole batch gave."""
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(own_optimizers_put_back(self.task.model, reached_by(self.task.loss_fn)))
        self._random = RandomState([self.device])
        stack.callback(self._random.restore)  # which kernels that nothing stands in for may have moved
        stack.callback(self.effects.restore)
        if isinstance(self.task.loss_fn, OverTime):
            stack.callback(setattr, self.task.loss_fn, "carried", self.task.loss_fn.carried)
        self._isolate(stack)
        stack.enter_context(self.visits.attached())
        only = self.task.settings.inputs
        for name, parameter in parameters_of(self.roots).items():
            if parameter.requires_grad and (only is None or any(parameter is one for one in only)):
                self._add(name, parameter)
        for position, leaf in enumerate(only or ()):
            self._copy_values(leaf)
            self._add(f"inputs[{position}]", leaf)
        for module in self.modules.values():  # copied weights are not in one chunk
            if isinstance(module, torch.nn.RNNBase) and has_cudnn(self.device):
                module.flatten_parameters()
        if only is not None:
            return self.run()
        try:
            return self._whole()
        except LossError:  # it called backward() for a net that it trains itself, of which a search tells
            own = {id(one) for model in modules_behind(self.task.model, None) for one in model.parameters()}
            trained = optimized_by(self.task.loss_fn) - own
            if not any(id(one) in trained for one in self.parameters):
                raise
        return self._whole(trained)

    def _isolate(self, undo: ExitStack) -> None:
        self._undo = undo
        modules: dict[int, tuple[str, torch.nn.Module]] = {}
        for name, module in self.modules.items():
            modules.setdefault(id(module), (name, module))  # the model's own name counts
        for value in [one for _, module in modules.values() for key, one in vars(module).items() if key in INTERNALS]:
            if isinstance(value, (dict, set)):
                undo.callback(value.update, value.copy())
                undo.callback(value.clear)  # which comes before
        twins: dict[int, torch.Tensor] = {}  # of buffers that were computed, whose graph is the user's
        for name, module in modules.values():
            is_script = isinstance(module, torch.jit.ScriptModule)  # which holds its buffers elsewhere
            for key, given in list(module._buffers.items()):
                if given is not None and not given.is_meta:
                    buffer = given
                    if given.grad_fn is not None and not is_script:
                        buffer = module._buffers[key] = twins.setdefault(id(given), given.detach().clone())
                    self._copy_values(buffer)
                    if not is_script:
                        values = buffer.detach().clone()
                        self.buffer_values.append((f"{name}.{key}".strip("."), module._buffers, key, buffer, values))
            for parameter in module._parameters.values():  # parameters() may be another method of the user's
                if parameter is not None:
                    self._copy_values(parameter)

    def _copy_values(self, tensor: torch.Tensor) -> None:
        """Gives a leaf or a buffer a copy of its values, if it has none yet."""
        if id(tensor) in self._isolated or tensor.is_meta or tensor.is_inference():  # which nothing can write to
            return
        self._isolated.add(id(tensor))
        values, gradient = tensor.data, tensor.grad if tensor.is_leaf else None

        def put_back() -> None:
            tensor.grad = None
            tensor.data = values
            tensor.grad = gradient

        self._undo.callback(put_back)
        if tensor._post_accumulate_grad_hooks:
            self.with_optimizer_hooks.add(id(tensor))
            muted(tensor._post_accumulate_grad_hooks, self._undo)
        tensor.data = in_precision(values.detach().clone(), self.dtype)

    def _restore_buffers(self) -> None:
        """Puts the values that the buffers had at the start into them."""
        with torch.no_grad():
            for _, home, key, buffer, value in self.buffer_values:
                home[key] = buffer
                if not torch.equal(buffer, value):  # a graph that is kept may have saved it
                    if buffer.shape != value.shape:  # an observer makes room in its first forward
                        buffer.resize_(value.shape)
                    buffer.copy_(value)

    def _whole(self, trained: Collection[int] = ()) -> Outcome:
        """What the whole batch gives, once all leaves are known.

        Args:
            trained: the ``id`` s of parameters that the loss trains itself, whose gradients are its own.
        """
        self._trained = trained
        named = [(n, p) for n, p in zip(self.names, self.parameters, strict=True) if id(p) not in trained]
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        inside = len(self.parameters)
        loss_fn, is_found = self._looking_for_leaves(), False
        while not is_found:
            try:
                whole = self.run(loss_fn=loss_fn)
                is_found = True
            except _OutsideLeaves as found:
                for leaf in found.args:
                    self._copy_values(leaf)
                    self._add(f"a tensor of shape {tuple(leaf.shape)} outside the modules", leaf)
        # Leaves that are not the same in the next run are those of cuts, of the batch, and that the loss makes.
        kept = [i for i, one in enumerate(self.parameters) if i < inside or id(one) in whole.gradients]
        self.parameters = [self.parameters[i] for i in kept]
        self.names = [self.names[i] for i in kept]
        # Masks know the place of a call, which is another where a loss is not computed at once.
        return self.run() if self.task.settings.dropout == "per-sample" else whole

    def _looking_for_leaves(self) -> LossFunction:
        """Stops, once for each loss, before the backward of one that depends on leaves that are not known yet."""
        stopped: set[str] = set()

        def look(name: str, loss: Any) -> Any:
            known = {id(parameter) for parameter in self.parameters} | {*self._trained}
            behind = leaves_of(loss.total if isinstance(loss, Mean) else loss)
            if (found := [leaf for leaf in behind if id(leaf) not in known]) and name not in stopped:
                stopped.add(name)
                raise _OutsideLeaves(*found)
            return loss

        return with_each(self.task.loss_fn, look)

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        if not any(parameter is known for known in self.parameters):
            self.parameters.append(parameter)
            self.names.append(name)

    def draws_by_size(self) -> bool:
        """Whether the whole batch draws more random numbers, that nothing stands in for, than a part of it does."""
        self.run()
        after_whole, own = RandomState([self.device]), self.effects.generators()
        next(self.parts(self.splits()[0]))
        return not after_whole.is_now() or not same(own, self.effects.generators())

    def has_drawn(self, *, torch_too: bool = True) -> bool:
        """Whether the last run has moved a random generator; what stands in for random numbers moves none.

        Args:
            torch_too: also torch's default ones, from which the seeds of masks are drawn.
        """
        of_torch, others = self._random.moved()
        return others or any(self.effects.drew()) or (torch_too and of_torch)

    @contextlib.contextmanager
    def drawn_on(self) -> Iterator[None]:
        """Runs begin from another state of Python's and NumPy's generators in the block."""
        before = self._random
        before.restore()
        random.random()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].random()
        self._random = RandomState([self.device])
        try:
            yield
        finally:
            self._random = before

    def coupling(self) -> dict[str, torch.nn.Module]:
        """BatchNorm in training mode that a step knows of: in the model and in a loss that is a module."""
        found = coupling_modules(*modules_behind(self.task.model, self.task.loss_fn)).values()
        return {name: module for name, module in self.modules.items() if any(module is one for one in found)}

    def splits(self, splittable: Splittable | None = None) -> list[list[Part]]:
        """The splits that are compared with the whole batch."""
        return splits_of(splittable or self.splittable, self.task.micro_batch_size)

    def run(
        self,
        parts: Sequence[Part] | None = None,
        *,
        splittable: Splittable | None = None,
        fresh: bool = True,
        carries: Collection[Effect] = (),
        **changes: Any,
    ) -> Outcome:
        """The gradient of the batch, as a step would compute it.

        Args:
            parts: how it is split; ``None`` for the whole batch at once.
            fresh: whether buffers and random state are those of the start for every micro-batch, so that nothing goes
                over from one to the next.
            carries: what goes over all the same, of what a run changes in Python.
            **changes: of the task, such as another ``loss_fn``, ``count`` or ``batch_norm``.
        """
        splittable = copies_of(splittable or self.splittable, self.dtype)
        parts = splittable.plan(None) if parts is None else parts
        turns = Turns(self.stand_ins, splittable.rows, [part.samples for part in parts])
        return self._run(splittable, parts, turns, fresh, carries, {"batch_norm": "frozen", **changes})

    def parts(self, parts: Sequence[Part], name: str = "") -> Iterator[Outcome]:
        """The loss and the gradient of each micro-batch of a split alone, not weighted; of one loss if it is named."""
        loss_fn = self.task.loss_fn
        if name:  # the others are multiplied by zero
            loss_fn = _multiplied(loss_fn, lambda one: float(one == name))
        if not isinstance(loss_fn, (Coupled, InPieces)):
            loss_fn = _filled(loss_fn)
        for part in parts:
            alone = copies_of(self.splittable.chosen(list(part.samples)), self.dtype)
            turns = Turns(self.stand_ins, self.splittable.rows, [part.samples])
            changes = {"loss_fn": loss_fn, "count": count_samples, "batch_norm": "frozen"}
            yield self._run(alone, alone.plan(None), turns, True, (), changes)

    def _run(
        self, splittable: Splittable, parts: Sequence[Part], turns: Turns, fresh: bool, carries: Collection[Effect],
        changes: Mapping[str, Any],
    ) -> Outcome:  # fmt: skip
        def begin() -> None:
            """Puts back what the last forward has changed; numbers are those of the samples whose turn it is."""
            turn = turns.turn
            turns.begin()
            self.visits.running.clear()  # which a forward that failed leaves behind
            if fresh or turn == 0:
                self._restore_buffers()
                self._random.restore()
            with without_modes():  # which would take a copy for one of the loss's operations
                goes_on = turn > 0 and self.stand_ins.drawn is not None
                self.effects.restore(carries if turn else (), generators=not goes_on)

        # With every graph kept a coupled loss encodes once, so that random numbers have their turn once.
        task = replace(
            self.task, splittable=turns.collated(splittable),
            settings=replace(self.task.settings, kept_graphs=len(parts)), **changes,
        )  # fmt: skip
        task.loss_fn = announced(task.loss_fn, begin, turns.begin_whole, in_pieces=self.stand_ins.repeats)
        if isinstance(self.task.loss_fn, OverTime):  # every run begins with state(model, batch)
            self.task.loss_fn.carried = None
        for parameter in self.parameters:
            parameter.grad = None
        self._restore_buffers()  # at which the power iterations of spectral norms begin
        self._random.restore()  # from which the seed of masks is drawn
        if splittable.collate is not None:  # which may have generators of its own
            self.effects.restore()
        with self.stand_ins:
            weights, sums = run_pass(task, parts, self.parameters, Progress())
        counts = {name: sum(fetched(values)) for name, values in sums.counts.items()}
        if weights.is_empty or (not sums.terms and not any(counts.values())):
            raise CountError(
                "the count of the batch is 0, so there is no gradient to compare; expected a batch with something to "
                "learn from"
            )
        return Outcome(values_of(sums), counts, kept_of(self.parameters))

    @contextlib.contextmanager
    def rounded(self, unit: float) -> Iterator[None]:
        """A context in which every weight is changed by one rounding."""
        before = [parameter.data for parameter in self.parameters]
        generator = torch.Generator("cpu").manual_seed(0)
        try:
            for parameter, values in zip(self.parameters, before, strict=True):
                signs = torch.randint(0, 2, values.shape, generator=generator, device="cpu").to(values.device) * 2 - 1
                parameter.data = values + values * (signs * (2 * unit)).to(values.dtype)
            yield
        finally:
            for parameter, values in zip(self.parameters, before, strict=True):
                parameter.data = values


@dataclass
class Case:
    """What is compared with what, for everybody who looks for a cause."""

    rig: Rig  # opened
    whole: Outcome  # what the whole batch gave
    splits: list[list[Part]]  # that are compared with it
    tolerance: float  # up to which relative error gradients are the same
    unit: float = field(default=0.0, kw_only=True)  # of rounding, where it does not run in float64
    notes: list[Reason] = field(default_factory=list)  # of what else there is to know

    def compared(
        self, *, whole: Outcome | None = None, splits: Sequence[Sequence[Part]] | None = None, **options: Any
    ) -> Comparison:
        """Runs splits, and compares them with the whole, or another one; the options are those of ``Rig.run``."""
        splits = self.splits if splits is None else splits
        return Comparison(whole or self.whole, [(parts, self.attempt(parts, **options)) for parts in splits])

    def is_exact(self, **options: Any) -> bool:
        """Whether splits give the whole's gradient, see ``compared``."""
        return self.compared(**options).error <= self.tolerance

    def attempt(self, parts: Sequence[Part] | None = None, **options: Any) -> Outcome | Exception:
        """Runs a split, or the whole batch at once; a failure where the whole batch ran is an answer too."""
        try:
            return self.rig.run(parts, **options)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, OverBudget):
                raise
            return error.with_traceback(None)

    def beginning(self, begin: Callable[[], None]) -> LossFunction:
        """The loss, of which each micro-batch begins with something."""
        return announced(self.rig.task.loss_fn, begin)

    def searched(self, what: str, search: Callable[[], T], otherwise: T) -> T:
        """Looks for one cause; a search that fails is noted, and the others go on."""
        try:
            return search()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.notes.append(
                reason("not examined", "check", {"error": type(error).__name__}, what=what, text=in_one_line(error))
            )
            return otherwise

    def forgive_cancellation(self, comparison: Comparison) -> None:
        """Relates the error to the gradients of the parts where these cancel to a gradient that is nearly nothing."""
        errors = []
        for parts, outcome in comparison.each:
            if not isinstance(outcome, Outcome):
                return
            norm = sum(part.norm for part in self.rig.parts(parts)) / len(parts)
            errors.append(outcome.error(comparison.whole, norm))
        if max(errors) <= self.tolerance:
            comparison.error = max(errors)


def scaled(loss_fn: LossFunction, factor: float) -> LossFunction:
    """A loss function that gives every loss times a factor."""
    return _multiplied(loss_fn, lambda name: factor)


def _filled(loss_fn: LossFunction) -> LossFunction:
    """A loss function that gives 0 where another gives nothing, as for a micro-batch without items."""

    def evaluate(model: Any, batch: Any) -> Any:
        result = loss_fn(model, batch)
        if isinstance(result, Mapping):
            result = {name: loss for name, loss in result.items() if not is_nothing(loss)}
        return torch.zeros((), requires_grad=True, device="cpu") if is_nothing(result) else result

    return in_place_of(loss_fn, evaluate)


def _multiplied(loss_fn: LossFunction, factor_of: Callable[[str], float]) -> LossFunction:
    def times(name: str, loss: Any) -> Any:
        factor = factor_of(name)
        return Mean(loss.total * factor, loss.count) if isinstance(loss, Mean) else loss * factor

    return with_each(loss_fn, times)


def with_each(loss_fn: LossFunction, function: Callable[[str, Any], Any]) -> LossFunction:
    """A loss function that gives what a function makes of each loss of another."""

    def evaluate(model: Any, batch: Any) -> Any:
        evaluation = Evaluation(loss_fn(model, batch), contextlib.nullcontext, unless_nothing)
        if not evaluation.is_generator:  # whose losses may share a graph, and still go back together
            return {name: loss if is_nothing(loss) else function(name, loss) for name, loss in evaluation}

        def one_by_one() -> Iterator[tuple[str, Any]]:
            for name, loss in evaluation:
                yield name, loss if is_nothing(loss) else function(name, loss)
                del loss

        return one_by_one()

    return in_place_of(loss_fn, evaluate)


def copies_of(splittable: Splittable, dtype: torch.dtype | None) -> Splittable:
    """The same samples as copies that a run may write to, with floating point in another precision."""
    collate = splittable.collate
    if collate is None:
        return Splittable([copied(splittable.batches[0], dtype)], broadcast=splittable.broadcast)
    found = copy.copy(splittable)
    found.collate = lambda samples: copied(collate(samples), dtype)
    return found


def copied(batch: Any, dtype: torch.dtype | None) -> Any:
    """A batch in the same containers around new tensors, which are leaves of the autograd graph.

    Example:
        >>> copied({"x": torch.ones(1), "y": torch.ones(1, dtype=torch.int64)}, torch.float64)["x"].dtype
        torch.float64
    """

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return PackedSequence(copy_of(leaf.data), leaf.batch_sizes, leaf.sorted_indices, leaf.unsorted_indices)
        if not isinstance(leaf, torch.Tensor):
            return own_array(leaf)
        return in_precision(leaf.detach().clone(), dtype).requires_grad_(leaf.requires_grad)

    return map_leaves(copy_of, batch)


def announced(
    loss_fn: LossFunction,
    begin: Callable[[], None],
    begin_whole: Callable[[], None] = lambda: None,
    *,
    in_pieces: bool = True,
) -> LossFunction:
    """A loss function of the same kind that says when it begins.

    Args:
        begin: is called before each micro-batch.
        begin_whole: is called before what sees all micro-batches.
        in_pieces: whether a loss that can come in pieces does.
    """
    if isinstance(loss_fn, Coupled):
        return _coupled(loss_fn, begin, begin_whole)
    if isinstance(loss_fn, InPieces) and in_pieces:
        return _InPieces(loss_fn, begin)

    def evaluate(model: Any, batch: Any) -> Any:
        begin()
        return loss_fn(model, batch)

    return in_place_of(loss_fn, evaluate)


def in_place_of(loss_fn: LossFunction, evaluate: Any) -> LossFunction:
    """Lets the modules of a loss be found behind a function that calls it."""
    evaluate.user_functions = (loss_fn, *getattr(loss_fn, "user_functions", ()))
    function: LossFunction = evaluate
    return function


def _coupled(coupled: Coupled, begin: Callable[[], None], begin_whole: Callable[[], None]) -> Coupled:
    def encode(model: Any, batch: Any) -> Any:
        begin()
        return coupled.encode(model, batch)

    @functools.wraps(coupled.loss)  # whose arguments it is asked for
    def loss(*arguments: Any) -> Any:
        begin_whole()
        return coupled.loss(*arguments)

    return Coupled(encode, loss, row_block=coupled.row_block)


class _InPieces(InPieces):
    def __init__(self, loss_fn: InPieces, begin: Callable[[], None]) -> None:
        self._loss_fn = loss_fn
        self._begin = begin

    @property
    def user_functions(self) -> tuple[Any, ...]:
        return getattr(self._loss_fn, "user_functions", ())

    def __call__(self, model: Any, batch: Any) -> Any:
        self._begin()
        return self._loss_fn(model, batch)

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        self._begin()
        yield from self._loss_fn.pieces(model, batch, place)
