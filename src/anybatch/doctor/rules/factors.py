"""A rule of the family schedule: functions of schedules that give a rate where a factor is meant."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from anybatch.doctor.rules.courses import course
from anybatch.doctor.rules.measures import optimizer_name
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Scheduled, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

_LONG = 20
"""Steps after which the largest factor is known."""


@rule(
    "AB508",
    "LAMBDA_GIVES_RATE",
    "warning",
    explains=("LR_TOO_LOW", "LR_COLLAPSED", "LOSS_CONSTANT", "UPDATE_LOST_PRECISION", "SCHED_TOO_OFTEN"),
)
def lambda_gives_rate(run: Run) -> Iterator[Finding]:
    """Rates that are multiplied with themselves."""
    for number, facts in run.schedulers.items():
        base = _base(facts.options.get("base_lrs"))
        taken = [one for one in run.of(Stepped) if one.optimizer == facts.optimizer and one.lrs]
        if facts.cls != "LambdaLR" or base is None or len(taken) < _LONG:
            continue
        rates = [one.lrs[0] for one in taken]
        highest = max(rates)
        if not math.isclose(highest, base * base, rel_tol=1e-6) or rates.index(highest) == len(rates) - 1:
            continue
        name = facts.variable or "schedule"
        losses = course(run, facts.optimizer)
        calls = [one for one in run.of(Scheduled) if one.scheduler == number]
        yield Finding(
            message=f"The function of {name} (LambdaLR) gives {base:g} at its highest, which is the learning rate of "
            f"{optimizer_name(run, facts.optimizer)} itself: multiplied with it the rate is {highest:.3g}.",
            place=Place(optimizer=optimizer_name(run, facts.optimizer), file=facts.file, line=facts.line),
            fix=f"{name} = LambdaLR({optimizer_name(run, facts.optimizer)}, {_divided(facts.options, base)})"
            "  # a factor of lr, 1 at its highest",
            cause="LambdaLR multiplies the rate of the optimizer with what its function gives; a rate is squared.",
            evidence={"initial_lr": base, "highest_factor": highest / base, "highest_lr": highest,
                      "scheduler_steps": len(calls), "steps": len(taken)},
            step=taken[0].step,
            at=min(one.at for one in run.of(Norms, Stepped) if getattr(one, "optimizer", None) == facts.optimizer),
            severity="info" if losses.converged else "",
        )  # fmt: skip


def _divided(options: Mapping[str, Any], base: float) -> str:
    """The function of the user's, by its name where it has one, divided by the rate."""
    names = options.get("lr_lambdas")
    named = str(names[0]) if isinstance(names, list) and names else ""
    if named.isidentifier():
        return f"lambda epoch: {named}(epoch) / {base:g}"
    return f"lambda epoch: ... / {base:g}"


def _base(found: object) -> float | None:
    """The rate of the first group, where its square can be told from it."""
    if not isinstance(found, list) or not found or not isinstance(found[0], (int, float)):
        return None
    return float(found[0]) if 0 < found[0] < 0.5 else None
