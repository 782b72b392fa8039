"""Whether an optimizer had begun to change anything when it failed."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anybatch.tensors.shards import local_of

ROWS = 4


class OptimizerWatch:
    """Notes enough about an optimizer before its step to tell afterwards whether it had begun.

    Version counters show writes, but not those of fused and foreach kernels and not those through ``.data``; so some
    rows of the first and the smallest parameter that each kernel updates, and of their state, are kept too.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._versions = [p._version for p in self._parameters]
        self._states_before = len(optimizer.state)
        is_torch_s = type(optimizer).__module__.startswith("torch.optim")
        self._options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._sentinels = [_Sentinel(group, optimizer.state, is_torch_s) for group in optimizer.param_groups]

    def changed_parameters(self) -> list[torch.Tensor]:
        """The parameters that have changed; all of a group that may have, where it can't be told."""
        changed = [p for p, before in zip(self._parameters, self._versions, strict=True) if p._version != before]
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

    def __init__(self, group: Mapping[str, Any], state: Mapping[Any, Any], is_torch_s: bool) -> None:
        self._is_fused = bool(group.get("fused"))
        self._foreach = group.get("foreach", False)
        self._writes_unseen = not is_torch_s
        watched: dict[int, Any] = {}
        for parameters in _by_kernel(p for p in group["params"] if p.grad is not None):
            chosen = [parameters[0], next((p for p in parameters if p in state), parameters[0])]
            if self._hides_writes(parameters[0]):
                chosen.append(min(parameters, key=torch.numel))
            watched.update((id(p), p) for p in chosen)
        unseen = [p for p in watched.values() if self._hides_writes(p)]
        self._values = [(p, where, p.detach()[where].clone()) for p in unseen for where in [self._place(p)]]
        self._states = [(state[p], _fingerprint(state[p])) for p in watched.values() if p in state]

    def _hides_writes(self, parameter: torch.Tensor) -> bool:
        """Whether version counters may not show that the parameter was changed."""
        is_one_kernel = self._foreach or (self._foreach is None and parameter.device.type != "cpu")
        return self._writes_unseen or self._is_fused or bool(is_one_kernel)

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
        return any(_differ(_fingerprint(state), before) for state, before in self._states)


def _by_kernel(parameters: Iterable[Any]) -> list[list[Any]]:
    """Parameters that one kernel updates together, where an optimizer goes by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(groups.values())


def _fingerprint(state: Any) -> dict[str, tuple[Any, ...]]:
    if not isinstance(state, Mapping):
        return {"": (id(state),)}
    traces: dict[str, tuple[Any, ...]] = {}
    keeps_values = True
    for key, value in state.items():
        traces[str(key)] = _trace(value, keeps_values)
        keeps_values = keeps_values and not isinstance(value, torch.Tensor)  # what comes first is changed first
    return traces


def _trace(value: Any, keeps_values: bool) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return id(value), value._version, None  # a sparse one has no first rows
    if isinstance(value, torch.Tensor):
        part = local_of(value.detach())
        head = part[:ROWS] if part.dim() else part
        return id(value), value._version, head.clone() if keeps_values else None
    if isinstance(value, (bool, int, float, str, type(None))):
        return (value,)
    return id(value), len(value) if hasattr(value, "__len__") else 0


def _differ(found: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    if found.keys() != before.keys():
        return True
    for key, trace in found.items():
        *plain, last = trace
        *plain_before, last_before = before[key]
        if plain != plain_before or type(last) is not type(last_before):
            return True
        same = torch.equal(last, last_before) if isinstance(last, torch.Tensor) else last == last_before
        if not same:
            return True
    return False
