"""Spectral norms, whose vectors each forward moves: once for a logical batch, as with the whole batch at once."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

_PARAMETRIZATION: Any = parametrizations._SpectralNorm


class PowerIterations:
    """The vectors of the power iterations of spectral norms, as they are before a logical batch.

    A forward in training mode goes on iterating (Miyato et al. 2018, "Spectral Normalization for Generative Adversarial
    Networks", algorithm 1), whatever the batch. Each micro-batch has to begin where the first one did, so that all
    compute with the same weights, and the vectors are moved as far as the whole batch would have moved them.

    Args:
        modules: all of a model.

    Example:
        >>> layer = parametrizations.spectral_norm(torch.nn.Linear(20, 20))
        >>> vectors = PowerIterations(layer.modules())
        >>> first, second = layer.weight, layer.weight
        >>> vectors.again_()
        >>> bool((layer.weight == first).all())
        True
    """

    __slots__ = ("_saved",)

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._saved = [(vector, vector.clone()) for module in modules for vector in power_iteration(module)]

    def again_(self) -> None:
        """Puts the vectors back to what they were."""
        with torch.no_grad():
            for vector, value in self._saved:
                vector.copy_(value)


def power_iterations(modules: Iterable[torch.nn.Module]) -> PowerIterations | None:
    """What moves the weights in each forward, if anything can: a quick look at all modules of a model."""
    may_move = [one for one in modules if one._forward_pre_hooks or type(one) is _PARAMETRIZATION]
    return PowerIterations(may_move) if may_move else None


def power_iteration(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a spectral norm moves in each forward, in training mode; empty for other modules.

    Args:
        module: of ``parametrizations.spectral_norm``, or one that ``nn.utils.spectral_norm`` was applied to.
    """
    if type(module) is _PARAMETRIZATION:
        found = [module._buffers.get("_u"), module._buffers.get("_v")]
    elif module._forward_pre_hooks:
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        found = [module._buffers.get(f"{hook.name}_{which}") for hook in hooks for which in "uv"]
    else:
        return []
    return [vector for vector in found if vector is not None and module.training]
