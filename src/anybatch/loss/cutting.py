"""The graph cut: finish downstream piece by piece, then go upstream once."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.trees import map_leaves
from anybatch.errors import AnyBatchError, AnyBatchWarning, CutClosed, LossError, NotSplittable
from anybatch.loss.lossrows import LossGradients, Weighting
from anybatch.tensors.graph import OutsideLeaves

_open_cuts: ContextVar[tuple["_Open", ...]] = ContextVar("anybatch_open_cuts", default=())


class Restriction(NamedTuple):
    """What a running accumulation wants of every backward in it.

    Args:
        inputs: the only tensors that get a gradient, or ``None`` for all.
        outside: is notified of leaves that nobody named, or ``None``.
        micro_batches: in how many the batch is split.
        scale: what losses are multiplied by beside their weight, or ``None``.
    """

    inputs: tuple[torch.Tensor, ...] | None = None
    outside: OutsideLeaves | None = None
    micro_batches: int = 1
    scale: torch.Tensor | None = None


_UNRESTRICTED = Restriction()
accumulation: ContextVar[Restriction] = ContextVar("anybatch_accumulation", default=_UNRESTRICTED)


class _Open:
    """Leaves that stand for tensors while something is differentiated down to them."""

    def __init__(self) -> None:
        self._leaves: Sequence[torch.Tensor] = ()
        self._without_backward_is_fine = True
        self._yielded: list[str] = []

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The leaves that stand for the tensors."""
        return self._leaves

    def _expect(self, name: str) -> None:
        """The next backward is of a loss of this name; empty if nobody knows."""

    def _open(self) -> None:
        _open_cuts.set((*_open_cuts.get(), self))

    def _close(self) -> None:
        _open_cuts.set(tuple(other for other in _open_cuts.get() if other is not self))


@contextmanager
def standing(leaves: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Lets leaves get gradients that no parameter stands for."""
    mine = _Open()
    mine._leaves = [leaf for leaf in leaves if leaf is not None]
    mine._open()
    try:
        yield
    finally:
        mine._close()


class cut(_Open):  # noqa: N801  # reads as a verb: with cut(tensors) as tensors
    """Cuts the graph at some tensors, so that what is computed from them can be differentiated piece by piece.

    Inside of the block leaves stand for the tensors. Each ``backward()`` there frees its own graph and leaves its
    gradient at the cut; at the end of the block the sum of these gradients goes upstream, once.

    An exception in the block leaves upstream untouched. With no ``backward()`` in the block nothing is sent upstream,
    and a warning says so. Tensors without gradient, tensors that are not floating point and everything else pass
    through. A leaf that is used after the block raises ``CutClosed`` when a gradient reaches it.

    With ``per_loss`` or ``weighting`` the gradient of each ``backward()`` at the cut is kept by itself, as one of K
    rows: of the cut, never of the parameters. A backward of several losses together is one row, and so is what a cut
    inside of this one sends up. A loss that does not reach the cut has none.

    Args:
        tensors: a tensor or any nested container of them.
        weighting: takes the K x N matrix of the rows in float32 or float64, gives the N numbers that go upstream in the
            place of their sum, such as an aggregator of TorchJD, or K weights for the rows. It needs the whole batch
            in one micro-batch. Losses that a scaler scaled within ``TrainStep`` or ``backward`` are unscaled here.
        per_loss: keeps the rows and takes their norms, also without ``weighting``; in micro-batches the rows of each by
            itself, with its weight.

    Attributes:
        names: after the block, the names of the losses that have a row: as they were yielded, or ``loss_0`` and so on.
        norms: after the block, the K norms of the rows, a detached tensor on the device.

    Raises:
        LossError: the first operation on a leaf writes in place, which a leaf does not allow; or ``weighting`` gave
            neither of the two.
        NotSplittable: there is a ``weighting``, and the batch is split.

    Example:
        >>> trunk, heads = torch.nn.Linear(4, 3), [torch.nn.Linear(3, 1) for _ in range(2)]
        >>> with cut(trunk(torch.ones(5, 4))) as features:
        ...     for head in heads:
        ...         head(features).mean().backward()
        >>> trunk.weight.grad.shape
        torch.Size([3, 4])
        >>> apart = cut(trunk(torch.ones(5, 4)), per_loss=True)
        >>> with apart as features:
        ...     for times in (1, 2):
        ...         (times * heads[0](features).mean()).backward()
        >>> apart.names, round(float(apart.norms[1] / apart.norms[0]), 4)
        (('loss_0', 'loss_1'), 2.0)
    """

    def __init__(self, tensors: Any, *, weighting: Weighting | None = None, per_loss: bool = False) -> None:
        if weighting is not None and not callable(weighting):
            raise LossError(
                f"weighting is a {type(weighting).__name__}; expected a function of the K x N matrix of the gradients "
                "of the losses at the cut, or None"
            )
        super().__init__()
        self._without_backward_is_fine = False
        self._tensors: Any = tensors
        self._weighting = weighting
        self._per_loss = per_loss or weighting is not None
        self._rows: LossGradients | None = None
        self._measured: tuple[tuple[str, ...], torch.Tensor] | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._as_they_were: list[tuple[Any, int]] = []
        self._leaf_of: dict[int, torch.Tensor] = {}
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the losses that have a row."""
        return self._measurement()[0]

    @property
    def norms(self) -> torch.Tensor:
        """The norm of each row."""
        return self._measurement()[1]

    def _measurement(self) -> tuple[tuple[str, ...], torch.Tensor]:
        if self._measured is None:
            when = "the block has not ended well" if self._per_loss else "they were not asked for: per_loss=True"
            raise AnyBatchError(f"this cut has no gradients of each loss; {when}. Read them after the with block")
        return self._measured

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The leaves that stand for the tensors."""
        return [leaf for _, leaf in self._pairs]

    def __enter__(self) -> Any:
        if self._closed or self._pairs:
            raise CutClosed("this cut was entered before; make a new one: with anybatch.cut(tensors) as tensors:")
        if self._weighting is not None and torch.is_grad_enabled():
            _refuse_to_weigh_parts(accumulation.get().micro_batches)
        tensors, self._tensors = self._tensors, None
        stands_in = map_leaves(self._stand_for, tensors) if torch.is_grad_enabled() else tensors
        self._leaf_of.clear()
        if self._per_loss:
            self._rows = LossGradients(self.leaves)
        self._open()
        return stands_in

    def _stand_for(self, tensor: Any) -> Any:
        if isinstance(tensor, PackedSequence):
            return PackedSequence(self._stand_for(tensor.data), *tensor[1:])
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._leaf_of:
            leaf = tensor.detach().requires_grad_()
            leaf.register_hook(self._refuse_late_gradient)
            self._pairs.append((tensor, leaf))
            self._as_they_were.append((tensor.grad_fn, tensor._version))
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
        self._close()
        self._closed = True
        pairs, self._pairs = self._pairs, []
        were, self._as_they_were = self._as_they_were, []
        gradients = {index: leaf.grad for index, (_, leaf) in enumerate(pairs) if leaf.grad is not None}
        for _, leaf in pairs:
            leaf.grad = None
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()
        if error is not None:
            _explain_in_place(error)
            return
        if any(tensor.grad_fn is not node for (tensor, _), (node, _) in zip(pairs, were, strict=True)):
            raise _changed_in_place()
        leaves = [leaf for _, leaf in pairs]
        with _without_autocast(leaves):  # a backward runs in the precision of its forward, not in autocast
            if rows is not None:
                if gradients:  # the user's own code put them there, no backward did
                    rows.add(gradients)
                gradients = self._joined(rows, leaves)
            if gradients:
                sent = [pairs[index][0] for index in gradients]
                try:
                    backward_to_leaves(sent, list(gradients.values()), "+".join(self._yielded))
                except RuntimeError as failed:
                    written = any(pair[0]._version != version for pair, (_, version) in zip(pairs, were, strict=True))
                    if written and "modified by an inplace operation" in str(failed):
                        raise _changed_in_place() from failed
                    raise
        if not gradients:
            self._warn_if_nothing_came(bool(pairs))

    def _joined(self, rows: LossGradients, leaves: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Takes the norms of the rows, and combines them into what goes upstream."""
        scale = accumulation.get().scale
        device = leaves[0].device if leaves else torch.device("cpu")
        self._measured = tuple(rows.names), rows.norms(device, scale)
        if self._weighting is None or not rows.names:
            return rows.sums()
        return rows.weighted(self._weighting, leaves, scale)

    def _expect(self, name: str) -> None:
        if self._rows is not None:
            self._rows.name = name

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


def _changed_in_place() -> LossError:
    return LossError(
        "a tensor that anybatch.cut had cut was written to in place in its block, though the gradient of what made it "
        "goes through it as it was; use the version that does not write in place, or clone the tensor first"
    )


def _without_autocast(tensors: list[torch.Tensor]) -> ExitStack:
    stack = ExitStack()
    for device in {tensor.device.type for tensor in tensors}:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _refuse_to_weigh_parts(micro_batches: int) -> None:
    if micro_batches > 1:
        raise NotSplittable(
            f"weighting= of anybatch.cut sees the losses of one of {micro_batches} micro-batches, and weighting each "
            "by itself is not weighting the whole batch; expected the whole batch: use "
            "anybatch.Coupled(lambda model, batch: model.trunk(batch), heads), whose loss heads(model, features) sees "
            "all of it, with the cut in there, or one micro-batch (micro_batch_size=None)"
        )


def backward_to_leaves(tensors: list[torch.Tensor], gradients: list[torch.Tensor], name: str = "") -> None:
    """Runs autograd backward, restricted to the inputs of the running accumulation if it has any.

    Args:
        tensors: what to differentiate.
        gradients: one for each of ``tensors``, of its shape.
        name: of the losses, for the cuts whose blocks are being run; empty if they have none.
    """
    restriction = accumulation.get()
    opened = _open_cuts.get()
    if restriction.outside is not None:
        restriction.outside.look_behind(tensors, ignoring=leaves_of_open_cuts())
    if opened and name:
        opened[-1]._yielded.append(name)
    for other in opened:
        other._expect(name)
    try:
        if restriction.inputs is None:
            torch.autograd.backward(tensors, gradients)
        else:
            torch.autograd.backward(tensors, gradients, inputs=[*restriction.inputs, *leaves_of_open_cuts()])
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":
            raise
        from anybatch.memory.checkpointing import differences_named

        with differences_named():
            raise
    finally:
        for other in opened:
            other._expect("")


def leaves_of_open_cuts() -> list[torch.Tensor]:
    """The leaves that stand for tensors in the blocks that are being run."""
    return [leaf for opened in _open_cuts.get() for leaf in opened.leaves]


def declare_nothing_to_do() -> None:
    """Tells the open cuts that a loss was left out on purpose, so that no ``backward()`` in them is no mistake."""
    for opened in _open_cuts.get():
        opened._without_backward_is_fine = True
