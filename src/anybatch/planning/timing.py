"""How long micro-batches take: measured where the device is at hand, else estimated; and which way is the fastest.

A device that is not at hand is estimated, which is good for comparing plans and not for the clock: each operation takes
the longest of its arithmetic, its memory traffic and its launch (the roofline model: Williams, Waterman and Patterson
2009).
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from anybatch.accelerators import is_accelerator, synchronize
from anybatch.batch.batches import Part
from anybatch.memory.meter import Recording, held_by
from anybatch.planning.blocks import forwards_seen
from anybatch.planning.curve import Fit, Peak, Size
from anybatch.planning.devices import Target
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import run_for_real
from anybatch.planning.subjects import Subject
from anybatch.records.plans import PlanRow
from anybatch.tensors.dispatch import unseen
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timed:
    """One micro-batch."""

    seconds: float  # its forward and backward
    forward: Mapping[str, float] = field(default_factory=dict)  # the forward of each block by name


_BEYOND = 0.98  # what was not measured is a little in favour of the larger: fewer launches for the same samples


class Times:
    """Times at several sizes, and what follows for those between and beyond.

    Between two sizes the time is taken as a straight line; beyond the largest, each sample takes nearly as long as
    there. A line through small sizes predicts large ones badly, since caches and kernels change.

    Example:
        >>> Times({2.0: Timed(1.0), 4.0: Timed(3.0)}).seconds(3.0)
        2.0
    """

    def __init__(self, known: Mapping[float, Timed]) -> None:
        self._known = dict(sorted(known.items()))

    def __bool__(self) -> bool:
        return bool(self._known)

    def seconds(self, size: float) -> float:
        """Of one micro-batch, forward and backward."""
        return self._between(size, lambda timed: timed.seconds)

    def forward(self, size: float, block: str) -> float:
        """Of one block's forward in one micro-batch; 0 if it is not known."""
        return self._between(size, lambda timed: timed.forward.get(block, 0.0))

    def _between(self, size: float, read: Callable[[Timed], float]) -> float:
        sizes = list(self._known)
        if size <= sizes[0]:
            return read(self._known[sizes[0]])
        if size >= sizes[-1]:
            return read(self._known[sizes[-1]]) * math.pow(size / sizes[-1], _BEYOND)
        upper = next(index for index, one in enumerate(sizes) if one >= size)
        low, high = sizes[upper - 1], sizes[upper]
        share = (size - low) / (high - low)
        return read(self._known[low]) * (1 - share) + read(self._known[high]) * share


def measured(subject: Subject, part: Part, recipe: Recipe, blocks: Sequence[str], *, repeats: int) -> Timed | None:
    """The shortest of several real runs of a micro-batch; gradients and buffers are put back.

    It is ``None`` if memory ran out.
    """
    found = list[Timed]()
    try:
        for _ in range(repeats):
            with _forwards_timed(subject, blocks) as forward:
                seconds = run_for_real(subject, part, recipe, clock=lambda: _clock(subject))
            found.append(Timed(seconds, dict(forward)))
        return min(found, key=lambda timed: timed.seconds)
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        failure = Failure(error)
    failure.release()  # outside of the except block, where no traceback holds tensors any more
    logger.info("ran out of memory while measuring a micro-batch of %d samples", len(part.samples))
    return None


def measured_grid(
    subject: Subject, grid: Sequence[Part], recipe: Recipe, blocks: Sequence[str], patience: float
) -> Times:
    """Measures micro-batches of several sizes, as often as there is time.

    On the CPU from small sizes to large ones and back. On an accelerator small ones take as long as their launches,
    from which nothing follows for large ones, and the first run of each shape loads kernels: there each is measured
    twice, the largest first.
    """
    known: dict[float, Timed] = {}
    if grid and measured(subject, grid[0], recipe, blocks, repeats=1) is None:  # the first run loads kernels
        return Times(known)
    began = time.perf_counter()
    down = [*reversed(grid)]
    is_queued = is_accelerator(subject.settings.device)
    order = [*(one for one in down for _ in range(2)), *grid] if is_queued else [*grid, *down, *grid]
    for number, part in enumerate(order):
        nearest = min(known, key=lambda cost: abs(cost - part.cost), default=part.cost)
        expected = known[nearest].seconds * max(1.0, part.cost / nearest) if known else 0.0
        if number > 1 and expected > patience - (time.perf_counter() - began):
            continue
        timed = measured(subject, part, recipe, blocks, repeats=1)
        if timed is None and is_queued:
            continue
        if timed is None:
            break
        if part.cost not in known or timed.seconds < known[part.cost].seconds:
            known[part.cost] = timed
    return Times(known)


def _clock(subject: Subject) -> float:
    synchronize(subject.settings.device)
    return time.perf_counter()


@contextmanager
def _forwards_timed(subject: Subject, blocks: Sequence[str]) -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    began: dict[str, float] = {}

    def before(name: str, _: Any) -> None:
        began[name] = _clock(subject)

    def after(name: str, _: Any) -> None:
        if name in began:
            found[name] = found.get(name, 0.0) + _clock(subject) - began.pop(name)

    with forwards_seen(subject.model, blocks, before, after):
        yield found


_LAUNCH_SECONDS = 4e-6
_EFFICIENCY = 0.6  # of the vendor's figures that operations reach
_HALF = (torch.bfloat16, torch.float16)
_FULL_PRECISION = 0.5  # of the half-precision rate: what matrix units give in TF32


class CostRecording(Recording):
    """A recording that also counts arithmetic and bytes moved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Of every operation its floating-point operations, at the rate of half precision, and its bytes.
        self.costs: list[tuple[float, float]] = []

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super()._run(func, args, kwargs)
        packet = func.overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        found = result if isinstance(result, (tuple, list)) else (result,)
        outputs, inputs = ([t for t in some if isinstance(t, torch.Tensor)] for some in (found, args))
        if flops and outputs and outputs[0].dtype not in _HALF:
            flops /= _FULL_PRECISION
        is_view = not func._schema.is_mutable and held_by(outputs).keys() <= held_by(inputs).keys()
        moved = 0 if is_view else sum(t.numel() * t.element_size() for t in [*inputs, *outputs])
        self.costs.append((float(flops), float(moved)))
        return result


def estimated_times(fits: Iterable[tuple[float, Fit, Size]], target: Target) -> Times:
    """Estimates micro-batches."""
    known: dict[float, Timed] = {}
    for cost, fit, size in fits:
        costs = fit.costs(size)
        if costs is None:
            return Times({})
        known[cost] = _timed(fit, costs, target)
    return Times(known)


@unseen
def _timed(fit: Fit, costs: torch.Tensor, target: Target) -> Timed:
    flops, moved = costs.unbind(-1)
    longest = torch.maximum(flops / (target.flops * _EFFICIENCY), moved / (target.bandwidth * _EFFICIENCY))
    runs = (flops != 0) | (moved != 0)
    seconds: list[float] = torch.where(runs, longest.clamp(min=_LAUNCH_SECONDS), 0.0).tolist()
    forward: dict[str, float] = {}
    for span in fit.trace.spans:
        forward[span.name] = forward.get(span.name, 0.0) + sum(seconds[span.enter : span.leave])
    return Timed(sum(seconds), forward)


_LAPS = 5  # of which the shortest time counts, but for the first
_WINDOW = 0.3  # seconds that are measured at a time, where single micro-batches do not take longer
_NEAR = 2.0
_FAR = 1.5

Finalist = tuple[PlanRow, Peak]
"""A way as it was traced."""


def is_near(one: PlanRow, other: PlanRow) -> bool:
    """Whether two ways have the same memory optimizations, in micro-batches of about the same size.

    Example:
        >>> is_near(PlanRow(8, 8), PlanRow(13, 5)), is_near(PlanRow(8, 8), PlanRow(16, 4))
        (True, False)
    """
    small, large = sorted((one.micro_batch_size, other.micro_batch_size))
    return _kind_of(one) == _kind_of(other) and large < _NEAR * small


def is_far(row: PlanRow, best: PlanRow) -> bool:
    """Whether a way is predicted to take so much longer than the best one that it is not looked at."""
    return bool(best.seconds and row.seconds and row.seconds > _FAR * best.seconds)


def neighbours(leader: PlanRow, rows: Sequence[PlanRow], tried: Sequence[PlanRow]) -> list[PlanRow]:
    """What may be faster than the way that is the fastest so far, since predictions are of one measurement each.

    It is micro-batches of twice and of half the size; and with other memory optimizations the largest.
    """
    size, found = leader.micro_batch_size, list[PlanRow]()
    possible = [row for row in rows if not is_far(row, leader)]
    for kind in {_kind_of(row): None for row in possible}:
        alike = sorted((row for row in possible if _kind_of(row) == kind), key=lambda row: row.micro_batch_size)
        if kind == _kind_of(leader):
            found += [row for row in alike if row.micro_batch_size >= _NEAR * size][:1]
            found += [row for row in alike if row.micro_batch_size <= size / _NEAR][-1:]
        else:
            found += alike[-1:]
    return [row for row in found if not any(is_near(row, other) for other in tried)]


@dataclass(eq=False)
class _Runner:
    """A way that is measured, as it was traced and as it was predicted."""

    way: Finalist
    predicted: PlanRow
    once: float = math.inf  # by one micro-batch, the first time
    best: float = math.inf  # by some that take as long together as those of the others, the shortest time

    @property
    def seconds(self) -> float:
        return self.best if self.best < math.inf else self.once

    @property
    def seconds_of_one(self) -> float:
        return self.once / self.predicted.micro_batches


def raced(
    finalists: Sequence[Finalist],
    rows: Sequence[PlanRow],
    trace: Callable[[PlanRow], list[Finalist]],
    timed: Callable[[PlanRow], float],
    patience: float,
) -> list[Finalist]:
    """Ways to run a step by their measured times, the fastest first."""
    ends = time.perf_counter() + patience
    tried = [row for row, _ in finalists]
    runners = fresh = [_Runner(one, one[0]) for one in finalists]
    while fresh:
        first = min(runners, key=lambda one: one.seconds)
        _run([first, *(one for one in fresh if one is not first)], timed, ends)
        leader, fresh = min(runners, key=lambda one: one.seconds).predicted, []
        for row in neighbours(leader, rows, tried):
            if time.perf_counter() > ends:
                break
            tried.append(row)
            fresh += [_Runner(one, row) for one in trace(row)]
        runners = [*runners, *fresh]
    return [(replace(one.way[0], seconds=one.seconds), one.way[1]) for one in sorted(runners, key=lambda o: o.seconds)]


def _run(runners: Sequence[_Runner], timed: Callable[[PlanRow], float], ends: float) -> None:
    """Measures each in turn, as long as the others at a time.

    On a machine whose speed changes from moment to moment the shortest of some times is the shorter the less time each
    covers: a small micro-batch falls into a fast moment as a whole, and would win by that.
    """
    for lap in range(_LAPS):
        window = max([one.seconds_of_one for one in runners if one.once < math.inf], default=0.0)
        for one in runners:
            if one.once == math.inf:
                one.once = timed(one.way[0])
            elif lap:
                times = round(min(window, _WINDOW) / max(one.seconds_of_one, 1e-9))
                times = max(1, min(times, one.predicted.micro_batches))
                one.best = min(one.best, statistics.mean(timed(one.way[0]) for _ in range(times)))
        if lap and time.perf_counter() > ends:
            return


def _kind_of(row: PlanRow) -> tuple[str, bool, bool]:
    return row.autocast, row.loss_chunks > 1, bool(row.recompute or row.offload)
