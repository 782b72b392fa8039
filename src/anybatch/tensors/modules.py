"""The modules, devices and parameters of a model, found fast enough for every step."""

from collections.abc import Iterable
from typing import Any

import torch


def modules_behind(model: Any, loss_fn: Any) -> list[torch.nn.Module]:
    """The root modules of a step: the model, and the loss function if it is a module or a method of one.

    Args:
        model: anything; what is not a module is left out.
        loss_fn: a function, a module, a method, or an object that has several of them as ``user_functions``.
    """
    functions = [loss_fn, *getattr(loss_fn, "user_functions", ())]
    found: dict[int, torch.nn.Module] = {}
    for owner in [model, *functions, *[getattr(function, "__self__", None) for function in functions]]:
        if isinstance(owner, torch.nn.Module):
            found[id(owner)] = owner
    return list(found.values())


def modules_of(*models: Any) -> list[torch.nn.Module]:
    """All modules of some models, each once.

    ``torch.nn.Module.modules`` also builds every name, which takes longer for hundreds of layers than a small layer.
    """
    found: dict[int, torch.nn.Module] = {}
    _find([model for model in models if isinstance(model, torch.nn.Module)], found)
    return list(found.values())


def _find(modules: Iterable[torch.nn.Module | None], found: dict[int, torch.nn.Module]) -> None:
    for module in modules:
        if module is not None and (key := id(module)) not in found:
            found[key] = module
            if children := module._modules:
                _find(children.values(), found)


SCRIPTED = (torch.jit.ScriptModule,)


def is_scripted(module: Any) -> bool:
    """Whether a module is TorchScript, which runs without Python."""
    return isinstance(module, SCRIPTED)


def devices_among(modules: Iterable[torch.nn.Module]) -> list[torch.device]:
    """The devices of the parameters of some modules, without those of their children."""
    return list({p.device for module in modules for p in module._parameters.values() if p is not None})


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the first parameter; the CPU for a model without parameters."""
    first = _first_parameter(model)
    return torch.device("cpu") if first is None else first.device


def _first_parameter(module: torch.nn.Module) -> torch.Tensor | None:
    """``next(module.parameters())`` without the time of a small layer."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None


def devices_of(model: torch.nn.Module) -> list[torch.device]:
    """The devices of all parameters."""
    return devices_among(modules_of(model))
