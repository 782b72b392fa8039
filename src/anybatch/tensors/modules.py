"""The modules, devices and parameters of a model, found fast enough for every step."""

from collections.abc import Iterable
from typing import Any

import torch


def modules_behind(model: Any, loss_fn: Any) -> list[torch.nn.Module]:
    """The root modules of a step: the model, and the loss function if it is a module or a method of one."""
    owners = [model, loss_fn, *getattr(loss_fn, "user_functions", ())]
    for function in owners[1:]:
        owners.append(getattr(function, "__self__", None))
    found: dict[int, torch.nn.Module] = {}
    for owner in owners:
        if isinstance(owner, torch.nn.Module):
            found[id(owner)] = owner
    return list(found.values())


def modules_of(*models: Any) -> list[torch.nn.Module]:
    """All modules of some models, each once.

    ``torch.nn.Module.modules`` also builds every name, which takes longer for hundreds of layers than a small layer.
    """
    found: dict[int, torch.nn.Module] = {}
    waiting = [*models[::-1]]
    while waiting:
        module = waiting.pop()
        if (key := id(module)) not in found and isinstance(module, torch.nn.Module):
            found[key] = module
            if children := module._modules:
                waiting += [*children.values()][::-1]
    return list(found.values())


SCRIPTED = (torch.jit.ScriptModule,)


def is_scripted(module: Any) -> bool:
    """Whether a module is TorchScript, which runs without Python."""
    return isinstance(module, SCRIPTED)


def devices_among(modules: Iterable[torch.nn.Module]) -> list[torch.device]:
    """The devices of the parameters of some modules, without those of their children."""
    return list({p.device for module in modules for p in module._parameters.values() if p is not None})


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the first parameter, found without the names of all; the CPU for a model without parameters."""
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            for parameter in module._parameters.values():
                if parameter is not None:
                    return parameter.device
            waiting += [*module._modules.values()][::-1]
    return torch.device("cpu")


def devices_of(model: torch.nn.Module) -> list[torch.device]:
    """The devices of all parameters."""
    return devices_among(modules_of(model))
