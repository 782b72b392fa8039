"""Dropout that the random state does not put back: cuDNN draws that between the layers of a recurrent module itself.

https://github.com/pytorch/pytorch/issues/74177 and https://github.com/pytorch/pytorch/issues/104697.
"""

from collections.abc import Iterable

import torch


def hidden_dropout(modules: Iterable[torch.nn.Module], *, on_cuda: bool | None = None) -> list[torch.nn.RNNBase]:
    """The recurrent modules that would draw other masks if their forward ran again.

    Args:
        modules: are to run twice.
        on_cuda: whether they run there with cuDNN; ``None`` to look.

    Returns:
        Those in training mode with dropout between several layers.

    Example:
        >>> lstm = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.1)
        >>> hidden_dropout([lstm]), hidden_dropout([lstm], on_cuda=True) == [lstm]
        ([], True)
    """
    found = [m for m in modules if isinstance(m, torch.nn.RNNBase) and m.training and m.dropout and m.num_layers > 1]
    if on_cuda is None:
        found = [module for module in found if torch.backends.cudnn.enabled and _is_on_cuda(module)]
    return found if on_cuda is not False else []


def _is_on_cuda(module: torch.nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def in_words(module: torch.nn.RNNBase) -> str:
    """Says what it is and why it can't run twice."""
    return (
        f"{type(module).__name__}(num_layers={module.num_layers}, dropout={module.dropout}) on CUDA: cuDNN draws the "
        "dropout between its layers from a state of its own, which the random state does not put back, so a second "
        "forward would draw other masks"
    )
