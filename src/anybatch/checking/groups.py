"""Which samples a loss needs together: those of other sizes of micro-batches, or each n-th of the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from anybatch.batch.batches import Splittable, sizes_of
from anybatch.checking.causes import more
from anybatch.checking.causes import reason as worded
from anybatch.checking.cuts import Cut
from anybatch.checking.proving import Split
from anybatch.checking.trial import Found, Trial, tolerated
from anybatch.checking.wording import in_one_line
from anybatch.errors import AnyBatchError
from anybatch.records.certificates import Proof
from anybatch.update.transaction import Failure, is_out_of_memory

_SIZES = 12  # of micro-batches, that are tried where the given one fails
_OF_SHAPES = (RuntimeError, ValueError, IndexError)
_PARTS = (2, 3, 4)  # that a loss takes a batch apart into
_FEW = 3  # samples of each part


def another_size(trial: Trial, split: Split, found: Found | None = None) -> Found | None:
    """The nearest size in which samples add up to the whole, where micro-batches of the given one do not.

    Args:
        found: what those of the given size show; ``None`` where they fail.

    Returns:
        That size; where there is none, that the given one fails while another one runs; or ``None``.
    """
    splittable, given = split.task.splittable, max(len(part.samples) for part in split.parts)
    if split.task.micro_batch_size is None or not _is_plain(splittable):
        return None
    failed, ran = "", ""
    for size, cut in _of_sizes(splittable, given, is_tried=found is not None):
        try:
            difference = trial.difference(cut, in_single=False)
        except Exception as error:  # noqa: BLE001 - only what a shape may cause speaks of the size
            if not isinstance(error, _OF_SHAPES) or isinstance(error, AnyBatchError) or is_out_of_memory(error):
                return None
            failed = failed or in_one_line(error)
            Failure(error).release()
            continue
        if found is None and not failed:  # the step's own do not fail
            return None
        if difference.is_none:
            return _with_size(split, cut, size, failed) if found is None else _beside(found, given, cut, size)
        ran = ran or f"one of {size} samples runs, and gives another gradient than the whole batch"
    if found is not None or not ran:
        return None
    told = worded("too few", "loss", fails=f"A micro-batch of {given} samples fails with {failed}; {ran}.")
    return Proof("not exact", "comparison", given, tuple(sizes_of(splittable.rows, given))), told


def _of_sizes(splittable: Splittable, given: int, *, is_tried: bool) -> Iterator[tuple[int, Cut]]:
    """The first micro-batch with the last one, of the given size and of those next to it."""
    rows = splittable.rows
    nearest = sorted(range(2, min(2 * given, rows // 2) + 1), key=lambda size: (abs(size - given), -size))
    others = [size for size in nearest if size != given]
    for size in [*([] if is_tried else [given]), *others][: _SIZES + 1]:
        sizes = sizes_of(rows, size)
        chosen = splittable.chosen([*range(sizes[0]), *range(rows - sizes[-1], rows)])
        yield size, Cut(chosen, (sizes[0], sizes[-1]))


def _with_size(split: Split, cut: Cut, size: int, failed: str) -> Found:
    given = max(len(part.samples) for part in split.parts)
    told = worded("size", "model", given=given, failed=failed, size=size, samples=sum(cut.sizes))
    return Proof("not exact", "comparison", given, tuple(sizes_of(split.task.splittable.rows, given))), told


def _beside(found: Found, given: int, cut: Cut, size: int) -> Found | None:
    proof, reason = found
    if reason is None:
        return None
    tried = f"tried: {sum(cut.sizes)} samples of this batch give the same gradient so"
    message = (
        f"Samples that stand together may belong together, such as pairs or the answers to one question: micro-batches "
        f"of {given} samples part them, those of {size} do not. Or the loss does not add up over samples for another "
        "reason, and it is by chance."
    )
    return proof, replace(more(reason, before=[f"micro_batch_size={size}  # {tried}"]), message=message)


def in_parts_of(trial: Trial, split: Split, found: Found | None = None) -> Found | None:
    """Whether samples belong together that stand as far apart as ``chunk`` takes a batch apart; ``None`` if not."""
    splittable, given = split.task.splittable, max(len(part.samples) for part in split.parts)
    if split.task.is_planned or splittable.is_collated or not _is_plain(splittable):
        return None
    for parts in _PARTS:
        far, few = splittable.rows // parts, min(_FEW, splittable.rows // parts)
        if splittable.rows % parts or few < 2:
            continue
        groups = [[far * part + at for part in range(parts)] for at in range(few)]
        sizes = ((few - 1) * parts, parts)
        whole, apart = _in_order(groups), [*_in_order(groups[:-1]), *groups[-1]]
        with tolerated():  # it may be another number of parts
            shown = trial.regrouped(Cut(splittable.chosen(whole), sizes), Cut(splittable.chosen(apart), sizes))
            if shown is not None and shown.is_none:
                lines = _by_parts(splittable.batches[0], parts)
                told = worded("parts", "loss", {"parts": parts}, parts=parts, samples=few * parts, **lines)
                own = Proof("not exact", "comparison", given, tuple(sizes_of(splittable.rows, given)))
                return (own if found is None else found[0]), told
    return None


def _by_parts(batch: Any, parts: int) -> dict[str, str]:
    """The lines that give a batch samples that have one row of each part, and take them apart again."""
    before, within = f"unflatten(0, ({parts}, -1))", "flatten(0, 1)"
    if isinstance(batch, torch.Tensor):
        return {"before": f"batch = batch.{before}", "within": f"batch = batch.{within}", "layout": '{"": 1}'}
    each = "batch = {{key: leaf.{} for key, leaf in batch.items()}}"
    if isinstance(batch, (tuple, list)):
        each = "batch = tuple(leaf.{} for leaf in batch)"
    return {"before": each.format(before), "within": each.format(within), "layout": '{"*": 1}'}


def _in_order(groups: Sequence[Sequence[int]]) -> list[int]:
    """The first of each group, then the second of each, and so on."""
    return [row for part in zip(*groups, strict=True) for row in part]


def _is_plain(splittable: Splittable) -> bool:
    return not splittable.has_costs and len(splittable.layouts) == 1
