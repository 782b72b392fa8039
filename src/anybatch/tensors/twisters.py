"""The states of the Mersenne Twisters of Python and numpy, copied as they lie in memory.

``random.getstate`` and ``numpy.random.get_state`` make an object of each of 624 words, at every step. Copying the words
takes a hundredth of that; the objects are made when a state is put back or written to a file. Where the words lie is
looked up once in generators whose state is known. Where they are not found, the usual functions are called.
"""

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

_WORDS = 624
_PYTHON = struct.Struct(f"=i{_WORDS}I")  # the position, and the words
_NUMPY = struct.Struct(f"={_WORDS}Ii")  # the words, and the position
_LEFT_OVER = struct.Struct("@id")  # whether a normal number is left over, and the number


def saved_python_state() -> Callable[[], tuple[Any, ...]]:
    """Saves the state of the generator behind the functions of ``random``.

    Returns:
        A function that gives what ``random.getstate()`` would have given now.

    Example:
        >>> before, saved = random.getstate(), saved_python_state()
        >>> _ = random.random()
        >>> saved() == before
        True
    """
    generator: Any = getattr(random.getstate, "__self__", None)
    is_usual = type(generator) is random.Random
    place = _place_in_python() if is_usual else None
    if place is None:
        state = random.getstate()
        return lambda: state
    raw, left_over = ctypes.string_at(id(generator) + place, _PYTHON.size), generator.gauss_next

    def unpacked() -> tuple[Any, ...]:
        position, *words = _PYTHON.unpack(raw)
        return random.Random.VERSION, (*words, position), left_over

    return unpacked


@functools.cache
def _place_in_python() -> int | None:
    """Where the state lies in a ``random.Random``, ``None`` if it is not found."""
    if sys.implementation.name != "cpython":  # elsewhere an id is no address
        return None
    known = random.Random(1)
    known.random()
    *words, position = known.getstate()[1]
    place = ctypes.string_at(id(known), random.Random.__basicsize__).find(_PYTHON.pack(position, *words))
    return None if place < 0 else place


def saved_numpy_state(numpy: Any) -> Callable[[], dict[str, Any]]:
    """Saves the state of the generator behind the functions of ``numpy.random``.

    Args:
        numpy: the module.

    Returns:
        A function that gives what ``numpy.random.get_state(legacy=False)`` would have given now.

    Example:
        >>> import numpy
        >>> saved, first = saved_numpy_state(numpy), numpy.random.randn()
        >>> numpy.random.set_state(saved())
        >>> numpy.random.randn() == first
        True
    """
    generator: Any = getattr(numpy.random.get_state, "__self__", None)
    place = _place_in_numpy(numpy) if type(generator) is numpy.random.RandomState else None
    twister: Any = None if place is None else numpy.random.get_bit_generator()
    if place is None or type(twister) is not numpy.random.MT19937:
        state = numpy.random.get_state(legacy=False)  # half the time of the tuple
        return lambda: state
    raw = ctypes.string_at(twister.ctypes.state_address, _NUMPY.size)
    left_over = ctypes.string_at(id(generator) + place, _LEFT_OVER.size)

    def unpacked() -> dict[str, Any]:
        *words, position = _NUMPY.unpack(raw)
        has_gauss, gauss = _LEFT_OVER.unpack(left_over)
        inner = {"key": numpy.array(words, dtype=numpy.uint32), "pos": position}
        return {"bit_generator": "MT19937", "state": inner, "has_gauss": has_gauss, "gauss": gauss}

    return unpacked


@functools.cache
def _place_in_numpy(numpy: Any) -> int | None:
    """Where the left over normal number lies in a ``RandomState``; ``None`` if it or the words are not found."""
    if sys.implementation.name != "cpython" or not hasattr(numpy.random, "get_bit_generator"):
        return None
    twister = numpy.random.MT19937(1)
    known = numpy.random.RandomState(twister)
    known.rand()
    state = known.get_state(legacy=False)
    words = _NUMPY.pack(*state["state"]["key"].tolist(), state["state"]["pos"])
    if ctypes.string_at(twister.ctypes.state_address, _NUMPY.size) != words:
        return None
    found: set[int] = set()
    for has_gauss, gauss in ((1, 0.7310585786300049), (0, -1.6180339887498949)):
        known.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})
        raw = ctypes.string_at(id(known), numpy.random.RandomState.__basicsize__)
        found.add(raw.find(_LEFT_OVER.pack(has_gauss, gauss)))
    return found.pop() if len(found) == 1 and -1 not in found else None
