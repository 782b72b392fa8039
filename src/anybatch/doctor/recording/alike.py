"""What can be told of calls without recording them: whether a step comes back, and what its calls were given."""

from typing import Any

import torch

from anybatch.doctor.recording.describing import rows_of
from anybatch.records.events import Backward, Cleared, Clipped, Forward, Scaler, Scheduled, Stepped
from anybatch.records.lossfacts import LossCall


def comes_back(likes: tuple[Any, ...]) -> bool:
    """Whether the calls of a step are of kinds that can be followed by their order, and end with its only step."""
    if not isinstance(likes[-1], Stepped) or likes[-1].closure:
        return False
    return all(
        isinstance(one, (Forward, LossCall, Scheduled, Clipped, Scaler))
        or (isinstance(one, Backward) and one.function == "backward")
        or (isinstance(one, Cleared) and 0 < one.parameters == one.of)
        for one in likes[:-1]
    )


def identity_of(tensors: Any) -> tuple[int, ...]:
    """What the tensors that are clipped are known by from step to step."""
    return (len(tensors), id(tensors[0]), id(tensors[-1])) if len(tensors) else ()


def rows_and_leaves(args: Any, kwargs: Any) -> tuple[int, bool]:
    """The rows of the arguments of a forward, and whether these are kept alive by nothing but themselves."""
    values = (*args, *kwargs.values())
    plain = all(not one.requires_grad if isinstance(one, torch.Tensor) else not _holds(one) for one in values)
    return rows_of(args, kwargs), plain


def _holds(value: Any) -> bool:
    """Whether a value may hold tensors."""
    return not isinstance(value, (int, float, str, bool, type(None)))
