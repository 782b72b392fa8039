"""What the allocator of a device reserves for a step, by a replay of the step's allocations in their order."""

import contextlib
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from anybatch.accelerators import TakenSegment, segments_of
from anybatch.memory.allocator import ROUND, CachingAllocator
from anybatch.memory.meter import BEFORE, Allocation, storages_of
from anybatch.planning.curve import Profile, Size
from anybatch.planning.devices import Target, segments_expand
from anybatch.planning.microbatches import tensors_in
from anybatch.planning.subjects import Subject
from anybatch.records.memory import GRADIENTS, OPTIMIZER

_STEPS = 5  # the first makes the optimizer's state, each finds what the last one left, the last an emptied cache
_MICRO_BATCHES = 4  # the least that are replayed: later ones find what these left, as soon as free blocks lie as before
_CHANGES = 20_000  # of the allocator in a step, after which that is taken to be so
_TOGETHER = 2**16  # bytes of small results of micro-batches that are not replayed one by one
_SEGMENT = 2 * 2**20  # all are as large as some of these
_COPIES = 1  # the stream in which micro-batches come


@dataclass(frozen=True)
class Held:
    """What lies on a device before a step."""

    segments: tuple[TakenSegment, ...]  # of its allocator
    others: int  # bytes of blocks that are not the step's
    expandable: bool  # whether segments grow


def held_on(subject: Subject, target: Target) -> Held | None:
    """What the allocator holds that a step will run with.

    It is ``None`` on the host, of a device that is not at hand, and of one that does not tell.
    """
    is_there = target.is_present and target.device_type != "cpu"
    found = segments_of(subject.settings.device) if is_there else None
    if found is None:
        return None
    batches = [tensor for batch in subject.splittable.batches for tensor in tensors_in(batch)]
    own = {s.data_ptr() for tensor in (*subject.tensors_held, *batches) for s in storages_of(tensor)}
    others = sum(b.size for one in found for b in one.blocks if b.is_used and b.address not in own)
    # What it does shows in what it holds: not every system has segments that grow where they are asked for.
    expandable = any(one.is_expandable for one in found) if found else segments_expand(target)
    return Held(tuple(found), others, expandable)


class Replay:
    """The allocations of a step's first calls, in their order, in a model of an allocator.

    The ``last`` micro-batch may be smaller, and blocks of other sizes go to other places.
    """

    def __init__(self, subject: Subject, held: Held, profile: Profile, last: Size | None = None) -> None:
        self._held, size = held, profile.size
        trace, update, constants = profile.fit.trace.unwatched(), profile.update, profile.constants
        self._sizes = profile.fit.sizes(size)
        self._inputs = profile.fit.input_sizes(size) if constants.copies else []
        self._last_sizes = self._sizes if last is None or last == size else profile.fit.sizes(last)
        self._last_inputs = self._inputs if last is None or not self._inputs else profile.fit.input_sizes(last)
        self._wide = subject.accumulators(profile.count)
        self._moments, self._weights = _moments(trace.allocations), {number for _, number in trace.weights}
        self._count, self._most = profile.count, max(_MICRO_BATCHES, _CHANGES // max(1, len(self._moments)))
        made = [(at, True, number) for at, number in trace.weights]  # by the first one, for all of its size
        self._moments_with_weights = _moments(trace.allocations, made)
        self._added, self._losses = {new for _, new in trace.accumulated}, {*trace.kept}
        self._are_gradients = {n for n, one in enumerate(trace.allocations) if one.category == GRADIENTS} | self._added
        self._updates, self._update_sizes = _moments(update.allocations), [one.size for one in update.allocations]
        self._before_steps = sum(1 for at, _, _ in _changes(update.allocations) if at < update.steps_at)
        self._state = [one.size for one in update.allocations if one.born == BEFORE and one.category == OPTIMIZER]
        self._has_state = subject.state_bytes > 0
        buffers = [buffer.nbytes for buffer in subject.buffers]
        self._copied = buffers if subject.devices is None else 2 * buffers  # so that a step can be rolled back
        of_gradients = self._wide or [self._sizes[number] for number in sorted(self._are_gradients)]
        self._sent = [] if subject.devices is None else of_gradients
        self._unreached = constants.unreached

    def reserved(self, limit: int | None) -> int:
        """The bytes that the allocator reserves for the step at its peak; ``MemoryError`` if it refuses one."""
        held = self._held
        allocator = CachingAllocator(None if limit is None else limit + held.others, expandable=held.expandable)
        allocator.adopt(held.segments)
        self._run(allocator)
        return allocator.peak_reserved - held.others

    def needed(self, limit: int) -> int:
        """The bytes that the allocator has to be given.

        They are what it reserves at its peak, if it serves the step within the limit; else the fewest with which it
        does, in steps of a segment or of about a hundredth.
        """
        with contextlib.suppress(MemoryError):
            return self.reserved(limit)
        low, high = limit, self.reserved(None)
        while high - low > max(_SEGMENT, high // 100):
            middle = (low + high) // 2 // _SEGMENT * _SEGMENT
            if middle <= low:  # neither end need be a multiple of a segment
                break
            try:
                self.reserved(middle)
                high = middle
            except MemoryError:
                low = middle
        return high

    def _run(self, allocator: CachingAllocator) -> None:
        kept: list[Hashable] = []  # results of the step before, which a loop lets go of once it has the next ones
        for step in range(_STEPS):
            self._free_gradients(allocator)
            if step == _STEPS - 1:
                allocator.release()
            new = self._step(allocator, step, makes_state=step == 0 and not self._has_state)
            for name in kept:
                allocator.free(name)
            kept = new

    def _free_gradients(self, allocator: CachingAllocator) -> None:
        for name in ("unreached", *(("gradient", number) for number in self._are_gradients)):
            allocator.free(name)

    def _step(self, allocator: CachingAllocator, step: int, *, makes_state: bool) -> list[Hashable]:
        """Goes through a step, and gives what is left of its micro-batches: losses and metrics."""
        kept, left, index, end, before = list[Hashable](), set[int](), 0, self._count, list[tuple[int, int]]()
        for number, size in enumerate(self._copied):
            allocator.allocate(("buffer", number), size)
        self._take_inputs(allocator, 0, is_last=end == 1)
        while index < end:
            found = allocator.free_blocks
            is_settled = found == before and all(self._sizes[number] <= _TOGETHER for number in left)
            if index + 2 >= (_MICRO_BATCHES if is_settled else self._most):
                end = min(end, index + 2)
            if index + 1 < end:
                self._take_inputs(allocator, index + 1, is_last=index + 2 == end)
            else:
                kept += self._keep_skipped(allocator, step, left, self._count - end)
            left, before = self._micro_batch(allocator, step, index, is_last=index + 1 == end), found
            kept += [("own", step, index, number) for number in left]
            for number in range(len(self._inputs)):
                allocator.free(("input", index, number))
            index += 1
        for index, number in itertools.product((0, end - 1), self._weights):
            allocator.free(("weight", index, number))
        for size in self._sent:  # from the other devices, one after the other, and weighted there
            allocator.allocate("sent", size)
            allocator.allocate("weighted", size)
            allocator.free("sent")
            allocator.free("weighted")
        self._update(allocator, makes_state=makes_state)
        for number in range(len(self._copied)):
            allocator.free(("buffer", number))
        return kept

    def _update(self, allocator: CachingAllocator, *, makes_state: bool) -> None:
        for at, (is_birth, number) in enumerate(self._updates):
            if makes_state and at == self._before_steps:
                self._make_state(allocator)
            if is_birth:
                allocator.allocate(("update", number), self._update_sizes[number])
            else:
                allocator.free(("update", number))
        if makes_state and self._before_steps >= len(self._updates):
            self._make_state(allocator)

    def _make_state(self, allocator: CachingAllocator) -> None:
        for number, size in enumerate(self._state):
            allocator.allocate(("state", number), size)

    def _take_inputs(self, allocator: CachingAllocator, index: int, *, is_last: bool) -> None:
        for number, size in enumerate(self._last_inputs if is_last else self._inputs):
            allocator.allocate(("input", index, number), size, _COPIES)

    def _micro_batch(self, allocator: CachingAllocator, step: int, index: int, *, is_last: bool) -> set[int]:
        """Goes through one; the first leaves its gradients, and the numbers of what else is left are given."""
        left, is_first = set[int](), index == 0 or bool(self._wide)
        sizes = self._last_sizes if is_last else self._sizes
        is_new = index == 0 or sizes is not self._sizes
        for is_birth, number in self._moments_with_weights if is_new else self._moments:
            if is_birth and number in self._weights:
                allocator.allocate(("weight", index, number), sizes[number])
                if index:
                    allocator.free(("weight", 0, number))
            elif is_birth:
                is_gradient = is_first and number in self._are_gradients
                name = ("gradient", number) if is_gradient else ("own", step, index, number)
                allocator.allocate(name, sizes[number])
                left.add(number)
            elif not (is_first and number in self._added) and number not in self._losses:
                allocator.free(("own", step, index, number))
                left.discard(number)
        for number, size in enumerate(self._wide):
            if index == 0:
                allocator.allocate(("wide", number), size)
        if self._wide:
            self._free_gradients(allocator)
        elif index == 0:
            allocator.allocate("unreached", self._unreached)
        return left

    def _keep_skipped(
        self, allocator: CachingAllocator, step: int, left: Iterable[int], skipped: int
    ) -> list[Hashable]:
        """Allocates what is left of each micro-batch that is not replayed, small ones many at a time."""
        found = list[Hashable]()
        for number in left:
            size = -(-self._sizes[number] // ROUND) * ROUND
            many = max(1, _TOGETHER // size)
            for first in range(0, skipped, many):
                allocator.allocate(("skipped", step, first, number), min(many, skipped - first) * size)
                found.append(("skipped", step, first, number))
        return found


def _moments(allocations: Sequence[Allocation], more: Iterable[tuple[int, bool, int]] = ()) -> list[tuple[bool, int]]:
    """Births and deaths in their order: what goes while an operation begins makes room for what it gives."""
    return [(is_birth, number) for _, is_birth, number in sorted([*_changes(allocations), *more])]


def _changes(allocations: Sequence[Allocation]) -> list[tuple[int, bool, int]]:
    """Births and deaths, each with the operation."""
    found = [(one.born, True, number) for number, one in enumerate(allocations) if one.born != BEFORE and one.size]
    return found + [(one.died, False, number) for number, one in enumerate(allocations) if one.died is not None]
