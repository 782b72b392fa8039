"""Sees the clearing of gradients by ``zero_grad``."""

from typing import Any

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.naming import user_place
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
        recording = self._recording
        for owner, after in ((torch.optim.Optimizer, self._by_optimizer), (torch.nn.Module, self._by_module)):
            recording.patches.wrap(owner, "zero_grad", recording.around(None, after, "updates", owned=True))

    def _by_optimizer(self, optimizer: Any, _: Any) -> None:
        number = self._recording.numbering.known_optimizer(optimizer)
        self._was_cleared("optimizer", number if number >= 0 else self._optimizers.numbered(optimizer))

    def _by_module(self, module: torch.nn.Module, _: Any) -> None:
        number = self._recording.numbering.root_of(module)
        self._was_cleared("module", -1 if number is None else number)

    def _was_cleared(self, by: str, number: int) -> None:
        cleared, had = self._gradients.after_clearing()
        place = user_place(6)
        key = "cleared", by, number, cleared, had, place
        if self._recording.again(key) is None:
            fact = Cleared(by=by, number=number, parameters=cleared, of=had, file=place[0], line=place[1])
            self._recording.learn(key, fact)
