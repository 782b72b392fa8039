"""One-step counterfactuals on a copy: does what was found go away with the remedy?"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.ignoring import random_in_evaluation
from anybatch.doctor.ask.training import Loss, fresh, trained
from anybatch.doctor.ask.trials import Trial, Unknown, undisturbed
from anybatch.doctor.proofs import PROOFS
from anybatch.records.events import Clipped
from anybatch.records.findings import Finding
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_STEPS = 20
_log = logging.getLogger(__name__)


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
    evidence = {"lr": lr, "before": before, "after": whole, "after_tenth": tenth, "steps": _STEPS}
    return Probed(probe="learning rate", root=root, answer="yes" if goes else "no", evidence=evidence)


def mode(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether training mode makes a difference to the outputs at all."""
    trial.module.train()
    try:
        answer = random_in_evaluation(trial, run, root, doctor)
    finally:
        trial.module.eval()
    evidence = dict(answer.evidence)
    return Probed(probe="mode", root=root, answer=answer.answer, evidence=evidence, module=answer.module)


def unscaled(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """What clipping would do to the gradients of the last batch if they were unscaled first."""
    clip = next((one for one in run.of(Clipped) if one.scaled and one.by == "norm" and one.norm), None)
    if clip is None or clip.norm is None:
        raise Unknown("no scaled gradients were clipped")
    real = clip.norm / clip.scale if clip.scale else clip.norm
    evidence = {
        "limit": clip.limit, "norm": clip.norm, "scale": clip.scale, "factor": min(1.0, clip.limit / clip.norm),
        "factor_unscaled": min(1.0, clip.limit / real) if real else 1.0,
    }  # fmt: skip
    return Probed(probe="unscale first", root=root, answer="yes", evidence=evidence)


PROBES: list[tuple[str, Callable[[Trial, Run, int, Any], Probed]]] = [
    ("learning rate", learning_rate),
    ("mode", mode),
    ("unscale first", unscaled),
]
"""Each a name and a function of the copy, the run, the number of the root and the recorder."""


def prove(findings: Iterable[Finding], doctor: Any, *, seconds: float = 20.0) -> list[Finding]:
    """Tries the remedies of findings for one step on a copy, and says whether the symptom goes."""
    until = time.perf_counter() + seconds
    run = getattr(doctor, "run", None) or Run([])
    given = dict(getattr(doctor, "last_inputs", None) or {})
    return [_proved(one, doctor, run, given, until) if one.name in PROOFS else one for one in findings]


def _proved(finding: Finding, doctor: Any, run: Run, given: dict[int, Any], until: float) -> Finding:
    probe, said = PROOFS[finding.name]
    question = dict(PROBES)[probe]
    try:
        with undisturbed():
            for root in sorted(given):
                module, args, kwargs = given[root]
                answer = question(Trial(module, args, kwargs, until), run, root, doctor)
                if answer.answer == "yes":
                    return replace(finding, proof=said(dict(answer.evidence)))
    except Unknown:
        return finding
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a proof that fails must not take the finding away
        _log.warning("%s could not be proved: %s: %s", finding.name, type(error).__name__, error)
    return finding
