"""Sees the clipping of gradients."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.nn.utils import clip_grad

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_scaling import ScalingHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.records.events import Clipped


class ClippingHooks:
    """Wraps the two functions that clip.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        scaling: knows whether gradients are scaled.
    """

    def __init__(self, recording: Recording, gradients: Gradients, scaling: ScalingHooks) -> None:
        self._recording, self._gradients, self._scaling = recording, gradients, scaling

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        patches = self._recording.patches
        norm = "_clip_grads_with_norm_" if hasattr(clip_grad, "_clip_grads_with_norm_") else "clip_grad_norm_"
        patches.wrap(clip_grad, norm, self._clipping("norm"))
        patches.wrap(clip_grad, "clip_grad_value_", self._clipping("value"))

    def _clipping(self, by: str) -> Callable[[Any], Any]:
        known, again = self._recording.known, self._again
        note, is_compiling = self._recording.guarded(self._clips), torch.compiler.is_dynamo_compiling
        gradients, threads = self._gradients, self._recording.threads
        after = self._recording.guarded(gradients.changed_on_purpose)

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def clip(parameters: Any, /, *args: Any, **kwargs: Any) -> Any:
                if is_compiling() or (threads.ident != get_ident() and not threads.admits("updates")):
                    return original(parameters, *args, **kwargs)
                given = parameters if type(parameters) is list else _listed(parameters)
                limit = args[0] if args else None
                norm = args[1] if by == "norm" and len(args) > 1 and isinstance(args[1], torch.Tensor) else None
                passed = parameters if isinstance(parameters, torch.Tensor) else given
                if not (known.usable and again(by, given, limit, norm)):
                    limit = kwargs.get("max_norm" if by == "norm" else "clip_value") if limit is None else limit
                    note(by, given, limit, norm)
                result = original(passed, *args, **kwargs)
                if not gradients.done:
                    after()
                return result

            return clip

        return wrapped

    def _again(self, by: str, given: Any, limit: Any, norm: torch.Tensor | None) -> bool:
        """Records a clipping that is like one before; whether it is."""
        recording = self._recording
        try:
            recording.known.key = None
            if type(limit) not in (float, int):
                return False
            scaled = recording.scaled.in_force, tuple(self._scaling.unscaled) if recording.scaled.pending else ()
            version = recording.numbering.optimizers_version, scaled
            ends = (len(given), id(given[0]), id(given[-1])) if len(given) else ()
            seen = recording.known.find((by, float(limit), ends, version, recording.known.state))
            if seen is None:
                return False
            recording.counter.at = at = recording.counter.at + 1
            row = [seen.fact, at, recording.counter.step, None]
            recording.journal.rows.append(row)
            recording.known.state = seen.state
            if norm is not None:
                recording.journal.later(row, 3, norm)
            return True
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            recording.gave_up(error)
            return False

    def _clips(self, by: str, given: Any, limit: Any, norm: torch.Tensor | None) -> None:
        if not isinstance(limit, (int, float, torch.Tensor)):
            return  # torch refuses it
        with_grad = [tensor for tensor in given if tensor.grad is not None]
        ids = {id(tensor) for tensor in with_grad}
        owners = [
            (number, optimizer)
            for number, optimizer in self._recording.numbering.optimizers()
            if any(id(tensor) in ids for group in optimizer.param_groups for tensor in group["params"])
        ]
        losses, unscaled = self._recording.scaled, self._scaling.unscaled
        scaled = losses.pending and not any(id(optimizer) in unscaled for _, optimizer in owners)
        fact = Clipped(
            by=by, limit=float(limit), tensors=len(with_grad), optimizers=tuple([number for number, _ in owners]),
            scaled=scaled, scale=losses.in_force, **self._recording.place(),
        )  # fmt: skip
        if norm is not None:
            self._recording.journal.later(fact, "norm", norm)
        self._recording.emit(fact)
        self._recording.known.passed(fact, by, key=self._recording.known.take_key())


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
