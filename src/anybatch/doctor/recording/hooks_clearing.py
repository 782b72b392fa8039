"""Sees the clearing of gradients by ``zero_grad``."""

import sys
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.recording.trusting import CLEARED
from anybatch.records.events import Cleared


class ClearingHooks:
    """Wraps ``zero_grad`` of optimizers and modules.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        optimizers: number those that clear before they have stepped.
    """

    def __init__(self, recording: Recording, gradients: Gradients, optimizers: OptimizerHooks) -> None:
        self._recording, self._gradients, self._optimizers = recording, gradients, optimizers

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        was_cleared = self._recording.guarded(self._was_cleared)
        for owner, by in ((torch.optim.Optimizer, "optimizer"), (torch.nn.Module, "module")):
            self._recording.patches.wrap(owner, "zero_grad", self._clearing(was_cleared, by))

    def _clearing(self, was_cleared: Callable[..., Any], by: str) -> Callable[..., Any]:
        templates, quick = self._recording.templates, self._quickly_cleared()
        cycle, threads = self._recording.cycle, self._recording.threads

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
                if cycle.trusts and cycle.calls == cycle.cleared_after and threads.ident == get_ident():
                    cycle.calls |= CLEARED
                    return original(owner, *args, **kwargs)
                me = get_ident()
                was, is_other = threads.inside, threads.ident != me
                if is_other and not threads.admits("updates", owner):
                    return original(owner, *args, **kwargs)
                threads.inside = True
                try:
                    if cycle.on and cycle.cleared(owner):
                        return original(owner, *args, **kwargs)
                    result = original(owner, *args, **kwargs)
                    seen = quick(owner, by) if templates.usable else None
                    if seen is None or not seen[2]:
                        was_cleared(owner, by, seen)
                    return result
                finally:
                    if threads.ident == me:
                        threads.inside = was and not is_other

            return zero_grad

        return wrapped

    def _quickly_cleared(self) -> Callable[[Any, str], "tuple[Any, tuple[int, int], bool] | None"]:
        """What records a clearing that is like one before.

        It gives what makes another one like it, what it did, and whether it was; ``None`` where it has not looked.
        """
        recording, clock, frame_at = self._recording, time.perf_counter, sys._getframe
        templates, counter, keep = recording.templates, recording.counter, recording.journal.rows.append
        template_of, depths, lock = templates.known.get, templates.depths, templates.lock
        look, known_optimizer = self._gradients.after_clearing, recording.numbering.known_optimizer
        seen = recording.cycle.seen.append

        def quick(owner: Any, by: str) -> tuple[Any, tuple[int, int], bool] | None:
            if not lock.acquire(blocking=False):
                return None
            started, counts = clock(), None
            try:
                if by == "optimizer" and known_optimizer(owner) < 0:
                    return None
                counts = look()
                for again in (True, False):
                    frame = frame_at(depths[by]) if by in depths else frame_at()
                    key = id(frame.f_code), frame.f_lasti, by, id(owner), counts
                    template = template_of(key)
                    if template is not None:
                        counter.at = at = counter.at + 1
                        keep([template, at, counter.step])
                        seen((weakref.ref(owner), key[0], key[1]))
                        return key, counts, True
                    if not (again and templates.look_for_site(by, 1)):
                        break
                return key if by in depths else None, counts, False
            except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
                templates.given_up(error)
                return None if counts is None else (None, counts, False)  # it is not cleared a second time
            finally:
                templates.seconds += clock() - started
                lock.release()

        return quick

    def _was_cleared(self, owner: Any, by: str, seen: tuple[Any, tuple[int, int], bool] | None = None) -> None:
        cleared, had = self._gradients.after_clearing() if seen is None else seen[1]
        numbering = self._recording.numbering
        if by == "optimizer":
            number = numbering.known_optimizer(owner)
            number = self._optimizers.numbered(owner) if number < 0 else number
        else:
            found = numbering.root_of(owner)
            number = -1 if found is None else found
        fact = Cleared(by=by, number=number, parameters=cleared, of=had, **self._recording.place())
        self._recording.emit(fact)
        if seen is not None:
            self._recording.templates.learn(seen[0], fact)
