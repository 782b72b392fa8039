"""The boundary of a logical batch: everything that happens once, whatever the number of micro-batches."""

import copy
import numbers
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from signal import SIGINT, default_int_handler
from typing import Any

import torch

from anybatch.tensors.shards import local_of

try:  # the same without enumerations, in which looking for a handler fails: 30 us in each step
    from _signal import getsignal, signal  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    from signal import getsignal, signal

from anybatch.errors import LossError, UpdateInterrupted
from anybatch.loss.norms import clip_
from anybatch.tensors.precision import forget_unscaling, infinities_found
from anybatch.update.closures import Again, StepCall
from anybatch.update.passes import Progress
from anybatch.update.transaction import Failure, is_out_of_memory

_HOW = ("foreach", "fused", "capturable", "differentiable")  # of which the numbers are the same, or nearly


class Boundary:
    """Zeroing, unscaling, clipping, optimizers, scaler and schedulers, each once and in this order.

    Args:
        clip_norm: what the norm of the whole gradient is clipped to; infinite to measure only; ``None`` for neither.

    Attributes:
        is_committed: whether the optimizers have begun to change anything, so that nothing may be rolled back any more.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        scaler: Any = None,
        clip_norm: float | None = None,
        schedulers: Sequence[Any] = (),
        closure: bool | None = None,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._steps = [StepCall(optimizer, closure) for optimizer in optimizers]
        self._takes_long = any(step.is_needed for step in self._steps)
        # whether an optimizer may evaluate the gradient itself
        self.takes_closure = any(step.is_given for step in self._steps)
        self._scaler, self._clip_norm, self._schedulers = scaler, clip_norm, schedulers
        self._watches: list[OptimizerWatch] = []
        self._parameters: Sequence[torch.Tensor] = ()
        self._clipped: Sequence[torch.Tensor] = ()
        self.is_committed = self._scales = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Boundary":
        """A copy whose schedulers count its optimizers' steps, too, which those of torch's copies do not."""
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        for one in twin._schedulers:
            if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
                _Listening(one.optimizer)
        return twin

    def settings(self) -> dict[str, str]:
        """What an update is made with, by name."""
        return settings_of(self._optimizers, self._schedulers, self._clip_norm)

    def begin(self, parameters: Sequence[torch.Tensor], *, clipped: Sequence[torch.Tensor]) -> None:
        """Begins a logical batch: nothing is committed yet."""
        self.is_committed = False
        self._watches = []
        self._parameters, self._clipped = parameters, clipped
        self._scales = self._scaler is not None and bool(self._scaler.is_enabled())

    def zero_(self) -> None:
        """Takes all gradients off."""
        # None, not zeros: optimizers leave such a parameter out, which zeros would still decay and move by momentum.
        for parameter in self._parameters:
            parameter.grad = None

    def check_reached(self, model: str) -> None:
        """Refuses optimizers none of whose parameters has a gradient, though the model's have."""
        held = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        if held and all(parameter.grad is None for parameter in held):
            raise LossError(
                f"the loss gave a gradient to parameters of {model}, and to none of the {len(held)} that the "
                "optimizer has; expected an optimizer over parameters that the loss depends on. If the model was "
                "copied, or its parameters were replaced, after the optimizer was made: build it again from "
                "model.parameters()"
            )

    def prepare(self, progress: Progress, scaler: Any = None) -> torch.Tensor | None:
        """Unscales and clips."""
        scaler = self._scaler if scaler is None else scaler
        if scaler is not None:  # before clipping, whose norm is that of the true gradient
            progress.text = "unscaling"
            for optimizer in self._optimizers:
                scaler.unscale_(optimizer)
            self._unscale_others(scaler)
        if self._clip_norm is None:
            return None
        progress.text = "clipping"
        return clip_(self._clipped, self._clip_norm)

    def _unscale_others(self, scaler: Any) -> None:
        """Unscales the gradients of what no optimizer has, such as those of ``inputs``; nothing waits for a device."""
        held = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        for parameter in self._parameters:
            if id(parameter) not in held and parameter.grad is not None:
                parameter.grad /= scaler.scale(torch.ones((), device=parameter.grad.device))

    def skip_if_infinite(self, progress: Progress) -> str:
        """Skips all optimizers if the gradient of any of them is not finite; waits for the device once.

        ``GradScaler.step`` decides for each optimizer by itself, which would apply a part of an update.
        """
        if not self._scales or not self.is_infinite(self._scaler):
            return ""
        before = self._scaler.get_scale()
        self._update_scaler(progress)
        return f"the gradient is not finite; the scale goes from {before:g} to {self._scaler.get_scale():g}"

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """Holds Ctrl-C back until the update is complete, so that it is applied once and whole.

        Not where the optimizer runs the batch again, nor where somebody else decides what Ctrl-C does.
        """
        is_ours = threading.current_thread() is threading.main_thread() and getsignal(SIGINT) is default_int_handler
        if self._takes_long or not is_ours:
            yield
            return
        pressed: list[int] = []
        signal(SIGINT, lambda number, _: pressed.append(number))
        try:
            yield
        except Exception as error:
            if pressed and is_out_of_memory(error):  # nothing was applied, so nothing to wait for
                raise KeyboardInterrupt from None
            raise
        finally:
            signal(SIGINT, default_int_handler)
        if pressed:
            raise KeyboardInterrupt

    def step(self, progress: Progress, again: Again | None, *, is_shared: bool = False) -> None:
        """Steps all optimizers; what comes after it may not take them back."""
        if is_shared:
            self._step_with_others(progress, again)
            return
        progress.text = "optimizer.step"
        self._watches = [*map(OptimizerWatch, self._optimizers)]
        try:
            for optimizer, step in zip(self._optimizers, self._steps, strict=True):
                if not self._scales:
                    step(again)
                elif infinities_found(self._scaler, optimizer):  # none where no parameter has a gradient
                    step(again, self._scaler)
        except BaseException as error:
            interrupted = self._interruption(error)
            if interrupted is None:
                raise
            self.is_committed = True
            if not isinstance(error, Exception):  # such as KeyboardInterrupt outside of the main thread
                error.add_note(str(interrupted))
                raise
            raise interrupted from (None if is_out_of_memory(error) else error)
        self.is_committed = True

    def finish(self, progress: Progress) -> None:
        """Updates the scaler and steps the schedulers, once the update is applied."""
        try:
            if self._scales:
                self._update_scaler(progress)
            progress.text = "scheduler.step"
            for scheduler in self._schedulers:
                scheduler.step()
            self._watches = []
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = str(error)
        raise UpdateInterrupted(
            f"optimizer.step was applied once and is complete, then {progress.text} ran out of memory ({text}). The "
            f"update was not applied again; finish {progress.text} by hand before you go on",
            changed=self._changed_names(),
        )

    def roll_back(self) -> None:
        """Puts everything back to before the step: gradients off, lazily made state off, the scaler ready again.

        Does nothing once the optimizers have begun to change anything.
        """
        if self.is_committed:
            return
        self.zero_()
        for watch in self._watches:
            watch.roll_back_state()
        self._watches = []
        if self._scales:
            forget_unscaling(self._scaler)

    def _step_with_others(self, progress: Progress, again: Again | None) -> None:
        """Steps; if memory runs out before anything changed, once more after it was cleared.

        The gradient is that of all ranks already, and the others apply it: the batch can't start again.
        """
        for _ in range(2):
            for watch in self._watches:
                watch.roll_back_state()
            try:
                return self.step(progress, again)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = Failure(error)
            failure.release()  # outside of the except block, where no traceback holds tensors any more
        raise UpdateInterrupted(
            f"optimizer.step ran out of memory on this rank ({failure.text}), and once more after memory was "
            "cleared; the other ranks apply this update, so the ranks are out of sync. Load the last checkpoint "
            "on all ranks",
            state_changed=False,
        )

    def _interruption(self, error: BaseException) -> UpdateInterrupted | None:
        changed = self._changed_names()
        state_changed = any(watch.state_changed() for watch in self._watches)
        if not changed and not state_changed:
            return None
        if changed:
            which = f"{len(changed)} parameters had been changed or may have been, the first is {changed[0]!r}"
        else:
            which = "no parameter had been changed, but the optimizer's own state had"
        return UpdateInterrupted(
            f"optimizer.step failed during its update ({type(error).__name__}: {error}); {which}. The update was "
            "not applied again. Load the last checkpoint of the model and the optimizer, or go on if a partly "
            "applied update is acceptable",
            changed=changed,
            state_changed=state_changed or bool(changed),
        )

    def _changed_names(self) -> list[str]:
        changed = [p for watch in self._watches for p in watch.changed_parameters()]
        known = {id(p): name for name, p in self._model.named_parameters()} if changed else {}
        return [known.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in changed]

    def is_infinite(self, scaler: Any) -> bool:
        """Whether the gradient of any optimizer is not finite; waits for the device."""
        found = [tensor for optimizer in self._optimizers for tensor in infinities_found(scaler, optimizer)]
        return bool(found) and any(torch.stack([tensor.to(found[0].device) for tensor in found]).tolist())

    def _update_scaler(self, progress: Progress) -> None:
        progress.text = "scaler.update"
        if any(infinities_found(self._scaler, optimizer) for optimizer in self._optimizers):
            self._scaler.update()


class _Listening(torch.optim.lr_scheduler.LRScheduler):
    """Changes nothing; as each scheduler, it has an optimizer note that it has stepped."""

    def get_lr(self) -> list[Any]:
        """The rates as they are."""
        return [group["lr"] for group in self.optimizer.param_groups]


def settings_of(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], clip_norm: float | None
) -> dict[str, str]:
    """What an update is made with, by name; ranks that have it otherwise do not stay equal."""
    found = {"clip_norm": _shown(clip_norm), "scheduler": _shown([type(one).__name__ for one in schedulers])}
    for number, optimizer in enumerate(optimizers):
        owner = "" if len(optimizers) == 1 else f"optimizer[{number}]."
        found[f"{owner}type"] = type(optimizer).__name__
        for at, group in enumerate(optimizer.param_groups):
            options = [key for key in optimizer.defaults if key in group and key not in _HOW]
            found.update((f"{owner}param_groups[{at}][{key!r}]", _shown(group[key])) for key in options)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.device.type == "cpu" and value.numel() == 1 else "a tensor"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return repr(float(value))
    return repr(value) if isinstance(value, (str, bool, type(None))) else type(value).__name__


ROWS = 4


class OptimizerWatch:
    """Notes enough about an optimizer before its step to tell afterwards whether it had begun.

    Version counters show writes, but not those of fused and foreach kernels and not those through ``.data``; so some
    rows of the first and the smallest parameter that each kernel updates, and of their state, are kept too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states_before = len(optimizer.state)
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._options: list[dict[str, Any]] = []
        self._sentinels: list[_Sentinel] = []
        writes_unseen = not type(optimizer).__module__.startswith("torch.optim")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._versions.append((parameter, parameter._version))
            self._options.append(options := dict(group))
            del options["params"]
            self._sentinels.append(_Sentinel(group, optimizer.state, writes_unseen=writes_unseen))

    def changed_parameters(self) -> list[torch.Tensor]:
        """The parameters that have changed; all of a group that may have, where it can't be told."""
        changed = [p for p, before in self._versions if p._version != before]
        for group, sentinel in zip(self._optimizer.param_groups, self._sentinels, strict=True):
            if sentinel.value_changed():
                changed += [p for p in group["params"] if p.grad is not None]
        return list({id(p): p for p in changed}.values())

    def state_changed(self) -> bool:
        """Whether state that was there before the step has changed."""
        return any(sentinel.state_changed() for sentinel in self._sentinels)

    def roll_back_state(self) -> None:
        """Takes off state that the step made, and puts group options back; state that was there stays as it is."""
        state = self._optimizer.state
        for parameter in list(state)[self._states_before :]:
            del state[parameter]
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)


class _Sentinel:
    """The parameters of a group that a step changes first, and their state."""

    def __init__(self, group: Mapping[str, Any], state: Mapping[Any, Any], *, writes_unseen: bool) -> None:
        self._is_fused = bool(group.get("fused"))
        self._values: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
        self._states: list[tuple[Any, bool, tuple[list[Any], torch.Tensor | None]]] = []
        kernels: dict[tuple[torch.device, torch.dtype], list[Any]] = {}  # what one kernel updates together
        for parameter in group["params"]:
            if parameter.grad is not None:
                kernels.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for parameters in kernels.values():
            foreach = group.get("foreach", False)
            is_one_kernel = bool(foreach or (foreach is None and parameters[0].device.type != "cpu"))
            hides_writes = writes_unseen or self._is_fused or is_one_kernel  # else versions show them
            watched = {id(parameters[0]): parameters[0]}
            for parameter in parameters if state else ():
                if parameter in state:
                    watched[id(parameter)] = parameter
                    break
            if hides_writes:
                smallest = min(parameters, key=torch.numel)
                watched[id(smallest)] = smallest
            for parameter in watched.values():
                if hides_writes:
                    where = self._place(parameter)
                    self._values.append((parameter, where, parameter.detach()[where].clone()))
                if parameter in state:
                    found = state[parameter]
                    self._states.append((found, hides_writes, _fingerprint(found, keeps_values=hides_writes)))

    def _place(self, parameter: torch.Tensor) -> Any:
        """Where a step surely changes the parameter: where its gradient is largest."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or not gradient.dim():
            return slice(0, ROWS) if parameter.dim() else ...
        return gradient.detach().abs().reshape(len(gradient), -1).amax(1).argmax().reshape(1)

    def value_changed(self) -> bool:
        if any(not torch.equal(p.detach()[where], before) for p, where, before in self._values):
            return True
        # A fused update of parameters whose gradient is zero leaves no trace in their values.
        untold = self._is_fused and not any(bool(p.grad.any()) for p, _, _ in self._values if p.grad is not None)
        return untold and self.state_changed()

    def state_changed(self) -> bool:
        return any(_differ(_fingerprint(state, keeps_values=keeps), before) for state, keeps, before in self._states)


def _fingerprint(state: Any, *, keeps_values: bool) -> tuple[list[Any], torch.Tensor | None]:
    """What tells whether a state was written to: versions, and some rows where these do not show it."""
    if not isinstance(state, Mapping):
        return [id(state)], None
    plain, rows = list[Any](), None
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            plain.append((key, id(value), value._version))
            rows = _first_rows(value) if keeps_values else rows
            keeps_values = False  # what comes first is changed first
        elif isinstance(value, (bool, int, float, str, type(None))):
            plain.append((key, value))
        else:
            plain.append((key, id(value), len(value) if hasattr(value, "__len__") else 0))
    return plain, rows


def _first_rows(value: torch.Tensor) -> torch.Tensor | None:
    if value.layout is not torch.strided:  # a sparse one has none
        return None
    part = local_of(value.detach())
    return (part[:ROWS] if part.dim() else part).clone()


def _differ(found: tuple[list[Any], torch.Tensor | None], before: tuple[list[Any], torch.Tensor | None]) -> bool:
    (plain, rows), (plain_before, rows_before) = found, before
    if plain != plain_before or rows is None or rows_before is None:
        return plain != plain_before
    return not torch.equal(rows, rows_before)
