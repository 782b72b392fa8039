"""Runs a step on fake tensors, or for real on few samples, and writes down what it holds in memory."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from anybatch.gradient.accumulate import Accumulation, Settings
from anybatch.gradient.weights import Weights
from anybatch.planning.blocks import Span, spans_noted
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import (
    applied,
    batch_for_loss,
    micro_batch_of,
    plain_losses,
    settings_for,
    stand_in_of,
    tensors_in,
    undisturbed,
)
from anybatch.planning.subjects import Subject, sparse_error
from anybatch.records.memory import BUFFERS, GRADIENTS, INPUTS, PARAMETERS
from anybatch.tensors.batches import Part
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.meter import BEFORE, Allocation, OverBudget, Recording, storages_of
from anybatch.tensors.modules import modules_of
from anybatch.tensors.moving import to_device
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.writes import Writes, differ
from anybatch.update.batchnorm import batch_norm_as

_SCALAR_BYTES = 8


@dataclass
class PassTrace:
    """What a micro-batch held, or two.

    Args:
        operations: names, in order.
        allocations: storages that were counted.
        starts: how many operations had run when each micro-batch began, and at the end.
        spans: the runs of blocks.
        trained: positions among the subject's parameters of those that got a gradient.
        accumulated: numbers of allocations: gradients that were there before, and what was first added to each.
        kept: numbers of allocations that are there afterwards besides gradients, such as losses and metrics.
        chunked: how often a loss was taken in chunks.
        input_bytes: of the tensors of one micro-batch.
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
    input_bytes: int = 0
    costs: list[tuple[float, float]] = field(default_factory=list)
    leaves_fakes: bool = False

    taken: int = 0


class Before(Enum):
    """What was before the micro-batch that is traced."""

    NOTHING = "nothing"
    GRADIENTS = "the gradients of other micro-batches"


def before_of(*, single: bool) -> Before:
    """What to trace: the later micro-batches of a split batch, which hold the most.

    Args:
        single: whether the batch is one micro-batch.
    """
    return Before.NOTHING if single else Before.GRADIENTS


def trace_pass(
    subject: Subject, part: Part, levers: Recipe, blocks: Sequence[str], *, before: Before, fake: bool,
    kind: type[Recording] = Recording, fakes: Fakes | None = None, limit: int | None = None,
) -> PassTrace:  # fmt: skip
    """Runs a forward and a backward for a micro-batch, and takes every trace of it off again.

    Args:
        subject: what is planned.
        part: the samples of the micro-batch.
        levers: what is traded for memory.
        blocks: where to look.
        before: what was before it.
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
    run = _Run(subject, part, levers, blocks, before)
    if not fake:
        with undisturbed(subject) as outside:
            is_new = subject.writes_batch is None and not subject.splittable.is_collated
            own = batch_for_loss(subject, part)
            batch = to_device(own, subject.settings.device)
            beside = 0 if limit is None else _bytes_beside(subject, batch)
            if limit is not None and (needed := beside + run.fixed_bytes) > limit:
                raise OverBudget(needed)
            recording = kind(
                device_type=subject.settings.device.type, limit=None if limit is None else max(0, limit - beside)
            )
            try:
                trace = run.traced(recording, run.settings, subject.parameters, batch, outside(()), simulate=False)
            except OverBudget as error:
                error.needed += beside
                raise
            if is_new and differ(own, micro_batch_of(subject, part)):
                subject.note_writes(True, is_through=True)  # in a way that no counter shows
            recording.end()  # gradients that go from now on are no part of it
            trace.taken = beside + recording.most
            return trace
    recording = kind(counts_fakes=True)
    trace = _traced_on_fakes(run, subject, part, recording, fakes := fakes or Fakes())
    fakes.let_go()
    trace.leaves_fakes = recording.has_survivors
    return trace


def _bytes_beside(subject: Subject, batch: Any) -> int:
    """What is alive beside what a real run records: the logical batch, a copy of the samples, state, kept buffers."""
    own = {s._cdata for whole in subject.splittable.batches for t in tensors_in(whole) for s in storages_of(t)}
    copies = {s._cdata: s.nbytes() for tensor in tensors_in(batch) for s in storages_of(tensor)}
    buffers = sum(b.nbytes for module in modules_of(*subject.roots) for b in module._buffers.values() if b is not None)
    copied = sum(size for key, size in copies.items() if key not in own)
    return subject.batch_bytes + subject.state_bytes + buffers + copied


def _traced_on_fakes(run: "_Run", subject: Subject, part: Part, recording: Recording, fakes: Fakes) -> PassTrace:
    settings = replace(run.settings, device=torch.device("cpu"))
    own = subject.parameters
    stand_in = stand_in_of(subject, part, fakes)
    with undisturbed(subject, is_fake=True) as outside, swapped(fakes, subject.roots) as by_id:
        parameters = [by_id.get(id(parameter), parameter) for parameter in own]
        if settings.inputs is not None:
            settings = replace(settings, inputs=tuple(fakes.like(tensor) for tensor in settings.inputs))
        with fakes.mode:
            trace = run.traced(recording, settings, parameters, stand_in, outside(parameters), simulate=True)
            recording.end()
            return trace


class _Run:
    """A forward and a backward that are written down."""

    def __init__(self, subject: Subject, part: Part, levers: Recipe, blocks: Sequence[str], before: Before) -> None:
        self._subject = subject
        self._rows = len(part.samples)
        self._levers = levers
        self._blocks = blocks
        self._before = before
        self.settings = settings_for(subject, levers)

    def traced(
        self, recording: Recording, settings: Settings, parameters: list[torch.Tensor], batch: Any,
        outside: OutsideLeaves, *, simulate: bool,
    ) -> PassTrace:  # fmt: skip
        """Runs it.

        Args:
            recording: writes down.
            settings: precision, inputs.
            parameters: fake ones or the real ones, without gradients.
            batch: the micro-batch, fake or real.
            outside: finds leaves besides the parameters.
            simulate: whether offloaded bytes only seem to go.
        """
        subject = self._subject
        _register(recording, subject, parameters)
        recording.register(tensors_in(batch), INPUTS, counted=False)
        gradients = self._gradients(recording, parameters, settings)
        starts: list[int] = []
        with contextlib.ExitStack() as stack:
            split = 1 if self._before is Before.NOTHING else 2
            begin = stack.enter_context(batch_norm_as(subject.batch_norm, subject.roots, split))
            handle = stack.enter_context(applied(subject, self._levers, simulate))
            spans = stack.enter_context(spans_noted(subject.model, self._blocks, recording))

            def coming() -> Iterator[Any]:
                starts.append(recording.now)
                begin()
                yield batch

            accumulation = Accumulation(
                subject.model, plain_losses(subject.loss_fn), Weights([{"": self._rows}] * split), parameters, settings,
                rows=[self._rows] * split, outside=outside,
            )  # fmt: skip
            inputs, is_through, drawn = Writes(tensors_in(batch)), False, _drawn_so_far()
            try:
                with recording:
                    sums = accumulation.run(coming())
                is_through = True
            finally:
                # A tangent gets as much room as the storage of its tensor has, which for a view is the whole batch's.
                needs_copies = inputs.were_made or recording.wrote_inputs or recording.gave_tangents
                subject.note_writes(needs_copies, is_through=is_through)
                subject.habits.note_elsewhere(recording.bytes_written_elsewhere)
            recording.assign((parameter.grad for parameter in parameters), GRADIENTS)
            starts.append(recording.now)
            chunked = handle.taken
        if self._before is Before.GRADIENTS:  # the last micro-batch had the same weight
            for one in recording.allocations_of(accumulation.weight_tensors):
                one.born = BEFORE
        trace = PassTrace(recording.operations, recording.allocations, starts, spans, chunked=chunked)
        trace.input_bytes = sum(s.nbytes() for tensor in tensors_in(batch) for s in storages_of(tensor))
        left = [term.value for terms in sums.terms.values() for term in terms]
        left += [tensor for metrics in sums.metrics for tensor in tensors_in(dict(metrics))]
        kept = {id(one) for one in recording.allocations_of(left) if not one.is_fixed}
        trace.kept = tuple(number for number, one in enumerate(trace.allocations) if id(one) in kept)
        trace.costs = getattr(recording, "costs", [])
        if drawn != _drawn_so_far() or (not simulate and _draws_scalars(trace)):
            subject.habits.draws = True
        if recording.made_dense or any(p.grad is not None and p.grad.layout is torch.sparse_coo for p in parameters):
            raise sparse_error("a parameter")
        _note_gradients(trace, recording, parameters, gradients)
        return trace

    @property
    def fixed_bytes(self) -> int:
        """The bytes of weights and buffers, and of the gradients of other micro-batches."""
        subject = self._subject
        weights = {id(p): p for p in subject.parameters}
        weights.update((id(p), p) for root in subject.roots for p in (*root.parameters(), *root.buffers()))
        found = sum(p.nbytes for p in weights.values() if p.layout is torch.strided)
        if self._before is Before.GRADIENTS:
            found += sum(subject.parameters[i].nbytes for i in self._positions_with_gradients())
        return found

    def _positions_with_gradients(self) -> list[int]:
        own = self.settings.inputs
        wanted = None if own is None else {id(tensor) for tensor in own}
        return [
            position
            for position, parameter in enumerate(self._subject.parameters)
            if parameter.requires_grad and (wanted is None or id(parameter) in wanted)
        ]

    def _gradients(
        self, recording: Recording, parameters: Sequence[torch.Tensor], settings: Settings
    ) -> dict[int, Allocation]:
        """Puts gradients on, as other micro-batches left them; gives their allocations by position."""
        if self._before is not Before.GRADIENTS:
            return {}
        wanted = None if settings.inputs is None else {id(tensor) for tensor in settings.inputs}
        found: dict[int, Allocation] = {}
        for position, parameter in enumerate(parameters):
            is_wanted = parameter.requires_grad and (wanted is None or id(parameter) in wanted)
            if is_wanted:
                parameter.grad = torch.zeros_like(parameter)
                recording.register([parameter.grad], GRADIENTS)
                found[position] = recording.allocations_of([parameter.grad])[0]
        return found


def _drawn_so_far() -> Any:
    """The state of the generators whose numbers Python can look at."""
    state = RandomState().state_dict()
    return state["python"], str(state.get("numpy"))


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


def _register(recording: Recording, subject: Subject, parameters: Sequence[torch.Tensor]) -> None:
    recording.register(parameters, PARAMETERS)
    for module in modules_of(*subject.roots):
        recording.register(module._parameters.values(), PARAMETERS)
        recording.register(module._buffers.values(), BUFFERS)
