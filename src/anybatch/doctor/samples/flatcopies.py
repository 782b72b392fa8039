"""Copies of many tensors side by side in one kept buffer, so that few operations look at all of them."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from anybatch.torch_private import without_torch_function

ENTRIES = 1 << 25
"""How many numbers the copies of all embeddings may have that are copied whole; 128 MiB in float32."""
_MOST = 1 << 12  # entries of one tensor
_COMPARED = 64  # pairs of entries in different rows

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What can be read without autograd in place of a tensor; ``None`` for what has no numbers of its own to read.

    Args:
        tensor: may be a subclass, sparse, on meta, or empty of storage, as sharded parameters are.
    """
    if tensor is None or tensor.layout is not torch.strided or is_lazy(tensor):
        return None
    if type(tensor) not in _PLAIN:
        tensor = _of_subclass(tensor)
    if tensor is None or tensor.is_meta:
        return None
    try:
        is_empty = not tensor.data_ptr()
    except RuntimeError:  # of a transform of ``torch.func``, whose tensors have no numbers of their own
        return None
    if is_empty:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    return tensor if tensor.is_floating_point() else None


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


class _Group:
    """Tensors of one shape, and views of the room for their copies, made once since each costs as much as its use."""

    def __init__(self, members: list[int], start: int, size: int, shape: Any, flats: torch.Tensor, masks: torch.Tensor,
                 *, whole: bool) -> None:  # fmt: skip
        self.members, self.whole = members, whole
        count = len(members)
        flats, masks = flats[:, start : start + size * count], masks[:, start : start + size * count]
        self.numbers, self.marks = flats[:3].unflatten(1, (count, size)), masks.unflatten(1, (count, size))
        self.rows = list(flats)
        self.chosen = operator.itemgetter(*members) if count > 1 else lambda tensors: (tensors[members[0]],)
        self.joined = [row.view(shape[0] * count, *shape[1:]) for row in flats] if whole and shape else []
        self._size, self._shape = size, shape
        self._pieces: dict[int, list[torch.Tensor]] = {}

    def pieces(self, row: int) -> list[torch.Tensor]:
        """The room for each tensor in one of the rows."""
        known = self._pieces.get(row)
        if known is None:
            parts = self.rows[row].split(self._size) if self._size else ()
            known = self._pieces[row] = [part.view(self._shape) if self.whole else part for part in parts]
        return known


class Buffer:
    """Room for copies of tensors of one precision on one device: those of one shape lie side by side.

    Args:
        tensors: whose copies it lays out, as ``plain`` gives them.
        strides: how far apart the entries are that stand for each; 1 for one that is copied whole.
        rows: positions of matrices whose rows may be equal.

    Attributes:
        flats: gradients, weights before a step, their change, and weights after it.
        masks: where gradients are zero, and what changed before the step and in it.
        large: positions of tensors that are not copied whole.
        rows: of the matrices, in the order that ``equal_rows`` has.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], strides: Sequence[int], rows: Sequence[int] = ()) -> None:
        self.strides = list(strides)
        self.shapes = [tensor.shape for tensor in tensors]
        self.numels = [tensor.numel() for tensor in tensors]
        sizes = [-(-numel // stride) for numel, stride in zip(self.numels, strides, strict=True)]
        self._device, self._dtype = tensors[0].device, tensors[0].dtype
        self.scales = [math.sqrt(n / s) if s else 1.0 for n, s in zip(self.numels, sizes, strict=True)]
        kinds: dict[tuple[Any, int], list[int]] = {}
        for position, shape in enumerate(self.shapes):
            kinds.setdefault((shape, self.strides[position]), []).append(position)
        entries = sum(sizes)
        self.flats = torch.zeros(4, entries, device=self._device, dtype=self._dtype)
        self.masks = torch.zeros(3, entries, device=self._device)
        self._flats, self._masks = self.flats.unbind(), self.masks.unbind()
        self._bits = self.flats.view(_BITS[self._dtype.itemsize]).unbind()
        self._groups: list[_Group] = []
        starts, start = [0] * len(sizes), 0
        for (shape, stride), members in kinds.items():
            size = sizes[members[0]]
            self._groups.append(_Group(members, start, size, shape, self.flats, self.masks, whole=stride == 1))
            for position in members:
                starts[position] = start
                start += size
        order = [position for group in self._groups for position in group.members]
        places = sorted(range(len(order)), key=order.__getitem__)
        self._in_order = operator.itemgetter(*places) if places != sorted(places) else None
        whole = [number for number in rows if self.strides[number] == 1]
        pairs = [_row_pairs(starts[number], self.shapes[number]) for number in whole]
        self._pairs = (torch.tensor(pairs) if pairs else torch.zeros(0, 2, 1, dtype=torch.int64)).to(self._device)
        large = [number for number in rows if self.strides[number] > 1]
        self._large_pairs = {n: torch.tensor(_row_places(self.shapes[n])).to(self._device) for n in large}
        self.rows = [*whole, *large]
        self.large = [position for position, stride in enumerate(self.strides) if stride > 1]

    def fitting(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What can be read of tensors; ``None`` for those that are missing, or not of the kind of their position.

        Args:
            tensors: one for each position.
        """
        dtype, device, strided, found = self._dtype, self._device, torch.strided, list[torch.Tensor | None]()
        for tensor, shape in zip(tensors, self.shapes, strict=True):
            view = tensor
            if view is not None and (type(view) not in _PLAIN or view.layout is not strided or view.dtype is not dtype):
                view = plain(view)
            if view is not None and not (
                view.shape == shape and view.dtype is dtype and view.device == device and view.data_ptr()
            ):
                view = None
            found.append(view)
        return found

    def fill(self, row: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copies tensors, zeros for those that are missing.

        Args:
            row: of ``flats``.
            tensors: one for each position.
        """
        into, given = [], []
        complete = not any(one is None for one in tensors)
        for group in self._groups:
            found = group.chosen(tensors)
            present = found if complete else [one for one in found if one is not None]
            if group.joined and len(present) == len(found) > 1:
                torch.cat(present, out=group.joined[row])
                continue
            if len(present) < len(found):
                group.rows[row].zero_()
            for piece, position, one in zip(group.pieces(row), group.members, found, strict=True):
                if one is not None:
                    into.append(piece)
                    given.append(one if group.whole else _some(one, self.strides[position], len(piece)))
        if into:
            torch._foreach_copy_(into, given)

    def mark(self, mask: int, one: int, other: int) -> None:
        """Marks which entries of two rows of ``flats`` are not bitwise equal."""
        torch.ne(self._bits[one], self._bits[other], out=self._masks[mask])

    def mark_zeros(self) -> None:
        """Marks in the first row of ``masks`` where the first row of ``flats`` is zero."""
        torch.eq(self._flats[0], 0, out=self._masks[0])

    def subtract(self, one: int, other: int, into: int) -> None:
        """Puts the difference of two rows of ``flats`` into a third one."""
        torch.sub(self._flats[one], self._flats[other], out=self._flats[into])

    def ends(self) -> torch.Tensor:
        """The smallest and the largest entry of the first row of ``flats``."""
        return torch.stack(self._flats[0].aminmax())

    def figures(self) -> torch.Tensor:
        """The 2-norms of the copies in the first three rows of ``flats``, then the means of the rows of ``masks``."""
        wide = torch.float64 if self._dtype is torch.float64 else torch.float32
        found = [torch.linalg.vector_norm(group.numbers, dim=2, dtype=wide) for group in self._groups]
        means = [group.marks.mean(2) for group in self._groups]
        return torch.cat((torch.cat(found, 1), torch.cat(means, 1)))

    def by_position(self, values: Sequence[float]) -> list[float]:
        """What is in the order of the layout, in the order of the tensors."""
        return list(values if self._in_order is None else self._in_order(values))

    def equal_rows(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """For each of ``rows`` whether entries of several rows of its gradient are equal, and not all are zero."""
        flat = self.flats[0]
        first, second = [flat[self._pairs[:, 0]]], [flat[self._pairs[:, 1]]]
        for position, places in self._large_pairs.items():
            tensor = tensors[position]
            if tensor is None:
                picked = flat.new_zeros(2, _COMPARED)
            else:
                picked = tensor.reshape(tensor.shape[0], -1)[places[:, 0], places[:, 1]]
            first.append(picked[:1])
            second.append(picked[1:])
        return torch.cat([_alike(one, other) for one, other in zip(first, second, strict=True)])


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


def _some(tensor: torch.Tensor, stride: int, count: int) -> torch.Tensor:
    return tensor.as_strided((count,), (stride,)) if tensor.is_contiguous() else _flat(tensor)[::stride]


def strides(tensors: Sequence[torch.Tensor], embeddings: Sequence[bool], entries: int = ENTRIES) -> list[int]:
    """How far apart the entries are that stand for each of some tensors; 1 for those that are copied whole.

    At most 4096 evenly spaced entries stand for a large tensor: the 2-norm of a change is then known to about one part
    in a hundred (half of sqrt(2 / 4096) for entries of a normal distribution). Of an embedding a step may change a
    few rows only, and so it is copied whole while there is room.

    Args:
        tensors: to be copied.
        embeddings: whether each is the weight of an embedding.
        entries: how many numbers of embeddings are copied.
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


def _alike(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first == second).all(1) & (first != 0).any(1)


def _row_places(shape: Any) -> list[list[list[int]]]:
    """Rows and columns of entries in the first row, and of those beneath them in some other rows."""
    rows, columns = shape[0], shape.numel() // shape[0]
    column = [position * columns // _COMPARED for position in range(_COMPARED)]
    row = [1 + position * (rows - 1) // _COMPARED for position in range(_COMPARED)]
    return [[[0] * _COMPARED, column], [row, column]]


def _row_pairs(start: int, shape: Any) -> list[list[int]]:
    """The same as positions in a copy that begins somewhere."""
    columns = shape.numel() // shape[0]
    return [[start + row * columns + column for row, column in zip(*one, strict=True)] for one in _row_places(shape)]
