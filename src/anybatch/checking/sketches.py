"""Gradients in few numbers, by which two of them are compared without a second copy of either."""

import math
from collections.abc import Iterable, Iterator

import torch

from anybatch.tensors.shards import local_of

_SIZE = 1024
"""Numbers that are kept of a large gradient: the norm of a difference is then known within ``sqrt(2 / 1024)``, 4 %."""
_AT_ONCE = 128  # rows of so many numbers that are converted at a time


class Sketch:
    """What is kept of gradients: all of a small one, of a larger one sums of entries with signs drawn once for all.

    The squared norm of a difference of two sketches is on average that of the difference itself (Charikar, Chen,
    Farach-Colton 2002, "Finding Frequent Items in Data Streams"; Alon, Matias, Szegedy 1996).

    Args:
        parameters: with their gradients.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> weight = torch.nn.Parameter(torch.zeros(100, 100))
        >>> weight.grad = torch.randn(100, 100)
        >>> one = Sketch([weight])
        >>> weight.grad += torch.randn(100, 100)  # of length 100
        >>> 90 < Sketch([weight]).distance(one) < 110
        True
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    self._kept[id(parameter)] = _sketch_of(local_of(parameter.grad))

    def distance(self, other: "Sketch | None" = None, *, of: Iterable[torch.Tensor] | None = None) -> float:
        """The norm of the difference of the gradients; a missing one is zero.

        Args:
            other: of the same parameters; ``None`` for zero.
            of: the parameters that count; ``None`` for all.
        """
        own, its = self._kept, {} if other is None else other._kept
        found = []
        for key in {*own, *its} if of is None else {id(one) for one in of}:
            one, another = own.get(key), its.get(key)
            difference = another if one is None else one if another is None else one - another
            if difference is not None:
                found.append(difference.norm().to("cpu", torch.float64))
        return math.sqrt(sum(float(norm) ** 2 for norm in found))


def _sketch_of(gradient: torch.Tensor) -> torch.Tensor:
    # In float32 a sum of some entries is rounded as the gradient itself is, and nothing has to be converted.
    wide = torch.promote_types(gradient.dtype.to_real(), torch.float32)
    if gradient.layout is not torch.strided:
        return _of_sparse(gradient.coalesce(), wide)
    gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    flat = gradient.reshape(-1)
    rows = len(flat) // _SIZE
    if rows < 4:
        return flat.to(wide, copy=True)
    total = torch.zeros(_SIZE, dtype=wide, device=flat.device)
    for start, signs in _signs(rows + 1):
        part = flat[start * _SIZE : (start + len(signs)) * _SIZE]
        full = len(part) // _SIZE
        some = signs.to(flat.device, wide)
        if full:
            total += some[:full] @ part[: full * _SIZE].view(full, _SIZE).to(wide)
        rest = part[full * _SIZE :]
        if len(rest):
            total[: len(rest)] += rest.to(wide) * some[full]
    return total


def _of_sparse(gradient: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The same numbers as of the dense gradient."""
    values = gradient.values()
    values = torch.view_as_real(values.resolve_conj()).flatten(-2) if values.is_complex() else values
    values = values.reshape(len(values), -1)
    rows = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    for index, size in zip(gradient.indices(), gradient.shape, strict=False):
        rows = rows * size + index
    places = (rows[:, None] * values.shape[1] + torch.arange(values.shape[1], device=values.device)).flatten()
    count = math.prod(gradient.shape[: gradient.sparse_dim()]) * values.shape[1]
    if count // _SIZE < 4:
        return torch.zeros(count, dtype=wide, device=values.device).index_add_(0, places, values.flatten().to(wide))
    signs = torch.cat([some for _, some in _signs(count // _SIZE + 1)]).to(values.device, wide)
    weighted = values.flatten().to(wide) * signs[places // _SIZE]
    return torch.zeros(_SIZE, dtype=wide, device=values.device).index_add_(0, places % _SIZE, weighted)


def _signs(rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    for start in range(0, rows, _AT_ONCE):
        drawn = torch.randint(2, (min(_AT_ONCE, rows - start),), generator=generator, device="cpu", dtype=torch.int8)
        yield start, drawn * 2 - 1
