"""Sees the global random generators go back to where they were, from looks at them in steps that are sampled."""

import random
import sys
from typing import Any

import torch

_OF_TORCH = slice(24, 24 + 624 * 8), slice(16, 24)  # its numbers, and which is the next, in the bytes of its state


class Streams:
    """Looks at the generators of Python, NumPy and torch; none of them is changed, nor is any function.

    A generator makes 624 numbers at a time and hands them out in order. Nothing but a seed, or a state that is set,
    brings it back to an earlier one, or to numbers that it had before.

    Attributes:
        back: how often a generator went back between two looks in the same training, by its name.
    """

    def __init__(self) -> None:
        self.back: dict[str, int] = {}
        self._last: dict[tuple[int, str], tuple[int, int]] = {}
        self._seen: dict[tuple[int, str], set[int]] = {}

    def look(self, optimizer: int) -> None:
        """Is told that a step of an optimizer is about to be made."""
        for name, now in _places().items():
            key = optimizer, name
            last, self._last[key] = self._last.get(key), now
            seen = self._seen.setdefault(key, set())
            went_on = last is None or (now[1] >= last[1] if now[0] == last[0] else now[0] not in seen)
            self.back[name] = self.back.get(name, 0) + (not went_on)
            seen.add(now[0])


def _places() -> dict[str, tuple[int, int]]:
    """For each generator which numbers it hands out, and which of them is the next."""
    *numbers, place = random.getstate()[1]
    found = {"random": (hash(tuple(numbers)), place)}
    if (numpy := sys.modules.get("numpy")) is not None:
        state: Any = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            found["np.random"] = hash(state["state"]["key"].tobytes()), int(state["state"]["pos"])
    whole = torch.get_rng_state().numpy()
    mine, following = (whole[part].tobytes() for part in _OF_TORCH)
    found["torch"] = hash(mine), int.from_bytes(following, sys.byteorder)
    return found
