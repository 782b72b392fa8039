"""Sees gradient scalers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.values import tensors_in
from anybatch.records.events import Scaler
from anybatch.tensors.dispatch import item_of


class _Begun(NamedTuple):
    """A call that has begun."""

    optimizer: Any  # that it was given
    number: int  # of the optimizer, -1 without one
    scale: float  # before the call
    steps: int  # of the optimizer so far


class ScalingHooks:
    """Wraps ``GradScaler``."""

    def __init__(self, recording: Recording, gradients: Gradients, optimizers: OptimizerHooks) -> None:
        self._recording, self._gradients, self._optimizers = recording, gradients, optimizers
        self._losses = recording.scaled
        # the optimizers whose gradients were unscaled since the last ``update``, by ``id``
        self.unscaled: set[int] = set()

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        recording = self._recording

        def seen(before: Callable[..., Any] | None, after: Callable[..., Any]) -> Callable[[Any], Any]:
            return recording.around(
                before, after, "updates", when=lambda scaler, _: scaler.is_enabled(), outermost=recording.in_scaler
            )

        recording.patches.wrap(torch.amp.GradScaler, "scale", seen(None, self._was_scaled))
        for call in ("unscale_", "step", "update"):
            recording.patches.wrap(
                torch.amp.GradScaler, call, seen(partial(self._begins, call), partial(self._ended, call))
            )

    def _was_scaled(self, scaler: Any, _: Any, result: Any) -> None:
        losses = self._losses
        if not losses.pending:
            losses.pending = True
            self.unscaled.clear()
        for loss in tensors_in(result):
            losses.add(loss)
        self._read_scale(scaler)

    def _read_scale(self, scaler: Any) -> None:
        """Reads the scale where nothing has to be waited for: on a CPU always, else on sampled steps."""
        scale = getattr(scaler, "_scale", None)
        if scale is None:
            self._losses.scale = float(getattr(scaler, "_init_scale", 1.0))
        elif scale.is_cpu or self._recording.sampled:
            self._losses.scale = float(item_of(scale))

    def _begins(self, call: str, scaler: Any, args: Any, kwargs: Any) -> _Begun:
        optimizer = args[0] if args and call != "update" else None
        number = -1 if optimizer is None else self._optimizers.numbered(optimizer)
        self._read_scale(scaler)
        return _Begun(optimizer, number, self._losses.scale, self._optimizers.counts.get(number, 0))

    def _ended(self, call: str, scaler: Any, begun: _Begun, _: Any) -> None:
        recording, losses = self._recording, self._losses
        skipped: torch.Tensor | bool = False
        if call == "unscale_":
            self.unscaled.add(id(begun.optimizer))
            self._gradients.changed_on_purpose()
        elif call == "update":
            losses.updated()
            self.unscaled.clear()
            self._read_scale(scaler)
        else:
            skipped = self._optimizers.counts.get(begun.number, 0) == begun.steps or _overflow(scaler, begun)
        values = begun.scale, losses.scale, skipped is True
        noted = recording.note(Scaler, (call, begun.number), values, ("call", "optimizer"))
        if isinstance(skipped, torch.Tensor):
            recording.journal.later(noted, "skipped", skipped, bool)


def _overflow(scaler: Any, begun: _Begun) -> torch.Tensor | bool:
    """A tensor that says whether a step that ran has changed nothing, as one that is given the scale itself can."""
    if not getattr(begun.optimizer, "_step_supports_amp_scaling", False):
        return False
    states = getattr(scaler, "_per_optimizer_states", {})
    found = list(states.get(id(begun.optimizer), {}).get("found_inf_per_device", {}).values())
    if not found:
        return False
    first: torch.Tensor = found[0]
    return first if len(found) == 1 else torch.stack([one.to(first.device) for one in found]).sum()
