"""The search behind `knapsack.py`: dynamic programming over the positions of a chain of blocks.

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
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

WIDTHS = (32, 256, 1024)
# Sums of seconds that differ by less than this are equal: the order of additions alone makes such a difference.
RELATIVE = 1e-12


class Link(NamedTuple):
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
        links: the options that free something.
    """

    def __init__(self, alive: Sequence[int], links: Iterable[Link]) -> None:
        self.alive = alive
        self.end = len(alive) - 1
        self.starting: list[list[Link]] = [[] for _ in alive]
        for link in links:
            self.starting[link.first].append(link)

    def unreachable(self) -> int:
        """Returns a budget within which no choice fits: one below what would be if all options went together."""
        freed = [0] * (self.end + 2)
        for some in self.starting:
            for link in some:
                freed[link.after + link.lag] += link.freed
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
            for link in self.chain.starting[position]:
                floor = max(self.need[position : link.after])
                floor = max(floor, link.peak - self.budget) if link.peak > 0 else floor
                xs, ys = curves[link.after]
                shifted = [x - link.freed for x in xs], [y + link.seconds for y in ys]
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
            for link in self.chain.starting[position]:
                floor = link.peak - self.budget if link.peak > 0 else 0
                within = max(self.need[position + 1 : link.after], default=0)
                at_once = link.freed if link.lag == 0 else 0
                waiting[link.after] += [
                    (seconds + link.seconds, later + at_once, later + link.freed, Taken(link.number, taken), 0.0)
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
