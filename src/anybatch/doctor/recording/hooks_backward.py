"""Sees every backward and every call of ``autograd.grad``."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from anybatch.doctor.interruptions import is_interruption
from anybatch.doctor.recording.factors import FACTORS, factor_and_top
from anybatch.doctor.recording.gradients import Came, Gradients
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.recording.samplers import MARKED, Samplers
from anybatch.interception import WEIGHT
from anybatch.records.events import Backward, Cleared
from anybatch.tensors.dispatch import NUMBERLESS, item_of
from anybatch.torch_private import in_transform, number_of_backward

Numbers = tuple[int, ...]


class _Like:
    """A backward that is like one before as far as it was seen.

    Args:
        template: the one before.
        came: what that did to the gradients.
        value: of this loss, ``None`` where it has to be waited for.
        site: the code that calls it, by ``id``, and the place in it.
    """

    __slots__ = ("came", "row", "site", "template")

    def __init__(self, template: Backward, came: Came | None, value: float | None, site: tuple[int, int]) -> None:
        self.template, self.came, self.site = template, came, site
        self.row: list[Any] = [template, 0, 0, value, ()]

    def whole(self) -> Backward:
        """The fact itself, where it turns out to differ."""
        return dataclasses.replace(
            self.template, value=self.row[3], touched=None, kept=None, touched_count=0, kept_count=0
        )


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
        self.takes, self.gave = recording.guarded(self._takes), recording.guarded(self._gave)
        self._last: dict[tuple[str, int], tuple[Numbers, Numbers]] = {}
        self._weighed: list[Backward] = []  # of the gradient that is being taken
        self._few: dict[tuple[str, int], tuple[Numbers, tuple[Numbers, Numbers]]] = {}

    def attach(self) -> None:
        """Puts the wrapper in place; ``Recording.patches`` takes it off."""
        before, after = self._recording.guarded(self._before), self._recording.guarded(self._after)
        templates, quick, quick_after = self._recording.templates, self._quick, self._quick_after
        cycle, counter = self._recording.cycle, self._recording.counter
        follow, threads = self._recording.guarded(self._samplers.follow_backward), self._recording.threads

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def run_backward(tensors: Any, /, *args: Any, **kwargs: Any) -> Any:
                if cycle.trusts and cycle.trusts_backward(tensors, args, kwargs):
                    threads.inside = True
                    try:
                        return original(tensors, *args, **kwargs)
                    finally:
                        threads.inside = False
                if number_of_backward() >= 0 or in_transform():  # a reentrant checkpoint; what has no numbers
                    return original(tensors, *args, **kwargs)
                me = get_ident()
                was, is_other = threads.inside, threads.ident != me
                if is_other and not threads.admits("backward"):
                    return original(tensors, *args, **kwargs)
                threads.inside = True
                try:
                    if cycle.on and cycle.backward(tensors, args, kwargs):
                        if counter.step % MARKED == 0:
                            follow(tensors[0], counter.step, max(MARKED, cycle.stands_for))
                        return original(tensors, *args, **kwargs)
                    like = quick(tensors, args, kwargs) if templates.usable else None
                    if type(like) is _Like:
                        result = original(tensors, *args, **kwargs)
                        if not quick_after(like):
                            after(like.whole(), like.came)
                        return result
                    seen = before(tensors, args, kwargs)
                    result = original(tensors, *args, **kwargs)
                    if seen is not None:
                        after(seen, None, like)
                    return result
                finally:
                    if threads.ident == me:
                        threads.inside = was and not is_other

            return run_backward

        self._recording.patches.wrap(torch.autograd, "_engine_run_backward", wrapped)

    def _takes(self) -> None:
        """Anybatch is about to put gradients aside, until ``gave``; where steps are all alike nobody looks at them."""
        if not self._recording.cycle.on:
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

    def _quick(self, tensors: Any, args: Any, kwargs: Any) -> Any:
        """Looks at a loss whose backward is like one before; otherwise what makes another one like it, or ``None``."""
        recording, clock = self._recording, time.perf_counter
        templates = recording.templates
        if not templates.lock.acquire(blocking=False):
            return None
        started = clock()
        try:
            loss = tensors[0] if len(tensors) == 1 else None
            if type(loss) is not torch.Tensor or self._is_weighted or self._announced(args) not in (None, 1.0):
                return None
            node = loss.grad_fn
            if node is None or loss.numel() != 1 or loss.is_complex():
                return None
            top = node.name()
            scale = recording.scaled.scale_of(loss) if recording.scaled else None
            factor, top = factor_and_top(loss, scaled=scale is not None) if top in FACTORS else (1.0, top)
            into_grad = bool(kwargs.get("accumulate_grad", True))
            for _ in range(2):
                frame = sys._getframe(templates.depths.get("backward", 0))
                key = id(frame.f_code), frame.f_lasti, top, factor, args[1:3], into_grad, scale is not None
                known = templates.known.get(key)
                if known is not None:
                    return self._begun_like(loss, known, key[:2], scale, into_grad=into_grad)
                if not templates.look_for_site("backward", 1):
                    break
            return key if "backward" in templates.depths else None
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            templates.given_up(error)
            return None
        finally:
            templates.seconds += clock() - started
            templates.lock.release()

    def _begun_like(
        self, loss: torch.Tensor, known: Any, site: Any, scale: float | None, *, into_grad: bool
    ) -> "_Like | None":
        template, came, last = known
        if self._last.get((template.file, template.line)) is not last:
            return None
        value, unscale = self._samplers.known_value(loss), 1.0 if scale is None else 1.0 / scale if scale else 1.0
        if value is None and loss.is_cpu:
            value = item_of(loss) * unscale
            if not math.isfinite(value):
                return None
        like = _Like(template, came, value, site)
        if value is None:
            self._recording.journal.later(like.row, 3, loss, lambda number: number * unscale)
        if scale is not None:
            self._recording.scaled.drop(loss)
        if into_grad:
            self._look_for_clearing()
        self._samplers.like_backward(loss, value, into_grad=into_grad)
        return like

    def _quick_after(self, like: "_Like") -> bool:
        """Records a backward, if it did what the one before did."""
        if not self._recording.threads.acquires():  # the beginning was noted, so this is not left out
            return True
        started = time.perf_counter()
        try:
            if like.template.function == "backward":
                came = self._gradients.after_backward()
                if came != like.came:
                    like.came = came
                    return False
            row, counter = like.row, self._recording.counter
            row[4] = self._samplers.loss_calls()
            counter.at = row[1] = counter.at + 1
            row[2] = counter.step
            self._recording.journal.rows.append(row)
            self._recording.cycle.seen.append(("backward", *like.site))
            self._on_backward()
            return True
        except BaseException as error:  # the user's run goes on, whatever happens in here
            self._recording.failed(error)
            if is_interruption(error):
                raise
            return True
        finally:
            self._recording.templates.seconds += time.perf_counter() - started
            self._recording.templates.lock.release()

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

    def _after(self, fact: Backward, came: Came | None = None, key: Any = None) -> None:
        object.__setattr__(fact, "loss_calls", self._samplers.loss_calls())
        if fact.function == "backward":
            came = self._gradients.after_backward() if came is None else came
            self._fill(fact, came)
        self._recording.emit(fact)
        if self._gradients.is_aside:
            self._weighed.append(fact)
        if key is not None and fact.factor == key[3] and fact.top == key[2] and not self.unsure:
            self._recording.templates.learn(key, (fact, came, self._last.get((fact.file, fact.line))))
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
            self._recording.templates.usable = False
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
