"""Sees gradient scalers and the clipping of gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.events import Clipped, Scaler

_MOST_LOSSES = 64


class ScalingHooks:
    """Wraps ``GradScaler`` and the two functions that clip.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        optimizers: knows their numbers and steps.
    """

    def __init__(self, recording: Recording, gradients: Gradients, optimizers: OptimizerHooks) -> None:
        self._recording, self._gradients, self._optimizers = recording, gradients, optimizers
        self._scaled = recording.scaled
        self._pending = False  # a loss was scaled since the last ``update``
        self._unscaled: set[int] = set()
        self._scale = 1.0
        self._inside = 0
        recording.scale_of_loss = self._scale_of

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        patches, guarded = self._recording.patches, self._recording.guarded
        scaler = torch.amp.GradScaler
        patches.wrap(scaler, "scale", self._around(lambda owner, args, kwargs: None, guarded(self._was_scaled)))
        for call in ("unscale_", "step", "update"):
            patches.wrap(scaler, call, self._around(guarded(self._begins), guarded(self._ended), call))
        by_norm, by_value = guarded(self._clips_norm), guarded(self._clips_value)

        def clipping(note: Callable[..., Any]) -> Callable[[Any], Any]:
            def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
                def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                    given = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
                    seen = note(given, *args, **kwargs)
                    result = original(given, *args, **kwargs)
                    if seen is not None:
                        after()
                    return result

                return clip

            return wrapped

        after = guarded(self._gradients.changed_on_purpose)
        norm = getattr(clip_grad, "_clip_grads_with_norm_", None) or clip_grad.clip_grad_norm_
        patches.wrap_closed(norm, clipping(by_norm))
        patches.wrap_closed(clip_grad.clip_grad_value_, clipping(by_value))

    def _around(self, before: Callable[..., Any], after: Callable[..., Any], call: str = "") -> Callable[..., Any]:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def scaler_call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                if not scaler.is_enabled() or self._inside:
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
        if not self._pending:
            self._pending = True
            self._unscaled.clear()
        for loss in [result] if isinstance(result, torch.Tensor) else _tensors(result):
            if loss.grad_fn is not None:
                if len(self._scaled) >= _MOST_LOSSES:
                    self._scaled.clear()
                self._scaled[id(loss)] = loss.grad_fn.name()
        self._read_scale(scaler)

    def _scale_of(self, loss: torch.Tensor) -> float | None:
        """The scale of a loss that came out of ``scale``, ``None`` for others."""
        name = self._scaled.pop(id(loss), None)
        return self._scale if name is not None and loss.grad_fn is not None and loss.grad_fn.name() == name else None

    def _read_scale(self, scaler: Any) -> None:
        """Reads the scale where nothing has to be waited for: on a CPU always, else on sampled steps."""
        scale = getattr(scaler, "_scale", None)
        if scale is None:
            self._scale = float(getattr(scaler, "_init_scale", 1.0))
        elif scale.device.type == "cpu" or self._recording.sampled:
            self._scale = float(scale)

    def _begins(self, scaler: Any, call: str, args: Any, kwargs: Any) -> tuple[Any, float, int]:
        self._read_scale(scaler)
        optimizer = args[0] if args else kwargs.get("optimizer")
        number = self._optimizers.numbered(optimizer) if call != "update" and optimizer is not None else -1
        return optimizer, self._scale, self._optimizers.counts.get(number, 0)

    def _ended(self, scaler: Any, begun: tuple[Any, float, int] | None, call: str) -> None:
        if begun is None:
            return
        optimizer, scale, count = begun
        numbering = self._recording.numbering
        number = numbering.known_optimizer(optimizer) if call != "update" else -1
        if call == "unscale_":
            self._unscaled.add(id(optimizer))
            self._gradients.changed_on_purpose()
        elif call == "update":
            self._pending = False
            self._unscaled.clear()
            self._read_scale(scaler)
        fact = Scaler(call=call, optimizer=number, scale=scale, after=self._scale, **self._recording.place())
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

    # clipping

    def _clips_norm(self, parameters: Any, limit: float, norm: torch.Tensor, *_: Any, **__: Any) -> bool:
        fact = self._clipped("norm", parameters, limit)
        if isinstance(norm, torch.Tensor):
            self._recording.journal.later(fact, "norm", norm)
        self._recording.emit(fact)
        return True

    def _clips_value(self, parameters: Any, limit: float, *_: Any, **__: Any) -> bool:
        self._recording.emit(self._clipped("value", parameters, limit))
        return True

    def _clipped(self, by: str, parameters: Any, limit: Any) -> Clipped:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        with_grad = [tensor for tensor in given if tensor.grad is not None]
        ids = {id(tensor) for tensor in with_grad}
        owners = [
            (number, optimizer)
            for number, optimizer in self._recording.numbering.optimizers()
            if any(id(tensor) in ids for group in optimizer.param_groups for tensor in group["params"])
        ]
        scaled = self._pending and not any(id(optimizer) in self._unscaled for _, optimizer in owners)
        return Clipped(
            by=by, limit=float(limit), tensors=len(with_grad), optimizers=tuple([number for number, _ in owners]),
            scaled=scaled, scale=self._scale if self._pending else 1.0, **self._recording.place(),
        )  # fmt: skip


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return [one for one in values if isinstance(one, torch.Tensor)] if isinstance(values, (list, tuple)) else []
