"""Which dimension of a tensor that is dropped out is that of the samples, found by its sizes and remembered."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class OtherDimension(Exception):
    """The sizes do not fit to what the same call was taken for before; the text says what and why."""


@dataclass(frozen=True)
class _Known:
    """What a call was taken for.

    Args:
        dims: those which would have given the masks that were drawn; none if all samples share the mask.
        shape: of the tensor.
        rows: samples of the micro-batch.
    """

    dims: frozenset[int]
    shape: tuple[int, ...]
    rows: int


class Dimensions:
    """Finds the dimension of the samples, the same in all micro-batches.

    Dim 0 counts if its size is a multiple of the number of samples, each of which then has several entries, one behind
    the other. With three dimensions or more, dim 1 comes before a true multiple: sequences come first in ``[T, B, H]``.
    A tensor of another kind, and every parameter, is one that all samples share.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def find(self, call: int, tensor: torch.Tensor, rows: int) -> int | None:
        """The dimension of the samples.

        Args:
            call: which one.
            tensor: is dropped out.
            rows: samples of the micro-batch.

        Returns:
            The dimension, ``None`` if the samples share the mask.

        Raises:
            OtherDimension: it is another one than in the micro-batches before, or can't be told.
        """
        shape = tuple(tensor.shape)
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return None
        found, known = _candidates(shape, rows), self._known.get(call)
        if known is None:
            dim = _first(found, shape, rows)
        elif not known.dims:
            if shape != known.shape:
                raise OtherDimension(_neither(shape, rows, known))
            return None
        else:
            dim = _first([dim for dim in found if dim in known.dims], shape, rows)
            if dim is None or _stands_still(dim, shape, rows, known):
                raise OtherDimension(_changed(shape, rows, known))
        if known is None or known.rows == 1:
            same = frozenset() if dim is None else frozenset({dim} if rows > 1 else {0, *found})
            self._known[call] = _Known(same, shape, rows)
        return dim


def _candidates(shape: Sequence[int], rows: int) -> list[int]:
    """The dimensions that may be that of the samples, the likeliest first."""
    others = [dim for dim, size in enumerate(shape) if dim and size == rows]
    if not shape or shape[0] % rows:
        return others
    if shape[0] > rows > 1 and len(shape) > 2 and shape[1] == rows:
        return [1, 0, *others[1:]]
    return [0, *others]


def _first(found: Sequence[int], shape: Sequence[int], rows: int) -> int | None:
    if len(found) > 1 and found[0] > 1:
        raise OtherDimension(
            f"it can't be told which dimension of shape {tuple(shape)} is that of the {rows} samples: {list(found)} "
            f"all have {rows} entries"
        )
    return found[0] if found else None


def _stands_still(dim: int, shape: tuple[int, ...], rows: int, known: _Known) -> bool:
    """Whether a tensor that had one entry a sample in dim 0 kept its shape while the number of samples changed."""
    return dim == 0 and shape == known.shape and rows != known.rows and shape[0] in (rows, known.rows)


def _neither(shape: tuple[int, ...], rows: int, known: _Known) -> str:
    return (
        f"it got a tensor of shape {shape} in a micro-batch of {rows} samples and of shape {known.shape} in one of "
        f"{known.rows}; expected samples in dim 0, or weights, whose shape stays"
    )


def _changed(shape: tuple[int, ...], rows: int, known: _Known) -> str:
    (dim,) = known.dims if len(known.dims) == 1 else (0,)
    each = math.prod(known.shape[:1]) // known.rows
    how = f"dim {dim}" + (f" with {each} entries for each" if dim == 0 and each > 1 else "")
    return (
        f"it got a tensor of shape {known.shape} in a micro-batch of {known.rows} samples, so that they were taken to "
        f"lie in {how}; in a micro-batch of {rows} its shape is {shape}, where that does not hold"
    )
