"""The tensors of an optimizer besides its parameters and their gradients."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_DEPTH = 4


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors in an optimizer's state, parameter groups and attributes, also within containers.

    Some optimizers keep tensors outside of ``state``, such as the slow weights of Lookahead, or a learning rate.
    Optimizers that it wraps are included; parameters and gradients are not.
    """
    found: dict[int, torch.Tensor] = {}
    wrapped = _with_wrapped(optimizer)
    parameters = [p for one in wrapped for group in one.param_groups for p in group["params"]]
    own = {id(one) for p in parameters for one in (p, p.grad)}
    for one in wrapped:
        values = [*one.state.values(), *(value for name, value in one.__dict__.items() if name not in _KNOWN)]
        values += [value for group in one.param_groups for name, value in group.items() if name != "params"]
        found.update((id(tensor), tensor) for value in values for tensor in _tensors_in(value, _DEPTH))
    return [tensor for tensor in found.values() if id(tensor) not in own]


_KNOWN = {"state", "param_groups", "defaults"}


def _with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    found = {id(optimizer): optimizer}
    waiting = [optimizer]
    while waiting:
        for value in waiting.pop().__dict__.values():
            if isinstance(value, torch.optim.Optimizer) and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            yield from _tensors_in(inner, depth - 1)


def with_tensors(value: Any, put: Callable[[torch.Tensor], torch.Tensor], depth: int = _DEPTH) -> Any:
    """A copy of a value with each tensor replaced, dictionary keys included.

    Example:
        >>> with_tensors({"slow": [torch.ones(2)], "k": 5}, torch.neg)
        {'slow': [tensor([-1., -1.])], 'k': 5}
    """
    if isinstance(value, torch.Tensor):
        return put(value)
    if not depth or type(value) not in (list, tuple, dict, set):
        return value
    if type(value) is dict:
        keys = [put(key) if isinstance(key, torch.Tensor) else key for key in value]
        return dict(zip(keys, (with_tensors(inner, put, depth - 1) for inner in value.values()), strict=True))
    return type(value)(with_tensors(inner, put, depth - 1) for inner in value)
