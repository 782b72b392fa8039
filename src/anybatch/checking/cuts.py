"""Which samples of a batch are run to prove its split, and where they are cut."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.layout import Rows, rows_of
from anybatch.tensors.trees import leaves

MOST = 8  # samples: among few the lengths, classes and missing labels of two parts are the least alike
_AMONG = 64  # the first of a batch
_WAVES = (0.7, 1.9)  # along which floating-point numbers are added up, so that samples of one sum differ


class Cut(NamedTuple):
    """Some samples as a batch of their own, and the parts that they are cut into.

    Args:
        splittable: the samples.
        sizes: of the parts, the first samples first.
    """

    splittable: Splittable
    sizes: tuple[int, int]

    @property
    def whole(self) -> list[Part]:
        """All samples at once."""
        return [Part(range(sum(self.sizes)), sum(self.sizes))]

    @property
    def parts(self) -> list[Part]:
        """The two parts."""
        first, second = self.sizes
        return [Part(range(first), first), Part(range(first, first + second), second)]


def cut_inside(splittable: Splittable, parts: Sequence[Part], most: int = MOST) -> Cut | None:
    """Cuts some samples of the largest micro-batch's batch in two; ``None`` if micro-batches have one sample.

    The sizes have no common divisor, so that a loss of pairs or groups of samples fails rather than pairs others.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
        most: samples that are taken.
    """
    largest = max(parts, key=lambda part: len(part.samples))
    count = min(len(largest.samples), most)
    if count < 2:
        return None
    first = {5: 2, 7: 3, 8: 3}.get(count, 1)
    columns, rows = _numbers(splittable, largest.batch)
    one, other = _far_apart(columns, rows, first, count - first)
    return _cut(splittable, largest.batch, one, other)


def cut_groups(splittable: Splittable, parts: Sequence[Part], most: int = MOST, *, group: int) -> Cut | None:
    """Cuts between groups of samples that stand together in the largest micro-batch's batch.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
        most: samples that are taken.
        group: samples in a group.
    """
    largest = max(parts, key=lambda part: len(part.samples))
    columns, rows = _numbers(splittable, largest.batch)
    groups = [range(start, start + group) for start in range(0, rows - group + 1, group)]
    if len(groups) < 2:
        return None
    wanted = min(len(largest.samples), most) // group
    means = [[sum(column[i] for i in one) / group for one in groups] for column in columns]
    one, other = _far_apart(means, len(groups), max(1, (3 * wanted) // 8), wanted - max(1, (3 * wanted) // 8))
    return _cut(splittable, largest.batch, *([i for n in some for i in groups[n]] for some in (one, other)))


def cut_between(splittable: Splittable, parts: Sequence[Part], most: int = 2 * MOST) -> Cut | None:
    """Two of the step's own micro-batches, that are as little alike as there are; ``None`` if no batch has two.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
        most: samples that are taken.
    """
    starts = [0]
    for layout in splittable.layouts:
        starts.append(starts[-1] + layout.rows)
    best: tuple[float, int, list[int], list[int]] | None = None
    for batch in range(max(1, len(splittable.layouts))):
        own = [[i - starts[batch] for i in part.samples] for part in parts if part.batch == batch][:MOST]
        columns, _ = _numbers(splittable, batch, among=max((max(one) for one in own), default=0) + 1)
        for i, one in enumerate(own):
            for other in own[i + 1 :]:
                distance = _distance(columns, one, other) + (len(one) != len(other))
                if len(one) + len(other) <= most and (best is None or distance > best[0]):
                    best = distance, batch, one, other
    return None if best is None else _cut(splittable, *best[1:])


def _cut(splittable: Splittable, batch: int, one: list[int], other: list[int]) -> Cut:
    return Cut(splittable.chosen([*one, *other], batch), (len(one), len(other)))


def _far_apart(columns: list[list[float]], rows: int, first: int, second: int) -> tuple[list[int], list[int]]:
    """Two groups of samples that are as little alike as can be found one sample after the other."""
    pairs = [(i, j) for i in range(rows) for j in range(i)]
    start, end = max(pairs, key=lambda pair: _distance(columns, [pair[0]], [pair[1]]))
    one, other = [start], [end]
    while len(one) < first or len(other) < second:
        free = [i for i in range(rows) if i not in one and i not in other]
        if len(other) < second:
            found = max(free, key=lambda i: _distance(columns, one, [*other, i]))
            other.append(found)
            free.remove(found)
        if len(one) < first:
            one.append(max(free, key=lambda i: _distance(columns, [*one, i], other)))
    return sorted(one), sorted(other)


def _distance(columns: list[list[float]], one: Sequence[int], other: Sequence[int]) -> float:
    """How far the means of some columns are apart; that one differs at all counts most."""
    found = 0.0
    for column in columns:
        difference = abs(sum(column[i] for i in one) / len(one) - sum(column[i] for i in other) / len(other))
        found += difference + (difference > 0)
    return found


def _numbers(splittable: Splittable, batch: int, among: int = _AMONG) -> tuple[list[list[float]], int]:
    """Numbers from 0 to 1 that tell samples apart, one a sample in each column; and how many samples were looked at."""
    if splittable.is_collated:
        rows = min(splittable.rows, max(among, _AMONG))
        found = _of_items([splittable.sample(i) for i in range(rows)])
    else:
        rows = min(splittable.layouts[batch].rows, among)
        nodes = [node for node in splittable.nodes(batch) if isinstance(node, Rows)]
        found = [column for node in nodes for column in _of_leaf(node.value, rows)]
    bounds = [(min(column), max(column)) for column in found]
    return [
        [(value - low) / (high - low) for value in column]
        for column, (low, high) in zip(found, bounds, strict=True)
        if low < high < math.inf
    ], rows


def _of_leaf(value: Any, rows: int) -> list[list[float]]:
    if isinstance(value, PackedSequence) or (isinstance(value, torch.Tensor) and value.is_nested):
        samples = unpack_sequence(value) if isinstance(value, PackedSequence) else value.unbind()
        return [[float(len(one)) for one in samples[:rows]]]
    if isinstance(value, (list, tuple)):
        return _of_items(value[:rows])
    if not isinstance(value, torch.Tensor):
        if rows_of(value) is None or getattr(value, "dtype", None) is None or value.dtype.kind not in "biuf":
            return []
        value = torch.as_tensor(value[:rows])
    if value.layout is not torch.strided or value.is_meta or not value.numel():
        return []
    flat = value.detach()[:rows].reshape(rows, -1)
    if flat.is_complex():
        return []
    if flat.is_floating_point():
        is_set = (flat != 0) & ~flat.isnan()
        numbers = flat.nan_to_num().to("cpu", torch.float64)
        along = torch.arange(flat.shape[1], dtype=torch.float64)
        return [
            is_set.sum(1).tolist(),
            numbers.sum(1).tolist(),
            *((numbers @ (k * along).sin()).tolist() for k in _WAVES),
        ]
    return [flat.count_nonzero(1).tolist(), flat.sum(1, dtype=torch.float64).tolist(), (flat < 0).sum(1).tolist()]


def _of_items(items: Sequence[Any]) -> list[list[float]]:
    """How large the items are, and what their whole numbers add up to."""
    sizes, sums = [], []
    for item in items:
        tensors = [leaf for _, _, leaf in leaves(item) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        whole = [one for one in tensors if not one.is_floating_point() and not one.is_complex() and not one.is_nested]
        sizes.append(float(sum(one.numel() for one in tensors)) or float(len(item) if hasattr(item, "__len__") else 0))
        sums.append(float(sum(int(one.sum()) for one in whole if one.layout is torch.strided)))
    return [sizes, sums]
