"""How far what was traced may be trusted."""

import torch

from anybatch.planning.sparseupdates import SparseUpdates
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Confidence
from anybatch.tensors.modules import modules_of

RECURRENT = (torch.nn.RNNBase,)
_CONVOLUTIONS = (torch.nn.modules.conv._ConvNd,)


def trace_confidence(subject: Subject, update: SparseUpdates | None, *, is_fake: bool) -> Confidence:
    """How far the bytes of a trace may be trusted, apart from those of sparse gradients.

    Args:
        subject: what is planned.
        update: what the optimizers hold, if it is known.
        is_fake: whether fake tensors were traced.
    """
    recurrent, convolutions = (
        any(isinstance(module, kinds) for module in modules_of(*subject.roots)) for kinds in (RECURRENT, _CONVOLUTIONS)
    )
    if update is not None and not update.is_traced:
        return "bounded"
    if subject.device_type == "cuda" and not subject.is_present:
        return "unknown" if recurrent else "bounded" if convolutions or not is_fake else "exact"
    return "exact" if is_fake and not subject.habits.draws_flow else "measured"


def plan_confidence(traced: Confidence, update: SparseUpdates | None) -> Confidence:
    """How far a plan may be trusted: for sparse gradients it is a bound, unless the optimizer's state grows with them.

    Args:
        traced: see ``trace_confidence``.
        update: what the optimizers hold, if it is known.
    """
    if update is None or not update.positions:
        return traced
    return "unknown" if update.grows or traced == "unknown" else "bounded"
