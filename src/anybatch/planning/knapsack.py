"""Which blocks to recompute or offload: the least seconds under a budget, for blocks that go forward and back in order.

Let ``freed_before(k)`` be the bytes that the chosen options with ``last + lag < k`` free. A set of options that share
no block stays within a budget when

- ``forward[k] - freed_before(k) <= budget`` for every block and for the loss, ``k = n``,
- ``backward[k] - freed_before(k) <= budget`` for every block,
- ``peak - freed_before(first) <= budget`` for every chosen option that has a peak.

An option counts only where ``last < k``, since all activations of a recomputed run are back while it goes backward.

This is a knapsack with a constraint at every position instead of one at the end. ``Chain`` solves it. Blocks
that do not go backward in the reverse of their order forward have no options.

The search is dynamic programming over the positions of a chain of blocks.

A state at position ``p`` is what was decided about the blocks before ``p``: its seconds, and the bytes freed at ``p``
and from the next position on, which differ after an option with a lag. A state goes when another is no slower and has
freed no less at both (dominance; Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004). Bytes beyond what any later
position needs count as just what is needed, so that states which differ only in surplus are one. The peaks of later
options need not be looked at for that: a state that has freed all that positions need takes no more options.

A state also goes when its seconds and a lower bound of the seconds still to come exceed the best choice known. The
bound is the value of the relaxed problem in which options are taken in fractions; as a function of the bytes freed it
is convex, and one pass from the end gives it for all positions (Sinha and Zoltners, The multiple-choice knapsack
problem, 1979).

Each position keeps a number of states at most, those with the lowest bounds, and always the states that have freed
most: whether anything fits is therefore never in doubt. If a state was left out that might have led to a better choice,
a sweep with more states follows; after the last sweep the choice is called not exact.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

WIDTHS = (32, 256, 1024)
# Sums of seconds that differ by less than this are equal: the order of additions alone makes such a difference.
RELATIVE = 1e-12


class Edge(NamedTuple):
    """An option that leads from position ``first`` to position ``after``."""

    number: int
    first: int
    after: int
    freed: int
    seconds: float
    peak: int
    lag: int


class Taken(NamedTuple):
    """The options of a state as a list that states share."""

    number: int
    before: "Taken | None"


# What was decided before a position: seconds, the bytes freed at it, those freed from the next position on, the options
# and a lower bound of the seconds at the end. Plain tuples, since a search makes 100 000 of them.
State = tuple[float, int, int, Taken | None, float]
# Bytes freed, and a lower bound of the seconds still to come for each; to the left of the first nothing fits.
Curve = tuple[list[int], list[float]]


class Chain:
    """Blocks in order and the options on them, without a budget yet.

    Args:
        alive: the most bytes alive at each position, with no option taken; the last position is the loss.
        edges: the options that free something.
    """

    def __init__(self, alive: Sequence[int], edges: Iterable[Edge]) -> None:
        self.alive = alive
        self.end = len(alive) - 1
        self.starting: list[list[Edge]] = [[] for _ in alive]
        for edge in edges:
            self.starting[edge.first].append(edge)

    def unreachable(self) -> int:
        """Returns a budget within which no choice fits: one below what would be if all options went together."""
        freed = [0] * (self.end + 2)
        for some in self.starting:
            for edge in some:
                freed[edge.after + edge.lag] += edge.freed
        for position in range(self.end):
            freed[position + 1] += freed[position]
        return max(alive - freed[position] for position, alive in enumerate(self.alive)) - 1

    def any_within(self, budget: int) -> list[int] | None:
        """Returns the numbers of options that fit a budget, whatever they cost, or None if nothing fits."""
        best, _ = Sweep(self, budget).go(0, math.inf)
        return None if best is None else _numbers(best)

    def cheapest(self, budget: int, seconds: float = math.inf) -> tuple[list[int] | None, bool]:
        """Returns the numbers of the fastest options that fit a budget and a time, and whether that is proven."""
        sweep = Sweep(self, budget)
        sweep.bounds = sweep.curves()
        limit = seconds if math.isinf(seconds) else seconds * (1 + RELATIVE)
        best: State | None = None
        for width in WIDTHS:
            found, left_out = sweep.go(width, limit)
            if found is not None:
                best, limit = found, found[0] * (1 - RELATIVE)
            elif math.isinf(limit):
                return None, True  # the states that have freed most are always kept, and none of them fits
            if left_out >= limit or _bound(sweep.bounds[0], 0) >= limit:
                return None if best is None else _numbers(best), True
        return None if best is None else _numbers(best), False


class Sweep:
    """One budget on a chain.

    Args:
        chain: the blocks and options.
        budget: bytes.
    """

    def __init__(self, chain: Chain, budget: int) -> None:
        self.chain = chain
        self.budget = budget
        self.need = [alive - budget for alive in chain.alive]
        self.most = list(accumulate(reversed([max(0, need) for need in self.need]), max))[::-1]
        self.bounds: list[Curve] = []

    def curves(self) -> list[Curve]:
        """Returns for every position a lower bound of the seconds still to come, by the bytes freed."""
        end = self.chain.end
        curves: list[Curve] = [([], [])] * (end + 1)
        curves[end] = ([max(0, self.need[end])], [0.0])
        for position in range(end - 1, -1, -1):
            points = list(zip(*curves[position + 1], strict=True))
            for edge in self.chain.starting[position]:
                floor = max(self.need[position : edge.after])
                floor = max(floor, edge.peak - self.budget) if edge.peak > 0 else floor
                xs, ys = curves[edge.after]
                shifted = [x - edge.freed for x in xs], [y + edge.seconds for y in ys]
                points += zip(*_from(shifted, max(0, floor)), strict=True)
            curves[position] = _from(_hull(points), max(0, self.need[position]))
        return curves

    def go(self, width: int, limit: float) -> tuple[State | None, float]:
        """Goes over the positions once.

        Args:
            width: states that a position keeps besides those that have freed most.
            limit: seconds; states that cannot end below it are dropped.

        Returns:
            The fastest state at the end, if any, and the least bound among the states that were left out for the width.
        """
        end, left_out = self.chain.end, math.inf
        waiting: list[list[State]] = [[] for _ in range(end + 1)]
        waiting[0] = [(0.0, 0, 0, None, 0.0)]
        for position in range(end):
            states, least = _keep(self._possible(waiting[position], position, limit), width)
            waiting[position], left_out = [], min(left_out, least)
            waiting[position + 1] += [(seconds, later, later, taken, 0.0) for seconds, _, later, taken, _ in states]
            for edge in self.chain.starting[position]:
                floor = edge.peak - self.budget if edge.peak > 0 else 0
                within = max(self.need[position + 1 : edge.after], default=0)
                at_once = edge.freed if edge.lag == 0 else 0
                waiting[edge.after] += [
                    (seconds + edge.seconds, later + at_once, later + edge.freed, Taken(edge.number, taken), 0.0)
                    for seconds, here, later, taken, _ in states
                    if here >= floor and later >= within
                ]
        return min(self._possible(waiting[end], end, limit), key=itemgetter(0), default=None), left_out

    def _possible(self, states: list[State], position: int, limit: float) -> list[State]:
        """Returns the states that fit at a position and may end within the limit, surplus bytes cut off."""
        need, most, kept = self.need[position], self.most[position], []
        most_later = self.most[min(position + 1, self.chain.end)]
        curve = self.bounds[position] if self.bounds else None
        for seconds, here, later, taken, _ in states:
            if here >= need:
                bound = seconds + _bound(curve, later) if curve else seconds
                if bound <= limit and bound < math.inf:
                    kept.append((seconds, min(here, most), min(later, most_later), taken, bound))
        return kept


def _keep(states: list[State], width: int) -> tuple[list[State], float]:
    """Returns the states that no other dominates, cut to a width, and the least bound of those left out."""
    states.sort(key=itemgetter(2), reverse=True)
    states.sort(key=itemgetter(0))
    kept: list[State] = []
    heres: list[int] = []  # of the states that have freed most: the bytes here grow while those later fall
    largest: list[State] = []
    for state in states:
        here, later = state[1], state[2]
        at = start = bisect_left(heres, here)
        if at < len(heres) and largest[at][2] >= later:
            continue
        while start > 0 and largest[start - 1][2] <= later:
            start -= 1
        end = at + 1 if at < len(heres) and heres[at] == here else at
        heres[start:end], largest[start:end] = [here], [state]
        kept.append(state)
    if len(kept) <= width:
        return kept, math.inf
    chosen = {id(state) for state in largest}
    kept = sorted((state for state in kept if id(state) not in chosen), key=itemgetter(4))
    return largest + kept[:width], min((state[4] for state in kept[width:]), default=math.inf)


def _numbers(state: State) -> list[int]:
    numbers, taken = [], state[3]
    while taken is not None:
        numbers.append(taken.number)
        taken = taken.before
    return numbers


def _bound(curve: Curve, freed: int) -> float:
    """Returns the value of a curve, infinite to the left of it and level to the right."""
    xs, ys = curve
    after = bisect_right(xs, freed)
    if after == 0:
        return math.inf
    if after == len(xs):
        return ys[-1]
    x, y = xs[after - 1], ys[after - 1]
    return y + (ys[after] - y) * ((freed - x) / (xs[after] - x))


def _from(curve: Curve, start: int) -> Curve:
    """Returns the part of a curve from a number of bytes on."""
    xs, ys = curve
    after = bisect_right(xs, start)
    return curve if after == 0 else ([start, *xs[after:]], [_bound(curve, start), *ys[after:]])


def _hull(points: list[tuple[int, float]]) -> Curve:
    """Returns the greatest convex falling curve below all points (the monotone chain of Andrew, 1979)."""
    xs: list[int] = []
    ys: list[float] = []
    for x, y in sorted(points):
        if ys and y >= ys[-1]:
            continue
        while len(xs) > 1 and (ys[-1] - ys[-2]) * (x - xs[-2]) >= (y - ys[-2]) * (xs[-1] - xs[-2]):
            xs.pop()
            ys.pop()
        xs.append(x)
        ys.append(y)
    return xs, ys


@dataclass(frozen=True)
class Option:
    """What may be done with one block, or with a run of blocks as one piece, to free memory for time.

    Args:
        first: the first block.
        last: the last block, often the same.
        kind: ``"recompute"`` or ``"offload"``; it is carried along and decides nothing.
        freed: bytes that are gone from the end of the forward of block ``last + lag`` until its backward begins.
        seconds: what it costs, at least 0.
        peak: the most bytes alive while the run's activations are made again, if nothing else is freed; 0 for none.
        lag: 1 where the copy to the host ends one block later and the copy back begins one block earlier.

    Example:
        >>> Option(first=3, last=3, kind="recompute", freed=700, seconds=0.25).freed
        700
    """

    first: int
    last: int
    kind: str
    freed: int
    seconds: float
    peak: int = 0
    lag: int = 0


@dataclass(frozen=True)
class Timeline:
    """The most bytes that are alive while each block goes forward and backward, with no option taken.

    Args:
        forward: for every block, and one more for the loss.
        backward: for every block.

    Example:
        >>> len(Timeline(forward=(4, 7, 10), backward=(7, 10)).backward)
        2
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """Options that are taken together.

    Args:
        options: in the order of their blocks.
        seconds: the sum of what they cost.
        peak: the most bytes alive anywhere with these options taken.
        exact: whether nothing better was proven to exist; if False the budget holds, but a better choice may exist.
            Seconds are compared to 12 digits.

    Example:
        >>> Choice(options=(), seconds=0.0, peak=1024).exact
        True
    """

    options: tuple[Option, ...]
    seconds: float
    peak: int
    exact: bool = True


def peak_of(timeline: Timeline, chosen: Iterable[Option]) -> int:
    """Returns the most bytes alive anywhere when options are taken.

    Args:
        timeline: the bytes with no option taken.
        chosen: options that share no block.

    Returns:
        Bytes.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 10))
        >>> peak_of(timeline, ()), peak_of(timeline, [Option(0, 0, "recompute", freed=2, seconds=1.0)])
        (10, 8)
    """
    blocks = len(timeline.backward)
    chosen = tuple(chosen)
    freed = [0] * (blocks + 1)
    for option in chosen:
        if option.last + option.lag < blocks:
            freed[option.last + option.lag + 1] += option.freed
    for position in range(blocks):
        freed[position + 1] += freed[position]
    alive = [bytes_ - freed[k] for k, bytes_ in enumerate(timeline.forward)]
    alive += [bytes_ - freed[k] for k, bytes_ in enumerate(timeline.backward)]
    return max(alive + [option.peak - freed[option.first] for option in chosen if option.peak > 0])


def choose(timeline: Timeline, options: Sequence[Option], budget: int) -> Choice | None:
    """Finds the options with the least total seconds that keep every position within a budget.

    Args:
        timeline: the bytes with no option taken.
        options: what may be taken; two that share a block are never taken together.
        budget: bytes.

    Returns:
        The choice, or None if no choice fits. None is always proven, also where a choice would not be exact.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 10))
        >>> options = [Option(0, 0, "recompute", 2, 1.0), Option(1, 1, "recompute", 2, 0.5)]
        >>> choose(timeline, options, budget=8)
        Choice(options=(Option(first=0, last=0, kind='recompute', freed=2, seconds=1.0, peak=0, lag=0),),
               seconds=1.0, peak=8, exact=True)
        >>> choose(timeline, options, budget=7) is None
        True
    """
    return _cheapest(timeline, options, _chain(timeline, options), budget)


def smallest_peak(timeline: Timeline, options: Sequence[Option]) -> Choice:
    """Finds the least peak that any choice reaches, and the least seconds that reach it.

    Args:
        timeline: the bytes with no option taken.
        options: what may be taken.

    Returns:
        The choice. Its peak is always the least; ``exact`` speaks of the seconds.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 10))
        >>> smallest_peak(timeline, [Option(0, 0, "recompute", 2, 1.0), Option(0, 0, "offload", 1, 0.1)]).peak
        8
    """
    return _smallest(timeline, options, _chain(timeline, options))


def front(timeline: Timeline, options: Sequence[Option], points: int = 16) -> list[Choice]:
    """Returns choices of which none is both as small and as fast as another, from the cheapest to the smallest.

    Args:
        timeline: the bytes with no option taken.
        options: what may be taken.
        points: at most this many, at least 2; their peaks are spread evenly where that many exist.

    Returns:
        Choices with falling peaks and growing seconds. For each no choice has a smaller peak in its seconds, nor fewer
        seconds at its peak; where ``exact`` is False that is not proven.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 9))
        >>> options = [Option(0, 0, "recompute", 2, 1.0), Option(1, 1, "recompute", 2, 0.5)]
        >>> [(choice.peak, choice.seconds) for choice in front(timeline, options)]
        [(10, 0.0), (9, 0.5), (8, 1.0), (7, 1.5)]
    """
    chain = _chain(timeline, options)
    smallest = _smallest(timeline, options, chain)
    found: list[Choice] = []
    budget = peak_of(timeline, ())
    while len(found) < points - 1 and budget > smallest.peak:
        choice = _cheapest(timeline, options, chain, budget)
        if choice is None:  # what fits into fewer bytes does
            break
        choice = _smallest_in_time(timeline, options, chain, choice, smallest.peak)
        found.append(choice)
        budget = choice.peak - max(1, (choice.peak - smallest.peak) // max(1, points - len(found)))
    return found if found and found[-1].peak == smallest.peak else [*found, smallest]


def _chain(timeline: Timeline, options: Sequence[Option]) -> Chain:
    """Returns the chain of blocks with the options that free anything."""
    blocks = len(timeline.backward)
    edges = (
        Edge(number, option.first, option.last + 1, option.freed, option.seconds, option.peak, option.lag)
        for number, option in enumerate(options)
        if option.freed > 0 and option.last + option.lag < blocks
    )
    alive = tuple(map(max, zip(timeline.forward, (*timeline.backward, timeline.forward[-1]), strict=True)))
    return Chain(alive, edges)


def _choice(timeline: Timeline, options: Sequence[Option], numbers: Iterable[int], exact: bool, budget: int) -> Choice:
    """Returns the choice of some options, its peak counted anew."""
    chosen = tuple(sorted((options[number] for number in numbers), key=lambda option: option.first))
    choice = Choice(chosen, math.fsum(option.seconds for option in chosen), peak_of(timeline, chosen), exact)
    if choice.peak > budget:
        raise AssertionError(f"unreachable: the search found {choice.peak} bytes within {budget}")
    return choice


def _cheapest(timeline: Timeline, options: Sequence[Option], chain: Chain, budget: int) -> Choice | None:
    numbers, exact = chain.cheapest(budget)
    return None if numbers is None else _choice(timeline, options, numbers, exact, budget)


def _smallest(timeline: Timeline, options: Sequence[Option], chain: Chain) -> Choice:
    """Bisects the budget; whether any choice fits is quick to tell, since then time does not matter."""
    best = Choice((), 0.0, peak_of(timeline, ()))
    too_small = chain.unreachable()
    while best.peak - too_small > 1:
        budget = (best.peak + too_small) // 2
        numbers = chain.any_within(budget)
        if numbers is None:
            too_small = budget
        else:
            best = _choice(timeline, options, numbers, True, budget)
    choice = _cheapest(timeline, options, chain, best.peak)
    return best if choice is None else choice


def _smallest_in_time(
    timeline: Timeline, options: Sequence[Option], chain: Chain, choice: Choice, smallest: int
) -> Choice:
    """Returns the choice with the least peak among those that take no longer than a choice."""
    too_small, exact = smallest - 1, choice.exact
    budget = choice.peak - 1  # mostly nothing smaller is as fast, and one look decides it
    while too_small < budget < choice.peak:
        numbers, proven = chain.cheapest(budget, seconds=choice.seconds)
        if numbers is None:
            too_small, exact = budget, exact and proven
        else:
            choice = _choice(timeline, options, numbers, exact, budget)
        budget = (choice.peak + too_small) // 2
    return Choice(choice.options, choice.seconds, choice.peak, exact)
