"""Fake tensors that a trace left behind, such as a mask in an ``lru_cache``.

The next real step would find them there, and fail. What only keeps results is emptied; of the rest it is said where it
is.
"""

import functools
import gc
import logging
import types
from collections.abc import Sequence
from typing import Any

from anybatch.tensors.fakes import Fakes

logger = logging.getLogger(__name__)

_CACHE = type(functools.lru_cache(lambda: None))
_DEPTH = 3  # containers around a tensor


def clear_away(fakes: Fakes) -> list[str]:
    """Takes the fake tensors of a trace out of caches and dictionaries.

    Args:
        fakes: of the trace, which nothing else is done with.

    Returns:
        What is left: shapes, and what holds them.
    """
    fakes.let_go()
    gc.collect()
    if fakes.alive():
        gc.unfreeze()  # Python does not tell what refers to them among objects that were frozen
        _empty_caches(fakes)
        gc.collect()
    return [f"{tuple(fake.shape)} of {fake.dtype}, in {_holder_of(fake)}" for fake in fakes.alive()]


def _empty_caches(fakes: Fakes) -> None:
    """Empties what holds fakes: function caches as a whole, dictionaries of those entries."""
    level: list[Any] = fakes.alive()
    seen = {id(one) for one in level}
    dictionaries: list[tuple[dict[Any, Any], set[int]]] = []
    for _ in range(_DEPTH):
        inside = {id(one) for one in level}
        above = [one for one in _holders(level) if id(one) not in seen]
        for one in above:
            if type(one) is _CACHE:
                one.cache_clear()
                logger.info("the cache of %s held fake tensors of a trace; it was emptied", _name_of(one))
            elif type(one) is dict and _owner_of(one) is None:
                dictionaries.append((one, inside))
        seen |= {id(one) for one in above}
        level = [one for one in above if type(one) in (dict, list, tuple, set)]
    for home, inside in dictionaries:
        keys = [key for key, value in home.items() if id(value) in inside]
        for key in keys:
            del home[key]
        if keys:
            logger.info("a dictionary held fake tensors of a trace; %d entries were taken out: %s", len(keys), keys[:3])


def _holders(values: Sequence[Any]) -> list[Any]:
    """What refers to some values, but for the frames and lists of this module."""
    found = gc.get_referrers(*values)
    return [one for one in found if one is not values and not isinstance(one, types.FrameType)]


def _owner_of(home: dict[Any, Any]) -> Any:
    """The module, class or object whose attributes a dictionary has, or the function whose cache it is, if any."""
    for one in gc.get_referrers(home):
        is_owner = isinstance(one, type) or type(one) is _CACHE or getattr(one, "__dict__", None) is home
        if is_owner or getattr(one, "__globals__", None) is home:
            return one
    return None


def _holder_of(value: Any) -> str:
    names = {_name_of(one) for one in _holders([value]) if type(one) is not list}
    return ", ".join(sorted(names)) or "a place that Python does not tell"


def _name_of(holder: Any) -> str:
    holder = (_owner_of(holder) or holder) if type(holder) is dict else holder
    name = getattr(holder, "__qualname__", "") or getattr(holder, "__name__", "")
    return f"{getattr(holder, '__module__', '')}.{name}" if name else f"a {type(holder).__name__}"
