"""Does a collate function keep the parts of a sample together? It is given some samples, and each of them alone."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.trials import Unknown, tensors, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_SAMPLES = 13


def about_collates(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether parts of a batch are in the order of their samples, and others in another one."""
    for dataset, collate in kept.collates:
        yield _paired(dataset, collate)


def _paired(dataset: Any, collate: Callable[[list[Any]], Any]) -> Probed:
    count = min(_SAMPLES, len(dataset))
    samples = [dataset[place * len(dataset) // count] for place in range(count)]

    def collated(some: list[Any]) -> list[torch.Tensor]:
        return tensors(collate(copy.deepcopy(some)))

    whole, again, alone = collated(samples), collated(samples), [collated([one]) for one in samples]
    if any(len(one) != len(whole) for one in alone) or not all(map(torch.equal, whole, again)):
        raise Unknown("what it gives differs from one call to the next")
    fields = [field for place, one in enumerate(whole) if (field := _matches(one, [each[place] for each in alone]))]
    orders = [order for one in fields if (order := _order(one)) and order != list(range(count))]
    if not orders or any(sorted(one.flatten().tolist()) == list(range(count)) for one in whole if one.dim() == 1):
        return told("collate", answer="no", samples=count)  # with the order, what is made of the rows can be put back
    left = [one for one in fields if not all(one[row][orders[0][row]] for row in range(count))]
    apart = [sum(not one[row][orders[0][row]] for row in range(count)) for one in left
             if all(one[row][row] for row in range(count))]  # fmt: skip
    if len(apart) < len(left):
        raise Unknown("a part of the batch is in an order of its own")
    code = getattr(collate, "__code__", None) or getattr(type(collate).__call__, "__code__", None)
    place: dict[str, Any] = {"file": getattr(code, "co_filename", ""), "line": getattr(code, "co_firstlineno", 0)}
    name = getattr(collate, "__name__", type(collate).__name__)
    moved = sum(row != sample for row, sample in enumerate(orders[0]))
    answer = "yes" if apart else "no"
    return Probed(
        probe="collate", root=-1, answer=answer, **place,
        evidence={"collate": name, "samples": count, "moved": moved, "apart": max(apart, default=0)},
    )  # fmt: skip


def _matches(whole: torch.Tensor, alone: list[torch.Tensor]) -> list[list[bool]]:
    """For each row of a tensor and each sample whether it is that of the sample; nothing where it has no rows."""
    for dim in range(min(whole.dim(), 2)):
        if whole.shape[dim] == len(alone) and all(one.dim() == whole.dim() and one.shape[dim] == 1 for one in alone):
            rows = whole.unbind(dim)
            return [[_fits(row, one.select(dim, 0)) for one in alone] for row in rows]
    return []


def _fits(row: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a row is what a sample alone becomes, but for the padding at its end or its beginning."""
    if any(size < least for size, least in zip(row.shape, own.shape, strict=True)):
        return False
    if row.shape == own.shape:
        return bool(torch.equal(row, own))
    ends = (tuple(slice(0, size) for size in own.shape), tuple(slice(-size, None) for size in own.shape))
    return any(torch.equal(row[end], own) and _is_padded(row, end) for end in ends if row[end].shape == own.shape)


def _is_padded(row: torch.Tensor, end: tuple[slice, ...]) -> bool:
    outside = torch.ones(row.shape, dtype=torch.bool)
    outside[end] = False
    return bool(row[outside].unique().numel() <= 1)


def _order(field: list[list[bool]]) -> list[int] | None:
    """The sample of each row, where each has one and they are all different."""
    found = [[sample for sample, same in enumerate(row) if same] for row in field]
    order = [one[0] for one in found if len(one) == 1]
    return order if len(order) == len(field) and sorted(order) == list(range(len(field))) else None
