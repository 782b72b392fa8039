"""The last states of a batch, for the next one to begin with."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from anybatch.errors import BatchError
from anybatch.gradient.states import RowDims, flat, joined, narrowed


class Carried(NamedTuple):
    """The last states of a batch, for the next one to begin with.

    Args:
        rows: of the batch.
        parts: states of consecutive rows, each with the first row and the one after the last.
    """

    rows: int
    parts: tuple[tuple[int, int, Any], ...] = ()

    def knows(self, start: int, stop: int, rows: int) -> bool:
        """Whether there is a state for some rows; there is none while a first batch goes through.

        Args:
            start: the first.
            stop: the one after the last.
            rows: of the batch that goes on.

        Raises:
            BatchError: the batch has another number of rows.
        """
        if rows != self.rows:
            raise BatchError(
                f"the batch has {rows} sequences, the state that is carried to it {self.rows}; expected the same "
                "streams in every batch. Call reset() where other streams begin, and leave out a last smaller batch "
                "(drop_last=True)"
            )
        return any(first < stop and start < end for first, end, _ in self.parts)

    def of(self, start: int, stop: int, dims: RowDims) -> Any:
        """The state of some rows that are known.

        Args:
            start: the first.
            stop: the one after the last.
            dims: knows where the rows are.

        Raises:
            BatchError: the states of the rows don't make one.
        """
        found, where, count = [], [], 0
        for first, end, state in self.parts:
            low, high = max(first, start), min(end, stop)
            if low >= high:
                continue
            count += high - low
            part = state
            if (low, high) != (first, end):
                where = dims.of(state, end - first)
                part = narrowed(state, where, low - first, high - first)
            found.append((high - low, part))
        if count != stop - start:
            raise BatchError(f"a state is carried for {count} of the rows {start} to {stop - 1}; expected all of them")
        if len(found) > 1:
            rows, largest = max(found, key=lambda part: part[0])
            where = where or dims.of(largest, rows)
            _check_rest([state for _, state in found], where)
        return joined([state for _, state in found], where)

    def replaced(self, start: int, stop: int, state: Any, dims: RowDims) -> "Carried":
        """The same with another state of some rows.

        Args:
            start: the first.
            stop: the one after the last.
            state: without a graph.
            dims: knows where the rows are.
        """
        kept = [(start, stop, state)]
        for first, end, other in self.parts:
            for low, high in ((first, min(end, start)), (max(first, stop), end)):
                if low < high:
                    part = other
                    if (low, high) != (first, end):
                        part = narrowed(other, dims.of(other, end - first), low - first, high - first)
                    kept.append((low, high, part))
        return Carried(self.rows, tuple(sorted(kept, key=lambda part: part[0])))

    def state_dict(self) -> dict[str, Any]:
        """Plain containers around the states."""
        return {"rows": self.rows, "parts": [list(part) for part in self.parts]}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> "Carried":
        """Makes what ``state_dict`` was taken of."""
        return Carried(state["rows"], tuple((start, stop, value) for start, stop, value in state["parts"]))


def _check_rest(states: list[Any], dims: list[int | None]) -> None:
    """What has no rows has to be the same in the states that are joined."""
    for dim, column in zip(dims, zip(*[flat(state) for state in states], strict=True), strict=True):
        if dim is not None:
            continue
        first = column[0]
        same = [
            torch.equal(first, other) if isinstance(first, torch.Tensor) else bool(first == other)
            for other in column[1:]
        ]
        if not all(same):
            raise BatchError(
                "the carried states of two micro-batches differ in what has no rows, and the next batch is split in "
                "another way; expected one row a sequence, or the same value for all sequences"
            )
