"""Rules of the family schedule fire on their fault and are quiet on what only looks like it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recorder import Doctor
from anybatch.records.events import Ended, Epoch, Loaded, Scheduled, Stepped
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run
from anybatch.records.samples import NonFinite, Scored
from anybatch.records.tables import GroupFacts, OptimizerFacts, SchedulerFacts
from number_runs import WEIGHT, Training, call, falling, fires, quiet, silent


def stuck(step: int) -> float:
    """A loss that jumps up in the first steps and stays at the prior of ten classes."""
    return 0.01 if step < 2 else 4.7 if step < 5 else 2.4


def test_lr_too_high_fires_where_outputs_stop_depending_on_the_input() -> None:
    run = Training(
        lr=lambda step: 1e-2,
        loss=stuck,
        ratio=lambda step, layer: 0.28 if step < 4 else 0.01,
        spread=lambda step: (2.0, 0.1, 8e-6, 4e-9)[min(step, 3)],
    ).run()
    one = fires(run, "LR_TOO_HIGH", "warning")
    assert one.step == 0
    assert one.evidence["update_ratio"] == pytest.approx(0.28)
    assert one.evidence["better_lr"] == pytest.approx(3e-5)
    assert one.place.optimizer == "optimizer"
    assert one.fix.startswith("for group in optimizer.param_groups: group['lr'] = 3e-05")
    assert "spread" in one.message


def test_lr_too_high_fires_where_a_number_is_not_finite() -> None:
    run = Training(ratio=lambda step, layer: 0.5, loss=lambda step: 2.0 * 4**step if step < 8 else math.nan).run()
    assert "finite" in fires(run, "LR_TOO_HIGH", "warning").message


def test_lr_too_high_fires_where_the_loss_rises_and_stays() -> None:
    run = Training(cls="SGD", ratio=lambda step, layer: 0.05, loss=lambda step: 2.0 if step < 1 else 11.0).run()
    assert fires(run, "LR_TOO_HIGH", "warning").evidence["loss_last"] == pytest.approx(11.0)


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_lr_too_high_is_quiet_where_more_reward_makes_the_loss_larger(answer: str) -> None:
    asked = Probed(probe="rewarded", root=-1, answer=answer, evidence={"slope": -0.4, "products": 1, "optimizer": 0})
    rising = {"ratio": lambda step, layer: 0.05, "loss": lambda step: 2.0 if step < 1 else 11.0}
    quiet(Training(cls="SGD", after=(asked,), **rising).run(), "LR_TOO_HIGH")  # type: ignore[arg-type]


def test_lr_too_high_is_quiet_on_log_probabilities_of_a_run_that_was_not_asked() -> None:
    rising = {"ratio": lambda step, layer: 0.05, "loss": lambda step: 2.0 if step < 1 else 50.0}
    unasked = Probed(probe="rewarded", root=-1, answer="unknown")
    scored = Scored(distribution="Categorical", width=8)
    quiet(Training(cls="SGD", call=None, after=(scored,), **rising).run(), "LR_TOO_HIGH")  # type: ignore[arg-type]
    densities = Training(cls="SGD", call=None, after=(scored, unasked), **rising).run()  # type: ignore[arg-type]
    fires(densities, "LR_TOO_HIGH", "warning")


def test_lr_too_high_fires_where_units_die() -> None:
    run = Training(
        ratio=lambda step, layer: 0.3, loss=lambda step: 2.3, dead=lambda step, layer: 0.1 if step < 1 else 0.97
    ).run()
    assert "units" in fires(run, "LR_TOO_HIGH", "warning").message


def test_lr_too_high_fires_where_the_first_gradient_was_healthy_and_vanishes() -> None:
    run = Training(
        loss=stuck,
        ratio=lambda step, layer: 0.09 / (1 + step),
        grad=lambda step, layer: 0.1 if step < 5 or layer == 2 else 1e-9,
    ).run()
    found = diagnose(run)
    assert [(one.name, one.consequence_of) for one in found] == [("LR_TOO_HIGH", ""), ("VANISHING", "LR_TOO_HIGH")]
    assert "vanishes" in found[0].message
    short = Training(
        loss=lambda s: 2.3, ratio=lambda s, n: 0.02, grad=lambda s, n: 0.1 if s < 5 or n == 2 else 1e-9
    ).run()
    quiet(short, "LR_TOO_HIGH")


@pytest.mark.parametrize(
    "healthy",
    {
        "Adam's first steps": Training(ratio=lambda step, layer: 0.05 if step < 5 else 0.005),
        "learns with long steps": Training(ratio=lambda step, layer: 0.2),
        "random labels": Training(ratio=lambda step, layer: 0.15, loss=lambda step: 2.31 + 0.05 * (-1) ** step),
        "a spike that passes": Training(loss=lambda step: 8.0 if step == 6 else falling(step)),
        "weights made of zeros": Training(norms=lambda step: {"weight": (1e-9, 1e-9, 2.0), "update": (0.1, 0.1, 2e-3)}),
        "converged": Training(loss=lambda step: 2.0 * 0.5**step, spread=lambda step: 1e-5),
        "negative": Training(loss=lambda step: -1.0 - 0.1 * step, ratio=lambda step, layer: 0.15),
        "a nan of its own": Training(after=(NonFinite(where="forward"),)),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_lr_too_high_is_quiet(healthy: tuple[str, Training]) -> None:
    quiet(healthy[1].run(), "LR_TOO_HIGH")


@pytest.mark.parametrize("first", [0.0, 0.02])
def test_lr_too_high_is_quiet_where_only_weights_that_begin_near_zero_have_long_steps(first: float) -> None:
    def training(layers: int, loss: Callable[[int], float] = falling) -> Training:
        def norms(step: int) -> dict[str, Any]:
            return {"weight": tuple(WEIGHT * (first if step == 0 and layer < layers else 1.0) for layer in range(3))}

        return Training(ratio=lambda step, layer: 0.5 if layer < 2 else 0.001, norms=norms, loss=loss)

    fires(training(0).run(), "LR_TOO_HIGH", "info")
    silent(training(2).run(), "LR_TOO_HIGH")
    silent(training(3).run(), "LR_TOO_HIGH")
    lost = training(2, lambda step: 2.0 * 4**step if step < 8 else math.nan).run()
    fires(lost, "LR_TOO_HIGH", "warning")


def test_lr_too_high_is_a_hint_where_no_harm_is_seen() -> None:
    silent(Training(ratio=lambda step, layer: 0.05).run(), "LR_TOO_HIGH")
    silent(Training(ratio=lambda step, layer: 0.2).run(), "LR_TOO_HIGH")
    remark = fires(Training(ratio=lambda step, layer: 0.5).run(), "LR_TOO_HIGH", "info")
    assert remark.evidence["better_lr"] == pytest.approx(1e-4)
    begins_near_zero = fires(Training(ratio=lambda step, layer: 90.0).run(), "LR_TOO_HIGH", "info")
    assert begins_near_zero.evidence["better_lr"] == pytest.approx(1e-4)


def test_lr_too_high_fires_on_a_loss_that_long_steps_threw_up_and_that_ends_above_a_constant_guess() -> None:
    def thrown(step: int) -> float:
        return float(60.0 * 0.8**step + 3.3)

    run = Training(ratio=lambda step, layer: 20.0, loss=thrown, call=call(guess=3.1), steps=60).run()
    assert "a constant guess gives 3.1" in fires(run, "LR_TOO_HIGH", "warning").message
    run = Training(ratio=lambda step, layer: 20.0, loss=lambda step: thrown(step) - 3.0, call=call(guess=3.1)).run()
    fires(run, "LR_TOO_HIGH", "info")


def test_lr_too_high_is_quiet_where_models_play_against_each_other() -> None:
    other = OptimizerFacts(optimizer=1, groups=(GroupFacts(parameters=(9,), lr=1e-3),))
    steps = lambda step: [Stepped(optimizer=1, number=step, lrs=(1e-3,))]  # noqa: E731
    lines = lambda step: {"line": 20 + step % 2}  # noqa: E731
    run = Training(
        loss=lambda step: 0.7 if step < 2 else 4.0,
        ratio=lambda s, layer: 0.02,
        every=steps,
        before=(other,),
        backward=lines,
    ).run()
    quiet(run, "LR_TOO_HIGH")


def carried(momentum: float, lr: float = 0.01, **facts: Any) -> Training:
    """SGD with a momentum, whose loss swings."""
    facts.setdefault("loss", lambda step: 2.0 if step < 3 else (0.5, 9.0, 3.0)[step % 3])
    return Training(cls="SGD", lr=lambda step: lr, group={"momentum": momentum}, **facts)


def test_lr_too_high_names_the_momentum_whose_steps_add_up() -> None:
    one = fires(carried(0.999).run(), "LR_TOO_HIGH", "warning")
    assert one.evidence["lr / (1 - momentum)"] == pytest.approx(10.0)
    assert one.fix.startswith("momentum=0.9  # lr / (1 - momentum) is then 0.1 instead of 10; or lr=0.0001")
    assert "lr=0.01, momentum=0.9" in fires(carried(0.99, lr=0.5).run(), "LR_TOO_HIGH", "warning").fix
    slow = carried(0.999, loss=lambda step: 2.0 + 1.8 * math.cos(step / 8))
    assert "up again" in fires(slow.run(), "LR_TOO_HIGH", "warning").message
    exploded = carried(0.999, ratio=lambda step, layer: 0.5, loss=lambda step: 2.0 * 4**step if step < 8 else math.nan)
    assert "lr / (1 - momentum)" in fires(exploded.run(), "LR_TOO_HIGH", "warning").message


@pytest.mark.parametrize(
    "healthy",
    {
        "usual": carried(0.9),
        "a small rate": carried(0.999, lr=1e-4),
        "learns": carried(0.999, loss=falling),
        "noise": carried(0.999, loss=lambda step: 2.0 + 0.3 * (step % 3)),
        "of Adam": Training(group={"momentum": 0.999}, loss=lambda step: (0.5, 9.0, 3.0)[step % 3]),
        "one sample": carried(0.999, call=call(items=1)),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_lr_too_high_is_quiet_on_momentum(healthy: tuple[str, Training]) -> None:
    quiet(healthy[1].run(), "LR_TOO_HIGH")


def test_lr_too_low_fires_where_nothing_changes() -> None:
    run = Training(
        lr=lambda step: 1e-8, ratio=lambda step, layer: 1e-9, loss=lambda step: 2.3 + 0.01 * (step % 3)
    ).run()
    one = fires(run, "LR_TOO_LOW", "warning")
    assert one.evidence["lr"] == 1e-8
    assert "group['lr'] = 0.001" in one.fix


@pytest.mark.parametrize(("warm_up", "fires_too"), [(10, True), (25, True), (35, False), (55, False)])
def test_lr_too_low_fires_after_a_warm_up_that_is_over(warm_up: int, fires_too: bool) -> None:
    run = Training(
        lr=lambda step: 3e-9 * min(1.0, (step + 1) / warm_up), ratio=lambda s, layer: 1e-9, loss=lambda step: 2.3
    ).run()
    if fires_too:
        assert fires(run, "LR_TOO_LOW", "warning").evidence["lr"] == 3e-9
    else:
        silent(run, "LR_TOO_LOW")


@pytest.mark.parametrize(
    "healthy",
    {
        "converged": Training(lr=lambda step: 1e-8, ratio=lambda s, layer: 1e-9, loss=lambda step: 1e-12),
        "warm-up": Training(lr=lambda step: 1e-8 * (step + 1), ratio=lambda s, layer: 1e-9, loss=lambda step: 2.3),
        "short": Training(steps=8, lr=lambda step: 1e-8, ratio=lambda s, layer: 1e-9, loss=lambda step: 2.3),
        "vanished": Training(cls="SGD", lr=lambda step: 0.1, ratio=lambda s, layer: 1e-9, grad=lambda s, layer: 1e-9,
                             loss=lambda step: 2.3),
        "usual": Training(loss=lambda step: 2.3),
    }.items(),
    ids=lambda entry: entry[0],
)  # fmt: skip
def test_lr_too_low_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "LR_TOO_LOW")


def warming(
    end: int, calls: int = 6, base: float = 1e-3, loss: Any = lambda step: 2.3, peak: float | None = None
) -> Run:
    """A warm-up of so many epochs of ten steps, of which the run has some."""
    each = 60 // calls

    def rate(step: int) -> float:
        return (peak or base) * min(1.0, (1 + step // each) / end)

    options = {"base_lrs": [base], "peak": peak} if peak else {"base_lrs": [base]}
    schedule = SchedulerFacts(
        scheduler=0, variable="schedule", cls="OneCycleLR" if peak else "LambdaLR", optimizer=0, options=options
    )

    def called(step: int) -> list[Scheduled]:
        at_end = step % each == each - 1
        return [Scheduled(scheduler=0, number=step, before=(rate(step),), after=(rate(step + 1),))] if at_end else []

    return Training(lr=rate, before=(schedule,), every=called, loss=loss).run()


def test_lr_too_low_fires_where_a_warm_up_of_batches_is_stepped_for_epochs() -> None:
    one = fires(warming(60), "LR_TOO_LOW", "warning")
    assert "stepped once in 10 steps, 6 times" in one.message
    assert not one.fix.endswith("()")


def test_lr_too_low_fires_where_one_cycle_of_batches_is_stepped_for_epochs() -> None:
    assert "10% of its 0.1" in fires(warming(60, base=4e-3, peak=0.1), "LR_TOO_LOW", "warning").message


@pytest.mark.parametrize(
    "run",
    [
        warming(5),  # it ended
        warming(5, base=4e-3, peak=0.1),
        warming(20),  # nearly a third of it
        warming(400, calls=60),  # a long one of batches, in a short run
        warming(60, calls=3),  # few epochs
        warming(60, loss=lambda step: 1e-12),
    ],
)
def test_lr_too_low_is_quiet_in_warm_ups_that_end_or_are_counted_in_steps(run: Run) -> None:
    silent(run, "LR_TOO_LOW")


def test_lr_zero_fires_where_the_schedule_ends_too_early() -> None:
    schedule = SchedulerFacts(
        scheduler=0, variable="schedule", cls="LinearLR", optimizer=0, options={"total_iters": 20}
    )
    run = Training(lr=lambda step: max(0.0, 1e-3 * (1 - step / 20)), scheduler=schedule).run()
    one = fires(run, "LR_ZERO", "warning")
    assert one.evidence["steps_at_zero"] == 40
    assert "total_iters=60" in one.fix


@pytest.mark.parametrize(
    "lr",
    {
        "restarts": lambda step: 1e-3 * (1 + math.cos(math.pi * (step % 20) / 19)) / 2,
        "warm-up": lambda step: 1e-5 * max(0, step - 12),
        "end": lambda step: max(0.0, 1e-3 * (1 - step / 57)),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_lr_zero_is_quiet(lr: tuple[str, object]) -> None:
    silent(Training(lr=lr[1]).run(), "LR_ZERO")  # type: ignore[arg-type]


def test_lr_zero_is_quiet_for_one_group_of_two() -> None:
    run = Training(lr=lambda step: 1e-3, every=lambda step: [Stepped(optimizer=7, lrs=(0.0, 1e-3), number=step)]).run()
    silent(run, "LR_ZERO")


def test_lr_collapsed_fires_where_the_rate_falls_early() -> None:
    run = Training(lr=lambda step: 1e-3 * 0.5**step, loss=lambda step: 2.3).run()
    assert fires(run, "LR_COLLAPSED", "warning").step == 10


def test_lr_collapsed_fires_where_one_call_takes_the_rate_and_not_their_number() -> None:
    run = Training(lr=lambda step: 1e-3 if step < 20 else 1e-6, scheduler=STEP_LR, loss=lambda step: 2.3).run()
    fires(run, "LR_COLLAPSED", "warning")
    silent(run, "SCHED_TOO_OFTEN")


def test_lr_collapsed_is_quiet_at_the_end_of_a_cosine() -> None:
    silent(Training(lr=lambda step: 1e-3 * (1 + math.cos(math.pi * step / 60)) / 2 + 1e-12).run(), "LR_COLLAPSED")
    silent(Training(lr=lambda step: 1e-3 * 0.5**step, loss=lambda step: 2.0 * 0.5**step).run(), "LR_COLLAPSED")


STEP_LR = SchedulerFacts(
    scheduler=0, variable="schedule", cls="StepLR", optimizer=0, options={"step_size": 3, "gamma": 0.1}
)
LOADER = Epoch(loader=0, batches=60, rows=480, batch_size=8, shuffled=True)


def test_sched_too_often_is_quiet_where_the_rate_is_zero_throughout() -> None:
    silent(Training(lr=lambda step: 0.0, loss=lambda step: 2.3, scheduler=STEP_LR).run(), "SCHED_TOO_OFTEN")


def test_sched_too_often_fires_where_an_epoch_ends_the_schedule() -> None:
    run = Training(
        lr=lambda step: 0.1 ** (3 + step // 3), loss=lambda step: 2.3, scheduler=STEP_LR, before=(LOADER,)
    ).run()
    one = fires(run, "SCHED_TOO_OFTEN", "warning")
    assert one.place.line == 25
    assert one.fix.startswith("schedule.step()")


def test_sched_too_often_fires_where_a_trainer_steps_and_tells_what_it_is_given() -> None:
    """The line that has the data loaded steps the optimizer and the schedule, too."""
    made = Training(
        lr=lambda step: 0.1 ** (3 + step // 3), loss=lambda step: 2.3, scheduler=STEP_LR, before=(LOADER,)
    ).run()
    inside = [
        dataclasses.replace(one, file="train.py", line=7) if isinstance(one, Epoch | Stepped | Scheduled) else one
        for one in made.facts
    ]
    one = fires(Run(inside), "SCHED_TOO_OFTEN", "warning")
    assert one.fix.startswith('"interval": "epoch" beside schedule')


def test_sched_too_often_fires_where_a_cosine_swings() -> None:
    cosine = SchedulerFacts(
        scheduler=0, variable="schedule", cls="CosineAnnealingLR", optimizer=0, options={"T_max": 5}
    )
    swing = lambda step: 1e-3 * (1 + math.cos(math.pi * step / 5)) / 2  # noqa: E731
    run = Training(lr=swing, scheduler=cosine, before=(LOADER,), loss=lambda step: 2.3).run()
    assert "T_max" in fires(run, "SCHED_TOO_OFTEN", "warning").message


def test_sched_too_often_is_quiet_for_schedules_of_batches() -> None:
    slow = SchedulerFacts(scheduler=0, cls="ExponentialLR", optimizer=0, options={"gamma": 0.95})
    silent(Training(lr=lambda step: 1e-3 * 0.95**step, scheduler=slow, before=(LOADER,)).run(), "SCHED_TOO_OFTEN")
    full = Epoch(loader=0, batches=1)
    lr = lambda step: 0.1 ** (3 + step // 3)  # noqa: E731
    silent(Training(lr=lr, scheduler=STEP_LR, before=(full,), loss=lambda s: 2.3).run(), "SCHED_TOO_OFTEN")
    cosine = SchedulerFacts(scheduler=0, cls="CosineAnnealingLR", optimizer=0, options={"T_max": 60})
    run = Training(lr=lambda s: 1e-3 * (1 + math.cos(math.pi * s / 60)) / 2, scheduler=cosine, before=(LOADER,)).run()
    silent(run, "SCHED_TOO_OFTEN")


def stale(moves: bool) -> Training:
    """A scheduler of optimizer 1, which never steps, while optimizer 0 does; or whose rates optimizer 0 follows."""
    schedule = SchedulerFacts(scheduler=0, variable="schedule", cls="StepLR", optimizer=-1)
    calls = lambda step: [  # noqa: E731
        Scheduled(scheduler=0, number=step, before=(0.1**step,), after=(0.1 ** (step + 1),))
    ]
    return Training(steps=12, lr=lambda step: 0.1**step if moves else 1.0, every=calls, before=(schedule,))


def test_sched_stale_opt_fires_where_another_optimizer_steps() -> None:
    assert fires(stale(False).run(), "SCHED_STALE_OPT", "error").place.optimizer == "optimizer"


def test_sched_stale_opt_is_quiet_where_the_rates_follow() -> None:
    silent(stale(True).run(), "SCHED_STALE_OPT")
    silent(Training(scheduler=STEP_LR).run(), "SCHED_STALE_OPT")


LOADED = Loaded(into="optimizer", number=0, variable="optimizer", lrs_before=(1e-4,), lrs_after=(1e-2,), line=12)


def test_lr_ignored_on_resume_fires_where_the_loaded_rate_is_used() -> None:
    one = fires(Training(lr=lambda step: 1e-2, before=(LOADED,)).run(), "LR_IGNORED_ON_RESUME", "warning")
    assert (one.evidence["asked"], one.evidence["used"]) == (1e-4, 1e-2)


def test_lr_ignored_on_resume_is_quiet_where_it_is_set_again_or_scheduled() -> None:
    silent(Training(lr=lambda step: 1e-4, before=(LOADED,)).run(), "LR_IGNORED_ON_RESUME")
    silent(Training(lr=lambda step: 1e-2, before=(LOADED,), scheduler=STEP_LR).run(), "LR_IGNORED_ON_RESUME")
    resumed = Loaded(into="scheduler", number=0)
    silent(Training(lr=lambda step: 1e-2, before=(LOADED, resumed)).run(), "LR_IGNORED_ON_RESUME")


def test_regression_in_its_own_units_has_no_prior() -> None:
    quiet(Training(call=call("mse_loss", target_std=3.0), ratio=lambda s, layer: 0.15).run(), "LR_TOO_HIGH")


def of_a_function(factor: Callable[[int], float], *, base: float = 1e-3, **facts: Any) -> Training:
    """A ``LambdaLR`` whose function gives a factor."""
    schedule = SchedulerFacts(
        scheduler=0, variable="schedule", cls="LambdaLR", optimizer=0, options={"base_lrs": [base]}, line=12
    )
    facts.setdefault("loss", lambda step: 2.3)
    return Training(lr=lambda step: base * factor(step), scheduler=schedule, **facts)


@pytest.mark.parametrize(
    "factor",
    [
        lambda step: 1e-3,
        lambda step: 1e-3 * 0.95**step,
        lambda step: 1e-3 * min(1.0, (step + 1) / 20),
        lambda step: 1e-3 * (1 + math.cos(math.pi * step / 60)) / 2,
    ],
)
def test_lambda_gives_rate_fires_where_the_rate_is_squared(factor: Callable[[int], float]) -> None:
    one = fires(of_a_function(factor).run(), "LAMBDA_GIVES_RATE", "warning")
    assert one.evidence["highest_lr"] == pytest.approx(1e-6)
    assert (one.place.optimizer, one.place.line) == ("optimizer", 12)
    assert "/ 0.001" in one.fix


@pytest.mark.parametrize(("function", "said"), [("lr_at", "lr_at(epoch) / 0.001"), ("<lambda>", "... / 0.001")])
def test_lambda_gives_rate_has_the_names_of_the_user(function: str, said: str) -> None:
    training = of_a_function(lambda step: 1e-3)
    assert training.scheduler is not None
    options = {"base_lrs": [1e-3], "lr_lambdas": [function]}
    training.scheduler = dataclasses.replace(training.scheduler, variable="sched", options=options)
    one = fires(training.run(), "LAMBDA_GIVES_RATE", "warning")
    assert one.fix.startswith(f"sched = LambdaLR(optimizer, lambda epoch: {said})")


def test_a_rate_that_is_too_low_follows_from_a_function_that_gives_a_rate() -> None:
    run = of_a_function(lambda step: 1e-4, base=1e-4, ratio=lambda step, layer: 1e-8).run()
    found = diagnose(run)
    assert [(one.name, one.consequence_of) for one in found][:2] == [
        ("LAMBDA_GIVES_RATE", ""), ("LR_TOO_LOW", "LAMBDA_GIVES_RATE"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "healthy",
    {
        "decay": of_a_function(lambda step: 0.95**step),
        "warm-up that begins there": of_a_function(lambda step: min(1.0, (step + 1) / 1000)),
        "warm-up that ends there": of_a_function(lambda step: (step + 1) / 60 * 1e-3),
        "rates, with a rate of one": of_a_function(lambda step: 1e-3 * 0.95**step, base=1.0),
        "another factor": of_a_function(lambda step: 0.1, base=1e-3),
        "short": of_a_function(lambda step: 1e-3, steps=8),
        "another schedule": Training(lr=lambda step: 1e-6, scheduler=STEP_LR),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_lambda_gives_rate_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "LAMBDA_GIVES_RATE")


def test_lambda_gives_rate_is_a_hint_where_the_model_learned() -> None:
    run = of_a_function(lambda step: 0.1, base=0.1, loss=lambda step: 2.0 * 0.5**step).run()
    fires(run, "LAMBDA_GIVES_RATE", "info")


def test_lr_too_high_is_quiet_of_a_loss_that_threw_high_and_still_falls() -> None:
    def thrown(step: int) -> float:
        return 0.03 if step == 0 else 23.0 * 0.45 ** (step - 1)

    silent(Training(steps=10, loss=thrown, ratio=lambda step, layer: 0.2 if step < 2 else 1e-2).run(), "LR_TOO_HIGH")


MADE = OptimizerFacts(optimizer=0, variable="optimizer", cls="AdamW", default_lr=1e-3)


def rising(rate: Callable[[int], float] = lambda step: 1e-3 * step / 10000, **facts: Any) -> Run:
    """A run whose rate goes as given, of an optimizer that was made with 0.001."""
    given: dict[str, Any] = {"loss": lambda step: 2.3 - 1e-3 * step, "before": (MADE,), "after": (Ended(exit_code=0),)}
    return Training(lr=rate, **given | facts).run()


ONE_CYCLE = SchedulerFacts(
    scheduler=0, variable="schedule", cls="OneCycleLR", optimizer=0, options={"base_lrs": [4e-5], "peak": 1e-3}
)
CYCLIC = dataclasses.replace(ONE_CYCLE, cls="CyclicLR")


@pytest.mark.parametrize(
    "run",
    {
        "its own rates": rising(),
        "a state of no steps": rising(before=(MADE, Loaded(into="optimizer", number=0))),
        "a function": of_a_function(lambda step: step / 10000, after=(Ended(),)).run(),
        "from a third": of_a_function(lambda step: 0.1 + step / 300, after=(Ended(),)).run(),
        "one cycle": rising(lambda step: 4e-5 + 4.8e-4 * (1 - math.cos(math.pi * step / 300)), scheduler=ONE_CYCLE),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_warmup_too_long_fires(run: tuple[str, Run]) -> None:
    one = fires(run[1], "WARMUP_TOO_LONG", "warning")
    assert "0.001 that" in one.message
    assert "longer than the run" in one.message
    assert one.evidence["steps"] == 60


@pytest.mark.parametrize(
    "run",
    {
        "it ends": rising(lambda step: 4e-4 * min(1.0, step / 50)),
        "nearly over": rising(lambda step: 1e-3 * step / 80),
        "a search": rising(lambda step: 1e-8 * 1.2**step),
        "a search beyond it": rising(lambda step: 1e-2 * step),
        "cyclic": rising(lambda step: 1e-3 * step / 10000, scheduler=CYCLIC),
        "few steps": rising(steps=40),
        "goes on": rising(after=()),
        "cut short": rising(after=(Ended(exit_code=124),)),
        "resumed": rising(lambda step: 1e-7 * (step + 20), before=(MADE, Loaded(into="scheduler", number=0))),
        "it learned": rising(loss=lambda step: 2.0 * 0.5**step),
        "constant": rising(lambda step: 1e-5),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_warmup_too_long_is_quiet(run: tuple[str, Run]) -> None:
    silent(run[1], "WARMUP_TOO_LONG")


def moments(cls: type[torch.optim.Optimizer], *, steps: int = 5, **options: Any) -> Run:
    """The record of a net that an optimizer with two moments trains."""
    net = nn.Linear(4, 2)
    optimizer: Any = cls(net.parameters(), **options)
    with Doctor() as doctor:
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return doctor.run


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_betas_exchanged_fires(cls: type[torch.optim.Optimizer]) -> None:
    one = fires(moments(cls, betas=(0.999, 0.9)), "BETAS_EXCHANGED", "warning")
    assert "betas=(0.999, 0.9)" in one.message
    assert "betas=(0.9, 0.999)" in one.fix


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.9), (0.95, 0.95), (0.95, 0.9), (0.9, 0.0)])
def test_betas_exchanged_is_quiet(betas: tuple[float, float]) -> None:
    silent(moments(torch.optim.Adam, betas=betas), "BETAS_EXCHANGED")
    silent(moments(torch.optim.SGD, lr=0.1, momentum=0.999), "BETAS_EXCHANGED")
    silent(moments(torch.optim.Adam, steps=0, betas=(0.999, 0.9)), "BETAS_EXCHANGED")
