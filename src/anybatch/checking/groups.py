"""Which samples a loss needs together: those of other sizes of micro-batches, or each n-th of the batch."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from anybatch.batch.batches import Splittable, sizes_of
from anybatch.checking.causes import CAUSES
from anybatch.checking.causes import reason as worded
from anybatch.checking.cuts import Cut, Cuts
from anybatch.checking.proving import Split
from anybatch.checking.trial import Found, Trial, tolerated
from anybatch.checking.wording import in_one_line
from anybatch.errors import AnyBatchError
from anybatch.records.certificates import Proof, Reason
from anybatch.update.transaction import Failure, is_out_of_memory

_SIZES = 12  # of micro-batches, that are tried where the given one fails
_OF_SHAPES = (RuntimeError, ValueError, IndexError)
_PARTS = (2, 3, 4)  # that a loss takes a batch apart into
_DRAWN = 12  # cuts of any samples, or of any groups beside those of unlike ones
_GENERAL = tuple(CAUSES[one].text[:30] for one in ("not additive", "unexplained"))
_FEW = 3  # samples of each part


def another_size(trial: Trial, split: Split) -> Found | None:
    """The nearest size in which samples add up to the whole, where micro-batches of the given one fail.

    Returns:
        That size; where there is none, that the given one fails while another one runs; or ``None``.
    """
    splittable, given = split.task.splittable, max(len(part.samples) for part in split.parts)
    if split.task.micro_batch_size is None or not _is_plain(splittable):
        return None
    rows, failed, ran = splittable.rows, "", ""
    proof = Proof("not exact", "comparison", given, tuple(sizes_of(rows, given)))
    nearest = sorted(range(2, min(2 * given, rows // 2) + 1), key=lambda size: (abs(size - given), -size))
    for size in [given, *(one for one in nearest if one != given)][: _SIZES + 1]:
        sizes = sizes_of(rows, size)
        cut = Cut(splittable.chosen([*range(sizes[0]), *range(rows - sizes[-1], rows)]), (sizes[0], sizes[-1]))
        try:
            difference = trial.difference(cut, in_single=False)
        except Exception as error:  # noqa: BLE001 - only what a shape may cause speaks of the size
            if not isinstance(error, _OF_SHAPES) or isinstance(error, AnyBatchError) or is_out_of_memory(error):
                return None
            failed = failed or in_one_line(error)
            Failure(error).release()
            continue
        if not failed:  # the step's own do not fail
            return None
        if difference.is_none:
            return proof, worded("size", "model", given=given, failed=failed, size=size, samples=sum(cut.sizes))
        ran = ran or f"one of {size} samples runs, but gives a different gradient than the whole batch"
    fails = f"A micro-batch of {given} samples fails with {failed}; {ran}."
    return (proof, worded("too few", "loss", fails=fails)) if ran else None


def is_general(found: Reason) -> bool:
    """Whether a reason says only that samples do not add up, and not why."""
    return found.code == "fails" or found.message.startswith(_GENERAL)


def whole_groups(trial: Trial, split: Split, found: Found) -> Found | None:
    """A size that keeps samples together that stand together, where the given one does not; ``None`` for no such."""
    (proof, reason), given = found, max(len(part.samples) for part in split.parts)
    if reason is None or split.task.micro_batch_size is None or not _is_plain(split.task.splittable):
        return None
    cuts, rows = Cuts(split.task.splittable, split.parts), split.task.splittable.rows
    for group in range(2, min(2 * given, _SIZES) + 1):
        if rows % group:  # the last samples are no whole group, in no size
            continue
        samples = 0
        with tolerated():  # it may be another number
            groups = cuts.of_groups(group=group, again=_DRAWN)
            mixed = () if cuts.are_marked(group) else cuts.of_groups(group=group, mixed=True)
            for cut in itertools.chain(groups, mixed):
                if not trial.difference(cut, in_single=False).is_none:
                    break
                samples = sum(cut.sizes)
            else:
                if samples and given % group == 0:
                    return None  # micro-batches have whole groups
                if samples and all(_differs(trial, cut) for cut in cuts.of_parted_groups(group=group)):
                    size = max(group, given // group * group)
                    told = worded("groups", given=given, group=group, size=size, samples=samples)
                    remedies = (*told.remedies, *reason.remedies)
                    return proof, replace(told, where=reason.where, remedies=remedies, evidence=reason.evidence)
    return None


def in_parts_of(trial: Trial, split: Split, found: Found | None = None) -> Found | None:
    """Whether samples belong together that stand as far apart as ``chunk`` takes a batch apart; ``None`` if not."""
    splittable, given = split.task.splittable, max(len(part.samples) for part in split.parts)
    if split.task.is_planned or splittable.is_collated or not _is_plain(splittable):
        return None
    for parts in _PARTS:
        samples = 0
        with tolerated():  # it may be another number of parts
            for groups in _choices(splittable.rows, parts) if splittable.rows % parts == 0 else ():
                sizes = ((len(groups) - 1) * parts, parts)
                whole, apart = _in_order(groups), [*_in_order(groups[:-1]), *groups[-1]]
                parted = Cut(splittable.chosen(whole), sizes)
                shown = trial.regrouped(parted, Cut(splittable.chosen(apart), sizes))
                if shown is None or not shown.is_none or not _differs(trial, parted):
                    break
                samples = max(samples, len(whole))
            else:
                if samples:
                    lines = _by_parts(splittable.batches[0], parts)
                    told = worded("parts", "loss", {"parts": parts}, parts=parts, samples=samples, **lines)
                    if not _has_rows_alone(splittable):  # the lines are those of tensors with their rows first
                        told = replace(told, remedies=told.remedies[1:])
                    own = Proof("not exact", "comparison", given, tuple(sizes_of(splittable.rows, given)))
                    return (own if found is None else found[0]), told
    return None


def _differs(trial: Trial, cut: Cut) -> bool:
    """Whether a cut makes a difference, which it does not where a loss treats so few samples as if each were alone."""
    try:
        return not trial.difference(cut, in_single=False).is_none
    except _OF_SHAPES as error:
        Failure(error).release()
    return True


def _choices(rows: int, parts: int) -> list[list[list[int]]]:
    """Groups of any samples, several times: what a loss selects may be the same by chance, and places are not."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = [torch.randperm(rows, generator=generator, device="cpu").tolist() for _ in range(_DRAWN)]
    few = [min(rows // parts, _FEW - turn % 2) for turn in range(_DRAWN)]
    found = [[order[at * parts : (at + 1) * parts] for at in range(n)] for order, n in zip(drawn, few, strict=True)]
    return found if min(few) > 1 else []


def _by_parts(batch: Any, parts: int) -> dict[str, str]:
    """The lines that give a batch samples that have one row of each part, and take them apart again."""
    before, within = f"unflatten(0, ({parts}, -1))", "flatten(0, 1)"
    if isinstance(batch, torch.Tensor):
        return {"before": f"batch = batch.{before}", "within": f"batch = batch.{within}", "layout": '{"": 1}'}
    each = "batch = {{key: leaf.{} for key, leaf in batch.items()}}"
    if isinstance(batch, (tuple, list)):
        each = "batch = tuple(leaf.{} for leaf in batch)"
    return {"before": each.format(before), "within": each.format(within), "layout": '{"*": 1}'}


def _has_rows_alone(splittable: Splittable) -> bool:
    """Whether a batch is a tensor, or a dict, list or tuple of tensors, all with the samples in dim 0."""
    batch = splittable.batches[0]
    leaves = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else [batch]
    rows = [one.shape[:1] == (splittable.rows,) if isinstance(one, torch.Tensor) else False for one in leaves]
    return not splittable.broadcast and all(rows)


def _in_order(groups: Sequence[Sequence[int]]) -> list[int]:
    """The first of each group, then the second of each, and so on."""
    return [row for part in zip(*groups, strict=True) for row in part]


def _is_plain(splittable: Splittable) -> bool:
    return not splittable.has_costs and len(splittable.layouts) == 1
