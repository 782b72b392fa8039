"""Whether what a run changes in Python makes a difference: now, at another value, or not at all."""

import math
import re
from collections.abc import Sequence

from anybatch.checking.beginnings import announced
from anybatch.checking.causes import listed, reason
from anybatch.checking.comparison import Case, relative
from anybatch.checking.measuring import Outcome, distance
from anybatch.loss.losses import LossFunction
from anybatch.records.certificates import Reason
from anybatch.tensors.sideeffects import Effect

_MOST = 6  # of the things that changed which are looked at one by one


class State:
    """What the whole batch's run changed in Python, and what it does to the micro-batches that come after.

    Args:
        case: what is compared.
        changed: by the run of the whole batch.

    Attributes:
        error: how far off the gradient is, if it is.
    """

    def __init__(self, case: Case, changed: Sequence[Effect]) -> None:
        self._case = case
        self._changed = [effect for effect in changed if not effect.is_generator and not effect.is_iterator]
        self._parts = case.splits[-1]
        self.error = 0.0

    def reason(self) -> Reason | None:
        """What makes a difference in the micro-batches of one step."""
        alone = self._case.attempt(self._parts)
        if not self._changed or not isinstance(alone, Outcome) or not self._differs(alone, self._changed):
            return None
        few = self._changed if len(self._changed) <= _MOST else []
        blamed = [effect for effect in few if self._differs(alone, [effect])] or self._changed
        self._case.attempt(self._parts, carries=self._changed)
        off = "fails" if self.error == math.inf else f"has another gradient ({self.error:.2g} off)"
        return self._worded("counter" if blamed[0].is_number else "state", blamed, off=off, error=self.error)

    def _differs(self, alone: Outcome, carried: Sequence[Effect]) -> bool:
        """Whether the split gives something else if some changes go over from one micro-batch to the next."""
        outcome = self._case.attempt(self._parts, carries=carried)
        error = float("inf")
        if isinstance(outcome, Outcome):
            error = relative(distance(outcome.gradients, alone.gradients), max(alone.norm, self._case.whole.norm))
        self.error = max(self.error, error)
        return error > self._case.tolerance

    def note(self) -> Reason | None:
        """What is counted once a micro-batch, and makes a difference at another value only, as a warm-up does."""
        self._case.attempt(self._parts, carries=self._changed)
        counters = [effect for effect in self._changed if effect.is_number and effect.again() != effect.after]
        later = [effect for effect in counters[:_MOST] if self._matters_elsewhere(effect)]
        if not later:
            return None
        self._case.attempt(self._parts, carries=self._changed)
        return self._worded("later counter", later)

    def _worded(self, cause: str, effects: Sequence[Effect], off: str = "", **evidence: float) -> Reason:
        code = effects[0].place.code
        name = re.findall(r"[A-Za-z_]\w*", code)[-1]
        shown = "; ".join(_moved(effect, len(self._parts)) for effect in effects[:3])
        evidence = {"state": [effect.place.code for effect in effects], **evidence}  # type: ignore[dict-item]
        return reason(cause, code, evidence, shown=shown, off=off, name=name, code=code)

    def _matters_elsewhere(self, effect: Effect) -> bool:
        kind = type(effect.after)
        for value in dict.fromkeys(kind(v) for v in (0, 1, 2 * effect.after + 1, 100 * (effect.after + 1), 10**6)):
            outcome = self._case.attempt(loss_fn=self._with(effect, value))
            if not isinstance(outcome, Outcome):
                continue  # such as an index that is out of range
            if self._case.error_of(outcome.gradients, outcome.norm) > self._case.tolerance:
                return True
        return False

    def _with(self, effect: Effect, value: object) -> LossFunction:
        def begin() -> None:
            effect.set(value)

        return announced(self._case.rig.subject.loss_fn, begin, lambda: None, in_pieces=True)


def _moved(effect: Effect, micro_batches: int) -> str:
    what = f"`{effect.place.code}`{effect.place.owner}"
    now = effect.again()
    if effect.is_number and isinstance(now, (int, float)) and effect.after != effect.before:
        times = (now - effect.before) / (effect.after - effect.before)
        if times == micro_batches:
            return f"{what} was counted {micro_batches} times in one step of {micro_batches} micro-batches"
        return f"{what} went from {effect.before!r} to {now!r} in one step of {micro_batches} micro-batches"
    return f"{what} is changed by one micro-batch and read by the next"


def shown_iterators(effects: Sequence[Effect]) -> tuple[str, str]:
    """What moved that can't be put back: where it lies, and how to say it.

    Args:
        effects: of a run.
    """
    places = [effect.place for effect in effects if effect.is_iterator]
    if not places:
        return (
            "loss",
            "the loss reads something that moves, such as an iterator, a clock, a file or an object of a library",
        )
    return places[0].code, f"the loss goes on with {listed([f'`{one.code}`{one.owner}'.rstrip(',') for one in places])}"
