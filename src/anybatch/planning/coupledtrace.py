"""What a step with a coupled loss holds: a pass with few of its micro-batches and its whole loss, written down.

Of very many micro-batches a few run. The others are alike: each holds what the first of its kind holds, so that the
bytes for any number of them, and of graphs that are kept, follow from one pass.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.batch.moving import to_device
from anybatch.batch.trees import map_leaves
from anybatch.loss.coupling import Coupled, CoupledPass
from anybatch.loss.outputs import Outputs, tensors_of
from anybatch.loss.reducing import ALONE
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.memory.meter import Recording
from anybatch.planning.curve import Peak
from anybatch.planning.memorytrace import register_weights
from anybatch.planning.microbatches import batch_for_loss, stand_in_of, tensors_in
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import applied, undisturbed, with_plain_losses
from anybatch.planning.subjects import Subject
from anybatch.records.memory import ACTIVATIONS, INPUTS
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.graph import OutsideLeaves
from anybatch.update.batchnorm import batch_norm_as

FIRST, LOSS, BACKWARD, SECOND = (
    "first pass of the encoder", "coupled loss", "backward of the encoder", "second pass of the encoder",
)  # fmt: skip

_REAL = 3  # micro-batches of a kind that run: one for all that are alike, and the last ones, which may be smaller
_FEW = 24  # micro-batches of different sizes that all run


class CoupledTrace:
    """A pass that was written down.

    Args:
        recording: of it.
        first: for each micro-batch that ran, after how many operations its first run began, and ended.
        loss: after how many operations the loss began.
        back: for each micro-batch that ran, after how many operations it began to go back.
        kept_from: the number of the first micro-batch whose graph is kept.
        trained: the positions of the parameters that got a gradient.
        inputs: bytes of a micro-batch that lies there throughout, of each kind.

    Attributes:
        leaves_fakes: whether some of its fake tensors may be left, as in a cache of the user's.
    """

    def __init__(
        self, recording: Recording, first: dict[int, tuple[int, int]], loss: int, back: dict[int, int], kept_from: int,
        trained: tuple[int, ...], inputs: tuple[int, int],
    ) -> None:  # fmt: skip
        self.trained, self._inputs = trained, inputs
        self._recording = recording
        self._live = recording.live_bytes()
        self._loss, self._back, self._kept_from = loss, back, kept_from
        self._held = [self._held_by(first, back, number) for number in (0, kept_from)]
        self.leaves_fakes = False

    def _held_by(self, first: dict[int, tuple[int, int]], back: dict[int, int], number: int) -> list[int]:
        """After each operation the bytes that a micro-batch left behind and holds, until it goes back."""
        steps = [0] * (len(self._live) + 2)
        if number not in first:
            return steps
        (begin, end), until = first[number], back.get(number, len(self._live))
        for one in self._recording.allocations:
            gone = until if one.died is None else min(one.died, until)
            if begin <= one.born < end < gone:
                steps[end] += one.size
                steps[gone] -= one.size
        return [*itertools.accumulate(steps)]

    @property
    def has_survivors(self) -> bool:
        """Whether something of it is still alive."""
        return self._recording.has_survivors

    def peak(self, more: tuple[int, int]) -> Peak:
        """The peak with more micro-batches than ran.

        Args:
            more: how many that run twice, and how many that keep their graph.
        """
        twice, kept = self._held
        inputs = sum(number * size for number, size in zip(more, self._inputs, strict=True))
        totals = [live + more[0] * a + more[1] * b for live, a, b in zip(self._live, twice, kept, strict=False)]
        at = max(range(len(totals)), key=totals.__getitem__)
        found = self._recording.by_category(at)
        found[ACTIVATIONS] = found.get(ACTIVATIONS, 0) + totals[at] - self._live[at]
        found[INPUTS] = found.get(INPUTS, 0) + inputs
        return Peak(totals[at] + inputs, found, self._recording.operations[at], self._stage(at))

    def _stage(self, at: int) -> str:
        if at < self._loss:
            return FIRST
        began = [number for number, start in self._back.items() if start <= at]
        if not began:
            return LOSS
        return BACKWARD if min(began) >= self._kept_from else SECOND


class _ShortPass(CoupledPass):
    """A pass in which some micro-batches only stand there with the outputs of another one.

    Args:
        recording: writes down.
        like: for the micro-batches that do not run the one that they are alike, which has run before.
    """

    recording: Recording
    like: dict[int, int]

    def note(self, recording: Recording, like: dict[int, int]) -> "_ShortPass":
        """Begins to note what runs when."""
        self.recording, self.like = recording, like
        self.first: dict[int, tuple[int, int]] = {}
        self.back: dict[int, int] = {}
        self.loss = 0
        return self

    def _to_keep(self, number: int, given: list[Any], outputs: Outputs) -> Any:
        return self._noted(number, outputs, functools.partial(super()._to_keep, number, given, outputs))

    def _to_run_again(self, number: int, given: list[Any], again: Any, outputs: Outputs, comparison: Any) -> Any:
        run = functools.partial(super()._to_run_again, number, given, again, outputs, comparison)
        return self._noted(number, outputs, run)

    def _noted(self, number: int, outputs: Outputs, run: Callable[[], Any]) -> Any:
        if number in self.like:
            outputs.repeat(self.like[number], len(self._samples[number]))
            return [None] * len(outputs.labels)
        began = self.recording.now
        found = run()
        self.first[number] = began, self.recording.now
        return found

    def _loss_of(self, outputs: Outputs, whole: Callable[..., Any]) -> tuple[Sums, list[torch.Tensor | None]]:
        self.loss = self.recording.now
        return super()._loss_of(outputs, whole)

    def _back(self, number: int, graph: Any, gradients: Any) -> None:
        if number not in self.like:
            self.back[number] = self.recording.now
            super()._back(number, graph, gradients)


class EncoderAlone:
    """The encoder of a coupled loss with a loss that adds up over micro-batches, which an ordinary search can plan."""

    def __init__(self, coupled: Coupled) -> None:
        self._coupled = coupled

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self._coupled.user_functions

    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the sum of the means of what the encoder gives."""
        tensors = tensors_of(self._coupled.encode(model, batch))
        means = [one.mean() for one in tensors if one is not None and one.requires_grad]
        return sum(means[1:], start=means[0]) if means else torch.zeros((), requires_grad=True)


def which_run(sizes: Sequence[tuple[int, int]], kept: int) -> tuple[list[int], dict[int, int], tuple[int, int]]:
    """Chooses the micro-batches that run.

    Args:
        sizes: of all of them: samples, and the length that they are padded to.
        kept: how many keep their graph.

    Returns:
        The numbers of all, those that run twice before those that keep their graph, and each kind with the largest one
        first; for those that do not run the place among these of the one that they are alike; how many of each kind do
        not run.

    Example:
        >>> which_run([(8, 0)] * 6 + [(2, 0)], 5)
        ([0, 1, 2, 3, 4, 5, 6], {3: 2, 4: 2}, (0, 2))
    """
    runs_all = len(sizes) <= _FEW and len({*sizes}) > 2
    numbers: list[int] = []
    like: dict[int, int] = {}
    counts = []
    for kind in (range(len(sizes) - kept), range(len(sizes) - kept, len(sizes))):
        ordered = sorted(kind, key=lambda number: (-sizes[number][0] * max(1, sizes[number][1]), number))
        if len(ordered) > _REAL and not runs_all:
            start = len(numbers)
            like.update((start + 1 + index, start) for index in range(len(ordered) - _REAL))
        counts.append(max(0, len(ordered) - _REAL) if not runs_all else 0)
        numbers += kind if runs_all or len(ordered) <= _REAL else ordered
    return numbers, like, (counts[0], counts[1])


def trace_coupled(
    subject: Subject, parts: Sequence[Part], sizes: Sequence[tuple[int, int]], recipe: Recipe, fakes: Fakes | None,
    *, limit: int | None = None,
) -> CoupledTrace:  # fmt: skip
    """Runs a pass with a coupled loss, and takes every trace of it off again.

    Args:
        subject: what is planned.
        parts: the micro-batches.
        sizes: of them, see ``which_run``.
        recipe: the memory optimizations, and how many graphs are kept.
        fakes: makes the fake tensors; ``None`` to run for real.
        limit: bytes that a real run may have alive with the logical batch and the optimizer's state.

    Returns:
        What was written down.
    """
    numbers, like, _ = which_run(sizes, recipe.keep or 0)
    run = _Run(subject, [parts[number] for number in numbers], recipe, like)
    if fakes is not None:
        trace = run.on_fakes(fakes)
        fakes.let_go()
        trace.leaves_fakes = trace.has_survivors
        return trace
    with undisturbed(subject) as outside:
        device = subject.settings.device
        micro_batches = {i: batch_for_loss(subject, part) for i, part in enumerate(run.parts) if i not in like}
        whole = subject.splittable.whole() if run.coupled.takes_batch else None
        beside = subject.batch_bytes + subject.state_bytes
        recording = Recording(device_type=device.type, limit=None if limit is None else max(0, limit - beside))
        move = functools.partial(to_device, device=device)
        return run.traced(recording, subject.parameters, micro_batches, whole, outside(()), device, move)


class _Run:
    """A pass that is to be written down."""

    def __init__(self, subject: Subject, parts: Sequence[Part], recipe: Recipe, like: dict[int, int]) -> None:
        if not isinstance(subject.loss_fn, Coupled):
            raise TypeError(f"the loss is a {type(subject.loss_fn).__name__}; expected anybatch.Coupled")
        self._subject, self.parts, self._recipe, self._like = subject, parts, recipe, like
        ends = [*itertools.accumulate(len(part.samples) for part in parts)]
        self.samples: list[Sequence[int]] = [
            range(end - len(p.samples), end) for end, p in zip(ends, parts, strict=True)
        ]
        if subject.splittable.has_costs:  # which puts samples into another order
            self.samples = [part.samples for part in parts]
        self.coupled = copy.copy(subject.loss_fn)
        self.coupled.loss = with_plain_losses(subject.loss_fn.loss)

    def on_fakes(self, fakes: Fakes) -> CoupledTrace:
        """Runs it on fake tensors."""
        subject, like = self._subject, self._like
        micro_batches = {i: stand_in_of(subject, part, fakes) for i, part in enumerate(self.parts) if i not in like}
        whole = subject.splittable.whole() if self.coupled.takes_batch else None
        whole = map_leaves(lambda leaf: fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, whole)
        own = subject.parameters
        with undisturbed(subject, is_fake=True) as outside, swapped(fakes, subject.roots) as by_id:
            parameters = [by_id.get(id(parameter), parameter) for parameter in own]
            recording = Recording(counts_fakes=True, granularity=subject.granularity)
            with fakes.mode:
                return self.traced(
                    recording, parameters, micro_batches, whole, outside(parameters), torch.device("cpu"), _copied,
                    inputs_like=fakes.like,
                )  # fmt: skip

    def traced(
        self, recording: Recording, parameters: list[torch.Tensor], micro_batches: dict[int, Any], whole: Any,
        outside: OutsideLeaves, device: torch.device, move: Callable[[Any], Any],
        inputs_like: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> CoupledTrace:  # fmt: skip
        """Runs it.

        Args:
            recording: writes down.
            parameters: fake ones or the real ones, without gradients.
            micro_batches: those that run, by number.
            whole: what the loss looks at.
            outside: finds leaves besides the parameters.
            device: of the run.
            move: brings a micro-batch to the device, where batches do not lie there.
            inputs_like: makes a fake tensor of one of ``inputs=``.
        """
        subject, like = self._subject, self._like
        register_weights(recording, subject, parameters)
        moves = subject.device_type != "cpu" and not subject.batch_is_there
        stays = subject.splittable.is_collated and not moves
        given = [tensor for batch in [*micro_batches.values(), whole] for tensor in tensors_in(batch)]
        recording.register(given, INPUTS, counted=stays)
        inputs = subject.settings.inputs
        if inputs is not None and inputs_like is not None:
            inputs = tuple(map(inputs_like, inputs))
        settings = replace(
            subject.settings, scaler=None, reducer=ALONE, kept_graphs=self._recipe.keep,
            inputs=inputs, device=device,
        )  # fmt: skip
        rows = sum(len(part.samples) for part in self.parts)
        short = _ShortPass(
            subject.model, self.coupled, Weights([{"": rows}]), parameters, settings,
            samples=self.samples, outside=outside,
        ).note(recording, like)  # fmt: skip

        def there(number: int) -> Any:
            return move(micro_batches[number]) if moves else micro_batches[number]

        with ExitStack() as stack:
            begin = stack.enter_context(batch_norm_as(subject.batch_norm, subject.roots, len(self.parts)))
            stack.enter_context(applied(subject, self._recipe, inputs_like is not None))

            def coming() -> Iterator[Any]:
                for number in range(len(self.parts)):
                    if number in like:
                        yield None
                        continue
                    begin()
                    yield there(number)

            joins = len(subject.splittable.batches) > 1 and not subject.splittable.is_collated
            with recording:
                short.run(coming(), there, lambda: move(whole) if moves or joins else whole)
        trained = tuple(i for i, parameter in enumerate(parameters) if parameter.grad is not None)
        recording.assign((parameter.grad for parameter in parameters), "gradients")
        recording.end()
        kept_from = len(self.parts) - (self._recipe.keep or 0)
        ahead = [tensors_in(micro_batches.get(number)) if stays else [] for number in (0, kept_from)]
        twice, kept = (sum(tensor.nbytes for tensor in tensors) for tensors in ahead)
        return CoupledTrace(recording, short.first, short.loss, short.back, kept_from, trained, (twice, kept))


def _copied(batch: Any) -> Any:
    """A copy, as a device gets it, where there is none."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
