"""Which samples of a batch are run to prove its split, and where they are cut."""

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
    one, other = _far_apart(_numbers(splittable, largest.batch), first, count - first)
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
    columns = _numbers(splittable, largest.batch)
    groups = [range(start, start + group) for start in range(0, columns.shape[1] - group + 1, group)]
    if len(groups) < 2:
        return None
    wanted = min(len(largest.samples), most) // group
    means = torch.stack([columns[:, list(one)].mean(1) for one in groups], 1)
    one, other = _far_apart(means, max(1, (3 * wanted) // 8), wanted - max(1, (3 * wanted) // 8))
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
        columns = _numbers(splittable, batch, among=max((max(one) for one in own), default=0) + 1)
        means = [columns[:, one].mean(1) for one in own]
        for i, one in enumerate(own):
            for j, other in enumerate(own[:i]):
                distance = float(_distance(means[i], means[j])) + (len(one) != len(other))
                if len(one) + len(other) <= most and (best is None or distance > best[0]):
                    best = distance, batch, one, other
    return None if best is None else _cut(splittable, *best[1:])


def _cut(splittable: Splittable, batch: int, one: list[int], other: list[int]) -> Cut:
    return Cut(splittable.chosen([*one, *other], batch), (len(one), len(other)))


def _far_apart(columns: torch.Tensor, first: int, second: int) -> tuple[list[int], list[int]]:
    """Two groups of samples that are as little alike as can be found one sample after the other."""
    rows = columns.shape[1]
    start, end = divmod(int(_distance(columns[:, :, None], columns[:, None, :]).argmax()), rows)
    end = end if start != end else rows - 1  # where all are alike
    one, other = [start], [end]
    taken = torch.zeros(rows, dtype=torch.bool)
    taken[[start, end]] = True
    for own, rest, wanted in (turn for _ in range(second) for turn in ((other, one, second), (one, other, first))):
        if len(own) < wanted:
            means = (columns[:, own].sum(1, keepdim=True) + columns) / (len(own) + 1)
            distances = _distance(means, columns[:, rest].mean(1, keepdim=True))
            own.append(int(distances.masked_fill(taken, -1).argmax()))
            taken[own[-1]] = True
    return sorted(one), sorted(other)


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far numbers of two samples or groups are apart, over all kinds; that one differs at all counts most."""
    difference = (one - other).abs()
    return difference.sum(0) + (difference > 0).sum(0)


def _numbers(splittable: Splittable, batch: int, among: int = _AMONG) -> torch.Tensor:
    """Numbers from 0 to 1 that tell the first samples apart, of shape ``[kinds, samples]``."""
    if splittable.is_collated:
        rows = min(splittable.rows, max(among, _AMONG))
        found = _of_items([splittable.sample(i) for i in range(rows)])
    else:
        rows = min(splittable.layouts[batch].rows, among)
        nodes = [node for node in splittable.nodes(batch) if isinstance(node, Rows)]
        found = [column for node in nodes for column in _of_leaf(node.value, rows)]
    columns = torch.tensor([[0.0] * rows, *found], dtype=torch.float64)
    low, high = columns.amin(1, keepdim=True), columns.amax(1, keepdim=True)
    told = ((low < high) & high.isfinite() & low.isfinite()).flatten()
    told[0] = True  # so that there is one kind
    spread = torch.where(low < high, high - low, 1.0)
    return ((columns - low) / spread)[told]


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
