"""Copies of a model on other devices, with their own tensors, updated once per logical batch."""

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from anybatch.errors import BatchError
from anybatch.tensors.modules import modules_of
from anybatch.tensors.spectral import power_iteration

_TENSORS = frozenset({"_parameters", "_buffers", "_modules"})
_WRAPPERS = {
    "DataParallel": "pass the model in it, model.module, and devices=model.device_ids",
    "DistributedDataParallel": (
        "it is for one device a process. Leave devices= out under torchrun, or pass the model in it, model.module"
    ),
    "FullyShardedDataParallel": "it is for one device a process; leave devices= out",
    "FSDPModule": "it is for one device a process; leave devices= out",
    "OptimizedModule": "what was compiled works on one device only; pass the model before torch.compile",
    "ScriptModule": "what was scripted can't be copied around its own tensors; pass the model before torch.jit",
}


def check_copyable(models: Iterable[Any], home: torch.device) -> None:
    """Refuses models that can't be copied to other devices.

    Raises:
        BatchError: one is wrapped, compiled, not complete, or lies on several devices.
    """
    modules = modules_of(*models)
    kinds = {kind: _wrapper_of(kind) for kind in set(map(type, modules))}  # far fewer than modules
    for module in modules:
        wrapper = kinds[type(module)]
        if wrapper is None and module.__dict__.get("_compiled_call_impl") is not None:
            wrapper = "OptimizedModule"
        if wrapper is not None:
            raise BatchError(
                f"the model has a {type(module).__name__}, and devices= makes its own copies; expected a plain "
                f"module: {_WRAPPERS[wrapper]}"
            )
        for name, tensor in _tensors_of(module):
            if torch.nn.parameter.is_lazy(tensor):
                raise BatchError(
                    f"{name} of a {type(module).__name__} is made by the first forward; run one before devices= is used"
                )
            if tensor.device != home:
                raise BatchError(
                    f"{name} of a {type(module).__name__} lies on {tensor.device} and the first parameter on {home}; "
                    "expected the whole model on one of the devices: model.to(...)"
                )


def _wrapper_of(kind: type) -> str | None:
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in _WRAPPERS), None)


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for found in (module._parameters, module._buffers):
        for name, tensor in found.items():
            if tensor is not None:
                yield name, tensor


class ModelCopy:
    """A copy of some modules on a device.

    Its tensors are kept and written anew once a logical batch. Its modules are made anew each time, as the modules are
    then: modes, hooks, attributes and what is frozen. Lists and dictionaries among their attributes are its own, so
    that a forward may write to them; anything else is shared.

    Args:
        device: where its tensors lie.

    Attributes:
        pairs: each parameter with its copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._buffers: list[tuple[str, torch.Tensor, int]] = []
        self._modules: dict[int, torch.nn.Module] = {}

    def refresh(self, models: Sequence[torch.nn.Module]) -> None:
        """Updates the copy to the modules as they are now."""
        with torch.no_grad():
            self._refresh(modules_of(*models))

    def _refresh(self, modules: list[torch.nn.Module]) -> None:
        before, self._leaves = self._leaves, {}
        self._modules = {id(module): type(module).__new__(type(module)) for module in modules}
        self._buffers = []
        copies: dict[int, torch.Tensor] = {}
        for module in modules:
            copy = self._modules[id(module)]
            copy.__dict__["_modules"] = {
                key: None if child is None else self._modules[id(child)] for key, child in module._modules.items()
            }
            for kind, found in (("_parameters", module._parameters), ("_buffers", module._buffers)):
                copy.__dict__[kind] = {
                    key: None if one is None else self._copied(one, before, copies) for key, one in found.items()
                }
            if not isinstance(module, _NormBase):
                moved = set(map(id, power_iteration(module)))  # as far on each device
                for name, one in copy._buffers.items():
                    if one is not None and id(module._buffers[name]) not in moved:
                        self._buffers.append((f"{name} of {type(module).__name__}", one, one._version))
        # Attributes may hold modules and parameters of any of them, such as the weights of an LSTM.
        for module in modules:
            self._modules[id(module)].__dict__.update(
                {key: self.translated(value) for key, value in module.__dict__.items() if key not in _TENSORS}
            )
        if before.keys() != self._leaves.keys():
            for copy in self._modules.values():
                if isinstance(copy, torch.nn.RNNBase):  # cuDNN wants its weights in one piece
                    copy.flatten_parameters()
        self.pairs = [pair for pair in self._leaves.values() if isinstance(pair[0], torch.nn.Parameter)]

    def _copied(
        self, tensor: torch.Tensor, before: dict[int, tuple[torch.Tensor, torch.Tensor]], done: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        if id(tensor) in done:
            return done[id(tensor)]
        known = before.get(id(tensor))
        copy = None if known is None or known[0] is not tensor else known[1]
        if copy is not None and copy.shape == tensor.shape and copy.dtype == tensor.dtype:
            copy.detach().copy_(tensor.detach(), non_blocking=True)
        else:
            copy = tensor.detach().to(self.device, copy=True)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            copy.requires_grad_(tensor.requires_grad)
            copy.__dict__.update(tensor.__dict__)
            copy.grad = None
            copy._backward_hooks = None
            for hook in (tensor._backward_hooks or {}).values():
                copy.register_hook(hook)
        self._leaves[id(tensor)] = tensor, copy
        done[id(tensor)] = copy
        return copy

    def translated(self, value: Any) -> Any:
        """What stands for a value here: for a module its copy, for one of its methods that of the copy."""
        if isinstance(value, torch.nn.Parameter):
            return self._leaves.get(id(value), (value, value))[1]
        if isinstance(value, torch.nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            return types.MethodType(value.__func__, self._modules.get(id(value.__self__), value.__self__))
        if type(value) is functools.partial:
            arguments = [self.translated(one) for one in value.args]
            options = {key: self.translated(one) for key, one in value.keywords.items()}
            return functools.partial(self.translated(value.func), *arguments, **options)
        if type(value) in (list, tuple, set):
            return type(value)(self.translated(one) for one in value)
        if type(value) in _DICTIONARIES:
            return type(value)((key, self.translated(one)) for key, one in value.items() if not _is_observer(one))
        return value

    def leaf_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of a parameter, ``None`` if the modules do not have it."""
        pair = self._leaves.get(id(tensor))
        return None if pair is None else pair[1]

    @property
    def nbytes(self) -> int:
        """The bytes of its parameters and buffers."""
        return sum(copy.nbytes for _, copy in self._leaves.values())

    def changed_buffers(self) -> list[str]:
        """The buffers that were written to since the copy was made, but for those of normalisations and their like."""
        return [name for name, buffer, version in self._buffers if buffer._version != version]

    def clear(self) -> None:
        """Clears the gradients, and releases the modules, which may hold the graph."""
        for _, copy in self.pairs:
            copy.grad = None
        self._modules = {}
        self._buffers = []


_DICTIONARIES = (dict, OrderedDict)


def _is_observer(hook: Any) -> bool:
    """Whether a hook is of the doctor, who looks at one device."""
    module = getattr(getattr(hook, "__func__", hook), "__module__", None)
    return isinstance(module, str) and module.startswith("anybatch.doctor")
