"""Rules of the family schedule: a function that gives a learning rate where a factor belongs."""

from collections.abc import Iterator

from anybatch.doctor.rules.measures import optimizer_name, optimizer_place
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Scheduled, Stepped
from anybatch.records.findings import Finding
from anybatch.records.runs import Run

_LEAST = 10  # steps
_SAME = 1e-6
_UNUSUAL = 0.5
"""Rates from here on are not told from their squares."""


@rule(
    "AB508",
    "LAMBDA_GIVES_RATE",
    "warning",
    "The function of a LambdaLR gives a rate where it should give a factor",
    """
## What is seen

The highest learning rate of the run is the square of the one that the optimizer was made with, in more than one step,
and a `LambdaLR` sets it.

## Why it matters

`LambdaLR` multiplies the optimizer's rate by what its function returns. A function that returns the rate itself makes
1e-3 to 1e-6, and hardly anything moves.

## What to change

```python
schedule = LambdaLR(optimizer, lambda epoch: 0.95**epoch)      # not lr * 0.95**epoch
```

or make the optimizer with `lr=1.0`, so that the function's result is the rate.

## When it is fine

It never is; a warm-up passes the square of the rate on its way up, and is silent.

## Source

The documentation of `torch.optim.lr_scheduler.LambdaLR`: "the initial lr times a given function".
""",
    explains=("LR_TOO_LOW", "LR_COLLAPSED", "LOSS_CONSTANT"),
)
def lambda_gives_rate(run: Run) -> Iterator[Finding]:
    """Rates that are the square of what was asked for."""
    for facts in run.schedulers.values():
        optimizer = run.optimizers.get(facts.optimizer)
        if facts.cls != "LambdaLR" or optimizer is None or not 0 < optimizer.default_lr < _UNUSUAL:
            continue
        steps = [one for one in run.of(Stepped) if one.optimizer == facts.optimizer and one.lrs]
        wrong, rates = optimizer.default_lr**2, [max(one.lrs) for one in steps]
        if len(steps) < _LEAST or abs(max(rates) - wrong) > _SAME * wrong or rates.count(max(rates)) < 2:
            continue
        call = next((one for one in run.of(Scheduled) if one.scheduler == facts.scheduler), None)
        name = optimizer_name(run, facts.optimizer)
        place = optimizer_place(run, facts.optimizer)
        yield Finding(
            message=f"The learning rate of {name} is never above {max(rates):g}, the square of the "
            f"{optimizer.default_lr:g} that it was made with: the function of the LambdaLR gives a rate.",
            place=place,
            fix=f"{facts.variable or 'scheduler'} = LambdaLR({name}, lambda step: ...)  # a factor: 1.0 leaves "
            f"{optimizer.default_lr:g} as it is",
            cause="LambdaLR multiplies the rate of the optimizer by what the function returns.",
            evidence={"lr": optimizer.default_lr, "highest_lr": max(rates), "steps": len(steps)},
            step=steps[0].step,
            at=call.at if call is not None else steps[0].at,
        )
