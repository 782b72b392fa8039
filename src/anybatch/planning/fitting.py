"""Bytes of every storage as a function of the size of a micro-batch, from two small traces or five.

The peaks themselves can't be fitted: the maximum of many straight lines is convex, so that a line through the peaks of
small micro-batches always predicts too little. Every storage by itself is a straight line, or with sequences a
polynomial of the size and the length.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anybatch.planning.tracing import PassTrace
from anybatch.records.memory import GRADIENTS
from anybatch.tensors.dispatch import unseen


class NotAligned(Exception):  # not an error of the user's: the caller takes another way
    """Traces of different sizes do not have the same operations or the same storages; the text says which."""


@dataclass(frozen=True)
class Size:
    """The size of a micro-batch.

    Args:
        samples: how many.
        length: of the sequences, 0 if it does not matter.
        each: of samples that are not padded to one length, what each is large by, the largest first.
        sums: of samples that are not padded, the sum of their lengths and that of the squares; none if all are as long.
    """

    samples: int
    length: int = 0
    each: tuple[tuple[int, ...], ...] = ()
    sums: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.samples} samples" + (f" of length {self.length}" if self.length else "")

    def is_within(self, other: "Size") -> bool:
        """Whether a micro-batch is nowhere larger than another one, sample by sample from the largest on.

        Args:
            other: size of a micro-batch.

        Example:
            >>> Size(2, 5).is_within(Size(3, 5)), Size(2, 5).is_within(Size(3, 4))
            (True, False)
        """
        if self.samples > other.samples or bool(self.each) != bool(other.each):
            return False
        if not self.each:
            return self.length <= other.length
        pairs = zip(self.each, other.each, strict=False)
        return all(len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True)) for a, b in pairs)


def _features(size: Size, count: int) -> list[float]:
    m, t = float(size.samples), float(size.length)
    total, squares = size.sums or (m * t, m * t * t)
    return [1.0, m] if count == 2 else [1.0, m, t, total, squares]


class Fit:
    """Traces of the same step at several sizes, which tell the live bytes at any other size.

    Args:
        traces: with their sizes; one (known for that size only), two that differ in samples, or five that also differ
            in length.
        granularity: what sizes are rounded up to.

    Raises:
        NotAligned: the traces are not of the same operations.
    """

    @unseen
    def __init__(self, traces: Sequence[tuple[Size, PassTrace]], *, granularity: int = 1) -> None:
        self.trace = traces[0][1]
        self._granularity = granularity
        _check_aligned(traces)
        self._count = count = len(traces)
        features = torch.tensor([_features(size, count)[:count] for size, _ in traces], dtype=torch.float64)
        sizes = torch.tensor([[a.size for a in trace.allocations] for _, trace in traces], dtype=torch.float64)
        self._coefficients = torch.linalg.solve(features, sizes)
        own = self.trace.allocations
        self._end = end = len(self.trace.operations)
        self._born = torch.tensor([max(a.born, 0) for a in own], dtype=torch.long)
        died = [end + 1 if a.died is None else min(a.died, end + 1) for a in own]
        self._died = torch.tensor(died, dtype=torch.long)
        inputs = torch.tensor([float(trace.input_bytes) for _, trace in traces], dtype=torch.float64)
        self._inputs = torch.linalg.solve(features, inputs)
        self._live: dict[tuple[Size, bool], list[int]] = {}
        self._kept: dict[Size, int] = {}
        self._costs: torch.Tensor | None = None
        if self.trace.costs:
            costs = torch.tensor([trace.costs for _, trace in traces], dtype=torch.float64)
            self._costs = torch.linalg.solve(features, costs.flatten(1)).view(count, end, 2)

    def _at(self, coefficients: torch.Tensor, size: Size) -> torch.Tensor:
        features = torch.tensor(_features(size, self._count)[: self._count], dtype=torch.float64)
        exact = (features @ coefficients).round().clamp(min=0).long()
        return (exact + self._granularity - 1).div(self._granularity, rounding_mode="floor") * self._granularity

    @unseen
    def sizes(self, size: Size) -> list[int]:
        """The bytes of every storage of the trace.

        Args:
            size: of a micro-batch.
        """
        found: list[int] = self._at(self._coefficients, size).tolist()
        return found

    @unseen
    def input_bytes(self, size: Size) -> int:
        """The bytes of the tensors of one micro-batch."""
        return int(self._at(self._inputs, size))

    @unseen
    def costs(self, size: Size) -> torch.Tensor | None:
        """The arithmetic and the bytes moved of every operation, if they were noted.

        Args:
            size: of a micro-batch.

        Returns:
            Two numbers for each operation; ``None`` if they were not noted.
        """
        if self._costs is None:
            return None
        features = torch.tensor(_features(size, self._count)[: self._count], dtype=torch.float64)
        return torch.einsum("f,foc->oc", features, self._costs).clamp(min=0)

    @unseen
    def live(self, size: Size, *, first: bool = False) -> list[int]:
        """The live bytes after every operation.

        Args:
            size: of a micro-batch.
            first: as for the first micro-batch, which finds no gradients and leaves its own.

        Returns:
            One number for each operation.
        """
        known = self._live.get((size, first))
        if known is not None:
            return known
        born, died, sizes = self._lives(size, first)
        steps = torch.zeros(self._end + 2, dtype=torch.long)
        steps.index_add_(0, born, sizes)
        steps.index_add_(0, died, -sizes)
        found: list[int] = steps.cumsum(0)[: self._end].tolist()
        self._live[size, first] = found
        return found

    @unseen
    def kept_bytes(self, size: Size) -> int:
        """The bytes that a micro-batch leaves behind besides gradients: losses and metrics.

        Args:
            size: of a micro-batch.
        """
        if size not in self._kept:
            kept = list(self.trace.kept)
            self._kept[size] = int(self._at(self._coefficients, size)[kept].sum()) if kept else 0
        return self._kept[size]

    def _lives(self, size: Size, first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """When every storage is made and gone, and its bytes."""
        sizes, died = self._at(self._coefficients, size), self._died
        if first and self.trace.accumulated:
            there, new = (list(numbers) for numbers in zip(*self.trace.accumulated, strict=True))
            sizes, died = sizes.clone(), died.clone()
            sizes[there] = 0
            died[new] = self._end + 1
        return self._born, died, sizes

    @unseen
    def by_category(self, size: Size, position: int, *, first: bool = False) -> dict[str, int]:
        """The bytes that are alive after an operation, by what they are for.

        Args:
            size: of a micro-batch.
            position: of the operation.
            first: as for the first micro-batch.
        """
        born, died, sizes = self._lives(size, first)
        alive = ((born <= position) & (died > position)).tolist()
        new = {number for _, number in self.trace.accumulated} if first else set()
        found: dict[str, int] = {}
        for number, (is_alive, count) in enumerate(zip(alive, sizes.tolist(), strict=True)):
            if is_alive and count:
                category = GRADIENTS if number in new else self.trace.allocations[number].category
                found[category] = found.get(category, 0) + count
        return found


def _check_aligned(traces: Sequence[tuple[Size, PassTrace]]) -> None:
    size, first = traces[0]
    shape = [(a.born, a.died, a.back) for a in first.allocations]
    for other_size, other in traces[1:]:
        if other.operations != first.operations:
            raise NotAligned(_difference(size, first.operations, other_size, other.operations))
        if [(a.born, a.died, a.back) for a in other.allocations] != shape or other.accumulated != first.accumulated:
            raise NotAligned(f"{size} and {other_size} keep other tensors")


def _difference(size: Size, own: Sequence[str], other_size: Size, others: Sequence[str]) -> str:
    """Names the first operation that differs."""
    pairs = itertools.zip_longest(own, others, fillvalue="no more")
    number, (here, there) = next((i, pair) for i, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    return f"operation {number} is {here} with {size}, and {there} with {other_size}"
