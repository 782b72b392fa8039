"""What is given to a net and its loss, looked at entry by entry: torn axes, targets among inputs, padding, blanks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.crossing import is_padded, of_classes, reads_across
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import MOVING, replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.doctor.ask.weighing import padding_of
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_CHANNELS = (2, 3, 4)
_MORE_ALIKE = 0.2  # the covariance of channels, as a share of the variance of an image
_MOST = 0.6  # of the samples: some may have one colour
_LEAST_BATCHES = 3
_LEAST_SEVERAL = 0.2  # of the rows
_LEAST_ROWS, _MOST_CLASSES = 200, 20  # in which a number tells the class, by no chance
_LEAST_PADDED = 0.1  # of the tokens
_SIGNED = frozenset({"cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"})
_REGRESSIONS = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})


def turned(tape: Tape) -> Probed:
    """Whether axes change places by a reshape, which leaves the entries where they are, or an image came that way."""
    rows, loss = rows_of(tape), tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    for operation, found in zip(tape.operations[: loss.before], run.results, strict=True):
        given = next(iter(slots(operation.args)), None)
        if operation.name not in MOVING or not found or given is None or not needed & set(operation.outs):
            continue
        before, after = ([size for size in one.shape if size > 1] for one in (run.values[given], found[0]))
        is_other = before != after and sorted(before) == sorted(after)
        is_across = rows in before[:2] and run.values[given].requires_grad and reads_across(before, after)
        if (is_other or is_across) and not is_padded(tape, given):
            return told("axes", operation, op=operation.name, before=before, after=after)
    if (crossed := of_classes(tape, run)) is not None:
        return told("axes", crossed[0], op=crossed[0].name, before=crossed[1], after=crossed[2])
    for slot, leaf in tape.leaves.items():
        if slot not in needed or slot in tape.parameters or leaf.shape[:1] != (rows,):
            continue
        sizes: dict[str, Any] = {"after": [size for size in leaf.shape if size > 1]}
        sizes["before"] = [size for size in tape.bases.get(slot, ()) if size > 1]
        is_view = sizes["before"] != sizes["after"] and sorted(sizes["before"]) == sorted(sizes["after"])
        if is_view or _is_torn(leaf):
            given_to = next(one for one in tape.operations if slot in set(slots((one.args, one.kwargs))))
            count, height, width = leaf.shape[-3:] if leaf.dim() > 3 else (0, 0, 0)
            sizes = sizes if is_view else {"before": [height, width, count], "after": [count, height, width]}
            return told("axes", given_to, op=given_to.name, **sizes)
    return told("axes", answer="no")


def _is_torn(image: torch.Tensor) -> bool:
    """Whether the channels of most images are alike, and images smoother, only if read in another order.

    Rows, columns, channels are what a picture is stored as.
    """
    if image.dim() != 4 or image.shape[1] not in _CHANNELS or min(image.shape[2:]) < 8 or not image.is_floating_point():
        return False
    count, channels, height, width = image.shape
    given = image.double()
    other = given.reshape(count, height, width, channels).permute(0, 3, 1, 2)
    (rough, alike), (rough_other, alike_other) = _texture(given), _texture(other)
    better = alike_other > alike + _MORE_ALIKE
    return float(better.double().mean()) > _MOST and bool(rough_other.mean() < rough.mean())


def _texture(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each image how much one row of pixels differs from the next, and how alike two channels are."""
    spread = image.var((1, 2, 3)).clamp_min(1e-12)
    away = image - image.mean((2, 3), keepdim=True)
    rough = (image[:, :, 1:] - image[:, :, :-1]).pow(2).mean((1, 2, 3)) / spread
    return rough, (away[:, 1:] * away[:, :-1]).mean((1, 2, 3)) / spread


def given_away(tape: Tape) -> Probed:
    """Whether the target of a regression is one of the numbers that the model is given."""
    rows, loss = rows_of(tape), tape.losses[-1]
    run = replayed(tape, loss, lambda one: one)
    for operation in tape.operations[: loss.before]:
        if operation.name not in _REGRESSIONS:
            continue
        for slot in slots((operation.args, operation.kwargs)):
            target, made_of = run.values[slot], slots_of(tape, replace(loss, slot=slot))
            others = [leaf for one, leaf in tape.leaves.items() if one not in made_of and leaf.dim() > 1]
            for leaf in others if not target.requires_grad and target.dim() else ():
                if not leaf.shape[0] == target.shape[0] == rows:
                    continue
                place = _column(leaf.reshape(rows, -1), target.reshape(rows, -1))
                if place >= 0:
                    return told("target given", operation, place=place, of=leaf[0].numel())
    return told("target given", answer="no")


def _column(inputs: torch.Tensor, target: torch.Tensor) -> int:
    """Which column of the inputs is a target in each row; -1 for none."""
    if target.shape[1] * 2 > inputs.shape[1] or not inputs.is_floating_point() or inputs.dtype != target.dtype:
        return -1
    if min(len(column.unique()) for column in target.T) < len(target) / 2:
        return -1  # a few values may be equal by accident
    same = [(inputs == column[:, None]).all(0).nonzero() for column in target.T]
    return int(same[0][-1]) if all(map(len, same)) else -1


def about_given(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether one of the numbers that a root is given has another value for each class, and one for all of its rows."""
    for root, batches in kept.batches.items():
        pairs = [(first, marks) for first, _, one in batches if (marks := _marks(first, one["target"])) is not None]
        pairs = [one for one in pairs if one[0].shape[1:] == pairs[0][0].shape[1:]]
        rows = sum(len(marks) for _, marks in pairs)
        if rows < _LEAST_ROWS:
            continue
        inputs, marks = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
        classes = len(marks.unique())
        for place in range(inputs.shape[1] if 1 < classes <= _MOST_CLASSES else 0):
            values = inputs[:, place].unique()
            if len(values) == classes and len(torch.stack((inputs[:, place], marks)).unique(dim=1).T) == classes:
                yield told("target given", root=root, kind="class", place=place + 1, of=inputs.shape[1], rows=rows)
                break


def _marks(first: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """The classes of a table of numbers, one for each row; ``None`` where they are something else."""
    is_table = first.dim() == 2 and first.is_floating_point() and first.shape[1] > 1 and first.is_cpu and target.is_cpu
    if not is_table or target.numel() != len(first) or (
        target.is_floating_point() and not bool(((target == 0) | (target == 1)).all())
    ):  # fmt: skip
        return None
    return target.flatten().to(first)


def blank(tape: Tape) -> Probed:
    """Whether the targets of a CTC loss hold the blank, or are longer than what they are aligned with."""
    calls = [one for one in tape.operations if one.name == "ctc_loss"]
    if not calls:
        raise Unknown("no CTC loss was seen")
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank")
    given = dict(zip(names, calls[-1].args, strict=False)) | calls[-1].kwargs
    run = replayed(tape, tape.losses[-1], lambda one: one)
    targets, lengths, own = (_value(run.values, given[one]) for one in ("targets", "target_lengths", "input_lengths"))
    inside = targets.reshape(-1)
    if targets.dim() == 2:
        inside = targets[torch.arange(targets.shape[1], device=targets.device) < lengths[:, None].to(targets.device)]
    blanks, too_long = int((inside == given.get("blank", 0)).sum()), int((lengths > own).sum())
    answer = "yes" if blanks or too_long * 2 > len(lengths) else "no"
    evidence = {"blank": given.get("blank", 0), "blanks": blanks, "too_long": too_long, "rows": len(lengths)}
    return told("blank", calls[-1], answer=answer, **evidence)


def unsigned(tape: Tape) -> Probed:
    """Whether a loss that takes 1 for alike and -1 for different is given other numbers, which it leaves out."""
    calls = [one for one in tape.operations if one.name in _SIGNED]
    if not calls:
        raise Unknown("no loss of pairs was seen")
    run = replayed(tape, tape.losses[-1], lambda one: one)
    for one in calls:
        target = _value(run.values, one.kwargs.get("target", one.args[-1] if one.args else 0.0))
        others = sorted({float(value) for value in target.unique()} - {1.0, -1.0})
        if others:
            share = float((target.abs() != 1).double().mean())
            return told("signs", one, op=one.name, others=others[:3], share=share)
    return told("signs", answer="no")


def _value(values: Any, one: Any) -> torch.Tensor:
    return values[one] if one in values else torch.as_tensor(one)


def about_several(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a loss that takes one class for each row, or shares that sum to 1, is given the marks of several."""
    for root, batches in kept.batches.items():
        given = [
            one["target"] for _, name, one in batches if name == "cross_entropy" and one["shape"] == one["target"].shape
        ]
        given = [one for one in given if one.dim() == 2 and one.is_floating_point() and one.shape[0] != one.shape[1]]
        if len(given) < _LEAST_BATCHES or not all(bool(((one == 0) | (one == 1)).all()) for one in given):
            continue
        marks = torch.cat([one.sum(1) for one in given])
        if float((marks != 1).double().mean()) > _LEAST_SEVERAL and bool((marks > 1).any()):
            yield told("several classes", root=root, rows=len(marks), most=int(marks.max()), least=int(marks.min()))


def about_padding(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a loss counts the places at which the tokens of its root are padding."""
    for root, batches in kept.batches.items():
        padded, total, seen = 0, 0, set[int]()
        for tokens, name, given in batches:
            target, rows = given["target"], len(tokens)
            if name != "cross_entropy" or tokens.dim() != 2 or tokens.is_floating_point() or target.numel() % rows:
                break
            if given.get("weight") is not None:
                break
            target = target.reshape(rows, -1)
            behind = padding_of(tokens if target.shape == tokens.shape else target)
            at_end = target[behind] if behind is not None else target.flatten()[:0]
            seen |= set(at_end.tolist())
            if len(seen) > 1:
                break
            total += target.numel()
            padded += int((at_end != given.get("ignore_index", -100)).sum())
        else:
            if total and padded > _LEAST_PADDED * total:
                yield told("padding", root=root, share=padded / total, value=seen.pop(), tokens=total)
