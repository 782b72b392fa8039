"""Batches cut along time, and the states that are carried from one chunk to the next."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import BatchError, CountError
from anybatch.gradient.weights import FORWARD, Count, fetched
from anybatch.tensors.counting import count_samples
from anybatch.tensors.trees import leaves, map_leaves


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

    def chunk(self, start: int, stop: int) -> Any:
        """The batch between two steps; tensors are views.

        Args:
            start: the first step.
            stop: the one after the last.
        """

        def cut(leaf: Any) -> Any:
            if id(leaf) not in self._sequences:
                return leaf
            if isinstance(leaf, PackedSequence):
                data = leaf.data[self._offsets[start] : self._offsets[stop]]
                return PackedSequence(data, leaf.batch_sizes[start:stop])
            return leaf.narrow(self._dim, start, stop - start)

        return map_leaves(cut, self._batch)

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
        is_split: whether it is one of several micro-batches.
    """

    def __init__(
        self, steps: Steps, bounds: Sequence[tuple[int, int]], count: Count, batch: Any, *, is_split: bool
    ) -> None:
        self._is_split = is_split
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
            if self._is_split and steps.is_packed:
                raise CountError(
                    "a plain loss over packed sequences is the mean over their steps, of which micro-batches have "
                    "unlike numbers; expected anybatch.Mean(total, number of steps), or count= with a function that "
                    "counts the steps"
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


def flat(state: Any) -> list[Any]:
    """The leaves of a state, in order.

    Args:
        state: any nested container.
    """
    return [leaf for _, _, leaf in leaves(state)]


def like(state: Any, values: Sequence[Any]) -> Any:
    """The same container around other leaves.

    Args:
        state: gives the container.
        values: in the order of ``flat``.
    """
    iterator: Iterator[Any] = iter(values)
    return map_leaves(lambda _: next(iterator), state)


def detached(state: Any) -> Any:
    """A state without its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, state)


def row_dim(tensor: Any, rows: int) -> int | None:
    """The dimension of a state that the sequences of a batch lie along.

    It is the one of that size; of several the second of three, as torch's recurrent layers have it, else the first.

    Args:
        tensor: a leaf of a state.
        rows: how many sequences there are.

    Returns:
        The dimension, ``None`` if no dimension has that size.

    Example:
        >>> row_dim(torch.zeros(2, 5, 8), 5), row_dim(torch.zeros(5, 5), 5), row_dim(torch.zeros(3), 5)
        (1, 0, None)
    """
    if not isinstance(tensor, torch.Tensor):
        return None
    fitting = [dim for dim, size in enumerate(tensor.shape) if size == rows]
    if not fitting:
        return None
    return 1 if tensor.dim() == 3 and 1 in fitting else fitting[0]


def narrowed(state: Any, rows: int, start: int, stop: int) -> Any:
    """Some rows of a state; what has no rows stays.

    Args:
        state: of ``rows`` sequences.
        rows: how many they are.
        start: the first row.
        stop: the one after the last.
    """
    if (start, stop) == (0, rows):
        return state

    def cut(leaf: Any) -> Any:
        dim = row_dim(leaf, rows)
        return leaf if dim is None else leaf.narrow(dim, start, stop - start)

    return map_leaves(cut, state)


def reordered(state: Any, order: torch.Tensor | None) -> Any:
    """A state with its rows in another order.

    Args:
        state: of as many sequences as ``order`` has.
        order: positions; ``None`` to leave it.
    """
    if order is None:
        return state

    def chosen(leaf: Any) -> Any:
        dim = row_dim(leaf, len(order))
        return leaf if dim is None else leaf.index_select(dim, order.to(leaf.device))

    return map_leaves(chosen, state)


def joined(states: Sequence[tuple[int, Any]]) -> Any:
    """One state of the rows of several.

    Args:
        states: each with how many rows it has; at least one.
    """
    if len(states) == 1:
        return states[0][1]
    columns = zip(*[flat(state) for _, state in states], strict=True)
    values = []
    for column in columns:
        dims = [row_dim(leaf, rows) for leaf, (rows, _) in zip(column, states, strict=True)]
        values.append(column[0] if dims[0] is None else torch.cat(column, dims[0]))
    return like(states[0][1], values)
