"""What sparse gradients hold: it depends on the indices of the whole batch, and never on more rows than a table has."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from anybatch.gradient.pieces import InPieces
from anybatch.planning.fitting import Fit, Size
from anybatch.planning.subjects import Subject
from anybatch.tensors.precision import LOW_PRECISION, needs_float32
from anybatch.tensors.sparsesums import INDEX_BYTES, MOVES

_NUMBERS = 5  # a new entry in integers, while it is added: which row, whether that is new, where it goes
_MOVED = 4  # the same for a row that makes room


@dataclass(frozen=True)
class Entries:
    """The sparse gradient of the whole batch for one table.

    Args:
        position: of the parameter.
        rows: of the table.
        count: of the entries at most, each row as often as it is named unless ``is_summed``.
        is_summed: whether each row is there once.
    """

    position: int
    rows: int
    count: int
    is_summed: bool

    @property
    def distinct(self) -> int:
        """How many rows are named at most."""
        return min(self.rows, self.count)


class SparseGradients:
    """The sparse gradients of a step, as a function of its micro-batches.

    Args:
        subject: what is planned.
        fit: the traces, which tell the entries of a micro-batch.
        positions: of all parameters that may get a sparse gradient; those that no trace has reached count in whole.
        is_fake: whether fake tensors were traced, so that the entries follow from the shapes.
    """

    def __init__(self, subject: Subject, fit: Fit, positions: Iterable[int], *, is_fake: bool) -> None:
        self.positions = tuple(sorted(positions))
        self._fit = fit
        self._subject = subject
        self._tables = [subject.parameters[position] for position in self.positions]
        self._samples = subject.splittable.rows
        self._in_pieces = isinstance(subject.loss_fn, InPieces) and not subject.loss_fn.comes_in_one
        # What is known of the first micro-batch tells how much room a sum is to have, unless the next ones differ.
        splittable = subject.splittable
        self._differs = self._in_pieces or not is_fake or splittable.has_lists or splittable.is_collated

    def entries(self, size: Size, micro_batches: int) -> tuple[Entries, ...]:
        """The gradients of the whole batch.

        Args:
            size: of a micro-batch.
            micro_batches: how many one device runs.
        """
        is_summed = self._in_pieces or micro_batches * self._subject.lanes > 1
        found = []
        for position, table in zip(self.positions, self._tables, strict=True):
            count = self._of_one(position, size)
            if self._in_pieces or count is None:
                count = len(table)
            elif is_summed:
                count = math.ceil(count * max(1.0, self._samples / max(1, size.samples)))
            count = min(count, len(table)) if is_summed else count
            found.append(Entries(position, len(table), count, is_summed))
        return tuple(found)

    def _of_one(self, position: int, size: Size) -> int | None:
        return self._fit.entries(size).get(position)

    def summed_bytes(self, size: Size, micro_batches: int) -> int:
        """The bytes beside what a trace holds while micro-batches run: none for a single one that reached all tables.

        Args:
            size: of a micro-batch.
            micro_batches: how many one device runs.
        """
        return sum(
            one.count * self._row_bytes(index, micro_batches)
            for index, one in enumerate(self.entries(size, micro_batches))
            if one.is_summed or self._of_one(one.position, size) is None
        )

    def adding_bytes(self, size: Size, micro_batches: int) -> int:
        """The bytes that it takes to add the gradient of a micro-batch to its sum, on top of both; see ``SparseSums``.

        Args:
            size: of a micro-batch.
            micro_batches: how many one device runs.
        """
        return max(
            (
                self._adding_one(index, one, size, micro_batches)
                for index, one in enumerate(self.entries(size, micro_batches))
                if one.is_summed
            ),
            default=0,
        )

    def _adding_one(self, index: int, summed: Entries, size: Size, micro_batches: int) -> int:
        known = self._of_one(summed.position, size)
        new = summed.count if known is None else known
        row = self._row_bytes(index, micro_batches)
        moved = min(summed.count, max(new, -(-summed.count // MOVES)))
        found = new * _NUMBERS * INDEX_BYTES + moved * (row + _MOVED * INDEX_BYTES)
        if self._in_float32(index, micro_batches):
            found += new * row
        if self._subject.device_type == "cuda":  # coalesced first, which sorts
            found += new * (row + _NUMBERS * INDEX_BYTES)
        return found + (summed.count * row if self._differs else 0)

    def _in_float32(self, index: int, micro_batches: int) -> bool:
        subject = self._subject
        addends = 2**31 if self._in_pieces else micro_batches * subject.lanes
        is_low = self._tables[index].dtype in LOW_PRECISION
        return is_low and needs_float32(subject.parameters, addends, subject.settings.policy)

    def _row_bytes(self, index: int, micro_batches: int) -> int:
        table = self._tables[index]
        width = 4 if self._in_float32(index, micro_batches) else table.element_size()
        return INDEX_BYTES + width * (table.numel() // max(1, len(table)))
