"""The rule on a learning rate that is far too low; its code is of the family schedule."""

from collections.abc import Iterator

from anybatch.doctor.rules.courses import course
from anybatch.doctor.rules.measures import (
    HEALTHY_RATIO,
    entries,
    optimizer_name,
    optimizer_place,
    rate_at,
    ratio,
    rounded,
    updating,
    with_rate,
)
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Stepped
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

_AFTER_WARM_UP = 20
"""Steps at the highest rate, or on its way down, that are as telling as a run without a warm-up."""


@rule("AB502", "LR_TOO_LOW", "warning", explains=("LOSS_CONSTANT",))
def lr_too_low(run: Run) -> Iterator[Finding]:
    """Steps that change nothing although gradients are there."""
    for number in updating(run):
        losses = course(run, number)
        if not losses.finite or losses.fell or losses.converged or losses.diverged or losses.last < 1e-4:
            continue
        samples = [(norms, ratio(run, norms)) for norms in run.of(Norms) if norms.optimizer == number]
        ratios = [value for _, value in samples if value is not None]
        steps = sum(one.optimizer == number for one in run.of(Stepped))
        if steps < 20 or len(ratios) < 5 or max(ratios) >= 1e-6 or not _rate_is_to_blame(run, number, samples[-1][0]):
            continue
        lrs = [max(one.lrs) for one in run.of(Stepped) if one.optimizer == number and one.lrs]
        if not lrs or max(lrs) == 0 or _still_rises(lrs):
            continue
        largest, lr = max(ratios), max(lrs)
        better = rounded(min(lr * HEALTHY_RATIO / largest, 1e-3)) if largest > 0 else 1e-3
        yield Finding(
            message=f"The learning rate {lr:g} of {optimizer_name(run, number)} is so low that nothing changes: a step "
            f"changes the weights by {largest:.2g} of their length (0.001 is usual), and the loss stays at "
            f"{losses.last:.3g}.",
            place=optimizer_place(run, number),
            fix=with_rate(run, number, max(better, rounded(lr * 10))),
            cause="Updates of this size would need millions of steps, or are rounded away.",
            evidence={"lr": lr, "update_ratio": largest, "loss_first": losses.first, "loss_last": losses.last},
            step=samples[0][0].step,
            at=samples[0][0].at,
        )


def _still_rises(lrs: list[float]) -> bool:
    """Whether a rate is on its way up: a warm-up that has not been over for as long as it took, and for 20 steps."""
    if max(lrs) <= 2 * next((lr for lr in lrs if lr > 0), 0.0):
        return False
    peak = next(place for place, lr in enumerate(lrs) if lr >= 0.999 * max(lrs))
    return len(lrs) - peak < max(_AFTER_WARM_UP, peak)


def _rate_is_to_blame(run: Run, number: int, norms: Norms) -> bool:
    """Whether a usual learning rate would move the weights: a vanished gradient or a lost write would not."""
    half = {"bfloat16", "float16"}
    found = [one for one in entries(run, norms) if one.is_matrix and one.parameter.dtype not in half]
    adaptive = "ada" in run.optimizers[number].cls.lower() if number in run.optimizers else False
    usual = [one for one in found if one.grad > (1e-8 if adaptive else 1e-4 * one.weight)]
    lr = rate_at(run, number, norms.number)
    return len(usual) * 2 > len(found) and lr < (1e-5 if adaptive else 1e-3)
