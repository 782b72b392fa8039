"""Spectral norm: one power iteration per logical batch, although each forward in training mode does one."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

_PARAMETRIZATION: Any = getattr(parametrizations, "_SpectralNorm", None)  # private: it may be gone


class PowerIterations:
    """The power iteration vectors of spectral norms, saved before a logical batch.

    Each forward in training mode does one iteration (Miyato et al. 2018, "Spectral Normalization for Generative
    Adversarial Networks", algorithm 1). Each micro-batch has to start from the saved vectors: then all of them use the
    same weights, and the vectors end where the whole batch would have left them.
    """

    __slots__ = ("_saved",)

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._saved = [(vector, vector.clone()) for module in modules for vector in power_iteration(module)]

    def again_(self) -> None:
        """Restores the saved vectors."""
        with torch.no_grad():
            for vector, value in self._saved:
                vector.copy_(value)


def power_iterations(modules: Iterable[torch.nn.Module]) -> PowerIterations | None:
    """Saves the vectors of some modules; ``None``, quickly, if none of them can have a spectral norm."""
    may_move = [one for one in modules if one._forward_pre_hooks or type(one) is _PARAMETRIZATION]
    return PowerIterations(may_move) if may_move else None


def power_iteration(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a spectral norm in training mode updates in each forward; empty for other modules.

    It is a parametrization of ``parametrizations.spectral_norm``, or a module with ``nn.utils.spectral_norm``.
    """
    if type(module) is _PARAMETRIZATION:
        found = [module._buffers.get("_u"), module._buffers.get("_v")]
    elif module._forward_pre_hooks:
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        found = [module._buffers.get(f"{hook.name}_{which}") for hook in hooks for which in "uv"]
    else:
        return []
    return [vector for vector in found if vector is not None and module.training]
