"""The plans that a step has made, for batches of which neither is larger than the other in everything."""

from anybatch.planning.shapes import measures_in, outgrown, shapes_of
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
        rows, names = subject.splittable.rows, {name for one in self._plans for name in measures_in(one.shapes)}
        here, heavy_by = shapes_of(subject, measures=names), subject.habits.heavy_by
        for plan in reversed(self._plans):
            others = names.difference(plan.shapes, heavy_by)  # which another plan looks at
            own = {label: shape for label, shape in here.items() if label not in others}
            if rows <= plan.samples and not outgrown(dict(plan.shapes), own):
                return plan
        return None
