"""A model of torch's caching allocator: the bytes it would reserve, computed without a device."""

import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable

from anybatch.accelerators import TakenSegment

ROUND = 512
SMALL = 2**20
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
_LARGE, _ROUND_LARGE = 10 * 2**20, 2 * 2**20
_ADDRESSES = 2**20 * _LARGE_SEGMENT  # of an expandable segment: more than any device has bytes


class _Block:
    """A part of a segment, between two neighbours."""

    __slots__ = ("after", "before", "is_mapped", "is_small", "is_used", "size", "start", "stream")

    def __init__(self, start: int, size: int, is_small: bool, stream: int) -> None:
        self.start, self.size, self.is_small, self.stream, self.is_used = start, size, is_small, stream, False
        self.is_mapped = True  # whether there is memory behind its addresses
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.start

    @property
    def page(self) -> int:
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT

    @property
    def growable(self) -> int:
        """Its size, including the addresses after it that are not backed by memory."""
        return self.size + (self.after.size if self.after is not None and not self.after.is_mapped else 0)

    @property
    def pool(self) -> tuple[bool, int]:
        return self.is_small, self.stream


class CachingAllocator:
    """A model of torch's caching allocator for CUDA, which those of XPU and others follow.

    Sizes are rounded up to 512 bytes. Blocks of at most 1 MiB come out of segments of 2 MiB, blocks below 10 MiB out of
    segments of 20 MiB, and larger ones have segments of their own, rounded up to 2 MiB. The smallest free block that is
    large enough is used, and the rest is split off; a freed block is merged with its free neighbours.
    Segments that are completely free are returned only when the device has no more memory.

    With ``expandable_segments:True`` the blocks of a kind have one segment of very many addresses, whose pages get
    memory when it is needed: 2 MiB each for small blocks and 20 MiB for large ones. Then free pages go back.

    Args:
        limit: bytes that may be reserved, of the device or as a share of it that was set, whichever is stricter;
            ``None`` for as many as are asked for.
        expandable: whether segments are expandable.

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
        self._unmapped: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)  # places, in order
        self._at: dict[int, _Block] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def adopt(self, segments: Iterable[TakenSegment]) -> None:
        """Starts from the segments that an allocator holds, after it returned what is free."""
        last: _Block | None = None
        end, pool = 0, (False, -1)
        for segment in sorted(segments, key=lambda one: (one.is_small, one.stream, one.blocks[0].address)):
            own = segment.is_small, segment.stream
            if last is None or not self._expandable or own != pool:
                self._close(last)
                last = None
            elif segment.blocks[0].address > end:  # which pages of an expandable segment have memory
                last = self._append(last, segment.blocks[0].address - end, *own, is_mapped=False)
            for block in segment.blocks:
                last = self._append(last, block.size, *own, is_used=block.is_used)
            end, pool = segment.blocks[-1].address + segment.blocks[-1].size, own
        self._close(last)
        self.release()
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _close(self, last: _Block | None) -> None:
        """Ends a segment that was appended to, an expandable one with addresses that have no memory."""
        if last is not None and self._expandable:
            self._append(last, _ADDRESSES, *last.pool, is_mapped=False)
        self._next = -(-(self._next + 1) // _LARGE_SEGMENT) * _LARGE_SEGMENT  # segments are no neighbours

    def _append(
        self, last: _Block | None, size: int, is_small: bool, stream: int, *, is_used: bool = False,
        is_mapped: bool = True,
    ) -> _Block:  # fmt: skip
        """A block behind the last one of a segment, or the first one of another."""
        block = _Block(self._next, size, is_small, stream)
        self._next += size
        block.is_used, block.is_mapped, block.before = is_used, is_mapped, last
        if last is not None:
            last.after = block
        self._reserve(size if is_mapped else 0)
        self.allocated += size if is_used else 0
        if not is_used:
            self._add(block)
        return block

    @property
    def free_blocks(self) -> list[tuple[int, int]]:
        """Sizes and places of the free blocks of the first stream that are not for small ones, in order."""
        return [*self._free[False, 0]]

    def allocate(self, name: Hashable, size: int, stream: int = 0) -> None:
        """Takes a block."""
        if size <= 0:
            return
        size = -(-size // ROUND) * ROUND
        is_small = size <= SMALL
        block = self._found(size, (is_small, stream)) or self._grown(size, is_small, stream)
        self._remove(block)
        rest = block.size - size
        if rest >= ROUND if block.is_small or self._expandable else rest > SMALL:
            self._add(self._cut(block, size))
        block.is_used = True
        self._taken[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, name: Hashable) -> None:
        """Frees a block; ignores one that was never allocated."""
        block = self._taken.pop(name, None)
        if block is None:
            return
        block.is_used = False
        self.allocated -= block.size
        self._join(block)

    def release(self) -> None:
        """Returns free memory to the device: whole segments, or pages of expandable ones."""
        for block in [one for one in self._at.values() if one.is_mapped]:
            if self._expandable:
                self._unmap(block)
            elif block.before is None and block.after is None:
                self._remove(block)
                self.reserved -= block.size

    def _found(self, size: int, pool: tuple[bool, int]) -> _Block | None:
        free = self._free[pool]
        number = bisect_left(free, (size, -1))
        if number == len(free):
            return None
        block = self._at[free[number][1]]
        for _, start in itertools.islice(free, number + 1, None if self._expandable else number + 1):
            if self._at[start].growable >= block.growable:
                break
            block = self._at[start]
        return block

    def _grown(self, size: int, is_small: bool, stream: int) -> _Block:
        segment = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if size >= _LARGE:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        for is_again in (False, True):
            if is_again:
                self.release()
            if not self._has_room(segment):
                continue
            if not self._expandable:
                block = self._append(None, segment, is_small, stream)
                self._close(None)
                return block
            if (extended := self._extended(size, (is_small, stream))) is not None:
                return extended
        raise MemoryError(
            f"the allocator can't reserve {segment} bytes more for a block of {size}: {self.reserved} of "
            f"{self._limit} are reserved, {self.allocated} of them allocated"
        )

    def _has_room(self, size: int) -> bool:
        return self._limit is None or self.reserved + size <= self._limit

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _extended(self, size: int, pool: tuple[bool, int]) -> _Block | None:
        """A free block of an expandable segment, whose pages get the memory that they lack; ``None`` without room."""
        block: _Block | None = self._room(size, pool)
        if block is not None and not block.is_mapped:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            after = block.after
            block = None if after is None else self._map(after, min(after.size, size - block.size))
        return block

    def _room(self, size: int, pool: tuple[bool, int]) -> _Block:
        """The first of free blocks, one behind the other, that have addresses enough."""
        for start in self._unmapped[pool]:
            first = self._at[start]
            if first.before is not None and not first.before.is_used:
                first = first.before
            found, following = first.size, first.after
            while found < size and following is not None and not following.is_used:
                found, following = found + following.size, following.after
            if found >= size:
                return first
        block = self._append(None, _ADDRESSES, *pool, is_mapped=False)
        self._close(None)
        return block

    def _map(self, block: _Block, size: int) -> _Block | None:
        size = -(-size // block.page) * block.page
        if not self._has_room(size):
            return None
        self._remove(block)
        if size < block.size:
            self._add(self._cut(block, size))
        block.is_mapped = True
        self._reserve(size)
        return self._join(block)

    def _unmap(self, block: _Block) -> None:
        begin, end = -(-block.start // block.page) * block.page, (block.start + block.size) // block.page * block.page
        if begin >= end:
            return
        self._remove(block)
        if begin > block.start:
            whole = self._cut(block, begin - block.start)
            self._add(block)
            block = whole
        if end - begin < block.size:
            self._add(self._cut(block, end - begin))
        self.reserved -= block.size
        block.is_mapped = False
        self._join(block)

    @staticmethod
    def _cut(block: _Block, size: int) -> _Block:
        """The rest of a block beyond some bytes."""
        other = _Block(block.start + size, block.size - size, block.is_small, block.stream)
        other.is_mapped, other.before, other.after = block.is_mapped, block, block.after
        if other.after is not None:
            other.after.before = other
        block.after, block.size = other, size
        return other

    def _join(self, block: _Block) -> _Block:
        """Adds a free block, as one with its neighbours that are free, too."""
        for is_before in (False, True):
            other = block.before if is_before else block.after
            if other is None or other.is_used or other.is_mapped != block.is_mapped:
                continue
            self._remove(other)
            first, following = (other, block) if is_before else (block, other)
            first.size += following.size
            first.after = following.after
            if first.after is not None:
                first.after.before = first
            block = first
        self._add(block)
        return block

    def _add(self, block: _Block) -> None:
        if block.is_mapped:
            insort(self._free[block.pool], block.key)
        else:
            insort(self._unmapped[block.pool], block.start)
        self._at[block.start] = block

    def _remove(self, block: _Block) -> None:
        if block.is_mapped:
            free = self._free[block.pool]
            del free[bisect_left(free, block.key)]
        else:
            unmapped = self._unmapped[block.pool]
            del unmapped[bisect_left(unmapped, block.start)]
        del self._at[block.start]
