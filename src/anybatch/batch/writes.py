"""Detects a loss that writes into its batch, which a second run on the same samples would see."""

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.layout import rows_of
from anybatch.batch.trees import leaves, map_leaves, opened
from anybatch.errors import LossError

_PLAIN = (str, int, float, bool, bytes, type(None))


class Writes:
    """Detects in-place writes to tensors, also through views. Writes to NumPy arrays are not detected."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._seen: list[tuple[torch.Tensor, int]] = []
        for value in values:
            for tensor in [value] if isinstance(value, torch.Tensor) else _tensors_in(value):
                if not tensor.is_inference():
                    self._seen.append((tensor, tensor._version))

    @property
    def were_made(self) -> bool:
        """Whether any of the tensors was written to since."""
        return any(tensor._version != version for tensor, version in self._seen)

    def refuse(self, batches: Sequence[Any], cause: str) -> None:
        """Raises if there was a write."""
        if not self.were_made:
            return
        written = {id(tensor) for tensor, version in self._seen if tensor._version != version}
        names = [label for batch in batches for label, _, leaf in leaves(batch, "batch") if id(_data(leaf)) in written]
        raise LossError(
            f"the loss wrote into {names[0] if names else 'its batch'} in place, and runs on it again {cause}; "
            "expected a loss that does not modify its batch. Write to a copy: x = x - mean instead of "
            "x.sub_(mean), or x = x.clone() before"
        )


def writable(batch: Any, *, arrays_only: bool = False) -> Any:
    """A copy of a batch that may be written to; tensors that shared memory share it in the copy."""
    shared = {} if arrays_only else _copies_of_shared(batch)

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, (torch.Tensor, PackedSequence)):
            return own_array(leaf)
        if arrays_only:
            return leaf
        if isinstance(leaf, torch.Tensor):
            return shared[id(leaf)] if id(leaf) in shared else leaf.clone()
        return PackedSequence(leaf.data.clone(), leaf.batch_sizes, leaf.sorted_indices, leaf.unsorted_indices)

    return map_leaves(own, batch)


def _copies_of_shared(batch: Any) -> dict[int, torch.Tensor]:
    """Copies of overlapping tensors, by ``id``, as views of one copy of their common memory."""
    homes: dict[Any, list[torch.Tensor]] = {}
    for _, _, leaf in leaves(batch):
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested and leaf.numel():
            homes.setdefault((leaf.untyped_storage()._cdata, leaf.dtype), []).append(leaf)
    groups: list[list[torch.Tensor]] = []
    for home in homes.values():
        end = -1
        for one in sorted(home, key=lambda tensor: tensor.storage_offset()):
            if one.storage_offset() >= end:
                groups.append([])
            groups[-1].append(one)
            end = max(end if len(groups[-1]) > 1 else 0, _end_of(one))
    found: dict[int, torch.Tensor] = {}
    for several in (group for group in groups if len(group) > 1):
        start = several[0].storage_offset()
        copied = several[0].as_strided((max(map(_end_of, several)) - start,), (1,), start).clone()
        for one in several:
            found[id(one)] = copied.as_strided(one.size(), one.stride(), one.storage_offset() - start)
    return found


def _end_of(tensor: torch.Tensor) -> int:
    sizes = zip(tensor.size(), tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in sizes) + 1


def differ(one: Any, other: Any) -> bool:
    """Whether the dense tensors and arrays of two batches of one layout have different elements."""
    return any(_differ(a, b) for (_, _, a), (_, _, b) in zip(leaves(one), leaves(other), strict=False))


def _differ(one: Any, other: Any) -> bool:
    one, other = _data(one), _data(other)
    if isinstance(one, torch.Tensor):
        return one.layout is torch.strided and not one.is_nested and not torch.equal(one, other)
    return rows_of(one) is not None and one.tobytes() != other.tobytes()


def own_array(leaf: Any) -> Any:
    """A deep copy of a NumPy array; anything else as it is."""
    return leaf if rows_of(leaf) is None else copy.deepcopy(leaf)


def own_containers(value: Any) -> Any:
    """A copy of the containers of a sample, which may be changed; tensors, arrays and objects are not copied.

    Example:
        >>> sample = ({"x": 1, "y": 2}, [3, 4])
        >>> own_containers(sample)[0].pop("y"), sample
        (2, ({'x': 1, 'y': 2}, [3, 4]))
    """
    if isinstance(value, (torch.Tensor, PackedSequence, *_PLAIN)):
        return value
    if type(value) in (list, tuple) and (not value or (isinstance(value[0], _PLAIN) and isinstance(value[-1], _PLAIN))):
        return list(value) if type(value) is list else value
    container = opened(value)
    if container is None:
        return copy.copy(value) if isinstance(value, UserDict) else value
    return container.rebuild([own_containers(child.value) for child in container.children])


def _data(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, PackedSequence) else leaf


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, (list, tuple)):
        if value and isinstance(value[0], _PLAIN) and isinstance(value[-1], _PLAIN):
            return  # a long list of texts or numbers
        for item in value:
            yield from _tensors_in(item)
    elif not isinstance(value, _PLAIN) and (container := opened(value)) is not None:
        for child in container.children:
            yield from _tensors_in(child.value)
