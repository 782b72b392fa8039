"""``freeze``: excludes parts of a model from training."""

import fnmatch
import logging

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.errors import BatchError
from anybatch.memory.places import Handle
from anybatch.units import format_bytes
from anybatch.update.batchnorm import to_eval_mode

logger = logging.getLogger(__name__)


class Frozen(Handle):
    """The result of ``freeze``; ``remove()`` undoes it, and BatchNorm follows the model. Also a context manager.

    Attributes:
        parameters: names of the frozen parameters.
        modules: names of the BatchNorm modules in evaluation mode.
        gradient_bytes: the bytes that the gradients of these parameters would take.
        optimizer_bytes: the bytes of two moments per parameter, as in Adam.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        >>> with freeze(model, "0.*") as frozen:
        ...     frozen.parameters, frozen.gradient_bytes
        (['0.weight', '0.bias'], 48)
        >>> model[0].weight.requires_grad
        True
    """

    def __init__(
        self, model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter], modules: dict[str, torch.nn.Module]
    ) -> None:
        self.parameters = list(parameters)
        self.modules = list(modules)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
        self.optimizer_bytes = 2 * self.gradient_bytes
        followed = [module for module in modules.values() if module.training == model.training]

        def unfreeze() -> None:
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            for module in followed:
                module.training = model.training

        super().__init__([unfreeze, *(m.register_forward_pre_hook(to_eval_mode).remove for m in modules.values())])
        for parameter in parameters.values():
            parameter.requires_grad_(False)
            parameter.grad = None
        for module in modules.values():
            module.training = False

    def __repr__(self) -> str:
        return (
            f"Frozen({len(self.parameters)} parameters, {len(self.modules)} BatchNorm modules, saves "
            f"{format_bytes(self.gradient_bytes)} of gradients and {format_bytes(self.optimizer_bytes)} of Adam's "
            "state)"
        )


def freeze(model: torch.nn.Module, *patterns: str) -> Frozen:
    """Freezes parameters: ``requires_grad=False``, no gradient memory, and BatchNorm with its running statistics.

    A BatchNorm module that a pattern matches is put in evaluation mode, and its forward stays in evaluation mode after
    ``model.train()``. Dropout does not change. Activations upstream of the first trained parameter are no longer saved,
    either. Pass only trained parameters to the optimizer: it skips parameters without a gradient, but keeps the state
    that it has for them.

    Args:
        model: the model.
        *patterns: shell-style patterns of qualified parameter or module names: ``"encoder"`` and ``"encoder.*"`` match
            the whole encoder, ``"*.bias"`` every bias.

    Returns:
        A handle with ``remove()`` and the bytes saved.

    Raises:
        BatchError: there is no pattern, or one is not a string or matches nothing. Nothing was frozen.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        >>> frozen = freeze(model, "0", "1")
        >>> model.train()[1].training, [p.requires_grad for p in model.parameters()][:4]
        (True, [False, False, False, False])
        >>> _ = model(torch.ones(1, 3))  # one sample: BatchNorm in training mode would refuse it
        >>> frozen.remove()
    """
    if not patterns:
        raise BatchError("freeze got no pattern; expected names such as freeze(model, 'encoder.*')")
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}  # a tied one by its first name
    modules: dict[str, torch.nn.Module] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise BatchError(
                f"freeze: got a {type(pattern).__name__}; expected names such as freeze(model, 'encoder.*')"
            )
        named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if _matches(name, pattern)}
        inside = {name: m for name, m in model.named_modules() if name and _matches(name, pattern)}
        if not named and not inside:
            known = [name for name, _ in model.named_children()] or [name for name, _ in model.named_parameters()]
            raise BatchError(f"freeze: {pattern!r} matches no parameter and no module; the model has {known[:20]}")
        for name, p in named.items():
            if p.requires_grad:
                found.setdefault(id(p), (name, p))
        modules.update({name: m for name, m in inside.items() if isinstance(m, _BatchNorm)})
    frozen = Frozen(model, dict(found.values()), modules)
    logger.info("%r", frozen)
    return frozen


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
