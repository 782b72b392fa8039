"""Exact gradient accumulation within a memory budget, and a doctor that says why a model does not learn.

Public names are loaded on first use (PEP 562): ``import anybatch`` and ``anybatch --help`` do not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from anybatch._version import __version__

if TYPE_CHECKING:
    import anybatch.testing as testing
    from anybatch.backpropagation import backward
    from anybatch.batch.counting import count_samples, count_tokens
    from anybatch.batch.windowing import windows
    from anybatch.certificate import check
    from anybatch.doctor.paths import why
    from anybatch.doctor.recorder import Doctor
    from anybatch.errors import (
        AnyBatchError,
        AnyBatchWarning,
        BatchError,
        CountError,
        CutClosed,
        DoesNotFit,
        LossError,
        NotSplittable,
        PlanMismatch,
        UpdateInterrupted,
    )
    from anybatch.loss.coupling import Coupled
    from anybatch.loss.cutting import cut
    from anybatch.loss.sequence import OverTime
    from anybatch.memory.measuring import measure
    from anybatch.planning.entrance import plan
    from anybatch.records.certificates import Certificate
    from anybatch.records.means import Mean
    from anybatch.records.paths import Paths
    from anybatch.records.plans import Plan
    from anybatch.records.results import StepResult
    from anybatch.scaling.batchsize import rescale
    from anybatch.scaling.noisescale import NoiseScale
    from anybatch.step import Observer, TrainStep
    from anybatch.update.freezing import freeze

_HOMES = {
    "TrainStep": "anybatch.step",
    "Observer": "anybatch.step",
    "StepResult": "anybatch.records.results",
    "backward": "anybatch.backpropagation",
    "windows": "anybatch.batch.windowing",
    "Mean": "anybatch.records.means",
    "count_samples": "anybatch.batch.counting",
    "count_tokens": "anybatch.batch.counting",
    "cut": "anybatch.loss.cutting",
    "Coupled": "anybatch.loss.coupling",
    "OverTime": "anybatch.loss.sequence",
    "check": "anybatch.certificate",
    "Certificate": "anybatch.records.certificates",
    "freeze": "anybatch.update.freezing",
    "NoiseScale": "anybatch.scaling.noisescale",
    "rescale": "anybatch.scaling.batchsize",
    "plan": "anybatch.planning.entrance",
    "Plan": "anybatch.records.plans",
    "measure": "anybatch.memory.measuring",
    "why": "anybatch.doctor.paths",
    "Doctor": "anybatch.doctor.recorder",
    "Paths": "anybatch.records.paths",
    **dict.fromkeys(
        (
            "AnyBatchError", "AnyBatchWarning", "BatchError", "CountError", "CutClosed", "DoesNotFit", "LossError",
            "NotSplittable", "PlanMismatch", "UpdateInterrupted",
        ),
        "anybatch.errors",
    ),
}  # fmt: skip

__all__ = [
    "AnyBatchError",
    "AnyBatchWarning",
    "BatchError",
    "Certificate",
    "CountError",
    "Coupled",
    "CutClosed",
    "Doctor",
    "DoesNotFit",
    "LossError",
    "Mean",
    "NoiseScale",
    "NotSplittable",
    "Observer",
    "OverTime",
    "Paths",
    "Plan",
    "PlanMismatch",
    "StepResult",
    "TrainStep",
    "UpdateInterrupted",
    "__version__",
    "backward",
    "check",
    "count_samples",
    "count_tokens",
    "cut",
    "freeze",
    "measure",
    "plan",
    "rescale",
    "testing",
    "why",
    "windows",
]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("anybatch.testing")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'anybatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
