"""Is a step credited with what came before it, or with the value of what comes behind the end of its episode?"""

from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

from anybatch.doctor.ask.pairs import PASSING, bootstrapped
from anybatch.doctor.ask.steps import DISTANCES, Step, asks, said
from anybatch.doctor.ask.tape import RANDOM, Operation, Slot
from anybatch.records.lossfacts import Probed
from anybatch.records.samples import Scored

_UNIT = 1e-3  # of a discount
_FEWEST = 8  # sums
_HALF = 0.5  # a discount that is less sums up next to nothing
_MOST_SUMS, _LITTLE, _OFTEN = 512, 0.01, 0.3  # how many, of their range, and of their pairs
_FEWEST_ROWS, _MOSTLY = 16, 0.7  # of a batch, and how many of its steps end an episode in no task that has several
_JOINING = frozenset({"cat", "stack", "hstack", "concat"})
_TAKING = frozenset({"__getitem__", "__iter__", "unbind", "select"})


@asks("past sums", of_rows=False)
def past_sums(step: Step) -> Iterator[Probed]:
    """Whether log-probabilities are weighed with discounted sums of equal rewards, summed up from the first on.

    Each sum is then the one before it, discounted, and a constant; those of what is to come grow by the discount.
    """
    if not any(True for _ in step.run.of(Scored)):
        yield said(answer="no")
    one_by_one: dict[tuple[str, int], list[tuple[tuple[int, int], float, Operation]]] = {}
    for operation in step.used("mul"):
        trained = [slot for slot in operation.given if step.values[slot].requires_grad]
        sums = _weights_of(step, operation, trained)
        if sums is not None and sums.numel() == 1:
            here = one_by_one.setdefault((operation.file, operation.line), [])
            here.append((_when(step, trained[0]), float(sums), operation))
        elif sums is not None:
            parts = _joined(step, trained[0])
            if len(parts) == len(sums) > 1:
                times = [_when(step, one) for one in parts]
                sums = _in_time(step, list(zip(times, sums.tolist(), strict=True)))
            if sums is not None and (discount := _of_past(sums)):
                yield said(operation, op=operation.name, discount=discount)
    for each in one_by_one.values():  # as in a loop over pairs of them, which may run from the end on
        sums = _in_time(step, [(when, one) for when, one, _ in each])
        if sums is not None and (discount := _of_past(sums)):
            yield said(each[0][2], op=each[0][2].name, discount=discount)


def _weights_of(step: Step, product: Operation, trained: list[Slot]) -> torch.Tensor | None:
    """What something with a gradient is multiplied with that has none; of an advantage, what the value is taken off."""
    fixed = [slot for slot in product.given if slot not in trained]
    if len(trained) != 1 or len(fixed) > 1:
        return None
    if not fixed:
        numbers = [one for one in product.args if type(one) is float]
        is_one = len(numbers) == 1 and step.values[trained[0]].numel() == 1
        return torch.tensor(numbers, dtype=torch.double, device="cpu") if is_one else None
    made = next(step.path(fixed[0]), None)
    own = made.given[0] if made is not None and made.kind == "sub" and len(made.given) == 2 else fixed[0]
    sums = step.values[own].detach()
    return sums.double().flatten() if step.values[fixed[0]].is_floating_point() else None


def _joined(step: Step, slot: Slot) -> list[Slot]:
    """The numbers that log-probabilities were put together from; none where they were made at once."""
    for made in step.path(slot):
        if made.kind in _JOINING or len(made.given) != 1:
            return (
                made.given if made.kind in _JOINING and all(step.values[one].numel() == 1 for one in made.given) else []
            )
    return []


def _in_time(step: Step, parts: list[tuple[tuple[int, int], float]]) -> torch.Tensor | None:
    """The sums in the order in which their numbers were made; nothing where these were not made while acting.

    Then something is drawn between any two of them. Where they are made again from what was kept, which may be from the
    end on, their order says nothing.
    """
    parts = sorted(parts, key=itemgetter(0))
    for (one, _), (other, _) in pairwise(parts):
        between = step.operations[one[0] + 1 : other[0]]
        if one[0] != other[0] and not any(made.kind in RANDOM for made in between):
            return None
    return torch.tensor([one for _, one in parts], dtype=torch.double, device="cpu")


def _when(step: Step, slot: Slot) -> tuple[int, int]:
    """The place of a number with a gradient in time: when it was made, or where it is in what it was taken from."""
    for made in step.path(slot):
        if len(made.given) != 1 or step.values[made.given[0]].numel() > 1:
            if made.kind in _TAKING and len(made.given) == 1:
                whole = step.values[made.given[0]]
                first = next((one for one in _indices(made.args[1:]) if type(one) is int), None)
                index = made.outs.index(slot) if first is None else first % max(1, len(whole))
                return step.made_at(made.given[0]), index
            break
        slot = made.given[0]
    return step.made_at(slot), 0


def _indices(args: Any) -> tuple[Any, ...]:
    first = args[0] if args else ()
    return first if isinstance(first, tuple) else (first,)


def _of_past(sums: torch.Tensor) -> float:
    """By what each sum takes over the one before it, where it adds a reward of a few kinds; 0 for other numbers.

    Two sums that end with the same reward differ by the discount times what those before them differ by. Those of what
    is to come differ by more than that.
    """
    if len(sums) < _FEWEST:
        return 0.0
    sums = sums[:_MOST_SUMS]
    before, after = (one[:, None] - one for one in (sums[:-1], sums[1:]))
    little = _LITTLE * (sums.max() - sums.min())
    times = (after / before)[(before.abs() > little).triu(1)]
    if not times.numel():
        return 0.0
    kinds, counts = (times / _UNIT).round().unique(return_counts=True)
    discount = float(kinds[counts.argmax()]) * _UNIT
    rewards = sums[1:] - discount * sums[:-1]
    is_one, reward = bool((rewards.max() - rewards.min()) < little), rewards.mean()
    if int(counts.max()) <= _OFTEN * len(times) or not _HALF < discount < 1 + _UNIT / 2:
        return 0.0
    if discount > 1 - _UNIT / 2:
        # rewards that are not discounted count up, as those that are left of a constant cost do: to the first of them
        return discount if is_one and bool((reward - sums[0]).abs() < little) else 0.0
    return discount if not is_one or bool(reward.abs() > little) else 0.0  # else they are powers of a discount


@asks("ends alone", of_rows=False)
def ends_alone(step: Step) -> Iterator[Probed]:
    """Whether the discounted value of what follows counts in a few rows only, as where it counts at the ends alone."""
    for operation in step.used(*DISTANCES):
        sides = operation.given[:2]
        for predicted, target in (sides, sides[::-1]) if len(sides) == 2 else ():
            value, discount = bootstrapped(step, target)
            if value is None or not step.values[predicted].requires_grad:
                continue
            (slope,) = step.slopes(predicted)
            for product, mask in _masks_of(step, value):
                if slope is None or mask.shape != slope.shape:
                    continue
                felt = (mask != 0)[slope != 0]  # which the loss has not masked
                share = float(felt.double().mean()) if felt.numel() >= _FEWEST_ROWS else 0.0
                if 0 < share < 1 - _MOSTLY:
                    yield said(product, share=share, rows=felt.numel(), discount=discount)


def _masks_of(step: Step, slot: Slot) -> Iterator[tuple[Operation, torch.Tensor]]:
    """What a value was multiplied with after a net had made it, and is 0 or one other number."""
    at: int | None = None
    while (at := step.made_at(slot, at)) >= 0:  # before the last one, since float() may give what it was given
        made = step.operations[at]
        masks = (
            [one for one in made.given if _is_mask(step, one)] if made.kind == "mul" and len(made.given) == 2 else []
        )
        others = [one for one in made.given if one not in masks]
        if len(others) != 1 or (made.kind != "mul" and made.name not in PASSING):
            return
        yield from ((made, step.values[one].detach()) for one in masks)
        slot = others[0]


def _is_mask(step: Step, slot: Slot) -> bool:
    one = step.values[slot].detach()
    is_made = not step.made_of(slot).isdisjoint(step.parameters)
    return not is_made and bool(one.dim()) and bool(((one == 0) | (one == one.max())).all())
