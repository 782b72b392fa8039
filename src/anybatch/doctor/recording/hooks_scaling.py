"""Sees gradient scalers."""

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any, NamedTuple

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.naming import user_place
from anybatch.doctor.recording.patches import hidden
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.events import Scaler
from anybatch.tensors.dispatch import item_of


class _Begun(NamedTuple):
    """A call that has begun.

    Args:
        optimizer: that it was given.
        number: of the optimizer, -1 without one.
        scale: before the call.
        steps: of the optimizer so far.
    """

    optimizer: Any
    number: int
    scale: float
    steps: int


class ScalingHooks:
    """Wraps ``GradScaler``.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        optimizers: knows their numbers and steps.

    Attributes:
        unscaled: the optimizers whose gradients were unscaled since the last ``update``, by ``id``.
    """

    def __init__(self, recording: Recording, gradients: Gradients, optimizers: OptimizerHooks) -> None:
        self._recording, self._gradients, self._optimizers = recording, gradients, optimizers
        self._losses = recording.scaled
        self.unscaled: set[int] = set()
        self._inside = 0

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        patches = self._recording.patches
        patches.wrap(torch.amp.GradScaler, "scale", self._scaling())
        for call in ("unscale_", "step", "update"):
            patches.wrap(torch.amp.GradScaler, call, self._around(call))

    def _scaling(self) -> Callable[..., Any]:
        threads, was_scaled = self._recording.threads, self._recording.guarded(self._was_scaled)

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def scale(scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
                result = original(scaler, *args, **kwargs)
                is_seen = scaler.is_enabled() and not self._inside
                if is_seen and (threads.ident == get_ident() or threads.admits("updates")):
                    was_scaled(scaler, result)
                return result

            return scale

        return wrapped

    def _around(self, call: str) -> Callable[..., Any]:
        recording = self._recording

        def before(scaler: Any, args: Any, kwargs: Any) -> _Begun:
            return self._begins(scaler, args[0] if args and call != "update" else None)

        noted = recording.around(before, lambda scaler, begun: self._ended(scaler, call, begun), "updates")

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def within(scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
                self._inside += 1
                recording.in_scaler = call == "step"
                try:
                    return original(scaler, *args, **kwargs)
                finally:
                    self._inside -= 1
                    recording.in_scaler = False

            call_noted = noted(hidden(within))

            def scaler_call(scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
                if not scaler.is_enabled() or self._inside:
                    return original(scaler, *args, **kwargs)
                return call_noted(scaler, *args, **kwargs)

            return scaler_call

        return wrapped

    def _was_scaled(self, scaler: Any, result: Any) -> None:
        losses = self._losses
        if not losses.pending:
            losses.pending = True
            self.unscaled.clear()
        for loss in [result] if isinstance(result, torch.Tensor) else _tensors(result):
            losses.add(loss)
        self._read_scale(scaler)

    def _read_scale(self, scaler: Any) -> None:
        """Reads the scale where nothing has to be waited for: on a CPU always, else on sampled steps."""
        scale = getattr(scaler, "_scale", None)
        if scale is None:
            self._losses.scale = float(getattr(scaler, "_init_scale", 1.0))
        elif scale.is_cpu or self._recording.sampled:
            self._losses.scale = float(item_of(scale))

    def _begins(self, scaler: Any, optimizer: Any) -> _Begun:
        number = -1 if optimizer is None else self._optimizers.numbered(optimizer)
        self._read_scale(scaler)
        return _Begun(optimizer, number, self._losses.scale, self._optimizers.counts.get(number, 0))

    def _ended(self, scaler: Any, call: str, begun: _Begun) -> None:
        recording, losses, place = self._recording, self._losses, user_place(2)
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
        waits = isinstance(skipped, torch.Tensor)
        values = begun.scale, losses.scale, skipped is True
        key = "scaler", call, begun.number, place
        noted: Any = recording.again(key, *values[:2], None if waits else values[2])
        if noted is None:
            fact = Scaler(
                call=call, optimizer=begun.number, scale=values[0], after=values[1], skipped=values[2], file=place[0],
                line=place[1],
            )  # fmt: skip
            noted = recording.learn(key, fact)
        if isinstance(skipped, torch.Tensor):
            recording.journal.later(noted, 5 if isinstance(noted, list) else "skipped", skipped, bool)


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


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return [one for one in values if isinstance(one, torch.Tensor)] if isinstance(values, (list, tuple)) else []
