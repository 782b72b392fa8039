"""Rules of the family accumulation: the weight that each micro-batch has in the sum."""

from collections.abc import Iterator
from statistics import median

from anybatch.doctor.rules.accumulation_windows import accumulating
from anybatch.doctor.rules.naming import at_line, optimizer_variable, root_variable
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import Pass, Window, passes
from anybatch.records.events import Backward, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run

_MEANS = ("Mean", "NllLoss", "MseLoss", "SmoothL1", "Huber", "BinaryCrossEntropy", "KlDiv", "SoftMargin")
UNEQUAL = 2.0
"""From this ratio of counts on a weight is called unequal; doctor notes of the reports have 1.5 and more."""


def _calls_of(run: Run) -> dict[int, LossCall]:
    return {one.at: one for one in run.of(LossCall)}


def _near(value: float | None, other: float | None) -> bool:
    return value is not None and other is not None and abs(value - other) <= 1e-3 * max(abs(value), abs(other), 1e-12)


def _raw_mean(one: Pass, calls: dict[int, LossCall]) -> bool:
    """Whether a backward was called on a mean over its micro-batch, without any factor."""
    own = [calls[number] for number in one.fact.loss_calls if number in calls]
    if one.fact.factor != 1.0 or any(call.reduction != "mean" for call in own):
        return False
    if any(_near(one.fact.value, call.value) for call in own):
        return True
    read = [call for call in own if call.value is not None]
    return not read and one.fact.top.startswith(_MEANS)


@rule("AB355", "ACCUM_NOT_DIVIDED", "warning", explains=("LR_TOO_HIGH", "EXPLODING", "CLIP_ALWAYS_ON"))
def _accum_not_divided(run: Run) -> Iterator[Finding]:
    calls = _calls_of(run)
    for optimizer, found, count in accumulating(run):
        whole = [one for one in found if one.step is not None and len(one.used) == count]
        raw = [one for one in whole if all(_raw_mean(back, calls) for back in one.used)]
        if len(raw) < 3 or any(one.step is not None and one.step.edited for one in whole):
            continue
        if any(len({back.touched for back in one.used}) > 1 for one in raw):
            continue
        spots = {back.spot for one in whole for back in one.used}
        if any(back.fact.factor != 1.0 and back.spot in spots for back in passes(run)):
            continue
        back = raw[0].used[0].fact
        variable = optimizer_variable(run, optimizer)
        step = raw[2].step
        yield Finding(
            message=f"{variable}.step() uses the sum of {count} backwards{at_line(back.file, back.line)} on means of "
            f"micro-batches: the gradient is {count} times that of the whole batch.",
            place=Place(optimizer=variable, file=back.file, line=back.line),
            fix=_divided(run, count, back, step),
            cause="backward() adds up; a mean over the whole batch needs each mean divided by their number.",
            evidence={"backwards": count, "windows": len(raw), "factor": 1.0},
            step=step.number if step is not None else 0,
            at=back.at,
            severity="info" if _single(run, raw) else "",
        )


def _divided(run: Run, count: int, back: Backward, step: Stepped | None) -> str:
    """The code that divides the losses; another where the loop is not the user's but a trainer's."""
    forward = next((one for one in run.of(Forward) if one.grad), None)
    lines = {(one.file, one.line) for one in (forward, back, step) if one is not None}
    if len(lines) > 1 or forward is None or step is None or not any(forward.file == one[0] for one in lines):
        return f"(loss / {count}).backward()"
    if run.roots[forward.root].config if forward.root in run.roots else {}:
        variable = root_variable(run, forward.root)
        return f"{variable}.accepts_loss_kwargs = False  # before Trainer(...): its loss is a mean, so divide it"
    return f"divide the loss by {count}, where the trainer that is called{at_line(back.file, back.line)} takes it"


def _single(run: Run, found: list[Window]) -> bool:
    """Whether each backward is of a single sample."""
    inside = [one for window in found for one in window.events if isinstance(one, Forward) and one.grad]
    return bool(inside) and all(one.rows == 1 for one in inside)


@rule("AB356", "ACCUM_UNEQUAL_WEIGHT", "warning")
def _accum_unequal_weight(run: Run) -> Iterator[Finding]:
    calls = _calls_of(run)
    for optimizer, found, _ in accumulating(run):
        seen: list[tuple[Window, list[float], list[int]]] = []
        for one in found:
            weights = [_weight(back, calls) for back in one.used]
            known = [entry for entry in weights if entry is not None]
            if one.step is not None and len(known) == len(weights) >= 2:
                seen.append((one, [weight for weight, _ in known], [items for _, items in known]))
        ratios = [max(weights) / min(weights) for _, weights, _ in seen]
        bad = [entry for entry, ratio in zip(seen, ratios, strict=True) if ratio >= UNEQUAL]
        if len(bad) < 3 or len(bad) * 2 <= len(seen) or median(ratios) < UNEQUAL:
            continue
        window, _, items = bad[0]
        back = window.used[0].fact
        step = bad[2][0].step
        yield Finding(
            message=f"The micro-batches of a step have {min(items)} to {max(items)} targets"
            f"{at_line(back.file, back.line)}, but their means weigh the same: a target counts up to "
            f"{max(ratios):.1f} times as much as another.",
            place=Place(optimizer=optimizer_variable(run, optimizer), file=back.file, line=back.line),
            fix='loss = F.cross_entropy(..., reduction="sum") / total_targets_of_the_whole_batch',
            cause="A mean divides by the targets of its own micro-batch; the sum of such means is not the mean of all.",
            evidence={"items": items, "ratio": median(ratios), "windows": len(bad)},
            step=step.number if step is not None else 0,
            at=back.at,
        )


def _weight(one: Pass, calls: dict[int, LossCall]) -> tuple[float, int] | None:
    """The weight of one target in the sum, and the number of targets; ``None`` if it can't be told."""
    own = [calls[number] for number in one.fact.loss_calls if number in calls]
    if len(own) != 1 or own[0].reduction != "mean" or own[0].items <= 0 or own[0].weighted:
        return None
    factor = one.fact.factor
    if one.fact.value is not None and own[0].value:
        factor = one.fact.value / own[0].value * one.fact.weight
    return (factor / own[0].items, own[0].items) if factor > 0 else None
