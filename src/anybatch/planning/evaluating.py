"""The micro-batches of an evaluation under a plan for training."""

from anybatch.planning.observing import AnyFollower
from anybatch.tensors.batches import Splittable
from anybatch.update.transaction import SizeLimit


def limit_by_plan(follower: AnyFollower | None, splittable: Splittable, limit: SizeLimit) -> None:
    """Makes micro-batches as small as in training, which without gradients is small enough.

    Args:
        follower: has the plan, or makes it; ``None`` for none.
        splittable: the batch that is evaluated.
        limit: of the evaluation.
    """
    if follower is None:
        return
    if follower.plan is None:
        try:
            follower.prepare(splittable, lambda: None)
        finally:
            follower.release()
    if limit.ceiling is None or follower.may_grow:
        limit.value = limit.ceiling = follower.limit.value
