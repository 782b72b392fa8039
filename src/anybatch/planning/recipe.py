"""A way to run a step, as data: the memory optimizations, and how far a batch is cut."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from anybatch.batch.batches import Part
from anybatch.planning.subjects import Subject
from anybatch.records.plans import PlanRow

FEW = 3
"""Chunks that are looked at: the last one, which may be shorter, the one before it, and one that runs after these."""
_FINE = 16  # up to so many micro-batches every number of them is looked at, then every doubling
_MOST_PIECES = 2**40


@dataclass(frozen=True)
class Chunks:
    """How a loss over time is cut into chunks of time where it is planned."""

    length: int  # steps in a chunk
    state_bytes: int = 0  # that a chunk which is not run would hold for each sample
    # bytes that micro-batches leave behind for each chunk that is not run: the values of their losses; 0 where
    # all samples run at once
    values: int = 0
    most: int = FEW  # chunks that run


@dataclass(frozen=True)
class Recipe:
    """A way to run the micro-batches of a step.

    Example:
        >>> Recipe(recompute=("layers.0",), loss_chunks=8, head="head").plain
        Recipe(recompute=(), offload=(), head='head', loss_chunks=8, keep=None, chunks=None, autocast='')
    """

    recompute: tuple[str, ...] = ()  # names of blocks, or of runs of them
    offload: tuple[str, ...] = ()  # names of blocks
    head: str = ""  # the output layer whose loss is taken in chunks; empty if it is not
    loss_chunks: int = 1  # into how many
    # how many micro-batches of a coupled loss keep their graph; None where the loss is not coupled
    keep: int | None = None
    chunks: Chunks | None = None  # of a loss over time; None for any other
    autocast: str = ""  # the lower precision that is tried, as a plan names it; empty for the user's own

    @property
    def plain(self) -> "Recipe":
        """The same without blocks that are recomputed or offloaded."""
        return replace(self, recompute=(), offload=())

    @classmethod
    def of(cls, row: PlanRow, chunks: Chunks | None = None) -> "Recipe":
        """What a row of a plan says about the run of one micro-batch, whatever its size."""
        return cls(row.recompute, row.offload, row.head, row.loss_chunks, row.kept_graphs, chunks, row.autocast)


@dataclass(frozen=True)
class Splitting:
    """A logical batch cut into micro-batches."""

    limit: float  # samples, or padded cost, of a micro-batch at most
    parts: tuple[Part, ...]  # the micro-batches
    on_one: int = 0  # how many of them one device runs at most; 0 for all

    @property
    def count(self) -> int:
        """How many micro-batches run one after the other on a device."""
        return self.on_one or len(self.parts)

    @property
    def is_single(self) -> bool:
        """Whether the batch is not split at all."""
        return len(self.parts) == 1


def splittings(subject: Subject) -> list[Splitting]:
    """The ways to split a batch that are worth a look, the fewest micro-batches first."""
    splittable = subject.splittable
    largest = splittable.largest if splittable.has_costs else int(splittable.largest)
    parts = tuple(splittable.plan(None))
    if subject.devices is not None:  # each has its share
        largest = max(part.cost for part in parts)
    whole = Splitting(largest, parts, subject.most_on_one(parts))
    if not subject.splits:
        return [whole]
    found = [whole]
    for limit in _limits(splittable.largest, least=0.0 if splittable.has_costs else 1.0):
        parts = tuple(splittable.plan(limit, oversized="alone"))
        if len(parts) > len(found[-1].parts):
            found.append(Splitting(max(part.cost for part in parts), parts, subject.most_on_one(parts)))
        if len(parts) == splittable.rows:
            break
    return found


def halving(splittings: Iterable[Splitting]) -> list[Splitting]:
    """Of some splittings those whose micro-batches are at most half as large as those of the one before."""
    few: list[Splitting] = []
    for one in splittings:
        if not few or 2 * one.limit <= few[-1].limit:
            few.append(one)
    return few


def _limits(largest: float, least: float) -> Iterator[float]:
    """Limits of a micro-batch, from a half of the largest one down to ``least``."""
    pieces = 2
    while pieces <= _MOST_PIECES:
        limit = max(largest / pieces if least == 0 else float(-(-largest // pieces)), least)
        yield limit
        if limit == least:
            return
        pieces = pieces + 1 if pieces < _FINE else pieces * 2
