"""The modules of a model, found quickly enough to be looked through at every step."""

from typing import Any

import torch


def modules_of(model: Any) -> list[torch.nn.Module]:
    """All modules of a model, each once, without their names.

    ``torch.nn.Module.modules`` builds every name on its way, which for hundreds of small layers takes longer than one
    of them does.

    Args:
        model: the model; anything that is no module has none.

    Returns:
        The modules in the order of ``model.modules()``.

    Example:
        >>> [type(module).__name__ for module in modules_of(torch.nn.Sequential(torch.nn.ReLU()))]
        ['Sequential', 'ReLU']
    """
    if not isinstance(model, torch.nn.Module):
        return []
    found: dict[int, torch.nn.Module] = {}
    waiting: list[torch.nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            if module._modules:
                waiting.extend(child for child in reversed(module._modules.values()) if child is not None)
    return list(found.values())
