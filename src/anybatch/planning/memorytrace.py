"""Traces: what one micro-batch holds in memory, from operation to operation, on fake tensors or for real.

A step is traced on fake tensors, which take no memory, as long as that goes well; from then on few samples run for
real. Nothing of the user's is changed by either.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from anybatch.batch.batches import Part
from anybatch.batch.moving import to_device
from anybatch.batch.writes import Writes, differ
from anybatch.errors import AnyBatchError, LossError
from anybatch.loss.accumulate import Accumulation, Settings
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.memory.meter import BEFORE, Allocation, OverBudget, Recording, storages_of
from anybatch.planning.blocks import Span, spans_noted
from anybatch.planning.microbatches import batch_for_loss, clear_away, micro_batch_of, stand_in_of, tensors_in
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import applied, plain_losses, run_for_real, settings_for, undisturbed
from anybatch.planning.subjects import Subject, sparse_error
from anybatch.records.memory import BUFFERS, GRADIENTS, INPUTS, PARAMETERS
from anybatch.tensors.fakemode import Remembered
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import is_scripted, modules_of
from anybatch.tensors.randomness import RandomState
from anybatch.update.batchnorm import batch_norm_as
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)

_TRACES = 2  # what a first one fills, such as a cache, is there in all later steps
_JIT_RUNS = 2  # torch.jit looks at what runs before it optimizes, and may fail meanwhile if something looks at it
_SCALAR_BYTES = 8


@dataclass
class PassTrace:
    """What a micro-batch held.

    Args:
        operations: names, in order.
        allocations: storages that were counted.
        starts: how many operations had run when the micro-batch began, and at the end.
        spans: the runs of blocks.
        trained: positions among the subject's parameters of those that got a gradient.
        accumulated: numbers of allocations: gradients that were there before, and what was first added to each.
        kept: numbers of allocations that are there afterwards besides gradients, such as losses and metrics.
        chunked: how often a loss was taken in chunks.
        input_sizes: bytes of each tensor of one micro-batch.
        costs: for every operation its arithmetic and the bytes it moves, if they were asked for.
        leaves_fakes: whether some of its fake tensors may be left, as in a cache of the user's.
        taken: bytes that were alive at most with all that lay beside, if it ran for real within a limit.
    """

    operations: list[str]
    allocations: list[Allocation]
    starts: list[int]
    spans: list[Span] = field(default_factory=list)
    trained: tuple[int, ...] = ()
    accumulated: tuple[tuple[int, int], ...] = ()
    kept: tuple[int, ...] = ()
    chunked: int = 0
    input_sizes: list[int] = field(default_factory=list)
    costs: list[tuple[float, float]] = field(default_factory=list)
    leaves_fakes: bool = False
    taken: int = 0


class _LeavesFakes(Protocol):
    leaves_fakes: bool


T = TypeVar("T", bound=_LeavesFakes)


class NotFake(Exception):  # not an error of the user's: the caller does the same again, for real
    """The step can't run on fake tensors."""


class Tracer:
    """Traces micro-batches of a subject.

    Args:
        subject: what is planned.
        blocks: the names of its blocks.
        kind: what writes down.
        is_fake: whether fake tensors are tried.
        may_probe: whether micro-batches may run for real.

    Attributes:
        is_fake: whether fake tensors are used, or real probes since they can't be.
        limit: bytes that a real run stays within, or else is stopped.
    """

    def __init__(
        self, subject: Subject, blocks: Sequence[str], kind: Callable[..., Recording], *, is_fake: bool, may_probe: bool
    ) -> None:
        self.is_fake = is_fake
        self.limit: int | None = None
        self._subject = subject
        self._blocks = blocks
        self._kind = kind
        self._may_probe = may_probe
        self._is_warm = False
        self._left: list[str] = []
        self._remembered = Remembered()

    def trace(self, part: Part, recipe: Recipe, *, split: bool) -> PassTrace:
        """Traces one micro-batch.

        Raises:
            NotFake: it has to be traced for real, as everything has from now on.
            LossError: it can be traced in neither way.
        """
        if not self.is_fake:
            return self._for_real(part, recipe, split)
        subject, blocks, kind = self._subject, self._blocks, self._kind
        return self.on_fakes(
            lambda fakes: trace_pass(subject, part, recipe, blocks, split=split, fake=True, kind=kind, fakes=fakes)
        )

    def on_fakes(self, run: Callable[[Fakes], T]) -> T:
        """What a run on fake tensors gives, after which none of them is left.

        Args:
            run: gives a trace, which says whether it may have left some.

        Raises:
            NotFake: as for ``trace``.
        """
        failure: Failure | None = None
        device = self._subject.settings.device
        try:
            for _ in range(_TRACES):
                fakes = Fakes(self._remembered)
                trace = run(fakes)
                kept, self._left = clear_away(fakes, device) if trace.leaves_fakes else (0, [])
                if not kept or self._left:
                    break
        except AnyBatchError:
            raise
        except Exception as error:
            if not self._may_probe or is_out_of_memory(error):
                raise
            failure, why = Failure(error), _first_line(error)
        if failure is not None:
            failure.release()  # outside of the except block, where no traceback holds tensors any more
            _, self._left = clear_away(fakes, device)
            self._give_up(why)
        if self._left and self._may_probe:
            self._give_up(f"it keeps tensors of the trace: {self._left[0]}")
        return trace

    def _give_up(self, why: str) -> None:
        logger.info("this step can't run on fake tensors (%s); few samples run for real instead", why)
        self.is_fake = False
        self._subject.behaviour.looks_at_numbers = True
        raise NotFake

    def _for_real(self, part: Part, recipe: Recipe, split: bool) -> PassTrace:
        if not self._is_warm and any(map(is_scripted, modules_of(*self._subject.roots))):
            for _ in range(_JIT_RUNS):
                run_for_real(self._subject, part, Recipe(), clock=time.perf_counter)
        self._is_warm = True
        try:
            return trace_pass(
                self._subject, part, recipe, self._blocks, split=split, fake=False, kind=self._kind, limit=self.limit
            )  # fmt: skip
        except Exception as error:
            if not self._left or isinstance(error, (AnyBatchError, OverBudget)) or is_out_of_memory(error):
                raise
            raise LossError(
                "the step keeps tensors that it made while it was traced, and fails with them now "
                f"({_first_line(error)}); got {'; '.join(self._left[:3])}. Expected that what a step keeps for the "
                "next one is a plain attribute of a module, or is made of shapes and not of weights, samples or random "
                "numbers. Empty that place now, and run the step once before it is planned, so that it is filled "
                "already; or give micro_batch_size= instead of memory="
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def trace_pass(
    subject: Subject, part: Part, recipe: Recipe, blocks: Sequence[str], *, split: bool, fake: bool,
    kind: Callable[..., Recording] = Recording, fakes: Fakes | None = None, limit: int | None = None,
) -> PassTrace:  # fmt: skip
    """Runs a forward and a backward for a micro-batch, and rolls everything back.

    Args:
        subject: what is planned.
        part: the samples of the micro-batch.
        recipe: how it is run.
        blocks: where to look.
        split: whether other micro-batches left their gradients, as before the one that holds the most.
        fake: on fake tensors; else for real.
        kind: what writes down.
        fakes: makes the fake tensors.
        limit: bytes that a real run may have alive with everything that is there beside it; ``None`` for no limit.

    Returns:
        What was held: parameters, buffers, gradients, activations; micro-batches as far as they are copies.

    Raises:
        OverBudget: the real run was stopped, since it would take more.
        Exception: whatever the user's code raises, and on fake tensors whatever they can't do.
    """
    run = _Run(subject, part, recipe, blocks, split)
    return run.on_fakes(kind, fakes or Fakes()) if fake else run.for_real(kind, limit)


class _Run:
    """A forward and a backward that are written down."""

    def __init__(self, subject: Subject, part: Part, recipe: Recipe, blocks: Sequence[str], split: bool) -> None:
        self._subject, self._part, self._recipe, self._blocks, self._split = subject, part, recipe, blocks, split
        self._settings = settings_for(subject, recipe)

    def on_fakes(self, kind: Callable[..., Recording], fakes: Fakes) -> PassTrace:
        """Runs it on fake tensors in the place of all parameters and buffers."""
        subject, recording = self._subject, kind(counts_fakes=True)
        settings = replace(self._settings, device=torch.device("cpu"))
        own = subject.parameters
        stand_in = stand_in_of(subject, self._part, fakes)
        with undisturbed(subject, is_fake=True) as outside, swapped(fakes, subject.roots) as by_id:
            parameters = [by_id.get(id(parameter), parameter) for parameter in own]
            if settings.inputs is not None:
                settings = replace(settings, inputs=tuple(fakes.like(tensor) for tensor in settings.inputs))
            with fakes.mode:
                trace = self._traced(recording, settings, parameters, stand_in, outside(parameters), simulate=True)
                recording.end()
        del stand_in, parameters, settings, by_id, outside
        fakes.let_go()
        trace.leaves_fakes = recording.has_survivors
        return trace

    def for_real(self, kind: Callable[..., Recording], limit: int | None) -> PassTrace:
        """Runs it for real, and stops it before it goes over a limit."""
        subject = self._subject
        with undisturbed(subject) as outside:
            is_new = subject.writes_batch is None and not subject.splittable.is_collated
            own = batch_for_loss(subject, self._part)
            batch = to_device(own, subject.settings.device)
            beside = 0 if limit is None else _bytes_beside(subject, batch)
            if limit is not None and (needed := beside + self._fixed_bytes()) > limit:
                raise OverBudget(needed)
            within = None if limit is None else max(0, limit - beside)
            recording = kind(device_type=subject.settings.device.type, limit=within)
            try:
                trace = self._traced(
                    recording, self._settings, subject.parameters, batch, outside(()), simulate=False
                )  # fmt: skip
            except OverBudget as error:
                error.needed += beside
                raise
            if is_new and differ(own, micro_batch_of(subject, self._part)):
                subject.note_writes(True, is_through=True)  # in a way that no counter shows
            recording.end()  # gradients that go from now on are no part of it
            trace.taken = beside + recording.most
            return trace

    def _traced(
        self, recording: Recording, settings: Settings, parameters: Sequence[torch.Tensor], batch: Any,
        outside: OutsideLeaves, *, simulate: bool,
    ) -> PassTrace:  # fmt: skip
        subject, rows, count = self._subject, len(self._part.samples), 2 if self._split else 1
        register_weights(recording, subject, parameters)
        recording.register(tensors_in(batch), INPUTS, counted=False)
        gradients = self._give_gradients(recording, parameters, settings)
        starts: list[int] = []
        drawn = _drawn_so_far()
        with (
            batch_norm_as(subject.batch_norm, subject.roots, count) as begin,
            applied(subject, self._recipe, simulate) as handle,
            spans_noted(subject.model, self._blocks, recording) as spans,
        ):

            def coming() -> Iterator[Any]:
                starts.append(recording.now)
                begin()
                yield batch

            accumulation = Accumulation(
                subject.model, plain_losses(subject.loss_fn), Weights([{"": rows}] * count), parameters, settings,
                rows=[rows] * count, outside=outside,
            )  # fmt: skip
            with _writes_noted(subject, recording, batch) as done, recording:
                sums = accumulation.run(coming())
            done()
            recording.assign((parameter.grad for parameter in parameters), GRADIENTS)
            starts.append(recording.now)
            chunked = handle.taken
        if self._split:  # the last micro-batch had the same weight
            for one in recording.allocations_of(accumulation.weight_tensors):
                one.born = BEFORE
        trace = PassTrace(recording.operations, recording.allocations, starts, spans, chunked=chunked)
        trace.input_sizes = [s.nbytes() for tensor in tensors_in(batch) for s in storages_of(tensor)]
        trace.kept = _kept_after(trace, recording, sums)
        trace.costs = getattr(recording, "costs", [])
        if drawn != _drawn_so_far() or (not simulate and _draws_scalars(trace)):
            subject.behaviour.draws = True
        if recording.made_dense or any(p.grad is not None and p.grad.layout is torch.sparse_coo for p in parameters):
            raise sparse_error("a parameter")
        _note_gradients(trace, recording, parameters, gradients)
        return trace

    def _fixed_bytes(self) -> int:
        """The bytes of weights and buffers, and of the gradients of other micro-batches."""
        subject = self._subject
        weights = {id(p): p for p in subject.parameters}
        weights.update((id(p), p) for root in subject.roots for p in (*root.parameters(), *root.buffers()))
        found = sum(p.nbytes for p in weights.values() if p.layout is torch.strided)
        own = subject.parameters
        return found + sum(own[i].nbytes for i in _wanted(own, self._settings) if self._split)

    def _give_gradients(
        self, recording: Recording, parameters: Sequence[torch.Tensor], settings: Settings
    ) -> dict[int, Allocation]:
        """Puts gradients on, as other micro-batches left them; gives their allocations by position."""
        found: dict[int, Allocation] = {}
        for position in _wanted(parameters, settings) if self._split else ():
            parameters[position].grad = gradient = torch.zeros_like(parameters[position])
            recording.register([gradient], GRADIENTS)
            found[position] = recording.allocations_of([gradient])[0]
        return found


def register_weights(recording: Recording, subject: Subject, parameters: Sequence[torch.Tensor]) -> None:
    """Has a recording know the parameters and buffers, real ones or those that stand in for them."""
    recording.register(parameters, PARAMETERS)
    for module in modules_of(*subject.roots):
        recording.register(module._parameters.values(), PARAMETERS)
        recording.register(module._buffers.values(), BUFFERS)


def _wanted(parameters: Sequence[torch.Tensor], settings: Settings) -> list[int]:
    """The positions of the parameters that get a gradient."""
    wanted = None if settings.inputs is None else {id(tensor) for tensor in settings.inputs}
    return [i for i, p in enumerate(parameters) if p.requires_grad and (wanted is None or id(p) in wanted)]


@contextlib.contextmanager
def _writes_noted(subject: Subject, recording: Recording, batch: Any) -> Iterator[Callable[[], None]]:
    """Notes whether the loss writes into its batch, or elsewhere; it says when the run came to its end."""
    inputs, is_through = Writes(tensors_in(batch)), False

    def note() -> None:
        # A tangent gets as much room as the storage of its tensor has, which for a view is the whole batch's.
        needs_copies = inputs.were_made or recording.wrote_inputs or recording.gave_tangents
        subject.note_writes(needs_copies, is_through=is_through)
        subject.behaviour.note_elsewhere(recording.bytes_written_elsewhere)

    def done() -> None:
        nonlocal is_through
        is_through = True
        note()

    try:
        yield done
    except BaseException:
        note()
        raise


def _bytes_beside(subject: Subject, batch: Any) -> int:
    """What is alive beside what a real run records: the logical batch, a copy of the samples, state, kept buffers."""
    own = {s._cdata for whole in subject.splittable.batches for t in tensors_in(whole) for s in storages_of(t)}
    copies = {s._cdata: s.nbytes() for tensor in tensors_in(batch) for s in storages_of(tensor)}
    buffers = sum(b.nbytes for module in modules_of(*subject.roots) for b in module._buffers.values() if b is not None)
    copied = sum(size for key, size in copies.items() if key not in own)
    return subject.batch_bytes + subject.state_bytes + buffers + copied


def _kept_after(trace: PassTrace, recording: Recording, sums: Sums) -> tuple[int, ...]:
    """The numbers of the allocations of losses and metrics."""
    left = [term.value for terms in sums.terms.values() for term in terms]
    left += [tensor for metrics in sums.metrics for tensor in tensors_in(dict(metrics))]
    kept = {id(one) for one in recording.allocations_of(left) if not one.is_fixed}
    return tuple(number for number, one in enumerate(trace.allocations) if id(one) in kept)


def _drawn_so_far() -> Any:
    """The state of the generators whose numbers Python can look at."""
    state = RandomState().state_dict()
    return state["python"], state.get("numpy")


def _draws_scalars(trace: PassTrace) -> bool:
    """Whether single random numbers of torch's were drawn, as where layers are left out at random."""
    small = {one.born for one in trace.allocations if 0 < one.size <= _SCALAR_BYTES}
    drawn = (at for at, name in enumerate(trace.operations) if name.startswith(("rand", "uniform", "bernoulli")))
    return any(at in small or at - 1 in small for at in drawn)


def _note_gradients(
    trace: PassTrace, recording: Recording, parameters: Sequence[torch.Tensor], before: dict[int, Allocation]
) -> None:
    """Notes which parameters got a gradient; a gradient that was there and got nothing added was never there."""
    number = {id(allocation): index for index, allocation in enumerate(trace.allocations)}
    first: dict[int, int] = {}
    for gradient, new in recording.accumulated:
        if id(gradient) in number and id(new) in number:
            first.setdefault(number[id(gradient)], number[id(new)])
    trace.accumulated = tuple(first.items())
    if not before:
        trace.trained = tuple(i for i, parameter in enumerate(parameters) if parameter.grad is not None)
        return
    reached = {i for i, allocation in before.items() if number[id(allocation)] in first}
    reached |= {i for i, parameter in enumerate(parameters) if i not in before and parameter.grad is not None}
    trace.trained = tuple(sorted(reached))
    for position, allocation in before.items():
        if position not in trace.trained:
            allocation.size = 0
        else:  # a gradient that is a view keeps the storage that it is a view of
            added = trace.allocations[first[number[id(allocation)]]]
            allocation.size = max(allocation.size, added.size)
