"""Do the classes of a loss run along the axis that a layer has them in, or does a reshape read across its axes?"""

import itertools
import math
from collections.abc import Sequence

import torch

from anybatch.doctor.ask.rows import MOVING
from anybatch.doctor.ask.tape import Operation, Replay, Slot, Tape, rebuilt, slots

_TURNING = frozenset({"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "squeeze",
                      "unsqueeze", "__getitem__", "interpolate", "upsample"})  # fmt: skip
_ALIKE = frozenset({"contiguous", "clone", "float", "to", "log_softmax", "softmax", "log", "double", "clamp"})
_LAYERS = {"linear": -1, **{f"conv{kind}{dims}d": 1 for kind in ("", "_transpose") for dims in (1, 2, 3)}}
_OF_CLASSES = frozenset({"cross_entropy", "nll_loss"})
_PADDING = frozenset({"pad", "cat", "concat", "concatenate"})
_MOST_AXES = 5


def of_classes(tape: Tape, run: Replay) -> tuple[Operation, list[int], list[int]] | None:
    """The reshape behind the last layer that puts entries of one and the same class into places of several ones."""
    makers = {
        slot: one
        for one in tape.operations[: tape.losses[-1].before]
        for slot in set(one.outs) - set(slots((one.args, one.kwargs)))  # contiguous may give what it is given
    }
    for loss in tape.operations[: tape.losses[-1].before]:
        scores = next(iter(slots((loss.args, loss.kwargs))), None)
        if loss.name not in _OF_CLASSES or not loss.grad or scores is None:
            continue
        chain = list[Operation]()
        one = makers.get(scores)
        while one is not None and one.name in MOVING | _TURNING | _ALIKE:
            chain.insert(0, one)
            given = list(slots((one.args, one.kwargs)))
            one = makers.get(given[0]) if len(given) == 1 else None
        moved = [each for each in chain if each.name in MOVING]
        if one is not None and one.name in _LAYERS and moved and _is_crossed(one, chain, run, scores):
            before = run.values[next(iter(slots(moved[-1].args)))]
            return moved[-1], _axes(before.shape), _axes(run.values[moved[-1].outs[0]].shape)
    return None


def _is_crossed(layer: Operation, chain: list[Operation], run: Replay, scores: Slot) -> bool:
    """Whether an output of a layer is in the place of several classes."""
    made, wanted = run.values[layer.outs[0]], run.values[scores]
    axis = _LAYERS[layer.name] % made.dim()
    classes = wanted.shape[1] if wanted.dim() > 1 else 0
    places = [made.shape[at : made.dim() - (axis > at)] for at in range(1, made.dim()) if at != axis]
    if classes < 2 or made.shape[axis] % classes or classes in {math.prod(sizes) for sizes in places}:
        return False  # places may be what is chosen from
    if classes in [size for at, size in enumerate(made.shape) if at not in (0, axis)]:
        return False
    own = torch.arange(made.shape[axis], dtype=torch.float, device=made.device)
    values = own.reshape([-1 if at == axis else 1 for at in range(made.dim())]).expand(made.shape).contiguous()
    for one in chain:
        if one.name not in _ALIKE:
            args, kwargs = rebuilt((one.args, one.kwargs), lambda part: values if type(part) is Slot else part)  # noqa: B023
            values = one.func(*args, **kwargs)
    found = [set(part.round().int().flatten().tolist()) for part in values.unbind(1)]
    return sum(map(len, found)) > len(set[int]().union(*found))


def reads_across(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether only another order of axes gives what is read, and pieces of axes are what it reads in place of them."""
    ends = sorted({math.prod(sizes[at:]) for sizes in (before, after) for at in range(len(sizes))})
    if all(two % one == 0 for one, two in itertools.pairwise(ends)) or len(after) < 2 or len(before) > _MOST_AXES:
        return False  # it cuts axes and puts their pieces together, as it may
    return any(_merges(order, after) for order in itertools.permutations(before))


def _merges(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether axes are those of another shape when neighbours are put together."""
    ends = {math.prod(before[at:]) for at in range(len(before))}
    return all(math.prod(after[at:]) in ends for at in range(len(after)))


def is_padded(tape: Tape, slot: Slot) -> bool:
    """Whether something was made longer and read with other axes then, which skews a table as is meant."""
    for one in reversed(tape.operations):
        if slot in one.outs:
            if one.name in _PADDING:
                return True
            given = next(iter(slots((one.args, one.kwargs))), None)
            if one.name not in MOVING or given is None:
                return False
            slot = given
    return False


def _axes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size > 1]
