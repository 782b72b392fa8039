"""What a caching allocator reserves for allocations that come and go, found without a device."""

from bisect import bisect_left, insort
from collections.abc import Hashable

ROUND = 512
SMALL = 2**20
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
_LARGE, _ROUND_LARGE = 10 * 2**20, 2 * 2**20


class _Block:
    """A part of a segment, between two neighbours."""

    __slots__ = ("after", "before", "is_small", "is_used", "size", "start")

    def __init__(self, start: int, size: int, *, is_small: bool) -> None:
        self.start, self.size, self.is_small, self.is_used = start, size, is_small, False
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.start


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
        # Keys of free blocks in order, and the blocks by their place: a small pool and a large one.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._at: dict[int, _Block] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def allocate(self, name: Hashable, size: int) -> None:
        """Takes a block.

        Args:
            name: by which it is freed.
            size: bytes; 0 takes nothing.

        Raises:
            MemoryError: the device has not as many.
        """
        if size <= 0:
            return
        size = -(-size // ROUND) * ROUND
        is_small = size <= SMALL
        block = self._found(size, is_small) or self._grown(size, is_small)
        self._split(block, size)
        block.is_used = True
        self._taken[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, name: Hashable) -> None:
        """Gives a block back; one that was never taken is none.

        Args:
            name: as for ``allocate``.
        """
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
            self._release()

    def _found(self, size: int, is_small: bool) -> _Block | None:
        free = self._free[is_small]
        number = bisect_left(free, (size, -1))
        if number == len(free):
            return None
        block = self._at[free[number][1]]
        self._remove(block)
        return block

    def _grown(self, size: int, is_small: bool) -> _Block:
        segment = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if size >= _LARGE:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        segment = size if self._expandable else segment
        if self._limit is not None and self.reserved + segment > self._limit:
            self._release()
            if self.reserved + segment > self._limit:
                raise MemoryError(
                    f"the allocator can't reserve {segment} bytes more for a block of {size}: {self.reserved} of "
                    f"{self._limit} are reserved, {self.allocated} of them allocated"
                )
        block = _Block(self._next, segment, is_small=is_small)
        self._next += segment + 1  # segments are no neighbours
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < ROUND if block.is_small else rest <= SMALL:
            return
        other = _Block(block.start + size, rest, is_small=block.is_small)
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
        insort(self._free[block.is_small], block.key)
        self._at[block.start] = block

    def _remove(self, block: _Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, block.key)]
        del self._at[block.start]

    def _release(self) -> None:
        """Gives segments that are all free back to the device."""
        for block in [one for one in self._at.values() if one.before is None and one.after is None]:
            self._remove(block)
            self.reserved -= block.size
