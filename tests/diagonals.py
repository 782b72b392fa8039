"""Which members of a product of parameters run in the quick suite: those on its diagonals; the rest are slow."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def diagonals(*axes: Sequence[Any], each: int = 1) -> list[Any]:
    """Returns the whole product; what is off its diagonals is marked as slow.

    Args:
        axes: the values of each parameter. All of them are on a diagonal.
        each: diagonals, and so how often at least each value of the longest axis is on one.
    """
    longest = max(range(len(axes)), key=lambda number: len(axes[number]))
    kept = {
        tuple((place + shift * (number - longest)) % len(axis) for number, axis in enumerate(axes))
        for place in range(len(axes[longest]))
        for shift in range(each)
    }
    return [
        pytest.param(*(axis[place] for axis, place in zip(axes, places, strict=True)), marks=marks)
        for places in itertools.product(*(range(len(axis)) for axis in axes))
        for marks in [[] if places in kept else [pytest.mark.slow]]
    ]
