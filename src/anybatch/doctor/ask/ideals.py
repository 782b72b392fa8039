"""Does a loss see how far off what is nearly right is? The last step again, with targets as what the net gives.

Where a formula takes its targets in another form, such as boxes with two corners for ones with a centre and a size, it
may be the same whatever the net says, and has no gradient.
"""

from dataclasses import replace
from typing import Any

import torch

from anybatch.doctor.ask.relating import own_draw
from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Loss, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_MOST_MADE = 4
_LEAST_ROWS = 8
_NEARLY = 0.01  # of their deviation: how far from targets what is nearly right is
_MOSTLY = 0.5  # of the rows


def unseen_errors(tape: Tape) -> Probed:
    """Whether a loss has no gradient in most rows with their targets, nearly, as what the net gives, or with others."""
    rows, loss = rows_of(tape), tape.losses[-1]
    if own_draw(tape, loss) is not None:
        raise Unknown("the loss is of what the model itself draws")
    first, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    for slot, target in tape.leaves.items():
        is_varied = target.is_floating_point() and target.dim() > 1 and bool((target != target[:1]).any())
        if rows < _LEAST_ROWS or slot not in needed - tape.parameters.keys() or len(target) != rows or not is_varied:
            continue
        found: list[tuple[float, float, int]] = []
        for index, one in enumerate(tape.operations[: loss.before]):
            value = first.values[one.outs[0]] if len(one.outs) == 1 else None
            is_made = value is not None and value.requires_grad and value.shape == target.shape
            if is_made and one.outs[0] in needed and slot not in slots_of(tape, Loss(one.outs[0], index + 1, "", 0)):
                found.append((*_blind(tape, loss, index, slot), index))
        _, share, index = min(found[-_MOST_MADE:], default=(0.0, 0.0, 0))  # what fits best is what targets are like
        if share >= _MOSTLY:
            width = target.reshape(-1, 4) if target.shape[-1] == 4 else None
            turned = 0 if width is None else int((width[:, 2:] <= width[:, :2]).any(1).sum())
            at = next(
                one for one in tape.operations[index + 1 :] if set(tape.operations[index].outs) & {*slots(one.args)}
            )
            seen: dict[str, Any] = {"share": share, "rows": rows, "turned": turned, "boxes": turned > 0}
            return told("unseen errors", at, shape=list(target.shape), **seen)
    return told("unseen errors", answer="no")


def _blind(tape: Tape, loss: Loss, index: int, target: Slot) -> tuple[float, float]:
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
        other.leaves, other.parameters, other.operations = tape.leaves, tape.parameters, [*tape.operations]
        other.operations[index] = replace(
            tape.operations[index], name="roll", func=give, args=(target,), kwargs={}, drawn=None
        )
        value = replayed(other, loss, lambda one: one).values[loss.slot].sum()
        (slope,) = torch.autograd.grad(value, given, allow_unused=True)
        values.append(float(value.detach()))
        blind.append(0.0 if slope is None else float((slope.flatten(1) == 0).all(1).double().mean()))
    return values[0], min(blind)
