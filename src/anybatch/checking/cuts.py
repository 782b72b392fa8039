"""Which samples of a batch are run to prove its split, and where they are cut."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.layout import Rows, rows_of
from anybatch.tensors.trees import leaves

_MOST = 8  # samples: among few the lengths, classes and missing labels of two parts are the least alike
_AMONG = 64  # the first of a batch


class Cut(NamedTuple):
    """Some samples as a batch of their own, and the parts that they are cut into.

    Args:
        splittable: the samples.
        sizes: of the parts, the first samples first.
        is_own: whether it is cut where the step cuts.
    """

    splittable: Splittable
    sizes: tuple[int, int]
    is_own: bool = False

    @property
    def whole(self) -> list[Part]:
        """All samples at once."""
        return [Part(range(sum(self.sizes)), sum(self.sizes))]

    @property
    def parts(self) -> list[Part]:
        """The two parts."""
        first, second = self.sizes
        return [Part(range(first), first), Part(range(first, first + second), second)]


def cut_inside(splittable: Splittable, parts: Sequence[Part], most: int = _MOST) -> Cut | None:
    """Cuts some samples of the largest micro-batch's batch in two; ``None`` if micro-batches have one sample.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
        most: samples that are taken.
    """
    largest = max(parts, key=lambda part: len(part.samples))
    count = min(len(largest.samples), most)
    if count < 2:
        return None
    smallest = min(len(part.samples) for part in parts)
    least = 1 if count < 4 or smallest == 1 else 2
    first = max(least, (3 * count) // 8)
    numbers = _numbers(splittable, largest.batch)
    return _cut(splittable, largest.batch, *_far_apart(numbers, first, count - first))


def cut_between(splittable: Splittable, parts: Sequence[Part]) -> Cut | None:
    """Two of the step's own micro-batches, that are as little alike as there are; ``None`` if no batch has two.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
    """
    starts = [0]
    for layout in splittable.layouts:
        starts.append(starts[-1] + layout.rows)
    best: tuple[float, int, list[int], list[int]] | None = None
    for batch in range(max(1, len(splittable.layouts))):
        own = [[i - starts[batch] for i in part.samples] for part in parts if part.batch == batch][:_MOST]
        numbers = _numbers(splittable, batch, among=max((max(one) for one in own), default=0) + 1)
        for i, one in enumerate(own):
            for other in own[i + 1 :]:
                distance = _distance(numbers, one, other) + (len(one) != len(other))
                if best is None or distance > best[0]:
                    best = distance, batch, one, other
    return None if best is None else _cut(splittable, *best[1:], is_own=True)


def _cut(splittable: Splittable, batch: int, first: list[int], second: list[int], *, is_own: bool = False) -> Cut:
    return Cut(splittable.chosen([*first, *second], batch), (len(first), len(second)), is_own)


def _far_apart(numbers: list[list[float]], first: int, second: int) -> tuple[list[int], list[int]]:
    """Two groups of samples: those with the largest of each number, and those with the smallest."""
    rows = len(numbers[0])
    one: list[int] = []
    other: list[int] = []
    waiting = [sorted(range(rows), key=column.__getitem__) for column in numbers if len(set(column)) > 1]
    waiting.append(list(range(rows)))
    while len(one) < first or len(other) < second:
        for order in waiting:
            free = [i for i in order if i not in one and i not in other]
            if free and len(other) < second:
                other.append(free.pop(0))
            if free and len(one) < first:
                one.append(free.pop())
    return sorted(one), sorted(other)


def _distance(numbers: list[list[float]], one: Sequence[int], other: Sequence[int]) -> float:
    found = 0.0
    for column in numbers:
        spread = max(column) - min(column)
        means = [sum(column[i] for i in some) / len(some) for some in (one, other)]
        found += abs(means[0] - means[1]) / spread if spread else 0.0
    return found


def _numbers(splittable: Splittable, batch: int, among: int = _AMONG) -> list[list[float]]:
    """Numbers that tell samples apart, a list of one a sample for each kind; the first is the same for all."""
    if splittable.is_collated:
        samples = [splittable.sample(i) for i in range(min(splittable.rows, max(among, _AMONG)))]
        return [[0.0] * len(samples), *_of_items(samples)]
    layout = splittable.layouts[batch]
    rows = min(layout.rows, max(among, 1))
    found = [[0.0] * rows]
    for node in splittable.nodes(batch):
        if isinstance(node, Rows):
            found += _of_leaf(node.value, rows)
    return found


def _of_leaf(value: Any, rows: int) -> list[list[float]]:
    if isinstance(value, (list, tuple)):
        return _of_items(value[:rows])
    if not isinstance(value, torch.Tensor):
        if rows_of(value) is None or getattr(value, "dtype", None) is None or value.dtype.kind not in "biuf":
            return []
        value = torch.as_tensor(value[:rows])
    if value.layout is not torch.strided or value.is_nested or value.is_meta or not value.numel():
        return []
    flat = value.detach()[:rows].reshape(rows, -1)
    if flat.is_complex():
        return []
    if flat.is_floating_point():
        is_set = (flat != 0) & ~flat.isnan()
        return [is_set.sum(1).tolist(), flat.nan_to_num().double().sum(1).tolist()]
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
