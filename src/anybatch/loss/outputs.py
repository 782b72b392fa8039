"""The outputs of an encoder for each micro-batch, joined to the outputs of the whole batch."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from anybatch.batch.trees import flat, leaves, like
from anybatch.errors import LossError
from anybatch.tensors.dispatch import has_numbers

_EXPECTED_AGAIN = (
    "expected a function of the model, the batch and the global random state of torch, numpy and Python only. Draw "
    "from these and not from a generator of its own, or let every micro-batch keep its graph: Coupled(..., "
    "keep=1_000_000). What it counts from call to call is given with the batch"
)


Marks = dict[int, tuple[list[float] | None, float]]
"""By position: the sums of a tensor and of its absolute values, and the relative tolerance."""


def marks_of(tensors: Sequence[torch.Tensor | None], *, waits: bool) -> Marks:
    """The sums by which two runs are compared; ``None`` for a fake tensor.

    Args:
        waits: whether tensors on other devices than the CPU are looked at, which have to be synchronized for it.
    """
    found: Marks = {}
    for position, tensor in enumerate(tensors):
        if tensor is None or tensor.is_meta or not tensor.is_floating_point() or tensor.layout != torch.strided:
            continue
        if waits or tensor.device.type == "cpu":
            dtype, value = torch.promote_types(tensor.dtype, torch.float32), tensor.detach()
            mark = torch.stack([value.sum(dtype=dtype), torch.linalg.vector_norm(value, 1, dtype=dtype)])
            found[position] = mark.tolist() if has_numbers(mark) else None, math.sqrt(torch.finfo(tensor.dtype).eps)
    return found


def refuse_others(number: int, labels: Sequence[str], first: Marks, second: Marks) -> None:
    """Refuses a second run of a micro-batch that gave other values.

    The tolerance is relative to the sum of absolute values, since kernels may round differently.
    """
    if first.keys() != second.keys():
        raise LossError(f"encode gave other outputs for micro-batch {number + 1} when it ran again; {_EXPECTED_AGAIN}")
    for position, (mark, tolerance) in first.items():
        again = second[position][0]
        if mark is None or again is None:
            continue
        (before, _), (after, size) = mark, again
        if abs(after - before) > tolerance * size:  # NaN is the same as NaN
            raise LossError(
                f"{labels[position]} of micro-batch {number + 1} has different values when encode runs again: "
                f"they sum to {after:.6g}, the first time to {before:.6g}; {_EXPECTED_AGAIN}",
                name=labels[position],
            )


class _Ended(torch.autograd.Function):
    """Identity on gradients; its outputs take no memory."""

    @staticmethod
    def forward(_: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.new_zeros(()).expand(tensor.shape) for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients


def tensors_of(outputs: Any) -> list[torch.Tensor | None]:
    """The tensors among some outputs, by position; ``None`` for anything else."""
    return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in flat(outputs)]


def ended(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Tensors that stand for outputs in a backward, by position; they keep the graph alive, but not the outputs."""
    own = {id(tensor): tensor for tensor in tensors if tensor is not None and tensor.requires_grad}
    if not own:
        return [None] * len(tensors)
    by_id = dict(zip(own, _Ended.apply(*own.values()), strict=True))  # type: ignore[no-untyped-call]
    return [by_id.get(id(tensor)) for tensor in tensors]


class Outputs:
    """The outputs of micro-batches.

    Args:
        samples: positions in the logical batch, for each micro-batch.
    """

    def __init__(self, samples: Sequence[Sequence[int]]) -> None:
        self._samples = samples
        self.total = sum(len(part) for part in samples)
        self._first: Any = None
        self.labels: list[str] = []  # of the outputs of a micro-batch, by position
        self._parts: list[list[Any]] = []  # those of each micro-batch
        self._needing: set[int] = set()  # the positions of those that get a gradient
        self._twins: list[int] = []
        self._order = [sample for part in samples for sample in part]
        self._is_in_order = self._order == list(range(self.total))

    def add(self, outputs: Any) -> list[torch.Tensor | None]:
        """Adds the outputs of the next micro-batch, detached.

        Returns:
            Its tensors by position, with their graph; ``None`` for anything else.
        """
        named = [(label, leaf) for label, _, leaf in leaves(outputs, "outputs")]
        number, labels, found = len(self._parts), [label for label, _ in named], [leaf for _, leaf in named]
        tensors = tensors_of(found)
        own = [leaf if tensor is None else tensor.detach() for leaf, tensor in zip(found, tensors, strict=True)]
        if number == 0:
            if all(tensor is None for tensor in tensors):
                raise LossError("encode gave no tensor; expected at least one, with one row a sample")
            self._first, self.labels, self._twins = like(outputs, own), labels, [0] * len(found)
        elif labels != self.labels:
            raise _of_another_structure(labels, self.labels, number)
        for label, tensor in zip(labels, tensors, strict=True):
            _check_rows(label, tensor, len(self._samples[number]))
        self._parts.append(own)
        self._needing.update(p for p, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad)
        self._twins = twins(self._twins, found)
        return tensors

    def repeat(self, number: int, rows: int) -> None:
        """Adds the outputs of an earlier micro-batch again; a plan runs one for many."""
        self._parts.append([leaf[:rows] if isinstance(leaf, torch.Tensor) else leaf for leaf in self._parts[number]])

    def joined(self, *, differentiate: bool) -> tuple[Any, list[torch.Tensor | None]]:
        """All outputs in the order of the batch, and the leaves among them that get a gradient; releases the parts."""
        columns, values = [list(column) for column in zip(*self._parts, strict=True)], list[Any]()
        gets: list[torch.Tensor | None] = []
        self._parts.clear()
        for position, column in enumerate(columns):
            twin, wanted = self._twins[position], None
            if twin != position:  # one tensor in two places stays one
                value = values[twin]
            else:
                value = self._column(self.labels[position], column)
                if differentiate and position in self._needing:
                    wanted = value.requires_grad_()
            values.append(value)
            gets.append(wanted)
            column.clear()
        if not values:  # no samples
            return None, gets
        first, self._first = self._first, None
        return like(first, values), gets

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
        """The gradients of one micro-batch's outputs."""
        part = self._samples[number]
        if self._is_in_order:
            return [None if g is None else g.narrow(0, part[0], len(part)) for g in gradients]
        return [None if g is None else g[_on(g.device, torch.tensor(list(part), device="cpu"))] for g in gradients]


def twins(before: Sequence[int], found: Sequence[Any]) -> list[int]:
    """For each position, the first position with the same tensor in every micro-batch."""
    first: dict[tuple[int, int], int] = {}
    keys = [(before[p], id(leaf) if isinstance(leaf, torch.Tensor) else -p) for p, leaf in enumerate(found)]
    return [first.setdefault(key, position) for position, key in enumerate(keys)]


def _on(device: torch.device, positions: torch.Tensor) -> torch.Tensor:
    return positions.to(device, non_blocking=True)  # does not synchronize


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


def _check_rows(label: str, tensor: torch.Tensor | None, rows: int) -> None:
    if tensor is not None and (tensor.dim() == 0 or len(tensor) != rows):
        raise LossError(
            f"{label} has the shape {tuple(tensor.shape)} for a micro-batch of {rows} samples; expected one row a "
            "sample. What belongs to the batch as a whole is computed in the loss",
            name=label,
        )
