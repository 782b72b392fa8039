"""Sees the clearing of gradients by ``zero_grad``."""

from typing import Any

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.events import Cleared

_SAME = ("by", "number", "parameters", "of")


class ClearingHooks:
    """Wraps ``zero_grad`` of optimizers and modules."""

    def __init__(self, recording: Recording, gradients: Gradients, optimizers: OptimizerHooks) -> None:
        self._recording, self._gradients, self._optimizers = recording, gradients, optimizers

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        recording = self._recording
        for owner, after in ((torch.optim.Optimizer, self._by_optimizer), (torch.nn.Module, self._by_module)):
            recording.patches.wrap(owner, "zero_grad", recording.around(None, after, "updates", owned=True))

    def _by_optimizer(self, optimizer: Any, *_: Any) -> None:
        known = self._optimizers.known.get(id(optimizer))
        is_known = known is not None and known.optimizer() is optimizer
        number = known.number if known is not None and is_known else self._optimizers.numbered(optimizer)
        same = "optimizer", number, *self._gradients.after_clearing()
        self._recording.note(Cleared, same, entries=_SAME)

    def _by_module(self, module: torch.nn.Module, *_: Any) -> None:
        number = self._recording.numbering.root_of(module)
        same = "module", -1 if number is None else number, *self._gradients.after_clearing()
        self._recording.note(Cleared, same, entries=_SAME)
