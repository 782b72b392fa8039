"""All ways to run a logical batch that fit in a budget, the fastest first."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from anybatch.planning.curve import Profile, Size
from anybatch.planning.knapsack import Choice, Option, Timeline, choose, front, smallest_peak
from anybatch.planning.realruns import TooLarge
from anybatch.planning.recipe import Recipe
from anybatch.planning.timing import Times
from anybatch.planning.variants import Profiles
from anybatch.records.plans import PlanRow
from anybatch.tensors.batches import Part

_FINE = 16  # up to so many micro-batches every number of them is looked at, then every doubling
FRONT_POINTS = 6
_MOST_PIECES = 2**40


@dataclass(frozen=True)
class Splitting:
    """A logical batch cut into micro-batches.

    Args:
        limit: samples, or padded cost, of a micro-batch at most.
        parts: the micro-batches.
        on_one: how many of them one device runs at most; 0 for all.
    """

    limit: float
    parts: tuple[Part, ...]
    on_one: int = 0

    @property
    def count(self) -> int:
        """How many micro-batches run one after the other on a device."""
        return self.on_one or len(self.parts)

    @property
    def is_single(self) -> bool:
        """Whether the batch is not split at all."""
        return len(self.parts) == 1


def splittings(profiles: Profiles) -> list[Splitting]:
    """The ways to split the batch that are worth a look, the fewest micro-batches first.

    Args:
        profiles: of the subject, whose batch it is.
    """
    subject = profiles.subject
    splittable = subject.splittable
    largest = splittable.largest if splittable.has_costs else int(splittable.largest)
    parts = tuple(splittable.plan(None))
    if subject.devices is not None:  # each has its share
        largest = max(part.cost for part in parts)
    whole = Splitting(largest, parts, subject.most_on_one(parts))
    if not subject.splits:
        return [whole]
    found = [whole]
    for limit in _limits(splittable.largest, least=0.0 if splittable.has_costs else 1.0):
        parts = tuple(splittable.plan(limit, oversized="alone"))
        if len(parts) > len(found[-1].parts):
            found.append(Splitting(max(part.cost for part in parts), parts, subject.most_on_one(parts)))
        if len(parts) == splittable.rows:
            break
    return found


def _limits(largest: float, least: float) -> Iterator[float]:
    """Limits of a micro-batch, from a half of the largest one down to ``least``."""
    pieces = 2
    while pieces <= _MOST_PIECES:
        limit = max(largest / pieces if least == 0 else float(-(-largest // pieces)), least)
        yield limit
        if limit == least:
            return
        pieces = pieces + 1 if pieces < _FINE else pieces * 2


class Search:
    """Solves for the levers of every splitting.

    Args:
        profiles: of the subject.
        times: of micro-batches.
        recompute: whether blocks may be recomputed.
        host_bandwidth: bytes a second to host memory; 0 if activations may not be offloaded.
    """

    def __init__(self, profiles: Profiles, times: Times, *, recompute: bool, host_bandwidth: float) -> None:
        self._profiles = profiles
        self._times = times
        self._recompute = recompute
        self._host_bandwidth = host_bandwidth
        self._excluded: set[str] = set()
        self._solved: dict[tuple[Recipe, float], tuple[Timeline, list[Option], list[str]]] = {}

    def exclude(self, run: str) -> bool:
        """Takes a block, or a run of them, out of the search, since it can't be recomputed.

        Args:
            run: its name.

        Returns:
            Whether it was in it.
        """
        is_new = run not in self._excluded
        self._excluded.add(run)
        self._solved.clear()
        return is_new

    def worst(self, variant: Recipe, splitting: Splitting) -> Part:
        """The micro-batch that needs the most memory.

        Args:
            variant: how the loss is computed.
            splitting: how the batch is split.
        """
        profiles = self._profiles
        parts = profiles.heaviest(splitting.parts) if profiles.lengths.are_joined else splitting.parts
        by_size = {profiles.size_of(part): part for part in parts}
        if len(by_size) == 1:
            return parts[0]
        if profiles.lengths.are_apart:
            by_size = profiles.lengths.outstanding(by_size)
        elif not profiles.is_fake:  # each may take a run of its own
            by_size = {one: by_size[one] for one in by_size if not any(one.is_within(o) for o in by_size if o != one)}

        def peak(size: Size) -> tuple[int, int]:  # the longer of two that are taken to be as long
            profile = profiles.profile(variant, size, single=splitting.is_single)
            return profile.peak(size, splitting.count), size.length

        if not profiles.lengths.are_joined and len({size.length for size in by_size}) == 1:
            return by_size[max(by_size, key=lambda size: size.samples)]
        return by_size[max(by_size, key=peak)]

    def profile(self, variant: Recipe, splitting: Splitting) -> tuple[Profile, Size]:
        """The profile of the largest micro-batch of a splitting, and its size.

        Args:
            variant: how the loss is computed.
            splitting: how the batch is split.
        """
        size = self._profiles.size_of(self.worst(variant, splitting))
        return self._profiles.profile(variant, size, single=splitting.is_single), size

    def seconds(self, splitting: Splitting) -> float | None:
        """The time of a logical batch with nothing traded, ``None`` if nothing is known.

        Args:
            splitting: how the batch is split.
        """
        if not self._times:
            return None
        return self._profiles.subject.seconds(splitting.parts, self._times.seconds)

    def row(self, variant: Recipe, splitting: Splitting, budget: int) -> PlanRow | None:
        """The fastest levers within a budget; ``None`` if none are enough.

        Args:
            variant: how the loss is computed.
            splitting: how the batch is split.
            budget: bytes.
        """
        try:
            profile, size = self.profile(variant, splitting)
        except TooLarge:
            return None
        if profile.update_peak(size, splitting.count) > budget:
            return None
        plain = profile.peak(size, splitting.count)
        if plain <= budget:
            return self._row(variant, splitting, profile, Choice((), 0.0, plain), [])
        timeline, options, names = self._timeline(variant, splitting)
        choice = choose(timeline, options, budget)
        return None if choice is None else self._row(variant, splitting, profile, choice, names)

    def smallest(self, variant: Recipe, splitting: Splitting) -> PlanRow:
        """The levers with the least memory.

        Args:
            variant: how the loss is computed.
            splitting: how the batch is split.
        """
        profile, _ = self.profile(variant, splitting)
        timeline, options, names = self._timeline(variant, splitting)
        return self._row(variant, splitting, profile, smallest_peak(timeline, options), names)

    def everything(self, variant: Recipe, splitting: Splitting) -> PlanRow | None:
        """All blocks recomputed, where it is not known for sure that another choice holds less.

        That is where blocks run several times, and where what a kernel works in shows in real runs only.

        Args:
            variant: how the loss is computed.
            splitting: how the batch is split.
        """
        profile, size = self.profile(variant, splitting)
        if self._profiles.is_fake and not profile.repeats(splitting.count):
            return None
        _, options, names = self._timeline(variant, splitting)
        blocks = tuple(one for one in options if one.kind == "recompute" and one.first == one.last)
        choice = Choice(blocks, sum(one.seconds for one in blocks), profile.peak(size, splitting.count))
        return self._row(variant, splitting, profile, choice, names) if blocks else None

    def front(self, variant: Recipe, splitting: Splitting, points: int = FRONT_POINTS) -> list[PlanRow]:
        """The levers that are worth their time, from the fastest to the smallest.

        Args:
            variant: how the loss is computed.
            splitting: how the batch is split.
            points: how many budgets are looked at.
        """
        profile, _ = self.profile(variant, splitting)
        timeline, options, names = self._timeline(variant, splitting)
        choices = front(timeline, options, points=points)
        return [self._row(variant, splitting, profile, choice, names) for choice in choices]

    def _row(
        self, variant: Recipe, splitting: Splitting, profile: Profile, choice: Choice, names: Sequence[str]
    ) -> PlanRow:
        base, size = self.seconds(splitting), self._profiles.size_of(self.worst(variant, splitting))
        return PlanRow(
            micro_batch_size=splitting.limit,
            micro_batches=len(splitting.parts),
            recompute=self._profiles.always or self._names(choice, names, ("recompute", "both")),
            offload=self._names(choice, names, ("offload", "both")),
            head=variant.head,
            loss_chunks=variant.loss_chunks,
            peak_bytes=max(choice.peak, profile.update_peak(size, splitting.count)),
            seconds=None if base is None else base + choice.seconds,
            confidence=profile.confidence,
        )

    def _names(self, choice: Choice, names: Sequence[str], kinds: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            self._profiles.run_name(names[option.first], names[option.last])
            for option in choice.options
            if option.kind in kinds
        )

    def _timeline(self, variant: Recipe, splitting: Splitting) -> tuple[Timeline, list[Option], list[str]]:
        key = (variant, splitting.limit)
        if key not in self._solved:
            profile, size = self.profile(variant, splitting)

            @functools.cache
            def forward(name: str) -> float:
                if not self._times:
                    return 1.0
                return self._profiles.subject.seconds(splitting.parts, lambda cost: self._times.forward(cost, name))

            timeline, options, names = profile.timeline(size, splitting.count, forward)
            options = [
                option
                for option in options
                if self._recompute
                and not self._profiles.always
                and self._profiles.run_name(names[option.first], names[option.last]) not in self._excluded
            ]
            if self._host_bandwidth:
                options = [*options, *self._offloads(profile, size, splitting, forward)]
            self._solved[key] = (timeline, options, names)
        return self._solved[key]

    def _offloads(
        self, profile: Profile, size: Size, splitting: Splitting, forward: Callable[[str], float]
    ) -> list[Option]:
        """Copies to the host hide behind the block that computes meanwhile, and take time beyond that."""
        count = splitting.count
        options = []
        for index, (name, held) in enumerate(profile.offloadable(size, count)):
            hidden = forward(name) if self._times else 0.0
            seconds = 2 * max(0.0, held * count / self._host_bandwidth - hidden)
            options.append(Option(index, index, "offload", held, seconds, lag=1))
        return [option for option in options if option.freed > 0]


def sorted_rows(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """Rows from the fastest to the slowest; among equals those with fewer micro-batches, then the smaller ones.

    Args:
        rows: in any order.
    """
    unknown = float("inf")
    return sorted(
        rows,
        key=lambda row: (row.seconds if row.seconds is not None else unknown, row.micro_batches, row.peak_bytes),
    )


def pareto(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """The rows that no other one beats in both bytes and seconds, the fastest first.

    Args:
        rows: in any order.
    """
    kept: list[PlanRow] = []
    for row in sorted_rows(rows):
        if not kept or row.peak_bytes < kept[-1].peak_bytes:
            kept.append(row)
    return kept
