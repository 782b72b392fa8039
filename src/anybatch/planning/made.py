"""The plans that a step has made, for batches of which neither is larger than the other in everything."""

from anybatch.planning.shapes import outgrown, shapes_of
from anybatch.planning.subjects import Subject
from anybatch.planning.windowshapes import differ
from anybatch.records.plans import Plan

_MOST = 16


class MadePlans:
    """Keeps plans, and finds one that is good for a batch.

    A batch of many short samples and one of few long ones each need a plan of their own, and may come in turn.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] = []

    def add(self, plan: Plan) -> None:
        """Keeps a plan, and forgets the oldest of very many.

        Args:
            plan: for as many samples, and samples as large, as it says.
        """
        self._plans = [*self._plans[1 - _MOST :], plan]

    def good_for(self, subject: Subject) -> Plan | None:
        """The latest plan that was made for a batch at least as large as this one in everything.

        Args:
            subject: has the batch; of raw samples nobody knows before they are collated, and of a window of several
                shapes which of its micro-batches are large.
        """
        if subject.splittable.is_collated or differ(subject.splittable, subject.loss_fn):
            return None
        rows, here = subject.splittable.rows, shapes_of(subject)
        good = (one for one in reversed(self._plans) if rows <= one.samples and not outgrown(dict(one.shapes), here))
        return next(good, None)
