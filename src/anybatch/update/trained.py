"""The tensors that a step trains."""

from collections.abc import Sequence

import torch


class Trained:
    """All parameters that get a gradient in a step.

    Args:
        model: has them, and their names.
        optimizers: may have more, also later.
        inputs: the only tensors that get a gradient, in the place of the model's; ``None`` for all.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._inputs = inputs
        self._parameters: list[torch.Tensor] = []
        self._known: list[int] = []

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizers and the model, or the inputs in its place; anew when a group has others."""
        stepped = [p for one in self._optimizers for group in one.param_groups for p in group["params"]]
        known = list(map(id, stepped))  # which all live on in what was found for them
        if known != self._known:
            found = dict(zip(known, stepped, strict=True))
            found.update((id(p), p) for p in (self._model.parameters() if self._inputs is None else self._inputs))
            self._parameters = list(found.values())
            self._known = known
        return self._parameters

    def names(self) -> dict[int, str]:
        """The names of the model's parameters by their ids."""
        return {id(p): name for name, p in self._model.named_parameters()}
