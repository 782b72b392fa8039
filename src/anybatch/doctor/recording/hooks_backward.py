"""Sees every backward and every call of ``autograd.grad``."""

from collections.abc import Callable
from typing import Any

import torch

from anybatch.doctor.recording.gradients import Came, Gradients
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.recording.samplers import Samplers
from anybatch.records.events import Backward, Cleared
from anybatch.tensors.graph import in_backward

Numbers = tuple[int, ...]

_MOST_FACTORS = 8
_TRACED = frozenset({"FakeTensor", "FunctionalTensor"})


class BackwardHooks:
    """Wraps the engine's entrance, which both ``backward`` and ``grad`` go through whatever name they are called by.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        samplers: are shown each loss.
        on_backward: is called after a backward has been recorded.

    Attributes:
        unsure: whether the few gradients that were looked at differ from before, so that all have to be looked at.
    """

    def __init__(
        self, recording: Recording, gradients: Gradients, samplers: Samplers, on_backward: Callable[[], None]
    ) -> None:
        self._recording, self._gradients, self._samplers = recording, gradients, samplers
        self._on_backward = on_backward
        self.unsure = self._is_weighted = False
        self._last: dict[tuple[str, int], tuple[Numbers, Numbers]] = {}
        self._few: dict[tuple[str, int], tuple[Numbers, tuple[Numbers, Numbers]]] = {}

    def attach(self) -> None:
        """Puts the wrapper in place; ``Recording.patches`` takes it off."""
        before, after = self._recording.guarded(self._before), self._recording.guarded(self._after)

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                if in_backward():  # a reentrant checkpoint
                    return original(tensors, *args, **kwargs)
                seen = before(tensors, args, kwargs)
                result = original(tensors, *args, **kwargs)
                if seen is not None:
                    after(seen)
                return result

            return run_backward

        self._recording.patches.wrap(torch.autograd, "_engine_run_backward", wrapped)

    def _before(self, tensors: Any, args: Any, kwargs: Any) -> Backward | None:
        losses = [one for one in tensors if isinstance(one, torch.Tensor)]
        if not losses or type(losses[0]).__name__ in _TRACED:  # a compiler looks at the backward
            return None
        loss = losses[0]
        recording = self._recording
        retain, create = (*args[1:3], False, False)[:2]
        into_grad = bool(kwargs.get("accumulate_grad", True))
        scale = recording.scale_of_loss(loss)
        factor, top = _top(loss, scaled=scale is not None)
        factor *= self._given(args)
        if len(losses) > 1:  # which of them is meant can't be said
            top = ""
        fact = Backward(
            function="backward" if into_grad else "grad", is_leaf=loss.grad_fn is None, numel=loss.numel(),
            retain=bool(retain), create=bool(create), scaled=scale is not None, factor=factor, top=top,
            **recording.place(),
        )  # fmt: skip
        if into_grad:
            cleared, had = self._gradients.before_backward()
            if cleared:
                recording.emit(Cleared(by="hand", parameters=cleared, of=had))
        if loss.numel() == 1 and not loss.is_complex():
            unscale = 1.0 if scale is None else 1.0 / scale if scale else 1.0
            recording.journal.later(fact, "value", loss, lambda value: value * unscale)
        self._samplers.before_backward(losses, into_grad=into_grad, scaled=scale is not None)
        return fact

    def _given(self, args: Any) -> float:
        """The plain number that a scalar loss was given as its gradient; 1 where it would have to be waited for."""
        if not self._recording.sampled and not self._is_weighted:
            return 1.0  # as on all sampled steps so far
        given = list(args[0]) if args and isinstance(args[0], (tuple, list)) else []
        plain = [one for one in given if isinstance(one, torch.Tensor) and one.numel() == 1 and not one.is_complex()]
        if not plain or len(plain) < len(given):
            return 1.0
        if any(one.device.type != "cpu" for one in plain) and not self._recording.sampled:
            return 1.0
        values = {float(one.detach()) for one in plain}
        self._is_weighted = self._is_weighted or values != {1.0}
        return values.pop() if len(values) == 1 else 1.0

    def _after(self, fact: Backward) -> None:
        object.__setattr__(fact, "loss_calls", self._samplers.loss_calls())
        if fact.function == "backward":
            self._fill(fact, self._gradients.after_backward())
        self._recording.emit(fact)
        self._samplers.after_backward()
        self._on_backward()

    def _fill(self, fact: Backward, came: Came) -> None:
        """Says what was touched; where only a few were looked at that did as before, the rest is taken to have too."""
        place = fact.file, fact.line
        known = self._last.get(place)
        touched, kept = came.touched, came.kept
        if not came.whole and known is not None and (touched, kept) == self._expected(place, known):
            touched, kept = known
        if not came.whole and (touched, kept) != known:
            self.unsure = True
            if known is not None:
                touched, kept = known
        object.__setattr__(fact, "touched_count", len(touched))
        object.__setattr__(fact, "kept_count", len(kept))
        if known is None or known[0] is not touched:
            if known == (touched, kept):
                return
            self._last[place] = touched, kept
            self._few.pop(place, None)
            self._samplers.had_gradient.update(touched)
            object.__setattr__(fact, "touched", touched)
            object.__setattr__(fact, "kept", kept)

    def _expected(self, place: tuple[str, int], known: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
        """What the few that are looked at had at the last backward from the same line."""
        numbers = self._gradients.numbers
        found = self._few.get(place)
        if found is None or found[0] is not numbers:
            few = set(numbers)
            found = self._few[place] = numbers, (_among(known[0], few), _among(known[1], few))
        return found[1]


def _among(numbers: tuple[int, ...], few: set[int]) -> tuple[int, ...]:
    return tuple([number for number in numbers if number in few])


def _top(loss: torch.Tensor, *, scaled: bool) -> tuple[float, str]:
    """The product of the plain numbers at the top of the graph of a loss, and the kind of the node behind them."""
    node, factor = loss.grad_fn, 1.0
    for _ in range(_MOST_FACTORS):
        kind = "" if node is None else node.name()
        if kind not in ("MulBackward0", "DivBackward0") or node is None:
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
    return float(other) if plain else None
