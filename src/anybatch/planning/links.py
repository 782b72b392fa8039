"""The blocks of a trace as a chain: when each goes forward and back, and what it keeps between."""

import itertools
from collections.abc import Sequence

from anybatch.planning.fitting import Fit
from anybatch.records.memory import PARAMETERS


class Link:
    """A block on its way forward and back: positions of operations, and numbers of allocations.

    Args:
        name: of the block.
        enter: how many operations had run before its forward.
        leave: how many operations had run after it.
        stop: how many operations had run at the end of the micro-batch.

    Attributes:
        back: the first operation of its backward.
        in_order: whether that is after the backward of all blocks behind it has begun.
        inputs: what it was given.
        outputs: what it gave.
        saved: what it made and keeps for its backward.
        repeats: whether the block ran before, too.
    """

    def __init__(self, name: str, enter: int, leave: int, stop: int) -> None:
        self.name = name
        self.enter = enter
        self.leave = leave
        self.back = stop
        self.in_order = True
        self.inputs: list[int] = []
        self.outputs: set[int] = set()
        self.saved: list[int] = []
        self.repeats = False


def chain_of(fit: Fit, start: int, stop: int) -> list[Link]:
    """The blocks in the order in which they ran; the backward begins them in the reverse order.

    A block that ran several times, as in a loss that calls its model twice, stands where it ran last. What it made in
    the runs before is added there: it is alive then, and gone only after it.

    Args:
        fit: has the trace.
        start: how many operations had run when the micro-batch began.
        stop: and when it ended.
    """
    links: list[Link] = []
    earlier: dict[str, list[Link]] = {}
    spans = [span for span in fit.trace.spans if start <= span.enter and span.leave <= stop]
    last = {span.name: span for span in spans}
    index = {id(allocation): number for number, allocation in enumerate(fit.trace.allocations)}
    for span in spans:
        runs = links if last[span.name] is span else earlier.setdefault(span.name, [])
        if runs and span.enter < runs[-1].leave:
            continue
        runs.append(Link(span.name, span.enter, span.leave, stop))
        runs[-1].inputs = [index[id(a)] for a in span.inputs if id(a) in index]
        runs[-1].outputs = {index[id(a)] for a in span.outputs if id(a) in index}
    allocations = fit.trace.allocations
    for link in itertools.chain(links, *earlier.values()):
        for number, a in enumerate(allocations):
            if a.born >= link.leave:
                break
            lives_on = a.died is not None and a.died > link.leave
            if link.enter <= a.born and lives_on and a.back is not None:
                link.saved.append(number)
        backs = [back for number in link.saved if (back := allocations[number].back) is not None]
        link.back = min(backs, default=-1)
    for number, link in reversed(list(enumerate(links))):
        after = links[number + 1].back if number + 1 < len(links) else link.leave
        link.in_order = link.back >= after
        link.back = max(link.back, after)
    for link in links:
        for run in earlier.get(link.name, ()):
            link.repeats = True
            link.saved += run.saved
            link.inputs += run.inputs
            link.outputs |= run.outputs
    return links


def freed_by(links: Sequence[Link], fit: Fit, sizes: Sequence[int]) -> tuple[int, int]:
    """The bytes that a recomputed run frees, and those of its inputs that it keeps alive for it.

    Args:
        links: of the run.
        fit: has the trace.
        sizes: the bytes of every storage of the trace.
    """
    allocations = fit.trace.allocations
    first, last = links[0], links[-1]
    inside = {number for link in links for number in link.saved} - last.outputs
    freed = sum(sizes[i] for i in inside if (died := allocations[i].died) is not None and died > last.leave)
    kept = 0
    for number in set(first.inputs):
        allocation = allocations[number]
        if allocation.category != PARAMETERS and allocation.died is not None and allocation.died < last.back:
            kept += sizes[number]
    return freed, kept


def bounds_of(
    chain: Sequence[Link], live: Sequence[int], start: int, stop: int, around: int
) -> tuple[list[int], list[int]]:
    """The most bytes alive while each block goes forward, and in the loss; and while each goes backward.

    Args:
        chain: the blocks.
        live: bytes after every operation.
        start: how many operations had run when the micro-batch began.
        stop: and when it ended.
        around: bytes that are added everywhere.
    """

    def most(begin: int, end: int) -> int:
        return around + (max(live[begin:end]) if end > begin else live[max(begin - 1, 0)])

    leaves = [start, *(link.leave for link in chain)]
    forward = [most(leaves[k], leaves[k + 1]) for k in range(len(chain))]
    forward.append(most(leaves[-1], chain[-1].back if chain else stop))
    backs = [stop, *(link.back for link in chain)]
    backward = [most(backs[k + 1], backs[k]) for k in range(len(chain))]
    return forward, backward
