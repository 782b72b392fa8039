"""What momentum makes of a learning rate: each gradient goes on for many steps, and the steps add up."""

import math
from dataclasses import dataclass
from statistics import median

from anybatch.doctor.rules.courses import Course, adversarial
from anybatch.records.events import Forward
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run
from anybatch.records.tables import OptimizerFacts

_HEAVY = 0.98
"""A momentum with which a gradient goes on for fifty steps; 0.9 and 0.95 are usual."""

_HIGH = 1.0
"""A rate in effect above which hardly any model learns; the steps of 0.1 with a momentum of 0.9 add up to it."""

_USUAL, _USUAL_LR = 0.9, 0.01


@dataclass(frozen=True, slots=True)
class Heavy:
    """A momentum that makes much more of a learning rate.

    Args:
        lr: the learning rate.
        momentum: of the optimizer.
    """

    lr: float
    momentum: float

    @property
    def effective(self) -> float:
        """The length that the steps along one gradient add up to, for a gradient of length one."""
        return self.lr / (1 - self.momentum)

    @property
    def better_lr(self) -> float:
        """The rate that adds up to as much as a usual one with a usual momentum."""
        return float(f"{self._usual_lr * (1 - self.momentum) / (1 - _USUAL):.1g}")

    @property
    def _usual_lr(self) -> float:
        return min(self.lr, _USUAL_LR)

    @property
    def words(self) -> str:
        """What it does."""
        return (
            f"with momentum {self.momentum:g} the steps along one gradient add up to lr / (1 - momentum) = "
            f"{self.effective:.3g}"
        )

    @property
    def fix(self) -> str:
        """What to write instead."""
        lr = "" if self.lr == self._usual_lr else f"lr={self._usual_lr:g}, "
        return (
            f"{lr}momentum={_USUAL:g}  # lr / (1 - momentum) is then {self._usual_lr / (1 - _USUAL):.3g} instead of "
            f"{self.effective:.3g}; or lr={self.better_lr:g} with momentum={self.momentum:g}"
        )


def heavy(run: Run, number: int, lr: float) -> Heavy | None:
    """The momentum of an optimizer if it is far above what is usual, and none that Adam divides by its own length.

    Args:
        run: the facts.
        number: of the optimizer.
        lr: its learning rate.
    """
    facts = run.optimizers.get(number, OptimizerFacts(optimizer=number))
    momentum = max((group.momentum for group in facts.groups), default=0.0)
    if "sgd" not in facts.cls.lower() or not _HEAVY <= momentum < 1 or not math.isfinite(lr):
        return None
    return Heavy(lr, momentum)


def swings(run: Run, number: int, losses: Course) -> str:
    """How the loss goes up and down without end, in words; empty if it does not.

    Args:
        run: the facts.
        number: of the optimizer.
        losses: of it.
    """
    late = losses.finite[len(losses.finite) // 2 :]
    if len(late) < 10 or losses.fell or losses.converged or adversarial(run, number) or min(losses.finite) < 0:
        return ""
    rows = max((one.rows for one in run.of(Forward) if one.grad), default=0)
    if 1 in (rows, max((one.items for one in run.of(LossCall)), default=0)):
        return ""  # the loss of one sample swings by chance
    begin = max(losses.first, losses.prior or 0.0)
    if max(late) > 2 * begin and max(late) > 5 * min(late):
        return f"the loss swings between {min(late):.3g} and {max(late):.3g}, and began with {losses.first:.3g}"
    size = max(5, len(losses.finite) // 20)
    parts = [median(losses.finite[one : one + size]) for one in range(0, len(losses.finite) - size + 1, size)]
    lowest = parts.index(min(parts))
    back = max(parts[lowest:])
    if back > 0.8 * losses.first and back > 2.5 * parts[lowest]:
        return f"the loss had come down to {parts[lowest]:.3g} and goes up again to {back:.3g}, near where it began"
    return ""


def is_high(found: Heavy | None) -> bool:
    """Whether the rate in effect is one with which hardly any model learns.

    Args:
        found: of an optimizer.
    """
    return found is not None and found.effective >= _HIGH
