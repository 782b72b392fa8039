"""Fake tensors that a trace left behind, such as a mask in an ``lru_cache``, where the next real step finds them."""

import gc
import logging

import torch

from anybatch.tensors.fakes import Fakes

logger = logging.getLogger(__name__)


def clear_away(fakes: Fakes, device: torch.device) -> tuple[int, list[str]]:
    """Makes real tensors of the fake ones that are left of a trace, where they are; nothing is taken out of a cache.

    Args:
        fakes: of the trace, which nothing else is done with.
        device: of the model.

    Returns:
        How many there were, and the shapes of what is left of them, since it hangs on weights, samples or random
        numbers.
    """
    fakes.let_go()
    gc.collect()
    if (found := len(fakes.alive())) == 0:
        return 0, []
    fakes.make_real(device)
    left = fakes.alive()
    logger.info("%d tensors of a trace were kept by the step; %d of them are real ones now", found, found - len(left))
    return found, [f"{tuple(fake.shape)} of {fake.dtype}" for fake in left]
