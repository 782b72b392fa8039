"""``cut``: detaches tensors, backpropagates each loss computed from them, then the shared part once."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.accelerators import is_accelerator
from anybatch.batch.trees import map_leaves
from anybatch.errors import AnyBatchError, CutClosed, LossError, NotSplittable, warn
from anybatch.loss.norms import total_norm
from anybatch.tensors.graph import OutsideLeaves
from anybatch.torch_private import number_of_backward, when_backward_ends

Weighting = Callable[[torch.Tensor], torch.Tensor]


class LossGradients:
    """Collects the gradients that each ``backward()`` call leaves at some leaves, as one row per call.

    Nested backwards, as of a reentrant checkpoint, belong to the outer call. A backward that fails, or reaches no leaf,
    has no row.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self.name = ""  # of the loss that is differentiated now; empty if it is not known
        self.names: list[str] = []
        self._rows: list[dict[int, torch.Tensor]] = []
        self._parts: dict[int, dict[int, torch.Tensor]] = {}  # by the number of the backward, then by the leaf
        self._handles = [
            leaf.register_post_accumulate_grad_hook(partial(self._take, index)) for index, leaf in enumerate(leaves)
        ]

    def _take(self, index: int, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            return
        number = number_of_backward()
        if number not in self._parts:
            when_backward_ends(partial(self._end, number))
        self._parts.setdefault(number, {})[index] = gradient.detach()

    def _end(self, number: int, inside_another: bool) -> None:
        if inside_another or not self._parts:
            return
        row: dict[int, torch.Tensor] = {}
        parts, self._parts = self._parts, {}
        for at, gradients in sorted(parts.items()):
            if at >= number:  # nested backwards have higher numbers; lower ones are of a backward that failed
                for index, gradient in gradients.items():
                    row[index] = _sum(row[index], gradient) if index in row else gradient
        self.add(row)

    def add(self, row: dict[int, torch.Tensor]) -> None:
        """Adds a row: the gradients of the leaves that a loss reaches, by index."""
        self.names.append(self.name or f"loss_{len(self._rows)}")
        self._rows.append(row)

    def close(self) -> None:
        """Removes the hooks; the rows stay."""
        for handle in self._handles:
            handle.remove()

    def sums(self) -> dict[int, torch.Tensor]:
        """The sum of the rows at each leaf, by index; clears the rows."""
        found: dict[int, torch.Tensor] = {}
        while self._rows:
            for index, gradient in self._rows.pop(0).items():  # not in place: others may hold the first tensor
                found[index] = _sum(found[index], gradient) if index in found else gradient
        return found

    def norms(self, device: torch.device, scale: torch.Tensor | None) -> torch.Tensor:
        """The norms of the K rows, in float32 or float64, without a device synchronization."""
        found = [total_norm([_flat(gradient, scale) for gradient in row.values()]) for row in self._rows]
        there = [norm.to(device, self._dtype(), non_blocking=is_accelerator(device)) for norm in found]
        return torch.stack(there) if there else torch.empty(0, dtype=self._dtype(), device=device)

    def weighted(
        self, weighting: Weighting, leaves: Sequence[torch.Tensor], scale: torch.Tensor | None
    ) -> dict[int, torch.Tensor]:
        """The gradient of each leaf, by index, from the rows as ``weighting`` combines them; clears the rows.

        The matrix is divided by ``scale``, and the result multiplied. With a scale, rows that are not finite are summed
        without ``weighting``, so that the scaler finds them and skips the update.
        """
        reached = sorted({index for row in self._rows for index in row})
        matrix = self._matrix(reached, leaves, scale)
        if scale is not None and not bool(matrix.isfinite().all()):
            return self.sums()
        self._rows.clear()
        vector = _combined(weighting(matrix), matrix)
        del matrix
        pieces = vector.split([_length(leaves[index]) for index in reached])
        found = {}
        for index, piece in zip(reached, pieces, strict=True):
            leaf = leaves[index]
            numbers = piece if scale is None else piece * scale.to(piece.device, piece.dtype)
            if leaf.is_complex():
                numbers = torch.view_as_complex(numbers.reshape(*leaf.shape, 2).contiguous())
            found[index] = numbers.reshape(leaf.shape).to(leaf.device, leaf.dtype)
        return found

    def _matrix(
        self, reached: Sequence[int], leaves: Sequence[torch.Tensor], scale: torch.Tensor | None
    ) -> torch.Tensor:
        lengths = [_length(leaves[index]) for index in reached]
        device = leaves[reached[0]].device
        matrix = torch.zeros(len(self._rows), sum(lengths), dtype=self._dtype(), device=device)
        for target, row in zip(matrix, self._rows, strict=True):
            for index, piece in zip(reached, target.split(lengths), strict=True):
                if index in row:
                    piece.copy_(_flat(row[index], None))
        if scale is not None:
            matrix /= scale.to(device, matrix.dtype)
        return matrix

    def _dtype(self) -> torch.dtype:
        dtypes = (gradient.dtype.to_real() for row in self._rows for gradient in row.values())
        return functools.reduce(torch.promote_types, dtypes, torch.float32)


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one + other if one.layout is torch.strided else other + one  # torch needs the dense one first


def _flat(gradient: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    numbers = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
    if scale is None:
        return numbers
    return numbers.to(torch.promote_types(torch.float32, numbers.dtype)) / scale.to(numbers.device)


def _length(leaf: torch.Tensor) -> int:
    return leaf.numel() * (2 if leaf.is_complex() else 1)


def _combined(result: Any, matrix: torch.Tensor) -> torch.Tensor:
    rows, length = matrix.shape
    if not isinstance(result, torch.Tensor):
        raise LossError(f"weighting gave a {type(result).__name__}; expected {_expected(rows, length)}")
    given: torch.Tensor = result.detach().to(matrix.device, matrix.dtype)
    if given.shape == (rows,) == (length,):
        raise LossError(
            f"weighting gave {rows} elements for a matrix of {rows} x {length}, which could be the combined gradient "
            f"or the weights; expected shape (1, {length}) for the gradient, or ({rows}, 1) for the weights"
        )
    if given.shape in ((length,), (1, length)):
        return given.reshape(length)
    if given.shape in ((rows,), (rows, 1)):
        return given.reshape(rows) @ matrix
    raise LossError(f"weighting gave a tensor of shape {tuple(given.shape)}; expected {_expected(rows, length)}")


def _expected(rows: int, length: int) -> str:
    return (
        f"a tensor of {length} elements, the combined gradient at the cut, or of {rows} weights, one per loss, for the "
        f"{rows} x {length} matrix that it was given"
    )


_open_cuts: ContextVar[tuple["_Open", ...]] = ContextVar("anybatch_open_cuts", default=())


class Restriction(NamedTuple):
    """Settings of the running accumulation that apply to every backward in it."""

    inputs: tuple[torch.Tensor, ...] | None = None  # the only tensors that get a gradient, or ``None`` for all
    outside: OutsideLeaves | None = None  # collects leaves that are in no list, or ``None``
    micro_batches: int = 1  # of the logical batch
    scale: torch.Tensor | None = None  # of the GradScaler, or ``None``


_UNRESTRICTED = Restriction()
accumulation: ContextVar[Restriction] = ContextVar("anybatch_accumulation", default=_UNRESTRICTED)


class _Open:
    """A block in which leaves stand in for tensors."""

    def __init__(self, leaves: Sequence[torch.Tensor] = ()) -> None:
        self.leaves = leaves  # that stand for the tensors, while the block is open
        self._without_backward_is_fine = True
        self._yielded: list[str] = []

    def _expect(self, name: str) -> None:
        """The next backward is of a loss of this name; empty if nobody knows."""

    def _open(self) -> None:
        _open_cuts.set((*_open_cuts.get(), self))

    def _close(self) -> None:
        _open_cuts.set(tuple(other for other in _open_cuts.get() if other is not self))


@contextmanager
def standing(leaves: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Lets backwards in this block fill the gradients of leaves that are no parameters."""
    mine = _Open([leaf for leaf in leaves if leaf is not None])
    mine._open()
    try:
        yield
    finally:
        mine._close()


class cut(_Open):  # noqa: N801  # reads as a verb: with cut(tensors) as tensors
    """Detaches tensors at a cut, backpropagates each loss up to it, then the shared part once.

    Inside the block, detached leaves replace the tensors. Each ``backward()`` there frees its own graph and adds its
    gradient at the cut. At the end of the block the sum of these gradients is backpropagated through the shared part,
    once.

    After an exception in the block nothing goes upstream. Without a ``backward()`` in the block nothing goes upstream,
    either, and a warning says so. Tensors that do not require a gradient, and all other values, are passed through.
    When a gradient reaches a leaf after the block, ``CutClosed`` is raised.

    With ``per_loss`` or ``weighting`` the gradient of each ``backward()`` at the cut (not of the parameters) is kept as
    one of K rows. A backward of several losses together is one row, and so is the backward of a cut inside this one. A
    loss that does not reach the cut has no row.

    Args:
        tensors: a tensor or any nested container of tensors.
        weighting: a function of the K x N matrix of the rows, in float32 or float64. It returns the N elements that go
            upstream instead of the sum, as an aggregator of TorchJD does, or K weights for the rows. It needs the whole
            batch in one micro-batch. The scale of a ``GradScaler`` of ``TrainStep`` or ``backward`` is removed first.
        per_loss: keeps the rows and computes their norms, also without ``weighting``; if the batch is split, in each
            micro-batch separately and with its weight.

    Attributes:
        names: after the block, the names of the losses with a row: as yielded, or ``loss_0`` and so on.
        norms: after the block, the norms of the K rows, a detached tensor on the device.

    Raises:
        LossError: ``weighting`` is not callable or returned something else, or a tensor at the cut was written to in
            place.
        NotSplittable: there is a ``weighting``, and the batch is split.
        CutClosed: it was entered before, or a gradient reached a leaf after the block.
        AnyBatchError: ``names`` or ``norms`` were read before the end of the block, or without ``per_loss``.

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
            when = "its block has not ended without an error" if self._per_loss else "pass per_loss=True to keep them"
            raise AnyBatchError(f"this cut has no gradients per loss; {when}. Read them after the with block")
        return self._measured

    def __enter__(self) -> Any:
        if self._closed or self._pairs:
            raise CutClosed("this cut was already entered; make a new one: with anybatch.cut(tensors) as tensors:")
        micro_batches = accumulation.get().micro_batches
        if self._weighting is not None and torch.is_grad_enabled() and micro_batches > 1:
            raise NotSplittable(
                f"weighting= of anybatch.cut sees the losses of one of {micro_batches} micro-batches, and "
                "weighting each separately is not weighting the whole batch; expected the whole batch: use "
                "anybatch.Coupled(lambda model, batch: model.trunk(batch), heads), whose loss heads(model, "
                "features) sees all of it, with the cut in there, or one micro-batch (micro_batch_size=None)"
            )
        tensors, self._tensors = self._tensors, None
        stands_in = map_leaves(self._stand_for, tensors) if torch.is_grad_enabled() else tensors
        self._leaf_of.clear()
        self.leaves = [leaf for _, leaf in self._pairs]
        if self._per_loss:
            self._rows = LossGradients(self.leaves)
        self._open()
        return stands_in

    def _stand_for(self, tensor: Any) -> Any:
        if isinstance(tensor, PackedSequence):
            return PackedSequence(self._stand_for(tensor.data), *tensor[1:])
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._leaf_of:  # a tensor in two places is one leaf, which gets the sum of both gradients
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
                "inside `with anybatch.cut(...)`, or use the tensor from before the cut"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        self._closed, self.leaves = True, ()
        pairs, self._pairs = self._pairs, []
        were, self._as_they_were = self._as_they_were, []
        gradients = {index: leaf.grad for index, (_, leaf) in enumerate(pairs) if leaf.grad is not None}
        for _, leaf in pairs:
            leaf.grad = None
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()
        if error is not None:
            if (explained := written_in_place(error, "a tensor from anybatch.cut")) is not None:
                raise explained from error
            return
        if any(tensor.grad_fn is not node for (tensor, _), (node, _) in zip(pairs, were, strict=True)):
            raise _changed_in_place()
        leaves = [leaf for _, leaf in pairs]
        with ExitStack() as stack:  # a backward does not run under autocast
            for device in {leaf.device.type for leaf in leaves}:
                stack.enter_context(torch.autocast(device, enabled=False))
            if rows is not None:
                if gradients:  # set by the user's code, not by a backward
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
        if pairs and not gradients and not self._without_backward_is_fine:
            warn(
                "no backward() was called inside `with anybatch.cut(...)`, so no gradient went upstream; call it "
                "in the block, or leave the cut out",
            )

    def _joined(self, rows: LossGradients, leaves: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Computes the norms of the rows, and combines the rows into the gradients that go upstream."""
        scale = accumulation.get().scale
        device = leaves[0].device if leaves else torch.device("cpu")
        self._measured = tuple(rows.names), rows.norms(device, scale)
        if self._weighting is None or not rows.names:
            return rows.sums()
        return rows.weighted(self._weighting, leaves, scale)

    def _expect(self, name: str) -> None:
        if self._rows is not None:
            self._rows.name = name


def written_in_place(error: BaseException, what: str) -> LossError | None:
    """The error that names the tensor, for autograd's about an in-place operation on a leaf."""
    if not isinstance(error, RuntimeError) or "leaf Variable that requires grad" not in str(error):
        return None
    return LossError(
        f"{what} was changed in place (such as relu_ or x += 1), which can't be differentiated where the graph is "
        "cut; use the out-of-place version, or clone the tensor first"
    )


@contextmanager
def in_place_explained(what: str) -> Iterator[None]:
    """Raises ``written_in_place`` for the tensors of a block."""
    try:
        yield
    except RuntimeError as error:
        if (explained := written_in_place(error, what)) is not None:
            raise explained from error
        raise


def _changed_in_place() -> LossError:
    return LossError(
        "a tensor that was passed to anybatch.cut was written to in place in its block, and the backward pass of "
        "the shared part needs its old value; use the out-of-place version, or clone the tensor first"
    )


def backward_to_leaves(tensors: list[torch.Tensor], gradients: list[torch.Tensor], name: str = "") -> None:
    """Runs ``torch.autograd.backward``, restricted to the inputs of the running accumulation if it has any."""
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
            # autograd fills only what is named: without the leaves of cuts no gradient reaches inputs upstream of them.
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
    """The leaves of all open cuts."""
    return [leaf for opened in _open_cuts.get() for leaf in opened.leaves]


def declare_nothing_to_do() -> None:
    """Tells the open cuts that a loss was left out on purpose, so that they do not warn without a ``backward()``."""
    for opened in _open_cuts.get():
        opened._without_backward_is_fine = True
