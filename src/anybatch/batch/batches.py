"""Splitting batches into micro-batches, by a number of samples or by the cost of raw samples."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from anybatch.batch.layout import PLAIN, Branch, Constant, Layout, Node, Rows, lay_out, refuse_graphs, rows_of
from anybatch.batch.writes import Writes, own_containers, writable
from anybatch.errors import BatchError
from anybatch.records.layouts import BatchLayout, LeafLayout

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that few operations of torch take, and those whose bits they have."""
Oversized = Literal["refuse", "alone"]


def sizes_of(rows: int, micro_batch_size: int | None) -> list[int]:
    """The micro-batch sizes for a number of rows: all equal but the last, so at most two shapes.

    Example:
        >>> sizes_of(10, 4), sizes_of(10, None)
        ([4, 4, 2], [10])
    """
    if not rows:
        return []
    size = rows if micro_batch_size is None else min(micro_batch_size, rows)
    full, rest = divmod(rows, size)
    return [size] * full + ([rest] if rest else [])


def split(layout: Layout, sizes: Sequence[int]) -> Iterator[Any]:
    """Splits a batch into consecutive slices. Slices of dense tensors are views.

    Example:
        >>> [part["x"].shape[0] for part in split(lay_out({"x": torch.zeros(5, 3)}), [2, 2, 1])]
        [2, 2, 1]
    """
    return iter(_cut(layout.root, list(sizes)))


def _cut(node: Node, sizes: list[int]) -> Iterable[Any]:
    """The slices of a node. Each gets its own containers, since a loss may write to them."""
    if isinstance(node, Branch):
        if not node.children:
            return (node.container.rebuild(()) for _ in sizes)
        return map(node.container.rebuild, zip(*map(_cut, node.children, itertools.repeat(sizes)), strict=True))
    value = node.value
    if isinstance(node, Constant):
        return itertools.repeat(value, len(sizes))
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        if len(sizes) == 1:
            return [value.view_as(value)]
        views: Sequence[torch.Tensor] = value.split_with_sizes(sizes)
        return views
    stops = itertools.accumulate(sizes)
    return _chosen_of(value, [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)], node.label)


def _chosen_of(value: Any, choices: Sequence[Sequence[int]], label: str) -> list[Any]:
    """The samples of a leaf at some positions, for each of several choices; a range gives a view where it can."""
    if isinstance(value, torch.Tensor):
        return _rows_of_tensor(value, choices, label)
    if isinstance(value, PackedSequence):
        sequences, is_sorted = unpack_sequence(value), value.sorted_indices is None
        return [
            pack_sequence([sequences[i] for i in chosen], enforce_sorted=is_sorted and isinstance(chosen, range))
            for chosen in choices
        ]
    is_array = rows_of(value) is not None
    items = value if is_array or isinstance(value, (list, tuple)) else list(value)
    found = []
    for chosen in choices:
        if isinstance(chosen, range) and items is value:
            part = value[chosen.start : chosen.stop]
        else:
            part = value[chosen] if is_array else type(value)([items[i] for i in chosen])
        found.append(own_containers(part) if type(value) is list else part)  # of samples, which a loss may change
    return found


def _rows_of_tensor(value: torch.Tensor, choices: Sequence[Sequence[int]], label: str) -> list[Any]:
    are_slices = isinstance(choices[0], range)
    if are_slices and len(choices) == 1:
        return [value]
    if value.is_nested:
        parts = value.unbind()
        return [torch.nested.as_nested_tensor([parts[i] for i in chosen], layout=value.layout) for chosen in choices]
    if not are_slices:
        index = torch.tensor(choices[0], dtype=torch.int64, device=value.device)
        if (signed := SIGNED.get(value.dtype)) is not None:
            return [value.view(signed).index_select(0, index).view(value.dtype)]
        return [value.detach().index_select(0, index).requires_grad_(value.requires_grad)]
    if value.layout is torch.sparse_coo:
        return [value.narrow_copy(0, rows[0], len(rows)) for rows in choices]
    if value.layout in (torch.sparse_csr, torch.sparse_csc) and value.dim() == 2:
        return [part.to_sparse(layout=value.layout) for part in _rows_of_tensor(value.to_sparse_coo(), choices, label)]
    raise BatchError(
        f"{label} has the layout {value.layout}, which can't be split along its rows; make it strided or "
        "torch.sparse_coo, or pass broadcast= for it if it is not per sample",
        path=label,
    )


class Splittable:
    """A logical batch that can be split at any size: one batch, a window of several, or a list of raw samples.

    Args:
        collate: builds a batch from a list of raw samples; each of ``batches`` is then such a list.
        cost: the cost of one raw sample, such as its number of tokens.
        may_be_empty: whether a batch may have no samples, since other processes have some.

    Attributes:
        largest: the size of the whole batch as one micro-batch, in samples or padded cost.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        *,
        broadcast: Sequence[str] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        cost: Callable[[Any], float] | None = None,
        may_be_empty: bool = False,
    ) -> None:
        if not batches:
            raise BatchError("the window has no batches; expected at least one")
        self.batches = batches
        # an upper limit of the micro-batch size that gives every device a micro-batch; ``None`` for no limit
        self.most: float | None = None
        # whether micro-batches are copies, for a loss that writes into its batch and may run again
        self.is_copied = False
        self.are_arrays_copied = False  # of NumPy, to which a write is not seen
        self.noted: Writes | None = None  # what an attempt that runs may have written to
        self.collate, self.broadcast = collate, broadcast
        self.layouts: list[Layout] = []  # one for each batch; empty for raw samples
        # why a batch can't be split and runs whole; ``None`` if all can be split
        self.obstacle: BatchError | None = None
        self._samples: list[Any] = []
        self._costs: list[float] | None = None
        if collate is None:
            if cost is not None:
                raise BatchError("cost= was given without collate=; cost packs raw samples, which collate joins")
            self._rows: list[int] = []
            for one in batches:
                layout = lay_out(one, broadcast, may_be_empty=may_be_empty, may_be_whole=True)
                self.layouts.append(layout)
                self._rows.append(layout.rows)
                self.obstacle = self.obstacle or layout.obstacle
            self.rows, self.largest = sum(self._rows), float(max(self._rows))
        else:
            self._samples = [sample for batch in batches for sample in _raw(batch, may_be_empty)]
            self.rows = len(self._samples)
            self._rows = [self.rows]
            self._costs = None if cost is None else [_checked_cost(cost, s, i) for i, s in enumerate(self._samples)]
            self.largest = float(self.rows) if self._costs is None else self.rows * max(self._costs, default=0)

    @property
    def is_collated(self) -> bool:
        """Whether ``collate`` builds micro-batches from raw samples."""
        return self.collate is not None

    @property
    def has_costs(self) -> bool:
        """Whether micro-batches are limited by the cost of raw samples instead of their number."""
        return self._costs is not None

    @property
    def has_lists(self) -> bool:
        """Whether samples can differ in size: nested tensors, packed sequences or lists of objects."""
        return any(_may_vary(node.value) for node in self.nodes() if isinstance(node, Rows))

    @property
    def copies_rows(self) -> bool:
        """Whether micro-batches are copies, since a leaf is packed, nested or sparse and has no views."""
        values = [node.value for node in self.nodes() if isinstance(node, Rows)]
        return any(
            isinstance(value, PackedSequence)
            or (isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided))
            for value in values
        )

    def lies_on(self, device: torch.device) -> bool:
        """Whether every tensor is already on a device, as far as known."""
        there = {device, None} if device.type == "cpu" else {device}
        return self.collate is None and all(map(there.issuperset, map(attrgetter("devices"), self.layouts)))

    def plan(self, limit: float | None, oversized: Oversized = "refuse", *, is_shared: bool = True) -> list["Part"]:
        """Assigns samples to micro-batches.

        Args:
            limit: the most samples in a micro-batch, or with costs its padded cost; ``None`` for all samples.
            oversized: whether a sample that costs more than the limit is refused or runs alone.

        Raises:
            BatchError: a sample costs more than the limit, or a leaf that is split has a graph.
        """
        if is_shared and self.most is not None and (limit is None or limit > self.most):
            limit, oversized = self.most, "alone"
        if (costs := self._costs) is not None:
            packs = pack_by_cost(costs, limit, oversized) if costs else []
            return [Part(pack, len(pack) * max(costs[i] for i in pack)) for pack in packs]
        size = None if limit is None else int(limit)
        parts: list[Part] = []
        start = 0
        for index, rows in enumerate(self._rows):
            if size is not None and rows > size:
                refuse_graphs(self.nodes(index))
            for n in sizes_of(rows, size):
                parts.append(Part(range(start, start + n), n, index))
                start += n
        return parts

    def whole(self) -> Any:
        """The logical batch as one: the batch itself, the joined batches of a window, or the list of raw samples."""
        if self.collate is not None:
            return list(self._samples)
        if len(self.batches) == 1:
            return self.batches[0]
        if self.obstacle is not None:
            raise self.obstacle
        return _joined([layout.root for layout in self.layouts])

    def chosen(self, samples: Sequence[int], batch: int = 0) -> "Splittable":
        """A logical batch of copies of some of the samples, with the same layout."""
        found = copy.copy(self)
        found.most, found._costs = None, None
        found.rows, found._rows, found.largest = len(samples), [len(samples)], float(len(samples))
        if self.collate is not None:
            found._samples = [self._samples[i] for i in samples]
            found.batches = [found._samples]
            return found
        layout = self.layouts[batch]
        root = _chosen(layout.root, list(samples))
        found.layouts, found.obstacle = [Layout(len(samples), root, layout.devices)], None
        found.batches = list(split(found.layouts[0], [len(samples)]))
        return found

    def keep_whole(self, obstacle: BatchError) -> None:
        """Has each batch run whole, as one that can't be cut; raw samples stay as they are."""
        if self.collate is None:
            self.layouts = [
                replace(one, rows=1, root=Constant(batch, "batch"), obstacle=obstacle, at_most=rows, is_counted=True)
                if one.obstacle is None and (rows := one.rows) else one
                for one, batch in zip(self.layouts, self.batches, strict=True)
            ]  # fmt: skip
            self._rows = [one.rows for one in self.layouts]
            self.rows, self.largest, self.obstacle = sum(self._rows), 1.0, obstacle

    def collated_from_copies(self) -> "Splittable":
        """The same logical batch, of whose raw samples ``collate`` gets copies, which it may write to.

        It gets the samples themselves where it fails with copies, as it does if it knows them by their identity.
        """
        found, collate = copy.copy(self), self.collate
        if collate is None:
            return found

        def from_copies(samples: list[Any]) -> Any:
            with contextlib.suppress(Exception):
                return collate([writable(one) for one in samples])
            return collate(samples)

        found.collate = from_copies
        return found

    def joined(self, batches: Sequence[Any]) -> Any:
        """Joins other batches of this layout into one."""
        options = {"broadcast": self.broadcast, "collate": self.collate}
        return Splittable(batches, **options, may_be_empty=True).whole()  # type: ignore[arg-type]

    def rows_in(self, parts: Sequence["Part"]) -> list[int | None]:
        """The number of samples in each micro-batch, ``None`` where it is not known."""
        if self.obstacle is None:
            return [*map(len, map(attrgetter("samples"), parts))]
        whole = {i: layout.samples for i, layout in enumerate(self.layouts) if layout.obstacle is not None}
        return [whole.get(part.batch, len(part.samples)) for part in parts]

    def materialise(self, parts: Sequence["Part"]) -> Iterator[Any]:
        """Yields the micro-batches of ``plan``, one at a time."""
        if self.collate is not None:
            own = partial(writable, arrays_only=True) if self.are_arrays_copied else own_containers
            found: Iterator[Any] = (self.collated(part, own) for part in parts)
        elif len(self.layouts) == 1 and self.layouts[0].obstacle is None:  # the usual case, without a chain
            found = iter(_cut(self.layouts[0].root, [*map(len, map(attrgetter("samples"), parts))]))
        else:
            found = itertools.chain.from_iterable(map(partial(self._cut_one, parts), range(len(self.layouts))))
        if self.are_arrays_copied and not self.is_copied:
            return (writable(one, arrays_only=True) for one in found)
        return map(writable, found) if self.is_copied else found

    def samples_of(self, part: "Part") -> Iterator[Any]:
        """The raw samples of a micro-batch."""
        return (self._samples[i] for i in part.samples)

    def sample(self, index: int) -> Any:
        """A raw sample."""
        return self._samples[index]

    def collated(self, part: "Part", own: Callable[[Any], Any] = own_containers) -> Any:
        """A micro-batch of raw samples; ``own`` gives each its copy, which ``collate`` may change."""
        samples = [own(sample) for sample in self.samples_of(part)]
        return samples if self.collate is None else self.collate(samples)

    def _cut_one(self, parts: Sequence["Part"], index: int) -> Iterator[Any]:
        layout = self.layouts[index]
        sizes = [len(part.samples) for part in parts if part.batch == index]
        return split(layout, sizes) if layout.obstacle is None else map(own_containers, [self.batches[index]])

    def outline(self) -> BatchLayout:
        """The layout of the samples, for people."""
        if self.collate is not None:
            return BatchLayout(self.rows, (), 1, "raw samples, which collate= joins")
        obstacle, found = self.obstacle, list[LeafLayout]()
        _outline(self.layouts[0].root, 0, found)
        if obstacle is None:
            return BatchLayout(self.rows, tuple(found), len(self.layouts))
        return BatchLayout(None, tuple(found), len(self.layouts), str(obstacle))

    def writes(self) -> Writes:
        """Detects in-place writes of a loss or a ``collate`` into the tensors of the batch."""
        if self.collate is not None:
            return Writes(self._samples)
        return Writes(map(attrgetter("value"), self.nodes()))

    def nodes(self, batch: int | None = None) -> list[Rows | Constant]:
        """All leaves of the batches, or of one batch; none for raw samples."""
        found: list[Rows | Constant] = []
        waiting = [*map(attrgetter("root"), self.layouts if batch is None else self.layouts[batch : batch + 1])][::-1]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Branch):
                waiting += node.children[::-1]
            else:
                found.append(node)
        return found


def _outline(node: Node, dim: int, into: list[LeafLayout]) -> None:
    if not isinstance(node, Branch):
        into.append(_outline_of_leaf(node, dim))
        return
    for child in node.children:
        if type(child) is Rows and type(child.value) is torch.Tensor and not (node.dim or child.value.is_nested):
            into.append(LeafLayout(child.label, 0, "Tensor", tuple(child.value.shape)))  # the usual case
        else:
            _outline(child, node.dim or 0, into)


def _outline_of_leaf(node: Rows | Constant, dim: int) -> LeafLayout:
    value = node.value
    if type(value) is torch.Tensor and not value.is_nested:
        shape: tuple[int, ...] = tuple(value.movedim(0, dim).shape if dim else value.shape)
        return LeafLayout(node.label, dim if isinstance(node, Rows) else None, "Tensor", shape)
    rows = rows_of(value)
    rows = len(value) if isinstance(node, Rows) and rows is None else rows
    shape = () if isinstance(value, torch.Tensor) else tuple(getattr(value, "shape", ()))  # a nested one has none
    whole = () if rows is None else (rows,)
    return LeafLayout(node.label, 0 if isinstance(node, Rows) else None, type(value).__name__, shape or whole)


def _joined(nodes: Sequence[Node]) -> Any:
    first = nodes[0]
    if isinstance(first, Constant):
        return first.value
    if isinstance(first, Branch):
        children = zip(*[node.children for node in nodes if isinstance(node, Branch)], strict=True)
        return first.container.rebuild([_joined(same) for same in children])
    values = [node.value for node in nodes if isinstance(node, Rows)]
    if all(isinstance(value, (list, tuple)) for value in values):
        return type(values[0])(item for value in values for item in value)
    shapes = {tuple(value.shape[1:]) if isinstance(value, torch.Tensor) else None for value in values}
    if None in shapes or len(shapes) > 1:
        raise BatchError(
            f"{first.label} can't be joined over the batches of a window: {sorted(map(str, shapes))}; expected "
            "tensors whose rows all have the same shape. Return what the loss needs of it from encode, and leave "
            "the batch argument out",
            path=first.label,
        )
    return torch.cat(values)


def _chosen(node: Node, samples: list[int]) -> Node:
    if isinstance(node, Constant):
        return node
    if isinstance(node, Branch):
        return Branch(node.container, [_chosen(child, samples) for child in node.children])
    return Rows(_chosen_of(node.value, [samples], node.label)[0], node.label)


def _may_vary(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_nested
    if rows_of(value) is not None:
        return isinstance(value, PackedSequence)
    return not all(isinstance(item, PLAIN) for item in value)


@dataclass(slots=True, eq=False)
class Part:
    """The samples of a micro-batch."""

    samples: Sequence[int]  # their positions in the logical batch
    cost: float  # the number of samples, or with costs that number times the largest cost of a sample
    batch: int = 0  # the index of their batch in the window


def pack_by_cost(costs: Sequence[float], limit: float | None, oversized: Oversized = "refuse") -> list[list[int]]:
    """Packs samples so that each pack, padded to its longest sample, stays within a limit.

    Samples are sorted by cost first, so that samples of similar length are padded together.

    Args:
        limit: the most ``len(pack) * max(cost in pack)``; ``None`` for one pack.

    Example:
        >>> pack_by_cost([3, 10, 4, 9], limit=20)
        [[1, 3], [0, 2]]
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    if limit is None:
        return [sorted(order)]
    if costs[order[0]] > limit and oversized == "refuse":
        worst = order[0]
        raise BatchError(
            f"batch[{worst}] costs {costs[worst]:g}, the limit of a micro-batch is {limit:g}; raise micro_batch_size "
            f"to at least {costs[worst]:g}, or truncate or drop the sample",
            path=f"batch[{worst}]",
        )
    packs = []
    while order:
        room = max(1, int(limit // costs[order[0]]))
        packs.append(sorted(order[:room]))
        order = order[room:]
    return packs


def _raw(batch: Any, may_be_empty: bool) -> list[Any]:
    if not isinstance(batch, (list, tuple)):
        raise BatchError(
            f"with collate= the batch is a list of raw samples, got a {type(batch).__name__}; give the DataLoader "
            "collate_fn=lambda samples: samples"
        )
    if not batch and not may_be_empty:
        raise BatchError("the batch has no rows; expected at least one sample. Leave empty batches out of the loader")
    return list(batch)


def _checked_cost(cost: Callable[[Any], float], sample: Any, index: int) -> float:
    value = cost(sample)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise BatchError(
            f"cost(batch[{index}]) is {value!r:.80}; expected a positive finite number", path=f"batch[{index}]"
        )
    return value
