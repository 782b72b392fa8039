"""Places of a sequence: is a prediction given the target of its own place, and does attention know the order?"""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.steps import DISTANCES, MOVING, OF_CLASSES, Step, asks, replayed, said, total
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_PICKING = MOVING | {"__getitem__", "contiguous", "squeeze", "unsqueeze", "transpose", "t", "T", "permute", "to",
                     "long", "float", "detach", "clone", "narrow"}  # fmt: skip
_LEAST_PLACES = 4
_ROUNDED = 1e-5  # of the largest output, or of the loss
_ATTENDING = ("scaled_dot_product_attention", "multi_head_attention_forward")


@asks("given at its place", of_rows=False)
def given_at_its_place(step: Step) -> Iterator[Probed]:
    """Whether a net that goes along a sequence is given, at each place, what it has to predict for this one.

    A change at one place moves what is predicted for it, and for places behind it, and nothing before it. A model that
    sees the whole sequence, as one with a code for all of it, is another one; and where nothing behind moves, each
    place is a sample of its own. Where noise is drawn on the way, what passes is a code, as in a state-space model; so
    it is where something on the way is narrower than the target, and in a distance to the input itself.
    """
    draws = [one for one in step.used() if one.drawn is not None]
    for operation in step.used(*OF_CLASSES, *DISTANCES):
        for made, target in _sides(step, operation):
            if any(step.made_of(made) & set(one.outs) for one in draws):
                continue
            for source, moving in _sources(step, made, target):
                if source == target and operation.kind in DISTANCES:
                    continue  # of an auto-encoder
                for dim in range(min(step.leaves[source].dim(), 2)):
                    if _follows(step, made, source, dim, moving):
                        places = step.leaves[source].shape[dim]
                        yield said(operation, op=operation.name, places=places)


def _sides(step: Step, operation: Operation) -> Iterator[tuple[Slot, Slot]]:
    """What is predicted, and what it is compared with."""
    given = operation.given[:2]
    for made, target in (given, given[::-1]) if len(given) == 2 else ():
        if step.values[made].requires_grad and not step.values[target].requires_grad:
            yield made, target


def _sources(step: Step, made: Slot, target: Slot) -> Iterator[tuple[Slot, list[Operation]]]:
    """The inputs that targets are entries of, with what picks these; or that are the same as the targets."""
    inputs = step.made_of(made) & step.inputs
    moving, slot = list[Operation](), target
    for one in step.path(target):
        if one.kind not in _PICKING or len(one.given) != 1:
            return
        moving.insert(0, one)
        slot = one.given[0]
    if slot in inputs and step.leaves[slot].dim() > 1:
        yield slot, moving
    if not moving and target in step.inputs:
        wanted = step.leaves[target]
        for other in inputs - {target}:
            leaf = step.leaves[other]
            if wanted.dim() > 1 and leaf.shape == wanted.shape and torch.equal(leaf, wanted):
                yield other, []


def _follows(step: Step, made: Slot, source: Slot, dim: int, moving: list[Operation]) -> bool:
    """Whether changes of targets along a dim move what is predicted there and behind, and never before."""
    leaf = step.leaves[source].detach()
    count = leaf.shape[dim]
    entries = _picked(step, source, moving)
    if count < _LEAST_PLACES or entries is None or _is_narrowed(step, made, source, dim, entries):
        return False
    places = entries // leaf[0, 0].numel() // (leaf.shape[1] if dim == 0 else 1) % count
    others = leaf.roll(1, 1 - dim) if not leaf.is_floating_point() else leaf + 1 + leaf.abs()
    is_own = is_behind = False
    for place in sorted({1, count // 3, count // 2, count - 2}):
        other = leaf.clone()  # what else is there, as the columns of the inputs, stays
        other.view(-1)[entries[places == place]] = others.reshape(-1)[entries[places == place]]
        run = replayed(step.tape, step.loss, lambda one, other=other: other if one is step.leaves[source] else one)
        moved = _moved(step.values[made].detach(), run.values[made].detach(), len(places))
        if moved is None or bool(moved[places < place].any()):
            return False
        is_own |= bool(moved[places == place].any())
        is_behind |= bool(moved[places > place].any())
    return is_own and is_behind


def _picked(step: Step, source: Slot, moving: list[Operation]) -> torch.Tensor | None:
    """The numbers of the entries that come out as targets, in their order; ``None`` where these are not found again."""
    leaf = step.leaves[source]
    where = {source: torch.arange(leaf.numel(), device=leaf.device).reshape(leaf.shape)}
    for one in moving:
        where[one.outs[0]] = one.again({**step.values, one.given[0]: where[one.given[0]]})
    last = moving[-1].outs[0] if moving else source
    entries, targets = where[last].flatten().long(), step.values[last].detach().flatten()
    return entries if torch.equal(leaf.detach().flatten()[entries].to(targets.dtype), targets) else None


def _is_narrowed(step: Step, made: Slot, source: Slot, dim: int, entries: torch.Tensor) -> bool:
    """Whether what is made of the source on the way has fewer numbers at a place than there are targets."""
    leaf = step.leaves[source]
    rows, count = leaf.shape[1 - dim], leaf.shape[dim]
    width = len(entries) / len((entries // leaf[0, 0].numel()).unique())
    for slot in step.made_of(made) & step.made_with(source) if width > 1 else ():
        one = step.values[slot]
        if one.is_floating_point() and not {rows, rows * count}.isdisjoint(one.shape):
            is_of_all = rows * count in one.shape or {count, count - 1} & set(one.shape)
            if one.numel() < width * rows * ((count - 1) if is_of_all else 1):
                return True
    return False


def _moved(one: torch.Tensor, other: torch.Tensor, count: int) -> torch.Tensor | None:
    """Which predictions differ, in the order of their targets; ``None`` where there is not one for each."""
    if one.shape != other.shape:
        return None
    far = (one.double() - other.double()).abs() > _ROUNDED * float(one.abs().max())
    if far.numel() != count:  # scores of classes
        far = far.any(1) if far.dim() > 1 else far
    return far.flatten() if far.numel() == count else None


@asks("order ignored", of_rows=False)
def order_ignored(step: Step) -> Iterator[Probed]:
    """Whether a loss is the same with the tokens that attend to each other in reverse, and in any order.

    Distances of places are the same in reverse, and are an order all the same.
    Of a set no order is meant; but in no set is one token there twice, as in some row here.
    """
    seen = set[Slot]()
    for lookup in step.used("embedding"):
        slot = lookup.given[0]
        if slot in seen or slot not in step.inputs or step.leaves[slot].dim() != 2:
            continue
        seen.add(slot)
        tokens = step.leaves[slot]
        count = tokens.shape[1]
        if count < _LEAST_PLACES or count == len(tokens) or not _repeats(tokens) or not _attends(step, lookup, count):
            continue
        mixed = torch.randperm(count, generator=torch.Generator().manual_seed(11)).to(tokens.device)
        if _is_same(step, tokens, tokens.flip(1)) and _is_same(step, tokens, tokens[:, mixed]):
            yield said(lookup, places=count, loss=step.own)


def _is_same(step: Step, tokens: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether the loss stays where tokens are others."""
    try:
        again = replayed(step.tape, step.loss, lambda one: others if one is tokens else one)
    except Unknown:
        return False
    return abs(total(again, step.loss) - step.own) <= _ROUNDED * abs(step.own)


def _repeats(tokens: torch.Tensor) -> bool:
    """Whether some row has a token twice that is not the padding, and rows are not the same in reverse."""
    padding = tokens[:, -1].mode().values
    repeated = [len(row) > len(row.unique()) for one in tokens if len(row := one[one != padding])]
    return any(repeated) and not torch.equal(tokens, tokens.flip(1))


def _attends(step: Step, lookup: Operation, count: int) -> bool:
    """Whether what is looked up attends to itself: weights of each place for each place."""
    follows = set(lookup.outs)
    for one in step.operations:
        if follows.isdisjoint(one.given):
            continue
        follows |= set(one.outs)
        if one.name == "softmax" and step.values[one.outs[0]].shape[-2:] == (count, count):
            return True
        if one.name in _ATTENDING and len(one.given) > 1:
            sides = [step.values[each].shape for each in one.given[:2]]
            if sides[0] == sides[1] and count in sides[0]:
                return True
    return False
