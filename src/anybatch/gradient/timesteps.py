"""Batches cut along time, and the share of their items that each chunk has."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import BatchError, CountError
from anybatch.gradient.weights import FORWARD, Count, fetched
from anybatch.tensors.counting import count_samples
from anybatch.tensors.trees import leaves, map_leaves

StandIn = Callable[[Any, torch.Tensor], torch.Tensor]


class Steps:
    """A batch of sequences that can be cut along time.

    Args:
        batch: any nested container of tensors of shape ``[rows, ..., time, ...]`` or of ``PackedSequence`` s.
        dim: the dimension of time.
        broadcast: dotted paths of leaves that are no sequences and go to every chunk as they are.

    Attributes:
        total: how many steps there are.

    Raises:
        BatchError: leaves disagree on the number of steps, or there are none.
    """

    def __init__(self, batch: Any, dim: int, broadcast: Sequence[str] = ()) -> None:
        self._batch = batch
        self._dim = dim
        self._sequences: set[int] = set()
        self._sizes: list[int] | None = None
        self._offsets: list[int] = []
        self._order: torch.Tensor | None = None
        self._labels: dict[str, int] = {}
        unknown = set(broadcast)
        for label, path, leaf in leaves(batch, "batch"):
            if any(".".join(path[:n]) in broadcast for n in range(1, len(path) + 1)):
                unknown -= {".".join(path[:n]) for n in range(1, len(path) + 1)}
                continue
            self._look_at(label, leaf)
        if unknown:
            raise BatchError(f"OverTime(broadcast=...) names {sorted(unknown)[0]!r}, which is not in the batch")
        if not self._labels:
            raise BatchError(
                f"the batch has no tensor with a dimension {dim} of time; expected tensors of shape [rows, time, ...] "
                "or PackedSequences"
            )
        self.total = next(iter(self._labels.values()))
        if not self.total:
            raise BatchError(f"{next(iter(self._labels))} has no steps along dimension {dim}; expected at least one")

    def _look_at(self, label: str, leaf: Any) -> None:
        if isinstance(leaf, PackedSequence):
            self._look_at_packed(label, leaf)
        elif isinstance(leaf, torch.Tensor) and leaf.dim() > self._dim:
            self._note(label, leaf, leaf.shape[self._dim])
            if self._sizes is not None:
                raise BatchError(
                    f"{label} is a tensor of shape {tuple(leaf.shape)} beside PackedSequences; expected that it is "
                    "packed, too, or that OverTime(broadcast=...) names it",
                    path=label,
                )

    def _look_at_packed(self, label: str, leaf: PackedSequence) -> None:
        sizes = leaf.batch_sizes.tolist()
        if self._sizes not in (None, sizes) or (self._labels and self._sizes is None):
            raise BatchError(
                f"{label} is packed with other lengths than the sequences before it; expected the same lengths for all",
                path=label,
            )
        self._sizes = sizes
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._order = leaf.sorted_indices
        self._note(label, leaf, len(sizes))

    def _note(self, label: str, leaf: Any, steps: int) -> None:
        for other, total in self._labels.items():
            if total != steps:
                raise BatchError(
                    f"{label} has {steps} steps along dimension {self._dim}, {other} has {total}; expected the same "
                    "for all sequences. Name what is no sequence in OverTime(broadcast=...)",
                    path=label,
                )
        self._labels[label] = steps
        self._sequences.add(id(leaf))

    @property
    def is_packed(self) -> bool:
        """Whether sequences end at different steps."""
        return self._sizes is not None

    @property
    def order(self) -> torch.Tensor | None:
        """Where the rows of packed sequences come from; ``None`` if they are in their own order."""
        return self._order

    def bounds(self, length: int) -> list[tuple[int, int]]:
        """The first step and the end of each chunk.

        Args:
            length: of a chunk; the last one may be shorter.
        """
        return [(start, min(start + length, self.total)) for start in range(0, self.total, length)]

    def rows_at(self, step: int) -> int | None:
        """How many sequences reach a step; ``None`` if all do."""
        if self._sizes is None:
            return None
        return self._sizes[step] if step < self.total else 0

    def chunk(self, start: int, stop: int, stand_in: StandIn | None = None) -> Any:
        """The batch between two steps; tensors are views.

        Args:
            start: the first step.
            stop: the one after the last.
            stand_in: takes a leaf of the batch and what the chunk has of it, gives what stands for that.
        """

        def cut(leaf: Any) -> Any:
            if isinstance(leaf, PackedSequence):
                is_cut = id(leaf) in self._sequences
                data = self.part(leaf, leaf.data, start, stop)
                data = data if stand_in is None else stand_in(leaf, data)
                return PackedSequence(data, leaf.batch_sizes[start:stop]) if is_cut else PackedSequence(data, *leaf[1:])
            if not isinstance(leaf, torch.Tensor):
                return leaf
            part = self.part(leaf, leaf, start, stop)
            return part if stand_in is None else stand_in(leaf, part)

        return map_leaves(cut, self._batch)

    def part(self, leaf: Any, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """A tensor that belongs to a leaf of the batch, between two steps.

        Args:
            leaf: says whether it is cut.
            tensor: its own, or one of the same shape.
            start: the first step.
            stop: the one after the last.
        """
        if id(leaf) not in self._sequences:
            return tensor
        if isinstance(leaf, PackedSequence):
            return tensor[self._offsets[start] : self._offsets[stop]]
        return tensor.narrow(self._dim, start, stop - start)

    def items(self, start: int, stop: int) -> int:
        """How many steps of sequences there are between two steps."""
        return self._offsets[stop] - self._offsets[start] if self._sizes is not None else stop - start


class Shares:
    """Which share of a batch's items a chunk has, for losses that are plain means.

    Args:
        steps: the batch.
        bounds: of the chunks.
        count: how items are counted.
        batch: the whole.
        is_weighed: whether it may be one of several micro-batches.
    """

    def __init__(
        self, steps: Steps, bounds: Sequence[tuple[int, int]], count: Count, batch: Any, *, is_weighed: bool
    ) -> None:
        self._is_weighed = is_weighed
        self._steps = steps
        self._bounds = bounds
        self._count = count
        self._batch = batch
        self._by_name: dict[Any, list[float]] = {}

    def of(self, index: int) -> Callable[[str], float]:
        """The share of a chunk, by the name of the loss."""
        return lambda name: self._shares(name)[index]

    def _shares(self, name: str) -> list[float]:
        count: Any = self._count
        if isinstance(count, Mapping):
            if name not in count:
                raise CountError(f"count has no entry for the loss {name!r}; it has {sorted(count)}")
            count = count[name]
        if count not in self._by_name:
            self._by_name[count] = self._counted(count)
        return self._by_name[count]

    def _counted(self, count: Any) -> list[float]:
        steps = self._steps
        if count is count_samples or count == FORWARD:
            if self._is_weighed and steps.is_packed:
                raise CountError(
                    "a plain loss over packed sequences is the mean over their steps, of which micro-batches and the "
                    "batches of a window have unlike numbers; expected anybatch.Mean(total, number of steps), or "
                    "count= with a function that counts the steps"
                )
            return [steps.items(*bounds) / steps.items(0, steps.total) for bounds in self._bounds]
        chunks = (steps.chunk(*bounds) for bounds in self._bounds)
        *parts, total = fetched([*(_scalar(count(chunk)) for chunk in chunks), _scalar(count(self._batch))])
        if abs(sum(parts) - total) > 1e-6 * max(1.0, abs(total)):
            raise CountError(
                f"count of the whole sequences is {total:g}, of their chunks together {sum(parts):g}; expected a count "
                "that adds up over time. Labels that are shifted within the loss do not: shift them in the batch "
                "(x = tokens[:, :-1], y = tokens[:, 1:]) and count without shift"
            )
        return [part / total if total else 0.0 for part in parts]


def _scalar(value: Any) -> Any:
    return value.detach().reshape(()) if isinstance(value, torch.Tensor) else value
