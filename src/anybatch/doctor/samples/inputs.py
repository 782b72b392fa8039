"""What a model is called with: shape, range, and a hash of each tensor."""

import hashlib
import math
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.containers import entries_of
from anybatch.records.samples import InputSample
from anybatch.torch_private import stands_in

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_MOST_TENSORS = 16
_MOST_ITEMS = 8  # of a list or tuple
_HASHED = 1 << 12  # numbers that the hash and the figures are made of; evenly spaced beyond
_ROWS = 64  # evenly spaced ones of more, that are compared
_DEPTH = 4


class Given:
    """One tensor that a root is called with, of which the figures are computed later.

    Args:
        root: its number.
        name: of the tensor.
        tensor: as it is before the root runs.
        unread: others whose figures have not been computed, which takes hardly longer for all of them than for one.

    Attributes:
        waits: whether the figures may be computed later: not on devices with streams, nor of a transform or
            of a class of the user's.
    """

    def __init__(self, root: int, name: str, tensor: torch.Tensor, unread: "list[Given]") -> None:
        self.waits, self._unread = False, unread
        self._facts: dict[str, Any] = {
            "root": root, "name": name, "shape": tuple(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "requires_grad": tensor.requires_grad and tensor.is_leaf,
        }  # fmt: skip
        self._taken: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None
        try:
            self._facts["bytes"] = tensor.numel() * tensor.element_size()
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() and not tensor.is_quantized:
                self._take(tensor.detach())
        except (RuntimeError, NotImplementedError, TypeError):  # of a transform, or of a subclass without values
            pass

    def _take(self, tensor: torch.Tensor) -> None:
        alike, some = _alike(tensor), _some(tensor)
        ends: tuple[torch.Tensor, ...] = ()
        if not (tensor.is_complex() or tensor.dtype is torch.bool):  # all, so that no entry stays unseen
            ends = tensor.aminmax() if tensor.is_floating_point() else some.aminmax()
        self._taken = some.clone(), ends
        self._facts["alike"] = alike
        self.waits = type(tensor) is torch.Tensor and tensor.is_cpu and not stands_in(tensor)
        if self.waits:
            self._unread.append(self)

    def facts(self, **more: Any) -> InputSample:
        """What is known of it.

        Args:
            more: entries of the result, such as the number of the forward.
        """
        if self._taken is not None:
            together = self._unread[:] if self in self._unread else [self]
            self._unread.clear()
            try:
                _read(together)
            except (RuntimeError, NotImplementedError, TypeError):  # as above
                del self._facts["alike"]
        return InputSample(**self._facts, **more)


def _read(together: "list[Given]") -> None:
    """Computes the figures of several, with few operations for those of one shape."""
    groups: dict[Any, list[tuple[dict[str, Any], torch.Tensor, tuple[torch.Tensor, ...]]]] = {}
    for one in together:
        if one._taken is not None:
            some, ends = one._taken
            one._facts["hash"] = _hash(some, one._facts["dtype"], one._facts["shape"])
            groups.setdefault((some.shape, some.dtype, some.device), []).append((one._facts, some, ends))
            one._taken = None
    for group in groups.values():
        bounds = [end for _, _, ends in group for end in ends]
        if not bounds:
            continue
        if not bounds[0].is_floating_point():
            whole = torch.stack(bounds).tolist()
            for (facts, _, _), low, high in zip(group, whole[::2], whole[1::2], strict=True):
                facts |= {"low": float(low), "high": float(high)}
            continue
        wide = torch.stack([some for _, some, _ in group]).double()
        means = wide.mean(1)
        squares = wide.sub_(means[:, None]).square_().mean(1)
        rows = torch.cat((torch.stack(bounds).double().view(-1, 2), means[:, None], squares[:, None]), 1).tolist()
        for (facts, _, _), (low, high, mean, square) in zip(group, rows, strict=True):
            facts |= {"low": low, "high": high, "mean": mean, "std": math.sqrt(square)}
            facts["finite"] = low - low == 0 and high - high == 0


def look(
    numbering: "Numbering", root: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    unread: list[Given] | None = None,
) -> list[Given]:  # fmt: skip
    """Looks at the tensors that a root is called with, before it runs.

    Args:
        numbering: numbers of roots.
        root: that is called.
        args: of the call.
        kwargs: of the call.
        unread: a list that keeps those whose figures have not been computed.

    Returns:
        One entry for each tensor.

    Example:
        >>> from anybatch.doctor.recording.numbering import Numbering
        >>> model = torch.nn.Linear(2, 1)
        >>> numbering = Numbering(lambda fact: None)
        >>> number = numbering.root(model)
        >>> found = look(numbering, model, (torch.ones(3, 2),), {"mask": torch.tensor([0, 1])})
        >>> [(one.name, one.shape, one.mean, one.high) for one in [given.facts() for given in found]]
        [('0', (3, 2), 1.0, 1.0), ('mask', (2,), None, 1.0)]
    """
    number = numbering.root_of(root)
    found, waiting = list[Given](), list[Given]() if unread is None else unread
    with torch.no_grad():
        for name, tensor in _named(args, kwargs):
            found.append(Given(-1 if number is None else number, name, tensor, waiting))
            if len(found) == _MOST_TENSORS:
                break
    return found


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
    return flat[:, :: max(1, kept.numel() // _HASHED)].reshape(-1) if tensor.dim() > 1 else tensor[:: rows // _HASHED]


def _hash(some: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> str:
    numbers = some.contiguous().cpu()
    kind = f"torch.{dtype}{shape}".encode()
    return hashlib.blake2b(numbers.view(torch.uint8).numpy().data, digest_size=8, key=kind[:64]).hexdigest()
