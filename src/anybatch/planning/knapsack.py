"""Which blocks to recompute or offload: the least seconds under a budget, for blocks that go forward and back in order.

Let ``freed_before(k)`` be the bytes that the chosen options with ``last + lag < k`` free. A set of options that share
no block stays within a budget when

- ``forward[k] - freed_before(k) <= budget`` for every block and for the loss, ``k = n``,
- ``backward[k] - freed_before(k) <= budget`` for every block,
- ``peak - freed_before(first) <= budget`` for every chosen option that has a peak.

An option counts only where ``last < k``, since all activations of a recomputed run are back while it goes backward.

This is a knapsack with a constraint at every position instead of one at the end, solved by dynamic programming over the
positions. A state at position ``p`` is what was decided about the blocks before ``p``: its seconds, and the bytes freed
at ``p`` and from the next position on, which differ after an option with a lag. A state goes when another is no slower
and has freed no less at both (dominance; Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004). Bytes beyond what
any later position needs count as just what is needed, so that states which differ only in surplus are one. A position
that has very many states keeps some of them, from the fastest to those that have freed most: whether anything fits is
therefore never in doubt, and only then the choice may not be the very fastest.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

WIDTH = 256
"""The states that a position keeps."""
_RELATIVE = 1e-12  # sums of seconds that differ by less are equal: the order of additions alone makes such a difference


@dataclass(frozen=True)
class Option:
    """What may be done with one block, or with a run of blocks as one piece, to free memory for time."""

    first: int  # the first block
    last: int  # the last block, often the same
    kind: str  # "recompute" or "offload"; it is carried along and decides nothing
    freed: int  # bytes that are gone from the end of the forward of block last + lag until its backward begins
    seconds: float  # what it costs, at least 0
    # the most bytes alive while the run's activations are made again, if nothing else is freed; 0 for none
    peak: int = 0
    lag: int = 0  # 1 where the copy to the host ends one block later and the copy back begins one block earlier
    name: str = ""  # of the block or the run, which is carried along, too


@dataclass(frozen=True)
class Timeline:
    """The most bytes that are alive while each block goes forward and backward, with no option taken."""

    forward: tuple[int, ...]  # for every block, and one more for the loss
    backward: tuple[int, ...]  # for every block

    @property
    def alive(self) -> list[int]:
        """The most bytes at each position; the last one is the loss."""
        return [*map(max, zip(self.forward, (*self.backward, self.forward[-1]), strict=True))]


@dataclass(frozen=True)
class Choice:
    """Options that are taken together, in the order of their blocks, with the sum of their seconds and the peak."""

    options: tuple[Option, ...]
    seconds: float
    peak: int


def peak_of(timeline: Timeline, chosen: Iterable[Option]) -> int:
    """The most bytes alive anywhere when options are taken, of which no two share a block.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 10))
        >>> peak_of(timeline, ()), peak_of(timeline, [Option(0, 0, "recompute", freed=2, seconds=1.0)])
        (10, 8)
    """
    chosen = tuple(chosen)
    steps = [0] * (len(timeline.backward) + 3)
    for option in chosen:
        steps[option.last + option.lag + 1] += option.freed
    freed = list(accumulate(steps))
    alive = [bytes_ - freed[k] for k, bytes_ in enumerate(timeline.alive)]
    return max(alive + [option.peak - freed[option.first] for option in chosen if option.peak > 0])


def choose(timeline: Timeline, options: Sequence[Option], budget: int) -> Choice | None:
    """Finds the options with the least total seconds that keep every position within a budget.

    Returns:
        The choice, or ``None`` if nothing fits, which is certain.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 10))
        >>> options = [Option(0, 0, "recompute", 2, 1.0), Option(1, 1, "recompute", 2, 0.5)]
        >>> choose(timeline, options, budget=8)
        Choice(options=(Option(first=0, last=0, kind='recompute', freed=2, seconds=1.0, peak=0, lag=0, name=''),),
               seconds=1.0, peak=8)
        >>> choose(timeline, options, budget=7) is None
        True
    """
    return _sweep(timeline, options, budget, WIDTH)


def smallest_peak(timeline: Timeline, options: Sequence[Option]) -> Choice:
    """Finds the least peak that any choice reaches, and options that reach it in few seconds.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 10))
        >>> smallest_peak(timeline, [Option(0, 0, "recompute", 2, 1.0), Option(0, 0, "offload", 1, 0.1)]).peak
        8
    """
    best = Choice((), 0.0, peak_of(timeline, ()))
    too_small = best.peak - sum(max(0, option.freed) for option in options) - 1
    while best.peak - too_small > 1:  # whether anything fits is quick to tell, since then time does not matter
        budget = (best.peak + too_small) // 2
        found = _sweep(timeline, options, budget, 0)
        if found is None:
            too_small = budget
        else:
            best = found
    return choose(timeline, options, best.peak) or best


def front(timeline: Timeline, options: Sequence[Option], points: int = 16) -> list[Choice]:
    """Choices with falling peaks, from no option to the smallest peak: at most so many, of which each is the fastest.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 9))
        >>> options = [Option(0, 0, "recompute", 2, 1.0), Option(1, 1, "recompute", 2, 0.5)]
        >>> [(choice.peak, choice.seconds) for choice in front(timeline, options)]
        [(10, 0.0), (9, 0.5), (8, 1.0), (7, 1.5)]
    """
    smallest, found = smallest_peak(timeline, options), list[Choice]()
    budget = peak_of(timeline, ())
    while len(found) < points - 1 and budget > smallest.peak:
        choice = choose(timeline, options, budget)
        if choice is None:
            break
        choice = _smallest_in_time(timeline, options, choice, smallest.peak)
        found.append(choice)
        budget = choice.peak - max(1, (choice.peak - smallest.peak) // max(1, points - len(found)))
    return found if found and found[-1].peak == smallest.peak else [*found, smallest]


def _smallest_in_time(timeline: Timeline, options: Sequence[Option], choice: Choice, smallest: int) -> Choice:
    """The choice with the least peak among those that take no longer than a choice."""
    too_small, budget = smallest - 1, choice.peak - 1  # mostly nothing smaller is as fast, and one look decides it
    while too_small < budget < choice.peak:
        found = choose(timeline, options, budget)
        if found is None or found.seconds > choice.seconds * (1 + _RELATIVE):
            too_small = budget
        else:
            choice = found
        budget = (choice.peak + too_small) // 2
    return choice


class _Taken(NamedTuple):
    """The options of a state as a list that states share."""

    option: Option
    before: "_Taken | None"


# What was decided before a position: seconds, the bytes freed at it, those freed from the next position on, and the
# options. Plain tuples, since a search makes 100 000 of them.
_State = tuple[float, int, int, _Taken | None]


def _sweep(timeline: Timeline, options: Sequence[Option], budget: int, width: int) -> Choice | None:
    """Goes over the positions once, and keeps so many states at each besides those that have freed most."""
    end = len(timeline.backward)
    need = [alive - budget for alive in timeline.alive]
    most = [*accumulate(reversed([max(0, one) for one in need]), max)][::-1]  # that any later position needs
    starting: list[list[Option]] = [[] for _ in need]
    for option in options:
        if option.freed > 0 and option.last + option.lag < end:
            starting[option.first].append(option)
    waiting: list[list[_State]] = [[] for _ in need]
    waiting[0] = [(0.0, 0, 0, None)]
    for position in range(end + 1):
        later_most = most[min(position + 1, end)]
        fitting = [
            (seconds, min(here, most[position]), min(later, later_most), taken)
            for seconds, here, later, taken in waiting[position]
            if here >= need[position]
        ]
        states, waiting[position] = _best(fitting, width), []
        if position == end:
            return _choice(timeline, states[0]) if states else None
        waiting[position + 1] += [(seconds, later, later, taken) for seconds, _, later, taken in states]
        for option in starting[position]:
            after = option.last + 1
            floor, within = option.peak - budget if option.peak > 0 else 0, max(need[position + 1 : after], default=0)
            at_once = 0 if option.lag else option.freed
            waiting[after] += [
                (seconds + option.seconds, later + at_once, later + option.freed, _Taken(option, taken))
                for seconds, here, later, taken in states
                if here >= floor and later >= within
            ]
    return None


def _best(states: list[_State], width: int) -> list[_State]:
    """The states that no other dominates, the fastest first; of very many only some, and those that freed most."""
    kept: list[_State] = []
    largest: list[_State] = []  # of which no other kept one has freed more at both
    for state in sorted(states, key=lambda one: (one[0], -one[2], -one[1])):
        here, later = state[1], state[2]
        if any(one[1] >= here and one[2] >= later for one in largest):
            continue
        largest = [one for one in largest if one[1] > here or one[2] > later] + [state]
        kept.append(state)
    if len(kept) <= max(width, len(largest)):
        return kept
    some = kept[:: -(-len(kept) // width)] if width else []
    return [*some, *(one for one in largest if not any(one is other for other in some))]


def _choice(timeline: Timeline, state: _State) -> Choice:
    chosen, taken = list[Option](), state[3]
    while taken is not None:
        chosen.append(taken.option)
        taken = taken.before
    chosen.reverse()
    return Choice(tuple(chosen), math.fsum(option.seconds for option in chosen), peak_of(timeline, chosen))
