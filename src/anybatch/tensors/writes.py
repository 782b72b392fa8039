"""Writes of a loss into its batch, which a second run on the same samples would see."""

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import LossError
from anybatch.tensors.layout import rows_of
from anybatch.tensors.trees import leaves, map_leaves, opened

_PLAIN = (str, int, float, bool, bytes, type(None))


class Writes:
    """Notices that tensors were written to, themselves or through a view.

    A write into a NumPy array can't be noticed.

    Args:
        values: tensors, and containers of them.

    Example:
        >>> x = torch.ones(4, 2)
        >>> writes = Writes([x, torch.ones(4)])
        >>> _ = x[:2].mul_(2)
        >>> writes.were_made
        True
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._seen = [(t, t._version) for value in values for t in _tensors_in(value) if not t.is_inference()]

    @property
    def were_made(self) -> bool:
        """Whether one was written to since."""
        return any(tensor._version != version for tensor, version in self._seen)

    def refuse(self, batches: Sequence[Any], cause: str) -> None:
        """Refuses to go on if there was a write.

        Args:
            batches: where the tensors are looked up to be named.
            cause: why it runs again, such as ``"since memory ran out"``.

        Raises:
            LossError: there was.
        """
        if not self.were_made:
            return
        written = {id(tensor) for tensor, version in self._seen if tensor._version != version}
        names = [label for batch in batches for label, _, leaf in leaves(batch, "batch") if id(_data(leaf)) in written]
        raise LossError(
            f"the loss wrote into {names[0] if names else 'its batch'} in place, and runs on it again {cause}; "
            "expected a loss that leaves its batch as it is. Write to a copy: x = x - mean in the place of "
            "x.sub_(mean), or x = x.clone() before"
        )


def writable(batch: Any, *, arrays_only: bool = False) -> Any:
    """A batch with tensors and NumPy arrays of its own, which may be written to.

    Args:
        batch: any nested container.
        arrays_only: whether tensors stay, since writes to them can be noticed.
    """

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, (torch.Tensor, PackedSequence)):
            return own_array(leaf)
        if arrays_only:
            return leaf
        if isinstance(leaf, torch.Tensor):
            return leaf.clone()
        return PackedSequence(leaf.data.clone(), leaf.batch_sizes, leaf.sorted_indices, leaf.unsorted_indices)

    return map_leaves(own, batch)


def own_array(leaf: Any) -> Any:
    """A copy of a NumPy array; anything else as it is.

    Args:
        leaf: anything but a tensor.
    """
    return leaf if rows_of(leaf) is None else leaf.copy()


def own_container(sample: Any) -> Any:
    """A raw sample from which ``collate`` may take items out without the next call missing them.

    Args:
        sample: copied if it is a dictionary or a list; what is in it is not.
    """
    return copy.copy(sample) if isinstance(sample, (dict, list, UserDict)) else sample


def _data(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, PackedSequence) else leaf


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, (list, tuple)):
        if value and isinstance(value[0], _PLAIN) and isinstance(value[-1], _PLAIN):
            return  # texts or numbers, of which there may be many
        for item in value:
            yield from _tensors_in(item)
    elif not isinstance(value, _PLAIN) and (container := opened(value)) is not None:
        for child in container.children:
            yield from _tensors_in(child.value)
