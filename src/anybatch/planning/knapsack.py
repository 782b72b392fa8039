"""Which blocks to recompute or offload: the least seconds under a budget, for blocks that go forward and back in order.

Let ``freed_before(k)`` be the bytes that the chosen options with ``last + lag < k`` free. A set of options that share
no block stays within a budget when

- ``forward[k] - freed_before(k) <= budget`` for every block and for the loss, ``k = n``,
- ``backward[k] - freed_before(k) <= budget`` for every block,
- ``peak - freed_before(first) <= budget`` for every chosen option that has a peak.

An option counts only where ``last < k``, since all activations of a recomputed run are back while it goes backward.

This is a knapsack with a constraint at every position instead of one at the end. `chains.py` solves it. Blocks
that do not go backward in the reverse of their order forward have no options.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anybatch.planning.chains import Chain, Link


@dataclass(frozen=True)
class Option:
    """What may be done with one block, or with a run of blocks as one piece, to free memory for time.

    Args:
        first: the first block.
        last: the last block, often the same.
        kind: ``"recompute"``, ``"offload"`` or ``"both"``; it is carried along and decides nothing.
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

    Raises:
        ValueError: the lengths do not belong together.

    Example:
        >>> len(Timeline(forward=(4, 7, 10), backward=(7, 10)).backward)
        2
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.forward) != len(self.backward) + 1:
            raise ValueError(
                f"got {len(self.forward)} entries of forward and {len(self.backward)} of backward; expected one "
                "more of forward, for the loss: give forward[n] the most bytes alive in the loss"
            )


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

    Raises:
        ValueError: an option does not lie within the blocks, or has a negative time or another lag than 0 or 1.

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

    Raises:
        ValueError: as for `choose`.

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

    Raises:
        ValueError: as for `choose`, or fewer than 2 points.

    Example:
        >>> timeline = Timeline(forward=(4, 7, 10), backward=(7, 9))
        >>> options = [Option(0, 0, "recompute", 2, 1.0), Option(1, 1, "recompute", 2, 0.5)]
        >>> [(choice.peak, choice.seconds) for choice in front(timeline, options)]
        [(10, 0.0), (9, 0.5), (8, 1.0), (7, 1.5)]
    """
    if points < 2:
        raise ValueError(f"got points={points}; expected at least 2, the cheapest and the smallest choice")
    chain = _chain(timeline, options)
    smallest = _smallest(timeline, options, chain)
    found: list[Choice] = []
    budget = peak_of(timeline, ())
    while len(found) < points - 1 and budget > smallest.peak:
        choice = _cheapest(timeline, options, chain, budget)
        if choice is None:
            raise AssertionError(f"unreachable: {smallest.peak} bytes fit and {budget} do not")
        choice = _smallest_in_time(timeline, options, chain, choice, smallest.peak)
        found.append(choice)
        budget = choice.peak - max(1, (choice.peak - smallest.peak) // max(1, points - len(found)))
    return found if found and found[-1].peak == smallest.peak else [*found, smallest]


def _chain(timeline: Timeline, options: Sequence[Option]) -> Chain:
    """Returns the chain of blocks with the options that free anything; refuses what is out of place."""
    blocks = len(timeline.backward)
    links = []
    for number, option in enumerate(options):
        if not 0 <= option.first <= option.last < blocks:
            raise ValueError(
                f"got options[{number}] for blocks {option.first} to {option.last}; expected blocks within 0 to "
                f"{blocks - 1}, the first not after the last"
            )
        if not (0 <= option.seconds < math.inf and option.lag in (0, 1)):
            raise ValueError(
                f"got options[{number}] with seconds={option.seconds} and lag={option.lag}; expected finite "
                "seconds that are not negative, and a lag of 0 or 1"
            )
        if option.freed > 0 and option.last + option.lag < blocks:
            links.append(
                Link(number, option.first, option.last + 1, option.freed, option.seconds, option.peak, option.lag)
            )
    alive = tuple(map(max, zip(timeline.forward, (*timeline.backward, timeline.forward[-1]), strict=True)))
    return Chain(alive, links)


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
    budget = choice.peak - 1  # mostly nothing smaller is as fast, and one look settles it
    while too_small < budget < choice.peak:
        numbers, proven = chain.cheapest(budget, seconds=choice.seconds)
        if numbers is None:
            too_small, exact = budget, exact and proven
        else:
            choice = _choice(timeline, options, numbers, exact, budget)
        budget = (choice.peak + too_small) // 2
    return Choice(choice.options, choice.seconds, choice.peak, exact)
