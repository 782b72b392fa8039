"""Finds out by which numbers some samples take more than others, where a step runs for real to be planned."""

import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from anybatch.planning.draws import attempted
from anybatch.planning.fitting import Size
from anybatch.planning.heaviest import Measured, is_gatherable, opposite
from anybatch.planning.subjects import Subject
from anybatch.planning.tracing import PassTrace
from anybatch.records.memory import ACTIVATIONS
from anybatch.tensors.batches import Part

logger = logging.getLogger(__name__)
_MOST = 16  # runs of few samples
_KEPT = 3  # names, of which some only go together with what matters


def find_heavy(subject: Subject, part: Part, trace: Callable[[], PassTrace]) -> PassTrace:
    """Traces the first samples, and those with the most of each number that tells samples apart.

    Args:
        subject: whose habits are told by which numbers samples take more.
        part: as many samples as may run for sure.
        trace: traces so many samples: those with the largest numbers of the first name in ``heavy_by``.

    Returns:
        The trace of the samples that took the most.
    """
    subject.habits.heavy_by = ()
    first = trace()
    if not is_gatherable(subject.splittable):
        return first
    samples, measured = len(part.samples), Measured(subject.splittable)
    plain = first.bytes_made
    known: dict[tuple[int, ...], tuple[int, PassTrace] | None] = {tuple(range(samples)): (plain, first)}
    chosen = {name: tuple(measured.order(name)[:samples]) for name in measured.names()}
    for name, few in chosen.items():
        if few not in known and len(known) <= _MOST:
            subject.habits.heavy_by = (name,)
            found = attempted(trace)
            known[few] = None if found is None else (found.bytes_made, found)
    made = {name: known[few][0] for name, few in chosen.items() if known.get(few) is not None}  # type: ignore[index]
    heavy = [name for name, most in made.items() if most > made.get(opposite(name), plain)]
    heavy.sort(key=lambda name: -made[name])
    if not heavy or made[heavy[0]] < plain:
        subject.habits.heavy_by = ()
        return first
    subject.habits.heavy_by = tuple(heavy[:_KEPT])
    logger.info("samples of one shape take more or less memory; those are run that have the most by %s", heavy[0])
    return known[chosen[heavy[0]]][1]  # type: ignore[index]


def find_alike(
    subject: Subject,
    traces: Sequence[tuple[Size, PassTrace]],
    part_of: Callable[[Size], Part],
    may_run: Callable[[Size], bool],
    trace: Callable[[Part], PassTrace],
) -> tuple[Size, PassTrace] | None:
    """Finds out whether samples that are all alike take more than others, as where all tokens go to one expert.

    Which samples go together depends on the weights, so that a later step may come near to it whatever the first one
    is like. What all samples make together may be the same; what is there at once is more.

    Args:
        subject: whose habits are told; with them all further traces are of such samples if these take the most.
        traces: of some samples as they are, of which the largest is looked at that may run with twice as many.
        part_of: the samples that a trace is of, by its size.
        may_run: whether a micro-batch fits for sure.
        trace: traces some samples.

    Returns:
        The trace of such samples with its size; ``None`` if they do not take more.
    """
    habits = subject.habits
    habits.alike = False
    splittable = subject.splittable
    if not habits.looks_at_numbers or not (splittable.is_collated or is_gatherable(splittable)):
        return None
    may = [one for one in traces if may_run(replace(one[0], samples=2 * one[0].samples))]
    size, first = (may or traces)[-1 if may else 0]
    habits.alike = True
    found = attempted(lambda: trace(part_of(size)))
    habits.alike = found is not None and _activations(found) > _activations(first)
    if found is None or not habits.alike:
        return None
    logger.info("samples take the most memory where all are alike; it is planned for such samples")
    return size, found


def _activations(trace: PassTrace) -> int:
    """The most bytes at once without parameters and gradients, which few samples do not reach all of."""
    changes: list[tuple[int, int]] = []
    for one in trace.allocations:
        if one.category == ACTIVATIONS and one.born >= 0:
            changes += [(one.born, one.size), (one.died if one.died is not None else sys.maxsize, -one.size)]
    return max(itertools.accumulate(size for _, size in sorted(changes)), default=0)
