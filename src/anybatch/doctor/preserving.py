"""Runs something with a model and restores the model, its gradients and the random state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from anybatch.errors import LossError
from anybatch.tensors.randomness import RandomState

_TABLES = ("_parameters", "_buffers", "_modules")


class Preserved:
    """Restores a model after experiments with it.

    Buffers are swapped for copies and attributes are restored by name, so that tensors saved for another backward are
    not written to. A parameter is copied only when it is about to be written to, since a forward rarely does that.

    Raises:
        LossError: a parameter is lazy and has no shape yet.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> None:
        if any(isinstance(parameter, (UninitializedParameter, UninitializedBuffer)) for parameter in parameters):
            raise LossError(
                "got a model with lazy parameters that have no shape yet; expected parameters that have values. "
                "Run the model once on a batch before you ask"
            )
        self._modules, self._parameters = modules, parameters
        self._copies: dict[int, torch.Tensor] = {}
        self._own = {id(parameter): parameter for parameter in parameters}

    def before_write(self, tensor: torch.Tensor) -> None:
        """Copies a tensor that is about to be written to, if it is a parameter or a view of one."""
        for own in (tensor, tensor._base):
            if own is not None and id(own) in self._own and id(own) not in self._copies:
                self._copies[id(own)] = own.detach().clone()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Restores everything at the end of its block."""
        random = RandomState({parameter.device for parameter in self._parameters})
        leaves = [(p, p.data, p.grad if p.is_leaf else None, p.requires_grad) for p in self._parameters]
        attributes = [(module, *_attributes(module)) for module in self._modules]
        try:
            for parameter, _, grad, _ in leaves:
                if grad is not None:
                    parameter.grad = None
            self._swap_buffers()
            yield
        finally:
            for own, variables, tables in attributes:
                _restore_attributes(own, variables, tables)
            for leaf in leaves:
                self._restore(*leaf)
            random.restore()

    def _swap_buffers(self) -> None:
        copies: dict[int, torch.Tensor] = {}
        for module in self._modules:
            if module._buffers and not isinstance(module, torch.jit.ScriptModule):
                for name, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone().requires_grad_(buffer.requires_grad)
                    module._buffers[name] = copies[id(buffer)] if buffer is not None else None

    def _restore(self, parameter: torch.Tensor, data: torch.Tensor, grad: Any, requires_grad: bool) -> None:
        with torch.no_grad():
            if (copy := self._copies.get(id(parameter))) is not None:
                data.copy_(copy)
            if not _same_memory(parameter, data):
                parameter.data = data
        if parameter.is_leaf:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


def _attributes(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    if isinstance(module, torch.jit.ScriptModule):
        return {}, {}
    own = dict(vars(module))
    return own, {name: dict(own[name]) for name in _TABLES if own[name]}


def _restore_attributes(module: torch.nn.Module, variables: dict[str, Any], tables: dict[str, dict[str, Any]]) -> None:
    if not variables:
        return
    now = vars(module)
    for name in [name for name in now if name not in variables]:
        del now[name]
    now.update(variables)
    for name in _TABLES:
        table, before = variables[name], tables.get(name, {})
        if table or before:
            table.clear()
            table.update(before)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    except RuntimeError:
        return True
