"""Is the value of the next state that of the state itself? The states that both sides of a regression are made of."""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.steps import DISTANCES, MOVING, Step, asks, said
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.records.lossfacts import Probed

_PASSING = MOVING | {"detach", "unsqueeze", "squeeze", "to", "float", "clone", "data"}
_REORDERING = frozenset(
    {"roll", "flip", "cat", "stack", "index_select", "narrow"}
)  # as where values are shifted by one
_LEAST_DISCOUNT = 0.5


@asks("same state")
def same_state(step: Step) -> Iterator[Probed]:
    """Whether a target is a reward and a discounted value, of the very states whose value is to be like it."""
    for operation in step.used(*DISTANCES):
        sides = operation.given[:2]
        for predicted, target in (sides, sides[::-1]) if len(sides) == 2 else ():
            value, discount = _bootstrapped(step, target)
            own = _states(step, predicted) if value is not None else set()
            if value is not None and own and own <= _states(step, value):  # a goal may be that of both
                calls = {one for each in step.operations if _acts(step, each) for one in each.outs}
                # One call for both is that of states that follow each other.
                if not step.made_of(value) & step.made_of(predicted) & calls:
                    yield said(operation, discount=discount, rows=step.rows)


def _acts(step: Step, operation: Operation) -> bool:
    return not step.parameters.keys().isdisjoint(operation.given)


def _bootstrapped(step: Step, target: Slot) -> tuple[Slot | None, float]:
    """What a target multiplies with a discount and adds to what came from outside, and that discount."""
    for made in step.path(target):
        if made.kind == "add" and len(made.given) == 2:
            for value in made.given:
                reward, discount = next((one for one in made.given if one != value), value), _discount(step, value)
                if discount and _is_given(step, reward):
                    return value, discount
        if made.name not in _PASSING:
            break
    return None, 0.0


def _is_given(step: Step, slot: Slot) -> bool:
    """Whether a tensor came from outside, in whatever shape."""
    return step.made_of(slot).isdisjoint(step.parameters) and all(one.name in _PASSING for one in step.path(slot))


def _discount(step: Step, slot: Slot) -> float:
    """The number that a product is made with; 0 where there is none like a discount."""
    for made in step.path(slot):
        numbers = [one for one in made.args if type(one) is float and _LEAST_DISCOUNT < one <= 1]
        if made.kind == "mul" and numbers:
            return float(numbers[0])
        if made.kind != "mul" and made.name not in _PASSING:
            break
    return 0.0


def _states(step: Step, slot: Slot) -> set[bytes]:
    """The values of the batches of numbers that a tensor is made of by way of parameters, where no rows are moved."""
    made = step.made_of(slot)
    moved = [one for one in step.operations if made & set(one.outs) and _moves_rows(step, one)]
    if moved or step.parameters.keys().isdisjoint(made) or not step.values[slot].dim():
        return set()
    rows = len(step.values[slot])
    given = [step.leaves[one] for one in made & step.inputs]
    return {_bytes(one) for one in given if one.dim() > 1 and len(one) == rows and one.is_floating_point()
            and bool((one != one[:1]).any())}  # fmt: skip


def _moves_rows(step: Step, operation: Operation) -> bool:
    first = operation.args[1] if operation.name == "__getitem__" and len(operation.args) > 1 else None
    parts = first if isinstance(first, tuple) else (first,)
    return operation.name in _REORDERING or any(isinstance(one, slice) and one != slice(None) for one in parts)


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return f"{tensor.shape}".encode() + plain.tobytes()
