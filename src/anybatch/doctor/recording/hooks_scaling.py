"""Sees gradient scalers."""

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.events import Scaler

_MOST_LOSSES = 64


class ScalingHooks:
    """Wraps ``GradScaler``.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        optimizers: knows their numbers and steps.

    Attributes:
        pending: whether a loss was scaled since the last ``update``.
        unscaled: the optimizers whose gradients were unscaled since, by ``id``.
        scale: when it was last read.
    """

    def __init__(self, recording: Recording, gradients: Gradients, optimizers: OptimizerHooks) -> None:
        self._recording, self._gradients, self._optimizers = recording, gradients, optimizers
        self._scaled = recording.scaled
        self.pending = False
        self.unscaled: set[int] = set()
        self.scale = 1.0
        self._inside = 0
        recording.scale_of_loss = self._scale_of

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        patches, guarded = self._recording.patches, self._recording.guarded
        scaler = torch.amp.GradScaler
        patches.wrap(scaler, "scale", self._around(lambda owner, args, kwargs: None, guarded(self._was_scaled)))
        for call in ("unscale_", "step", "update"):
            patches.wrap(scaler, call, self._around(guarded(self._begins), guarded(self._ended), call))

    def _around(self, before: Callable[..., Any], after: Callable[..., Any], call: str = "") -> Callable[..., Any]:
        threads = self._recording.threads

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def scaler_call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                if not scaler.is_enabled() or self._inside:
                    return original(scaler, *args, **kwargs)
                if threads.ident != get_ident() and not threads.admits("updates"):
                    return original(scaler, *args, **kwargs)
                begun = before(scaler, args, kwargs) if not call else before(scaler, call, args, kwargs)
                self._inside += bool(call)
                self._recording.in_scaler = call == "step"
                try:
                    result = original(scaler, *args, **kwargs)
                finally:
                    self._inside -= bool(call)
                    self._recording.in_scaler = False
                after(scaler, result if not call else begun, call)
                return result

            return scaler_call

        return wrapped

    def _was_scaled(self, scaler: Any, result: Any, call: str) -> None:
        if not self.pending:
            self.pending = True
            self.unscaled.clear()
        for loss in [result] if isinstance(result, torch.Tensor) else _tensors(result):
            if loss.grad_fn is not None:
                if len(self._scaled) >= _MOST_LOSSES:
                    self._scaled.clear()
                self._scaled[id(loss)] = loss.grad_fn.name()
        self._read_scale(scaler)

    def _scale_of(self, loss: torch.Tensor) -> float | None:
        """The scale of a loss that came out of ``scale``, ``None`` for others."""
        name = self._scaled.pop(id(loss), None)
        return self.scale if name is not None and loss.grad_fn is not None and loss.grad_fn.name() == name else None

    def _read_scale(self, scaler: Any) -> None:
        """Reads the scale where nothing has to be waited for: on a CPU always, else on sampled steps."""
        scale = getattr(scaler, "_scale", None)
        if scale is None:
            self.scale = float(getattr(scaler, "_init_scale", 1.0))
        elif scale.device.type == "cpu" or self._recording.sampled:
            self.scale = float(scale)

    def _begins(self, scaler: Any, call: str, args: Any, kwargs: Any) -> tuple[Any, float, int]:
        self._read_scale(scaler)
        optimizer = args[0] if args else kwargs.get("optimizer")
        number = self._optimizers.numbered(optimizer) if call != "update" and optimizer is not None else -1
        return optimizer, self.scale, self._optimizers.counts.get(number, 0)

    def _ended(self, scaler: Any, begun: tuple[Any, float, int] | None, call: str) -> None:
        if begun is None:
            return
        optimizer, scale, count = begun
        numbering = self._recording.numbering
        number = numbering.known_optimizer(optimizer) if call != "update" else -1
        if call == "unscale_":
            self.unscaled.add(id(optimizer))
            self._gradients.changed_on_purpose()
        elif call == "update":
            self.pending = False
            self.unscaled.clear()
            self._read_scale(scaler)
        fact = Scaler(call=call, optimizer=number, scale=scale, after=self.scale, **self._recording.place())
        self._recording.emit(fact)
        if call == "step":
            if self._optimizers.counts.get(number, 0) == count:
                object.__setattr__(fact, "skipped", True)
            else:
                self._read_overflow(scaler, optimizer, fact)

    def _read_overflow(self, scaler: Any, optimizer: Any, fact: Scaler) -> None:
        states = getattr(scaler, "_per_optimizer_states", {})
        found = states[id(optimizer)].get("found_inf_per_device", {}) if id(optimizer) in states else {}
        for tensor in found.values():
            self._recording.journal.later(fact, "skipped", tensor, bool)


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return [one for one in values if isinstance(one, torch.Tensor)] if isinstance(values, (list, tuple)) else []
