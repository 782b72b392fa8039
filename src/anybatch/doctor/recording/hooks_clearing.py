"""Sees the clearing of gradients by ``zero_grad``."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
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
        recording, gradients = self._recording, self._gradients
        known, threads, counter, rows = recording.known, recording.threads, recording.counter, recording.journal.rows
        done, find = gradients.done, known.find
        catch_up = recording.guarded(gradients.catch_up)

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
                me = get_ident()
                was, is_other = threads.inside, threads.ident != me
                if is_other and not threads.admits("updates", owner):
                    return original(owner, *args, **kwargs)
                threads.inside = True
                try:
                    seen = find((by, id(owner), known.state)) if known.usable else None
                    if seen is not None and seen.owner() is owner:
                        result = original(owner, *args, **kwargs)
                        counter.at = at = counter.at + 1
                        rows.append([seen.fact, at, counter.step])
                        known.state = seen.state
                        done.append(seen)
                        return result
                    key = known.take_key()
                    catch_up()
                    result = original(owner, *args, **kwargs)
                    was_cleared(owner, by, key)
                    return result
                finally:
                    if threads.ident == me:
                        threads.inside = was and not is_other

            return zero_grad

        return wrapped

    def _was_cleared(self, owner: Any, by: str, key: Any) -> None:
        cleared, had = self._gradients.after_clearing()
        numbering = self._recording.numbering
        if by == "optimizer":
            number = numbering.known_optimizer(owner)
            number = self._optimizers.numbered(owner) if number < 0 else number
        else:
            found = numbering.root_of(owner)
            number = -1 if found is None else found
        fact = Cleared(by=by, number=number, parameters=cleared, of=had, **self._recording.place())
        self._recording.emit(fact)
        self._recording.known.passed(
            fact, by, number, cleared, had, key=key if cleared == had else None, owner=owner,
            parameters=self._parameters_of(owner) if key is not None else (),
        )  # fmt: skip

    def _parameters_of(self, owner: Any) -> frozenset[int]:
        """The parameters of an optimizer or a module, by number."""
        groups = getattr(owner, "param_groups", None)
        own = owner.parameters() if groups is None else (one for group in groups for one in group["params"])
        found = map(self._recording.numbering.known, own)
        return frozenset(number for number in found if number is not None)
