"""Is a net of several layers one linear layer? What it gives on a line through two inputs."""

from typing import Any

import torch
from torch import nn

from anybatch.doctor.ask.leaks import pairs_of
from anybatch.doctor.ask.trials import Trial, Unknown, tensors, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLACES = (0.5, -1.0, 3.0)  # on the line, between both inputs and beyond them
_BENT = 1e-3  # of what the outputs differ


def straight(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether layers follow each other with nothing between, and all outputs are a linear function of the inputs."""
    inputs = trial.inputs
    if inputs.rows < 2 or not inputs.by_rows() or not all(one.is_floating_point() for one in inputs.tensors()):
        raise Unknown("the last input is no batch of real numbers")
    layers = _following(trial)
    if not layers:
        raise Unknown("no layer follows another one with nothing between")

    def along(place: float) -> Any:
        return trial.forward(inputs.changed(
            lambda one: one + place * (one.roll(1, inputs.dim) - one) if inputs.has_rows(one) else one
        ))  # fmt: skip

    first, last, bends = along(0.0), along(1.0), False
    for place in _PLACES:
        for (one, other), made in zip(pairs_of(first, last), tensors(along(place)), strict=True):
            way = other.double() - one.double()
            spread = float(way.abs().max())
            if not spread > _BENT * float(one.double().abs().max()):
                raise Unknown("an output hardly depends on the inputs, so that rounding hides whether it bends")
            away = float((made.double() - one.double() - place * way).abs().max())
            bends |= not one.is_floating_point() or not away < _BENT * spread
    return told("straight", root=root, answer="no" if bends else "yes", layers=layers)


def _following(trial: Trial) -> list[str]:
    """The names of the layers of a chain, none of which is narrower than what is before it and what is behind it."""
    given: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def hook(name: str) -> Any:
        return lambda _, args, kwargs, made: given.append((name, next(iter((*args, *kwargs.values()))), made))

    named = [(name, one) for name, one in trial.module.named_modules() if isinstance(one, _LAYERS)]
    handles = [one.register_forward_hook(hook(name), with_kwargs=True) for name, one in named]
    try:
        trial.forward(trial.inputs)
    finally:
        for handle in handles:
            handle.remove()
    sizes = {name: (one.weight.shape[1], one.weight.shape[0]) for name, one in named}
    for at, (name, _, made) in enumerate(given):
        for other, taken, _ in given[at + 1 :]:
            wide = sizes[name][1] >= min(sizes[name][0], sizes[other][1])
            if taken.data_ptr() == made.data_ptr() and wide:
                return [name, other]
    return []
