"""Whether a number that is not finite was the end of something that had grown, or came out of nothing."""

import math
from dataclasses import dataclass
from statistics import median

from anybatch.doctor.views.courses import Course
from anybatch.doctor.views.measures import ratio
from anybatch.records.runs import Run
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
    """The first number that is not finite.

    Args:
        at: the number of its event.
        step: of the run.
        is_data: whether it came with the data, whatever the weights were.
    """

    at: int
    step: int
    is_data: bool


def lost(run: Run, losses: Course) -> Lost | None:
    """The first number that is not finite, or the first such loss; ``None`` if all were finite.

    Args:
        run: the facts.
        losses: of an optimizer.
    """
    bad = next(iter(run.of(NonFinite)), None)
    if bad is not None:
        return Lost(bad.at, bad.step, bad.where == "input" or bad.of_data)
    first = next((index for index, value in enumerate(losses.values) if not math.isfinite(value)), None)
    if first is None or not losses.diverged:
        return None
    return Lost(losses.ats[first], losses.steps[first], is_data=False)


def loss_grew(losses: Course, until: Lost) -> bool:
    """Whether the loss had risen when the first number was lost: not once, but in its last values.

    Args:
        losses: of an optimizer.
        until: what ended it.
    """
    before = []
    for at, value in zip(losses.ats, losses.values, strict=True):
        if at > until.at + 1 or not math.isfinite(value):  # the number is found before the backward is noted
            break
        before.append(value)
    if len(before) < 2 or min(before) < 0:
        return False
    begin = median(before[:3]) if len(before) >= _ENOUGH else before[0]
    return median(before[-min(3, len(before) - 1) :]) > (_GROWN_MUCH if until.is_data else _GROWN) * begin


def step_was_long(run: Run, optimizer: int, until: Lost, limit: float) -> bool:
    """Whether one of the last steps before the first number was lost changed the weights by more than a share of them.

    Args:
        run: the facts.
        optimizer: its number.
        until: what ended it.
        limit: the share.
    """
    near = [
        norms
        for norms in run.of(Norms)
        if norms.optimizer == optimizer and norms.at < until.at and norms.step >= until.step - _JUST_BEFORE
    ]
    return any(limit < (ratio(run, norms) or 0.0) < math.inf for norms in near)


def announced(run: Run, optimizer: int, losses: Course, until: Lost, limit: float) -> bool:
    """Whether steps that were too long can have made it: the loss had risen, or the last steps were that long.

    Args:
        run: the facts.
        optimizer: its number.
        losses: of it.
        until: what ended it.
        limit: the length of a step that is too long, as a share of the weights.
    """
    return loss_grew(losses, until) or (not until.is_data and step_was_long(run, optimizer, until, limit))
