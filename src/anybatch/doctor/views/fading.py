"""Where the gradient of the first layers is lost on its way back: from the first step on, or in the course of a run."""

import math
from dataclasses import dataclass

from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import FAR_TOO_LONG, Entry, constant_since, entries, ratio
from anybatch.records.runs import Run, remembered
from anybatch.records.samples import Activations, Norms

TINY = 1e-6
"""Gradients of the first module below this share of those of the last one, and updates below this, are lost."""

SMALL = 1e-4
"""The share of the last gradient below which that of the first is lost where all outputs are the same, too."""

_DEEP = 4
"""Over how many matrices a gradient has to shrink to be lost in the depth of a network, and not at one gate."""

Sampled = tuple[Norms, list[Entry]]


@dataclass(frozen=True, slots=True)
class Faded:
    """A gradient that is lost on its way back."""

    lost: list[Sampled]  # the samples in which it is, each with the matrices in the order in which they run
    early: bool  # whether it is so from the first sample on, before any update


@remembered
def faded(run: Run, optimizer: int) -> Faded | None:
    """Whether the gradients of the first layers vanish, and since when; ``None`` where they arrive, or at the end."""
    samples = [norms for norms in run.of(Norms) if norms.optimizer == optimizer]
    losses = course(run, optimizer)
    if losses.converged or not samples:
        return None
    ratios = [ratio(run, norms) or 0.0 for norms in samples]
    thrown = sum(value > FAR_TOO_LONG for value in ratios) >= 2
    chains = [(norms, _chain(run, norms, whole=thrown)) for norms in samples]
    start = max((chain[0].grad for _, chain in chains[:2] if chain), default=0.0)
    limit = SMALL if _constant(run, chains) and not losses.fell else TINY
    lost = [(norms, chain) for norms, chain in chains if _is_lost(chain, start if thrown else 0.0, limit)]
    if not lost or lost[-1][0] is not chains[-1][0]:
        return None
    if len(lost) < (2 if thrown else 3) and not (thrown and _far_gone(chains[-1][1])):
        return None
    begin = next(index for index, (norms, _) in enumerate(chains) if norms is lost[0][0])
    if len(lost) * 2 < len(chains) - begin:
        return None
    if 0 < begin < 3 and all(one.grad == 0 for _, chain in chains[:begin] for one in chain):
        lost, begin = [chains[0], *lost], 0  # the first outputs were zero, and so was every gradient
    if not thrown and not (_stays(chains, lost, begin) or (begin == 0 and not losses.fell and _deep(lost))):
        return None
    return Faded(lost, begin == 0)


def _constant(run: Run, chains: list[Sampled]) -> bool:
    """Whether the outputs were the same for all inputs from the start."""
    roots = {chain[0].parameter.root for _, chain in chains if chain}
    return any(found is not None and found.step == 0 for root in roots if (found := constant_since(run, root)))


def _chain(run: Run, norms: Norms, *, whole: bool) -> list[Entry]:
    """The matrices of an optimizer in the order in which they run: of its first root, or of the whole of it."""
    order: dict[tuple[int, str], int] = {}
    for one in run.of(Activations):
        for sample in one.modules:
            order.setdefault((one.root, sample.module), sample.order)
    found = [one for one in entries(run, norms) if len(one.parameter.shape) >= 2 and one.parameter.root >= 0]
    found = [one for one in found if len(one.parameter.names) == 1]  # a tied one has the gradient of the last layer too
    root = min((one.parameter.root for one in found), default=-1)
    found = [one for one in found if whole or one.parameter.root == root]
    places: dict[int, int] = {}
    before = -1
    for entry in sorted(found, key=lambda one: one.parameter.parameter):
        before = order.get((entry.parameter.root, entry.parameter.module), before)
        # What is not called itself, as a part of an attention, is where its neighbour is.
        places[entry.parameter.parameter] = before
    return sorted(found, key=lambda one: (one.parameter.root, places[one.parameter.parameter], one.parameter.parameter))


def _is_lost(chain: list[Entry], start: float, limit: float) -> bool:
    """Whether the first layer's gradient is lost; with a start, whether it is after steps that were far too long."""
    if len(chain) < 3 or not all(math.isfinite(one.grad) for one in chain):
        return False
    head = max(chain[-1].grad, chain[-2].grad)
    if start > 0:
        return chain[0].grad < 1e-2 * head and chain[0].grad < 1e-4 * start
    return head > 0 and chain[0].grad < limit * head


def _far_gone(chain: list[Entry]) -> bool:
    """Whether one sample is enough: samples are far apart in the course of a run, and the last one is beyond doubt."""
    return chain[0].grad < SMALL * max(chain[-1].grad, chain[-2].grad)


def _stays(chains: list[Sampled], lost: list[Sampled], begin: int) -> bool:
    """Whether the first layer stands still (or its gradient was lost in the run); Adam goes on for a while without."""
    if begin == 0:
        seen = [chain for _, chain in lost if any(0 < one.grad < TINY * chain[-1].grad for one in chain)]
        return all(chain[0].ratio < TINY for _, chain in lost) and bool(seen)
    before = max(chain[0].grad for _, chain in chains[:begin] if chain)
    return before > 0 and lost[-1][1][0].grad < TINY * before


def _deep(lost: list[Sampled]) -> bool:
    """Whether it shrinks from matrix to matrix; Adam moves the first ones all the same, along noise."""
    chain = lost[-1][1]
    head = max(chain[-1].grad, chain[-2].grad)
    steps = [one.grad for one in chain if 0 < one.grad < 0.1 * head]  # the first ones may be rounded down to zero
    return len(steps) >= _DEEP and max(steps) > 100 * min(steps)
