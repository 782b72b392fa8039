"""Copies of many tensors side by side in one kept buffer, so that few operations look at all of them."""

import math
from collections.abc import Sequence
from typing import Any

import torch

ENTRIES = 1 << 25
"""How many numbers all copies of one optimizer may have; 128 MiB in float32, and two buffers are kept."""
_SAMPLED = 1 << 16  # entries of a tensor that is too large to be copied whole
_LOOKED_AT = 256  # entries of a tensor that are looked at one by one

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What can be read without autograd in place of a tensor; ``None`` for what has no numbers of its own to read.

    Args:
        tensor: may be a subclass, sparse, on meta, or empty of storage, as sharded parameters are.
    """
    if tensor is None or tensor.layout is not torch.strided:
        return None
    if type(tensor) not in _PLAIN:
        tensor = _of_subclass(tensor)
    if tensor is None or tensor.is_meta or not tensor.data_ptr():
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    return tensor if tensor.is_floating_point() else None


def _of_subclass(tensor: torch.Tensor) -> torch.Tensor | None:
    view = tensor.detach()
    local = getattr(view, "to_local", None)
    if local is not None:
        view = local()
    usual = type(view).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return view if type(view) in _PLAIN or (usual and not view.is_quantized) else None


class Buffer:
    """Room for copies of tensors of one precision on one device.

    Args:
        tensors: whose copies it holds, as ``plain`` gives them.
        whole: whether large ones are copied whole; otherwise evenly spaced entries of them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, whole: bool) -> None:
        self.strides = [1 if whole else _stride(tensor) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.numels = [tensor.numel() for tensor in tensors]
        sizes = [-(-numel // stride) for numel, stride in zip(self.numels, self.strides, strict=True)]
        device, dtype = tensors[0].device, tensors[0].dtype
        self.scales = [math.sqrt(n / s) if s else 1.0 for n, s in zip(self.numels, sizes, strict=True)]
        self.one = torch.empty(sum(sizes), device=device, dtype=dtype)
        self.other = torch.empty_like(self.one)
        self.bits = _BITS[dtype.itemsize]
        self.ones, self.others = self._views(self.one, sizes), self._views(self.other, sizes)
        starts = _starts(sizes)
        within = torch.arange(_LOOKED_AT) * torch.tensor(sizes)[:, None] // _LOOKED_AT
        self._looked_at = torch.tensor(starts)[:, None] + within
        self.rows = [
            number
            for number, (shape, stride) in enumerate(zip(self.shapes, self.strides, strict=True))
            if stride == 1 and len(shape) > 1 and shape[0] > 1 and shape.numel()
        ]
        pairs = [_row_pairs(starts[number], self.shapes[number]) for number in self.rows]
        self._pairs = torch.tensor(pairs) if pairs else torch.zeros(0, 2, 1, dtype=torch.int64)
        self._looked_at, self._pairs = self._looked_at.to(device), self._pairs.to(device)

    def _views(self, flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        parts = flat.split(sizes)
        shapes = zip(parts, self.shapes, self.strides, strict=True)
        return [part.view(shape) if stride == 1 else part for part, shape, stride in shapes]

    def copy(self, tensors: Sequence[torch.Tensor], into: list[torch.Tensor]) -> None:
        """Copies tensors of the shapes that the buffer was made for into its views."""
        torch._foreach_copy_(into, [self.picked(position, tensor) for position, tensor in enumerate(tensors)])

    def fits(self, position: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be copied into a view of the buffer as it is."""
        own = self.one
        return tensor.shape == self.shapes[position] and tensor.dtype is own.dtype and tensor.device == own.device

    def picked(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        """What of a tensor is copied: all of it, or entries that stand for it."""
        stride = self.strides[position]
        return tensor if stride == 1 else _flat(tensor)[::stride]

    def largest(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The largest absolute entry of tensors and of their copies in a buffer; ``nan`` if there is one in them."""
        ends = [flat.aminmax()] if max(self.strides) == 1 else [tensor.aminmax() for tensor in tensors]
        return torch.stack([end for pair in ends for end in pair]).abs().max().reshape(1)

    def looked_at(self, flat: torch.Tensor) -> torch.Tensor:
        """Some entries of each tensor, one row for each; short tensors repeat theirs."""
        return flat[self._looked_at]

    def equal_rows(self, flat: torch.Tensor) -> torch.Tensor:
        """For each of ``rows`` whether entries of several of its rows are equal, and not all are zero."""
        first, second = flat[self._pairs[:, 0]], flat[self._pairs[:, 1]]
        return (first == second).all(1) & (first != 0).any(1)


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """The norm of each tensor, side by side in at least float32.

    Args:
        tensors: of one precision and on one device.
        order: of the norm.
    """
    wide = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), order, dtype=wide))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1)  # a view where the tensor is dense


def _stride(tensor: torch.Tensor) -> int:
    """How far apart the entries of a large tensor are that stand for it, so that they meet all its columns."""
    numel = tensor.numel()
    if numel <= _SAMPLED:
        return 1
    stride = numel // _SAMPLED + 1
    while math.gcd(stride, tensor.shape[-1] or 1) > 1:
        stride += 1
    return stride


def _starts(sizes: list[int]) -> list[int]:
    found, total = [], 0
    for size in sizes:
        found.append(total)
        total += size
    return found


def _row_pairs(start: int, shape: Any) -> list[list[int]]:
    """Positions of entries in the first row, and of those beneath them in some other rows."""
    rows, columns = shape[0], shape.numel() // shape[0]
    below = [1 + position * (rows - 1) // 64 for position in range(64)]
    first = [start + position * columns // 64 for position in range(64)]
    return [first, [place + row * columns for place, row in zip(first, below, strict=True)]]
