"""Whether a number that is not finite was the end of something that had grown, or came out of nothing."""

import math
from dataclasses import dataclass
from statistics import median

from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import ratio
from anybatch.records.runs import Run, remembered
from anybatch.records.samples import NonFinite, Norms

_GROWN = 3.0
"""How many times its first value the loss is by then."""

_GROWN_MUCH = 10.0
"""The same where the number came with the data, which only a model that makes its own data can have spoilt."""

_ENOUGH = 8
"""Values from which on the loss at the start is a median, not one value that may be small by chance."""

_JUST_BEFORE = 3
"""Steps within which one that was far too long may have made it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The first number that is not finite."""

    at: int  # the number of its event
    step: int  # of the run
    is_data: bool  # whether it came with the data, whatever the weights were


@remembered
def lost(run: Run, optimizer: int) -> Lost | None:
    """The first number that is not finite, or the first such loss; ``None`` if all were finite."""
    bad, losses = next(run.of(NonFinite), None), course(run, optimizer)
    if bad is not None:
        return Lost(bad.at, bad.step, bad.where == "input" or bad.of_data)
    first = next((index for index, value in enumerate(losses.values) if not math.isfinite(value)), None)
    if first is None or not losses.diverged:
        return None
    return Lost(losses.ats[first], losses.steps[first], is_data=False)


@remembered
def loss_grew(run: Run, optimizer: int) -> bool:
    """Whether the loss had risen when the first number was lost: not once, but in its last values."""
    losses, until = course(run, optimizer), lost(run, optimizer)
    before = []
    for at, value in zip(losses.ats, losses.values, strict=True):
        # The number is found before the backward is noted.
        if until is None or at > until.at + 1 or not math.isfinite(value):
            break
        before.append(value)
    if until is None or len(before) < 2 or min(before) < 0:
        return False
    begin = median(before[:3]) if len(before) >= _ENOUGH else before[0]
    return median(before[-min(3, len(before) - 1) :]) > (_GROWN_MUCH if until.is_data else _GROWN) * begin


def announced(run: Run, optimizer: int, limit: float) -> bool:
    """Whether too long steps can have made it: the loss had risen, or one of the last was over a limit.

    The limit is a share of the length of the weights.
    """
    until = lost(run, optimizer)
    if until is None or until.is_data or loss_grew(run, optimizer):
        return until is not None and loss_grew(run, optimizer)
    near = [
        norms for norms in run.of(Norms)
        if norms.optimizer == optimizer and norms.at < until.at and norms.step >= until.step - _JUST_BEFORE
    ]  # fmt: skip
    return any(limit < (ratio(run, norms) or 0.0) < math.inf for norms in near)
