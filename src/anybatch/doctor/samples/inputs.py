"""What a model is called with and holds: range, hash, scaling, and what tells the values of tensors from others."""

import functools
import hashlib
import itertools
import math
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from anybatch.doctor.values import entries_of
from anybatch.records.samples import InputSample
from anybatch.tensors.dispatch import has_numbers, unseen

_MOST_TENSORS = 16
_MOST_ITEMS = 8  # of a list or tuple
_HASHED = 1 << 12  # numbers that the hash and the figures are made of; evenly spaced beyond
_ROWS = 64  # evenly spaced ones of more, that are compared
_SOME_ROWS, _SOME_CHANNELS, _OF_A_ROW = 16, 4, 512  # and numbers of each, whose deviation is taken
_DEPTH = 4
_LOOKED_FOR = 16  # rows of a batch that are looked for in a table
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


def mark(tensor: torch.Tensor) -> Any:
    """What tells the values of a tensor from others."""
    return _marks_of([tensor])[0]


@unseen
def _marks_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The same of several, with one wait for each precision and device."""
    found, kinds = [tuple[Any, ...](one.shape) for one in tensors], dict[Any, list[tuple[int, torch.Tensor]]]()
    for position, one in enumerate(tensors):
        is_plain = type(one) in (torch.Tensor, torch.nn.Parameter) and has_numbers(one)
        if is_plain and one.numel() and not one.is_complex():
            kinds.setdefault((one.dtype, one.device), []).append((position, some_of(one, 64)))
    for group in kinds.values():
        flat = torch.cat([some for _, some in group]).cpu().double()
        for (position, _), some in zip(group, flat.split([some.numel() for _, some in group]), strict=True):
            found[position] = found[position], float(some.dot(_weights(some.numel())))
    return found


@functools.cache
def _weights(count: int) -> torch.Tensor:
    """By which entries are told from each other; at most of as many counts as a mark has entries."""
    with torch.inference_mode(False):
        return torch.linspace(1, 2, count, dtype=torch.float64, device="cpu")


def some_of(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Evenly spaced entries of a tensor; all of a small one."""
    given = tensor.detach()
    if not given.is_contiguous() and given.numel() > most:  # a copy of what is expanded would be huge
        each = max(2, math.floor(most ** (1 / given.dim())))
        given = given[tuple(slice(None, None, -(-size // each)) for size in given.shape)]
    flat = given.reshape(-1)
    return flat[:: across(given, flat.numel() // most)][:most]


def stds_of(batch: torch.Tensor, least: int) -> tuple[float, float]:
    """The least and the largest deviation within a channel of one of some rows, of so many numbers at least; else 0."""
    if batch.dim() < 2 or batch[0].numel() < least:
        return 0.0, 0.0
    planes = [list(row) if row.dim() > 2 else [row] for row in batch[:_SOME_ROWS]]
    stds = [fmean(float(some_of(one, _OF_A_ROW).float().std()) for one in row[:_SOME_CHANNELS]) for row in planes]
    return min(stds), max(stds)


def versions_of(module: torch.nn.Module) -> dict[str, Any]:
    """For each tensor of a module's state how often it was written to, and where it lies."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    kept = set(module.state_dict(keep_vars=True))
    return {name: (one._version, one.data_ptr()) for name, one in tensors if name in kept and not one.is_inference()}


@unseen
def marks(module: torch.nn.Module) -> dict[str, Any]:
    """For each parameter and buffer what tells its values from others."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    known = {name: one for name, one in tensors if one.layout is torch.strided and not one.is_meta}
    return dict(zip(known, _marks_of([*known.values()]), strict=True))


@unseen
def is_scaled(table: torch.Tensor) -> bool:
    """Whether each column of a table that varies has mean 0 and deviation 1, as no part of a scaled one has."""
    if table.dim() != 2:
        return False
    for columns in (table[:, :: max(1, table.shape[1] // 8)], table):  # a few mostly tell
        exact, of, _ = standardised(columns)
        varied = of - int((columns == columns[:1]).all(0).sum()) if of else -1
        if exact != varied:
            return False
    return varied > 1


@unseen
def has_rows(table: torch.Tensor, batches: Sequence[torch.Tensor]) -> bool:
    """Whether rows of the training, perhaps with some noise, are those of a table; also where none are known."""
    rows = next((one[:_LOOKED_FOR].to(table) for one in batches if one.shape[1:] == table.shape[1:]), None)
    if rows is None:
        return True
    between = torch.cdist(table[:_LOOKED_FOR], table).kthvalue(2).values.median()
    return bool((torch.cdist(rows, table).min(1).values <= between / 2).float().mean() > 0.5)
