"""How far gradients are apart, by what is kept of them in few numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.tensors.shards import local_of

_SIZE = 1024
"""Numbers that are kept of a large gradient: the norm of a difference is then known within ``sqrt(2 / 1024)``, 4 %."""
_FEW = 4  # times as many entries, below which all are kept
_AT_ONCE = 128  # rows of so many numbers that are converted at a time


def relative(difference: float, scale: float) -> float:
    """A difference over a scale: 0 for no difference, infinite for what is not finite."""
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and math.isfinite(difference) else math.inf


def norm_of(values: Any) -> float:
    """The Euclidean norm in float64, also of numbers whose squares are 0 or infinite in it."""
    largest = float(torch.linalg.vector_norm(values, math.inf, dtype=torch.float64))
    if not largest or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(values.double() / largest))


Kept = Mapping[int, torch.Tensor]
"""What is kept of the gradients of some leaves, by the ``id`` of the leaf."""


def distance(one: Kept, other: Kept | None = None, *, of: Iterable[torch.Tensor] | None = None) -> float:
    """The norm of a gradient, or of what it is less another one; one of a leaf that is missing is zero."""
    found = one if other is None else less(one, other)
    counted = found.keys() if of is None else {id(leaf) for leaf in of}
    return math.hypot(0.0, *(norm_of(kept) for key, kept in found.items() if key in counted))


def less(one: Kept, other: Kept) -> dict[int, torch.Tensor]:
    """A gradient less another one."""
    ours = {key: value - other[key] if key in other else value for key, value in one.items()}
    return ours | {key: -value for key, value in other.items() if key not in one}


@dataclass
class Outcome:
    """What a run gave."""

    losses: dict[str, float]  # the values by name
    counts: dict[str, float]  # what ``Mean`` s were over, by name
    gradients: Kept  # what is kept of them

    @property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return distance(self.gradients)

    def error(self, whole: "Outcome", scale: float = 0.0) -> float:
        """How far the gradient is from that of another run, over the norm of that or a larger scale."""
        return relative(distance(self.gradients, whole.gradients), max(scale, whole.norm))

    def value_error(self, whole: "Outcome", *names: str) -> float:
        """The relative error of the value of some losses, of all without names, in the worst of them."""
        pairs = ((self.losses.get(name, 0.0), whole.losses[name]) for name in names or whole.losses)
        return max((relative(abs(one - value), abs(value)) for one, value in pairs), default=0.0)

    def apart(self, whole: "Outcome", tolerance: float) -> tuple[float, float]:
        """How far gradient and losses are from those of another run that are 0 within rounding; 0 of others."""
        pairs = ((abs(self.losses.get(name, 0.0) - value), abs(value)) for name, value in whole.losses.items())
        of_losses = max((off for off, value in pairs if value <= tolerance * off), default=0.0)
        off = distance(self.gradients, whole.gradients)
        return (off if whole.norm <= tolerance * off else 0.0), of_losses

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradient are finite."""
        return all(map(math.isfinite, self.losses.values())) and math.isfinite(self.norm)


@dataclass
class Comparison:
    """Splits against the whole."""

    whole: Outcome  # what the whole batch gave
    # the splits, each with what it gave or the error it failed with
    each: Sequence[tuple[Sequence[Part], Outcome | Exception]]

    def __post_init__(self) -> None:
        # the relative error of the gradient of the worst split
        self.error = max(one.error(self.whole) if isinstance(one, Outcome) else math.inf for _, one in self.each)

    def loss_error(self, *names: str) -> float:
        """The relative error of the value of some losses, of all without names, in the worst split."""
        each = (outcome for _, outcome in self.each)
        return max(one.value_error(self.whole, *names) if isinstance(one, Outcome) else math.inf for one in each)

    def apart(self, tolerance: float) -> tuple[float, float]:
        """How far gradient and losses of the worst split are from the whole's that are 0 within rounding; else 0."""
        each = [one.apart(self.whole, tolerance) for _, one in self.each if isinstance(one, Outcome)]
        gradient, loss = (max(filter(math.isfinite, of), default=0.0) for of in zip((0.0, 0.0), *each, strict=True))
        return gradient, loss

    @property
    def failures(self) -> list[tuple[Sequence[Part], Exception]]:
        """The splits that failed, and the errors."""
        return [(parts, outcome) for parts, outcome in self.each if isinstance(outcome, Exception)]


def length_of(size: int) -> int:
    """How many numbers are kept of a gradient of so many entries."""
    return size if size // _SIZE < _FEW else _SIZE


def kept_of(leaves: Iterable[torch.Tensor]) -> Kept:
    """What is kept of gradients: all of a small one, of a larger one sums of entries with signs drawn once for all.

    The squared norm of a difference of what is kept is on average that of the difference itself (Charikar, Chen,
    Farach-Colton 2002, "Finding Frequent Items in Data Streams"; Alon, Matias, Szegedy 1996).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> weight = torch.nn.Parameter(torch.zeros(100, 100))
        >>> weight.grad = torch.randn(100, 100)
        >>> one = kept_of([weight])
        >>> weight.grad += torch.randn(100, 100)  # of length 100
        >>> 90 < distance(kept_of([weight]), one) < 110
        True
    """
    with torch.no_grad():
        return {id(one): _sketch_of(local_of(one.grad)) for one in leaves if one.grad is not None}


def _sketch_of(gradient: torch.Tensor) -> torch.Tensor:
    # In float32 a sum of some entries is rounded as the gradient itself is, and nothing has to be converted.
    wide = torch.promote_types(gradient.dtype.to_real(), torch.float32)
    if gradient.layout is not torch.strided:
        return _of_sparse(gradient.coalesce(), wide)
    flat = (torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient).reshape(-1)
    rows = len(flat) // _SIZE
    if rows < _FEW:
        return flat.to(wide, copy=True)
    signs, total = _signs(rows + 1), torch.zeros(_SIZE, dtype=wide, device=flat.device)
    for start in range(0, rows, _AT_ONCE):
        some = signs[start : min(start + _AT_ONCE, rows)].to(flat.device, wide)
        total += some @ flat[start * _SIZE : (start + len(some)) * _SIZE].view(-1, _SIZE).to(wide)
    rest = flat[rows * _SIZE :].to(wide)
    total[: len(rest)] += rest * int(signs[rows])
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
    count, weighted = math.prod(gradient.shape[: gradient.sparse_dim()]) * values.shape[1], values.flatten().to(wide)
    if length_of(count) < count:
        weighted = weighted * _signs(count // _SIZE + 1).to(values.device, wide)[places // _SIZE]
        places, count = places % _SIZE, _SIZE
    return torch.zeros(count, dtype=wide, device=values.device).index_add_(0, places, weighted)


@lru_cache(maxsize=64)
def _signs(rows: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randint(2, (rows,), generator=generator, device="cpu", dtype=torch.int8) * 2 - 1
