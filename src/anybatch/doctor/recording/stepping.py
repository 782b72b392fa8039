"""What is known of the steps of optimizers: the last one of each, how many run within each other, their gradients."""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from anybatch.doctor.recording.patches import HIDDEN
from anybatch.tensors.dispatch import has_numbers

_TORCHS_FILE = optimizers.__file__
_STEP_FRAMES = frozenset({(_TORCHS_FILE, "wrapper"), (HIDDEN, "doctored_step")})
_STEP_NAMES = frozenset({"wrapper", "doctored_step"})
_MOST_FRAMES = 40  # between two steps that run within each other


class LastStep:
    """What was seen of the last step of an optimizer that was recorded in full.

    Args:
        optimizer: held weakly.
        number: of it.

    Attributes:
        begun: says that a step of it has begun that is not sampled.
        lengths: of its groups.
        lacks: whether its first parameter had no gradient; ``None`` where there is none.
        count: of its steps, or of those of all where there are many.
        due: at which more is looked at again.
    """

    __slots__ = ("begun", "count", "due", "lacks", "lengths", "number", "reference")

    def __init__(self, optimizer: Any, number: int) -> None:
        self.reference: Callable[[], Any] = weakref.ref(optimizer)
        self.number, self.begun = number, (number, False)
        self.count = self.due = 0
        self.lengths: tuple[int, ...] = ()
        self.lacks: bool | None = None


def lengths_of(groups: Any) -> tuple[int, ...]:
    """How many parameters each group of an optimizer has."""
    return tuple([len(group["params"]) for group in groups])


def are_zero(optimizer: Any) -> bool | None:
    """Whether all gradients of an optimizer are zero, ``None`` where there are none or that can't be said."""
    gradients = [t.grad for group in optimizer.param_groups for t in group["params"] if t.grad is not None]
    dense = [one for one in gradients if one.layout is torch.strided and has_numbers(one)]
    if not gradients or len(dense) < len(gradients):
        return None
    dense.sort(key=torch.Tensor.numel)  # the smallest first, which mostly say it
    return not any(bool(one.detach().any()) for one in dense)


def depth_of_steps() -> int:
    """How many steps of optimizers are running within each other: a class that calls ``super().step()`` has two."""
    depth, frame = 0, _back(sys._getframe(1))
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name in _STEP_NAMES and (code.co_filename, code.co_name) in _STEP_FRAMES:
            depth += 1
        frame = frame.f_back
    return depth


def _back(frame: FrameType) -> FrameType | None:
    return frame.f_back
