"""Searches again where a search found out that what it began with does not hold."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from anybatch.errors import LossError
from anybatch.planning.fitting import NotAligned
from anybatch.planning.realruns import TooLarge
from anybatch.planning.variants import Profiles

logger = logging.getLogger(__name__)

T = TypeVar("T")


def settled(profiles: Sequence[Profiles], search: Callable[[], T], forget: Callable[[], None]) -> T:
    """Searches until nothing new is found out about the step while that goes on.

    A step may run other operations with other micro-batches, or turn out not to run on fake tensors, when a search is
    half done. It then knows less than it thought, and begins again with sizes that are traced by themselves.

    Args:
        profiles: that the search uses.
        search: finds a plan.
        forget: lets go of what was solved so far.

    Raises:
        LossError: the step differs from one time to the next in a way that no search gets along with.
    """
    while True:
        before = [one.known for one in profiles]
        try:
            return search()
        except (NotAligned, TooLarge) as error:
            if before == [one.known for one in profiles]:
                raise LossError(
                    f"the step can't be planned, since it runs other operations from one time to the next; got: "
                    f"{error}. Expected operations that follow from the samples of a micro-batch. Take the branch or "
                    "loop that depends on values out of the loss or the metrics, or give micro_batch_size= instead of "
                    "memory="
                ) from error
            logger.info("searching again: %s", error)
        forget()
