"""Batches cut along time, and the share of their items that each chunk has."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.counting import count_samples
from anybatch.batch.trees import leaves, map_leaves
from anybatch.errors import BatchError, CountError
from anybatch.loss.weights import FORWARD, Count, counted, fetched


class Steps:
    """A batch of sequences that can be cut along time.

    Args:
        broadcast: dotted paths of leaves that are no sequences and go to every chunk as they are.
    """

    def __init__(self, batch: Any, dim: int, broadcast: Sequence[str] = ()) -> None:
        self._batch = batch
        self._dim = dim
        self._sequences: set[int] = set()
        self._sizes: list[int] | None = None
        # where the rows of packed sequences come from; ``None`` if they are in their own order
        self.order: torch.Tensor | None = None
        self._first: tuple[str, int] | None = None  # the leaf that says how many steps there are
        unknown = set(broadcast)
        for label, path, leaf in leaves(batch, "batch"):
            prefixes = {".".join(path[:n]) for n in range(1, len(path) + 1)}
            if prefixes.isdisjoint(broadcast):
                self._look_at(label, leaf)
            unknown -= prefixes
        if unknown:
            raise BatchError(f"OverTime(broadcast=...) names {sorted(unknown)[0]!r}, which is not in the batch")
        if self._first is None:
            raise BatchError(
                f"the batch has no tensor with a dimension {dim} of time; expected tensors of shape [rows, time, ...] "
                "or PackedSequences"
            )
        label = self._first[0]
        self.total: int = self._first[1]
        if not self.total:
            raise BatchError(f"{label} has no steps along dimension {dim}; expected at least one")

    def _look_at(self, label: str, leaf: Any) -> None:
        if isinstance(leaf, PackedSequence):
            sizes = leaf.batch_sizes.tolist()
            if self._sizes not in (None, sizes) or (self._first is not None and self._sizes is None):
                raise BatchError(
                    f"{label} is packed with other lengths than the sequences before it; expected the same lengths for "
                    "all",
                    path=label,
                )
            self._sizes, self.order = sizes, leaf.sorted_indices
            self._note(label, leaf, len(sizes))
        elif isinstance(leaf, torch.Tensor) and leaf.dim() > self._dim:
            self._note(label, leaf, leaf.shape[self._dim])
            if self._sizes is not None:
                raise BatchError(
                    f"{label} is a tensor of shape {tuple(leaf.shape)} beside PackedSequences; expected that it is "
                    "packed, too, or that OverTime(broadcast=...) names it",
                    path=label,
                )

    def _note(self, label: str, leaf: Any, steps: int) -> None:
        other, total = self._first = self._first or (label, steps)
        if total != steps:
            raise BatchError(
                f"{label} has {steps} steps along dimension {self._dim}, {other} has {total}; expected the same for "
                "all sequences. Name what is no sequence in OverTime(broadcast=...)",
                path=label,
            )
        self._sequences.add(id(leaf))

    @property
    def is_packed(self) -> bool:
        """Whether sequences end at different steps."""
        return self._sizes is not None

    def rows_at(self, step: int) -> int | None:
        """How many sequences reach a step; ``None`` if all do."""
        if self._sizes is None:
            return None
        return self._sizes[step] if step < self.total else 0

    def cut(self, length: int) -> "Chunks":
        """Cuts the batch along time."""
        bounds = [(start, min(start + length, self.total)) for start in range(0, self.total, length)]
        offsets = [0, *itertools.accumulate(self._sizes or [1] * self.total)]
        items = [offsets[stop] - offsets[start] for start, stop in bounds]
        columns: dict[int, Sequence[Any]] = {}
        for _, _, leaf in leaves(self._batch):
            if isinstance(leaf, PackedSequence) and id(leaf) in self._sequences:
                pairs = zip(_split(leaf.data, 0, items), bounds, strict=True)
                columns[id(leaf)] = [PackedSequence(data, leaf.batch_sizes[a:b]) for data, (a, b) in pairs]
            elif id(leaf) in self._sequences:
                columns[id(leaf)] = _split(leaf, self._dim, [stop - start for start, stop in bounds])
        batches = [self._chunk(columns, index) for index in range(len(bounds))]
        return Chunks(bounds, batches, items, self._batch, self.is_packed)

    def _chunk(self, columns: Mapping[int, Sequence[Any]], index: int) -> Any:
        return map_leaves(lambda leaf: columns[id(leaf)][index] if id(leaf) in columns else leaf, self._batch)


def _split(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Views of consecutive parts; their gradients are joined once where there is a graph."""
    if tensor.requires_grad:
        return torch.split(tensor, list(sizes), dim)
    starts = itertools.accumulate(sizes, initial=0)
    return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


@dataclass
class Chunks:
    """A batch cut along time."""

    bounds: Sequence[tuple[int, int]]  # the first step of each chunk and the one after its last
    batches: Sequence[Any]  # the chunks
    items: Sequence[int]  # how many steps of sequences each has
    whole: Any  # the batch
    is_packed: bool  # whether sequences end at different steps
    _shares: dict[Any, list[float]] = field(default_factory=dict)

    def share(self, index: int, count: Count, *, is_weighed: bool) -> Callable[[str], float]:
        """Which share of the batch's items a chunk has, by the name of a loss that is a plain mean over them."""

        def share(name: str) -> float:
            counts: Any = count
            if isinstance(count, Mapping):
                if name not in count:
                    raise CountError(f"count has no entry for the loss {name!r}; it has {sorted(count)}")
                counts = count[name]
            if counts not in self._shares:
                self._shares[counts] = self._counted(counts, is_weighed)
            return self._shares[counts][index]

        return share

    def _counted(self, count: Any, is_weighed: bool) -> list[float]:
        if count is count_samples or count == FORWARD:
            if is_weighed and self.is_packed:
                raise CountError(
                    "a plain loss over packed sequences is the mean over their steps, of which micro-batches and the "
                    "batches of a window have different numbers; expected anybatch.Mean(total, number of steps), or "
                    "count= with a function that counts the steps"
                )
            return [items / sum(self.items) for items in self.items]
        *parts, total = fetched([counted(count, batch) for batch in (*self.batches, self.whole)])
        if abs(sum(parts) - total) > 1e-6 * max(1.0, abs(total)):
            raise CountError(
                f"count of the whole sequences is {total:g}, of their chunks together {sum(parts):g}; expected a count "
                "that adds up over time. Labels that are shifted within the loss do not: shift them in the batch "
                "(x = tokens[:, :-1], y = tokens[:, 1:]) and count without shift"
            )
        return [part / total if total else 0.0 for part in parts]
