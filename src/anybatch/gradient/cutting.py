"""The graph cut: finish downstream piece by piece, then go upstream once."""

import warnings
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import AnyBatchWarning, CutClosed, LossError
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.trees import map_leaves

_open_cuts: ContextVar[tuple["cut", ...]] = ContextVar("anybatch_open_cuts", default=())


class Restriction(NamedTuple):
    """What a running accumulation wants of every backward in it.

    Args:
        inputs: the only tensors that get a gradient, or ``None`` for all.
        outside: is told of leaves that nobody named, or ``None``.
    """

    inputs: tuple[torch.Tensor, ...] | None = None
    outside: OutsideLeaves | None = None


_UNRESTRICTED = Restriction()
accumulation: ContextVar[Restriction] = ContextVar("anybatch_accumulation", default=_UNRESTRICTED)


class cut:  # noqa: N801  # reads as a verb: with cut(tensors) as tensors
    """Cuts the graph at some tensors, so that what is computed from them can be differentiated piece by piece.

    Inside of the block leaves stand for the tensors. Each ``backward()`` there frees its own graph and leaves its
    gradient at the cut; at the end of the block the sum of these gradients goes upstream, once.

    An exception in the block leaves upstream untouched. With no ``backward()`` in the block nothing is sent upstream,
    and a warning says so. Tensors without gradient, tensors that are not floating point and everything else pass
    through. A leaf that is used after the block raises ``CutClosed`` when a gradient reaches it.

    Args:
        tensors: a tensor or any nested container of them.

    Raises:
        LossError: the first operation on a leaf writes in place, which a leaf does not allow.

    Example:
        >>> trunk, heads = torch.nn.Linear(4, 3), [torch.nn.Linear(3, 1) for _ in range(2)]
        >>> with cut(trunk(torch.ones(5, 4))) as features:
        ...     for head in heads:
        ...         head(features).mean().backward()
        >>> trunk.weight.grad.shape
        torch.Size([3, 4])
    """

    def __init__(self, tensors: Any) -> None:
        self._tensors: Any = tensors
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._leaf_of: dict[int, torch.Tensor] = {}
        self._closed = False
        self._without_backward_is_fine = False

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves that stand for the tensors."""
        return [leaf for _, leaf in self._pairs]

    def __enter__(self) -> Any:
        if self._closed or self._pairs:
            raise CutClosed("this cut was entered before; make a new one: with anybatch.cut(tensors) as tensors:")
        tensors, self._tensors = self._tensors, None
        standing = map_leaves(self._stand_for, tensors) if torch.is_grad_enabled() else tensors
        self._leaf_of.clear()
        _open_cuts.set((*_open_cuts.get(), self))
        return standing

    def _stand_for(self, tensor: Any) -> Any:
        if isinstance(tensor, PackedSequence):
            return PackedSequence(self._stand_for(tensor.data), *tensor[1:])
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._leaf_of:
            leaf = tensor.detach().requires_grad_()
            leaf.register_hook(self._refuse_late_gradient)
            self._pairs.append((tensor, leaf))
            self._leaf_of[id(tensor)] = leaf
        return self._leaf_of[id(tensor)]

    def _refuse_late_gradient(self, gradient: torch.Tensor) -> None:
        if self._closed:
            raise CutClosed(
                "a gradient reached a cut tensor after its block had ended, so it would be lost; call backward() "
                "inside "
                "of `with anybatch.cut(...)`, or use the tensor from before the cut"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _open_cuts.set(tuple(other for other in _open_cuts.get() if other is not self))
        self._closed = True
        pairs, self._pairs = self._pairs, []
        gradients = [leaf.grad for _, leaf in pairs]
        for _, leaf in pairs:
            leaf.grad = None
        if error is not None:
            _explain_in_place(error)
            return
        reached = [(tensor, grad) for (tensor, _), grad in zip(pairs, gradients, strict=True) if grad is not None]
        if not reached:
            self._warn_if_nothing_came(bool(pairs))
            return
        device = reached[0][0].device.type
        with torch.autocast(device, enabled=False):  # a backward runs in the precision of its forward, not in autocast
            backward_to_leaves([tensor for tensor, _ in reached], [grad for _, grad in reached])

    def _warn_if_nothing_came(self, was_cut: bool) -> None:
        if was_cut and not self._without_backward_is_fine:
            warnings.warn(
                "no backward() was called inside of `with anybatch.cut(...)`, so no gradient went upstream; call it "
                "in the "
                "block, or leave the cut out",
                AnyBatchWarning,
                stacklevel=3,
            )


def _explain_in_place(error: BaseException) -> None:
    if isinstance(error, RuntimeError) and "leaf Variable that requires grad" in str(error):
        raise LossError(
            "the first operation on a tensor from anybatch.cut writes in place (such as relu_ or x += 1), which the "
            "leaf "
            "that stands for it does not allow; use the version that does not write in place, or clone the tensor first"
        ) from error


def backward_to_leaves(tensors: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Runs autograd backward, restricted to the inputs of the running accumulation if it has any.

    Args:
        tensors: what to differentiate.
        gradients: one for each of ``tensors``, of its shape.
    """
    inputs, outside = accumulation.get()
    if outside is not None:
        outside.look_behind(tensors, ignoring=leaves_of_open_cuts())
    if inputs is None:
        torch.autograd.backward(tensors, gradients)
    else:
        torch.autograd.backward(tensors, gradients, inputs=[*inputs, *leaves_of_open_cuts()])


def leaves_of_open_cuts() -> list[torch.Tensor]:
    """The leaves that stand for tensors in the blocks that are being run."""
    return [leaf for opened in _open_cuts.get() for leaf in opened.leaves]


def declare_nothing_to_do() -> None:
    """Tells the open cuts that a loss was left out on purpose, so that no ``backward()`` in them is no mistake."""
    for opened in _open_cuts.get():
        opened._without_backward_is_fine = True
