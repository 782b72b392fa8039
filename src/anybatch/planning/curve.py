"""What a step holds in memory at any size of its micro-batches, from two small traces or five.

The peaks themselves can't be fitted: the maximum of many straight lines is convex, so that a line through the peaks of
small micro-batches always predicts too little. Every storage by itself is a straight line, or with sequences a
polynomial of the size and the length.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.planning.blocks import Link, bounds_of, chain_of, freed_by
from anybatch.planning.knapsack import Option, Timeline
from anybatch.planning.memorytrace import PassTrace
from anybatch.planning.optimizer import UpdateTrace
from anybatch.records.memory import ACTIVATIONS, BUFFERS, GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from anybatch.records.plans import Confidence
from anybatch.tensors.dispatch import unseen


class NotAligned(Exception):  # not an error of the user's: the caller takes another way
    """Traces of different sizes do not have the same operations or the same storages; the text says which."""


@dataclass(frozen=True)
class Size:
    """The size of a micro-batch."""

    samples: int  # how many
    length: int = 0  # of the sequences, 0 if it does not matter
    # of samples that are not padded to one length, what each is large by, the largest first
    each: tuple[tuple[int, ...], ...] = ()
    # of samples that are not padded, the sum of their lengths and that of the squares; none if all are as long
    sums: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.samples} samples" + (f" of length {self.length}" if self.length else "")

    def is_within(self, other: "Size") -> bool:
        """Whether a micro-batch is nowhere larger than another one, sample by sample from the largest on.

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


def _features(sizes: Iterable[Size], count: int) -> torch.Tensor:
    """The numbers that bytes are linear in, a row for each size."""
    rows = []
    for size in sizes:
        m, t = float(size.samples), float(size.length)
        rows.append([1.0, m, t, *(size.sums or (m * t, m * t * t))][:count])
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


class Fit:
    """Traces of the same step at several sizes, which tell the live bytes at any other size, rounded up.

    There is one trace (known for that size only), two that differ in samples, or five that also differ in length.
    Traces of other operations are ``NotAligned``.
    """

    @unseen
    def __init__(self, traces: Sequence[tuple[Size, PassTrace]], *, granularity: int = 1) -> None:
        self.trace = traces[0][1]
        self._granularity = granularity
        _check_aligned(traces)
        self._count = count = len(traces)
        features = _features((size for size, _ in traces), count)

        def line_of(values: list[Any]) -> torch.Tensor:
            found: torch.Tensor = torch.linalg.solve(
                features, torch.tensor(values, dtype=torch.float64, device="cpu").flatten(1)
            )
            return found

        self._coefficients = line_of([[a.size for a in trace.allocations] for _, trace in traces])
        own = self.trace.allocations
        self._end = end = len(self.trace.operations)
        self._born = torch.tensor([max(a.born, 0) for a in own], dtype=torch.long, device="cpu")
        died = [end + 1 if a.died is None else min(a.died, end + 1) for a in own]
        self._died = torch.tensor(died, dtype=torch.long, device="cpu")
        inputs = [trace.input_sizes for _, trace in traces]
        if len({*map(len, inputs)}) > 1 or not inputs[0]:
            inputs = [[sum(one)] for one in inputs]
        self._inputs = line_of(inputs)
        self._live: dict[tuple[Size, bool], list[int]] = {}
        self._kept: dict[Size, int] = {}
        self._costs = line_of([trace.costs for _, trace in traces]) if self.trace.costs else None

    def _at(self, coefficients: torch.Tensor, size: Size) -> torch.Tensor:
        exact = (_features([size], self._count)[0] @ coefficients).round().clamp(min=0).long()
        return (exact + self._granularity - 1).div(self._granularity, rounding_mode="floor") * self._granularity

    @unseen
    def sizes(self, size: Size) -> list[int]:
        """The bytes of every storage of the trace."""
        found: list[int] = self._at(self._coefficients, size).tolist()
        return found

    @unseen
    def input_sizes(self, size: Size) -> list[int]:
        """The bytes of each tensor of one micro-batch."""
        found: list[int] = self._at(self._inputs, size).tolist()
        return found

    @unseen
    def costs(self, size: Size) -> torch.Tensor | None:
        """The arithmetic of every operation and the bytes that it moves; ``None`` if they were not noted."""
        if self._costs is None:
            return None
        return (_features([size], self._count)[0] @ self._costs).view(self._end, 2).clamp(min=0)

    @unseen
    def live(self, size: Size, *, first: bool = False) -> list[int]:
        """The live bytes after every operation, also of the first micro-batch, which finds no gradients."""
        known = self._live.get((size, first))
        if known is not None:
            return known
        born, died, sizes = self._lives(size, first)
        steps = torch.zeros(self._end + 2, dtype=torch.long, device="cpu")
        steps.index_add_(0, born, sizes)
        steps.index_add_(0, died, -sizes)
        found: list[int] = steps.cumsum(0)[: self._end].tolist()
        self._live[size, first] = found
        return found

    @unseen
    def kept_bytes(self, size: Size) -> int:
        """The bytes that a micro-batch leaves behind besides gradients: losses and metrics."""
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
        """The bytes that are alive after an operation, by what they are for."""
        born, died, sizes = self._lives(size, first)
        alive = ((born <= position) & (died > position)).tolist()
        new = {number for _, number in self.trace.accumulated} if first else set()
        found: dict[str, int] = {}
        for number, (is_alive, count) in enumerate(zip(alive, sizes.tolist(), strict=True)):
            if is_alive and count:
                category = GRADIENTS if number in new else self.trace.allocations[number].category
                found[category] = found.get(category, 0) + count
        return found

    @functools.cached_property
    def chain(self) -> list[Link]:
        """The blocks in the order in which they ran; the backward begins them in the reverse order."""
        return chain_of(self.trace.spans, self.trace.allocations, self._end)


def _check_aligned(traces: Sequence[tuple[Size, PassTrace]]) -> None:
    size, first = traces[0]
    shape = [(a.born, a.died, a.back) for a in first.allocations]
    for other_size, other in traces[1:]:
        if other.operations != first.operations:
            raise NotAligned(_difference(size, first.operations, other_size, other.operations))
        if [(a.born, a.died, a.back) for a in other.allocations] != shape or other.accumulated != first.accumulated:
            raise NotAligned(f"{size} and {other_size} keep different tensors")


def _difference(size: Size, own: Sequence[str], other_size: Size, others: Sequence[str]) -> str:
    """Names the first operation that differs."""
    pairs = itertools.zip_longest(own, others, fillvalue="no more")
    number, (here, there) = next((i, pair) for i, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    return f"operation {number} is {here} with {size}, and {there} with {other_size}"


ALL = 2**62
"""Micro-batches at once: as many as there are."""

_RUN_LENGTHS = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Constants:
    """Bytes that are alive throughout a step."""

    batch: int  # of the logical batch where it lies on the device
    buffers: int  # of the copies of buffers that a step keeps so that it can roll back
    # how many micro-batches are on the device at once where they are copied there: 0, 1 or 2, or very many where
    # all of them are made before the first one runs
    copies: int
    placements: int = 1  # how many devices share the micro-batches
    # parameters, gradients and what is sent while gradients are summed over the devices; 0 for one device
    summed: int = 0
    unreached: int = 0  # of the gradients of parameters that the traced samples did not reach and others may
    counted: int = 0  # parameters and what a count holds while it runs on the whole batch; 0 where no function counts


@dataclass(frozen=True)
class Peak:
    """The most bytes alive in a step."""

    total: int  # bytes
    by_category: dict[str, int]  # what they are for
    operation: str  # after which operation
    stage: str  # "forward", "backward", "loss", "update", "count", or a pass of an encoder in words
    module: str = ""  # the block in which it is, empty if it is in none
    floor: int = 0  # the most bytes alive apart from micro-batches, which no way to run them is below
    is_count: bool = False  # whether that is in the count of the whole batch, and not in the update
    has_state: bool = True  # whether the optimizer keeps anything


@dataclass(frozen=True, eq=False)
class Profile:
    """The memory of a step with a certain treatment of its loss, in micro-batches of a size."""

    fit: Fit  # the traces
    update: UpdateTrace  # what the optimizer's step holds
    constants: Constants  # what is alive throughout
    confidence: Confidence  # how the traces were made
    runs: dict[str, tuple[str, int]]  # for each block that is a child of a sequence its name, and the position there
    # gives the bytes of float32 buffers for gradients by the number of micro-batches
    accumulators: Callable[[int], int]
    size: Size  # of a micro-batch
    count: int = 1  # how many micro-batches run one after the other

    def at(self, size: Size, count: int) -> "Profile":
        """The same step in so many micro-batches of another size, for which the traces are good."""
        return replace(self, size=size, count=count)

    @property
    def _beside(self) -> dict[str, int]:
        """Bytes that are alive throughout the pass, on top of what a trace counts."""
        constants, accumulators = self.constants, self.accumulators(self.count)
        at_once = min(constants.copies, self.count * (constants.placements if constants.copies == ALL else 1))
        return {
            INPUTS: constants.batch + at_once * sum(self.fit.input_sizes(self.size)),
            OPTIMIZER: self.update.state,
            BUFFERS: constants.buffers * min(2, constants.placements),  # several devices run a pass again with one more
            GRADIENTS: accumulators or constants.unreached,
            ACTIVATIONS: (self.count - 1) * self.fit.kept_bytes(self.size),
        }

    @functools.cached_property
    def around(self) -> int:
        """The sum of these."""
        return sum(self._beside.values())

    @property
    def _finds_none(self) -> bool:
        """Whether a micro-batch finds no gradients: the only one, or each where float32 buffers take them over."""
        return self.count == 1 or self.accumulators(self.count) > 0

    @property
    def _apart(self) -> tuple[dict[str, int], str, str]:
        """The most bytes apart from micro-batches: in the update, in sums over devices, or in the count.

        It gives what they are for, after which operation they are alive, and the stage.
        """
        update, constants = self.update, self.constants
        fixed = {PARAMETERS: update.at_peak.get(PARAMETERS, 0), OPTIMIZER: update.state}
        kept = self.count * self.fit.kept_bytes(self.size)  # losses, which are not there yet while a batch is counted
        ways = [
            (dict(update.at_peak), kept, update.operation, "update"),
            ({**fixed, GRADIENTS: constants.summed - fixed[PARAMETERS]}, kept,
             "the sum of gradients over the devices", "update"),
            ({**fixed, ACTIVATIONS: constants.counted - fixed[PARAMETERS]}, 0, "the count of the whole batch", "count"),
        ]  # fmt: skip
        found, kept, operation, stage = max(ways, key=lambda way: sum(way[0].values()) + way[1])
        for name, more in ((BUFFERS, 2 * constants.buffers), (INPUTS, constants.batch), (ACTIVATIONS, kept)):
            found[name] = found.get(name, 0) + more
        return found, operation, stage

    @property
    def update_peak(self) -> int:
        """The most bytes alive apart from micro-batches."""
        return sum(self._apart[0].values())

    @property
    def peak(self) -> int:
        """The most bytes alive in a step without memory optimizations."""
        return max(max(self.live) + self.around, self.update_peak)

    @property
    def live(self) -> list[int]:
        """What a trace counts, after each operation."""
        return self.fit.live(self.size, first=self._finds_none)

    def peak_in_detail(self) -> Peak:
        """The peak, and what it is made by."""
        (apart, operation, stage), live = self._apart, self.live
        floor, position, module = sum(apart.values()), max(range(len(live)), key=live.__getitem__), ""
        is_count, has_state = stage == "count", self.update.state > 0
        if live[position] + self.around >= floor:
            found = self.fit.by_category(self.size, position, first=self._finds_none)
            apart = {name: found.get(name, 0) + self._beside.get(name, 0) for name in {**found, **self._beside}}
            operation, (stage, module) = self.fit.trace.operations[position], self._place(position)
        by_category = {name: count for name, count in apart.items() if count}
        total = sum(by_category.values())
        return Peak(total, by_category, operation, stage, module, floor, is_count, has_state)

    def _place(self, position: int) -> tuple[str, str]:
        if self.fit.trace.stages:
            return next(name for begins, name in reversed(self.fit.trace.stages) if begins <= position), ""
        chain = self.fit.chain
        for link in chain:
            if link.enter <= position < link.leave:
                return "forward", link.name
        for number, link in enumerate(chain):
            end = chain[number - 1].back if number else position + 1
            if link.back <= position < end:
                return "backward", link.name
        return "loss", ""

    def timeline(self, seconds: Callable[[str], float]) -> tuple[Timeline, list[Option]]:
        """The most bytes alive while each block goes forward and backward, and what may be recomputed.

        Recomputing a block takes so many seconds.
        """
        chain, live, sizes, around = self.fit.chain, self.live, self.fit.sizes(self.size), self.around
        forward, backward = bounds_of(chain, live, around)
        options = self._options(chain, live, sizes, around, seconds)
        return Timeline(tuple(forward), tuple(backward)), options

    def _options(
        self, chain: list[Link], live: Sequence[int], sizes: list[int], around: int, seconds: Callable[[str], float]
    ) -> list[Option]:
        options, allocations = [], self.fit.trace.allocations
        for first in range(len(chain)):
            for last in self._ends(chain, first):
                links = chain[first : last + 1]
                if not all(link.in_order for link in links):
                    continue
                freed, kept = freed_by(links, allocations, sizes)
                if freed - kept <= 0:
                    continue
                before = live[links[0].enter - 1] if links[0].enter else 0
                # A checkpoint stops as soon as what is needed is there, so the end of the run does not count.
                stop = max(allocations[i].born for link in links for i in link.saved) + 1
                inside = max(live[links[0].enter : stop]) - before
                at_back = live[links[-1].back - 1] - freed + kept + inside + around
                cost = sum(seconds(link.name) for link in links)
                name = self._run_name(links[0].name, links[-1].name)
                options.append(Option(first, last, "recompute", freed - kept, cost, peak=at_back, name=name))
        return options

    def _run_name(self, first: str, last: str) -> str:
        """The name of a run of blocks, as the memory optimizations take it."""
        if first == last:
            return first
        home, start = self.runs[first]
        run = f"{start}:{self.runs[last][1] + 1}"
        return f"{home}.{run}" if home else run

    def _ends(self, chain: list[Link], first: int) -> list[int]:
        """Where a run of blocks that begins with this one may end: children of one sequence, one after the other."""
        home = self.runs.get(chain[first].name)
        ends = [first]
        if home is None:
            return ends
        last = first
        while last + 1 < len(chain) and last - first < max(_RUN_LENGTHS):
            following = self.runs.get(chain[last + 1].name)
            if following is None or following[0] != home[0] or following[1] != home[1] + last + 1 - first:
                break
            last += 1
            if last - first + 1 in _RUN_LENGTHS:
                ends.append(last)
        return ends
