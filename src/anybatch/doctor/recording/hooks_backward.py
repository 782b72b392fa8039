"""Sees every backward and every call of ``autograd.grad``."""

import math
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

import torch

from anybatch.doctor.recording.factors import FACTORS, factor_and_top
from anybatch.doctor.recording.gradients import Came, Gradients
from anybatch.doctor.recording.recordings import Recording, Seen
from anybatch.doctor.recording.samplers import MARKED, Samplers
from anybatch.interception import WEIGHT
from anybatch.records.events import Backward, Cleared
from anybatch.tensors.dispatch import NUMBERLESS, item_of
from anybatch.torch_private import in_transform, number_of_backward


class _Begun(NamedTuple):
    """A backward that is about to run and is like one before.

    Args:
        seen: the one before.
        value: of the loss, ``None`` where it has to be waited for.
        loss: it.
        unscale: what its value is multiplied by.
    """

    seen: Seen
    value: float | None
    loss: torch.Tensor
    unscale: float


class BackwardHooks:
    """Wraps the engine's entrance, which both ``backward`` and ``grad`` go through whatever name they are called by.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        samplers: are shown each loss.
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
        self._keys: dict[tuple[str, int], list[Any]] = {}

    def attach(self) -> None:
        """Puts the wrapper in place; ``Recording.patches`` takes it off."""
        recording, gradients = self._recording, self._gradients
        before, after = recording.guarded(self._before), recording.guarded(self._after)
        known, threads, counter, journal = recording.known, recording.threads, recording.counter, recording.journal
        like, calls, done = self._like, recording.loss_calls, gradients.done

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def run_backward(tensors: Any, /, *args: Any, **kwargs: Any) -> Any:
                if number_of_backward() >= 0 or in_transform():  # a reentrant checkpoint; what has no numbers
                    return original(tensors, *args, **kwargs)
                me = get_ident()
                was, is_other = threads.inside, threads.ident != me
                if is_other and not threads.admits("backward"):
                    return original(tensors, *args, **kwargs)
                threads.inside, known.key = True, None
                try:
                    begun = like(tensors, args, kwargs) if known.usable else None
                    if begun is not None:
                        result = original(tensors, *args, **kwargs)
                        counter.at = at = counter.at + 1
                        row = [begun.seen.fact, at, counter.step, begun.value, tuple(calls)]
                        journal.rows.append(row)
                        calls.clear()
                        known.state = begun.seen.state
                        done.append(begun.seen)
                        if begun.value is None:
                            journal.later(row, 3, begun.loss, lambda value: value * begun.unscale)
                        return result
                    key = known.take_key()
                    seen = before(tensors, args, kwargs)
                    result = original(tensors, *args, **kwargs)
                    if seen is not None:
                        after(seen, key)
                    return result
                finally:
                    if threads.ident == me:
                        threads.inside = was and not is_other

            return run_backward

        recording.patches.wrap(torch.autograd, "_engine_run_backward", wrapped)

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
            fact = Cleared(by="hand", parameters=cleared, of=had)
            self._recording.emit(fact)
            self._recording.known.passed(fact, cleared, had)

    def _like(self, tensors: Any, args: Any, kwargs: Any) -> _Begun | None:
        """Looks at a loss whose backward may be like one before; ``None`` where it is not."""
        recording = self._recording
        try:
            loss = tensors[0] if len(tensors) == 1 else None
            if type(loss) is not torch.Tensor or self._is_weighted or recording.counter.step == 0:
                return None
            given = args[0][0] if type(args[0]) is tuple and args[0] else None
            node = loss.grad_fn
            if given is None or getattr(given, WEIGHT, 1.0) != 1.0 or node is None:
                return None
            scale, factor, top = recording.scaled.scale_of(loss) if recording.scaled.pending else None, 1.0, node.name()
            if top in FACTORS:
                factor, top = factor_and_top(loss, scaled=scale is not None)
            into_grad, unscale, known = kwargs.get("accumulate_grad", True), 1.0, recording.known
            seen = known.find(("backward", top, factor, args[1:3], scale is not None, into_grad, known.state))
            if seen is None:
                return None
            value: Any
            last, version, value = recording.last_loss
            if last() is not loss or loss._version != version:
                if loss.numel() != 1 or loss.is_complex():
                    return None
                unscale = 1.0 if scale is None else 1.0 / scale if scale else 1.0
                value = item_of(loss) * unscale if loss.is_cpu else None
                if value is not None and not math.isfinite(value):
                    return None
            if scale is not None:
                recording.scaled.drop(loss)
            if into_grad and recording.counter.step % MARKED == 0:
                self._samplers.like_backward(loss)
            self._samplers.follow(loss, value)
            return _Begun(seen, value, loss, unscale)
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            recording.gave_up(error)
            return None

    def _before(self, tensors: Any, args: Any, kwargs: Any) -> Backward | None:
        losses = [one for one in tensors if isinstance(one, torch.Tensor)]
        if not losses or type(losses[0]).__name__ in NUMBERLESS:  # a compiler looks at the backward
            return None
        loss = losses[0]
        recording = self._recording
        retain, create = (*args[1:3], False, False)[:2]
        into_grad = bool(kwargs.get("accumulate_grad", True))
        scale = recording.scaled.scale_of(loss)
        recording.scaled.drop(loss)
        factor, top = factor_and_top(loss, scaled=scale is not None)
        weight = self._given(args)
        if len(losses) > 1:  # which of them is meant can't be said
            top = ""
        fact = Backward(
            function="backward" if into_grad else "grad", is_leaf=loss.grad_fn is None, numel=loss.numel(),
            retain=bool(retain), create=bool(create), scaled=scale is not None, factor=factor * weight,
            weight=weight, top=top, **recording.place(),
        )  # fmt: skip
        if into_grad:
            self._look_for_clearing()
        if loss.numel() == 1 and not loss.is_complex():
            unscale = 1.0 if scale is None else 1.0 / scale if scale else 1.0
            recording.journal.later(fact, "value", loss, lambda value: value * unscale)
        self._samplers.before_backward(losses, into_grad=into_grad, scaled=scale is not None)
        return fact

    @staticmethod
    def _announced(args: Any) -> float | None:
        """The weight that anybatch gives a loss; ``None`` where it is not anybatch that differentiates."""
        given = args[0] if args else None
        return getattr(given[0], WEIGHT, None) if isinstance(given, (tuple, list)) and given else None

    def _given(self, args: Any) -> float:
        """The plain number that a scalar loss was given as its gradient; 1 where it would have to be waited for."""
        weight = self._announced(args)
        if weight is not None:
            self._is_weighted = self._is_weighted or weight != 1.0
            return weight
        if not self._recording.sampled and not self._is_weighted:
            return 1.0  # as on all sampled steps so far
        given = list(args[0]) if args and isinstance(args[0], (tuple, list)) else []
        plain = [one for one in given if type(one) is torch.Tensor and one.numel() == 1 and not one.is_complex()]
        if not plain or len(plain) < len(given):
            return 1.0
        if any(one.is_meta or (one.device.type != "cpu" and not self._recording.sampled) for one in plain):
            return 1.0
        values = {float(one.detach()) for one in plain}
        self._is_weighted = self._is_weighted or values != {1.0}
        return values.pop() if len(values) == 1 else 1.0

    def _after(self, fact: Backward, key: Any) -> None:
        recording, known, numbering = self._recording, self._recording.known, self._recording.numbering
        object.__setattr__(fact, "loss_calls", tuple(recording.loss_calls))
        recording.loss_calls.clear()
        if fact.function == "backward":
            self._fill(fact, self._gradients.after_backward())
        recording.emit(fact)
        if self._gradients.is_aside:
            self._weighed.append(fact)
        key = None if self._gradients.is_aside else key
        touched = self._last[fact.file, fact.line].touched if fact.function == "backward" else ()
        known.passed(fact, fact.touched_count, fact.kept_count, numbering.version, key=key, parameters=touched)
        if key is not None:
            self._keys.setdefault((fact.file, fact.line), []).append(key)
        self._samplers.after_backward()
        self._on_backward()

    def _fill(self, fact: Backward, came: Came) -> None:
        """Says what was touched, by number where it is not what the last backward from the same line has touched."""
        place = fact.file, fact.line
        object.__setattr__(fact, "touched_count", len(came.touched))
        object.__setattr__(fact, "kept_count", len(came.kept))
        if self._last.get(place) != came:
            self._last[place] = came
            for key in self._keys.pop(place, ()):  # a repetition is read with what was touched before it from its line
                self._recording.known.forget(key)
            self._samplers.had_gradient.update(came.touched)
            object.__setattr__(fact, "touched", came.touched)
            object.__setattr__(fact, "kept", came.kept)
