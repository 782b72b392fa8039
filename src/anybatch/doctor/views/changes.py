"""The four cells: for every parameter, do its gradients change, and does it change itself?"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from anybatch.records.diagnoses import Cell
from anybatch.records.events import Backward, Stepped
from anybatch.records.runs import Run
from anybatch.records.samples import Norms, Written
from anybatch.records.tables import ParameterFacts

SHRUNK = 1e-3
"""Gradients whose norm falls below this share of the first ones are said to shrink."""


@dataclass(slots=True)
class _Seen:
    """What was seen of one parameter over the run."""

    gradients: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    sampled: int = 0
    moved: bool = False
    outside: bool = False
    cleared: bool = False


def cells(run: Run) -> tuple[Cell, ...]:
    """Which gradients and which parameters change: one entry for all of a module of which the same is true."""
    seen = _look(run)
    optimized = _optimized(run)
    entries = [
        (parameter, seen[number], *_cell(parameter, seen[number], number in optimized))
        for number, parameter in run.parameters.items()
    ]
    return tuple(
        _joined(run, [(parameter, one) for parameter, one, *_ in group], cell, why)
        for (_, _, cell, why), group in (
            (key, list(members))
            for key, members in groupby(entries, key=lambda entry: (entry[0].root, entry[0].module, *entry[2:]))
        )
    )


def _look(run: Run) -> dict[int, _Seen]:
    seen = {number: _Seen() for number in run.parameters}
    for norms in run.of(Norms):
        for position, number in enumerate(norms.parameters):
            if number in seen:
                _sample(seen[number], norms, position)
        for number in norms.since:
            if number in seen:
                seen[number].outside = True
    for backward in run.of(Backward):
        for number in backward.touched or ():
            if number in seen:
                seen[number].cleared = True  # unless a step saw it
    if not any(True for _ in run.of(Norms)):
        _by_events(run, seen)
    for number in _by_hand(run):
        seen[number].outside = True
    return seen


def _by_hand(run: Run) -> set[int]:
    """The parameters that changed before any optimizer had stepped.

    Of each some entries are compared, and a row of an embedding changes only where it was used; so without any
    optimizer the other parameters of these models are taken to do as they do.
    """
    found = {number for one in run.of(Written) for number in one.parameters if number in run.parameters}
    if run.optimizers:
        return found
    roots = {run.parameters[number].root for number in found}
    return {number for number, one in run.parameters.items() if one.root in roots and one.requires_grad}


def _sample(one: _Seen, norms: Norms, position: int) -> None:
    one.sampled += 1
    gradient = norms.grad[position] if position < len(norms.grad) else None
    if gradient is not None:
        one.gradients.append(gradient)
    update = norms.update[position] if position < len(norms.update) else 0.0
    weight = norms.weight[position] if position < len(norms.weight) else 0.0
    if update > 0 or math.isnan(update):
        one.moved = True
    one.ratios.append(update / weight if weight > 0 else 0.0)


def _by_events(run: Run, seen: Mapping[int, _Seen]) -> None:
    """Without samples only the presence of gradients is known; that a parameter was stepped is taken as a change."""
    for backward in run.of(Backward):
        for number in backward.touched or ():
            if number in seen:
                seen[number].gradients.append(math.nan)
    stepped = {one.optimizer for one in run.of(Stepped)}
    for number in stepped & run.optimizers.keys():
        for group in run.optimizers[number].groups:
            for parameter in set(group.parameters) & seen.keys():
                seen[parameter].sampled += 1
                seen[parameter].moved = bool(seen[parameter].gradients) and group.lr > 0


def _optimized(run: Run) -> dict[int, tuple[float, float]]:
    """For every parameter of an optimizer its weight decay and momentum."""
    return {
        number: (group.weight_decay, group.momentum)
        for optimizer in run.optimizers.values()
        for group in optimizer.groups
        for number in group.parameters
    }


def _cell(parameter: ParameterFacts, one: _Seen, optimized: bool) -> tuple[int, str]:
    flows = any(gradient != 0 for gradient in one.gradients)
    moves = one.moved or one.outside
    if not one.sampled and not one.gradients and not moves:
        return (3, "frozen") if not parameter.requires_grad else (0, "")
    if flows and moves:
        return 1, ""
    if flows:
        return 2, "in no optimizer" if not optimized else "the optimizer does not change it"
    if moves:
        return 4, "written outside of the optimizer" if one.outside and not one.moved else "decay or momentum"
    if not parameter.requires_grad:
        return 3, "frozen"
    if one.gradients:
        return 3, "gradient exactly zero"
    return 3, "its gradient is cleared before the step" if one.cleared and optimized else "no gradient arrives"


def _joined(run: Run, members: list[tuple[ParameterFacts, _Seen]], cell: int, why: str) -> Cell:
    first_gradient = _norm([one.gradients[0] for _, one in members if one.gradients])
    last_gradient = _norm([one.gradients[-1] for _, one in members if one.gradients])
    parameter = members[0][0]
    return Cell(
        cell=cell,
        module=_module(run, parameter),
        parameters=tuple(one.name for one, _ in members),
        numel=sum(one.numel for one, _ in members),
        why=why,
        shrinking=bool(first_gradient and last_gradient is not None and last_gradient < SHRUNK * first_gradient),
        frozen=all(not one.requires_grad for one, _ in members),
        first_gradient=first_gradient,
        last_gradient=last_gradient,
        first_ratio=_median([one.ratios[0] for _, one in members if one.ratios]),
        last_ratio=_median([one.ratios[-1] for _, one in members if one.ratios]),
    )


def _module(run: Run, parameter: ParameterFacts) -> str:
    if parameter.root < 0:  # of no model in use: what a variable is called, or the group of an optimizer
        return parameter.name.partition("['params']")[0]
    wanted = parameter.root in run.roots and (len(run.roots) > 1 or parameter.module[:1].isdigit())
    variable = run.roots[parameter.root].variable if wanted else ""
    return ".".join(part for part in (variable, parameter.module) if part)


def _norm(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.sqrt(sum(value * value for value in known)) if known else None


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
