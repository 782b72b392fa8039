"""What an encoder gave for each micro-batch, joined to what it would have given for all samples."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from anybatch.errors import LossError
from anybatch.tensors.trees import leaves, map_leaves

_Shape = tuple[int, ...] | None
_EXPECTED_AGAIN = (
    "expected a function of the model, the batch and the global random state of torch, numpy and Python only. Draw "
    "from these and not from a generator of its own, or let every micro-batch keep its graph: Coupled(..., "
    "keep=1_000_000). What it counts from call to call is given with the batch"
)


class _Waiting(NamedTuple):
    """Two passes that are to be compared: the sums of both, and that of absolute values."""

    position: int
    number: int
    marks: torch.Tensor
    dtype: torch.dtype


class Outputs:
    """The outputs of micro-batches.

    Args:
        samples: positions in the logical batch, for each micro-batch.
        compares: whether a second pass is compared with the first on every device; on the CPU it always is.
    """

    def __init__(self, samples: Sequence[Sequence[int]], *, compares: bool = True) -> None:
        self._samples = samples
        self._compares = compares
        self.total = sum(len(part) for part in samples)
        self._first: Any = None
        self._labels: list[str] = []
        self._columns: list[list[Any]] = []
        self._needs: list[bool] = []
        self._twins: list[int] = []
        self._shapes: list[list[_Shape]] = []
        self._marks: dict[int, list[torch.Tensor | None]] = {}
        self._to_compare: list[_Waiting] = []
        self._order = [sample for part in samples for sample in part]
        self._is_in_order = self._order == list(range(self.total))

    def add(self, outputs: Any, *, is_encoded_again: bool = False) -> list[torch.Tensor | None]:
        """Takes the outputs of the next micro-batch, without their graph.

        Args:
            outputs: of ``encode``.
            is_encoded_again: whether they are made a second time later.

        Returns:
            Its tensors by position, with their graph; ``None`` for anything else.

        Raises:
            LossError: they have not one row a sample, or are not like those before.
        """
        number = len(self._shapes)
        named = [(label, leaf) for label, _, leaf in leaves(outputs, "outputs")]
        found = [leaf for _, leaf in named]
        if number == 0:
            self._begin(outputs, [label for label, _ in named], found)
        elif [label for label, _ in named] != self._labels:
            raise _of_another_structure([label for label, _ in named], self._labels, number)
        rows = len(self._samples[number])
        for position, leaf in enumerate(found):
            _check_rows(self._labels[position], leaf, rows)
            self._columns[position].append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
            self._needs[position] |= isinstance(leaf, torch.Tensor) and leaf.requires_grad
        self._twins = _twins(self._twins, found)
        self._shapes.append([_shape(leaf) for leaf in found])
        if is_encoded_again:
            self._marks[number] = [self._mark(leaf) for leaf in found]
        return _tensors(found)

    def _begin(self, outputs: Any, labels: list[str], found: list[Any]) -> None:
        if not any(isinstance(leaf, torch.Tensor) for leaf in found):
            raise LossError("encode gave no tensor; expected at least one, with one row a sample")
        self._first = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs)
        self._labels = labels
        self._columns = [[] for _ in found]
        self._needs = [False] * len(found)
        self._twins = [0] * len(found)

    def same(self, outputs: Any, number: int) -> list[torch.Tensor | None]:
        """The outputs of a micro-batch that was encoded again.

        Args:
            outputs: of ``encode``.
            number: of the micro-batch.

        Returns:
            Its tensors by position, with their graph; ``None`` for anything else.

        Raises:
            LossError: they are not those of the first pass.
        """
        found = [leaf for _, _, leaf in leaves(outputs)]
        shapes = [_shape(leaf) for leaf in found]
        if shapes != self._shapes[number]:
            raise LossError(
                f"encode gave outputs of shapes {shapes} for micro-batch {number + 1} when it ran again, and of "
                f"{self._shapes[number]} the first time; {_EXPECTED_AGAIN}"
            )
        for position, leaf in enumerate(found):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not self._needs[position]:
                raise LossError(
                    f"{self._labels[position]} needs a gradient in micro-batch {number + 1} and in none of those that "
                    "kept their graph; expected outputs that need one in every micro-batch or in none",
                    name=self._labels[position],
                )
        if self._twins != _twins(self._twins, found):
            raise LossError(
                f"encode gave a tensor twice for micro-batch {number + 1} the first time, and two tensors when it ran "
                f"again; {_EXPECTED_AGAIN}"
            )
        self._compare(found, number)
        return _tensors(found)

    def _mark(self, leaf: Any) -> torch.Tensor | None:
        """The sum of a tensor, by which other values are told from the same ones."""
        if type(leaf) is not torch.Tensor or leaf.is_meta or not leaf.is_floating_point():  # a fake one has none
            return None
        if leaf.layout is not torch.strided or not (self._compares or leaf.device.type == "cpu"):
            return None
        return leaf.detach().sum(dtype=torch.promote_types(leaf.dtype, torch.float32))

    def _compare(self, found: Sequence[Any], number: int) -> None:
        for position, (leaf, before) in enumerate(zip(found, self._marks.pop(number), strict=True)):
            after = None if before is None else self._mark(leaf)
            if before is None or after is None or (after.device.type == "cpu" and before.item() == after.item()):
                continue
            # Kernels may differ with a graph and without one: what counts is how much, beside the size of the values.
            size = torch.linalg.vector_norm(leaf.detach(), 1, dtype=after.dtype)
            waiting = _Waiting(position, number, torch.stack([before, after, size]).double(), leaf.dtype)
            if after.device.type == "cpu":
                self._check(waiting, waiting.marks)
            else:
                self._to_compare.append(waiting)

    def compare(self) -> None:
        """Compares what was left to the end, since it waits for the device.

        Raises:
            LossError: a second pass gave other values than the first.
        """
        waiting, self._to_compare = self._to_compare, []
        if waiting:
            fetched = torch.stack([each.marks for each in waiting]).cpu()
            for each, marks in zip(waiting, fetched, strict=True):
                self._check(each, marks)

    def _check(self, waiting: "_Waiting", marks: torch.Tensor) -> None:
        before, after, size = marks.tolist()
        if not abs(after - before) > math.sqrt(torch.finfo(waiting.dtype).eps) * size:  # NaN is the same as NaN
            return
        label = self._labels[waiting.position]
        raise LossError(
            f"{label} of micro-batch {waiting.number + 1} has other values when encode runs again: they sum to "
            f"{after:.6g}, the first time to {before:.6g}; {_EXPECTED_AGAIN}",
            name=label,
        )

    def joined(self, *, differentiate: bool) -> tuple[Any, list[torch.Tensor | None]]:
        """The outputs of all samples, in the order of the batch; what was taken is let go of.

        Args:
            differentiate: whether they are to get a gradient.

        Returns:
            The outputs, and the leaves among them that get a gradient, by position.

        Raises:
            LossError: the micro-batches' outputs can't be joined.
        """
        values: list[Any] = []
        gets: list[torch.Tensor | None] = []
        for position, column in enumerate(self._columns):
            twin, wanted = self._twins[position], None
            if twin != position:  # an output that is there twice stays one
                value = values[twin]
            else:
                value = self._column(self._labels[position], column)
                if differentiate and self._needs[position]:
                    wanted = value.requires_grad_()
            values.append(value)
            gets.append(wanted)
            column.clear()
        if not values:  # no samples
            return None, gets
        iterator = iter(values)
        first, self._first = self._first, None
        return map_leaves(lambda _: next(iterator), first), gets

    def _column(self, label: str, column: list[Any]) -> Any:
        if not isinstance(column[0], torch.Tensor):
            if not all(_is_equal(value, column[0]) for value in column):
                raise LossError(
                    f"{label} is {column[0]!r:.40} for one micro-batch and another for the next; expected tensors with "
                    "one row a sample, or the same value each time. What is no tensor is in the batch, which the loss "
                    "may take: loss(model, outputs, batch)",
                    name=label,
                )
            return column[0]
        if len({tuple(leaf.shape[1:]) for leaf in column}) > 1:
            shapes = ", ".join(sorted({str(tuple(leaf.shape)) for leaf in column}))
            raise LossError(
                f"{label} has the shapes {shapes} in different micro-batches; expected rows of one shape, so that they "
                "can be joined: pool or pad them in encode",
                name=label,
            )
        value = torch.cat(column) if len(column) > 1 else column[0].detach()
        if self._is_in_order:
            return value
        return value[_on(value.device, torch.tensor(self._order, device="cpu").argsort())]

    def rows(self, gradients: Sequence[torch.Tensor | None], number: int) -> list[torch.Tensor | None]:
        """The gradients of one micro-batch's outputs.

        Args:
            gradients: of all samples' outputs, by position.
            number: of the micro-batch.
        """
        part = self._samples[number]
        if self._is_in_order:
            return [None if g is None else g.narrow(0, part[0], len(part)) for g in gradients]
        return [None if g is None else g[_on(g.device, torch.tensor(list(part), device="cpu"))] for g in gradients]


def _tensors(found: Sequence[Any]) -> list[torch.Tensor | None]:
    return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in found]


def _shape(leaf: Any) -> _Shape:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None


def _twins(before: Sequence[int], found: Sequence[Any]) -> list[int]:
    """For each position the first one that has had the same tensor in every micro-batch."""
    first: dict[tuple[int, int], int] = {}
    keys = [(before[p], id(leaf) if isinstance(leaf, torch.Tensor) else -p) for p, leaf in enumerate(found)]
    return [first.setdefault(key, position) for position, key in enumerate(keys)]


def _on(device: torch.device, positions: torch.Tensor) -> torch.Tensor:
    return positions.to(device, non_blocking=True)  # made on the device they would be waited for


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays, or anything else without one truth value
        return False


def _of_another_structure(labels: Sequence[str], expected: Sequence[str], number: int) -> LossError:
    odd = [label for label in [*labels, *expected] if (label in labels) != (label in expected)]
    return LossError(
        f"encode gave {len(labels)} outputs for micro-batch {number + 1} and {len(expected)} for the first, which "
        f"differ in {', '.join(odd[:3]) or 'their order'}; expected the same containers around tensors with one row a "
        "sample. A list with an item for each sample is made a tensor, or taken from the batch in the loss"
    )


def _check_rows(label: str, leaf: Any, rows: int) -> None:
    if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or len(leaf) != rows):
        raise LossError(
            f"{label} has the shape {tuple(leaf.shape)} for a micro-batch of {rows} samples; expected one row a "
            "sample. What belongs to the batch as a whole is computed in the loss",
            name=label,
        )
