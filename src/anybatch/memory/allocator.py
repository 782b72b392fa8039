"""What a caching allocator reserves for allocations that come and go, found without a device."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

ROUND = 512
SMALL = 2**20
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
_LARGE, _ROUND_LARGE = 10 * 2**20, 2 * 2**20


class Segment(NamedTuple):
    """Bytes that an allocator has from its device in one piece."""

    is_small: bool  # whether it is for blocks of at most 1 MiB
    stream: int  # whose blocks it holds
    blocks: tuple[tuple[int, bool], ...]  # sizes in order, and whether each is taken


class _Block:
    """A part of a segment, between two neighbours."""

    __slots__ = ("after", "before", "is_small", "is_used", "size", "start", "stream")

    def __init__(self, start: int, size: int, is_small: bool, stream: int) -> None:
        self.start, self.size, self.is_small, self.stream, self.is_used = start, size, is_small, stream, False
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.start

    @property
    def pool(self) -> tuple[bool, int]:
        return self.is_small, self.stream


class CachingAllocator:
    """A model of torch's caching allocator for CUDA, which those of XPU and others follow.

    Sizes are rounded up to 512 bytes. Blocks of at most 1 MiB come out of segments of 2 MiB, blocks below 10 MiB out of
    segments of 20 MiB, and larger ones have segments of their own, rounded up to 2 MiB. The smallest free block that is
    large enough is taken, and what it has too much is split off; what is freed is joined with its free neighbours.
    Segments that are all free go back to the device only when it has no more.

    Args:
        limit: bytes of the device; ``None`` for as many as are asked for.
        expandable: whether segments grow by what is needed (``expandable_segments:True``), so that little more is
            reserved than is allocated.

    Attributes:
        allocated: bytes in blocks that are taken.
        reserved: bytes in segments.
        peak_allocated: the most so far.
        peak_reserved: the same.
        flushes: how often segments went back to the device since it had no more, for which it has to be waited.

    Source:
        torch, ``c10/cuda/CUDACachingAllocator.cpp``.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate("weights", 700)
        >>> allocator.allocate("activations", 3 * 2**20)
        >>> allocator.allocated, allocator.reserved
        (3146752, 23068672)
    """

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        self._limit, self._expandable = limit, expandable
        self._next = 0
        self._taken: dict[Hashable, _Block] = {}
        # Keys of free blocks in order, and the blocks by their place: small ones and large ones of each stream.
        self._free: defaultdict[tuple[bool, int], list[tuple[int, int]]] = defaultdict(list)
        self._at: dict[int, _Block] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.flushes = 0

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Begins with what an allocator holds; segments that are all free went back to the device."""
        for segment in segments:
            last: _Block | None = None
            for size, is_used in segment.blocks if any(is_used for _, is_used in segment.blocks) else ():
                block = _Block(self._next, size, segment.is_small, segment.stream)
                self._next, block.is_used, block.before = self._next + size, is_used, last
                if last is not None:
                    last.after = block
                self.reserved += size
                self.allocated += size if is_used else 0
                if not is_used:
                    self._add(block)
                last = block
            self._next += 1
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def allocate(self, name: Hashable, size: int, stream: int = 0) -> None:
        """Takes a block."""
        if size <= 0:
            return
        size = -(-size // ROUND) * ROUND
        is_small = size <= SMALL
        block = self._found(size, (is_small, stream)) or self._grown(size, is_small, stream)
        self._split(block, size)
        block.is_used = True
        self._taken[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, name: Hashable) -> None:
        """Gives a block back; one that was never taken is none."""
        block = self._taken.pop(name, None)
        if block is None:
            return
        block.is_used = False
        self.allocated -= block.size
        if block.after is not None and not block.after.is_used:
            self._remove(block.after)
            self._join(block, block.after)
        if block.before is not None and not block.before.is_used:
            self._remove(block.before)
            before = block.before
            self._join(before, block)
            block = before
        self._add(block)
        if self._expandable:
            self.release()

    def release(self) -> None:
        """Gives segments that are all free back to the device."""
        for block in [one for one in self._at.values() if one.before is None and one.after is None]:
            self._remove(block)
            self.reserved -= block.size

    def _found(self, size: int, pool: tuple[bool, int]) -> _Block | None:
        free = self._free[pool]
        number = bisect_left(free, (size, -1))
        if number == len(free):
            return None
        block = self._at[free[number][1]]
        self._remove(block)
        return block

    def _grown(self, size: int, is_small: bool, stream: int) -> _Block:
        segment = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if size >= _LARGE:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        segment = size if self._expandable else segment
        if self._limit is not None and self.reserved + segment > self._limit:
            self.release()
            self.flushes += 1
            if self.reserved + segment > self._limit:
                raise MemoryError(
                    f"the allocator can't reserve {segment} bytes more for a block of {size}: {self.reserved} of "
                    f"{self._limit} are reserved, {self.allocated} of them allocated"
                )
        block = _Block(self._next, segment, is_small, stream)
        self._next += segment + 1  # segments are no neighbours
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < ROUND if block.is_small else rest <= SMALL:
            return
        other = _Block(block.start + size, rest, block.is_small, block.stream)
        other.before, other.after = block, block.after
        if other.after is not None:
            other.after.before = other
        block.after, block.size = other, size
        self._add(other)

    @staticmethod
    def _join(block: _Block, following: _Block) -> None:
        block.size += following.size
        block.after = following.after
        if block.after is not None:
            block.after.before = block

    def _add(self, block: _Block) -> None:
        insort(self._free[block.pool], block.key)
        self._at[block.start] = block

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, block.key)]
        del self._at[block.start]
