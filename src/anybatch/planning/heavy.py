"""Finds out by which numbers some samples take more than others, where a step runs for real to be planned."""

import logging
from collections.abc import Callable

from anybatch.planning.draws import attempted
from anybatch.planning.heaviest import Measured, is_gatherable, opposite
from anybatch.planning.subjects import Subject
from anybatch.planning.tracing import PassTrace
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
