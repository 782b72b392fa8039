"""Rules of the family schedule: what drives the learning rate; how high it is stands in ``rates``."""

import itertools
import math
from collections.abc import Iterator

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import RUNS_AWAY, Found, Limit, rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.optimizing import OptimizerView, ScheduleView, optimizers, schedules
from anybatch.doctor.views.outcomes import ENOUGH_STEPS, outcome
from anybatch.records.events import Ended, Epoch, Loaded, Scheduled, Stepped
from anybatch.records.runs import Run

_LASTS = "steps, to be spoken of: the last ones of a schedule may be this low"


@rule("AB503", "LR_ZERO", "warning", explains=("LOSS_CONSTANT", "LR_COLLAPSED"))
def lr_zero(run: Run, *, steps: float = Limit(10, _LASTS)) -> Iterator[Found]:
    """Steps with learning rate zero for all groups."""
    for one in optimizers(run):
        rates = one.rates
        tail = next((index for index, rate in enumerate(reversed(rates)) if rate), len(rates))
        if tail < steps or tail < len(rates) / 4 or rates.count(0) > tail + steps:
            continue
        first, used = one.rated[len(rates) - tail], max(rates)
        drives = [each for each in schedules(run) if each.optimizer.number == one.number]
        driver = f", driven by {drives[0]} ({drives[0].facts.cls})" if drives else ""
        yield Found(
            text=f"The learning rate of {one} is 0 from step {first.number} on, for {tail} of {len(rates)} "
            f"steps{driver}.",
            fix=_stretched(drives[0]) if drives else one.with_rate(used or 1e-3),
            cause="The optimizer steps, but with a learning rate of zero no parameter changes.",
            since=first,
            where=one.facts,
            optimizer=one.number,
            evidence={"steps_at_zero": tail, "steps": len(rates), "highest_lr": used},
        )


def _stretched(one: ScheduleView) -> str:
    steps = len(one.optimizer.rated)
    for option in ("total_steps", "T_max", "total_iters"):
        if option in one.facts.options:
            return f"{one} = {one.facts.cls}({option}={steps}, ...)  # it was {one.facts.options[option]}"
    return f"{one}: let its function reach 0 only at the last of {steps} steps"


def _fallen(rates: list[float], share: float) -> int | None:
    """The first step from which on a rate stays below a share of its highest."""
    limit = share * max(rates)
    below = next((index for index, rate in enumerate(reversed(rates)) if rate > 1.001 * limit), len(rates))
    return len(rates) - below if below else None


@rule("AB504", "LR_COLLAPSED", "warning", explains=("LR_TOO_LOW",))
def lr_collapsed(
    run: Run, *, share: float = Limit(1e-3, "of the highest; schedules end at about 0.01"),
    steps: float = Limit(10, _LASTS), rest: float = Limit(0.5, "of the run"),
) -> Iterator[Found]:  # fmt: skip
    """Rates that fall below a thousandth for half of the run."""
    for one in optimizers(run):
        done, rates = one.rated, one.rates
        first = _fallen(rates, share) if rates else None
        if first is None or max(rates[first:]) == 0 or one.losses.converged:
            continue
        left = len(rates) - first
        if left >= max(steps, rest * len(rates)):
            yield Found(
                text=f"The learning rate of {one} falls from {max(rates):g} to {rates[first]:.2g} by step "
                f"{done[first].number} and stays below a thousandth for {left} of {len(rates)} steps.",
                fix="Let the schedule fall over the whole run: gamma ** number of steps should be about 0.01.",
                cause="Training ends where the rate collapses.",
                since=done[first],
                where=one.facts,
                optimizer=one.number,
                evidence={
                    "highest_lr": max(rates), "lr": rates[first], "last_lr": rates[-1], "steps_left": left,
                },
            )  # fmt: skip


@rule("AB505", "SCHED_TOO_OFTEN", "warning", explains=("LR_COLLAPSED", "LR_ZERO", "LR_TOO_LOW", "LOSS_CONSTANT"))
def sched_too_often(
    run: Run, *, calls: float = Limit(10, "fewer may be epochs"), share: float = Limit(0.8, "calls for each step"),
    steps: float = Limit(10, _LASTS),
) -> Iterator[Found]:  # fmt: skip
    """Schedules that are over long before the run is."""
    per_epoch = max((one.batches for one in run.of(Epoch) if one.batches > 0), default=0)
    for one in schedules(run):
        done, rates = one.optimizer.rated, one.optimizer.rates
        too_few = len(one.calls) < max(calls, share * len(done))
        if too_few or not done or per_epoch == 1 or one.optimizer.losses.converged:
            continue
        reason = _over(one, per_epoch, steps)
        shown = ("step_size", "gamma", "milestones", "T_max", "patience", "factor")
        options = [f"{name}={one.facts.options[name]}" for name in shown if name in one.facts.options]
        if reason:
            yield Found(
                text=f"{one} ({', '.join([one.facts.cls, *options])}) is stepped after every batch, {len(one.calls)} "
                f"times in {len(done)} steps: {reason}.",
                fix=f'"interval": "epoch" beside {one} in what configure_optimizers returns; of another trainer, a '
                "schedule that is over after all of its steps"
                if _by_a_trainer(run, one)
                else f"{one}.step()  # once per epoch, outside the loop over batches",
                cause="The schedule counts its calls; made for epochs, it is over within the first ones.",
                since=one.calls[0],
                optimizer=one.optimizer.number,
                evidence={
                    "calls": len(one.calls), "steps": len(done), "batches_per_epoch": per_epoch or None,
                    "highest_lr": max(rates), "last_lr": rates[-1],
                },
            )  # fmt: skip


def _by_a_trainer(run: Run, one: ScheduleView) -> bool:
    """Whether one line of the user's has the data loaded, the optimizer stepped and the schedule, as that of a fit."""
    loaded = {(each.file, each.line) for each in run.of(Epoch) if each.file}
    return len(loaded) == 1 and loaded == {(each.file, each.line) for each in (*one.calls, *one.optimizer.steps)}


def _over(one: ScheduleView, per_epoch: int, steps: float) -> str:
    """Why the schedule does not fit the run, empty if it does."""
    rates, half = one.optimizer.rates, len(one.optimizer.rated) / 2
    fallen = _fallen(rates, 0.01) or None  # not one that was never up
    for_epochs = one.facts.cls in ("StepLR", "MultiStepLR", "ExponentialLR", "ReduceLROnPlateau")
    limit = max(per_epoch, half) if for_epochs else min(per_epoch, len(rates)) if per_epoch > 1 else half
    counted = per_epoch > 1 or for_epochs
    if fallen is not None and _fallen(rates[fallen - 1 : fallen + 1], 0.01) is not None:
        fallen = None  # by one call, so that the number of calls is not to blame
    if fallen is not None and counted and rates[fallen] > 0 and fallen <= min(limit, len(rates) - steps):
        return f"the learning rate falls from {max(rates):g} to {rates[fallen]:.2g} within {fallen} steps"
    period = one.facts.options.get("T_max", 0) if one.facts.cls == "CosineAnnealingLR" else 0
    if period > 0 and len(one.calls) > 4 * period and per_epoch > 2 * period:
        return f"its T_max of {period} is passed {len(one.calls) // period} times, and the rate swings up and down"
    return ""


@rule("AB506", "SCHED_STALE_OPT", "error", explains=(*RUNS_AWAY, "LR_TOO_LOW"), needs=(Scheduled,))
def sched_stale_opt(run: Run, *, steps: float = Limit(2, "one may be of another part of the run")) -> Iterator[Found]:
    """Schedulers whose optimizer does not step."""
    for one in schedules(run):
        done = one.optimizer.rated
        end = done[-1].at if done else -1
        others = {each: later for each in optimizers(run) if len(later := _after(each, end)) >= steps}
        others.pop(one.optimizer, None)
        begin = min((later[0].at for later in others.values()), default=0)
        idle = [call for call in one.calls if others and call.at > begin]
        moved = {rate for call in idle for rate in call.after} - {rate for call in idle[:1] for rate in call.before}
        driven = {each.optimizer.number for each in schedules(run) if each.calls and each is not one}
        free = [each for each in others if each.number not in driven]
        if len(idle) < steps or not free or any(moved & set(step.lrs) for each in free for step in others[each]):
            continue
        own, other = one.optimizer, free[0]
        name = str(own) if own.number in run.optimizers else "an optimizer"
        yield Found(
            text=f"{one} ({one.facts.cls}) drives {name}{_made(own)}, which does not step; {other}{_made(other)} "
            f"steps, with its learning rate at {max(others[other][-1].lrs):g}.",
            fix=f"{one} = {one.facts.cls}({other}, ...)  # after the line that makes {other}",
            cause="The scheduler holds a reference to the old optimizer object, which was replaced.",
            since=idle[0],
            step=idle[min(1, len(idle) - 1)],
            where=one.facts,
            optimizer=other.number,
            evidence={"scheduler_steps": len(idle), "optimizer_steps": len(others[other])},
        )


def _after(one: OptimizerView, at: int) -> list[Stepped]:
    return [step for step in one.rated if step.at > at]


def _made(one: OptimizerView) -> str:
    return f" (made in line {one.facts.line})" if one.facts.line else ""


@rule("AB507", "LR_IGNORED_ON_RESUME", "warning", explains=RUNS_AWAY, needs=(Loaded,))
def lr_ignored_on_resume(run: Run) -> Iterator[Found]:
    """Rates that a loaded state has replaced, and those of a schedule that was saved and not loaded."""
    yield from say(run, "AB507")
    for load in run.of(Loaded):
        one = OptimizerView(run, load.number)
        after = _after(one, load.at) if load.into == "optimizer" else []
        replaced = load.lrs_before and load.lrs_before != load.lrs_after
        if not replaced or not after or any(step.lrs != load.lrs_after for step in after):
            continue
        scheduled = any(each.optimizer.number == load.number for each in schedules(run)) or any(
            call.at > load.at for call in run.of(Scheduled)
        )
        if scheduled or any(other.into == "scheduler" for other in run.of(Loaded)):
            continue
        name, asked, used = load.variable or str(one), max(load.lrs_before), max(load.lrs_after)
        yield Found(
            text=f"{name} was made with learning rate {asked:g}, but load_state_dict set it to {used:g}, which all "
            f"{len(after)} later steps used.",
            fix=f"for group in {name}.param_groups: group['lr'] = {asked:g}  # after load_state_dict",
            cause="The state of an optimizer holds its learning rate, and loading it overwrites the one asked for.",
            since=load,
            step=after[0],
            optimizer=name,
            evidence={"asked": asked, "used": used, "steps": len(after)},
        )


@rule(
    "AB508", "LAMBDA_GIVES_RATE", "warning",
    explains=("LR_TOO_LOW", "LR_COLLAPSED", "LOSS_CONSTANT", "UPDATE_LOST_PRECISION", "SCHED_TOO_OFTEN"),
)  # fmt: skip
def lambda_gives_rate(run: Run, *, steps: float = Limit(20, "then the largest factor is known")) -> Iterator[Found]:
    """Rates that are multiplied with themselves."""
    for one in schedules(run):
        bases = one.facts.options.get("base_lrs")
        base = bases[0] if isinstance(bases, list) and bases and isinstance(bases[0], int | float) else 0.0
        if one.facts.cls != "LambdaLR" or not 0 < base < 0.5 or len(one.optimizer.rated) < steps:
            continue  # from 0.5 on a square can't be told from a rate
        optimizer, done = one.optimizer, one.optimizer.rated
        rates = [step.lrs[0] for step in done]
        highest = max(rates)
        if not math.isclose(highest, base * base, rel_tol=1e-6) or rates.index(highest) == len(rates) - 1:
            continue
        names = one.facts.options.get("lr_lambdas")
        named = str(names[0]) if isinstance(names, list) and names else ""
        given, name = f"{named}(epoch)" if named.isidentifier() else "...", one.facts.variable or "schedule"
        yield Found(
            text=f"The function of {name} (LambdaLR) returns {base:g} at its highest, which is the learning rate of "
            f"{optimizer} itself: multiplied by it the rate is {highest:.3g}.",
            fix=f"{name} = LambdaLR({optimizer}, lambda epoch: {given} / {base:g})  # a factor of lr, 1 at its highest",
            cause="LambdaLR multiplies the optimizer's rate by what its function returns, so a rate gets squared.",
            since=min(fact.at for fact in (*optimizer.steps[:1], *optimizer.samples[:1])),
            step=done[0],
            where=one.facts,
            optimizer=optimizer.number,
            evidence={
                "initial_lr": base, "highest_factor": highest / base, "highest_lr": highest,
                "scheduler_steps": len(one.calls), "steps": len(done),
            },
            severity="info" if course(run, optimizer.number).converged else "",
        )  # fmt: skip


@rule("AB510", "WARMUP_TOO_LONG", "warning", explains=("LR_TOO_LOW", "LOSS_CONSTANT"), needs=(Ended,))
def warmup_too_long(
    run: Run, *, steps: float = Limit(ENOUGH_STEPS, "fewer may be a try"),
    share: float = Limit(0.5, "of the rate that it leads to: one that ends above it is nearly over"),
) -> Iterator[Found]:  # fmt: skip
    """Rates that rise at every step until the end of the run, and stay far below what the optimizer was made with."""
    if outcome(run).word == "learning" or any(one.exit_code for one in run.of(Ended)):
        return
    resumed = any(one.into in ("optimizer", "scheduler") for one in run.of(Loaded))  # perhaps a part of a longer run
    for one in optimizers(run):
        rates = one.rates
        drives = [each for each in schedules(run) if each.optimizer.number == one.number and each.calls]
        top = max([each.peak for each in drives] or [one.facts.default_lr])
        cyclic = any("Cyclic" in each.facts.cls or "Restarts" in each.facts.cls for each in drives)
        if len(rates) < steps or cyclic or one.losses.converged or rates[-1] >= share * top:
            continue
        if not _rises(rates, 0.05 if resumed else 0.5):
            continue
        of = f"{drives[0].facts.cls} leads to" if drives and "peak" in drives[0].facts.options else "it was made with"
        yield Found(
            text=f"The learning rate of {one} rises at every one of {len(rates)} steps, from {rates[0]:.3g} to "
            f"{rates[-1]:.3g}: the warm-up is longer than the run, and the {top:g} that {of} is never reached.",
            fix=f"a warm-up of {max(1, len(rates) // 20)} of {len(rates)} steps",
            cause="A warm-up takes the first few percent of a run; counted for a longer one, it is all there is.",
            since=one.rated[0],
            where=drives[0].facts if drives else one.facts,
            optimizer=one.number,
            evidence={"first_lr": rates[0], "last_lr": rates[-1], "initial_lr": top, "steps": len(rates)},
        )


def _rises(rates: list[float], begin: float) -> bool:
    """Whether rates rise at each step from a low share; not by the same factor, as in a search for the best one."""
    at_each = all(later > before for before, later in itertools.pairwise(rates))
    return at_each and rates[0] < begin * rates[-1] and rates[len(rates) // 2] > 0.15 * rates[-1]
