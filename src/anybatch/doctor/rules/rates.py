"""Rules on the size of the learning rate; their codes are of the family schedule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from anybatch.doctor.rules.courses import Course, adversarial, course
from anybatch.doctor.rules.fading import faded
from anybatch.doctor.rules.growing import announced
from anybatch.doctor.rules.growing import lost as first_lost
from anybatch.doctor.rules.measures import (
    HEALTHY_RATIO,
    grown_ratio,
    latest,
    optimizer_name,
    optimizer_place,
    rate_at,
    ratio,
    rounded,
    told_apart,
    updating,
    with_rate,
)
from anybatch.doctor.rules.momenta import Heavy, heavy, is_high, swings
from anybatch.doctor.rules.naming import parameter_name
from anybatch.doctor.rules.probes import ignores_input
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Forward, Loaded
from anybatch.records.findings import Finding
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run
from anybatch.records.samples import Norms
from anybatch.records.tables import OptimizerFacts

FAR_TOO_LONG = 0.1
"""A step that changes the weights by a tenth; Adam's first steps change them by 0.02 to 0.05 and are healthy."""

_HINTED = 3 * FAR_TOO_LONG
"""Steps of this length are worth a hint even where no harm is seen."""

LONG = 0.03
"""Steps of this length, one after the other, are what took a gradient away that was healthy at the start."""

ADAMS_FIRST = 0.02
"""The usual length of the first steps of Adam and its like, which move every weight by the whole learning rate."""

FIRST_STEPS = 10
"""As long as they are that long."""

EARLY = 50
"""The first steps, in which a learning rate that is too high does its harm."""

_FOLLOWS = (
    "VANISHING", "EXPLODING", "DEAD_UNITS", "SATURATED", "NAN_IN_FORWARD", "NAN_IN_BACKWARD", "LOSS_CONSTANT",
    "INPUT_IGNORED", "GRAD_UNDERFLOW", "CLIP_ALWAYS_ON", "CANNOT_FIT_BATCH",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Long:
    """Steps of one optimizer that were far too long."""

    at: int
    step: int
    ratio: float
    why: str


@rule("AB501", "LR_TOO_HIGH", "warning", explains=_FOLLOWS)
def lr_too_high(run: Run) -> Iterator[Finding]:
    """Steps that are far too long, and what they did."""
    for number in updating(run):
        losses = course(run, number)
        momentum = heavy(run, number, rate_at(run, number, 0))
        long = _too_long(run, number, losses) or _adding_up(run, number, losses, momentum)
        if long is None:
            continue
        lr = rate_at(run, number, long.step)
        better = _better(run, number, lr, long, losses)
        harm, evidence = _harm(run, number, losses, long)
        if momentum is not None and not harm and is_high(momentum) and (swinging := swings(run, number, losses)):
            harm, evidence = swinging, {"loss_first": losses.first, "loss_last": losses.last}
        if not harm and not (long.ratio > _HINTED and _long_without_small(run, number)):
            continue
        if not harm:
            better = max(better, rounded(lr / 10))
        name = optimizer_name(run, number)
        if harm and momentum is not None:
            yield _of_momentum(run, number, momentum, long, harm, evidence)
            continue
        yield Finding(
            message=f"The learning rate {lr:g} of {name} is far too high: {long.why}; then {harm}."
            if harm
            else f"With the learning rate {lr:g} of {name}, {long.why}; nothing came of it.",
            place=optimizer_place(run, number),
            fix=f"{with_rate(run, number, better)}  # then warm up; then clip, decay, normalise"
            if harm
            else f"nothing while the loss falls; else {with_rate(run, number, better)}",
            cause="Steps of this length throw the weights out of the region where the model computes anything; "
            "gradients that vanish afterwards are a consequence, and a higher learning rate makes it worse."
            if harm
            else "Small models and those of one layer bear steps of this length.",
            evidence={"lr": lr, "update_ratio": long.ratio, "usual_ratio": HEALTHY_RATIO, "better_lr": better}
            | evidence,
            step=long.step,
            at=long.at,
            severity="" if harm else "info",
        )


def _long_without_small(run: Run, number: int) -> bool:
    """Whether steps are as long where weights that begin at or near zero are left out."""
    early = [one for one in run.of(Norms) if one.optimizer == number and one.number <= EARLY]
    return any(grown_ratio(run, one) > _HINTED for one in early)


def _adding_up(run: Run, number: int, losses: Course, momentum: Heavy | None) -> _Long | None:
    """Steps of a usual length that go on and on in one direction."""
    if momentum is None or not is_high(momentum) or not swings(run, number, losses):
        return None
    first = next((one for one in run.of(Norms) if one.optimizer == number), None)
    return None if first is None else _Long(first.at, first.step, _ratio(run, first), "")


def _of_momentum(
    run: Run, number: int, momentum: Heavy, long: _Long, harm: str, evidence: dict[str, Any]
) -> Finding:  # fmt: skip
    because = f"{momentum.words}{f'; {long.why}' if long.why else ''}"
    return Finding(
        message=f"The learning rate {momentum.lr:g} of {optimizer_name(run, number)} is far too high: {because}; then "
        f"{harm}.",
        place=optimizer_place(run, number),
        fix=momentum.fix,
        cause="Each gradient goes on for 1 / (1 - momentum) steps, far beyond the point where it was right, and back.",
        evidence={
            "lr": momentum.lr,
            "momentum": momentum.momentum,
            "lr / (1 - momentum)": momentum.effective,
            "update_ratio": long.ratio,
            "usual_ratio": HEALTHY_RATIO,
            "better_lr": momentum.better_lr,
        }
        | evidence,
        step=long.step,
        at=long.at,
    )


def _better(run: Run, number: int, lr: float, long: _Long, losses: Course) -> float:
    """A learning rate whose steps are of a usual length."""
    if not math.isfinite(long.ratio):
        return rounded(lr / 100)
    facts = run.optimizers.get(number, OptimizerFacts(optimizer=number))
    trained = (
        facts.after > 0
        or any(one.into == "module" and one.matched for one in run.of(Loaded))
        or (losses.prior is not None and losses.finite and losses.finite[0] < losses.prior / 2)
    )
    if "ada" in facts.cls.lower() and not trained and long.step < FIRST_STEPS:
        return rounded(min(lr / 3, lr * ADAMS_FIRST / long.ratio))
    return rounded(min(lr / 10, lr * HEALTHY_RATIO / long.ratio))


def _ratio(run: Run, norms: Norms) -> float:
    """The update ratio; not finite where there is none, or where a number had been lost before."""
    found = ratio(run, norms)
    return math.inf if found is None else found


def _too_long(run: Run, number: int, losses: Course) -> _Long | None:
    ratios = [
        (norms, value)
        for norms in run.of(Norms)
        if norms.optimizer == number and norms.number <= EARLY and math.isfinite(value := _ratio(run, norms))
    ]
    long = [(norms, value) for norms, value in ratios if value > FAR_TOO_LONG]
    lost = faded(run, number, losses)
    if len(long) < 2 and lost is not None and not lost.early:
        long = [(norms, value) for norms, value in ratios if value > LONG and norms.at < lost.lost[0][0].at]
    if len(long) >= 2 or any(value > 1 for _, value in long):
        norms, first = long[0]
        why = f"step {norms.number} changes the weights by {first:.2g} of their length (0.001 is usual)"
        return _Long(norms.at, norms.step, first, why)
    if adversarial(run, number) or not losses.finite or losses.first <= 0 or min(losses.finite) < 0 or not ratios:
        return None
    risen = next(
        (
            index
            for index, value in enumerate(losses.values)
            if 0 < losses.steps[index] <= EARLY and 3 * losses.values[0] < value < math.inf
        ),
        None,
    )
    if risen is None:
        return None
    before = [value for norms, value in ratios if norms.step <= losses.steps[risen] and math.isfinite(value)]
    largest = max(before, default=0.0)
    if largest < 3 * HEALTHY_RATIO:
        return None
    first_long = next((norms for norms, value in ratios if value >= largest), ratios[0][0])
    why = (f"the loss rises from {losses.values[0]:.3g} to {losses.values[risen]:.3g} by step {losses.steps[risen]}, "
           f"with steps of up to {largest:.2g} of the weights")  # fmt: skip
    return _Long(min(first_long.at, losses.ats[risen]), min(first_long.step, losses.steps[risen]), largest, why)


def _harm(run: Run, number: int, losses: Course, long: _Long) -> tuple[str, dict[str, Any]]:
    """What was seen after it, in words and numbers."""
    bad = first_lost(run, losses)
    if bad is not None and bad.at >= long.at and announced(run, number, losses, bad, FAR_TOO_LONG):
        return f"a number is not finite at step {bad.step}", {"not_finite_at_step": bad.step}
    asked = next((one for one in run.of(Probed) if ignores_input(one)), None)
    if asked is not None and bad is None and not losses.converged:
        return "the outputs do not depend on the input any more", dict(asked.evidence)
    end = math.inf if bad is None else bad.step
    for root, taken in latest(run):
        samples = [one for one in taken if one.step < end]
        if not samples:
            continue
        spread = [(one.at, output.spread) for one, output in told_apart(run, samples) if output.spread is not None]
        after = [value for at, value in spread if at >= long.at]
        before = [value for at, value in spread if at <= long.at] or [value for _, value in spread[:1]]
        if len(after) >= 2 and before[0] > 0 and max(after[-2:]) < 1e-3 * before[0] and not losses.converged:
            return (
                f"the outputs stop depending on the input: their spread over the batch goes from {before[0]:.2g} to "
                f"{after[-1]:.2g}"
            ), {"spread_first": before[0], "spread_last": after[-1], "root": root}
        dead = [one for one in samples[-1].modules if one.always_dead > 0.9] if samples[-1].at >= long.at else []
        alive = {one.module for one in samples[0].modules if one.dead < 0.7}
        if (killed := [one for one in dead if one.module in alive]) and not losses.fell:
            share = killed[0].always_dead
            return f"{share:.0%} of the units of {killed[0].module} are zero for every input", {"dead": share}
    lost = faded(run, number, losses)
    if lost is not None and not lost.early and not losses.fell:
        first, gone = parameter_name(run, lost.lost[0][1][0].parameter), lost.lost[-1][1][0].grad
        return f"the gradient of {first} vanishes, down to {gone:.2g}", {"gradient_last": gone}
    return _stuck(run, number, losses, long)


def _stuck(run: Run, number: int, losses: Course, long: _Long) -> tuple[str, dict[str, Any]]:
    after = losses.since(long.at)
    if len(after.finite) < 5 or adversarial(run, number) or losses.first <= 0 or min(losses.finite) < 0:
        return "", {}
    if _falls_still(after):
        return "", {}
    prior = losses.prior
    start = losses.values[0] if math.isfinite(losses.values[0]) else losses.first
    numbers = {"loss_first": start, "loss_peak": max(after.finite), "loss_last": losses.last}
    rows = max((one.rows for one in run.of(Forward) if one.grad), default=0)
    if prior is None and 1 in (rows, max((one.items for one in run.of(LossCall)), default=0)):
        return "", {}  # the loss of one sample may begin low by chance
    if losses.last > (max(2 * start, 0.9 * prior) if prior else 10 * start):
        return f"the loss stays at {losses.last:.3g}, where it began with {start:.3g}", numbers
    guesses = prior is not None or long.ratio > FAR_TOO_LONG
    if guesses and max(after.finite) > 1.5 * max(start, prior or 0.0) and losses.last > 0.9 * (prior or start):
        known = f", no better than a constant guess ({prior:.3g})" if prior else ""
        return f"the loss peaks at {max(after.finite):.3g} and stays at {losses.last:.3g}{known}", numbers
    return "", {}


def _falls_still(after: Course) -> bool:
    """Whether the last quarter of the losses lies well below the one before: such a loss stays nowhere yet."""
    values = after.finite
    quarter = max(1, len(values) // 4)
    return median(values[-quarter:]) < 0.8 * median(values[-2 * quarter : -quarter])
