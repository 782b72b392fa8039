"""The gradient of each loss where the graph is cut: one row a loss, of the cut and never of the parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from anybatch.errors import LossError
from anybatch.torch_private import number_of_backward, when_backward_ends

Weighting = Callable[[torch.Tensor], torch.Tensor]


class LossGradients:
    """Takes what each ``backward()`` leaves at some leaves, one row each.

    A backward is what one call of it does, whatever runs inside: a checkpoint that runs a backward of its own is no
    loss of its own. One that fails gives no row. A loss that reaches no leaf gives none either.

    Args:
        leaves: are watched until ``close`` is called.

    Attributes:
        name: of the loss that is being differentiated; empty where nobody knows it.
        names: of the rows.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self.name = ""
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
            if at >= number:  # what ran inside began later; what began before has failed
                for index, gradient in gradients.items():
                    row[index] = _sum(row[index], gradient) if index in row else gradient
        self.add(row)

    def add(self, row: dict[int, torch.Tensor]) -> None:
        """Adds a row that was made by hand.

        Args:
            row: the gradient of each leaf that the loss reaches, by the number of the leaf.
        """
        self.names.append(self.name or f"loss_{len(self._rows)}")
        self._rows.append(row)

    def close(self) -> None:
        """Takes the hooks off; what was taken stays."""
        for handle in self._handles:
            handle.remove()

    def sums(self) -> dict[int, torch.Tensor]:
        """The sum over the losses at each leaf that one reached, as autograd adds; the rows are gone afterwards."""
        found: dict[int, torch.Tensor] = {}
        fresh: set[int] = set()
        while self._rows:
            for index, gradient in self._rows.pop(0).items():
                if index not in found:
                    found[index] = gradient
                elif index in fresh and found[index].layout == gradient.layout:
                    found[index] += gradient
                else:  # the first one may be a tensor that someone else holds
                    found[index] = _sum(found[index], gradient)
                    fresh.add(index)
        return found

    def norms(self, device: torch.device, scale: torch.Tensor | None) -> torch.Tensor:
        """The norm of each row.

        Returns:
            K norms, in float32 or float64; nothing waits for the device.
        """
        dtype = self._dtype()
        squares = torch.zeros(len(self._rows), dtype=dtype, device=device)
        for number, row in enumerate(self._rows):
            for gradient in row.values():
                flat = _flat(gradient, scale).to(dtype)
                squares[number] += torch.dot(flat, flat).to(device)
        return squares.sqrt()

    def weighted(
        self, weighting: Weighting, leaves: Sequence[torch.Tensor], scale: torch.Tensor | None
    ) -> dict[int, torch.Tensor]:
        """Combines the rows by a function of all of them; they are gone afterwards.

        Args:
            weighting: takes the matrix of K rows of N numbers; gives N numbers, which go upstream, or K weights.
            leaves: give shape, dtype and device.
            scale: is taken off the matrix and put on the result. With one, rows that are not finite are summed
                without asking ``weighting``, so that the scaler sees them and skips the update.
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
            scaled = piece if scale is None else piece * scale.to(piece.device, piece.dtype)
            found[index] = _shaped(scaled, leaf).to(leaf.device, leaf.dtype)
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
        dtype = torch.float32
        for row in self._rows:
            for gradient in row.values():
                dtype = torch.promote_types(dtype, gradient.dtype.to_real())
        return dtype


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one + other if one.layout is torch.strided else other + one  # of a dense and a sparse one, dense is first


def _flat(gradient: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    numbers = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
    if scale is None:
        return numbers
    return numbers.to(torch.promote_types(torch.float32, numbers.dtype)) / scale.to(numbers.device)


def _length(leaf: torch.Tensor) -> int:
    return leaf.numel() * (2 if leaf.is_complex() else 1)


def _shaped(numbers: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    if leaf.is_complex():
        return torch.view_as_complex(numbers.reshape(*leaf.shape, 2).contiguous())
    return numbers.reshape(leaf.shape)


def _combined(result: Any, matrix: torch.Tensor) -> torch.Tensor:
    """The vector that goes upstream, from a vector or from weights."""
    rows, length = matrix.shape
    if not isinstance(result, torch.Tensor):
        raise LossError(f"weighting gave a {type(result).__name__}; expected {_expected(rows, length)}")
    given: torch.Tensor = result.detach().to(matrix.device, matrix.dtype)
    if given.shape == (rows,) == (length,):
        raise LossError(
            f"weighting gave {rows} numbers for a matrix of {rows} x {length}, which may be the combined row or the "
            f"weights; expected a tensor of shape (1, {length}) for the row, or ({rows}, 1) for the weights"
        )
    if given.shape in ((length,), (1, length)):
        return given.reshape(length)
    if given.shape in ((rows,), (rows, 1)):
        return given.reshape(rows) @ matrix
    raise LossError(f"weighting gave a tensor of shape {tuple(given.shape)}; expected {_expected(rows, length)}")


def _expected(rows: int, length: int) -> str:
    return (
        f"a tensor of {length} numbers, the combined gradient at the cut, or of {rows} weights, one a loss, from the "
        f"{rows} x {length} matrix that it was given"
    )
