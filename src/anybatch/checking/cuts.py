"""Which samples of a batch are run to prove its split, and where they are cut."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from anybatch.batch.batches import SIGNED, Part, Splittable, sizes_of
from anybatch.batch.layout import Rows, placement, rows_of
from anybatch.batch.trees import leaves
from anybatch.errors import BatchError

MOST = 8  # samples: among few the lengths, classes and missing labels of two parts are the least alike
_MANY = 32  # the same where a micro-batch has many times as many: among more a selection is rarely the same by chance
_AMONG = 64  # the first of a batch, among which there are some of one class also where there are many classes
_CHANGED = 5  # samples of a group that are changed for others
_TURNS = 4  # cuts at most: what their samples have in common does not fit into one
_GROUPS = 3  # of samples that belong together, the fewest of which two parts have unequal numbers
_COUNTED = 8  # parts, if a loss keeps something from one to the next: what it does with every fourth shows
_AGAIN = 2  # cuts of any samples where a micro-batch has many times as many: a quantile of each is rarely the same
_PAIRED = 32  # the first micro-batches of a batch, of which two are taken
_MOST_LEAVES = 8  # of a batch, which are tried without a cut
_SORTED = 1024  # samples at most that are sorted
_RAW = 64  # the same of raw samples, which have to be looked at one by one
_KINDS = 16  # numbers of a raw sample
_ENTRIES = 512  # of a tensor in floating point that are added up
_BLOCK, _NUMBERS = 16, 3 << 12  # samples that are looked at together at least, and numbers up to which more are
_WAVES = (0.7, 1.9)  # along which they are added up, so that samples of one sum differ


class Cut(NamedTuple):
    """Some samples as a batch of their own, and the parts that they are cut into."""

    splittable: Splittable  # the samples
    sizes: tuple[int, ...]  # of the parts, the first samples first
    is_free: bool = False  # whether samples of a part may be parted, too

    @property
    def whole(self) -> list[Part]:
        """All samples at once."""
        return [Part(range(sum(self.sizes)), sum(self.sizes))]

    @property
    def parts(self) -> list[Part]:
        """The parts."""
        return parts_of_sizes(self.sizes)

    @property
    def backwards(self) -> "Cut":
        """The same parts, the last one first, in smaller ones where they may be, so that a counter counts further."""
        rows = [row for part in reversed(self.parts) for row in part.samples]
        smaller = tuple(sizes_of(len(rows), min(*self.sizes, max(2, len(rows) // _COUNTED))))
        return Cut(self.splittable.chosen(rows), smaller if self.is_free else self.sizes[::-1])

    def alone(self, part: Part) -> "Cut":
        """One part as a batch of its own."""
        return Cut(self.splittable.chosen(list(part.samples)), (len(part.samples),))


def parts_of_sizes(sizes: Sequence[int]) -> list[Part]:
    """Consecutive parts of some sizes."""
    starts = itertools.accumulate(sizes, initial=0)
    return [Part(range(start, start + n), n) for start, n in zip(starts, sizes, strict=False)]


def splits_of(splittable: Splittable, micro_batch_size: float | None) -> list[list[Part]]:
    """Two different splits of a batch, the first as a step would make it; one if there is only one.

    The second has three parts of different sizes, so that what depends on the sizes or the number of parts shows.

    Args:
        micro_batch_size: of the first split, a cost where raw samples have one; ``None`` for halves.

    Example:
        >>> batch = Splittable([torch.zeros(8, 1)])
        >>> [[part.cost for part in parts] for parts in splits_of(batch, None)]
        [[4, 4], [2, 2, 4]]
    """
    rows = splittable.rows
    if splittable.has_costs:
        limits = [splittable.largest / 2, splittable.largest / 3, splittable.largest / rows]
        found = [splittable.plan(limit, "alone") for limit in [micro_batch_size or limits[0], *limits]]
    else:
        least, size = 2 if rows >= 6 else 1, None if micro_batch_size is None else int(micro_batch_size)
        first, second = max(least, rows // 6), max(least, rows // 3)
        sizes = [sizes_of(rows, size), sizes_of(rows, (rows + 1) // 2), [first, second, rows - first - second]]
        found = [parts_of_sizes(one) for one in [*sizes, [first, rows - first]] if min(one) > 0]
    candidates: list[list[Part]] = []
    for parts in found:
        if len(parts) > 1 and all([p.samples for p in parts] != [p.samples for p in one] for one in candidates):
            candidates.append(parts)
    if not candidates:
        raise BatchError(f"got a batch of {rows} samples; expected at least two, to split it")
    other = next((parts for parts in candidates[1:] if len(parts) != len(candidates[0])), None)
    return [candidates[0], *([other] if other else candidates[1:2])]


def placed_one_by_one(splittable: Splittable) -> Iterator[tuple[str, dict[str, int | None], Splittable]]:
    """The batch with one of its leaves cut along another dimension as long, or not at all, each in turn.

    Leaves of one shape are cut along another dimension together, too, as the two hidden states of an LSTM.

    Yields:
        The labels and the paths of the leaves, each with its dimension, and the batch.
    """
    tensors = [one for one in leaves(splittable.batches[0], "batch") if isinstance(one[2], torch.Tensor)]
    if splittable.collate is not None or len(tensors) < 2:
        return
    broadcast, dims = splittable.broadcast, getattr(splittable.broadcast, "dims", None) or {}
    few = [(label, ".".join(keys), leaf) for label, keys, leaf in tensors[:_MOST_LEAVES]]
    other, alike = list[tuple[str, dict[str, int | None]]](), dict[Any, list[tuple[str, str]]]()
    for label, path, leaf in few:
        for dim in range(1, leaf.dim()):
            if leaf.shape[dim] == leaf.shape[0] and path not in dims:
                other.append((label, {path: dim}))
                alike.setdefault((leaf.shape, dim), []).append((label, path))
    together = [
        (" and ".join(label for label, _ in own), dict.fromkeys((path for _, path in own), dim))
        for (_, dim), own in alike.items()
        if 1 < len(own) < len(tensors)
    ]
    whole: list[tuple[str, dict[str, int | None]]] = [(label, {path: None}) for label, path, _ in few]
    for label, placed in [*other, *together, *whole]:
        uncut, moved = [one for one, dim in placed.items() if dim is None], {k: d for k, d in placed.items() if d}
        with contextlib.suppress(BatchError):  # then nothing is left that is cut
            chosen = placement((*broadcast, *uncut), {**dims, **moved})
            yield label, placed, Splittable(splittable.batches, broadcast=chosen)


Units = Sequence[list[int]]
Choice = tuple[list[int], list[int]]


class Cuts:
    """The cuts of a batch that a step has split."""

    def __init__(self, splittable: Splittable, parts: Sequence[Part]) -> None:
        self._splittable, self._parts = splittable, parts
        largest = max(parts, key=lambda part: len(part.samples))
        self.largest, self._batch = len(largest.samples), largest.batch  # of the largest micro-batch

    @functools.cached_property
    def _columns(self) -> torch.Tensor:
        return _numbers(self._splittable, self._batch)

    @property
    def most(self) -> int:
        """How many samples are run: few, which are cheap, and more where more are cheap, too."""
        return max(MOST, min(_MANY, self.largest // 8))

    def inside(self, most: int = MOST, *, beyond: bool = False) -> Iterator[Cut]:
        """Cuts some samples of the largest micro-batch's batch in two; none if micro-batches have one sample.

        The sizes have no common divisor, so that a loss of pairs or groups of samples fails rather than pairs others.
        """
        rows = self._columns.shape[1]
        wanted = min(rows, most, rows if beyond else self.largest)
        if wanted >= 2:
            again = _AGAIN if wanted == _MANY and not beyond else 0
            yield from self._unlike([[row] for row in range(rows)], wanted, again)

    def of_groups(self, most: int = MOST, *, group: int, again: int = 0, mixed: bool = False) -> Iterator[Cut]:
        """Cuts between groups of samples that stand together, into unequal numbers of groups.

        If groups that the batch does not have make no difference, either, it is for their places that samples belong
        together, and not for what is in them, which is another in each batch.

        Args:
            again: cuts of any groups that come after those of unlike ones.
            mixed: whether such groups are made: of samples that are alike in one of their numbers, and of any.
        """
        columns, wanted = self._columns, max(most // group, _GROUPS)
        if wanted * group > columns.shape[1]:
            return
        if not mixed:
            yield from self._unlike(_grouped(range(columns.shape[1]), group), wanted, again)
            return
        drawn = torch.randperm(columns.shape[1], generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        for order in dict.fromkeys(tuple(order.tolist()) for order in (drawn, *columns.argsort(dim=1, stable=True))):
            yield from itertools.islice(self._unlike(_grouped(order, group), wanted), 1)

    def of_parted_groups(self, *, group: int) -> Iterator[Cut]:
        """Cuts within a group. Where one makes no difference, samples do not belong together in such groups."""
        for cut in self.of_groups(group=group, again=_AGAIN):
            for few in sorted({1, group // 2, group - 1} - {0}):
                yield cut._replace(sizes=(sum(cut.sizes) - few, few))

    def are_marked(self, group: int) -> bool:
        """Whether a number of samples, as a class or a query, is shared within each group and never between two."""
        columns = _numbers(self._splittable, self._batch, among=self._splittable.rows)
        groups = columns[:, : columns.shape[1] // group * group].unflatten(1, (-1, group)).tolist()
        kinds = [[set(one) for one in column] for column in groups]
        return any(max(map(len, held)) < group and sum(map(len, held)) == len(set().union(*held)) for held in kinds)

    def between(self, most: int = 2 * MOST) -> Iterator[Cut]:
        """Two of the step's own micro-batches of one batch; none if no batch has two."""
        for batch, own in self.own_rows():
            units = [unit for unit in own if 2 * len(unit) <= most]
            if len(units) > 1:
                columns = _numbers(self._splittable, batch, among=max(map(max, units)) + 1)
                yield from self._of(batch, units, _choices(columns, units, 1, 1))
                return

    def as_split(self, most: int = 0, *, is_free: bool = False, size: int | None = None) -> Cut | None:
        """Some of the step's own micro-batches of one batch, with the first and the last of those of the full size.

        What goes over from one to the next may do so only where both have the same size, as a hidden state does.

        Args:
            most: samples up to which more than two micro-batches are taken; what one or two samples give may not
                differ.
            is_free: whether samples may be put together otherwise. Then the most usual ones are in the first parts, and
                the most unusual ones in the last: a branch on ``any()`` or on the number of a loss, which all
                micro-batches of a batch may take alike, goes another way in each.
            size: samples of a micro-batch that are taken; ``None`` for all.

        Returns:
            The cut; ``None`` if no batch has two micro-batches.
        """
        has_costs = self._splittable.has_costs
        for batch, own in self.own_rows():
            if len(own) > 1:
                order, largest = list(range(len(own))), max(map(len, own))
                full = [number for number in order if len(own[number]) == largest]
                order = order if len(full) < 2 or has_costs else full
                taken = min(len(order), max(2, most // largest))
                numbers = sorted(order[at * (len(order) - 1) // (taken - 1)] for at in range(taken))
                chosen = [own[number][:size] for number in numbers]
                rows, sizes = [row for rows in chosen for row in rows], tuple(map(len, chosen))
                if is_free:
                    usual, half = self._from_usual_to_unusual(batch, max(_SORTED, max(rows) + 1)), len(rows) // 2
                    if has_costs:  # others may take more memory
                        usual = [row for row in usual if row in rows]
                    rows = [*usual[:half], *usual[half - len(rows) :]]
                return Cut(self._splittable.chosen(rows, batch), sizes, is_free)
        return None

    def own_rows(self) -> Iterator[tuple[int, list[list[int]]]]:
        """The rows of the first micro-batches of each batch, counted within the batch."""
        start, layouts = 0, self._splittable.layouts
        for batch in range(max(1, len(layouts))):
            yield (
                batch,
                [[row - start for row in part.samples] for part in self._parts if part.batch == batch][:_PAIRED],
            )
            start += layouts[batch].rows if layouts else 0

    def _from_usual_to_unusual(self, batch: int, among: int) -> list[int]:
        """The first samples of a batch, those last that have a number far from the others' of its kind."""
        columns = _numbers(self._splittable, batch, among)[:, :among]
        apart = (columns - columns.mean(1, keepdim=True)) / columns.std(1, keepdim=True)
        order: list[int] = apart.nan_to_num().abs().amax(0).argsort(stable=True).tolist()
        return order

    def _unlike(self, units: Units, wanted: int, again: int = 0) -> Iterator[Cut]:
        first = max((k for k in range(1, (wanted + 1) // 2) if math.gcd(k, wanted) == 1), default=1)
        yield from self._of(self._batch, units, _choices(self._columns, units, first, wanted - first))
        generator = torch.Generator("cpu").manual_seed(0)
        for _ in range(again):
            drawn = torch.randperm(len(units), generator=generator, device="cpu")[:wanted].tolist()
            yield from self._of(self._batch, units, [(drawn[:first], drawn[first:])])

    def _of(self, batch: int, units: Units, choices: Iterable[Choice]) -> Iterator[Cut]:
        for chosen in choices:
            few, many = sorted(([row for number in sorted(some) for row in units[number]] for some in chosen), key=len)
            yield Cut(self._splittable.chosen([*many, *few], batch), (len(many), len(few)))


def _grouped(rows: Sequence[int], group: int) -> list[list[int]]:
    return [list(rows[start : start + group]) for start in range(0, len(rows) - group + 1, group)]


def _choices(columns: torch.Tensor, units: Units, first: int, second: int) -> Iterator[Choice]:
    """Two groups of units, as often as it takes to see all kinds of numbers.

    They are unlike, so that a mean over other items than samples shows. But some samples that have a number in common,
    such as those of one class, user or length, are in both, so that a loss that compares these, or that shares
    statistics of theirs, shows too. What few samples can't hold at once is left to later turns, each for those numbers
    that no choice before had in common.
    """
    kinds = _Kinds(columns, units)
    lacking = kinds.common.flatten(1).any(1)
    for turn in range(_TURNS):
        chosen = kinds.chosen(first, second, lacking & (turn > 0 or second > 1))  # two units are first unlike
        yield chosen
        lacking = lacking & ~kinds.in_both(chosen)
        if not lacking.any():
            return


class _Kinds:
    """Units by kinds of numbers.

    Args:
        columns: of each sample, of shape ``[kinds, samples]``.
    """

    def __init__(self, columns: torch.Tensor, units: Units) -> None:
        longest = max(map(len, units))
        rows = torch.tensor([unit + unit[:1] * (longest - len(unit)) for unit in units], device="cpu")
        held = columns[:, rows]  # [kinds, units, longest]
        sizes = torch.tensor([[float(len(unit)) for unit in units]], dtype=torch.float64, device="cpu")
        self._largest = torch.cat([held.amax(2), sizes])
        means = [columns[:, unit].mean(1) for unit in units] if longest > 1 else []
        self._means = torch.cat([torch.stack(means, 1), sizes]) if means else self._largest
        spread = self._means.amax(1, keepdim=True) - self._means.amin(1, keepdim=True)
        self._varies = spread[:, 0] > 0
        self._rank = ((self._means - self._means.amin(1, keepdim=True)) / spread)[self._varies].mean(0).nan_to_num() / 3
        # which numbers two units have in common, of those that not all samples have: ``[kinds, units, units]``
        self.common = (held[:, :, None, :, None] == held[:, None, :, None, :]).flatten(3).any(3)
        self.common &= ~torch.eye(len(units), dtype=torch.bool, device="cpu")
        self.common &= (columns != columns[:, :1]).any(1)[:, None, None]

    def in_both(self, chosen: Choice) -> torch.Tensor:
        """Which numbers a unit of one group has in common with one of the other."""
        one, other = chosen
        return self.common[:, one][:, :, other].flatten(1).any(1)

    def chosen(self, first: int, second: int, lacking: torch.Tensor) -> Choice:
        """Two units with as much of what is lacking in common as there are, and unlike ones beside them."""
        one, other = self._together(lacking)
        fixed = len(other)
        self._fill_apart(one, first, other, second)
        mean = self._means[:, one].mean(1, keepdim=True)
        for at in range(second - 1, max(fixed, second - _CHANGED) - 1, -1):
            rest = other[:at] + other[at + 1 :]
            unlike = (self._means[:, rest].sum(1, keepdim=True) + self._means) / second != mean
            longer = torch.maximum(self._highest(rest), self._largest) != self._highest(one)
            shared = (self.in_both((one, rest)) | ~lacking)[:, None] | self.common[:, one].any(1)
            worth = torch.cat([unlike, longer, shared]).sum(0)
            worth[[*one, *rest]] = -1
            best, now = int(worth.argmax()), int(worth[other[at]])
            if int(worth[best]) > now:
                other[at] = best
            elif now >= 2 * int(self._varies.sum()) + len(lacking):
                break
        return one, other

    def _together(self, lacking: torch.Tensor) -> Choice:
        """Two units with as much of what is lacking in common as there are, the lowest of them, but no copies."""
        found = self.common[lacking].sum(0, dtype=torch.float64) * (self.common.sum(0) < len(self.common))
        found -= self._rank[:, None] + self._rank
        pair = divmod(int(found.argmax()), len(found))
        return ([pair[0]], [pair[1]]) if found[pair] > 0 else ([], [])

    def _highest(self, some: list[int]) -> torch.Tensor:
        return self._largest[:, some or [0]].amax(1, keepdim=True)

    def _fill_apart(self, one: list[int], first: int, other: list[int], second: int) -> None:
        """Adds the units with the lowest numbers of each kind in turn to one group, to the other the highest."""
        counts = (self._means[self._varies].sort(1).values.diff(dim=1) != 0).sum(1)
        fewest = counts.argsort()  # numbers are the soonest alike
        order = self._means[self._varies][fewest].argsort(1).tolist() or [list(range(self._means.shape[1]))]
        for lowest in itertools.cycle(order):
            for own, wanted, turn in ((other, second, lowest[::-1]), (one, first, lowest)):
                if len(own) < wanted:
                    own.append(next(unit for unit in turn if unit not in one and unit not in other))
            if len(one) == first and len(other) == second:
                return


def _numbers(splittable: Splittable, batch: int, among: int = _AMONG) -> torch.Tensor:
    """Numbers that tell the first samples apart, of shape ``[kinds, samples]``."""
    if splittable.is_collated:
        rows = min(splittable.rows, max(among, _RAW) if among != _AMONG else _RAW)
        found = [_of_items([splittable.sample(i) for i in range(rows)])]
    else:
        rows = min(splittable.layouts[batch].rows, among)
        nodes = [node for node in splittable.nodes(batch) if isinstance(node, Rows)]
        found = [_of_leaf(node.value, rows) for node in nodes]
    return torch.cat([torch.zeros(1, rows, dtype=torch.float64, device="cpu"), *found])


def _of_leaf(value: Any, rows: int) -> torch.Tensor:
    nothing = torch.empty(0, rows, dtype=torch.float64, device="cpu")
    if isinstance(value, PackedSequence) or (isinstance(value, torch.Tensor) and value.is_nested):
        samples = unpack_sequence(value) if isinstance(value, PackedSequence) else value.unbind()
        return torch.tensor([[len(one) for one in samples[:rows]]], dtype=torch.float64, device="cpu")
    if isinstance(value, (list, tuple)):
        return _of_items(value[:rows])
    if not isinstance(value, torch.Tensor):
        if rows_of(value) is None or getattr(value, "dtype", None) is None or value.dtype.kind not in "biuf":
            return nothing
        value = torch.as_tensor(value[:rows], device="cpu")
    if value.layout is not torch.strided or value.is_meta or not value.numel():
        return nothing
    flat = value.detach()[:rows].reshape(rows, -1)
    if flat.is_complex():
        return nothing
    # In blocks, so that this takes no room to speak of beside a budget that is all but full.
    flat = flat[:, :: 1 + flat.shape[1] // _ENTRIES] if flat.is_floating_point() else flat
    block = max(_BLOCK, _NUMBERS // flat.shape[1])
    return torch.cat([_of_rows(some) for some in flat.split(block)], 1)


def _of_rows(flat: torch.Tensor) -> torch.Tensor:
    """Numbers that tell some samples of a leaf apart, given as rows."""
    if flat.is_floating_point():
        numbers = flat.to("cpu", torch.float64, copy=True).nan_to_num_()
        along = torch.arange(numbers.shape[1], dtype=torch.float64, device="cpu")
        found = [numbers.sign().square_().sum(1), numbers.sum(1), *(numbers @ (k * along).sin() for k in _WAVES)]
    else:
        flat = flat.to(torch.int64) if flat.dtype in SIGNED else flat
        found = [flat.count_nonzero(1), flat.sum(1, dtype=torch.float64), (flat >= 0).sum(1)]
    return torch.stack([one.to("cpu", torch.float64) for one in found])


def _of_items(items: Sequence[Any]) -> torch.Tensor:
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
    return torch.tensor([sizes, *sums.values()], dtype=torch.float64, device="cpu")


def _whole_number(leaf: Any) -> float | None:
    """What the whole numbers of a leaf add up to; ``None`` for others."""
    if isinstance(leaf, (bool, int)):
        return float(leaf)
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or leaf.is_nested or leaf.layout is not torch.strided:
        return None
    return None if leaf.is_floating_point() or leaf.is_complex() else float(leaf.sum())
