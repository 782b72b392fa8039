"""The planner's choices against all choices there are, counted out one by one, on problems small enough for that."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anybatch.planning import knapsack
from anybatch.planning.knapsack import Choice, Option, Timeline, choose, front, peak_of, smallest_peak

MANY = settings(max_examples=max(100, settings.default.max_examples if settings.default else 0))
HUGE = 2**45
SIZES = st.one_of(st.integers(-1, 9), st.sampled_from([0, 1, 5, HUGE, HUGE + 1]))
SECONDS = st.one_of(st.integers(0, 8).map(lambda n: n / 4), st.floats(0, 10, allow_subnormal=False))


@st.composite
def lists_of_options(draw: st.DrawFn, blocks: int, most: int = 9, lags: int = 1) -> list[Option]:
    options = []
    for _ in range(draw(st.integers(0, most))):
        first = draw(st.integers(0, blocks - 1))
        last = min(blocks - 1, first + draw(st.integers(0, 2)))
        peak = draw(st.one_of(st.just(0), st.integers(0, 25), st.just(HUGE)))
        options.append(Option(first, last, "recompute", draw(SIZES), draw(SECONDS), peak, draw(st.integers(0, lags))))
    return options


@st.composite
def problems(draw: st.DrawFn) -> tuple[Timeline, list[Option], int]:
    blocks = draw(st.integers(1, 6))
    heights = st.one_of(st.integers(0, 25), st.sampled_from([HUGE, HUGE + 7]))
    forward = draw(st.lists(heights, min_size=blocks + 1, max_size=blocks + 1))
    backward = draw(st.lists(heights, min_size=blocks, max_size=blocks))
    if draw(st.booleans()):  # more and more is alive, as it is while activations are kept
        forward, backward = sorted(forward), sorted(backward)
    timeline, options = Timeline(tuple(forward), tuple(backward)), draw(lists_of_options(blocks))
    reached = tuple(option for option in options if draw(st.booleans()))
    return timeline, options, peak(timeline, reached) + draw(st.integers(-1, 2))  # a budget at the edge of what fits


def disjoint(options: Sequence[Option]) -> bool:
    """Tells whether no block is in two options."""
    blocks = [block for option in options for block in range(option.first, option.last + 1)]
    return len(blocks) == len(set(blocks))


def peak(timeline: Timeline, options: Sequence[Option]) -> int:
    """Returns the most bytes alive, word for word as the constraints say it."""

    def freed_before(k: int) -> int:
        return sum(option.freed for option in options if option.last + option.lag < k)

    alive = [timeline.forward[k] - freed_before(k) for k in range(len(timeline.forward))]
    alive += [timeline.backward[k] - freed_before(k) for k in range(len(timeline.backward))]
    alive += [option.peak - freed_before(option.first) for option in options if option.peak]
    return max(alive)


def subsets(options: Sequence[Option]) -> list[tuple[Option, ...]]:
    """Returns all sets of disjoint options; those that free nothing are never taken."""
    useful = [option for option in options if option.freed > 0]
    sets = itertools.chain.from_iterable(itertools.combinations(useful, r) for r in range(len(useful) + 1))
    return [chosen for chosen in sets if disjoint(chosen)]


def seconds(options: Sequence[Option]) -> float:
    return math.fsum(option.seconds for option in options)


def same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-11)


def check(timeline: Timeline, options: Sequence[Option], choice: Choice) -> None:
    """Checks that a choice is what it says, whether it is the best or not."""
    assert disjoint(choice.options)
    assert all(choice.options.count(option) <= options.count(option) for option in choice.options)
    assert list(choice.options) == sorted(choice.options, key=lambda option: option.first)
    assert choice.peak == peak(timeline, choice.options) == peak_of(timeline, choice.options)
    assert choice.seconds == seconds(choice.options)


@given(problems())
@MANY
def test_the_cheapest_choice_is_the_cheapest_of_all(problem: tuple[Timeline, list[Option], int]) -> None:
    timeline, options, budget = problem
    fitting = [seconds(chosen) for chosen in subsets(options) if peak(timeline, chosen) <= budget]
    choice = choose(timeline, options, budget)
    if choice is None:
        assert not fitting
        return
    check(timeline, options, choice)
    assert choice.peak <= budget
    assert same(choice.seconds, min(fitting))


@given(problems())
@MANY
def test_the_smallest_peak_is_the_smallest_of_all_and_the_cheapest_of_those(
    problem: tuple[Timeline, list[Option], int],
) -> None:
    timeline, options, _ = problem
    least = min(peak(timeline, chosen) for chosen in subsets(options))
    choice = smallest_peak(timeline, options)
    check(timeline, options, choice)
    assert choice.peak == least
    assert same(choice.seconds, min(seconds(s) for s in subsets(options) if peak(timeline, s) == least))


@given(problems(), st.integers(2, 6))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_choice_is_faster_within_the_bytes_of_a_point_of_the_front(
    problem: tuple[Timeline, list[Option], int], points: int
) -> None:
    timeline, options, _ = problem
    reached = [(peak(timeline, chosen), seconds(chosen)) for chosen in subsets(options)]
    found = front(timeline, options, points)
    for choice in found:
        check(timeline, options, choice)
        assert same(choice.seconds, min(time for height, time in reached if height <= choice.peak))
    heights = [choice.peak for choice in found]
    assert heights == sorted(set(heights), reverse=True)
    assert len(found) <= points
    assert heights[-1] == min(height for height, _ in reached)


@given(problems(), st.integers(0, 12))
def test_a_larger_budget_never_costs_more(problem: tuple[Timeline, list[Option], int], more: int) -> None:
    timeline, options, budget = problem
    tight, loose = choose(timeline, options, budget), choose(timeline, options, budget + more)
    if tight is not None:
        assert loose is not None
        assert loose.seconds <= tight.seconds or same(loose.seconds, tight.seconds)


@given(problems(), st.integers(0, 3))
@MANY
def test_a_search_cut_short_keeps_the_budget_and_never_misses_what_fits(
    problem: tuple[Timeline, list[Option], int], width: int
) -> None:
    timeline, options, budget = problem
    fitting = [seconds(chosen) for chosen in subsets(options) if peak(timeline, chosen) <= budget]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "WIDTH", width)
        choice, smallest = choose(timeline, options, budget), smallest_peak(timeline, options)
    assert smallest.peak == min(peak(timeline, chosen) for chosen in subsets(options))
    assert (choice is None) == (not fitting)
    if choice is not None:
        check(timeline, options, choice)
        assert choice.peak <= budget


def cheapest_by_table(timeline: Timeline, options: Sequence[Option], budget: int) -> float:
    """Returns the least seconds from a table of every sum of bytes; infinite if nothing fits."""
    blocks = len(timeline.backward)
    tables: list[dict[tuple[int, int], float]] = [{} for _ in range(blocks + 1)]
    tables[0][0, 0] = 0.0
    for k, table in enumerate(tables):
        need = max(timeline.forward[k], timeline.backward[k] if k < blocks else timeline.forward[k]) - budget
        for (here, later), time in table.items():
            if here < need:
                continue
            if k == blocks:
                return min(time for (freed, _), time in table.items() if freed >= need)
            reached = [(k + 1, later, later, time)]
            for o in (o for o in options if o.first == k):
                inside = [max(timeline.forward[j], timeline.backward[j]) for j in range(k + 1, o.last + 1)]
                if o.peak - here <= budget and max(inside, default=0) - later <= budget:
                    at_once = 0 if o.lag else o.freed
                    reached.append((o.last + 1, later + at_once, later + o.freed, time + o.seconds))
            for position, *state, total in reached:
                known = tables[position]
                known[state[0], state[1]] = min(total, known.get((state[0], state[1]), math.inf))
    return math.inf


@pytest.mark.parametrize("seed", range(6))
def test_longer_chains_agree_with_a_table_of_every_sum(seed: int) -> None:
    draw = random.Random(seed)
    blocks, options = 24, []
    sizes = [draw.randint(1, 7) for _ in range(blocks)]
    for k, size in enumerate(sizes):
        options.append(Option(k, k, "recompute", size, draw.uniform(0.5, 1.5) * size))
        options.append(Option(k, k, "offload", size, draw.uniform(0.2, 2) * size, lag=1))
        if k % 3 == 0:
            freed = sum(sizes[k : k + 3]) + 1
            options.append(
                Option(k, k + 2, "recompute", freed, 0.7 * freed, peak=sum(sizes[: k + 3]) + draw.randint(0, 9))
            )
    alive = [sum(sizes[:k]) + draw.randint(0, 3) for k in range(blocks + 1)]
    timeline = Timeline(tuple(alive), tuple(bytes_ + draw.randint(0, 9) for bytes_ in alive[1:]))
    smallest = smallest_peak(timeline, options).peak
    assert math.isinf(cheapest_by_table(timeline, options, smallest - 1))
    for budget in (smallest, smallest + 2, (smallest + max(alive)) // 2, max(alive)):
        choice = choose(timeline, options, budget)
        assert choice is not None
        check(timeline, options, choice)
        assert choice.peak <= budget
        assert same(choice.seconds, cheapest_by_table(timeline, options, budget))


def test_a_long_chain_of_all_sizes_is_cut_short_at_little_cost() -> None:
    """Sizes repeat nowhere and seconds are in proportion: no option is a better bargain, so states are very many."""
    sizes = [pow(3, 7 + k * 5, 10007) for k in range(64)]
    options = [Option(k, k, "recompute", size, float(size)) for k, size in enumerate(sizes)]
    before = [sum(sizes[:k]) for k in range(65)]
    timeline = Timeline(tuple(before), tuple(before[1:]))
    for missing in (30_000, 90_000, 150_000):
        choice = choose(timeline, options, before[-1] - missing)
        assert choice is not None
        check(timeline, options, choice)
        assert choice.seconds < 1.03 * missing


@pytest.mark.parametrize("blocks", [12, 96])
@pytest.mark.parametrize("missing", [0, 1, 700, 701, 4900])
def test_equal_blocks_need_as_many_options_as_the_missing_bytes_fill(blocks: int, missing: int) -> None:
    forward = tuple(1000 * k for k in range(1, blocks + 2))
    options = [Option(k, k, "recompute", 700, 0.125) for k in range(blocks)]
    choice = choose(Timeline(forward, (0,) * blocks), options, forward[-1] - missing)
    assert choice is not None
    assert len(choice.options) == math.ceil(missing / 700)


def test_a_copy_that_ends_a_block_later_does_not_help_the_next_block() -> None:
    timeline = Timeline(forward=(4, 10, 8), backward=(4, 4))
    assert choose(timeline, [Option(0, 0, "offload", 3, 1.0, lag=1)], budget=8) is None
    assert choose(timeline, [Option(0, 0, "recompute", 3, 1.0)], budget=8) is not None
    assert choose(timeline, [Option(0, 0, "offload", 3, 1.0, lag=1)], budget=10) is not None


def test_a_run_is_back_in_memory_while_any_of_its_blocks_goes_backward() -> None:
    timeline = Timeline(forward=(4, 4, 4), backward=(4, 10))
    assert choose(timeline, [Option(0, 1, "recompute", 3, 1.0)], budget=9) is None
    assert choose(timeline, [Option(0, 0, "recompute", 3, 1.0)], budget=9) is not None


def test_the_peak_of_a_run_falls_by_what_was_freed_before_it_only() -> None:
    timeline = Timeline(forward=(4, 6, 12), backward=(4, 6))
    early, run = Option(0, 0, "recompute", 2, 1.0), Option(1, 1, "recompute", 3, 1.0, peak=11)
    assert choose(timeline, [run], budget=9) is None
    assert choose(timeline, [early, run], budget=9) == Choice((early, run), 2.0, 9)


def test_a_copy_that_ends_within_a_run_does_not_lower_the_peak_of_the_run() -> None:
    timeline = Timeline(forward=(4, 4, 4, 14), backward=(4, 4, 4))
    options = [Option(0, 0, "offload", 5, 1.0, lag=1), Option(1, 2, "recompute", 2, 1.0, peak=10)]
    assert choose(timeline, options, budget=9) == Choice((options[0],), 1.0, 9)
    assert choose(timeline, options, budget=8) is None
    assert peak_of(timeline, options) == smallest_peak(timeline, options[1:]).peak - 2 == 10
    assert choose(Timeline((4, 4, 4, 17), timeline.backward), options, budget=10) == Choice(tuple(options), 2.0, 10)


def test_a_copy_that_ends_within_a_run_counts_for_the_positions_after_it() -> None:
    timeline = Timeline(forward=(4, 4, 10, 14), backward=(4, 4, 4))
    options = (Option(0, 0, "offload", 5, 1.0, lag=1), Option(1, 2, "recompute", 2, 1.0))
    assert choose(timeline, options, budget=7) == Choice(options, 2.0, 7)


def test_options_that_free_nothing_are_never_taken() -> None:
    timeline = Timeline(forward=(4, 6), backward=(6,))
    options = [Option(0, 0, "recompute", 0, 0.0), Option(0, 0, "recompute", -5, 0.0)]
    assert choose(timeline, options, budget=6) == Choice((), 0.0, 6)
    assert smallest_peak(timeline, options) == Choice((), 0.0, 6)
