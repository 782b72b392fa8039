"""What is checked: a model, a loss and a batch, and the splits of it."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.batches import Part, Splittable, sizes_of, split
from anybatch.batch.layout import lay_out, placement
from anybatch.batch.trees import map_leaves
from anybatch.batch.windowing import Window
from anybatch.batch.writes import own_array
from anybatch.errors import BatchError
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.loss.losses import LossFunction
from anybatch.loss.weights import Count
from anybatch.tensors.precision import AccumulatePolicy, in_precision
from anybatch.update.batchnorm import BatchNormPolicy


@dataclass(frozen=True)
class Subject:
    """A model, a loss and a batch, with the arguments that a step would have.

    Args:
        model: the first argument of ``loss_fn``.
        loss_fn: the user's.
        batch: any nested container; with ``collate`` a list of raw samples.
        count: what the loss is the mean over.
        broadcast: dotted paths of leaves that are not split.
        collate: makes a batch of raw samples.
        cost: the cost of a raw sample.
        micro_batch_size: samples in a micro-batch, or its cost; ``None`` for splits of our own.
        batch_norm: what a step would do with BatchNorm.
        rows: samples in ``batch``.
        dropout: what a step would do with dropout.
        autocast: the dtype of ``torch.autocast``.
        inputs: the only tensors that get a gradient.
        accumulate: when gradients are accumulated in float32.
    """

    model: Any
    loss_fn: LossFunction
    batch: Any
    count: Count
    broadcast: tuple[str, ...]
    collate: Callable[[list[Any]], Any] | None
    cost: Callable[[Any], float] | None
    micro_batch_size: float | None
    batch_norm: BatchNormPolicy
    rows: int
    dropout: DropoutPolicy = "native"
    autocast: torch.dtype | None = None
    inputs: tuple[torch.Tensor, ...] | None = None
    accumulate: AccumulatePolicy = "auto"

    def first(self, rows: int) -> "Subject":
        """The same with the first samples of the batch only."""
        if self.collate is not None:
            return dataclasses.replace(self, batch=self.batch[:rows], rows=rows)
        batch = next(split(lay_out(self.batch, self.broadcast), [rows, self.rows - rows]))
        return dataclasses.replace(self, batch=batch, rows=rows)

    def collated(self) -> "Subject | None":
        """The same with all raw samples in one batch, padded as a whole; ``None`` if that can't be split by itself."""
        batch = self.micro_batches(self.splittable(None).plan(None), None)[0]
        try:
            rows = lay_out(batch, self.broadcast).rows
        except BatchError:
            return None
        if rows != self.rows:
            return None
        return dataclasses.replace(self, batch=batch, collate=None, cost=None, micro_batch_size=None)

    def micro_batches(self, parts: Sequence[Part], dtype: torch.dtype | None) -> list[Any]:
        """Copies of the micro-batches of a split, that a run may write to.

        Args:
            parts: the split.
            dtype: see ``splittable``.
        """
        return list(self.splittable(dtype).materialise(parts))

    def views(self, parts: Sequence[Part]) -> list[Any]:
        """The micro-batches of a split to look at, not to write to; tensors are views."""
        splittable = Splittable([self.batch], broadcast=self.broadcast, collate=self.collate, cost=self.cost)
        return list(splittable.materialise(parts))

    def alone(self, batch: Any, samples: Sequence[int]) -> Splittable:
        """One micro-batch as a batch of its own.

        Args:
            batch: the micro-batch.
            samples: which samples of the whole batch it has.
        """
        if self.collate is None:
            return Splittable([batch], broadcast=self.broadcast)
        return Splittable([[self.batch[i] for i in samples]], collate=lambda _: batch)  # whatever collate made of them

    def splittable(self, dtype: torch.dtype | None) -> Splittable:
        """A copy of the batch that a run may write to.

        Args:
            dtype: what its floating-point leaves are converted to, ``None`` to leave them.
        """
        collate = self.collate
        if collate is None:
            return Splittable([copied(self.batch, dtype)], broadcast=self.broadcast)
        return Splittable([self.batch], collate=lambda samples: copied(collate(samples), dtype), cost=self.cost)


def subject_of(batch: Any, *, broadcast: Sequence[str], collate: Any, cost: Any, **options: Any) -> Subject:
    """Takes the arguments of a step apart.

    Args:
        batch: a batch, a window or a list of raw samples; of a window the batch with the most samples is taken.
        broadcast: see ``Subject``.
        collate: see ``Subject``.
        cost: see ``Subject``.
        **options: the other fields of ``Subject``.

    Returns:
        The subject.

    Raises:
        BatchError: the batch can't be split, or has one sample only.
    """
    if isinstance(batch, Window):
        if collate is not None:
            batch = [sample for raw in batch for sample in raw]
        else:
            batch = max(batch, key=lambda one: lay_out(one, broadcast).rows)
    splittable = Splittable([batch], broadcast=broadcast, collate=collate, cost=cost)
    rows = splittable.rows
    if splittable.obstacle is not None:
        raise splittable.obstacle
    if rows < 2:
        raise BatchError(
            f"the batch has {rows} sample, which can't be split, so there is nothing to compare; expected a batch of "
            "at least 2 samples"
        )
    return Subject(batch=batch, broadcast=placement(broadcast), collate=collate, cost=cost, rows=rows, **options)


def copied(batch: Any, dtype: torch.dtype | None) -> Any:
    """Copies the tensors of a batch.

    Args:
        batch: any nested container.
        dtype: what floating-point tensors are converted to, ``None`` to leave them.

    Returns:
        The same containers around new tensors, which are leaves of the autograd graph.

    Example:
        >>> copied({"x": torch.ones(1), "y": torch.ones(1, dtype=torch.int64)}, torch.float64)["x"].dtype
        torch.float64
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            data = copy(leaf.data)
            return PackedSequence(data, leaf.batch_sizes, leaf.sorted_indices, leaf.unsorted_indices)
        if not isinstance(leaf, torch.Tensor):
            return own_array(leaf)
        twin = in_precision(leaf.detach().clone(), dtype)
        return twin.requires_grad_(leaf.requires_grad)

    return map_leaves(copy, batch)


def splits_of(splittable: Splittable, micro_batch_size: float | None, *, by_cost: bool = False) -> list[list[Part]]:
    """Two different splits of a batch, the first as a step would make it; one if there is only one.

    The second has three parts of different sizes, so that what depends on the sizes or the number of parts shows.

    Args:
        splittable: the batch.
        micro_batch_size: of the first split; ``None`` for halves.
        by_cost: whether raw samples are packed by their cost, and ``micro_batch_size`` is one.

    Returns:
        The splits, each of at least two parts.

    Example:
        >>> batch = Splittable([torch.zeros(8, 1)])
        >>> [[part.cost for part in parts] for parts in splits_of(batch, None)]
        [[4, 4], [2, 2, 4]]
    """
    rows = splittable.rows
    if by_cost:
        limits = [splittable.largest / 2, splittable.largest / 3, splittable.largest / rows]
        found = [splittable.plan(limit, "alone") for limit in [micro_batch_size or limits[0], *limits]]
    else:
        size = rows if micro_batch_size is None else int(micro_batch_size)
        least = 2 if rows >= 6 else 1
        first, second = max(least, rows // 6), max(least, rows // 3)
        half = (rows + 1) // 2
        found = [
            parts_of_sizes(sizes)
            for sizes in (
                sizes_of(rows, size),
                sizes_of(rows, half),
                [first, second, rows - first - second],
                [first, rows - first],
            )
            if min(sizes) > 0
        ]
    different: dict[tuple[tuple[int, ...], ...], list[Part]] = {}
    for parts in found:
        if len(parts) > 1:
            different.setdefault(tuple(tuple(part.samples) for part in parts), parts)
    candidates = list(different.values())
    other = next((parts for parts in candidates[1:] if len(parts) != len(candidates[0])), None)
    return [candidates[0], *([other] if other else candidates[1:2])]


def parts_of_sizes(sizes: Sequence[int]) -> list[Part]:
    """Consecutive parts of some sizes."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Part(range(start, start + n), n) for start, n in zip(starts, sizes, strict=True)]
