"""What a coupled loss takes on the outputs of all samples, and how long."""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.errors import AnyBatchError
from anybatch.gradient.coupling import Coupled, CoupledPass
from anybatch.gradient.outputs import Outputs
from anybatch.gradient.sums import Sums
from anybatch.gradient.weights import Weights
from anybatch.planning.encoders import Column, OutputFacts
from anybatch.planning.microbatches import clear_away, tensors_in
from anybatch.planning.running import settings_for, undisturbed, with_plain_losses
from anybatch.planning.subjects import Subject
from anybatch.records.memory import ACTIVATIONS, BUFFERS, INPUTS, PARAMETERS
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.meter import Recording
from anybatch.tensors.modules import modules_of
from anybatch.tensors.moving import to_device
from anybatch.tensors.trees import map_leaves
from anybatch.update.transaction import is_out_of_memory

logger = logging.getLogger(__name__)

_FIRST = 2  # samples of the first real run
_SMALL = 8  # samples that run whatever the budget


@dataclass(frozen=True)
class LossTrace:
    """A coupled loss and its backward.

    Args:
        peak: the most bytes on top of parameters and buffers, the outputs of all samples among them.
        after: bytes that are left of it: gradients of the outputs and of parameters.
        trained: positions among the subject's parameters of those that got a gradient.
        operation: after which operation the peak was reached.
        is_fake: whether it ran on fake tensors.
        reaches: samples up to which it ran; beyond, the bytes were extrapolated.
    """

    peak: int
    after: int
    trained: tuple[int, ...] = ()
    operation: str = ""
    is_fake: bool = True
    reaches: int = 0


class _LossAlone(CoupledPass):
    def differentiated(self, outputs: Outputs, batch: Any) -> Sums:
        """Takes the loss and the gradients of the outputs, which are let go of."""
        sums, gradients = self._loss_of(outputs, lambda: batch)
        self.left = gradients
        return sums


def trace_loss(
    subject: Subject, coupled: Coupled, outputs: OutputFacts, real: Callable[[], OutputFacts], room: int | None
) -> LossTrace:
    """Runs the loss of all samples on fake tensors; where it can't, for real on more and more of them.

    Args:
        subject: what is planned.
        coupled: the user's functions.
        outputs: what the encoder gives.
        real: gives the same with values.
        room: bytes that real runs may take on top of parameters and buffers; ``None`` for any number.
    """
    plain = copy.copy(coupled)
    plain.loss = with_plain_losses(coupled.loss)
    try:
        return _on_fakes(subject, plain, outputs)
    except AnyBatchError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or any(parameter.is_meta for parameter in subject.parameters):
            raise
        logger.info(
            "the coupled loss can't run on fake tensors (%s: %s); it runs for real on few samples instead",
            type(error).__name__, str(error).partition("\n")[0],
        )  # fmt: skip
    return _on_more_and_more(subject, plain, real(), room)


class _KeepsFakes(Exception):  # not an error of the user's: the loss runs for real
    """The loss keeps fake tensors in a place that can't be emptied."""


def _on_fakes(subject: Subject, coupled: Coupled, outputs: OutputFacts) -> LossTrace:
    fakes = Fakes()
    recording = Recording(counts_fakes=True, granularity=subject.granularity)
    try:
        trace = _traced_on_fakes(subject, coupled, outputs, fakes, recording)
    except Exception:
        clear_away(fakes, subject.settings.device)
        raise
    fakes.let_go()
    if recording.has_survivors and (left := clear_away(fakes, subject.settings.device)[1]):
        raise _KeepsFakes(f"it keeps {left[0]}")
    return trace


def _traced_on_fakes(
    subject: Subject, coupled: Coupled, outputs: OutputFacts, fakes: Fakes, recording: Recording
) -> LossTrace:
    rows, own = subject.splittable.rows, subject.parameters
    batch = subject.splittable.whole() if coupled.takes_batch else None
    with undisturbed(subject, is_fake=True) as outside, swapped(fakes, subject.roots) as by_id:
        batch = map_leaves(lambda leaf: fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        parameters = [by_id.get(id(parameter), parameter) for parameter in own]
        inputs = subject.settings.inputs
        wanted = None if inputs is None else tuple(fakes.like(tensor) for tensor in inputs)
        settings = replace(subject.settings, device=torch.device("cpu"), inputs=wanted)

        def empty(column: Column) -> torch.Tensor:
            return torch.empty((rows, *column.shape), dtype=column.dtype, requires_grad=column.differs)

        with fakes.mode:
            run = _Run(replace(subject, settings=settings), coupled, parameters, rows)
            given = [outputs.made(empty)]
            trace = run.traced(recording, given.pop(), batch, outside(parameters), is_fake=True)
            recording.end()
            return trace


class _Run:
    """The loss of some samples."""

    def __init__(self, subject: Subject, coupled: Coupled, parameters: Sequence[torch.Tensor], rows: int) -> None:
        self._subject = subject
        self._coupled = coupled
        self._parameters = parameters
        self._rows = rows

    def prepared(self, made: Any, outside: Any) -> tuple[_LossAlone, Outputs]:
        """The pass, and the outputs as if they were encoded."""
        every = [range(self._rows)]
        outputs = Outputs(every)
        outputs.add(made)
        run = _LossAlone(
            self._subject.model, self._coupled, Weights([{"": self._rows}]), self._parameters,
            settings_for(self._subject), samples=every, outside=outside,
        )  # fmt: skip
        return run, outputs

    def traced(self, recording: Recording, made: Any, batch: Any, outside: Any, *, is_fake: bool) -> LossTrace:
        """Runs it and writes down what it holds."""
        for module in modules_of(*self._subject.roots):
            recording.register(module._parameters.values(), PARAMETERS)
            recording.register(module._buffers.values(), BUFFERS)
        recording.register(self._parameters, PARAMETERS)
        fixed = sum(one.size for one in recording.allocations)
        recording.register(tensors_in(made), ACTIVATIONS)
        recording.register(tensors_in(batch), INPUTS, counted=False)
        run, outputs = self.prepared(made, outside)
        del made
        with recording:
            sums = run.differentiated(outputs, batch)
        memory = recording.memory()
        left = sum(recording.by_category().values())
        trained = tuple(i for i, parameter in enumerate(self._parameters) if parameter.grad is not None)
        del sums
        return LossTrace(memory.peak_bytes - fixed, left - fixed, trained, memory.operation, is_fake, self._rows)


def _on_more_and_more(subject: Subject, coupled: Coupled, outputs: OutputFacts, room: int | None) -> LossTrace:
    """Doubles the samples as long as the next run may not exceed the room, and extrapolates the rest."""
    rows = subject.splittable.rows
    known: list[LossTrace] = []
    size = min(_FIRST, rows)
    while True:
        with _real(subject, coupled, outputs, size) as (run, made, batch, outside):
            given, batch_ = [made], batch
            del made, batch
            recording = Recording(device_type=subject.settings.device.type)
            known.append(run.traced(recording, given.pop(), batch_, outside, is_fake=False))
        if size == rows:
            return known[-1]
        following = min(2 * size, rows)
        if following > _SMALL and room is not None and _expected(known, following) > room:
            parameters = known[-1].after - _gradient_bytes(outputs, size)
            peak, after = _expected(known, rows), parameters + _gradient_bytes(outputs, rows)
            return replace(known[-1], peak=peak, after=after)
        size = following


def _expected(known: Sequence[LossTrace], rows: int) -> int:
    """The peak at more samples, by the parabola through the last three runs: losses look at pairs of samples."""
    if len(known) < 3:
        return math.ceil(known[-1].peak * (rows / known[-1].reaches) ** 2)
    (x, a), (y, b), (z, c) = ((trace.reaches, trace.peak) for trace in known[-3:])
    slope, bend = (b - a) / (y - x), ((c - b) / (z - y) - (b - a) / (y - x)) / (z - x)
    return math.ceil(a + (rows - x) * (slope + max(0.0, bend) * (rows - y)))


def _gradient_bytes(outputs: OutputFacts, rows: int) -> int:
    return sum(column.bytes_of(rows) for column in outputs.own if column.differs)


@contextmanager
def _real(subject: Subject, coupled: Coupled, outputs: OutputFacts, rows: int) -> Iterator[tuple[_Run, Any, Any, Any]]:
    """The loss of some samples for real, whose outputs are those of a few samples over and over."""
    splittable, device = subject.splittable, subject.settings.device
    batch: Any = None
    if coupled.takes_batch:
        batch = to_device(_first_rows(splittable.whole(), rows, splittable.rows), device)

    def repeated(column: Column) -> torch.Tensor:
        values = column.value.index_select(0, torch.arange(rows, device=column.value.device) % len(column.value))
        tensor: torch.Tensor = values.requires_grad_(column.differs)
        return tensor

    with undisturbed(subject) as outside:
        run = _Run(subject, coupled, subject.parameters, rows)
        yield run, outputs.made(repeated), batch, outside(())


def _first_rows(batch: Any, rows: int, total: int) -> Any:
    """The first samples of a batch; what has not one row a sample stays whole."""
    if rows == total:
        return batch
    if isinstance(batch, list):
        return batch[:rows]

    def cut(leaf: Any) -> Any:
        return leaf[:rows] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == total else leaf

    return map_leaves(cut, batch)


def seconds_of_loss(subject: Subject, coupled: Coupled, outputs: OutputFacts, *, clock: Callable[[], float]) -> float:
    """The time of the loss of all samples and its backward; 0 where it can't be had.

    Args:
        subject: what is planned; the model lies on the device.
        coupled: the user's functions.
        outputs: what the encoder gave for real.
        clock: is read before and after.
    """
    plain = copy.copy(coupled)
    plain.loss = with_plain_losses(coupled.loss)
    best = math.inf
    began = time.perf_counter()
    for _ in range(2):
        try:
            with _real(subject, plain, outputs, subject.splittable.rows) as (run, made, batch, outside):
                alone, joined = run.prepared(made, outside)
                del made
                start = clock()
                alone.differentiated(joined, batch)
                best = min(best, clock() - start)
        except Exception as error:  # noqa: BLE001 - outputs of few samples over and over may be nothing it can be of
            logger.info("the coupled loss is not timed (%s: %s)", type(error).__name__, error)
            return 0.0
        if time.perf_counter() - began > 1.0:
            break
    return best
