"""Does a loss see how far off what is nearly right is? The last step again, with targets as what the net gives.

Where a formula takes its targets in another form, such as boxes with two corners for ones with a centre and a size, it
may be the same whatever the net says, and has no gradient.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.relating import own_draw
from anybatch.doctor.ask.steps import Step, asks, replayed, said
from anybatch.doctor.ask.tape import Slot, Tape
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_MOST_MADE = 4
_LEAST_ROWS = 8
_NEARLY = 0.01  # of their deviation: how far from targets what is nearly right is
_MOSTLY = 0.5  # of the rows


@asks("unseen errors")
def unseen_errors(step: Step) -> Iterator[Probed]:
    """Whether a loss has no gradient in most rows with their targets, nearly, as what the net gives, or with others."""
    rows, needed = step.rows, step.needed
    if own_draw(step) is not None:
        raise Unknown("the loss is of what the model itself draws")
    for slot in sorted(needed & step.inputs) if rows >= _LEAST_ROWS else ():
        target = step.leaves[slot]
        is_varied = target.is_floating_point() and target.dim() > 1 and bool((target != target[:1]).any())
        if len(target) != rows or not is_varied:
            continue
        found: list[tuple[float, float, int]] = []
        for index, one in enumerate(step.operations):
            value = step.values[one.outs[0]] if len(one.outs) == 1 else None
            is_made = value is not None and value.requires_grad and value.shape == target.shape
            if is_made and one.outs[0] in needed and slot not in step.made_of(one.outs[0], index + 1):
                found.append((*_blind(step, index, slot), index))
        _, share, index = min(found[-_MOST_MADE:], default=(0.0, 0.0, 0))  # what fits best is what targets are like
        if share >= _MOSTLY:
            width = target.reshape(-1, 4) if target.shape[-1] == 4 else None
            turned = 0 if width is None else int((width[:, 2:] <= width[:, :2]).any(1).sum())
            made = step.operations[index]
            at = next(one for one in step.tape.operations[index + 1 :] if set(made.outs) & {*one.given})
            seen: dict[str, Any] = {"share": share, "rows": rows, "turned": turned, "boxes": turned > 0}
            yield said(at, shape=list(target.shape), **seen)


def _blind(step: Step, index: int, target: Slot) -> tuple[float, float]:
    """The loss where an operation nearly gives targets, and the share of rows without a gradient then.

    Or, where they are fewer, with the targets of the next rows.
    """
    values, blind = list[float](), list[float]()
    for shift in (0, 1):
        given: list[torch.Tensor] = []

        def give(one: torch.Tensor, shift: int = shift, given: list[torch.Tensor] = given) -> torch.Tensor:
            moved = one.detach().roll(shift, 0)
            given.append((moved + _NEARLY * moved.std() * torch.randn_like(moved)).requires_grad_())
            return given[0]

        other = Tape()
        other.leaves, other.parameters, other.operations = step.leaves, step.parameters, [*step.tape.operations]
        made = step.operations[index]
        other.operations[index] = replace(made, name="roll", func=give, args=(target,), kwargs={}, drawn=None)
        value = replayed(other, step.loss).values[step.loss.slot].sum()
        (slope,) = torch.autograd.grad(value, given, allow_unused=True)
        values.append(float(value.detach()))
        blind.append(0.0 if slope is None else float((slope.flatten(1) == 0).all(1).double().mean()))
    return values[0], min(blind)
