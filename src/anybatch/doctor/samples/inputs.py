"""What a model is called with: shape, range, and a hash of each tensor."""

import hashlib
import itertools
import math
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.values import entries_of
from anybatch.records.samples import InputSample

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_MOST_TENSORS = 16
_MOST_ITEMS = 8  # of a list or tuple
_HASHED = 1 << 12  # numbers that the hash and the figures are made of; evenly spaced beyond
_ROWS = 64  # evenly spaced ones of more, that are compared
_DEPTH = 4


def look(
    numbering: "Numbering", root: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[InputSample]:
    """Looks at the tensors that a root is called with, before it runs.

    Returns:
        One entry for each tensor, without the forward.
    """
    number = numbering.root_of(root)
    with torch.no_grad():
        named = itertools.islice(_named(args, kwargs), _MOST_TENSORS)
        return [_sample(-1 if number is None else number, name, tensor) for name, tensor in named]


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
    return found | {"low": low, "high": high, "mean": mean_of_it, "std": math.sqrt(square), "finite": finite}


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for position, value in enumerate(args):
        yield from _inside(str(position), value, _DEPTH)
    for name, value in kwargs.items():
        yield from _inside(name, value, _DEPTH)


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
