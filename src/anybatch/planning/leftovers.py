"""Fake tensors that a trace left behind, such as a mask in an ``lru_cache``, where the next real step finds them."""

import gc
import logging
import types
from typing import Any

import torch

from anybatch.tensors.fakes import Fakes

logger = logging.getLogger(__name__)


def clear_away(fakes: Fakes, device: torch.device) -> tuple[int, list[str]]:
    """Makes real tensors of the fake ones that are left of a trace, where they are; nothing is taken out of a cache.

    Args:
        fakes: of the trace, which nothing else is done with.
        device: of the model.

    Returns:
        How many there were, and what is left of them, since it hangs on weights, samples or random numbers: shapes,
        and what holds them.
    """
    fakes.let_go()
    gc.collect()
    if (found := len(fakes.alive())) == 0:
        return 0, []
    fakes.make_real(device)
    left = fakes.alive()
    logger.info("%d tensors of a trace were kept by the step; %d of them are real ones now", found, found - len(left))
    return found, [f"{tuple(fake.shape)} of {fake.dtype}, in {_holder_of(fake)}" for fake in left]


def _holder_of(value: Any) -> str:
    holders = [one for one in gc.get_referrers(value) if type(one) not in (list, types.FrameType)]
    names = {_name_of(owner) for one in holders for owner in (_owner_of(one) if type(one) is dict else [one])}
    return ", ".join(sorted(names)) or "a place that Python does not tell"


def _owner_of(home: dict[Any, Any]) -> list[Any]:
    """The class or object whose attributes a dictionary has, or the function whose cache it is, else the dictionary."""
    owners = [one for one in gc.get_referrers(home) if isinstance(one, type) or hasattr(one, "cache_info")]
    owners += [one for one in gc.get_referrers(home) if getattr(one, "__dict__", None) is home]
    return owners[:1] or [home]


def _name_of(holder: Any) -> str:
    name = getattr(holder, "__qualname__", "") or getattr(holder, "__name__", "")
    return f"{getattr(holder, '__module__', '')}.{name}" if name else f"a {type(holder).__name__}"
