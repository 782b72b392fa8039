"""Detects a loss function that changes the gradients that are accumulated."""

from collections.abc import Sequence
from typing import Any

import torch

from anybatch.errors import LossError
from anybatch.tensors.shards import local_of

_MOST = 64


class GradientWatch:
    """Compares ``.grad`` before and after the user's code, for at most about 64 evenly spaced parameters.

    Args:
        is_alone: whether no other device runs a backward at the same time.
    """

    def __init__(self, model: Any, parameters: Sequence[torch.Tensor], *, is_alone: bool = True) -> None:
        self._model, self._is_alone = model, is_alone
        self._seen: list[tuple[torch.Tensor, torch.Tensor | None, int]]
        self._parameters = parameters[:: 1 + len(parameters) // _MOST]
        self.note()

    def note(self) -> None:
        """Saves the gradients that the next run of the user's code must not change."""
        self.is_on, self._seen = True, []
        for parameter in self._parameters:
            gradient = parameter.grad
            self._seen.append((parameter, gradient, -1 if gradient is None else gradient._version))

    def check(self) -> None:
        """Compares the gradients with those of ``note``, then stops."""
        for parameter, seen, version in self._seen:
            gradient = parameter.grad
            if gradient is seen and (gradient is None or gradient._version == version):
                continue
            raise self._error(parameter, seen, gradient)
        self.is_on, self._seen = False, []

    def release(self) -> None:
        """Releases the saved gradients; nothing is compared until the next ``note``."""
        self.is_on, self._seen = False, []

    def check_kept(self) -> None:
        """Looks only for gradients that were removed, since a cut may have added some."""
        for parameter, seen, _ in self._seen:
            if seen is not None and parameter.grad is None:
                raise self._error(parameter, seen, None)

    def _error(self, parameter: torch.Tensor, seen: Any, gradient: Any) -> LossError:
        named = self._model.named_parameters() if isinstance(self._model, torch.nn.Module) else ()
        name = next((name for name, one in named if one is parameter), f"a parameter of shape {tuple(parameter.shape)}")
        if gradient is None or (seen is not None and not bool(local_of(gradient).any())):
            return LossError(
                f"the loss took gradients off: {name} lost the gradient of earlier micro-batches. Expected a loss "
                "that leaves .grad as it is; take zero_grad() out of it, since gradients are zeroed once for each "
                "logical batch"
            )
        if not self._is_alone:
            return LossError(
                f"{name} got a gradient while the loss ran: it called backward() itself, or the loss on another device "
                "leaves its own copy of the model and uses this one. Expected a loss that is returned and uses the "
                "model that it is given"
            )
        return LossError(
            f"the loss called backward() itself: {name} got a gradient in it. Expected a loss that is returned, or "
            "yielded, and differentiated by anybatch; take backward() out of it, and return the sum of several losses, "
            "a dict of them, or yield one after the other. A net that the loss trains, as a discriminator, needs a "
            "step of its own before this one: anybatch.TrainStep(net, its_loss, its_optimizer)"
        )
