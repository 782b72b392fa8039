"""Rules of the family loss: an activation behind the last layer that shuts out what the loss asks for."""

import math
from collections.abc import Iterator

from anybatch.doctor.rules.loss import by_line, loss_place
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import model_name
from anybatch.records.findings import Finding
from anybatch.records.lossfacts import LossCall, Walk
from anybatch.records.runs import Run

_RANGES = {"relu": (0.0, math.inf), "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0)}
_OF_NUMBERS = ("mse_loss", "smooth_l1_loss", "huber_loss")
_OF_SCORES = ("cross_entropy", "binary_cross_entropy_with_logits")
_OUTSIDE = 0.25
"""How far targets lie outside, in their standard deviations; less may be noise."""


@rule(
    "AB608",
    "OUTPUT_RANGE",
    "warning",
    explains=("LR_TOO_LOW", "DEAD_UNITS", "VANISHING", "SATURATED", "INPUT_IGNORED", "CANNOT_FIT_BATCH", "INPUT_SCALE"),
)
def output_range(run: Run) -> Iterator[Finding]:
    """Outputs that can't be what the targets are."""
    walks = [(*walk.doubled, *walk.activated) for walk in run.of(Walk) if walk.nodes]
    pairs = [{pair[1]: pair[0] for pair in every} for every in walks]
    for (_, _, function), calls in by_line(run).items():
        made = {pair.get(function, "") for pair in pairs}
        activation = made.pop() if len(made) == 1 else ""
        if activation in _RANGES and function in _OF_NUMBERS:
            yield from _beyond(run, calls, activation)
        elif activation in ("relu", "tanh") and function in _OF_SCORES:
            yield _bounded(run, calls, activation)


def _beyond(run: Run, calls: list[LossCall], activation: str) -> Iterator[Finding]:
    low, high = _RANGES[activation]
    looked = [one for one in calls if one.target_low is not None and one.target_high is not None]
    beyond = [one for one in looked if _distance(one, low, high) > _OUTSIDE * (one.target_std or 0.0)]
    if len(beyond) < 2 or len(beyond) < len(looked):
        return
    call, name = beyond[0], model_name(run, max(calls[0].root, 0))
    limits = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    yield Finding(
        message=f"The output of {name} goes through a {activation} and is {limits}; the targets of {call.function} go "
        f"from {call.target_low:.4g} to {call.target_high:.4g}.",
        place=loss_place(run, call),
        fix=f"remove the {activation} behind the last layer of {name}, or scale the targets into its range",
        cause=f"What lies outside of the range of a {activation} can't be learned.",
        evidence={"activation": activation, "low": call.target_low, "high": call.target_high, "batches": len(beyond)},
        step=beyond[1].step,
        at=call.at,
    )


def _distance(call: LossCall, low: float, high: float) -> float:
    """How far the targets lie outside of a range; not at all where there is nothing but one value."""
    if call.target_low is None or call.target_high is None or not call.target_std:
        return 0.0
    return max(low - call.target_low, call.target_high - high)


def _bounded(run: Run, calls: list[LossCall], activation: str) -> Finding:
    call, name = calls[0], model_name(run, max(calls[0].root, 0))
    what = "can't be negative" if activation == "relu" else "lie between -1 and 1"
    return Finding(
        message=f"The scores that {call.function} gets come out of a {activation}, so that they {what}.",
        place=loss_place(run, call),
        fix=f"remove the {activation} behind the last layer of {name}: {call.function} takes scores of any size",
        cause="Scores at zero get no gradient through a relu."
        if activation == "relu"
        else "Scores so close together can't be sure of anything, so the loss can't become small.",
        evidence={"activation": activation, "calls": len(calls)},
        step=call.step,
        at=call.at,
        severity="info" if course(run).fell else "warning",
    )
