"""Which samples of a batch are run to prove its split, and where they are cut."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.layout import Rows, rows_of
from anybatch.batch.trees import leaves

MOST = 8  # samples: among few the lengths, classes and missing labels of two parts are the least alike
_AMONG = 128  # the first of a batch, among which there are some of one class also where there are many classes
_TURNS = 4  # cuts at most: what their samples have in common does not fit into one
_ANY = 12  # cuts of any groups: a mean over other items may by chance be the same in a few
_PAIRED = 32  # the first micro-batches of a batch, of which two are taken
_RAW = 64  # the same of raw samples, which have to be looked at one by one
_KINDS = 16  # numbers of a raw sample
_ENTRIES = 4096  # of a tensor in floating point that are added up
_WAVES = (0.7, 1.9)  # along which they are added up, so that samples of one sum differ


class Cut(NamedTuple):
    """Some samples as a batch of their own, and the parts that they are cut into.

    Args:
        splittable: the samples.
        sizes: of the parts, the first samples first, which are not fewer than the others.
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


def cuts_inside(splittable: Splittable, parts: Sequence[Part], most: int = MOST) -> Iterator[Cut]:
    """Cuts some samples of the largest micro-batch's batch in two; none if micro-batches have one sample.

    The sizes have no common divisor, so that a loss of pairs or groups of samples fails rather than pairs others.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
        most: samples that are taken.

    Returns:
        The cuts, see ``_choices``.
    """
    largest = max(parts, key=lambda part: len(part.samples))
    count = min(len(largest.samples), most)
    if count < 2:
        return
    first = {5: 2, 7: 3, 8: 3}.get(count, 1)
    columns = _numbers(splittable, largest.batch)
    units = [[row] for row in range(columns.shape[1])]
    yield from _cuts(splittable, largest.batch, units, _choices(columns, units, first, count - first))


def cuts_between(splittable: Splittable, parts: Sequence[Part], most: int = 2 * MOST) -> Iterator[Cut]:
    """Two of the step's own micro-batches of one batch; none if no batch has two.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
        most: samples that are taken.

    Returns:
        The cuts, see ``_choices``.
    """
    start = 0
    for batch in range(max(1, len(splittable.layouts))):
        own = [[row - start for row in part.samples] for part in parts if part.batch == batch][:_PAIRED]
        units = [unit for unit in own if 2 * len(unit) <= most]
        if len(units) > 1:
            columns = _numbers(splittable, batch, among=max(map(max, units)) + 1)
            yield from _cuts(splittable, batch, units, _choices(columns, units, 1, 1))
            return
        start += splittable.layouts[batch].rows if splittable.layouts else 0


def cuts_of_groups(splittable: Splittable, parts: Sequence[Part], most: int, group: int) -> Iterator[Cut]:
    """Cuts between groups of samples that stand together in the largest micro-batch's batch.

    Args:
        splittable: the logical batch.
        parts: how the step splits it.
        most: samples that are taken.
        group: samples in a group.

    Returns:
        Cuts of unlike groups, and then of any.
    """
    largest = max(parts, key=lambda part: len(part.samples))
    columns = _numbers(splittable, largest.batch)
    units = [list(range(start, start + group)) for start in range(0, columns.shape[1] - group + 1, group)]
    wanted = min(len(largest.samples), most, columns.shape[1]) // group
    if wanted < 2:
        return
    first = max(1, (3 * wanted) // 8)
    yield from _cuts(splittable, largest.batch, units, _choices(columns, units, first, wanted - first))
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ANY):
        drawn = torch.randperm(len(units), generator=generator)[:wanted].tolist()
        yield from _cuts(splittable, largest.batch, units, [(drawn[:first], drawn[first:])])


Units = Sequence[list[int]]
Choice = tuple[list[int], list[int]]


def _cuts(splittable: Splittable, batch: int, units: Units, choices: Iterable[Choice]) -> Iterator[Cut]:
    for chosen in choices:
        few, many = sorted(([row for number in sorted(some) for row in units[number]] for some in chosen), key=len)
        yield Cut(splittable.chosen([*many, *few], batch), (len(many), len(few)))


def _choices(columns: torch.Tensor, units: Units, first: int, second: int) -> Iterator[Choice]:
    """Two groups of units, as often as it takes to see all kinds of numbers.

    They are as little alike as there are, so that a mean over other items than samples shows. But some samples that
    have a number in common, such as those of one class, user or length, are in both, so that a loss that compares
    these, or that shares statistics of theirs, shows too. What few samples can't hold at once is left to later turns,
    each for those numbers that no choice before had in common.

    Args:
        columns: numbers of samples.
        units: the rows of each unit.
        first: units of the first group.
        second: of the second.
    """
    sizes = torch.tensor([list(map(len, units))], dtype=torch.float64)
    alone = sizes.numel() == sizes.sum()
    rows = [row for unit in units for row in unit]
    means = columns[:, rows] if alone else torch.stack([columns[:, unit].mean(1) for unit in units], 1)
    apart = _far_apart(torch.cat([means, sizes / sizes.max()]), first, second)
    common = _in_common(columns, units)
    lacking = common.flatten(1).any(1)
    for turn in range(_TURNS):
        chosen = _with_kin(common, apart, lacking, all_of_it=turn > 0)
        yield chosen
        lacking = lacking & ~_held(common, chosen)
        if not lacking.any():
            return


def _in_common(columns: torch.Tensor, units: Units) -> torch.Tensor:
    """Which numbers two units have in common, of those that not all samples have: ``[kinds, units, units]``."""
    kinds = 1 + (columns.sort(1).values.diff(dim=1) != 0).sum(1)
    repeated = columns[(kinds > 1) & (kinds < columns.shape[1])]
    longest = max(map(len, units))
    values = repeated[:, torch.tensor([unit + unit[:1] * (longest - len(unit)) for unit in units])]
    common = (values[:, :, None, :, None] == values[:, None, :, None, :]).flatten(3).any(3)
    return common & ~torch.eye(len(units), dtype=torch.bool)


def _held(common: torch.Tensor, chosen: Choice) -> torch.Tensor:
    """Which numbers a unit of one group has in common with one of the other."""
    one, other = chosen
    return common[:, one][:, :, other].flatten(1).any(1)


def _with_kin(common: torch.Tensor, apart: Choice, lacking: torch.Tensor, *, all_of_it: bool) -> Choice:
    """Replaces units by ones that have a lacking number in common with the other group's.

    Args:
        common: which numbers two units have in common.
        apart: the groups as they are.
        lacking: the numbers that are wanted.
        all_of_it: whether all units may be replaced; else up to half of the second group, so that they stay unlike.
    """
    one, other = (list(some) for some in apart)
    kept: set[int] = set()
    for _ in range(len(other) if all_of_it else len(other) // 2):
        wanted = common[lacking & ~_held(common, (one, other))].sum(0, dtype=torch.float64)
        for own, rest, pairs in ((one, other, wanted), (other, one, wanted.T)):
            pairs[rest] = 0  # nothing changes sides
            pairs[own] += 0.5 * (pairs[own] > 0)  # as little as possible is replaced
            if all(unit in kept for unit in own) or (own is one and not all_of_it):
                pairs[[unit for unit in range(len(pairs)) if unit not in own]] = 0
        if not wanted.any():
            break
        for own, unit in zip((one, other), divmod(int(wanted.argmax()), wanted.shape[1]), strict=True):
            if unit not in own:
                own[next(at for at in reversed(range(len(own))) if own[at] not in kept)] = unit
            kept.add(unit)
    return one, other


def _far_apart(columns: torch.Tensor, first: int, second: int) -> Choice:
    """Two groups of units that are as little alike as can be found one after the other."""
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
    return one, other


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far numbers of two samples or groups are apart, over all kinds; that one differs at all counts most."""
    difference = (one - other).abs()
    return difference.sum(0) + (difference > 0).sum(0)


def _numbers(splittable: Splittable, batch: int, among: int = _AMONG) -> torch.Tensor:
    """Numbers from 0 to 1 that tell the first samples apart, of shape ``[kinds, samples]``."""
    if splittable.is_collated:
        rows = min(splittable.rows, max(among, _RAW) if among != _AMONG else _RAW)
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
        flat = flat.nan_to_num()
        numbers = flat[:, :: 1 + flat.shape[1] // _ENTRIES].to("cpu", torch.float64)
        along = torch.arange(numbers.shape[1], dtype=torch.float64)
        return [
            flat.count_nonzero(1).tolist(),
            numbers.sum(1).tolist(),
            *((numbers @ (k * along).sin()).tolist() for k in _WAVES),
        ]
    return [flat.count_nonzero(1).tolist(), flat.sum(1, dtype=torch.float64).tolist(), (flat < 0).sum(1).tolist()]


def _of_items(items: Sequence[Any]) -> list[list[float]]:
    """How large the items are, and what the whole numbers of each of their leaves add up to."""
    sizes = []
    sums: dict[tuple[str, ...], list[float]] = {}
    for at, item in enumerate(items):
        sizes.append(float(len(item)) if hasattr(item, "__len__") and not isinstance(item, torch.Tensor) else 0.0)
        entries = 0
        for _, keys, leaf in leaves(item):
            entries += leaf.numel() if isinstance(leaf, torch.Tensor) and not leaf.is_meta else 0
            number = _whole_number(leaf)
            if number is not None and (keys in sums or len(sums) < _KINDS):
                sums.setdefault(keys, [0.0] * len(items))[at] = number
        sizes[-1] = float(entries) or sizes[-1]
    return [sizes, *sums.values()]


def _whole_number(leaf: Any) -> float | None:
    """What the whole numbers of a leaf add up to; ``None`` for others."""
    if isinstance(leaf, (bool, int)):
        return float(leaf)
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or leaf.is_nested or leaf.layout is not torch.strided:
        return None
    return None if leaf.is_floating_point() or leaf.is_complex() else float(leaf.sum())
