"""One-step counterfactuals on a copy: does what was found go away with the remedy?"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.ignoring import random_in_evaluation
from anybatch.doctor.ask.training import Loss, fresh, trained
from anybatch.doctor.ask.trials import Trial, Unknown, told
from anybatch.records.events import Clipped
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_STEPS = 20


def learning_rate(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether a new copy's loss falls with a tenth of the learning rate, where it does not with the whole."""
    made = next((one for one in run.optimizers.values() if one.is_torchs and one.groups), None)
    kind = None if made is None else getattr(torch.optim, made.cls, None)
    if made is None or kind is None:
        raise Unknown("the optimizer is not torch's own")
    lr = made.default_lr or made.groups[0].lr
    if not lr:
        raise Unknown("the learning rate is not known")
    loss = Loss(trial, root, doctor)
    start = fresh(trial.module)
    results = {}
    for factor in (1.0, 0.1):
        module = fresh(start)
        module.load_state_dict(start.state_dict())
        results[factor] = trained(trial, module, loss, lambda p, one=factor: kind(p, lr=lr * one), _STEPS)  # type: ignore[misc]
    (before, whole, _), (_, tenth, _) = results[1.0], results[0.1]
    goes = (not math.isfinite(whole) or whole > before) and math.isfinite(tenth) and tenth < before
    evidence: dict[str, Any] = {"lr": lr, "before": before, "after": whole, "after_tenth": tenth, "steps": _STEPS}
    return told("learning rate", root=root, answer="yes" if goes else "no", **evidence)


def mode(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether training mode makes a difference to the outputs at all."""
    trial.module.train()
    try:
        answer = random_in_evaluation(trial, run, root, doctor)
    finally:
        trial.module.eval()
    return replace(answer, probe="mode", file="", line=0)


def unscaled(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """What clipping would do to the gradients of the last batch if they were unscaled first."""
    clip = next((one for one in run.of(Clipped) if one.scaled and one.by == "norm" and one.norm), None)
    if clip is None or clip.norm is None:
        raise Unknown("no scaled gradients were clipped")
    real = clip.norm / clip.scale if clip.scale else clip.norm
    evidence: dict[str, Any] = {
        "limit": clip.limit, "norm": clip.norm, "scale": clip.scale, "factor": min(1.0, clip.limit / clip.norm),
        "factor_unscaled": min(1.0, clip.limit / real) if real else 1.0,
    }  # fmt: skip
    return told("unscale first", root=root, **evidence)


PROBES: list[tuple[str, Callable[[Trial, Run, int, Any], Probed]]] = [
    ("learning rate", learning_rate),
    ("mode", mode),
    ("unscale first", unscaled),
]
"""Each a name and a function of the copy, the run, the number of the root and the recorder."""
