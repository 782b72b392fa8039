"""The fastest of some ways to run a step, by times that are measured in turn."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anybatch.planning.profiling import Profile
from anybatch.planning.tracks import Track
from anybatch.records.plans import PlanRow

_LAPS = 5  # of which the shortest time counts, but for the first
_WINDOW = 0.3  # seconds that are measured at a time, where single micro-batches do not take longer
_NEAR = 2.0
_FAR = 1.5

Row = tuple[Track, PlanRow]
Finalist = tuple[Track, PlanRow, Profile]


def is_near(one: PlanRow, other: PlanRow) -> bool:
    """Whether two ways trade the same for memory, in micro-batches of about the same size.

    Args:
        one: a way.
        other: another one.

    Example:
        >>> is_near(PlanRow(8, 8), PlanRow(13, 5)), is_near(PlanRow(8, 8), PlanRow(16, 4))
        (True, False)
    """
    small, large = sorted((one.micro_batch_size, other.micro_batch_size))
    return _kind_of(one) == _kind_of(other) and large < _NEAR * small


def is_far(row: PlanRow, best: PlanRow) -> bool:
    """Whether a way is predicted to take so much longer than the best one that it is not looked at.

    Args:
        row: a way.
        best: the best one that was found.
    """
    return bool(best.seconds and row.seconds and row.seconds > _FAR * best.seconds)


def neighbours(leader: PlanRow, rows: Sequence[Row], tried: Sequence[PlanRow]) -> list[Row]:
    """What may be faster than the way that is the fastest so far, since predictions are of one measurement each.

    Args:
        leader: that way, as it was predicted.
        rows: all ways.
        tried: those that were measured.

    Returns:
        Micro-batches of twice and of half the size; and with other things traded the largest, which trading is for.
    """
    size, found = leader.micro_batch_size, list[Row]()
    possible = [one for one in rows if not is_far(one[1], leader)]
    for kind in {_kind_of(row): None for _, row in possible}:
        alike = sorted((one for one in possible if _kind_of(one[1]) == kind), key=_size_of)
        if kind == _kind_of(leader):
            found += [one for one in alike if _size_of(one) >= _NEAR * size][:1]
            found += [one for one in alike if _size_of(one) <= size / _NEAR][-1:]
        else:
            found += alike[-1:]
    return [one for one in found if not any(is_near(one[1], other) for other in tried)]


def raced(
    finalists: Sequence[Finalist],
    rows: Sequence[Row],
    trace: Callable[[Track, PlanRow], list[Finalist]],
    timed: Callable[[Track, PlanRow], float],
    patience: float,
) -> list[Finalist]:
    """Ways to run a step by their measured times, the fastest first.

    Args:
        finalists: those that were predicted to be the fastest, traced.
        rows: all ways, as they were predicted.
        trace: traces a way as it would run; empty if it does not fit.
        timed: measures a way, in seconds.
        patience: seconds that this may take, or little more.
    """
    ends = time.perf_counter() + patience
    tried = [row for _, row, _ in finalists]
    runners = [_Runner(one, one[1]) for one in finalists]
    fresh = runners
    while fresh:
        _run(list({id(one): one for one in (*_first(runners), *fresh)}.values()), timed, ends)
        leader, fresh = _first(runners)[0], []
        for track, row in neighbours(leader.predicted, rows, tried):
            if time.perf_counter() > ends:
                break
            tried.append(row)
            fresh += [_Runner(one, row) for one in trace(track, row)]
        runners = [*runners, *fresh]
    ordered = sorted(runners, key=lambda one: one.seconds)
    return [(one.way[0], replace(one.way[1], seconds=one.seconds), one.way[2]) for one in ordered]


@dataclass(eq=False)
class _Runner:
    """A way that is measured, as it was traced and as it was predicted.

    Args:
        way: as it was traced.
        predicted: as it was predicted.
        once: by one micro-batch, the first time.
        best: by some that take as long together as those of the others, the shortest time.
    """

    way: Finalist
    predicted: PlanRow
    once: float = math.inf
    best: float = math.inf

    @property
    def seconds(self) -> float:
        return self.best if self.best < math.inf else self.once

    @property
    def seconds_of_one(self) -> float:
        return self.once / self.predicted.micro_batches


def _first(runners: Sequence[_Runner]) -> list[_Runner]:
    """The fastest so far."""
    return [min(runners, key=lambda one: one.seconds)]


def _run(runners: Sequence[_Runner], timed: Callable[[Track, PlanRow], float], ends: float) -> None:
    """Measures each in turn, as long as the others at a time.

    On a machine whose speed changes from moment to moment the shortest of some times is the shorter the less time each
    covers: a small micro-batch falls into a fast moment as a whole, and would win by that.
    """
    for lap in range(_LAPS):
        window = max([one.seconds_of_one for one in runners if one.once < math.inf], default=0.0)
        for one in runners:
            if one.once == math.inf:
                one.once = timed(*one.way[:2])
            elif lap:
                times = round(min(window, _WINDOW) / max(one.seconds_of_one, 1e-9))
                times = max(1, min(times, one.predicted.micro_batches))
                one.best = min(one.best, statistics.mean(timed(*one.way[:2]) for _ in range(times)))
        if lap and time.perf_counter() > ends:
            return


def _kind_of(row: PlanRow) -> tuple[str, bool, bool]:
    return row.autocast, row.loss_chunks > 1, bool(row.recompute or row.offload)


def _size_of(one: Row) -> float:
    return one[1].micro_batch_size
