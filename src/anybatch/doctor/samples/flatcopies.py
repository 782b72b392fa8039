"""Copies of many tensors side by side, so that few operations look at all of them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.nn.parameter import is_lazy

from anybatch.torch_private import without_torch_function

ENTRIES = 1 << 25
"""How many numbers the copies of all embeddings may have that are copied whole; 128 MiB in float32."""
_MOST = 1 << 12  # entries of one tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What can be read without autograd in place of a tensor; ``None`` for what has no numbers of its own to read."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    if type(tensor) not in _PLAIN and (is_lazy(tensor) or (tensor := _of_subclass(tensor)) is None):
        return None
    try:
        if not tensor.data_ptr():  # nor has one on meta
            return None
    except RuntimeError:  # of a transform of ``torch.func``, whose tensors have no numbers of their own
        return None
    if tensor.is_floating_point():
        return tensor
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else None


def _of_subclass(tensor: torch.Tensor) -> torch.Tensor | None:
    with without_torch_function():  # no function of the user's class sees what is read
        view = tensor.detach()
        local = getattr(view, "to_local", None)
        if local is not None:
            view = local()
        usual = type(view).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if usual and type(view) not in _PLAIN and not view.is_quantized:
            view = view.as_subclass(torch.Tensor)
    return view if type(view) in _PLAIN else None


class Layout:
    """How copies of tensors of one precision on one device lie in a flat tensor: those of one size side by side.

    Args:
        tensors: whose copies it lays out, as ``plain`` gives them.
        strides: how far apart the entries are that stand for each; 1 for one that is copied whole.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], strides: Sequence[int]) -> None:
        self._strides, self._shapes = list(strides), [tensor.shape for tensor in tensors]
        numels = [tensor.numel() for tensor in tensors]
        self._sizes = [-(-numel // stride) for numel, stride in zip(numels, strides, strict=True)]
        self._device, self._dtype = tensors[0].device, tensors[0].dtype
        # what the 2-norm of the entries that stand for each has to be multiplied by
        self.scales = [math.sqrt(numel / size) for numel, size in zip(numels, self._sizes, strict=True)]
        # positions of tensors that are not copied whole
        self.large = [position for position, stride in enumerate(strides) if stride > 1]
        self._order = sorted(range(len(tensors)), key=self._sizes.__getitem__)
        places = sorted(range(len(tensors)), key=self._order.__getitem__)
        # On the device, since a list would be copied there and waited for each time.
        self._places = torch.tensor(places, device=self._device)
        self._large = torch.tensor(self.large, dtype=torch.int64, device=self._device)
        self._counts = Counter(self._sizes[position] for position in self._order)
        self._zeros = tensors[0].new_zeros(max(self._sizes))

    def fitting(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What can be read of tensors; ``None`` for those that are missing, or not of the kind of their position."""
        found = list[torch.Tensor | None]()
        for tensor, shape in zip(tensors, self._shapes, strict=True):
            view = plain(tensor)
            is_fit = view is not None and view.shape == shape and view.dtype is self._dtype
            found.append(view if view is not None and is_fit and view.device == self._device else None)
        return found

    def copy(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """A flat copy, zeros for those that are missing; one tensor for each position."""
        parts = []
        for position in self._order:
            tensor, size, stride = tensors[position], self._sizes[position], self._strides[position]
            if tensor is None:
                parts.append(self._zeros[:size])
            elif stride == 1:
                parts.append(tensor.detach().reshape(-1))
            else:
                parts.append(_flat(tensor.detach())[::stride])
        return torch.cat(parts)

    def of_each(self, flat: torch.Tensor, figure: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A figure of each tensor, by position; it is made of rows of entries of one size, a number for each."""
        parts = flat.split([size * count for size, count in self._counts.items()])
        sizes = self._counts.items()
        found = [figure(part.view(count, size)) for part, (size, count) in zip(parts, sizes, strict=True)]
        return torch.cat(found).index_select(0, self._places)

    def changed(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The share of the entries of each tensor that are not bitwise equal in two copies."""
        bits = _BITS[self._dtype.itemsize]
        return self.of_each((one.view(bits) != other.view(bits)).float(), _mean)

    def zeros(self, flat: torch.Tensor) -> torch.Tensor:
        """The share of the entries of each tensor that are zero in a copy."""
        return self.of_each((flat == 0).float(), _mean)

    def norms(self, flat: torch.Tensor) -> torch.Tensor:
        """The 2-norm of the entries of each tensor."""
        wide = torch.float64 if self._dtype is torch.float64 else torch.float32
        return self.of_each(flat, lambda rows: torch.linalg.vector_norm(rows, dim=1, dtype=wide))

    def whole_norms(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The norms of tensors: of their copies, and of the whole where only some entries were copied."""
        found = self.norms(flat)
        large = [tensors[position] for position in self.large]
        known = [one for one in large if one is not None]
        if len(known) == len(large) and known:
            return found.index_copy_(0, self._large, norms(known))
        if known:
            found[[place for place, one in zip(self.large, large, strict=True) if one is not None]] = norms(known)
        return found


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows.mean(1)


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """The norm of each tensor, side by side in at least float32."""
    wide = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), order, dtype=wide))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1)  # a view where the tensor is dense


def strides(tensors: Sequence[torch.Tensor], embeddings: Sequence[bool], entries: int = ENTRIES) -> list[int]:
    """How far apart the entries are that stand for each of some tensors; 1 for those that are copied whole.

    At most 4096 evenly spaced entries stand for a large tensor: the 2-norm of a change is then known to about one part
    in a hundred (half of sqrt(2 / 4096) for entries of a normal distribution). Of an embedding a step may change a
    few rows only, and so all of them are copied whole while they have no more than ``entries`` together.
    """
    pairs = list(zip(tensors, embeddings, strict=True))
    fit = sum(tensor.numel() for tensor, embeds in pairs if embeds) <= entries
    return [1 if embeds and fit else _stride(tensor, 8 * _MOST if embeds else _MOST) for tensor, embeds in pairs]


def _stride(tensor: torch.Tensor, most: int) -> int:
    """How far apart entries are that stand for a large tensor, so that they meet all its columns."""
    numel = tensor.numel()
    if numel <= most:
        return 1
    stride = numel // most + 1
    while math.gcd(stride, tensor.shape[-1] or 1) > 1:
        stride += 1
    return stride
