"""Sees gradient scalers, and the clipping of gradients."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.values import tensors_in
from anybatch.records.events import Clipped, Scaler
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
        return _Begun(optimizer, number, self._losses.scale, self._optimizers.steps_of(optimizer))

    def _ended(self, call: str, scaler: Any, begun: _Begun, _: Any) -> None:
        recording, losses = self._recording, self._losses
        skipped: torch.Tensor | bool = False
        if call == "unscale_":
            self.unscaled.add(id(begun.optimizer))
            self._gradients.changed_on_purpose()
        elif call == "update":
            losses.pending = False
            self.unscaled.clear()
            self._read_scale(scaler)
        else:
            skipped = self._optimizers.steps_of(begun.optimizer) == begun.steps or _overflow(scaler, begun)
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


_SAME = ("by", "limit", "tensors", "optimizers", "scaled", "scale")


class ClippingHooks:
    """Wraps the two functions that clip."""

    def __init__(self, recording: Recording, gradients: Gradients, scaling: ScalingHooks) -> None:
        self._recording, self._gradients, self._scaling = recording, gradients, scaling
        self._known: tuple[Any, list[tuple[int, weakref.ref[Any]]]] = (None, [])

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        patches = self._recording.patches
        norm = "_clip_grads_with_norm_" if hasattr(clip_grad, "_clip_grads_with_norm_") else "clip_grad_norm_"
        patches.wrap(clip_grad, norm, self._clipping("norm"))
        patches.wrap(clip_grad, "clip_grad_value_", self._clipping("value"))

    def _clipping(self, by: str) -> Callable[[Any], Any]:
        recording, is_compiling = self._recording, torch.compiler.is_dynamo_compiling

        def before(parameters: Any, args: Any, kwargs: Any) -> Any:
            limit = args[0] if args else kwargs.get("max_norm" if by == "norm" else "clip_value")
            norm = args[1] if by == "norm" and len(args) > 1 and isinstance(args[1], torch.Tensor) else None
            self._clips(by, [parameters] if isinstance(parameters, torch.Tensor) else parameters, limit, norm)
            return True

        noted = recording.around(before, lambda *_: self._gradients.changed_on_purpose(), "updates")

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            clip_noted = noted(original)

            def clip(parameters: Any, /, *args: Any, **kwargs: Any) -> Any:
                if is_compiling():
                    return original(parameters, *args, **kwargs)
                given = parameters if isinstance(parameters, (torch.Tensor, list)) else list(parameters)
                return clip_noted(given, *args, **kwargs)

            return clip

        return wrapped

    def _clips(self, by: str, given: Any, limit: Any, norm: torch.Tensor | None) -> None:
        if not isinstance(limit, (int, float, torch.Tensor)):
            return  # torch refuses it
        recording, losses = self._recording, self._recording.scaled
        limit = float(item_of(limit)) if isinstance(limit, torch.Tensor) else float(limit)
        tensors = len([tensor for tensor in given if tensor.grad is not None])
        owners = self._owners_of(given, tensors)
        scaled = losses.pending and not any(id(optimizer) in self._scaling.unscaled for _, optimizer in owners)
        same = by, limit, tensors, tuple([number for number, _ in owners]), scaled, losses.in_force
        noted = recording.note(Clipped, same, (None,), _SAME)
        if norm is not None:
            recording.journal.later(noted, "norm", norm)

    def _owners_of(self, given: Any, tensors: int) -> list[tuple[int, Any]]:
        """The optimizers that have some of the parameters that have a gradient, with their numbers."""
        numbering = self._recording.numbering
        ends = (id(given[0]), id(given[-1])) if len(given) else ()
        key = len(given), ends, tensors, numbering.optimizers_version
        if key != self._known[0]:
            ids = {id(tensor) for tensor in given if tensor.grad is not None}
            owners = [
                (number, weakref.ref(optimizer))
                for number, optimizer in numbering.optimizers()
                if any(id(tensor) in ids for group in optimizer.param_groups for tensor in group["params"])
            ]
            self._known = key, owners
        return [(number, optimizer) for number, of in self._known[1] if (optimizer := of()) is not None]
