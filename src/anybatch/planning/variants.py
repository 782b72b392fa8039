"""The profiles of a step, one for each treatment of its loss, made when they are first asked for."""

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from anybatch.errors import NotSplittable
from anybatch.planning.blocks import blocks_of, runs_of
from anybatch.planning.fitting import Fit, NotAligned, Size
from anybatch.planning.lengths import lengths_of
from anybatch.planning.profiling import ALL, Constants, Profile
from anybatch.planning.running import Levers
from anybatch.planning.subjects import Subject
from anybatch.planning.tracers import NotFake, Tracer
from anybatch.planning.tracing import Before, PassTrace, before_of
from anybatch.planning.updates import UpdateTrace, trace_update
from anybatch.records.plans import Confidence
from anybatch.tensors.batches import Part
from anybatch.tensors.meter import Recording
from anybatch.tensors.modules import is_scripted, modules_of
from anybatch.update.batchnorm import coupling_modules

logger = logging.getLogger(__name__)

_RECURRENT = (torch.nn.RNNBase,)
_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)


@dataclass(frozen=True)
class Variant:
    """How the loss is computed.

    Args:
        head: the output layer whose loss is taken in chunks; empty if it is not.
        chunks: into how many.
    """

    head: str = ""
    chunks: int = 1


class TooLarge(Exception):  # not an error of the user's: the caller looks at smaller micro-batches
    """A micro-batch might not fit if it ran for real; the text says which."""

    def __str__(self) -> str:
        return f"a micro-batch of {super().__str__()} might not fit if it ran for real"


class _TooFew(NotAligned):
    """Not enough sizes may run for real to extrapolate from them."""


class Profiles:
    """Traces a subject as often as needed, and no more.

    Args:
        subject: what is planned.
        kind: what writes down.

    Attributes:
        blocks: the names of the blocks that may be traded for memory.
        least: the samples of the smallest micro-batch that there may be, which runs for real where that is needed.
    """

    def __init__(self, subject: Subject, kind: type[Recording] = Recording) -> None:
        self.subject, self.least = subject, 1
        self.blocks = blocks_of(subject.model, subject.blocks)
        self._runs = runs_of(subject.model, self.blocks)
        recurrent = any(isinstance(module, _RECURRENT) for module in modules_of(*subject.roots))
        on_meta = any(parameter.is_meta for parameter in subject.parameters)
        # What a recurrent layer keeps for its backward is not known to fake tensors: their kernel says 0 bytes. What
        # torch.jit compiled keeps what it learned from fake tensors and fails with real ones.
        is_real = recurrent or any(is_scripted(module) for module in modules_of(*subject.roots))
        self._tracer = Tracer(subject, self.blocks, kind, is_fake=on_meta or not is_real, may_probe=not on_meta)
        self._traces: dict[tuple[Levers, Before, Size], PassTrace] = {}
        self._profiles: dict[tuple[Variant, Size | None, bool], Profile] = {}
        self._unaligned: set[Variant] = set()
        self._varies = False
        self._updates: dict[tuple[int, ...], UpdateTrace] = {}
        self._update: UpdateTrace | None = None
        self._lengths: list[int] | None = None
        self._accumulator_bytes: dict[int, int] = {}
        self._budget: int | None = None
        self._refused: int | None = None  # the fewest samples that might not fit if they ran for real
        self._real: dict[int, tuple[int, int]] = {}  # by samples, the peak of a real run and what was fixed in it

    @property
    def is_fake(self) -> bool:
        """Whether fake tensors are used, or real probes since they can't be."""
        return self._tracer.is_fake

    @property
    def known(self) -> tuple[bool, int, int | None]:
        """What was found out about the step, which decides how sizes are traced."""
        return self.is_fake, len(self._unaligned), self._refused

    @property
    def varies(self) -> bool:
        """Whether it depends on numbers what runs, such as which experts a sample goes to."""
        return not self.is_fake and self._varies

    @functools.cached_property
    def refuses_single(self) -> bool:
        """Whether a micro-batch may not have a single sample, since ghost BatchNorm would see one value a channel."""
        subject = self.subject
        if subject.batch_norm != "ghost" or not subject.splits or not coupling_modules(*subject.roots):
            return False
        part = self._point(1, None)[1]
        try:
            try:
                self._trace(part, Levers(), False)
            except NotFake:
                self._trace(part, Levers(), False)
        except NotSplittable:
            return True
        return False

    def stay_within(self, budget: int) -> None:
        """Sets the bytes that real probes stay under.

        Args:
            budget: bytes.
        """
        if budget != self._budget:
            self._budget, self._refused = budget, None

    @property
    def has_lengths(self) -> bool:
        """Whether samples are padded to lengths that vary."""
        return len(set(self._sample_lengths())) > 1

    def forget_lengths(self) -> None:
        """The next batch has other samples."""
        self._lengths = None

    def size_of(self, part: Part) -> Size:
        """What a part looks like to the model: its samples, and the length that they are padded to if it varies."""
        lengths = self._sample_lengths()
        return Size(len(part.samples), max((lengths[i] for i in part.samples), default=0) if lengths else 0)

    def run_name(self, first: str, last: str) -> str:
        """The name of a run of blocks, as the levers take it."""
        if first == last:
            return first
        home, start = self._runs[first]
        run = f"{start}:{self._runs[last][1] + 1}"
        return f"{home}.{run}" if home else run

    def profile(self, variant: Variant, size: Size, *, single: bool) -> Profile:
        """The profile that is good for a size.

        Args:
            variant: how the loss is computed.
            size: of a micro-batch.
            single: whether the whole batch is one micro-batch.

        Raises:
            TooLarge: the size has to run for real, and might not fit.
        """
        single = single and not self.subject.splits  # else it follows from the trace of a later micro-batch
        splittable = self.subject.splittable
        while splittable.rows > 2 and not splittable.has_lists and variant not in self._unaligned:
            try:
                return self._made(variant, None, single)
            except NotAligned as error:
                self._note_unaligned(variant, error)
            except NotFake:
                continue
        try:
            return self._made(variant, size, single)
        except NotFake:
            return self._made(variant, size, single)

    def traced(self, variant: Variant, levers: Levers, part: Part, *, single: bool) -> Profile:
        """The profile of one size with levers on, exactly at that size on fake tensors.

        Args:
            variant: how the loss is computed.
            levers: what is traded for memory.
            part: the samples of the largest micro-batch.
            single: whether it is the whole batch.

        Raises:
            NotAligned: two sizes do not have the same operations, so that from now on every size is traced by itself,
                and what was found out from two sizes before is not to be trusted.
        """
        try:
            try:
                return self._traced(variant, levers, part, single)
            except NotFake:
                return self._traced(variant, levers, part, single)
        except NotAligned as error:
            self._note_unaligned(variant, error)
            raise

    def _note_unaligned(self, variant: Variant, error: NotAligned) -> None:
        self._unaligned.add(variant)
        self._varies = self._varies or not isinstance(error, _TooFew)
        logger.info("operations depend on the micro-batch (%s); every size is traced by itself", error)

    def _traced(self, variant: Variant, levers: Levers, part: Part, single: bool) -> Profile:
        size = self.size_of(part)
        if self.is_fake or size.samples < 4 or variant in self._unaligned:
            points = [(size, part)]
        else:
            points = self._points(self._sample_lengths())
        return self._profile([(s, self._trace(p, levers, single)) for s, p in points])

    def _made(self, variant: Variant, size: Size | None, single: bool) -> Profile:
        key = (variant, size, single)
        if key not in self._profiles:
            levers = Levers(head=variant.head, loss_chunks=variant.chunks)
            points = self._points(self._sample_lengths()) if size is None else [(size, self._part_like(size))]
            if self.is_fake or self.has_lengths or not self.subject.splits:
                traces = [(s, self._trace(p, levers, single)) for s, p in points]
            else:
                traces = self._probed(points, levers, single, extrapolates=size is None)
            self._profiles[key] = self._profile(traces)
        return self._profiles[key]

    def _profile(self, traces: Sequence[tuple[Size, PassTrace]]) -> Profile:
        subject = self.subject
        fit = Fit(traces, granularity=subject.granularity)
        trained = self.trained(fit.trace.trained)
        if trained not in self._updates:
            self._updates[trained] = trace_update(subject, trained)
        self._update = self._updates[trained]
        unreached = subject.gradient_bytes({*trained} - {*fit.trace.trained})
        buffers = sum(
            b.numel() * b.element_size()
            for module in modules_of(*subject.roots)
            for b in module._buffers.values()
            if b is not None
        )
        copies = 2 if subject.device_type == "cuda" else 1
        if subject.splittable.is_collated:
            is_ahead = subject.counts_ahead or subject.devices is not None
            copies = ALL if is_ahead and subject.device_type == "cpu" else copies
        elif subject.batch_bytes and not subject.writes_batch:
            copies = 0
        times = 2 if subject.splittable.copies_rows else 1  # all micro-batches are cut out at once
        summed = subject.summed_bytes([subject.parameters[position] for position in trained])
        constants = Constants(times * subject.batch_bytes, buffers, copies, subject.lanes, summed, unreached)
        accumulators = functools.partial(_accumulators, self.subject, self._accumulator_bytes)
        return Profile(fit, self._update, constants, self.confidence, self._runs, accumulators)

    def trained(self, reached: Iterable[int]) -> tuple[int, ...]:
        """The positions of the parameters that a step may give a gradient.

        Where it depends on numbers what runs, such as which experts a sample goes to, few samples do not reach all of
        them.

        Args:
            reached: those that got one in a trace.
        """
        if self.is_fake and not self._unaligned:
            return tuple(sorted(reached))
        subject, found = self.subject, set(reached)
        own = None if subject.settings.inputs is None else {id(tensor) for tensor in subject.settings.inputs}
        for position, parameter in enumerate(subject.parameters):
            if parameter.requires_grad and (own is None or id(parameter) in own):
                found.add(position)
        return tuple(sorted(found))

    @property
    def confidence(self) -> Confidence:
        """How far the traces may be trusted."""
        recurrent, convolutions = (
            any(isinstance(module, kinds) for module in modules_of(*self.subject.roots))
            for kinds in (_RECURRENT, _CONVOLUTIONS)
        )
        if self._update is not None and not self._update.is_traced:
            return "bounded"
        if self.subject.device_type == "cuda" and not self.subject.is_present:
            return "unknown" if recurrent else "bounded" if convolutions or not self.is_fake else "exact"
        return "exact" if self.is_fake else "measured"

    def _trace(self, part: Part, levers: Levers, single: bool) -> PassTrace:
        before = before_of(self.subject, single=single)
        if not self.is_fake or self.subject.splittable.has_lists:
            return self._traced_now(part, levers, before)
        key = (levers, before, self.size_of(part))
        if key not in self._traces:
            self._traces[key] = self._traced_now(part, levers, before)
        return self._traces[key]

    def _traced_now(self, part: Part, levers: Levers, before: Before) -> PassTrace:
        try:
            return self._tracer.trace(part, levers, before)
        except NotFake:
            self._profiles.clear()
            self._traces.clear()
            raise

    def _points(self, lengths: Sequence[int]) -> list[tuple[Size, Part]]:
        """The small sizes that are traced: two, or five where the length of the samples varies."""
        high = 4 if self.subject.splittable.rows >= 4 else 3
        if not lengths or len(set(lengths)) < 3:
            longest = max(range(len(lengths)), key=lengths.__getitem__) if lengths else None
            return [self._point(m, longest) for m in (2, high)]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        short, long = order[0], order[-1]
        middle = min(order, key=lambda i: abs(lengths[i] - (lengths[short] + lengths[long]) / 2))
        if lengths[middle] in (lengths[short], lengths[long]):
            middle = next(i for i in order if lengths[i] not in (lengths[short], lengths[long]))
        return [self._point(m, i) for m, i in ((2, short), (high, short), (2, long), (high, long), (2, middle))]

    def _point(self, samples: int, index: int | None) -> tuple[Size, Part]:
        part = Part(range(samples) if index is None else [index] * samples, samples)
        return self.size_of(part), part

    def _probed(
        self, points: list[tuple[Size, Part]], levers: Levers, single: bool, *, extrapolates: bool
    ) -> list[tuple[Size, PassTrace]]:
        """Traces the points that may run for real within the budget, found from one sample on.

        Live bytes are at most proportional to the samples, on top of what is there anyway.

        Raises:
            NotAligned: two sizes to extrapolate from do not fit.
            TooLarge: the size that is asked for might not fit.
        """
        if not extrapolates and self._refused is not None and points[0][0].samples >= self._refused:
            raise TooLarge(str(points[0][0]))
        if not self._real:
            self._note_real(self.least, self._trace(self._point(self.least, None)[1], levers, single))
        traces: list[tuple[Size, PassTrace]] = []
        for size, part in [*points, self._point(3, None)] if extrapolates else points:
            is_new = all(size != known for known, _ in traces)
            if len(traces) < len(points) and is_new and self._may_run(size.samples):
                traces.append((size, self._trace(part, levers, single)))
                self._note_real(size.samples, traces[-1][1])
        if len(traces) == len(points):
            return traces
        if extrapolates:
            raise _TooFew(f"more than {len(traces)} sizes might not fit into the budget")
        self._refused = points[0][0].samples
        raise TooLarge(str(points[0][0]))

    def _may_run(self, samples: int) -> bool:
        if self._budget is None or samples == self.least:
            return True
        known = min((one for one in self._real if one >= samples), default=max(self._real))
        peak, fixed = self._real[known]
        bound = fixed + (peak - fixed) * max(1.0, samples / known)
        return bound + self.subject.batch_bytes + self.subject.state_bytes <= self._budget

    def _note_real(self, samples: int, trace: PassTrace) -> None:
        peak = max(Fit([(Size(samples), trace)]).live(Size(samples)), default=0)
        fixed = sum(one.size for one in trace.allocations if one.born < 0)
        # The gradients that were put there for it lie there also where it did not reach the parameter.
        idle = self.subject.gradient_bytes({*self.trained(trace.trained)} - {*trace.trained})
        self._real[samples] = max(self._real.get(samples, (0, 0)), (peak + idle, fixed + idle))

    def _part_like(self, size: Size) -> Part:
        lengths = self._sample_lengths()
        if not lengths:
            return Part(range(size.samples), size.samples)
        index = next((i for i, length in enumerate(lengths) if length == size.length), 0)
        return Part([index] * size.samples, size.samples)

    def _sample_lengths(self) -> list[int]:
        """The length of each raw sample as ``collate`` lays it out; empty where all are alike or there are none."""
        if self._lengths is None:
            self._lengths = lengths_of(self.subject)
        return self._lengths


def _accumulators(subject: Subject, known: dict[int, int], micro_batches: int) -> int:
    if micro_batches not in known:
        known[micro_batches] = subject.accumulator_bytes(micro_batches * subject.lanes)  # shared evenly, or fewer
    return known[micro_batches]
