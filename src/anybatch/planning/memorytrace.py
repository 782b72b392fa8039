"""Traces: what one micro-batch holds in memory, from operation to operation, on fake tensors or for real.

A step is traced on fake tensors, which take no memory, as long as that goes well; from then on few samples run for
real. Nothing of the user's is changed by either.
"""

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.batch.moving import to_device
from anybatch.batch.trees import map_leaves
from anybatch.batch.writes import Writes, differ
from anybatch.errors import AnyBatchError, LossError
from anybatch.loss.accumulate import Settings
from anybatch.loss.sums import Sums
from anybatch.memory.meter import BEFORE, Allocation, OverBudget, Recording, held_by, storages_of
from anybatch.memory.spilling import Spilling
from anybatch.planning.blocks import Span, spans_noted
from anybatch.planning.microbatches import batch_for_loss, clear_away, micro_batch_of, stand_in_of, tensors_in
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import applied, micro_batches_of, run_for_real, settings_for, undisturbed
from anybatch.planning.subjects import Subject, sparse_error
from anybatch.records.memory import BUFFERS, GRADIENTS, INPUTS, PARAMETERS
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.randomness import RandomState
from anybatch.update.batchnorm import batch_norm_as
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)

_TRACES = 2  # what a first one fills, such as a cache, is there in all later steps
_JIT_RUNS = 2  # torch.jit looks at what runs before it optimizes, and may fail meanwhile if something looks at it
_SCALAR_BYTES = 8
# A budget that does not hold what lies there already is passed whatever is done: a run may take this much more then.
# In any other there has to be so much room, since what an operation takes within itself is not seen.
_SHARE, _LITTLE = 4, 2**20


@dataclass
class PassTrace:
    """What a micro-batch held."""

    operations: list[str]  # names, in order
    allocations: list[Allocation]  # storages that were counted
    spans: list[Span] = field(default_factory=list)  # the runs of blocks
    trained: tuple[int, ...] = ()  # positions among the subject's parameters of those that got a gradient
    # numbers of allocations: gradients that were there before, and what was first added to each
    accumulated: tuple[tuple[int, int], ...] = ()
    # numbers of allocations: what torch adds to without a mode, and the sum, which has a storage of its own under
    # one
    in_place: tuple[tuple[int, int], ...] = ()
    # numbers of allocations that are there afterwards besides gradients, such as losses and metrics
    kept: tuple[int, ...] = ()
    chunked: int = 0  # how often a loss was taken in chunks
    input_sizes: list[int] = field(default_factory=list)  # bytes of each tensor of one micro-batch
    # for every operation its arithmetic and the bytes it moves, if they were asked for
    costs: list[tuple[float, float]] = field(default_factory=list)
    leaves_fakes: bool = False  # whether some of its fake tensors may be left, as in a cache of the user's
    # of a pass with a coupled loss, after how many operations each stage began, and its name
    stages: tuple[tuple[int, str], ...] = ()
    # numbers of allocations that micro-batches which did not run would hold, too, for each kind of them
    repeated: tuple[tuple[int, ...], ...] = ()
    taken: int = 0  # bytes that were alive at most with all that lay beside, if it ran for real within a limit
    fixed: int = 0  # bytes of that which are there however many samples run
    spare: int = 0  # how many times as many samples would run within the same limit
    # of tensors that the first micro-batch makes for all, after which operation, and their numbers
    weights: tuple[tuple[int, int], ...] = ()

    def held_the_same(self, other: "PassTrace") -> bool:
        """Whether another trace has the same operations and the same bytes."""
        own, others = ([(a.born, a.died, a.back, a.size) for a in one.allocations] for one in (self, other))
        return self.operations == other.operations and own == others

    def with_more(self, more: Sequence[int], granularity: int) -> "PassTrace":
        """The trace with what so many more micro-batches of each kind would hold at the same time, each rounded up.

        That is there until the backward of the one that ran is over: each lets go of it in a backward of its own.
        """
        allocations, kept = [copy.copy(one) for one in self.allocations], list(self.kept)
        begun = max((start for start, _ in self.stages[:3]), default=0)  # the first backward, up to which all do alike
        for numbers, times in zip(self.repeated, more, strict=True):
            deaths = (allocations[number].died for number in numbers)
            end = max((died for died in deaths if died is not None), default=0)
            for number in numbers if times else ():
                one = allocations[number]
                one.size = -(-one.size // granularity) * granularity
                others = copy.copy(one)
                others.size = one.size * times
                others.died = end if one.died is not None and one.died > begun else one.died
                if number in self.kept:
                    kept.append(len(allocations))
                allocations.append(others)
        return replace(self, allocations=allocations, kept=tuple(kept))

    def unwatched(self) -> "PassTrace":
        """The trace as it is without a mode, where sums lie in the storage of what is added to."""
        allocations, place = [copy.copy(one) for one in self.allocations], [*range(len(self.allocations))]
        for old, new in self.in_place:
            place[new] = place[old]
            first, last = allocations[place[old]], allocations[new]
            first.died, first.category, last.size = last.died, last.category, 0
        accumulated = tuple((gradient, place[added]) for gradient, added in self.accumulated)
        return replace(
            self, allocations=allocations, accumulated=accumulated, kept=tuple(place[one] for one in self.kept)
        )


class NotFake(Exception):  # not an error of the user's: the caller does the same again, for real
    """The step can't run on fake tensors."""


class Tracer:
    """Traces micro-batches of a subject; ``kind`` is what writes down.

    Fake tensors are tried if ``is_fake``, which is false from then on when they can't be used. Micro-batches run for
    real only if it ``may_probe``.
    """

    def __init__(
        self, subject: Subject, blocks: Sequence[str], kind: Callable[..., Recording], *, is_fake: bool, may_probe: bool
    ) -> None:
        self.is_fake = is_fake
        self._subject = subject
        self._blocks = blocks
        self._kind = kind
        self._may_probe = may_probe
        self._is_warm = False
        self._left: list[str] = []

    def trace(
        self, parts: Sequence[Part], recipe: Recipe, *, split: bool, limit: int | None = None, spills: bool = False,
        run: "Callable[..., Run] | None" = None,
    ) -> PassTrace:  # fmt: skip
        """Runs a forward and a backward for a micro-batch, of a coupled loss a whole pass, and rolls everything back.

        What was held are parameters, buffers, gradients, activations; micro-batches as far as they are copies.
        ``split`` says whether other micro-batches left their gradients, as before the one that holds the most. A real
        run may have ``limit`` bytes alive with all that is there beside it, and is ``OverBudget`` where it would take
        more; if it ``spills``, it keeps little of what it would hold, as ``Spilling`` does. ``NotFake`` is raised where
        it has to be traced for real, as everything has from now on, and ``LossError`` where it can be traced in neither
        way.
        """
        made = functools.partial(run or Run, self._subject, parts, recipe, self._blocks, split)
        if self.is_fake:
            return self._on_fakes(lambda fakes: made().on_fakes(self._kind, fakes))
        if not self._is_warm and run is None and self._subject.is_scripted:
            for _ in range(_JIT_RUNS):
                run_for_real(self._subject, parts[0], recipe.plain, clock=time.perf_counter)
        self._is_warm = True
        return self._for_real(made(), limit, spills)

    def _on_fakes(self, run: Callable[[Fakes], PassTrace]) -> PassTrace:
        """What a run on fake tensors gives, after which none of them is left."""
        failure: Failure | None = None
        device, fakes = self._subject.settings.device, None
        try:
            for _ in range(_TRACES):
                fakes = Fakes()
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
            self._left = [] if fakes is None else clear_away(fakes, device)[1]
            self._give_up(why)
        if self._left and self._may_probe:
            self._give_up(f"it keeps tensors of the trace: {self._left[0]}")
        return trace

    def _give_up(self, why: str) -> None:
        logger.info("this step can't run on fake tensors (%s); few samples run for real instead", why)
        self.is_fake = False
        self._subject.behaviour.looks_at_numbers = True
        raise NotFake

    def _for_real(self, run: "Run", limit: int | None, spills: bool) -> PassTrace:
        given = self._subject.splittable
        if given.obstacle is not None and isinstance(given.batches[0], Iterator):
            raise given.obstacle  # a trace would take what the step is to be given
        try:
            return run.for_real(self._kind, limit, spills=spills)
        except Exception as error:
            if not self._left or isinstance(error, (AnyBatchError, OverBudget)) or is_out_of_memory(error):
                raise
            raise LossError(
                "the step keeps tensors that it made while being traced, and fails with them now "
                f"({_first_line(error)}); got {'; '.join(self._left[:3])}. Expected anything a step keeps for the "
                "next one to be a plain attribute of a module, or to depend on shapes, not on weights, samples or "
                "random numbers. Clear it now, and run the step once before planning, so that it is already "
                "filled; or pass micro_batch_size= instead of memory="
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@dataclass
class Given:
    """What a run is given: fake tensors, or the real ones."""

    recording: Recording  # writes down
    settings: Settings
    parameters: Sequence[torch.Tensor]
    batches: dict[int, Any]  # the micro-batches that run, by number
    whole: Any  # what a coupled loss looks at
    outside: OutsideLeaves  # finds leaves besides the parameters
    move: Callable[[Any], Any]  # brings a micro-batch to the device


class Run:
    """A forward and a backward of a micro-batch that are written down."""

    is_pass = False
    """Whether it is a whole pass, which moves its micro-batches itself."""
    stays = False
    """Whether its micro-batches lie there throughout, in bytes of their own."""

    def __init__(
        self, subject: Subject, parts: Sequence[Part], recipe: Recipe, blocks: Sequence[str], split: bool
    ) -> None:
        self._subject, self._recipe, self._blocks, self._split = subject, recipe, blocks, split
        self._parts, self._count = dict(enumerate(parts)), 2 if split else 1
        self._settings = settings_for(subject, recipe)
        self._wanted = subject.wanted  # before fake tensors stand in for parameters
        self._weights: tuple[tuple[int, int], ...] = ()
        self._spills = False

    def on_fakes(self, kind: Callable[..., Recording], fakes: Fakes) -> PassTrace:
        """Runs it on fake tensors in the place of all parameters and buffers."""
        subject, recording = self._subject, kind(counts_fakes=True)
        settings = replace(self._settings, device=torch.device("cpu"))
        own = subject.parameters
        batches = {number: stand_in_of(subject, part, fakes) for number, part in self._parts.items()}
        whole = map_leaves(lambda leaf: fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, self._whole())
        with undisturbed(subject, is_fake=True) as outside, swapped(fakes, subject.roots) as by_id:
            parameters = [by_id.get(id(parameter), parameter) for parameter in own]
            if settings.inputs is not None:
                settings = replace(settings, inputs=tuple(fakes.like(tensor) for tensor in settings.inputs))
            with fakes.mode:
                given = Given(recording, settings, parameters, batches, whole, outside(parameters), _copied)
                trace = self._traced(given, simulate=True)
                recording.end()
        del batches, whole, parameters, settings, by_id, outside, given
        fakes.let_go()
        trace.leaves_fakes = recording.has_survivors
        return trace

    def for_real(self, kind: Callable[..., Recording], limit: int | None, *, spills: bool = False) -> PassTrace:
        """Runs it for real, and stops it before it goes over a limit, or as little as can be where that is passed."""
        self._spills = spills
        subject, device = self._subject, self._subject.settings.device
        with undisturbed(subject) as outside:
            is_new = subject.behaviour.writes_batch is None and not subject.splittable.is_collated and not self.is_pass
            own = {number: batch_for_loss(subject, part) for number, part in self._parts.items()}
            batches = own if self.is_pass else {n: to_device(batch, device) for n, batch in own.items()}
            beside = 0 if limit is None else _bytes_beside(subject, None if self.is_pass else batches)
            needed = beside + self._fixed_bytes()
            if limit is not None and needed > limit and spills:
                limit = needed + max(needed // _SHARE, _LITTLE)
            if limit is not None and needed + (needed // _SHARE if spills else 0) > limit:
                raise OverBudget(needed)
            recording = kind(device_type=device.type, limit=None if limit is None else max(0, limit - beside))
            move = functools.partial(to_device, device=device)
            given = Given(recording, self._settings, subject.parameters, batches, self._whole(), outside(()), move)
            try:
                trace = self._traced(given, simulate=False)
            except OverBudget as error:
                error.needed += beside
                raise
            if is_new and differ(own[0], micro_batch_of(subject, self._parts[0])):
                subject.note_writes(True, is_through=True)  # in a way that no counter shows
            recording.end()  # gradients that go from now on are no part of it
            trace.taken, trace.fixed = beside + recording.most, _bytes_beside(subject, None) + self._fixed_bytes()
            if limit is not None and spills:
                trace.taken += _bytes_uncopied(subject, batches)
                trace.spare = (limit - needed) // max(1, beside + recording.most_here - needed)
            return trace

    def _whole(self) -> Any:
        return None

    def _traced(self, given: Given, *, simulate: bool) -> PassTrace:
        subject, recording, parameters = self._subject, given.recording, given.parameters
        inputs = [given.batches, given.whole]
        recording.register(parameters, PARAMETERS)
        for module in subject.modules:
            recording.register(module._parameters.values(), PARAMETERS)
            recording.register(module._buffers.values(), BUFFERS)
        recording.register(tensors_in(inputs), INPUTS, counted=self.stays)
        gradients = self._give_gradients(recording, parameters)
        held = [(parameters[position], one) for position, one in gradients.items()]
        drawn = _drawn_so_far()
        with (
            batch_norm_as(subject.batch_norm, subject.roots, self._count) as begin,
            applied(subject, self._recipe, simulate) as handle,
            spans_noted(subject.model, self._blocks, recording) as spans,
            Spilling(recording, held) if self._spills else contextlib.nullcontext(),
        ):
            writes, is_through = Writes(tensors_in(inputs)), False
            try:
                sums = self._run(given, begin)
                is_through = True
            finally:
                # A tangent gets as much room as the storage of its tensor has, which for a view is the whole batch's.
                needs_copies = writes.were_made or recording.wrote_inputs or recording.gave_tangents
                subject.note_writes(needs_copies, is_through=is_through)
                subject.behaviour.note_elsewhere(recording.bytes_written_elsewhere)
            recording.assign((parameter.grad for parameter in parameters), GRADIENTS)
            chunked = handle.taken
        trace = PassTrace(recording.operations, recording.allocations, spans, chunked=chunked)
        self._note(trace, given)
        trace.in_place = _in_place(recording)
        trace.kept = _kept_after(trace, recording, sums)
        trace.costs = getattr(recording, "costs", [])
        if drawn != _drawn_so_far() or (not simulate and _draws_scalars(trace)):
            subject.behaviour.draws = True
        if recording.made_dense or any(p.grad is not None and p.grad.layout is torch.sparse_coo for p in parameters):
            raise sparse_error("a parameter")
        _note_gradients(trace, recording, parameters, gradients)
        return trace

    def _run(self, given: Given, begin: Callable[[], None]) -> Sums:
        subject, rows, recording = self._subject, len(self._parts[0].samples), given.recording
        accumulation = micro_batches_of(
            subject, self._recipe, rows, self._count, given.parameters, given.settings, given.outside
        )
        with recording:
            begin()
            sums = accumulation.run([given.batches[0]])
        if self._split:  # the last micro-batch had the same weight
            number = recording.numbers
            made = recording.allocations_of(accumulation.weight_tensors)
            self._weights = tuple((one.born, number[id(one)]) for one in made)
            for one in made:
                one.born = BEFORE
        return sums

    def _note(self, trace: PassTrace, given: Given) -> None:
        """Notes what is of this kind of run alone."""
        trace.input_sizes = [s.nbytes() for tensor in tensors_in(given.batches) for s in storages_of(tensor)]
        trace.weights = self._weights

    def _fixed_bytes(self) -> int:
        """The bytes of weights and buffers, and of the gradients of other micro-batches."""
        subject = self._subject
        weights = {id(p): p for p in subject.parameters}
        weights.update((id(p), p) for root in subject.roots for p in (*root.parameters(), *root.buffers()))
        found = sum(p.nbytes for p in weights.values() if p.layout is torch.strided)
        own = subject.parameters
        return found + sum(own[i].nbytes for i in self._wanted if self._split and not self._spills)

    def _give_gradients(self, recording: Recording, parameters: Sequence[torch.Tensor]) -> dict[int, Allocation]:
        """Puts gradients on, as other micro-batches left them; gives their allocations by position."""
        found: dict[int, Allocation] = {}
        for position in self._wanted if self._split else ():
            if self._spills:
                found[position] = recording.add(Allocation(BEFORE, parameters[position].nbytes, GRADIENTS))
                continue
            parameters[position].grad = gradient = torch.zeros_like(parameters[position])
            recording.register([gradient], GRADIENTS)
            found[position] = recording.allocations_of([gradient])[0]
        return found


def _copied(batch: Any) -> Any:
    """A copy, as a device gets it, where there is none."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def _bytes_beside(subject: Subject, batch: Any) -> int:
    """What is alive beside what a real run records: the logical batch, a copy of the samples, state, kept buffers."""
    own, copies = held_by(tensors_in(subject.splittable.batches)), held_by(tensors_in(batch))
    buffers = sum(buffer.nbytes for buffer in subject.buffers)
    copied = sum(size for key, size in copies.items() if key not in own)
    return subject.batch_bytes + subject.state_bytes + buffers + copied


def _bytes_uncopied(subject: Subject, batch: Any) -> int:
    """The bytes of what a first run copies, which does not know yet whether the loss writes into its batch."""
    own = held_by(tensors_in(subject.splittable.batches))
    tensors = [one for one in tensors_in(batch) if own.keys() & held_by([one]).keys()]
    return 0 if subject.splittable.is_collated else sum(one.nbytes for one in tensors)


def _kept_after(trace: PassTrace, recording: Recording, sums: Sums) -> tuple[int, ...]:
    """The numbers of the allocations of losses and metrics."""
    left = [term.value for terms in sums.terms.values() for term in terms]
    left += [tensor for metrics in sums.metrics for tensor in tensors_in(dict(metrics))]
    kept = {id(one) for one in recording.allocations_of(left) if not one.is_fixed}
    return tuple(number for number, one in enumerate(trace.allocations) if id(one) in kept)


def _in_place(recording: Recording) -> tuple[tuple[int, int], ...]:
    """The numbers of what was added to and held by nobody else, and of the sums."""
    number = recording.numbers
    return tuple(
        (number[id(old)], number[id(new)])
        for old, new in recording.sums
        if old.died == new.born + 1 and old.size == new.size and old.born != BEFORE
    )


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
    number = recording.numbers
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
