"""Sees the clipping of gradients."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_scaling import ScalingHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.events import Clipped
from anybatch.tensors.dispatch import item_of

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
