"""Rules on the size of the learning rate; their codes are of the family schedule."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from anybatch.doctor.rules.probes import ignores_input
from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.courses import adversarial, course, passes
from anybatch.doctor.views.measures import (
    FAR_TOO_LONG,
    HEALTHY_RATIO,
    entries,
    grown_ratio,
    latest,
    ratio,
    rounded,
    told_apart,
)
from anybatch.doctor.views.naming import by_line, parameter_name
from anybatch.doctor.views.optimizing import OptimizerView, announced, measured, schedules
from anybatch.doctor.views.outcomes import ENOUGH_STEPS, FEW_STEPS, outcome, weighs_rewards
from anybatch.records.events import Forward, Loaded, Stepped
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Norms, Scored, Written

_GROWING, _FAR_GROWN = 4, 100.0  # losses in a row, and times the first one

FEW_OF_A_RATE = 100
"""In fewer steps a rate that is low may have had no time."""

_LITTLE = 0.2
"""A share of what a copy gains of one batch at another rate, as the question has it: less is next to nothing."""


@dataclass(frozen=True, slots=True)
class _Long:
    """Steps of one optimizer that were far too long; ``why`` is empty for usual ones that add up."""

    at: int
    step: int
    ratio: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Harm:
    """What was seen after them, in words and numbers."""

    words: str
    numbers: dict[str, Any] = field(default_factory=dict)


@rule(
    "AB501", "LR_TOO_HIGH", "warning",
    explains=("VANISHING", "EXPLODING", "DEAD_UNITS", "SATURATED", "NAN_IN_FORWARD", "NAN_IN_BACKWARD", "LOSS_CONSTANT",
              "INPUT_IGNORED", "GRAD_UNDERFLOW", "CLIP_ALWAYS_ON", "CANNOT_FIT_BATCH"),
)  # fmt: skip
def lr_too_high(
    run: Run, *,
    far: float = Limit(FAR_TOO_LONG, "of the weights; Adam's first steps change them by 0.02 to 0.05 and are healthy"),
    hinted: float = Limit(3 * FAR_TOO_LONG, "steps of this length are worth a hint even where no harm is seen"),
    row: float = Limit(0.03, "steps of this length in a row took a gradient away that was healthy at the start"),
    early: float = Limit(50, "steps in which a learning rate that is too high does its harm"),
) -> Iterator[Found]:  # fmt: skip
    """Steps that are far too long, and what they did."""
    for one in measured(run):
        heavy, swings = _heavy(one), _swings(one)
        first = next((_Long(n.at, n.step, math.inf if (r := ratio(run, n)) is None else r) for n in one.samples), None)
        if (asked := _other_rate(one, ENOUGH_STEPS)) is not None and not _is_too_low(one, asked):
            yield _found_by_trial(one, asked)
            continue
        long = _far_too_long(one, far, row, early) or _risen(one, early)
        if long is None and heavy and heavy.is_high and swings:
            long = first
        if long is None:
            continue
        harm = next((found for look in _HARMS if (found := look(one, long)) is not None), None)
        if harm is None and heavy is not None and heavy.is_high:
            harm = swings
        if harm is None and long.ratio > 1:  # longer than the weights are
            harm = _nothing_learned(one)
        if harm is not None:
            yield _of_momentum(one, heavy, long, harm) if heavy is not None else _too_high(one, long, harm)
        elif (
            len(one.steps) >= FEW_STEPS
            and long.ratio > hinted
            and any(grown_ratio(run, n) > hinted for n in one.samples if n.number <= early)
        ):
            yield _hint(one, long)
    yield from _grown_by_hand(run)


def _grown_by_hand(run: Run) -> Iterator[Found]:
    """A loss that grows from each update by hand to the next, without any optimizer, until it is no number."""
    seen = course(run)
    grown = list(itertools.takewhile(math.isfinite, seen.values))
    rest = seen.values[len(grown) :]
    if run.optimizers or not any(run.of(Written)) or len(grown) < _GROWING or any(map(math.isfinite, rest)):
        return
    if (
        rest
        and grown[-1] > _FAR_GROWN * abs(grown[0])
        and all(after > before for before, after in itertools.pairwise(grown[-_GROWING:]))
    ):
        back = next(one for one in passes(run) if one.at >= seen.ats[0])
        yield Found(
            text=f"The loss grows from {grown[0]:.3g} to {grown[-1]:.3g} in {len(grown)} updates by hand: they are far "
            "too long.",
            fix="a tenth of the learning rate of the update; and inputs of about zero mean and unit variance",
            cause="Each step goes so far beyond the least loss that it ends up farther away than it was.",
            since=back,
            evidence={"loss": grown[0], "after": grown[-1], "updates": len(grown)},
        )


def _nothing_learned(one: OptimizerView) -> _Harm | None:
    """That a run learned nothing, or fell from where long steps threw it and ended above a constant guess."""
    word = outcome(one.run).word
    guess = next((call.guess for call in reversed([*one.run.of(LossCall)]) if call.guess), None)
    if word == "not learning":
        return _Harm("nothing was learned")
    if len(by_line(one.run)) != 1:  # a sum of terms is no loss that has this guess
        return None
    if word == "learning" or guess is None or not one.losses.finite or one.losses.last <= guess:
        return None
    return _Harm(f"the loss ends at {one.losses.last:.3g}, and a constant guess gives {guess:.3g}")


def _other_rate(one: OptimizerView, steps: float) -> Probed | None:
    """The answer that one batch is learned at another rate, where the run was long enough and did not learn.

    A run that learned a little counts where the copy knows far more of a batch that it was not fitted to.
    """
    if len(one.steps) < steps or any(True for _ in one.run.of(Scored)):
        return None
    found = (probed for probed in one.run.answers("rate") if probed.evidence["optimizer"] == one.number)
    asked = next(found, None)
    if asked is None:
        return None
    seen, losses = asked.evidence, one.losses
    little = losses.first - losses.last < _LITTLE * (seen["loss"] - seen["other_after"])  # than of one batch by heart
    guess = next((call.guess for call in reversed([*one.run.of(LossCall)]) if call.guess), 0.0)
    floor = guess if losses.last > guess and len(by_line(one.run)) == 1 else 0.0  # above it nothing is learned as yet
    if losses.last - floor <= 2 * (seen.get("unseen", -math.inf) - floor) and not little:
        return None  # the loss of the run is no higher: at its end it reads what the copy does not, such as buffers
    return asked if outcome(one.run).word != "learning" or seen.get("knows_more") else None


def _is_too_low(one: OptimizerView, asked: Probed) -> bool:
    """Whether larger steps learn the batch, be they those of Adam, which do not shrink with the gradient."""
    seen = asked.evidence
    return bool(seen["other_lr"] > seen["lr"] or seen.get("by") == "Adam" != one.facts.cls)


def _found_by_trial(one: OptimizerView, asked: Probed) -> Found:
    """What is said of a rate where a copy learned one batch with another one."""
    seen, what, fix = asked.evidence, "far too high", one.with_rate(asked.evidence["other_lr"])
    cause = "Steps of this length throw the weights far outside their useful range."
    if _is_too_low(one, asked):
        what = "so low that little is learned"
        cause = "SGD takes rates a hundred times those of Adam, whose steps do not shrink with the gradient."
        if one.facts.cls != "SGD":
            cause = "A step is about as long as the rate, whatever the gradient, and the weights have far to go."
    by, more = "", ""
    if seen.get("knows_more"):
        more = f"; on another batch it then has {seen['unseen']:.3g}, and the run at its end {seen['final']:.3g}"
    if seen.get("by", one.facts.cls) != one.facts.cls:
        by, fix = f"{seen['by']} and ", f"torch.optim.{seen['by']}(model.parameters(), lr={seen['other_lr']:g})"
    return Found(
        text=f"The learning rate {seen['lr']:g} of {one} is {what}: a copy that fits one batch reduces the loss from "
        f"{seen['loss']:.3g} to {seen['after']:.3g} in {seen['steps']} steps, and with {by}"
        f"{seen['other_lr']:g} to {seen['other_after']:.3g}{more}.",
        fix=fix,
        cause=cause,
        since=asked,
        optimizer=one.number,
    )


def _too_high(one: OptimizerView, long: _Long, harm: _Harm) -> Found:
    lr = one.rate_at(long.step)
    better = _better(one, lr, long)
    return Found(
        text=f"The learning rate {lr:g} of {one} is far too high: {long.why}; then {harm.words}.",
        fix=f"{one.with_rate(better)}  # then warm up; then clip, decay, normalise",
        cause="Steps of this length throw the weights far outside their useful range; gradients "
        "that vanish afterwards are a consequence, and a higher learning rate makes it worse.",
        since=long.at,
        step=long.step,
        optimizer=one.number,
        evidence={"lr": lr, "update_ratio": long.ratio, "usual_ratio": HEALTHY_RATIO, "better_lr": better}
        | harm.numbers,
    )


def _hint(one: OptimizerView, long: _Long) -> Found:
    lr = one.rate_at(long.step)
    better = max(_better(one, lr, long), rounded(lr / 10))
    return Found(
        text=f"With the learning rate {lr:g} of {one}, {long.why}; nothing came of it.",
        fix=f"nothing while the loss falls; else {one.with_rate(better)}",
        cause="Small models and those of one layer bear steps of this length.",
        since=long.at,
        step=long.step,
        optimizer=one.number,
        evidence={"lr": lr, "update_ratio": long.ratio, "usual_ratio": HEALTHY_RATIO, "better_lr": better},
        severity="info",
    )


def _better(one: OptimizerView, lr: float, long: _Long) -> float:
    """A learning rate whose steps are of a usual length; the first ones of Adam and its like change them by 0.02."""
    losses = one.losses
    if not math.isfinite(long.ratio):
        return rounded(lr / 100)
    trained = (
        one.facts.after > 0
        or any(load.into == "module" and load.matched for load in one.run.of(Loaded))
        or (losses.prior is not None and losses.finite and losses.finite[0] < losses.prior / 2)
    )
    if "ada" in one.facts.cls.lower() and not trained and long.step < 10:
        return rounded(min(lr / 3, lr * 0.02 / long.ratio))
    return rounded(min(lr / 10, lr * HEALTHY_RATIO / long.ratio))


def _far_too_long(one: OptimizerView, far: float, row: float, early: float) -> _Long | None:
    """Two steps or more that are far too long, or one that is longer than the weights."""
    ratios = _ratios(one, early)
    long = [(norms, value) for norms, value in ratios if value > far]
    gone = one.faded
    if len(long) < 2 and gone is not None and not gone.early:
        long = [(norms, value) for norms, value in ratios if value > row and norms.at < gone.lost[0][0].at]
    if len(long) < 2 and not any(value > 1 for _, value in long):
        return None
    norms, value = long[0]
    why = f"step {norms.number} changes the weights by {value:.2g} of their length (0.001 is usual)"
    return _Long(norms.at, norms.step, value, why)


def _ratios(one: OptimizerView, early: float) -> list[tuple[Norms, float]]:
    found = [(norms, ratio(one.run, norms)) for norms in one.samples if norms.number <= early]
    return [(norms, value) for norms, value in found if value is not None and math.isfinite(value)]


def _risen(one: OptimizerView, early: float) -> _Long | None:
    """Steps behind which the loss is three times what it was at the start."""
    losses, ratios = one.losses, _ratios(one, early)
    if adversarial(one.run, one.number) or _may_rise(one.run) or not losses.is_positive or not ratios:
        return None
    start = losses.values[0]
    for step, at, value in zip(losses.steps, losses.ats, losses.values, strict=True):
        if 0 < step <= early and 3 * start < value < math.inf:
            before = [entry for entry in ratios if entry[0].step <= step]
            norms, largest = max(before, key=lambda entry: entry[1], default=(ratios[0][0], 0.0))
            if largest < 3 * HEALTHY_RATIO:
                return None
            why = (f"the loss rises from {start:.3g} to {value:.3g} by step {step}, with steps of up to {largest:.2g} "
                   "of the weights")  # fmt: skip
            return _Long(min(norms.at, at), min(norms.step, step), largest, why)
    return None


def _may_rise(run: Run) -> bool:
    """Whether more reward makes a loss larger; of an interrupted run, which was not asked, whether it may."""
    of_scores = any(True for _ in run.of(Scored)) and not by_line(run)
    return weighs_rewards(run) or (of_scores and not run.answers("rewarded", "unknown"))


def _lost_a_number(one: OptimizerView, long: _Long) -> _Harm | None:
    bad = one.lost
    if bad is None or bad.at < long.at or not announced(one.run, one.number, FAR_TOO_LONG):
        return None
    return _Harm(f"a number is not finite at step {bad.step}", {"not_finite_at_step": bad.step})


def _ignores_input(one: OptimizerView, long: _Long) -> _Harm | None:
    asked = next((probed for probed in one.run.of(Probed) if ignores_input(probed)), None)
    if asked is None or one.losses.converged or one.lost is not None:
        return None
    return _Harm("the outputs do not depend on the input any more", dict(asked.evidence))


def _samples(one: OptimizerView) -> Iterator[tuple[int, list[Activations]]]:
    """The activations of each root as long as all numbers were finite."""
    bad = one.lost
    for root, taken in latest(one.run):
        samples = [sample for sample in taken if bad is None or sample.step < bad.step]
        if samples:
            yield root, samples


def _outputs_alike(one: OptimizerView, long: _Long) -> _Harm | None:
    for root, samples in _samples(one):
        outputs = told_apart(one.run, samples)
        spread = [(sample.at, output.spread) for sample, output in outputs if output.spread is not None]
        after = [value for at, value in spread if at >= long.at]
        before = [value for at, value in spread if at <= long.at] or [value for _, value in spread[:1]]
        if len(after) >= 2 and max(after[-2:]) < 1e-3 * before[0] and not one.losses.converged:
            return _Harm(
                f"the outputs stop depending on the input: their spread over the batch goes from {before[0]:.2g} to "
                f"{after[-1]:.2g}",
                {"spread_first": before[0], "spread_last": after[-1], "root": root},
            )
    return None


def _units_killed(one: OptimizerView, long: _Long) -> _Harm | None:
    for _, samples in _samples(one) if not one.losses.fell else ():
        alive = {unit.module for unit in samples[0].modules if unit.dead < 0.7}
        dead = [unit for unit in samples[-1].modules if unit.always_dead > 0.9 and unit.module in alive]
        if dead and samples[-1].at >= long.at:
            share = dead[0].always_dead
            return _Harm(f"{share:.0%} of the units of {dead[0].module} are zero for every input", {"dead": share})
    return None


def _gradient_gone(one: OptimizerView, long: _Long) -> _Harm | None:
    found = one.faded
    if found is None or found.early or one.losses.fell:
        return None
    first, gone = parameter_name(one.run, found.lost[0][1][0].parameter), found.lost[-1][1][0].grad
    return _Harm(f"the gradient of {first} vanishes, down to {gone:.2g}", {"gradient_last": gone})


def _stuck(one: OptimizerView, long: _Long) -> _Harm | None:
    """A loss that ends above its start, or peaks and ends where a constant guess is."""
    losses, prior = one.losses, one.losses.prior
    after = losses.since(long.at).finite
    if len(after) < 5 or adversarial(one.run, one.number) or not losses.is_positive:
        return None
    quarter = len(after) // 4
    if median(after[-quarter:]) < 0.8 * median(after[-2 * quarter : -quarter]):
        return None  # the last quarter lies well below the one before: such a loss stays nowhere yet
    if _may_rise(one.run):
        return None
    if prior is None and _one_at_a_time(one.run):
        return None  # the loss of one sample may begin low by chance
    start, peak = losses.values[0] if math.isfinite(losses.values[0]) else losses.first, max(after)
    numbers = {"loss_first": start, "loss_peak": peak, "loss_last": losses.last}
    if losses.last > (max(2 * start, 0.9 * prior) if prior else 10 * start):
        return _Harm(f"the loss stays at {losses.last:.3g}, where it began with {start:.3g}", numbers)
    told = prior is not None or long.ratio > FAR_TOO_LONG
    if told and peak > 1.5 * max(start, prior or 0.0) and losses.last > 0.9 * (prior or start):
        known = f", no better than a constant guess ({prior:.3g})" if prior else ""
        return _Harm(f"the loss peaks at {peak:.3g} and stays at {losses.last:.3g}{known}", numbers)
    return None


def _one_at_a_time(run: Run) -> bool:
    """Whether batches are of one sample."""
    rows = max((one.rows for one in run.of(Forward) if one.grad), default=0)
    return 1 in (rows, max((one.items for one in run.of(LossCall)), default=0))


_HARMS = (_lost_a_number, _ignores_input, _outputs_alike, _units_killed, _gradient_gone, _stuck)


@dataclass(frozen=True, slots=True)
class _Heavy:
    """A momentum of SGD with which a gradient goes on for fifty steps and more; 0.9 and 0.95 are usual."""

    lr: float
    momentum: float

    @property
    def effective(self) -> float:
        """The length that the steps along one gradient add up to, for a gradient of length one."""
        return self.lr / (1 - self.momentum)

    @property
    def is_high(self) -> bool:
        """Whether hardly any model learns with it: steps of 0.1 with a momentum of 0.9 add up to 1."""
        return self.effective >= 1.0


def _heavy(one: OptimizerView) -> _Heavy | None:
    lr, momentum = one.rate_at(0), max((group.momentum for group in one.facts.groups), default=0.0)
    is_heavy = "sgd" in one.facts.cls.lower() and 0.98 <= momentum < 1 and math.isfinite(lr)
    return _Heavy(lr, momentum) if is_heavy else None


def _swings(one: OptimizerView) -> _Harm | None:
    """A loss that goes up and down without end."""
    losses, late = one.losses, one.losses.finite[len(one.losses.finite) // 2 :]
    if len(late) < 10 or losses.fell or losses.converged or min(losses.finite) < 0:
        return None
    if adversarial(one.run, one.number) or _one_at_a_time(one.run):
        return None
    numbers = {"loss_first": losses.first, "loss_last": losses.last}
    if max(late) > max(2 * max(losses.first, losses.prior or 0.0), 5 * min(late)):
        words = f"the loss swings between {min(late):.3g} and {max(late):.3g}, and began with {losses.first:.3g}"
        return _Harm(words, numbers)
    size = max(5, len(losses.finite) // 20)
    parts = [median(losses.finite[one : one + size]) for one in range(0, len(losses.finite) - size + 1, size)]
    low, back = min(parts), max(parts[parts.index(min(parts)) :])
    if back > max(0.8 * losses.first, 2.5 * low):
        words = f"the loss had come down to {low:.3g} and goes up again to {back:.3g}, near where it began"
        return _Harm(words, numbers)
    return None


def _of_momentum(one: OptimizerView, heavy: _Heavy, long: _Long, harm: _Harm) -> Found:
    usual, usual_lr = 0.9, min(heavy.lr, 0.01)
    better = float(f"{usual_lr * (1 - heavy.momentum) / (1 - usual):.1g}")
    return Found(
        text=f"The learning rate {heavy.lr:g} of {one} is far too high: with momentum {heavy.momentum:g} the steps "
        f"along one gradient add up to lr / (1 - momentum) = {heavy.effective:.3g}"
        f"{f'; {long.why}' if long.why else ''}; then {harm.words}.",
        fix=f"{'' if heavy.lr == usual_lr else f'lr={usual_lr:g}, '}momentum={usual:g}  # lr / (1 - momentum) is then "
        f"{usual_lr / (1 - usual):.3g} instead of {heavy.effective:.3g}; or lr={better:g} with "
        f"momentum={heavy.momentum:g}",
        cause="Each gradient goes on for 1 / (1 - momentum) steps, far beyond the point where it was right, and back.",
        since=long.at,
        step=long.step,
        optimizer=one.number,
        evidence={
            "lr": heavy.lr, "momentum": heavy.momentum, "lr / (1 - momentum)": heavy.effective,
            "update_ratio": long.ratio, "usual_ratio": HEALTHY_RATIO, "better_lr": better,
        } | harm.numbers,
    )  # fmt: skip


@rule("AB502", "LR_TOO_LOW", "warning", explains=("LOSS_CONSTANT",), needs=(Stepped,))
def lr_too_low(
    run: Run, *, most: float = Limit(1e-6, "of the weights: a million such steps change them once; 0.001 is usual"),
    steps: float = Limit(20, "of a run, or after a warm-up"),
) -> Iterator[Found]:  # fmt: skip
    """Steps that change nothing although gradients are there."""
    unfinished = list(_unfinished(run))
    yield from unfinished
    for one in measured(run):
        if any(found.optimizer == one.number for found in unfinished):
            continue
        losses, asked = one.losses, _other_rate(one, FEW_OF_A_RATE)
        if asked is not None and _is_too_low(one, asked):
            yield _found_by_trial(one, asked)
            continue
        ratios = [value for norms in one.samples if (value := ratio(run, norms)) is not None]
        lrs = one.rates
        if not losses.stands or losses.last < 1e-4 or not lrs or max(lrs) == 0 or _still_rises(lrs, steps):
            continue
        if len(one.steps) < steps or len(ratios) < 5 or max(ratios) >= most or not _rate_is_to_blame(one):
            continue
        largest, lr = max(ratios), max(lrs)
        better = rounded(min(lr * HEALTHY_RATIO / largest, 1e-3)) if largest > 0 else 1e-3
        yield Found(
            text=f"The learning rate {lr:g} of {one} is so low that nothing changes: a step changes the weights by "
            f"{largest:.2g} of their length (0.001 is usual), and the loss stays at {losses.last:.3g}.",
            fix=one.with_rate(max(better, rounded(lr * 10))),
            cause="Updates of this size would need millions of steps, or are rounded away.",
            since=one.samples[0],
            optimizer=one.number,
            evidence={"lr": lr, "update_ratio": largest, "loss_first": losses.first, "loss_last": losses.last},
        )


def _still_rises(lrs: list[float], steps: float) -> bool:
    """Whether a rate is on its way up: a warm-up that has not been over for as long as it took, and for 20 steps."""
    if max(lrs) <= 2 * next((lr for lr in lrs if lr > 0), 0.0):
        return False
    peak = next(place for place, lr in enumerate(lrs) if lr >= 0.999 * max(lrs))
    return len(lrs) - peak < max(steps, peak)


def _rate_is_to_blame(one: OptimizerView) -> bool:
    """Whether a usual learning rate would move the weights: a vanished gradient or a lost write would not."""
    norms, half = one.samples[-1], {"bfloat16", "float16"}
    found = [each for each in entries(one.run, norms) if each.is_matrix and each.parameter.dtype not in half]
    adaptive = "ada" in one.facts.cls.lower()
    usual = [each for each in found if each.grad > (1e-8 if adaptive else 1e-4 * each.weight)]
    return len(usual) * 2 > len(found) and one.rate_at(norms.number) < (1e-5 if adaptive else 1e-3)


_WARM = 0.2
"""A share of the rate that a warm-up leads to: one that ends below it is counted in other units."""

_CALLS, _APART = 4, 5
"""The least calls of a schedule, and the least steps between two of them, by which they are seen to be epochs."""


def _unfinished(run: Run) -> Iterator[Found]:
    """Warm-ups that are stepped once an epoch, and are far from their end when the run is over."""
    for schedule in schedules(run):
        one, base, calls = schedule.optimizer, schedule.peak, [call for call in schedule.calls if call.after]
        rates = [max(call.after) for call in calls]
        is_of_epochs = len(calls) >= _CALLS and _APART * len(calls) <= len(one.steps)
        if not is_of_epochs or base <= 0 or one.losses.converged or rates != sorted(set(rates)):
            continue
        used = max(max(step.lrs, default=0.0) for step in one.steps)
        if not 0 < used < _WARM * base:
            continue
        each = len(one.steps) // len(calls)
        yield Found(
            text=f"The learning rate of {one} never passes {used:.2g}, {used / base:.0%} of its {base:g}: the warm-up "
            f"of {schedule} ({schedule.facts.cls}) is stepped once in {each} steps, {len(calls)} times, and has not "
            "ended.",
            fix=f"step {schedule} after each step of {one}, or give it the number of epochs that its warm-up should "
            "take",
            cause="The schedule counts its calls; a warm-up of so many batches lasts as many epochs here.",
            since=calls[0],
            optimizer=one.number,
            evidence={"calls": len(calls), "steps": len(one.steps), "highest_lr": used, "initial_lr": base},
        )


_MOMENTS = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax"})


@rule(
    "AB677",
    "BETAS_EXCHANGED",
    "warning",
    explains=("NOT_LEARNING", "LR_TOO_HIGH", "LR_TOO_LOW", "EXPLODING"),
    slows=True,
)
def betas_exchanged(
    run: Run, *, times: float = Limit(5, "longer than the squares: usual are means of the squares that go back farther")
) -> Iterator[Found]:
    """Optimizers whose gradients are averaged over far more steps than the squares of these."""
    for number, facts in run.optimizers.items():
        one = OptimizerView(run, number)
        for group in facts.groups if facts.cls in _MOMENTS and one.steps else ():
            first, second = group.momentum, group.second
            if 0 < second < first < 1 and 1 - second > times * (1 - first):
                yield Found(
                    text=f"{one} has betas=({first:g}, {second:g}): its gradients are averaged over about "
                    f"{1 / (1 - first):.0f} steps, and their squares, by which they are divided, over "
                    f"{1 / (1 - second):.0f}.",
                    fix=f"{facts.cls}(model.parameters(), betas=({second:g}, {first:g}))",
                    cause="The first number is for the mean of the gradients and the second for that of their squares; "
                    "they are exchanged.",
                    since=0,
                    where=facts,
                    optimizer=number,
                    evidence={"first": first, "second": second},
                )
                break
