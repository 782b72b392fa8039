"""Which samples of a batch are likely to take the most, where that depends on the numbers in them.

A model that takes the padding out of its batch, packs sequences or routes samples holds more for some samples than for
others of the same shape. What tells them apart is mostly a sum, such as that of a mask, or the largest number, such as
a length.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.layout import Branch, Constant, Node, Rows, rows_of
from anybatch.tensors.trees import map_leaves

_MARK, _NEGATED = "the ", ", negated"

_AT_ONCE = 2**20  # bytes of samples
_COUNT = "number of entries that are not zero"
_KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    _COUNT: lambda rows: rows.count_nonzero(1),
    "sum": lambda rows: rows.sum(1),
    "largest number": lambda rows: rows.amax(1),
}


class Measured:
    """Numbers that tell the samples of a batch apart, a sample each.

    Args:
        splittable: a batch of tensors that is not made by a ``collate``.

    Example:
        >>> splittable = Splittable([{"length": torch.tensor([3, 9, 1]), "x": torch.ones(3, 2)}])
        >>> measured = Measured(splittable)
        >>> measured.names()[0]
        "the largest number in a sample of batch['length']"
        >>> measured.order(measured.names()[0])
        [1, 0, 2]
    """

    def __init__(self, splittable: Splittable) -> None:
        self._found: dict[str, list[float]] = {}  # not tensors, which would count while samples run
        if splittable.is_collated or len(splittable.batches) > 1:
            return
        leaves = [(node.label, _as_rows(node.value)) for node in splittable.nodes() if isinstance(node, Rows)]
        for kind, take in _KINDS.items():
            for label, rows in leaves:
                if rows is not None and _tells(kind, rows):
                    few = rows.split(max(1, _AT_ONCE // (rows.shape[1] * rows.element_size())))
                    self._found[f"{_MARK}{kind} in a sample of {label}"] = [
                        n for some in few for n in take(some).tolist()
                    ]

    def names(self) -> list[str]:
        """Those by which samples differ, each also from the other end."""
        differing = [name for name, values in self._found.items() if len(set(values)) > 1]
        return [own for name in differing for own in (name, opposite(name))]

    def of(self, name: str) -> list[float]:
        """The numbers of one name, a sample each; none where this batch has no such leaf."""
        values = self._found.get(name.removesuffix(_NEGATED), [])
        return [-value for value in values] if name.endswith(_NEGATED) else values

    def order(self, name: str) -> list[int]:
        """The positions of the samples, those with the largest numbers first."""
        values = self.of(name)
        return sorted(range(len(values)), key=values.__getitem__, reverse=True)

    def most(self, name: str) -> int:
        """The largest number, rounded up; 0 where there is none."""
        return math.ceil(max(self.of(name), default=0))


def opposite(name: str) -> str:
    """The same numbers from the other end.

    Args:
        name: of them.
    """
    return name.removesuffix(_NEGATED) if name.endswith(_NEGATED) else name + _NEGATED


def is_measure(label: str) -> bool:
    """Whether a label is the name of such numbers, and not that of a leaf."""
    return label.startswith(_MARK)


def gathered(splittable: Splittable, samples: Sequence[int], *, batch: int = 0, alike: bool = False) -> Any:
    """A micro-batch of any samples, as copies.

    Args:
        splittable: a batch of tensors, lists and arrays, with one row a sample.
        samples: their positions in it.
        batch: which of a window's batches they are of.
        alike: whether all are made alike, and in each of them all that lies behind one another, such as tokens.
    """
    return _taken(splittable.layouts[batch].root, list(samples), alike)


def gathered_alike(splittable: Splittable, part: Part) -> Any:
    """As many samples as a part has, all alike, of the batch that its first sample is in.

    Args:
        splittable: see ``gathered``.
        part: the samples; where the batch has fewer, some come several times.
    """
    index, rows = batch_in_window(splittable, part)
    return gathered(splittable, [place % rows for place in range(len(part.samples))], batch=index, alike=True)


def made_alike(batch: Any, rows: int) -> Any:
    """A collated micro-batch whose samples are all made alike.

    Args:
        batch: that nobody else has.
        rows: the number of its samples.
    """

    def alike(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            return leaf
        if leaf.dim() == 0 or leaf.shape[0] != rows or not leaf.numel():
            return leaf
        return _all_alike(leaf.detach()).requires_grad_(leaf.requires_grad)

    return map_leaves(alike, batch)


def batch_in_window(splittable: Splittable, part: Part) -> tuple[int, int]:
    """Which batch of a window the first sample of a part is in, and how many samples that has.

    Args:
        splittable: a window, or a single batch.
        part: the samples.
    """
    stops = list(accumulate(layout.rows for layout in splittable.layouts))
    index = bisect_right(stops, part.samples[0])
    return index, splittable.layouts[index].rows


def _taken(node: Node, samples: list[int], alike: bool) -> Any:
    if isinstance(node, Branch):
        return node.container.rebuild([_taken(child, samples, alike) for child in node.children])
    if isinstance(node, Constant):
        return node.value
    value = node.value
    if isinstance(value, torch.Tensor):
        few = value.detach()[torch.tensor(samples, device=value.device)]
        return (_all_alike(few) if alike and few.numel() else few).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(value[i] for i in samples)
    return value[samples]  # an array


def _all_alike(rows: torch.Tensor) -> torch.Tensor:
    """The first of everything in the place of all, but for the vector of numbers that one token or sample is."""
    is_vector = rows.dim() == 2 and (rows.is_floating_point() or rows.is_complex())
    first = rows[:1] if is_vector or rows.dim() < 2 else rows[:1, :1]
    return first.expand_as(rows).clone()


def is_gatherable(splittable: Splittable) -> bool:
    """Whether ``gathered`` can be asked for."""
    return not splittable.is_collated and all(
        isinstance(node, Constant) or _as_rows(node.value) is not None or type(node.value) in (list, tuple)
        for node in splittable.nodes()
    )


def _as_rows(value: Any) -> torch.Tensor | None:
    """A leaf with its samples as rows of numbers; ``None`` where it has none."""
    if not isinstance(value, torch.Tensor):
        if rows_of(value) is None or not hasattr(value, "dtype") or value.dtype.kind not in "biuf":
            return None
        value = torch.as_tensor(value)
    if value.layout is not torch.strided or value.is_nested or value.is_complex() or value.is_meta or not value.numel():
        return None
    rows: torch.Tensor = value.detach().reshape(len(value), -1)
    return rows


def _tells(kind: str, rows: torch.Tensor) -> bool:
    """Whether a kind of number can tell samples apart: padding of floats is zeros, and one number has no sum."""
    if rows.dtype.is_floating_point or rows.dtype == torch.bool:
        return kind == _COUNT
    return rows.shape[1] > 1 or kind == "largest number"
