"""Rules of the family schedule: what drives the learning rate; how high it is stands in ``rates``."""

from collections.abc import Iterator

from anybatch.doctor.rules.courses import course
from anybatch.doctor.rules.measures import optimizer_name, optimizer_place, with_rate
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Epoch, Loaded, Scheduled, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.tables import SchedulerFacts

_LONG = 10
"""Steps that a learning rate of zero, or one that collapsed, must last to be spoken of."""


def _stepped(run: Run) -> dict[int, list[Stepped]]:
    found: dict[int, list[Stepped]] = {}
    for one in run.of(Stepped):
        if one.lrs:
            found.setdefault(one.optimizer, []).append(one)
    return found


@rule("AB503", "LR_ZERO", "warning", explains=("LOSS_CONSTANT", "LR_COLLAPSED"))
def lr_zero(run: Run) -> Iterator[Finding]:
    """Steps with learning rate zero for all groups."""
    for number, steps in _stepped(run).items():
        zero = [one for one in steps if max(one.lrs) == 0]
        tail = 0
        while tail < len(steps) and max(steps[-1 - tail].lrs) == 0:
            tail += 1
        if tail < _LONG or tail < len(steps) / 4 or len(zero) > tail + _LONG:
            continue
        first = steps[len(steps) - tail]
        used = max(max(one.lrs) for one in steps)
        drives = [one for one in run.schedulers.values() if one.optimizer == number]
        driver = f", driven by {_scheduler_name(drives[0])} ({drives[0].cls})" if drives else ""
        yield Finding(
            message=f"The learning rate of {optimizer_name(run, number)} is 0 from step {first.number} on, for {tail} "
            f"of {len(steps)} steps{driver}.",
            place=optimizer_place(run, number),
            fix=_stretched(drives[0], len(steps)) if drives else with_rate(run, number, used or 1e-3),
            cause="The optimizer steps, but with a learning rate of zero no parameter changes.",
            evidence={"steps_at_zero": tail, "steps": len(steps), "highest_lr": used},
            step=first.step,
            at=first.at,
        )


def _scheduler_name(facts: SchedulerFacts) -> str:
    return facts.variable or "scheduler"


def _stretched(facts: SchedulerFacts, steps: int) -> str:
    for option in ("total_steps", "T_max", "total_iters"):
        if option in facts.options:
            return f"{_scheduler_name(facts)} = {facts.cls}({option}={steps}, ...)  # it was {facts.options[option]}"
    return f"{_scheduler_name(facts)}: let its function reach 0 only at the last of {steps} steps"


@rule("AB504", "LR_COLLAPSED", "warning", explains=("LR_TOO_LOW",))
def lr_collapsed(run: Run) -> Iterator[Finding]:
    """Rates that fall below a thousandth for half of the run."""
    for number, steps in _stepped(run).items():
        if course(run, number).converged:
            continue
        rates = [max(one.lrs) for one in steps]
        highest = max(rates)
        first = next((index for index in range(len(rates)) if max(rates[index:]) < 1e-3 * highest), None)
        if first is None or highest == 0 or max(rates[first:]) == 0:
            continue
        rest = len(steps) - first
        if rest < max(_LONG, len(steps) / 2):
            continue
        yield Finding(
            message=f"The learning rate of {optimizer_name(run, number)} falls from {highest:g} to {rates[first]:.2g} "
            f"by step {steps[first].number} and stays below a thousandth for {rest} of {len(steps)} steps.",
            place=optimizer_place(run, number),
            fix="Let the schedule fall over the whole run: gamma ** number of steps should be about 0.01.",
            cause="Training ends where the rate collapses.",
            evidence={"highest_lr": highest, "lr": rates[first], "last_lr": rates[-1], "steps_left": rest},
            step=steps[first].step,
            at=steps[first].at,
        )


@rule("AB505", "SCHED_TOO_OFTEN", "warning", explains=("LR_COLLAPSED", "LR_ZERO", "LR_TOO_LOW", "LOSS_CONSTANT"))
def sched_too_often(run: Run) -> Iterator[Finding]:
    """Schedules that are over long before the run is."""
    for number, facts in run.schedulers.items():
        if course(run, facts.optimizer).converged:
            continue
        calls = [one for one in run.of(Scheduled) if one.scheduler == number]
        steps = _stepped(run).get(facts.optimizer, [])
        if len(calls) < 10 or not steps or len(calls) < 0.8 * len(steps):
            continue
        per_epoch = _batches_of_an_epoch(run)
        reason = _over(facts, calls, steps, per_epoch)
        if per_epoch == 1 or not reason:
            continue
        options = ", ".join(
            f"{name}={facts.options[name]}"
            for name in ("step_size", "gamma", "milestones", "T_max", "patience", "factor")
            if name in facts.options
        )
        name = _scheduler_name(facts)
        yield Finding(
            message=f"{name} ({facts.cls}{f', {options}' if options else ''}) is stepped after every batch, "
            f"{len(calls)} times in {len(steps)} steps: {reason}.",
            place=Place(optimizer=optimizer_name(run, facts.optimizer), file=calls[0].file, line=calls[0].line),
            fix=f"{name}.step()  # once per epoch, outside the loop over batches",
            cause="The schedule counts its calls; made for epochs, it is over within the first ones.",
            evidence={"calls": len(calls), "steps": len(steps), "batches_per_epoch": per_epoch or None,
                      "highest_lr": max(max(one.lrs) for one in steps), "last_lr": max(steps[-1].lrs)},
            step=calls[0].step,
            at=calls[0].at,
        )  # fmt: skip


_FOR_EPOCHS = ("StepLR", "MultiStepLR", "ExponentialLR", "ReduceLROnPlateau")
"""Schedules whose options are mostly counted in epochs."""


def _batches_of_an_epoch(run: Run) -> int:
    """How many batches the longest loader gives; 0 if there is none."""
    return max((one.batches for one in run.of(Epoch) if one.batches > 0), default=0)


def _over(facts: SchedulerFacts, calls: list[Scheduled], steps: list[Stepped], per_epoch: int) -> str:
    """Why the schedule does not fit the run, empty if it does."""
    rates = [max(one.lrs) for one in steps]
    highest = max(rates)
    fallen = next((index for index in range(len(rates)) if max(rates[index:]) < 0.01 * highest), None)
    half = len(steps) / 2
    limit = max(per_epoch, half) if facts.cls in _FOR_EPOCHS else min(per_epoch, len(steps)) if per_epoch > 1 else half
    counted = per_epoch > 1 or facts.cls in _FOR_EPOCHS
    if fallen is not None and counted and rates[fallen] > 0 and fallen <= min(limit, len(steps) - _LONG):
        return f"the learning rate falls from {highest:g} to {rates[fallen]:.2g} within {fallen} steps"
    period = facts.options.get("T_max", 0)
    swings = facts.cls == "CosineAnnealingLR" and period > 0 and len(calls) > 4 * period
    if swings and per_epoch > 2 * period:
        return f"its T_max of {period} is passed {len(calls) // period} times, and the rate swings up and down"
    return ""


@rule("AB506", "SCHED_STALE_OPT", "error", explains=("LR_TOO_HIGH", "LR_TOO_LOW"))
def sched_stale_opt(run: Run) -> Iterator[Finding]:
    """Schedulers whose optimizer does not step."""
    steps = _stepped(run)
    for number, facts in run.schedulers.items():
        calls = [one for one in run.of(Scheduled) if one.scheduler == number]
        last_own = max((one.at for one in steps.get(facts.optimizer, [])), default=-1)
        others = {other: [one for one in taken if one.at > last_own] for other, taken in steps.items()}
        stepping = [other for other, taken in others.items() if other != facts.optimizer and len(taken) >= 2]
        begin = min((others[other][0].at for other in stepping), default=0)
        idle = [one for one in calls if stepping and one.at > begin]
        moved = {rate for one in idle for rate in one.after} - {rate for one in idle[:1] for rate in one.before}
        free = [other for other in stepping if not _driven(run, other, number)]
        if len(idle) < 2 or not free or any(set(one.lrs) & moved for other in free for one in others[other]):
            continue
        own = optimizer_name(run, facts.optimizer) if facts.optimizer in run.optimizers else "an optimizer"
        name, other_name = _scheduler_name(facts), optimizer_name(run, free[0])
        yield Finding(
            message=f"{name} ({facts.cls}) drives {own}{_made(run, facts.optimizer)}, which does not step; "
            f"{other_name}{_made(run, free[0])} steps, with its learning rate at {max(others[free[0]][-1].lrs):g}.",
            place=Place(optimizer=other_name, file=facts.file, line=facts.line),
            fix=f"{name} = {facts.cls}({other_name}, ...)  # after the line that makes {other_name}",
            cause="The scheduler holds the optimizer object that it was given, which was replaced.",
            evidence={"scheduler_steps": len(idle), "optimizer_steps": len(others[free[0]])},
            step=idle[1].step,
            at=idle[0].at,
        )


def _driven(run: Run, optimizer: int, but: int) -> bool:
    """Whether another scheduler that is stepped drives an optimizer."""
    stepped = {one.scheduler for one in run.of(Scheduled)} - {but}
    return any(run.schedulers[one].optimizer == optimizer for one in stepped if one in run.schedulers)


def _made(run: Run, number: int) -> str:
    facts = run.optimizers.get(number)
    return f" (made in line {facts.line})" if facts and facts.line else ""


@rule("AB507", "LR_IGNORED_ON_RESUME", "warning")
def lr_ignored_on_resume(run: Run) -> Iterator[Finding]:
    """Rates that a loaded state has replaced."""
    for loaded in run.of(Loaded):
        changed = loaded.into == "optimizer" and loaded.lrs_before != loaded.lrs_after
        after = [one for one in _stepped(run).get(loaded.number, []) if one.at > loaded.at]
        if not changed or not loaded.lrs_before or not after or any(one.lrs != loaded.lrs_after for one in after):
            continue
        if any(one.optimizer == loaded.number for one in run.schedulers.values()):
            continue
        if any(one.at > loaded.at for one in run.of(Scheduled)):
            continue
        if any(one.into == "scheduler" for one in run.of(Loaded)):
            continue
        name = loaded.variable or optimizer_name(run, loaded.number)
        asked, used = max(loaded.lrs_before), max(loaded.lrs_after)
        yield Finding(
            message=f"{name} was made with learning rate {asked:g}, but load_state_dict set it to {used:g}, which all "
            f"{len(after)} later steps used.",
            place=Place(optimizer=name, file=loaded.file, line=loaded.line),
            fix=f"for group in {name}.param_groups: group['lr'] = {asked:g}  # after load_state_dict",
            cause="The state of an optimizer holds its learning rate, and loading it overwrites the one asked for.",
            evidence={"asked": asked, "used": used, "steps": len(after)},
            step=after[0].step,
            at=loaded.at,
        )
