"""Whether an optimizer had begun when it failed."""

from collections.abc import Mapping
from typing import Any

import torch

from anybatch.tensors.shards import local_of

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
