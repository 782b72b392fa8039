"""Whether what a run changes in Python makes a difference: now, at another value, or not at all."""

from collections.abc import Sequence

from anybatch.batch.batches import Part
from anybatch.checking import wording
from anybatch.checking.beginnings import announced
from anybatch.checking.comparison import attempt, relative
from anybatch.checking.measuring import Outcome, Rig, distance
from anybatch.loss.losses import LossFunction
from anybatch.records.certificates import Reason
from anybatch.tensors.sideeffects import Effect

_MOST = 6  # of the things that changed which are looked at one by one


class State:
    """What the whole batch's run changed in Python, and what it does to the micro-batches that come after.

    Args:
        rig: opened.
        whole: what the whole batch gave.
        changed: by the run of the whole batch.
        parts: a split.
        tolerance: up to which relative error gradients are the same.

    Attributes:
        error: how far off the gradient is, if it is.
    """

    def __init__(
        self, rig: Rig, whole: Outcome, changed: Sequence[Effect], parts: Sequence[Part], tolerance: float
    ) -> None:
        self._rig = rig
        self._whole = whole
        self._changed = [effect for effect in changed if not effect.is_generator and not effect.is_iterator]
        self._parts = parts
        self._tolerance = tolerance
        self.error = 0.0

    def reason(self) -> Reason | None:
        """What makes a difference in the micro-batches of one step."""
        alone = attempt(self._rig, self._parts)
        if not self._changed or not isinstance(alone, Outcome) or not self._differs(alone, self._changed):
            return None
        few = self._changed if len(self._changed) <= _MOST else []
        blamed = [effect for effect in few if self._differs(alone, [effect])] or self._changed
        attempt(self._rig, self._parts, carries=self._changed)
        return wording.state(blamed, len(self._parts), self.error)

    def _differs(self, alone: Outcome, carried: Sequence[Effect]) -> bool:
        """Whether the split gives something else if some changes go over from one micro-batch to the next."""
        outcome = attempt(self._rig, self._parts, carries=carried)
        error = float("inf")
        if isinstance(outcome, Outcome):
            error = relative(distance(outcome.gradients, alone.gradients), max(alone.norm, self._whole.norm))
        self.error = max(self.error, error)
        return error > self._tolerance

    def note(self) -> Reason | None:
        """What is counted once a micro-batch, and makes a difference at another value only, as a warm-up does."""
        attempt(self._rig, self._parts, carries=self._changed)
        counters = [effect for effect in self._changed if effect.is_number and effect.again() != effect.after]
        later = [effect for effect in counters[:_MOST] if self._matters_elsewhere(effect)]
        if not later:
            return None
        attempt(self._rig, self._parts, carries=self._changed)
        return wording.state_later(later, len(self._parts))

    def _matters_elsewhere(self, effect: Effect) -> bool:
        kind = type(effect.after)
        for value in dict.fromkeys(kind(v) for v in (0, 1, 2 * effect.after + 1, 100 * (effect.after + 1), 10**6)):
            outcome = attempt(self._rig, loss_fn=self._with(effect, value))
            if not isinstance(outcome, Outcome):
                continue  # such as an index that is out of range
            error = relative(distance(outcome.gradients, self._whole.gradients), max(outcome.norm, self._whole.norm))
            if error > self._tolerance:
                return True
        return False

    def _with(self, effect: Effect, value: object) -> LossFunction:
        def begin() -> None:
            effect.set(value)

        return announced(self._rig.subject.loss_fn, begin, lambda: None, in_pieces=True)
