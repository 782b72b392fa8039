"""What one micro-batch leaves to the next: what a run changes in Python, and the buffers that it moves."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch

from anybatch.checking.causes import reason
from anybatch.checking.gradients import Outcome
from anybatch.checking.rig import Case, Rig, is_flag
from anybatch.checking.wording import how_far, listed
from anybatch.loss.losses import LossFunction
from anybatch.records.certificates import Reason
from anybatch.tensors.sideeffects import Effect
from anybatch.tensors.spectral import power_iteration

_NEAR = 4  # calls that come next
_LATER = (5040, 5039, 10**6)  # calls, which many numbers divide
_MOST_EFFECTS = 6  # of the things that changed which are looked at one by one
_COUNTING = (torch.int32, torch.int64)  # others, such as marks of what is filled, are moved on as they are
_AHEAD = (0, 1, 10, 1000, 100_000)  # calls that a buffer is moved on by


class State:
    """What the whole batch's run changed in Python, and what it does to the micro-batches that come after."""

    def __init__(self, case: Case, changed: Sequence[Effect]) -> None:
        self._case = case
        self._changed = [effect for effect in changed if not effect.is_generator and not effect.is_iterator]
        self._parts = case.splits[-1]
        self.error = self.loss_error = 0.0  # how far off the gradient is, if it is, and the losses of that run
        self.is_made_once = False  # whether only the first call makes it, by the samples that it is given

    def reason(self) -> Reason | None:
        """What makes a difference in the micro-batches of one step."""
        for parts in reversed(self._case.splits if self._changed else ()):  # a state may be for parts of one size only
            self._parts, self.error, alone = parts, 0.0, self._case.attempt(parts)
            if isinstance(alone, Outcome) and self._differs(alone, self._changed):
                break
        else:
            return None
        few = self._changed if len(self._changed) <= _MOST_EFFECTS else []
        blamed = [effect for effect in few if self._differs(alone, [effect])] or self._changed
        self.is_made_once = self._is_made_once(blamed)
        self._case.attempt(self._parts, carries=self._changed)
        off = "fails" if self.error == math.inf else f"has a different gradient ({how_far(self.error)})"
        if self.is_made_once:
            return self._worded("first call", blamed, error=self.error)
        kind = _kind_of(blamed[0], self._case.rig.task.splittable.rows)
        return self._worded(kind, blamed, off=off, error=self.error)

    def _is_made_once(self, effects: Sequence[Effect]) -> bool:
        """Whether micro-batches that find what the whole batch has made leave it, and give its gradient."""

        def begin() -> None:
            for effect in self._changed:
                effect.set(effect.after)

        return self._case.is_exact(loss_fn=self._case.beginning(begin)) and all(
            one.again() is one.after for one in effects
        )

    def _differs(self, alone: Outcome, carried: Sequence[Effect]) -> bool:
        """Whether the split gives something else if some changes go over from one micro-batch to the next."""
        outcome, error = self._case.attempt(self._parts, carries=carried), math.inf
        if isinstance(outcome, Outcome):
            error = outcome.error(alone, self._case.whole.norm)
            if error > self.error:
                self.loss_error = outcome.value_error(alone)
        self.error = max(self.error, error)
        return error > self._case.tolerance

    def note(self, *, ahead: bool = False) -> Reason | None:
        """What is counted once a micro-batch, and makes a difference at another value only, as a warm-up does.

        Only values that it has not had yet count if it looks ``ahead``.
        """
        self._case.attempt(self._parts, carries=self._changed)
        counted = (one for one in self._changed if isinstance(one.after, int) and one.again() != one.after)
        counters = [*filter(lambda one: one.is_growth, self._changed), *filter(lambda one: one.is_number, counted)]
        later = [
            effect for effect in counters[:_MOST_EFFECTS] if self._matters_elsewhere(effect, () if ahead else (0, 1))
        ]
        if not later or not math.isfinite(self._case.whole.norm):  # nothing is told apart by what is not finite
            return None
        self._case.attempt(self._parts, carries=self._changed)
        return self._worded("later list" if later[0].is_growth else "later counter", later)

    def _worded(self, cause: str, effects: Sequence[Effect], off: str = "", **evidence: float) -> Reason:
        code = _code_of(effects[0])
        shown = "; ".join(list(dict.fromkeys(_moved(effect, len(self._parts)) for effect in effects))[:3])
        inner = code[4:-1]  # of ``len(...)``
        said = {"name": re.findall(r"[A-Za-z_]\w*", code)[-1], "code": code, "list": inner, "kept": f"list({inner})"}
        places = [effect.place.code for effect in effects]
        return reason(cause, code, {"state": places, **evidence}, shown=shown, off=off, **said)

    def _matters_elsewhere(self, effect: Effect, others: Sequence[int]) -> bool:
        """Whether the gradient is another one once it was counted further, to what many periods of calls divide."""
        case, setters = self._case, list[Callable[[], None]]([partial(effect.repeat, _LATER[0])])
        if not effect.is_growth:
            kind, now = type(effect.after), effect.after
            near = range(now, now + _NEAR)
            setters = [partial(effect.set, kind(value)) for value in (*others, *near, 100 * (now + 1), *_LATER)]
        for begin in setters:
            outcome = case.attempt(loss_fn=case.beginning(begin))  # fails as for an index that is out of range
            if isinstance(outcome, Outcome) and outcome.error(case.whole, outcome.norm) > case.tolerance:
                return True
        return False


def _kind_of(effect: Effect, rows: int) -> str:
    """The cause by what changed: a counter of calls, another number, rows of the samples, or anything else."""
    if not effect.is_number:
        both = (effect.before, effect.after)
        is_of_samples = all(isinstance(one, torch.Tensor) and one.shape[:1] == (rows,) for one in both)
        return "state" if is_of_samples else "shared state"
    return "counter" if effect.after - effect.before == 1 else "number"


def _code_of(effect: Effect) -> str:
    return f"len({effect.place.code.rpartition('[')[0]})" if effect.is_growth else effect.place.code


def _moved(effect: Effect, micro_batches: int) -> str:
    what = f"`{_code_of(effect)}`{effect.place.owner}"
    now = effect.again()
    if effect.is_growth:
        return f"{what} grows with each of {micro_batches} micro-batches"
    if effect.is_number and isinstance(now, (int, float)) and effect.after != effect.before:
        if (now - effect.before) / (effect.after - effect.before) == micro_batches:
            return f"{what} was counted {micro_batches} times in one step of {micro_batches} micro-batches"
        return f"{what} went from {effect.before!r} to {now!r} in one step of {micro_batches} micro-batches"
    return f"{what} is changed by one micro-batch and read by the next"


def shown_iterators(effects: Sequence[Effect]) -> tuple[str, str]:
    """What moved in a run and can't be put back: where it lies, and how to say it."""
    places = [effect.place for effect in effects if effect.is_iterator]
    if not places:
        return (
            "loss",
            "the model or the loss reads what changes: a counter that can't be restored, an iterator, clock or file",
        )
    shown = listed([f"`{one.code}`{one.owner}".rstrip(",") for one in places])
    return places[0].code, f"the loss advances {shown}"


class Buffers:
    """The buffers that a run has just changed, but for those of spectral norms, and all flags; BatchNorm is frozen."""

    def __init__(self, rig: Rig) -> None:
        own = {id(one) for module in rig.modules.values() for one in power_iteration(module)}
        self.changed: list[str] = []
        # of those, what can be moved on: with values before and after
        self._moved: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._flags: list[tuple[str, torch.Tensor]] = []
        for name, home, key, buffer, before in rig.buffer_values:
            now = home.get(key)
            if id(buffer) in own:
                continue
            if now is None:  # set to None or deleted, and not there for the next micro-batch
                self.changed.append(name)
                continue
            is_same = now.shape == before.shape and torch.equal(now, before)
            if now is not buffer or not is_same:
                self.changed.append(name)
            if is_flag(buffer):
                if not before.any():  # one that is set says that something was done, which would be done again
                    self._flags.append((name, buffer))
            elif now.shape == before.shape and not is_same:
                self._moved.append((name, buffer, before, now.detach().clone()))

    @property
    def is_count(self) -> bool:
        """Whether all that was moved are counts of the calls."""
        steps = [after - before for _, _, before, after in self._moved if after.numel() == 1]
        return len(steps) == len(self._moved) > 0 and all(float(one) == 1.0 for one in steps)

    def later(self, case: Case) -> Reason | None:
        """What makes a difference once the buffers have moved on, or a flag is another."""
        for turned, ahead in product((False, True) if self._flags else (False,), _AHEAD if self._moved else (0,)):
            if (turned or ahead) and (error := self._error(case, ahead, turned)):
                names = [name for name, *_ in (self._moved if ahead else self._flags)]
                cause = "later buffer" if ahead else "later flag"
                return reason(cause, names[0], {"buffers": names, "error": error})
        return None

    def _error(self, case: Case, ahead: int, turned: bool) -> float:
        """How far a split is off the whole from another state on; 0 where it is not, or does not run."""
        whole = case.attempt(fresh=False, loss_fn=self._from(case, ahead, turned))
        if not isinstance(whole, Outcome) or not whole.is_finite:
            return 0.0
        for parts in case.splits:
            split = case.attempt(parts, fresh=False, loss_fn=self._from(case, ahead, turned))
            if isinstance(split, Outcome):
                error = split.error(whole, case.whole.norm)
                if error > case.tolerance:
                    return error
        return 0.0

    def _from(self, case: Case, ahead: int, turned: bool) -> LossFunction:
        """The loss, of which the first micro-batch finds another state."""
        begun: list[bool] = []

        def begin() -> None:
            if begun:
                return
            begun.append(True)
            with torch.no_grad():
                for _, buffer, before, after in self._moved if ahead else ():
                    is_count = after.dtype in _COUNTING or (after.is_floating_point() and after.numel() == 1)
                    buffer.copy_(before + (after - before) * ahead if is_count else after)
                for _, flag in self._flags if turned else ():
                    flag.fill_(1)

        return case.beginning(begin)
