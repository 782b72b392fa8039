"""How long raw samples are, which decides what a micro-batch of them takes."""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.batches import Part
from anybatch.batch.layout import PLAIN, rows_of
from anybatch.batch.trees import leaves, opened, tensors_within
from anybatch.planning.curve import Size
from anybatch.planning.microbatches import (
    bytes_in,
    bytes_of,
    collated,
    collated_on_fakes,
    lengths_by_shape,
    shapes_of_batches,
)
from anybatch.planning.subjects import Subject
from anybatch.tensors.fakes import Fakes

logger = logging.getLogger(__name__)

Extents = tuple[int, ...]

_FINEST = 4096  # lengths that stand for bytes
_MOST_KNOWN = 4096
_MOST_ORDERS = 4


@dataclass(frozen=True)
class Lengths:
    """The lengths of raw samples."""

    each: tuple[int, ...] = ()  # of every sample; none where all are alike
    # of every sample all that varies, and its bytes; none where the samples are padded to the longest
    extents: tuple[Extents, ...] = ()
    bytes_of_one: int = 0  # of the largest sample, collated
    shapes: tuple[tuple[int, Extents], ...] = ()  # of each batch of a window, by the position of its first sample
    are_apart: bool = False  # whether a length only tells shapes apart, so that nothing follows from one for another

    @property
    def are_joined(self) -> bool:
        """Whether samples are put one after the other, or in lists, so that each takes as much as itself is long."""
        return bool(self.extents)

    def size_of(self, part: Part, *, is_exact: bool) -> Size:
        """What a micro-batch looks like; if it is not traced just as it is, its samples count as the longest."""
        own = [self.each[i] for i in part.samples] if self.each else []
        longest = max(own, default=0)
        if not self.extents:
            shape = next((shape for start, shape in reversed(self.shapes) if start <= part.samples[0]), None)
            return Size(len(part.samples), longest, () if shape is None else (shape,))
        each = sorted((self.extents[i] for i in part.samples), key=lambda one: one[-1], reverse=True)
        if not is_exact:
            return Size(len(part.samples), longest, tuple(each))
        mean = -(-sum(own) // max(1, len(own)))
        return Size(len(part.samples), mean, tuple(each), (sum(own), sum(one * one for one in own)))

    def part_like(self, size: Size) -> Part:
        """Samples that make a micro-batch of a size."""
        if not self.each:
            return Part(range(size.samples), size.samples)
        if self.extents:
            places = {one: index for index, one in enumerate(self.extents)}
            return Part([places[one] for one in reversed(size.each)], size.samples)
        return Part([self.each.index(size.length)] * size.samples, size.samples)

    def points(self, rows: int) -> list[Part]:
        """The small micro-batches that are traced: two, or five where the length of the samples varies."""
        high, each = 4 if rows >= 4 else 3, self.each
        if not each:
            return [Part(range(m), m) for m in (2, high)]
        order = sorted(range(len(each)), key=each.__getitem__)
        short, long = order[0], order[-1]
        if len(set(each)) < 3:
            return [Part([long] * m, m) for m in (2, high)]
        middle = min(order, key=lambda i: abs(each[i] - (each[short] + each[long]) / 2))
        if each[middle] in (each[short], each[long]):
            middle = next(i for i in order if each[i] not in (each[short], each[long]))
        return [Part([i] * m, m) for m, i in ((2, short), (high, short), (2, long), (high, long), (2, middle))]

    def fewest(self, samples: int) -> list[Part]:
        """Micro-batches of as few samples as there may be: of the longest, the shortest and the one between."""
        order = sorted(range(len(self.each)), key=self.each.__getitem__)
        if not order:
            return [Part(range(samples), samples)]
        return [Part([i] * samples, samples) for i in dict.fromkeys((order[-1], order[0], order[len(order) // 2]))]

    def in_order(self, part: Part) -> tuple[Extents, ...]:
        """What the samples of a micro-batch are large by, one after the other; none where they are padded."""
        return tuple(self.extents[i] for i in part.samples) if self.extents else ()

    def outgrown(self, parts: Sequence[Part], known: Sequence[Size], *, is_exact: bool) -> str:
        """Says which micro-batch is larger than those that were planned for; empty if none is.

        Known is the largest one; of a window all in their order, by which some keep their graphs.
        """
        if self.shapes and len(known) != len(parts):
            return f"there are {len(parts)} micro-batches of several shapes, and {len(known)} were planned for"
        for place, part in enumerate(parts):
            size = self.size_of(part, is_exact=is_exact)
            if not known or not size.is_within(known[place if self.shapes else 0]):
                return f"a micro-batch of {size.samples} samples, the longest of {size.length}, is larger than planned"
        return ""

    def heaviest(self, parts: Sequence[Part], *, packed: bool) -> list[Part]:
        """Micro-batches of samples that are not padded, of which one is at least as heavy as any of some.

        Each has in the place of its largest sample the largest one of any of them, and so on to the smallest. There is
        one for each order of the samples, where they are large by several things. The largest sample comes last: where
        a loop goes through the samples, what it needs for a while it needs beside what is kept of all others. Packed
        micro-batches have fewer samples where these are larger, so that like numbers are compared.
        """
        if not self.extents:
            return list(parts[:1])
        groups: dict[int, list[Part]] = {}
        for part in parts:
            groups.setdefault(len(part.samples) if packed else 0, []).append(part)
        found: dict[tuple[int, ...], Part] = {}
        for group in groups.values():
            for order in orders_of(self.extents):
                ranked = [sorted(part.samples, key=order.__getitem__, reverse=True) for part in group]
                places = itertools.zip_longest(*ranked)
                largest = [max((i for i in place if i is not None), key=order.__getitem__) for place in places]
                samples = largest[::-1]
                found.setdefault(tuple(samples), Part(samples, max(part.cost for part in group)))
        return list(found.values())


@dataclass(frozen=True)
class _Shapes:
    """The dimensions of a collated batch, and its bytes."""

    extents: Extents
    bytes: int


Known = dict[Any, _Shapes]


def lengths_of(subject: Subject, known: Known) -> Lengths:
    """How long the samples of a batch are, seen from two of the same collated.

    Returns:
        The dimension that differs; of several that differ and are padded, such as the lengths of a source and a target,
        the longest; of several that differ in other ways and are not padded, the bytes.
    """
    splittable = subject.splittable
    if not splittable.rows:
        return Lengths()
    if not splittable.is_collated:
        return _lengths_of_window(subject)
    if len(known) > _MOST_KNOWN:
        known.clear()
    scratch = Fakes()
    try:
        shapes = _shapes_of_each(subject, known, scratch)
        most = subject.behaviour.collated_bytes = -(-max(one.bytes for one in shapes) // 2)
        flat = [one.extents for one in shapes]
        if len(set(flat)) == 1:
            return Lengths(bytes_of_one=most)
        is_aligned = len({len(one) for one in flat}) == 1
        varying = [k for k in range(len(flat[0])) if len({one[k] for one in flat}) > 1] if is_aligned else []
        own = [tuple(one.extents[k] for k in varying) for one in shapes]
        if is_aligned and not _are_joined(subject, [max(one) for one in own], scratch):
            return Lengths(tuple(max(one) for one in own), bytes_of_one=most)
    finally:
        scratch.let_go()
    extents = tuple((*some, shape.bytes) for some, shape in zip(own, shapes, strict=True))
    return Lengths(_joined_lengths(extents), extents, most)


def _lengths_of_window(subject: Subject) -> Lengths:
    """The lengths of samples that lie in batches already: all of one batch are as long."""
    splittable = subject.splittable
    shapes = shapes_of_batches(splittable, subject.loss_fn)
    rows = [layout.rows for layout in splittable.layouts]
    places = tuple(zip(itertools.accumulate([0, *rows[:-1]]), shapes, strict=False))
    if len(set(shapes)) < 2:
        return Lengths(shapes=places)
    length, is_one_number = lengths_by_shape(shapes)
    each = (length[shape] for shape, number in zip(shapes, rows, strict=True) for _ in range(number))
    return Lengths(tuple(each), shapes=places, are_apart=not is_one_number)


def orders_of(extents: tuple[Extents, ...]) -> list[list[int]]:
    """What samples may be ordered by where no two orders are the same: their bytes first, then what varies."""
    columns = [[one[k] for one in extents] for k in range(len(extents[0]))]
    found = [columns[-1]]
    for column in columns[:-1]:
        if len(found) <= _MOST_ORDERS and not any(_go_together(column, other) for other in found):
            found.append(column)
    return found


def _joined_lengths(extents: tuple[Extents, ...]) -> tuple[int, ...]:
    if len(extents[0]) > 1 and len(orders_of(extents)) == 1:
        return tuple(max(one[:-1]) for one in extents)
    unit = max(1, max(one[-1] for one in extents) // _FINEST)
    return tuple(-(-one[-1] // unit) for one in extents)


def _go_together(column: list[int], other: list[int]) -> bool:
    """Whether a sample that is larger by one is nowhere smaller by the other."""
    pairs = sorted(zip(column, other, strict=True))
    return all(a[1] <= b[1] for a, b in itertools.pairwise(pairs))


def _are_joined(subject: Subject, lengths: list[int], scratch: Fakes) -> bool:
    """Whether a short sample beside a long one takes less than the long one, so that it is not padded."""
    short, long = (pick(range(len(lengths)), key=lengths.__getitem__) for pick in (min, max))
    try:
        ones, mixed, turned = (_shapes(subject, pair, scratch) for pair in ([long, long], [short, long], [long, short]))
    except Exception as error:  # noqa: BLE001 - of the user's, for samples that never come together
        logger.info("samples of different lengths can't be collated together: %s", error)
        return False
    return not (ones.extents == mixed.extents == turned.extents)


def _shapes_of_each(subject: Subject, known: Known, scratch: Fakes) -> list[_Shapes]:
    """The shapes of two of each sample, the largest one first, which says whether the others are small."""
    rows = subject.splittable.rows
    samples = subject.splittable.samples_of(Part(range(rows), rows))
    sizes = [sum(bytes_of(leaf) for _, _, leaf in leaves(sample)) for sample in samples]
    largest = max(range(rows), key=sizes.__getitem__)
    subject.behaviour.collated_bytes = 0
    first = _known_shapes(subject, largest, known, scratch)
    subject.behaviour.collated_bytes = first.bytes
    return [first if index == largest else _known_shapes(subject, index, known, scratch) for index in range(rows)]


def _known_shapes(subject: Subject, index: int, known: Known, scratch: Fakes) -> _Shapes:
    """The shapes of two of a sample; remembered where ``collate`` can't look at more than shapes and plain values."""
    if subject.behaviour.collates_fakes is False:
        return _shapes(subject, [index, index], scratch)
    (sample,) = subject.splittable.samples_of(Part([index], 1))
    key = tuple(_signature(sample))
    found = known.get(key)
    if found is None:
        found = _shapes(subject, [index, index], scratch)
        if subject.behaviour.collates_fakes:
            known[key] = found
    return found


def _signature(node: Any) -> Iterator[Any]:
    if isinstance(node, PackedSequence):
        yield tuple(node.data.shape), tuple(node.batch_sizes.tolist())
    elif isinstance(node, torch.Tensor) or rows_of(node) is not None:
        yield tuple(_extents(node)), node.dtype
        if not isinstance(node, torch.Tensor):  # whose numbers collate can see
            yield hash(node.tobytes()) if not node.dtype.hasobject else object()
    elif isinstance(node, (list, tuple)) and all(isinstance(item, PLAIN) for item in node):
        yield tuple(node)
    elif (container := opened(node)) is not None:
        for child in container.children:
            yield child.label
            yield from _signature(child.value)
    else:
        yield node if isinstance(node, PLAIN) else repr(node)


def _shapes(subject: Subject, samples: list[int], scratch: Fakes) -> _Shapes:
    part = Part(samples, len(samples))
    batch = collated_on_fakes(subject, part, scratch)
    if batch is None:
        batch = collated(subject, part)
    extents = list(_extents(batch))
    return _Shapes(tuple(extents), bytes_in(batch))


def _extents(node: Any) -> Iterator[int]:
    if isinstance(node, PackedSequence):
        yield from node.data.shape
    elif isinstance(node, torch.Tensor) and node.is_nested:
        shapes = [one.shape for one in node.unbind()]
        yield from (len(shapes), sum(map(math.prod, shapes)))
    elif isinstance(node, torch.Tensor) and node.layout is torch.sparse_coo:
        yield from (*node.shape, node._nnz())
    elif isinstance(node, torch.Tensor) or rows_of(node) is not None:
        yield from node.shape
    elif isinstance(node, (list, tuple)) and all(isinstance(item, PLAIN) for item in node):
        yield len(node)
    elif (container := opened(node)) is not None:
        for child in container.children:
            yield from _extents(child.value)
    elif not isinstance(node, PLAIN):
        for tensor in tensors_within(node)[0]:
            yield from tensor.shape
