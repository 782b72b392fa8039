"""Models and losses that keep tensors of one step for the next, in every place where people keep them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@functools.lru_cache
def bounded_mask(length: int) -> Tensor:
    return torch.ones(length, length).tril()


@functools.cache
def unbounded_mask(length: int) -> tuple[Tensor, Tensor]:
    return torch.ones(length, length).tril(), torch.arange(length)


MASKS: dict[int, Any] = {}


def mask_in_a_dictionary(length: int) -> Tensor:
    if length not in MASKS:
        MASKS[length] = [torch.ones(length, length).tril()]
    mask: Tensor = MASKS[length][0]
    return mask


class Keeper:
    """Keeps a mask in an attribute, of itself or of its class."""

    shared: Tensor | None = None

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def own(self, length: int) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(length, length).tril()
        return self.mask

    def of_the_class(self, length: int) -> Tensor:
        if Keeper.shared is None:
            Keeper.shared = torch.ones(length, length).tril()
        return Keeper.shared


class Watcher:
    """Keeps the last activation, and is never asked for it by the step itself."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.last = output


def forget() -> None:
    """Empties all places."""
    bounded_mask.cache_clear()
    unbounded_mask.cache_clear()
    MASKS.clear()
    Keeper.shared = None


def loss_with(mask: Callable[[int], Any]) -> Callable[[Any, Tensor], Tensor]:
    """A loss over sequences ``[m, length, width]`` that asks for a mask."""

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        found = mask(batch.shape[1])
        found = found[0] if isinstance(found, tuple) else found
        loss: Tensor = (found @ model(batch)).square().mean()
        return loss

    return loss_fn
