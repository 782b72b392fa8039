"""The autograd graph behind a tensor."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import forward_ad

from anybatch.torch_private import in_transform, number_of_backward


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that get a gradient in a backward from a tensor.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> [leaf is weight for leaf in leaves_of((weight * 3).sum() + weight.sum())]
        [True]
    """
    return [node.variable for node in _accumulators_behind([tensor])[0]]


def _accumulators_behind(tensors: Iterable[torch.Tensor], known: Iterable[Any] = ()) -> tuple[list[Any], set[type]]:
    """The ``AccumulateGrad`` nodes behind some tensors, each once, without known ones; and the types of all nodes."""
    found: list[Any] = []
    waiting: list[Any] = list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    seen = {*known, *waiting}
    accumulates: dict[type, bool] = dict.fromkeys(map(type, waiting), False)
    for node in waiting:
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            kind = type(following)
            if kind not in accumulates:  # asked of the type, since a node of the user may have any attribute
                accumulates[kind] = hasattr(kind, "variable")
            (found if accumulates[kind] else waiting).append(following)
    return found, {*accumulates}


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform or forward-mode AD is active.

    Hooks on saved tensors, and autograd functions with only a backward, do not work there.
    """
    return in_transform() or forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether a backward runs in this thread, as it does while a checkpoint recomputes its forward."""
    return number_of_backward() != -1


_second_time: ContextVar[bool] = ContextVar("anybatch_second_time", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Marks the forwards in this block as repeated, for what counts forwards."""
    token = _second_time.set(True)
    try:
        yield
    finally:
        _second_time.reset(token)


def is_recomputing() -> bool:
    """Whether a forward that runs now is repeated: for a checkpoint, or in a second pass."""
    return _second_time.get() or in_backward()


class OutsideLeaves:
    """Leaves that are in no list of parameters but get a gradient, such as a temperature in a closure of the loss.

    When one is found, its ``.grad`` is saved and set to ``None``, so that the new gradient stays apart.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(leaf) for leaf in known}
        self._accumulators: set[Any] = set()  # kept alive, so that the next micro-batch's graph has the same nodes
        self.found: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # leaves, each with its saved gradient
        self._kinds: set[type] = set()  # of the nodes

    @property
    def functions(self) -> set[str]:
        """The modules of Python of the autograd functions in Python that were met."""
        functions = (getattr(kind, "_forward_cls", None) for kind in self._kinds)
        return {one.__module__ for one in functions if one is not None}

    def know(self, leaves: Iterable[torch.Tensor]) -> None:
        """Adds leaves that are handled elsewhere."""
        self._known.update(id(leaf) for leaf in leaves)

    def look_behind(self, tensors: Iterable[torch.Tensor], *, ignoring: Iterable[torch.Tensor] = ()) -> None:
        """Finds new leaves behind some tensors, and saves and clears their gradients."""
        ignored = {id(leaf) for leaf in ignoring}
        accumulators, kinds = _accumulators_behind(tensors, self._accumulators)
        self._kinds |= kinds
        for node in accumulators:
            leaf = node.variable
            if id(leaf) in ignored:
                continue
            self._accumulators.add(node)
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self.found.append((leaf, leaf.grad))
                leaf.grad = None
