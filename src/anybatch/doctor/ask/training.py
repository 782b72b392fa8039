"""Questions that train or re-initialise a copy: initial loss, one batch, zeroed input."""

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anybatch.doctor.ask.ignoring import zeroed
from anybatch.doctor.ask.trials import FAILURES, Trial, Unknown, tensors, told
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

_STEPS = 200
_FITTED = 0.1  # of the first loss: what counts as fitted
_STUCK = 0.7
_NEAR = 0.35  # of the prior's entropy; PyTorch's initialisation of a small last layer is within 0.2 of it


class Loss:
    """The loss of a run, computed again from outputs of a copy with the targets of its last call."""

    def __init__(self, trial: Trial, root: int, doctor: Any) -> None:
        self._call = dict(getattr(doctor, "last_losses", None) or {}).get(root)
        self.trial = trial

    def __call__(self, outputs: Any) -> torch.Tensor:
        """The loss."""
        found = tensors(outputs)
        if self._call is None:
            scalars = [one for one in found if one.dim() == 0 and one.is_floating_point()]
            if not scalars:
                raise Unknown("the loss can't be rebuilt: its targets were not kept")
            return scalars[0]
        name, args, kwargs = self._call
        function = getattr(functional, name, None)
        if function is None or not args:
            raise Unknown(f"the loss {name} can't be rebuilt")
        wanted = args[0].shape
        for one in found:
            if one.shape == wanted or (one.numel() == args[0].numel() and one.shape[-1:] == wanted[-1:]):
                try:
                    result: torch.Tensor = function(one.reshape(wanted), *args[1:], **kwargs)
                except FAILURES as error:
                    raise Unknown(f"the loss can't be rebuilt: {error}"[:200]) from None
                return result if result.dim() == 0 else result.mean()
        raise Unknown("the loss can't be rebuilt: no output has the shape of its predictions")


def fresh(module: nn.Module) -> nn.Module:
    """A copy with new weights."""
    other = copy.deepcopy(module)
    reset: set[int] = set()
    for one in other.modules():
        again = getattr(one, "reset_parameters", None) or getattr(one, "_reset_parameters", None)
        if callable(again):
            again()
            reset.update(id(p) for p in one.parameters())
    left = [name for name, p in other.named_parameters() if id(p) not in reset]
    if left:
        raise Unknown(f"{left[0]} can't be initialised again: its module has no reset_parameters")
    return other


def prior(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether a new copy's loss is that of knowing nothing."""
    calls = [one for one in run.of(LossCall) if one.root in (root, -1) and one.classes > 1]
    if not calls or calls[0].function not in ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits"):
        raise Unknown("no classification loss was seen")
    expected = math.log(calls[0].classes) if calls[0].function != "binary_cross_entropy_with_logits" else math.log(2)
    module, loss = fresh(trial.module), Loss(trial, root, doctor)
    try:
        with torch.no_grad():
            value = float(loss(module(*trial.inputs.args, **trial.inputs.kwargs)))
    except FAILURES as error:
        raise Unknown(f"the model did not run: {type(error).__name__}: {error}"[:300]) from None
    near = math.isfinite(value) and abs(value - expected) <= _NEAR * expected
    return told("prior", root=root, answer="yes" if near else "no", initial=value, prior=expected)


def one_batch(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether a copy can fit the last batch."""
    loss = Loss(trial, root, doctor)
    try:
        module = fresh(trial.module)
    except Unknown:
        module = copy.deepcopy(trial.module)
    before, after, steps = trained(trial, module, loss, lambda p: torch.optim.Adam(p, lr=3e-3), _STEPS)
    answer = "unknown"
    if math.isfinite(after) and after <= _FITTED * before:
        answer = "yes"
    elif steps == _STEPS and before > 0 and not after <= _STUCK * before:
        answer = "no"
    return told("one batch", root=root, answer=answer, before=before, after=after, steps=steps)


def trained(
    trial: Trial, module: nn.Module, loss: Loss, optimizer: Callable[[Any], torch.optim.Optimizer], steps: int
) -> tuple[float, float, int]:
    """Trains a copy on the last input."""
    module.train()
    for one in module.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.eval()
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise Unknown("no parameter requires a gradient")
    stepping = optimizer(parameters)
    values: list[float] = []
    half = time.perf_counter() + max(0.0, trial.until - time.perf_counter()) / 2
    try:
        with torch.enable_grad():
            for _ in range(steps):
                if time.perf_counter() > half:
                    break
                value = loss(module(*trial.inputs.args, **trial.inputs.kwargs))
                values.append(float(value.detach()))
                if not math.isfinite(values[-1]):
                    break
                stepping.zero_grad()
                value.backward()
                stepping.step()
    except FAILURES as error:
        raise Unknown(f"the copy could not be trained: {type(error).__name__}: {error}"[:300]) from None
    if not values:
        raise Unknown("there was no time left")
    return values[0], values[-1], len(values)


def zeroed_input(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether the loss is no worse without the input."""
    loss = Loss(trial, root, doctor)
    real = float(loss(trial.forward(trial.inputs)))
    empty = float(loss(trial.forward(zeroed(trial.inputs))))
    if not math.isfinite(real) or not math.isfinite(empty):
        raise Unknown("the loss is not finite")
    answer = "yes" if empty <= real * 1.01 else "no"
    return told("zeroed input", root=root, answer=answer, loss=real, zeroed=empty)


PROBES: list[tuple[str, Callable[[Trial, Run, int, Any], Probed]]] = [
    ("prior", prior),
    ("one batch", one_batch),
    ("zeroed input", zeroed_input),
]
"""Each a name and a function of the copy, the run, the number of the root and the recorder."""
