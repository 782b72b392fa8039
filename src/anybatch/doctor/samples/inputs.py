"""What a model is called with, and what the columns of its data set tell: range, hash, scaling, rounding."""

import hashlib
import itertools
import math
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset

from anybatch.doctor.values import entries_of
from anybatch.records.samples import InputSample
from anybatch.tensors.dispatch import unseen

_MOST_TENSORS = 16
_MOST_ITEMS = 8  # of a list or tuple
_HASHED = 1 << 12  # numbers that the hash and the figures are made of; evenly spaced beyond
_ROWS = 64  # evenly spaced ones of more, that are compared
_DEPTH = 4
_LARGE_NUMBERS = 10.0  # the mean or the deviation of what is not scaled


def look(root: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[InputSample]:
    """Looks at the tensors that a root is called with, before it runs; the entries do not have the forward."""
    with torch.no_grad():
        entries = [*enumerate(args), *kwargs.items()]
        named = (one for name, value in entries for one in _inside(str(name), value, _DEPTH))
        return [_sample(root, name, tensor) for name, tensor in itertools.islice(named, _MOST_TENSORS)]


def _sample(root: int, name: str, tensor: torch.Tensor) -> InputSample:
    facts: dict[str, Any] = {
        "shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad and tensor.is_leaf,
    }  # fmt: skip
    try:
        whole = tensor._base
        if whole is not None and tensor.dim() and whole.dim() == tensor.dim() and whole.shape[1:] == tensor.shape[1:]:
            facts["of"] = whole.shape[0]
        facts["bytes"] = tensor.numel() * tensor.element_size()
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() and not tensor.is_quantized:
            facts |= _figures(tensor.detach())
    except (RuntimeError, NotImplementedError, TypeError):  # of a transform, or of a subclass without values
        pass
    return InputSample(root=root, name=name, **facts)


def _figures(tensor: torch.Tensor) -> dict[str, Any]:
    alike, some = _alike(tensor), _some(tensor)
    found: dict[str, Any] = {"hash": _hash(some, tensor), "alike": alike}
    if tensor.is_complex() or tensor.dtype is torch.bool:
        return found
    if not tensor.is_floating_point():
        low, high = torch.stack(some.aminmax()).tolist()
        return found | {"low": float(low), "high": float(high)}
    wide = some.double()
    mean = wide.mean()
    ends = tensor.aminmax()  # of all, so that no entry stays unseen
    figures = torch.stack([end.double() for end in ends] + [mean, wide.sub(mean).square_().mean()])
    low, high, mean_of_it, square = figures.tolist()
    finite = low - low == 0 and high - high == 0
    found |= {"low": low, "high": high, "mean": mean_of_it, "std": math.sqrt(square), "finite": finite}
    if tensor.dim() == 2 and finite and max(abs(mean_of_it), found["std"]) > _LARGE_NUMBERS:
        found["small_columns"] = _small_columns(tensor, found["std"])
    return found


def _small_columns(table: torch.Tensor, std: float) -> float:
    """The share of the columns that are not constant whose standard deviation is below a tenth of that of all."""
    deviations = table[:: max(1, len(table) // _ROWS)].double().std(0, correction=0)
    small = (deviations > 0) & (deviations < 0.1 * std)
    count, number = torch.stack([small.sum(), (deviations > 0).sum()]).tolist()
    return float(count / number) if number else 0.0


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, (dict, UserDict, list, tuple)):
        entries = entries_of(value)
        for key, entry in entries[:_MOST_ITEMS] if isinstance(value, (list, tuple)) else entries:
            yield from _inside(f"{name}[{key!r}]", entry, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)):
        for key, entry in list(vars(value).items()):
            if isinstance(entry, torch.Tensor):
                yield f"{name}.{key}", entry


def _alike(tensor: torch.Tensor) -> bool | None:
    """Whether all rows are equal, as where each sequence of a batch begins with one and the same symbol."""
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return None
    rows = tensor[:: max(1, tensor.shape[0] // _ROWS)]
    if not torch.equal(rows[0], rows[-1]):  # mostly so, and then a single row has been compared
        return False
    return bool((rows == rows[:1]).all())


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced numbers of a tensor, as many from each row as from the others."""
    if tensor.numel() <= _HASHED:
        return tensor.reshape(-1)
    rows = tensor.shape[0]
    kept = tensor[:: max(1, rows // 256)] if tensor.dim() > 1 else tensor
    flat = kept.reshape(kept.shape[0], -1) if kept.is_contiguous() or kept.dim() < 3 else kept.flatten(1)
    if tensor.dim() == 1:
        return tensor[:: rows // _HASHED]
    return flat[:, :: across(tensor, kept.numel() // _HASHED)].reshape(-1)


def across(tensor: torch.Tensor, step: int) -> int:
    """A step through entries, at least as long, that does not meet the same columns of a sample again and again."""
    size = math.prod(tensor.shape[1:])
    return next((one for one in range(max(1, step), max(1, step) + size) if math.gcd(one, size) == 1), max(1, step))


def _hash(some: torch.Tensor, tensor: torch.Tensor) -> str:
    numbers = some.contiguous().cpu()
    kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.blake2b(numbers.view(torch.uint8).numpy().data, digest_size=8, key=kind[:64]).hexdigest()


_MOST_NUMBERS = 1 << 22
_LEAST = 20  # rows
_MEAN, _STD = 2e-5, 1e-4  # by which a column may be away


def data_of(dataset: Any) -> torch.Tensor | None:
    """The inputs that a data set of plain rows holds; ``None`` where they are not found."""
    held = vars(dataset) if hasattr(dataset, "__dict__") else {}
    values = held["tensors"] if isinstance(held.get("tensors"), tuple) else held.values()
    found = [one for one in values if type(one) is torch.Tensor and one.dim() in (2, 4) and one.is_floating_point()]
    try:
        return found[0] if found and len(found[0]) == len(dataset) else None
    except TypeError:  # of a stream
        return None


@unseen
def standardised(data: torch.Tensor | None) -> tuple[int, int, float]:
    """How many columns, or channels, are standardised, how many there are, and a number that tells sets apart.

    Only a set scaled by itself has mean 0 and deviation 1: with the statistics of another set of n rows it is about
    1/sqrt(n) away. The answer is 0 of 0 for what can't be looked at on the host.
    """
    if (
        data is None
        or not data.is_cpu
        or data.layout is not torch.strided
        or len(data) < _LEAST
        or data.numel() > _MOST_NUMBERS
    ):
        return 0, 0, 0.0
    dims = (0,) if data.dim() == 2 else (0, 2, 3)
    spread, mean = torch.std_mean(data.detach().double(), dims, correction=0)
    count = data.numel() // max(len(mean), 1)
    is_one = ((spread - 1).abs() < _STD) | ((spread * (count / (count - 1)) ** 0.5 - 1).abs() < _STD)
    exact = int(((mean.abs() < _MEAN) & is_one).sum())
    return exact, len(mean), float(data[:_LEAST].detach().double().sum())


_LEAST_ROUNDED, _MOST, _FIELDS = 64, 1 << 14, 16
_LARGE = 1 << 17  # below that float32 has two digits behind the point, and what looks alike is rounding of results
_LEAST_VALUES = 32
_TIES = 0.05  # of the entries
_NEXT = 0.1  # of the neighbours that are the next number that float32 has


class Rounded(NamedTuple):
    """Where neighbours have become one."""

    field: str
    spacing: float  # between two numbers of float32 of this size
    size: float  # of them
    ties: float  # the share of those that have become equal to another one


def rounded_fields(dataset: Any) -> Rounded | None:
    """The first column of what a data set holds in float32 in which neighbours have become one."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    held = vars(dataset) if hasattr(dataset, "__dict__") else {}
    for name, column in list(_columns(held))[:_FIELDS]:
        if (found := rounded(column)) is not None:
            return Rounded(name, *found)
    return None


def _columns(held: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in held.items():
        for held_one in value if isinstance(value, tuple) else (value,):
            is_array = type(held_one).__name__ == "ndarray" and str(held_one.dtype) == "float32"
            one = torch.from_numpy(held_one[:_MOST].copy()) if is_array and held_one.ndim else held_one
            if type(one) is torch.Tensor and one.is_cpu and one.dim() in (1, 2) and one.layout is torch.strided:
                yield from ((name, column) for column in (one[:, None] if one.dim() == 1 else one).T[:_FIELDS])


@unseen
def rounded(column: torch.Tensor) -> tuple[float, float, float] | None:
    """The spacing of float32 at the size of a column, that size, and the share of ties; ``None`` where it will do.

    Example:
        >>> stamps = 1.7e9 + 40 * torch.arange(400, dtype=torch.float64)
        >>> rounded(stamps.float()), rounded(stamps), rounded((stamps - stamps[0]).float())
        ((128.0, 1700007936.0, 0.685), None, None)
    """
    if column.dtype is not torch.float32 or len(column) < _LEAST_ROUNDED:
        return None
    values = column[:_MOST].detach()
    size = values.abs().median()
    if not bool(values.isfinite().all()) or float(size) < _LARGE:
        return None
    spacing = float(size.nextafter(size.new_tensor(torch.inf)).double() - size.double())
    if spacing <= 1 and bool((values == values.round()).all()):
        return None  # whole numbers are exact there
    different = values.unique()
    ties = 1 - len(different) / len(values)
    steps = different.diff().double()
    own = different.nextafter(different.new_tensor(torch.inf)).double() - different.double()
    beside = float((steps <= 1.5 * own[:-1]).double().mean())
    is_rounded = len(different) >= _LEAST_VALUES and ties > _TIES and beside > _NEXT
    return (spacing, float(size), ties) if is_rounded else None
