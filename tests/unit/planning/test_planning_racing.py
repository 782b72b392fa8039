"""The race between ways to run a step: from a wrong prediction it finds its way to the fastest."""

import random
import time
from collections.abc import Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.planning.timing import Finalist, is_far, is_near, neighbours, raced
from anybatch.records.plans import PlanRow

SIZES = (1, 2, 4, 8, 16, 32, 64)
ANY: Any = object()


def row(size: float, chunks: int = 1, seconds: float | None = None, recompute: tuple[str, ...] = ()) -> PlanRow:
    return PlanRow(size, int(64 // size), recompute, (), "head" if chunks > 1 else "", chunks, seconds=seconds)


def key(one: PlanRow) -> tuple[float, int, bool]:
    return one.micro_batch_size, one.loss_chunks, bool(one.recompute)


def fastest(truth: Mapping[Any, float], rows: list[PlanRow], **options: Any) -> list[PlanRow]:
    measured: list[PlanRow] = []

    def timed(one: PlanRow) -> float:
        measured.append(one)
        return truth[key(one)]

    def trace(one: PlanRow) -> list[Finalist]:
        return [(one, ANY)] if key(one) in truth else []

    first = [(one, ANY) for one in rows[: options.pop("first", 1)]]
    found = raced(cast(Any, first), rows, trace, timed, options.pop("patience", 60.0))
    assert {key(one) for one in measured} == {key(one) for one, _ in found}
    assert [one.seconds for one, _ in found] == [truth[key(one)] for one, _ in found]
    assert [one.seconds for one, _ in found] == sorted(truth[key(one)] for one, _ in found)
    return [one for one, _ in found]


@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 2**20))
def test_sizes_are_climbed_to_the_fastest(begins: float, best: float, seed: int) -> None:
    """Where times fall towards one size, it is found from any other."""
    truth: Mapping[Any, float] = {(size, 1, False): 1.0 + abs(SIZES.index(size) - SIZES.index(best)) for size in SIZES}
    rows = sorted((row(size, seconds=1.0) for size in SIZES), key=lambda one: one.micro_batch_size != begins)
    assert fastest({key(one): truth[key(one)] for one in rows}, rows)[0].micro_batch_size == best


def test_other_optimizations_are_taken_where_that_makes_larger_micro_batches() -> None:
    rows = [row(8, seconds=1.0), row(16, seconds=1.2), *(row(size, 8, 1.2) for size in (8, 16, 32, 64))]
    truth = {(8, 1, False): 1.0, (16, 1, False): 1.1, (8, 8, False): 1.3, (16, 8, False): 0.95, (32, 8, False): 0.8,
             (64, 8, False): 0.9}  # fmt: skip
    found = fastest(truth, rows)
    assert key(found[0]) == (32, 8, False)
    assert (8, 8, False) not in map(key, found)


def test_what_does_not_fit_and_what_is_far_is_left_out() -> None:
    rows = [row(8, seconds=1.0), row(16, seconds=1.0), row(4, seconds=1.6), row(64, seconds=1.0, recompute=("b",))]
    found = fastest({(8, 1, False): 1.0, (4, 1, False): 0.1, (64, 1, True): 0.5}, rows)
    assert [key(one) for one in found] == [(64, 1, True), (8, 1, False)]


def test_it_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    rows = [row(size, seconds=1.0) for size in SIZES]
    truth = {(size, 1, False): 1.0 / size for size in SIZES}
    assert len(fastest(truth, rows, patience=1.5)) == 1
    assert len(fastest(truth, rows, patience=1000.0)) == len(SIZES)


def test_memory_that_runs_out_while_one_is_measured() -> None:
    truth = {(8, 1, False): 1.0, (16, 1, False): float("inf"), (4, 1, False): 2.0}
    rows = [row(8, seconds=1.0), row(16, seconds=1.0), row(4, seconds=1.0)]
    assert [one.micro_batch_size for one in fastest(truth, rows, first=3)] == [8, 4, 16]


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from([1, 8])), min_size=1, unique=True), st.data())
def test_neighbours_are_new(pairs: list[tuple[float, int]], data: st.DataObject) -> None:
    rows = [row(size, chunks, 1.0) for size, chunks in pairs]
    tried = [one for one in rows if data.draw(st.booleans())] or [rows[0]]
    for one in neighbours(tried[0], rows, tried):
        assert one not in tried
        assert not any(is_near(one, other) for other in tried)
    assert not neighbours(tried[0], rows, rows)


def test_unknown_times_are_not_far() -> None:
    assert not is_far(row(8), row(8, seconds=1.0))
    assert not is_far(row(8, seconds=9.0), row(8))
    assert is_far(row(8, seconds=9.0), row(8, seconds=1.0))


class Machine:
    """A machine that computes twice as fast in some moments than in others."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left, self._speed = 0.0, 1.0

    def takes(self, work: float) -> float:
        """Seconds for what takes so long at full speed."""
        seconds = 0.0
        while work > 0:
            if self._left <= 0:
                self._left, self._speed = self._random.expovariate(1 / 0.03), self._random.choice((0.5, 1.0))
            part = min(work / self._speed, self._left)
            seconds, work, self._left = seconds + part, work - part * self._speed, self._left - part
        return seconds


def test_small_micro_batches_do_not_win_by_fast_moments() -> None:
    """A small one fits into a fast moment as a whole, and seems the fastest by the shortest of some times."""
    rows = [row(64, seconds=1.0), row(4, seconds=1.0)]
    work = {64: 0.2, 4: 0.22}  # of the whole batch
    won = 0
    for seed in range(100):
        machine = Machine(seed)

        def timed(one: PlanRow, machine: Machine = machine) -> float:
            return machine.takes(work[int(one.micro_batch_size)] / one.micro_batches) * one.micro_batches

        finalists = cast(Any, [(one, ANY) for one in rows])
        found = raced(finalists, rows, lambda one: [], timed, 60.0)
        won += found[0][0].micro_batch_size == 64
    assert won >= 65
