"""Sees every backward and every call of ``autograd.grad``."""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from anybatch.doctor.recording.gradients import Came, Gradients
from anybatch.doctor.recording.recordings import FACTORS, Recording
from anybatch.doctor.recording.samplers import MARKED, Samplers
from anybatch.interception import WEIGHT
from anybatch.records.events import Backward, Cleared
from anybatch.tensors.dispatch import NUMBERLESS, item_of
from anybatch.torch_private import in_transform, number_of_backward
from anybatch.userlines import user_place

_MOST_FACTORS = 8
_SAME = ("function", "is_leaf", "numel", "retain", "create", "scaled", "factor", "weight", "top", "touched_count",
         "kept_count")  # fmt: skip
"""The entries of a backward that are the same where it comes again."""


class _Begun(NamedTuple):
    """A backward that is about to run."""

    same: tuple[Any, ...]  # the entries that ``_SAME`` names, but for the last two
    scale: float | None  # of its loss, ``None`` for one that no ``GradScaler`` has scaled
    loss: torch.Tensor
    value: float | None  # of the loss, ``None`` where it has to be waited for, or where there is none

    def unscaled(self, value: float) -> float:
        """The value of the loss as it was before it was scaled."""
        return value if self.scale is None else value / self.scale if self.scale else value


_NONE = Came((), ())


class BackwardHooks:
    """Wraps the engine's entrance, which both ``backward`` and ``grad`` go through whatever name they are called by.

    Args:
        on_backward: is called after a backward has been recorded.
    """

    def __init__(
        self, recording: Recording, gradients: Gradients, samplers: Samplers, on_backward: Callable[[], None]
    ) -> None:
        self._recording, self._gradients, self._samplers = recording, gradients, samplers
        self._on_backward = on_backward
        self._is_weighted = False
        self.takes, self.gave = recording.guarded(self._takes), recording.guarded(self._gave)
        self._last: dict[tuple[str, int], Came] = {}
        self._weighed: list[Backward] = []  # of the gradient that is being taken

    def attach(self) -> None:
        """Puts the wrapper in place; ``Recording.patches`` takes it off."""
        seen = self._recording.around(self._before, self._after, "backward")
        self._recording.patches.wrap(torch.autograd, "_engine_run_backward", seen)

    def _takes(self) -> None:
        """Anybatch is about to put gradients aside, until ``gave``."""
        self._look_for_clearing()
        self._gradients.put_aside()

    def _gave(self, items: float) -> None:
        self._gradients.put_back()
        for fact in self._weighed:
            object.__setattr__(fact, "weight", fact.weight * items)
        self._weighed.clear()

    def _look_for_clearing(self) -> None:
        cleared, had = self._gradients.before_backward()
        if cleared:
            self._recording.emit(Cleared(by="hand", parameters=cleared, of=had))

    def _before(self, tensors: Any, args: Any, kwargs: Any) -> _Begun | None:
        if number_of_backward() >= 0 or in_transform():  # a reentrant checkpoint; what has no numbers
            return None
        recording, losses = self._recording, tensors
        if len(losses) != 1 or not isinstance(losses[0], torch.Tensor):
            losses = [one for one in tensors if isinstance(one, torch.Tensor)]
        if not losses or type(losses[0]).__name__ in NUMBERLESS:  # a compiler looks at the backward
            return None
        loss, into_grad = losses[0], bool(kwargs.get("accumulate_grad", True))
        scale = recording.scaled.taken(loss) if recording.scaled.pending else None
        top = "" if loss.grad_fn is None else loss.grad_fn.name()
        factor, top = factor_and_top(loss, scaled=scale is not None) if top in FACTORS else (1.0, top)
        retain, create = args[1:3] if len(args) > 2 else (False, False)
        numel = loss.numel()
        value = loss.item() if numel == 1 and loss.is_cpu and not loss.is_complex() else None
        is_one = not recording.sampled and not self._is_weighted  # as on all sampled steps so far
        given = args[0] if args and isinstance(args[0], (tuple, list)) else ()
        weight = 1.0 if is_one and not (given and hasattr(given[0], WEIGHT)) else self._given(given)
        same = (
            "backward" if into_grad else "grad", loss.is_leaf, numel, bool(retain), bool(create),
            scale is not None, factor * weight, weight, top if len(losses) == 1 else "",
        )  # fmt: skip
        if into_grad and (self._gradients.is_any or self._gradients.version != recording.numbering.version):
            self._look_for_clearing()
        if recording.looks or (value is not None and not math.isfinite(value)):
            self._samplers.before_backward(losses, weight, into_grad=into_grad, scaled=scale is not None)
        else:
            if into_grad and recording.counter.step % MARKED == 0:
                self._samplers.like_backward(loss)
            self._samplers.nonfinite.last = weakref.ref(loss), value
        return _Begun(same, scale, loss, value)

    def _given(self, given: Any) -> float:
        """The plain number that a scalar loss was given as its gradient; 1 where it would have to be waited for."""
        weight = getattr(given[0], WEIGHT, None) if given else None  # which anybatch gives it
        if weight is None:
            plain = [one for one in given if type(one) is torch.Tensor and one.numel() == 1 and not one.is_complex()]
            if not plain or len(plain) < len(given):
                return 1.0
            if any(one.is_meta or (one.device.type != "cpu" and not self._recording.sampled) for one in plain):
                return 1.0
            values = {float(item_of(one)) for one in plain}
            self._is_weighted = self._is_weighted or values != {1.0}
            return values.pop() if len(values) == 1 else 1.0
        self._is_weighted = self._is_weighted or weight != 1.0
        return float(weight)

    def _after(self, tensors: Any, begun: _Begun, _: Any) -> None:
        recording, place, same, gradients = self._recording, user_place(6), begun.same, self._gradients
        calls, value = tuple(recording.loss_calls), begun.value
        if calls:
            recording.loss_calls.clear()
        if value is not None and begun.scale is not None:
            value = begun.unscaled(value)
        came = gradients.after_backward() if same[0] == "backward" else _NONE
        is_as_last = came is _NONE or self._last.get(place) == came  # what was touched is read from the last one there
        all_same = *same, len(came.touched), len(came.kept)
        if is_as_last and not gradients.is_aside:
            noted = recording.note(Backward, all_same, (value, calls), _SAME, place=place)
        else:
            noted = self._anew(came, is_as_last, all_same, (value, calls), place)
        if value is None and begun.loss.numel() == 1 and not begun.loss.is_complex():
            recording.journal.later(noted, "value", begun.loss, begun.unscaled)
        if recording.looks:
            self._samplers.after_backward()
        if recording.counter.step == 0:
            self._on_backward()

    def _anew(
        self, came: Came, is_as_last: bool, same: tuple[Any, ...], values: tuple[Any, ...], place: tuple[str, int]
    ) -> Backward:  # fmt: skip
        """Emits a backward that has touched other parameters than the last one there, or may be weighed later."""
        fact = Backward(
            value=values[0], loss_calls=values[1], touched=None if is_as_last else came.touched,
            kept=None if is_as_last else came.kept, file=place[0], line=place[1],
            **dict(zip(_SAME, same, strict=True)),
        )  # fmt: skip
        if not is_as_last:
            self._last[place] = came
            self._samplers.had_gradient.update(came.touched)
        self._recording.emit(fact)
        if self._gradients.is_aside:
            self._weighed.append(fact)
        return fact


def factor_and_top(loss: torch.Tensor, *, scaled: bool) -> tuple[float, str]:
    """The product of the plain numbers at the top of the graph of a loss, and the kind of the node behind them."""
    node, factor = loss.grad_fn, 1.0
    for _ in range(_MOST_FACTORS):
        kind = "" if node is None else node.name()
        if kind not in FACTORS or node is None:
            return factor, kind
        number = _plain_factor(node, loss.dtype)
        if number is None and scaled:
            scaled = False  # the product with the scale, a tensor
        elif number is None:
            return factor, kind
        else:
            factor = factor * number if kind == "MulBackward0" else factor / number if number else factor
        node = next((after for after, _ in node.next_functions if after is not None), None)
    return factor, "" if node is None else node.name()


def _plain_factor(node: Any, dtype: torch.dtype) -> float | None:
    """The plain number that a product or quotient has on its right; a tensor of the loss's own kind is none."""
    following = node.next_functions
    if len(following) != 2 or following[0][0] is None or following[1][0] is not None:
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # freed by an earlier backward
        return None
    if other is None or other.dim() or other.device.type != "cpu":
        return None
    plain = other.dtype in (torch.float64, torch.int64) and not (
        other.dtype is dtype and other.dtype is not torch.float64
    )
    return float(item_of(other)) if plain else None
