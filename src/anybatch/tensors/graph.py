"""The autograd graph behind a tensor."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import forward_ad

from anybatch.torch_private import in_transform, number_of_backward


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a backward from a tensor would give a gradient to.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> [leaf is weight for leaf in leaves_of((weight * 3).sum() + weight.sum())]
        [True]
    """
    return [node.variable for node in _accumulators_behind([tensor])]


def _accumulators_behind(tensors: Iterable[torch.Tensor], known: Iterable[Any] = ()) -> list[Any]:
    """The nodes that would put a gradient on a leaf, each once and without those that are known."""
    found: list[Any] = []
    waiting: list[Any] = list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    seen = {*known, *waiting}
    accumulates: dict[type, bool] = {}
    for node in waiting:
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            kind = type(following)
            if kind not in accumulates:  # asked of the type, since a node of the user's own may have any attribute
                accumulates[kind] = hasattr(kind, "variable")
            (found if accumulates[kind] else waiting).append(following)
    return found


def is_transformed() -> bool:
    """Whether what runs now is differentiated in another way than by a backward through its graph.

    A transform of ``torch.func`` is running, or a level of forward-mode differentiation is open. Hooks on saved tensors
    and functions with nothing but a backward do not work there.
    """
    return in_transform() or forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread, as it is while a checkpoint recomputes its forward."""
    return number_of_backward() != -1


_second_time: ContextVar[bool] = ContextVar("anybatch_second_time", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Tells what counts forwards that the ones in this block run for the second time."""
    token = _second_time.set(True)
    try:
        yield
    finally:
        _second_time.reset(token)


def is_recomputing() -> bool:
    """Whether a forward runs for the second time: in a backward, for a checkpoint, or in a second pass."""
    return _second_time.get() or in_backward()


class OutsideLeaves:
    """Leaves that get a gradient though nobody named them, such as a temperature that a loss function closes over.

    Their gradients are taken off when they are found, so that the new ones are alone until they are added.

    Args:
        known: the leaves that are cared for elsewhere.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(leaf) for leaf in known}
        self._accumulators: set[Any] = set()  # held, so that the graph of the next micro-batch has the same ones
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def found(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """What was found, each with the gradient that it had."""
        return self._found

    def know(self, leaves: Iterable[torch.Tensor]) -> None:
        """Names more leaves that are cared for elsewhere."""
        self._known.update(id(leaf) for leaf in leaves)

    def look_behind(self, tensors: Iterable[torch.Tensor], *, ignoring: Iterable[torch.Tensor] = ()) -> None:
        """Finds the leaves behind some tensors and takes their gradients off."""
        ignored = {id(leaf) for leaf in ignoring}
        for node in _accumulators_behind(tensors, self._accumulators):
            leaf = node.variable
            if id(leaf) in ignored:
                continue
            self._accumulators.add(node)
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._found.append((leaf, leaf.grad))
                leaf.grad = None
