"""Sums of sparse gradients that hold each row of a table once."""

import math
from collections.abc import Iterable

import torch

from anybatch.accelerators import is_accelerator

MOVES = 8
"""Copies in which rows make room for new ones; each needs memory for its share of them."""


class SparseSums:
    """Adds up the sparse gradients of micro-batches in the order of the rows, with each row once.

    Autograd would append each gradient to the one before, so that the sum grows with the indices of all micro-batches
    however small the table is. It is given back as coalesced, so that no optimizer makes a copy to do that.

    Args:
        parameters: whose sparse ``.grad`` is taken over after each micro-batch; those with a dense one are left alone.
        in_float32: whether what is of low precision is added up in float32.

    Example:
        >>> table = torch.nn.Embedding(5, 1, sparse=True)
        >>> sums = SparseSums([table.weight])
        >>> for row in (3, 1, 3):
        ...     table(torch.tensor([row])).sum().backward()
        ...     sums.take_(3.0)
        >>> sums.give_()
        >>> table.weight.grad.indices(), table.weight.grad.values()
        (tensor([[1, 3]]), tensor([[1.],
                [2.]]))
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, in_float32: bool = False) -> None:
        self._parameters = self._open = list(parameters)
        self._in_float32 = in_float32
        self._sums: dict[int, _RowSum] = {}

    def take_(self, times: float) -> None:
        """Adds the sparse gradients to the sums and takes them off the parameters."""
        for parameter in self._open:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:
                parameter.grad = None
                self._add(parameter, gradient, times)
            del gradient  # before the next one is added
        if not self._in_float32:  # then a dense gradient stays on the parameter, and so it does whatever is added to it
            self._open = [one for one in self._open if one.grad is None or one.grad.layout is not torch.strided]

    @property
    def is_idle(self) -> bool:
        """Whether nothing was and nothing will be taken over, since every parameter has a dense gradient."""
        return not self._open and not self._sums

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor, times: float) -> None:
        if id(parameter) not in self._sums:
            dtype = torch.promote_types(gradient.dtype, torch.float32) if self._in_float32 else gradient.dtype
            self._sums[id(parameter)] = _RowSum(gradient, dtype)
        self._sums[id(parameter)].add_(gradient, times)

    def absorb_(self, parameter: torch.Tensor, other: "SparseSums", copy: torch.Tensor, factor: float) -> None:
        """Adds what was summed elsewhere for a copy of a parameter, and takes it off; see ``Float32Accumulator``."""
        found = other._sums.pop(id(copy), None)
        if found is not None:
            moved = found.gradient().to(parameter.device, non_blocking=True)
            del found
            self._add(parameter, moved if factor == 1 else moved * factor, 1.0)

    def give_(self, scale: float | None = None) -> None:
        """Puts the sums on the parameters as their gradients, in the precision that these came in."""
        for parameter in self._parameters:
            found = self._sums.pop(id(parameter), None)
            if found is not None:
                parameter.grad = found.gradient(scale)


class _RowSum:
    """The sum for one table: in a buffer with room for more, the numbers of the rows in order, and their values."""

    def __init__(self, gradient: torch.Tensor, dtype: torch.dtype) -> None:
        values = gradient._values()
        self._shape, self._dtype = gradient.shape, gradient.dtype
        self._rows = gradient._indices().new_empty(0)
        self._values = values.new_empty(0, *values.shape[1:], dtype=dtype)
        self._used = 0

    def add_(self, gradient: torch.Tensor, times: float) -> None:
        if is_accelerator(gradient.device):  # repeated rows are summed repeatably in this way only
            gradient = gradient.coalesce()
        entries, values = gradient._indices()[0], gradient._values()
        new = entries.unique()
        self._reserve(len(new), math.ceil(len(entries) * times))
        self._insert(self._missing(new), len(entries))
        del new
        slots = torch.searchsorted(self._rows[: self._used], entries)
        self._values[: self._used].index_add_(0, slots, values.to(self._values.dtype))

    def _missing(self, rows: torch.Tensor) -> torch.Tensor:
        if not self._used:
            return rows
        known = self._rows[: self._used]
        places = torch.searchsorted(known, rows).clamp_(max=self._used - 1)
        return rows[known[places] != rows]

    def _reserve(self, more: int, expected: int) -> None:
        """Makes room for rows, at once for as many as are expected in the end."""
        if min(self._used + more, self._shape[0]) <= len(self._rows):
            return
        room = min(max(self._used + more, expected), self._shape[0])
        rows, values = self._rows.new_empty(room), self._values.new_empty(room, *self._values.shape[1:])
        rows[: self._used] = self._rows[: self._used]
        values[: self._used] = self._values[: self._used]
        self._rows, self._values = rows, values

    def _insert(self, rows: torch.Tensor, at_once: int) -> None:
        """Puts rows of zeros among the others, which move up from the last to the first, some at a time."""
        if not len(rows):
            return
        places = torch.searchsorted(self._rows[: self._used], rows)
        step, least = max(at_once, -(-len(self._rows) // MOVES)), int(places[0])
        for stop in range(self._used, least, -step):
            start = max(stop - step, least)
            moved = self._rows[start:stop].clone()
            targets = torch.searchsorted(rows, moved)
            targets += torch.arange(start, stop, device=rows.device)
            self._rows[targets] = moved
            self._values[targets] = self._values[start:stop].clone()
        places += torch.arange(len(rows), device=rows.device)
        self._rows[places] = rows
        self._values[places] = self._values.new_zeros(())
        self._used += len(rows)

    def gradient(self, scale: float | None = None) -> torch.Tensor:
        rows, values = self._rows[: self._used], self._values[: self._used]
        if scale is not None:
            values.mul_(scale)
        return torch.sparse_coo_tensor(
            rows[None], values.to(self._dtype), self._shape, is_coalesced=True, check_invariants=False
        )
