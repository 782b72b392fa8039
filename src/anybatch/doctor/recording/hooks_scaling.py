"""Sees gradient scalers."""

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any, NamedTuple

import torch

from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.recording.scaledlosses import Scaled
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
                if not scaler.is_enabled() or self._inside:
                    return original(scaler, *args, **kwargs)
                if threads.ident != get_ident() and not threads.admits("updates"):
                    return original(scaler, *args, **kwargs)
                result = original(scaler, *args, **kwargs)
                was_scaled(scaler, result)
                return result

            return scale

        return wrapped

    def _around(self, call: str) -> Callable[..., Any]:
        recording, known = self._recording, self._recording.numbering.known_optimizer
        threads, usual, again = recording.threads, recording.known, self._again
        before, after = recording.guarded(self._begins), recording.guarded(self._ended)
        losses, counts = self._losses, self._optimizers.counts

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def scaler_call(scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
                if not scaler.is_enabled() or self._inside:
                    return original(scaler, *args, **kwargs)
                if threads.ident != get_ident() and not threads.admits("updates"):
                    return original(scaler, *args, **kwargs)
                optimizer = args[0] if args else None
                number = known(optimizer) if call != "update" else -1
                if usual.usable and (number >= 0 or call == "update"):
                    begun = _Begun(optimizer, number, losses.scale, counts.get(number, 0))
                else:
                    begun = before(scaler, call, optimizer, number)
                self._inside += 1
                recording.in_scaler = call == "step"
                try:
                    result = original(scaler, *args, **kwargs)
                finally:
                    self._inside -= 1
                    recording.in_scaler = False
                if begun is None:
                    return result
                now = self._changed(scaler, call, begun)
                if not (usual.usable and again(scaler, call, begun.number, now)):
                    after(scaler, call, begun.number, now)
                return result

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

    def _begins(self, scaler: Any, call: str, optimizer: Any, number: int) -> _Begun:
        if call != "update" and optimizer is not None:
            number = self._optimizers.numbered(optimizer)
        self._read_scale(scaler)
        return _Begun(optimizer, number, self._losses.scale, self._optimizers.counts.get(number, 0))

    def _changed(self, scaler: Any, call: str, begun: _Begun) -> Scaled:
        """What a call has done, of which note is taken."""
        losses = self._losses
        skipped: torch.Tensor | bool = False
        try:
            if call == "unscale_":
                self.unscaled.add(id(begun.optimizer))
            elif call == "update":
                losses.updated()
                self.unscaled.clear()
                self._read_scale(scaler)
            else:
                skipped = self._optimizers.counts.get(begun.number, 0) == begun.steps or _overflow(scaler, begun)
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            self._recording.gave_up(error)
        return Scaled(begun.scale, losses.scale, skipped)

    def _again(self, scaler: Any, call: str, number: int, now: Scaled) -> bool:
        """Records a call that is like one before; whether it is."""
        recording = self._recording
        try:
            recording.known.key = None
            if now.skipped is True:
                return False
            seen = recording.known.find(("scaler", call, number, recording.known.state))
            if seen is None or seen.owner() is not scaler:
                return False
            recording.counter.at = at = recording.counter.at + 1
            row = [seen.fact, at, recording.counter.step, now.before, now.after, now.skipped]
            if isinstance(now.skipped, torch.Tensor):
                row[5] = None
                recording.journal.later(row, 5, now.skipped, bool)
            recording.journal.rows.append(row)
            recording.known.state = seen.state
            if call == "unscale_" and not self._gradients.done:
                self._gradients.changed_on_purpose()
            return True
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            recording.gave_up(error)
            return False

    def _ended(self, scaler: Any, call: str, number: int, now: Scaled) -> None:
        if call == "unscale_" and not self._gradients.done:
            self._gradients.changed_on_purpose()
        fact = Scaler(
            call=call, optimizer=number, scale=now.before, after=now.after, skipped=now.skipped is True,
            **self._recording.place(),
        )  # fmt: skip
        self._recording.emit(fact)
        if isinstance(now.skipped, torch.Tensor):
            self._recording.journal.later(fact, "skipped", now.skipped, bool)
        key = self._recording.known.take_key() if now.skipped is not True else None
        self._recording.known.passed(fact, call, number, now.skipped is True, key=key, owner=scaler)


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
