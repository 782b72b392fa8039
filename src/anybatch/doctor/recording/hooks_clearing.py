"""Sees the clearing of gradients by ``zero_grad``."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.events import Cleared

_DONE: Any = object()


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
        known, threads, again = self._recording.known, self._recording.threads, self._again

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
                me = get_ident()
                was, is_other = threads.inside, threads.ident != me
                if is_other and not threads.admits("updates", owner):
                    return original(owner, *args, **kwargs)
                threads.inside = True
                try:
                    result = original(owner, *args, **kwargs)
                    counts = again(owner, by) if known.usable else None
                    if counts is not _DONE:
                        was_cleared(owner, by, counts)
                    return result
                finally:
                    if threads.ident == me:
                        threads.inside = was and not is_other

            return zero_grad

        return wrapped

    def _again(self, owner: Any, by: str) -> Any:
        """Records a clearing that is like one before; otherwise what it did, ``None`` where nobody has looked."""
        counts, recording = None, self._recording
        if not recording.lock.acquire(blocking=False):
            return None
        try:
            recording.known.key = None
            if by == "optimizer" and not self._optimizers.is_known(owner):
                return None
            counts = self._gradients.after_clearing()
            return counts if recording.known.again((by, id(owner), counts)) is None else _DONE
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            recording.gave_up(error)
            return counts  # it is not cleared a second time
        finally:
            recording.lock.release()

    def _was_cleared(self, owner: Any, by: str, counts: tuple[int, int] | None = None) -> None:
        cleared, had = counts or self._gradients.after_clearing()
        numbering = self._recording.numbering
        if by == "optimizer":
            number = numbering.known_optimizer(owner)
            number = self._optimizers.numbered(owner) if number < 0 else number
        else:
            found = numbering.root_of(owner)
            number = -1 if found is None else found
        fact = Cleared(by=by, number=number, parameters=cleared, of=had, **self._recording.place())
        self._recording.emit(fact)
        if counts is not None:
            self._recording.known.learn(fact, by)
