"""How far what was traced may be trusted."""

import torch

from anybatch.planning.optimizer import UpdateTrace
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Confidence
from anybatch.tensors.modules import modules_of

RECURRENT = (torch.nn.RNNBase,)
_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)


def trace_confidence(subject: Subject, update: UpdateTrace | None, *, is_fake: bool) -> Confidence:
    """How far the bytes of a trace may be trusted.

    Args:
        subject: what is planned.
        update: what the optimizers hold, if it is known.
        is_fake: whether fake tensors were traced.
    """
    has_kernels = any(isinstance(module, (*RECURRENT, *_CONVOLUTIONS)) for module in modules_of(*subject.roots))
    if (update is not None and not update.is_traced) or subject.hides_bytes or subject.habits.draws:
        return "estimated"
    if subject.device_type == "cuda" and not subject.is_present:
        return "predicted" if is_fake and not has_kernels else "estimated"
    return "predicted" if is_fake else "measured"
