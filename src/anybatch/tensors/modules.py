"""The modules of a model, found quickly enough to be looked through at every step."""

from collections.abc import Iterable
from typing import Any

import torch


def modules_behind(model: Any, loss_fn: Any) -> list[torch.nn.Module]:
    """The modules that a step runs through: the model, and the loss function if it is one or a method of one.

    Args:
        loss_fn: a function, a module, a method, or one that is made of several (its ``user_functions``).

    Example:
        >>> len(modules_behind(torch.nn.ReLU(), torch.nn.MSELoss()))
        2
    """
    functions = [loss_fn, *getattr(loss_fn, "user_functions", ())]
    found: dict[int, torch.nn.Module] = {}
    for owner in [model, *functions, *[getattr(function, "__self__", None) for function in functions]]:
        if isinstance(owner, torch.nn.Module):
            found[id(owner)] = owner
    return list(found.values())


def modules_of(*models: Any) -> list[torch.nn.Module]:
    """All modules of some models, each once, without their names.

    ``torch.nn.Module.modules`` builds every name on its way, which for hundreds of small layers takes longer than one
    of them does.

    Example:
        >>> [type(module).__name__ for module in modules_of(torch.nn.Sequential(torch.nn.ReLU()))]
        ['Sequential', 'ReLU']
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
    """Whether a module was compiled by ``torch.jit``, which runs it without Python."""
    return isinstance(module, SCRIPTED)


def devices_among(modules: Iterable[torch.nn.Module]) -> list[torch.device]:
    """Where the parameters of some modules lie, without those of their children.

    Example:
        >>> devices_among([torch.nn.Linear(1, 1)])
        [device(type='cpu')]
    """
    return list({p.device for module in modules for p in module._parameters.values() if p is not None})


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the first parameter lies; the CPU for a model without any."""
    first = _first_parameter(model)
    return torch.device("cpu") if first is None else first.device


def _first_parameter(module: torch.nn.Module) -> torch.Tensor | None:
    """The first of ``module.parameters()``, which takes as long for one as a small layer does."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None


def devices_of(model: torch.nn.Module) -> list[torch.device]:
    """Where the parameters lie."""
    return devices_among(modules_of(model))
