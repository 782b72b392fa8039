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
from anybatch.planning.running import (
    Levers,
    applied,
    batch_for_loss,
    micro_batch_of,
    plain_losses,
    settings_for,
    tensors_in,
    undisturbed,
)
from anybatch.planning.subjects import Subject
from anybatch.records.memory import BUFFERS, GRADIENTS, INPUTS, PARAMETERS
from anybatch.tensors.batches import Part
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.meter import Allocation, Recording, storages_of
from anybatch.tensors.modules import modules_of
from anybatch.tensors.moving import to_device
from anybatch.tensors.trees import map_leaves
from anybatch.tensors.writes import Writes, differ, writable
from anybatch.update.batchnorm import batch_norm_as


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


class Before(Enum):
    """What was before the micro-batch that is traced."""

    NOTHING = "nothing"
    GRADIENTS = "the gradients of other micro-batches"
    MICRO_BATCH = "another micro-batch, which is traced, too"


def before_of(subject: Subject, *, single: bool) -> Before:
    """What to trace: the later micro-batches of a split batch, which hold the most.

    Args:
        subject: what is planned.
        single: whether the batch is one micro-batch.
    """
    if single:
        return Before.NOTHING
    is_sparse = any(getattr(module, "sparse", False) is True for module in modules_of(*subject.roots))
    return Before.MICRO_BATCH if is_sparse else Before.GRADIENTS


def trace_pass(
    subject: Subject, part: Part, levers: Levers, blocks: Sequence[str], *, before: Before, fake: bool,
    kind: type[Recording] = Recording, fakes: Fakes | None = None,
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

    Returns:
        What was held: parameters, buffers, gradients, activations; micro-batches as far as they are copies.

    Raises:
        Exception: whatever the user's code raises, and on fake tensors whatever they can't do.
    """
    run = _Run(subject, part, levers, blocks, before)
    if not fake:
        with undisturbed(subject) as outside:
            is_new = subject.writes_batch is None and not subject.splittable.is_collated
            own = batch_for_loss(subject, part)
            batch = to_device(own, subject.settings.device)
            recording = kind(device_type=subject.settings.device.type)
            trace = run.traced(recording, run.settings, subject.parameters, batch, outside(()), simulate=False)
            if is_new and differ(own, micro_batch_of(subject, part)):
                subject.note_writes(True, is_through=True)  # in a way that no counter shows
            recording.end()  # gradients that go from now on are no part of it
            return trace
    recording = kind(counts_fakes=True)
    trace = _traced_on_fakes(run, subject, part, recording, fakes := fakes or Fakes())
    fakes.let_go()
    trace.leaves_fakes = recording.has_survivors
    return trace


def _traced_on_fakes(run: "_Run", subject: Subject, part: Part, recording: Recording, fakes: Fakes) -> PassTrace:
    batch = writable(micro_batch_of(subject, part), arrays_only=True)
    settings = replace(run.settings, device=torch.device("cpu"))
    own = subject.parameters
    with undisturbed(subject) as outside, swapped(fakes, subject.roots) as by_id:
        stand_in = map_leaves(lambda leaf: fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        parameters = [by_id.get(id(parameter), parameter) for parameter in own]
        if settings.inputs is not None:
            settings = replace(settings, inputs=tuple(fakes.like(tensor) for tensor in settings.inputs))
        with fakes.mode:
            trace = run.traced(recording, settings, parameters, stand_in, outside(parameters), simulate=True)
            recording.end()
            return trace


class _Run:
    """A forward and a backward that are written down."""

    def __init__(self, subject: Subject, part: Part, levers: Levers, blocks: Sequence[str], before: Before) -> None:
        self._subject = subject
        self._rows = len(part.samples)
        self._levers = levers
        self._blocks = blocks
        self._before = before
        self.settings = settings_for(subject)

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
                for _ in range(2 if self._before is Before.MICRO_BATCH else 1):
                    starts.append(recording.now)
                    begin()
                    yield batch

            accumulation = Accumulation(
                subject.model, plain_losses(subject.loss_fn), Weights([{"": self._rows}] * split), parameters, settings,
                rows=[self._rows] * split, outside=outside,
            )  # fmt: skip
            inputs, is_through = Writes(tensors_in(batch)), False
            try:
                with recording:
                    sums = accumulation.run(coming())
                is_through = True
            finally:
                subject.note_writes(inputs.were_made or recording.wrote_inputs, is_through=is_through)
            recording.assign((parameter.grad for parameter in parameters), GRADIENTS)
            starts.append(recording.now)
            chunked = handle.taken
        trace = PassTrace(recording.operations, recording.allocations, starts, spans, chunked=chunked)
        trace.input_bytes = sum(s.nbytes() for tensor in tensors_in(batch) for s in storages_of(tensor))
        left = [term.value for terms in sums.terms.values() for term in terms]
        left += [tensor for metrics in sums.metrics for tensor in tensors_in(dict(metrics))]
        kept = {id(one) for one in recording.allocations_of(left) if not one.is_fixed}
        trace.kept = tuple(number for number, one in enumerate(trace.allocations) if id(one) in kept)
        trace.costs = getattr(recording, "costs", [])
        _note_gradients(trace, recording, parameters, gradients)
        return trace

    def _gradients(
        self, recording: Recording, parameters: Sequence[torch.Tensor], settings: Settings
    ) -> dict[int, Allocation]:
        """Puts gradients on, as other micro-batches left them; gives their allocations by position."""
        if self._before is not Before.GRADIENTS:
            return {}
        wanted = None if settings.inputs is None else {id(tensor) for tensor in settings.inputs}
        found: dict[int, Allocation] = {}
        for position, parameter in enumerate(parameters):
            if parameter.requires_grad and (wanted is None or id(parameter) in wanted):
                parameter.grad = torch.zeros_like(parameter)
                recording.register([parameter.grad], GRADIENTS)
                found[position] = recording.allocations_of([parameter.grad])[0]
        return found


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
    trace.trained = tuple(i for i, allocation in before.items() if number[id(allocation)] in first)
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
