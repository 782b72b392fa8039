"""How many steps of a sequence go through at once."""

import logging
import math
from collections.abc import MutableMapping
from typing import NamedTuple

from anybatch.gradient.sequences import Sequences

logger = logging.getLogger(__name__)

_SHORTEST = 16  # steps: below, the time is that of starting operations
_MOST = 1.9  # times the bytes of the best length


class Costs(NamedTuple):
    """What a sequence takes.

    Args:
        state: bytes of a state.
        step: bytes of activations a step.
    """

    state: float
    step: float


def affordable_length(sequences: Sequences, known: MutableMapping[int, Costs]) -> int:
    """Measures on two short chunks, and chooses the longest that takes little memory.

    With chunks of k of T steps, states of s bytes and activations of a bytes a step, what is held is
    T / k * s + k * a, which is least at k = sqrt(T * s / a). Longer chunks are faster, so that the longest one is taken
    that needs less than twice as much.

    Args:
        sequences: of a micro-batch.
        known: what was measured before; anew where there are twice the steps. Micro-batches of other sizes have the
            same proportions.

    Returns:
        The number of steps.
    """
    total = sequences.steps.total
    if total <= 2 * _SHORTEST:
        return total
    size = total.bit_length()
    if size not in known:
        (low, _), (high, state) = (sequences.graph_bytes(length) for length in (_SHORTEST // 2, _SHORTEST))
        known[size] = Costs(state, (high - low) / (_SHORTEST - _SHORTEST // 2))
        logger.info("of %d steps a state takes %d bytes, two short chunks took %d and %d", total, state, low, high)
    return best_length(total, *known[size])


def best_length(total: int, state: float, step: float) -> int:
    """The longest chunk that holds less than twice what the best one does.

    Args:
        total: steps in all.
        state: bytes of a state.
        step: bytes of activations a step.

    Returns:
        The number of steps.

    Example:
        >>> best_length(4096, 4096, 44544)
        68
    """
    if step <= 0:
        return total
    best = math.sqrt(total * state / step)
    longest = best * (_MOST + math.sqrt(_MOST**2 - 1))
    return min(total, max(_SHORTEST, int(longest)))
