"""Is the input ignored, and do two evaluations differ?"""

from typing import Any

import torch

from anybatch.doctor.ask.leaks import _difference, _largest, _pairs
from anybatch.doctor.ask.trials import Inputs, Operation, Operations, Trial, Unknown, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_SPREAD = 1e-6


def ignored(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether the outputs are the same for different inputs."""
    inputs = trial.inputs
    given = [one for one in inputs.by_rows() if one.numel()]
    if inputs.rows < 2 or not given:
        raise Unknown("the last input has one row")
    different = any(bool((one != one[:1]).any()) for one in given)
    if not different:
        raise Unknown("the rows of the last input are equal")
    turned = inputs.changed(lambda one: one.roll(1, 0) if one.dim() and one.shape[0] == inputs.rows else one)
    before, after = trial.forward(inputs), trial.forward(turned)
    outputs = [(a, b) for a, b in _pairs(before, after) if a.is_floating_point() and a.dim() and a.numel() > 1]
    if not outputs:
        raise Unknown("the model gives no tensor of real numbers")
    size = max(float(a.double().abs().max()) for a, _ in outputs)
    if size != size or size == float("inf"):
        raise Unknown("the outputs are not finite")
    spread = _largest(outputs) / size if size else 0.0
    return told("input", root=root, answer="yes" if spread < _SPREAD else "no", spread=spread, size=size)


def random_in_evaluation(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether two evaluations of the same input differ, and by which operation."""
    inputs = trial.inputs
    before, first = trial.operations(inputs)
    trial.advance()
    after, second = trial.operations(inputs, again=True)
    pairs = [(a, b) for a, b in _pairs(before, after) if a.numel()]
    if not pairs:
        raise Unknown("the model gives no tensor")
    if not any(bool(_difference(a, b).any()) for a, b in pairs):
        return told("modes", root=root, answer="no")
    guilty = _first_different(first, second)
    return told("modes", guilty, root=root, op="" if guilty is None else guilty.name, largest=_largest(pairs))


def _first_different(first: Operations, second: Operations) -> Operation | None:
    for one, two in zip(first.seen, second.seen, strict=False):
        if one.name != two.name:
            return None
        changed = [bool(_difference(a, b).any()) for a, b in zip(one.results, two.results, strict=False)
                   if a.shape == b.shape and a.numel()]  # fmt: skip
        if any(changed):
            return one
    return None


def zeroed(inputs: Inputs) -> Inputs:
    """The same inputs with zeros for real numbers and the commonest token for whole ones."""

    def change(one: torch.Tensor) -> torch.Tensor:
        if one.is_floating_point():
            return torch.zeros_like(one)
        if one.dtype == torch.bool or not one.numel():
            return one
        return torch.full_like(one, int(one.flatten().mode().values))

    return inputs.changed(change)
