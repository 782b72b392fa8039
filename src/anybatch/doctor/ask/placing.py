"""Places of a sequence: is a prediction given the target of its own place, or all that count, is the order known?"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from anybatch.doctor.ask.steps import DISTANCES, MOVING, OF_CLASSES, Step, asks, replayed, said, total
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_PICKING = MOVING | {"__getitem__", "contiguous", "squeeze", "unsqueeze", "transpose", "t", "T", "permute", "to",
                     "long", "float", "detach", "clone", "narrow"}  # fmt: skip
_LEAST_PLACES = 4
_MOST_COLUMNS = 64  # of the inputs that are compared with the targets
_CLEARLY, _TIMES = 1e-2, 3.0  # of the largest change; as much as far before
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_OVER_ALL = frozenset({"batch_norm", "instance_norm", "group_norm"})
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
                    if _follows(step, made, source, dim, moving) and not _samples_apart(step, made, source, moving):
                        places = step.leaves[source].shape[dim]
                        yield said(operation, op=operation.name, places=places)


@asks("given ahead", of_rows=False)
def given_ahead(step: Step) -> Iterator[Probed]:
    """Whether a net that predicts the next value of a series moves with it, as one does that reads from both ends."""
    if any(one.kind in _OVER_ALL for one in step.used()) or not any(step.used(*_RECURRENT)):
        raise Unknown("no recurrent layer reads the series, or what it gives is normalized over all places")
    for operation in step.used(*DISTANCES):
        for made, target in _sides(step, operation):
            if target not in step.inputs or step.values[made].shape != step.leaves[target].shape:
                continue
            for source in step.made_of(made) & step.inputs - {target}:
                dim = _one_ahead(step.leaves[source], step.leaves[target])
                if dim is not None and _moves_before(step, made, source, dim):
                    yield said(operation, root=step.root, op=operation.name, length=step.leaves[source].shape[dim])


def _one_ahead(given: torch.Tensor, target: torch.Tensor) -> int | None:
    """The dim along which targets are one of the numbers that are given, one place on; ``None`` if there is none."""
    if not given.is_floating_point() or given.dim() < 2 or given.shape[:2] != target.shape[:2]:
        return None
    by_place = given.reshape(*given.shape[:2], -1), target.reshape(*target.shape[:2], -1)
    one, other = (each.detach() for each in by_place)
    for dim in (1, 0) if other.shape[2] in (1, one.shape[2]) else ():
        count = given.shape[dim] - 1
        behind, ahead = one.narrow(dim, 1, count), other.narrow(dim, 0, count)
        columns = [behind] if other.shape[2] == one.shape[2] else behind[..., :_MOST_COLUMNS].split(1, 2)
        is_round = one.shape == other.shape and torch.equal(one.select(dim, 0), other.select(dim, -1))  # a field moves
        is_series = count >= _LEAST_PLACES and bool((ahead != ahead[:1, :1]).any()) and not is_round
        if is_series and any(torch.equal(column, ahead) for column in columns):
            return dim
    return None


def _moves_before(step: Step, made: Slot, source: Slot, dim: int) -> bool:
    """Whether a change at one place moves what is predicted before it, and there clearly more than far before.

    A code or a scale of the whole series moves all places alike.
    """
    leaf = step.leaves[source].detach()
    place = leaf.shape[dim] - 2
    other = leaf.clone()
    later = other.narrow(dim, place, 1)
    later += 1 + later.abs()
    run = replayed(step.tape, step.loss, lambda one: other if one is step.leaves[source] else one)
    change = (run.values[made] - step.values[made]).detach().abs()
    before, far = change.narrow(dim, place - 1, 1).mean(), change.narrow(dim, 0, max(1, place // 2)).mean()
    return bool(before > _CLEARLY * change.max()) and bool(before > _TIMES * far)


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


_OF_SCORES = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


@asks("flattened apart", of_rows=False)
def flattened_apart(step: Step) -> Iterator[Probed]:
    """Whether what is predicted for samples and places was flattened in another order than its targets.

    Where a sample of an input is another one, its own predictions move: which rows these are says how they lie.
    """
    for operation in step.used(*OF_CLASSES, *DISTANCES, *_OF_SCORES):
        for made, target in _sides(step, operation):
            found = _leaf_of(step, target)
            samples = _samples_apart(step, made, *found) if found is not None else 0
            if samples:
                count = step.values[target].numel()
                yield said(operation, op=operation.name, samples=samples, rows=count, places=count // samples)


def _leaf_of(step: Step, target: Slot) -> tuple[Slot, list[Operation]] | None:
    """What came from outside and holds all targets, with what picks them; ``None`` where something else made them."""
    moving, slot = list[Operation](), target
    for one in step.path(target):
        if one.kind not in _PICKING or len(one.given) != 1:
            return None
        moving.insert(0, one)
        slot = one.given[0]
    return (slot, moving) if slot in step.inputs and step.leaves[slot].dim() > 1 else None


def _samples_apart(step: Step, made: Slot, source: Slot, moving: list[Operation]) -> int:
    """The number of samples, if predictions lie with time and batch the other way round than their targets; or 0."""
    leaf, entries = step.leaves[source], _picked(step, source, moving)
    if entries is None:
        return 0
    count = len(entries)
    for dim in range(min(leaf.dim(), 2)):
        samples, inner = leaf.shape[dim], leaf[0, 0].numel()
        if leaf.shape.count(samples) > 1 or samples < _LEAST_PLACES or count < 2 * samples * inner or count % samples:
            continue
        rows = torch.arange(count, device=entries.device)
        own = entries // (inner * (leaf.shape[1] if dim == 0 else 1)) % samples
        orders = rows // (count // samples), rows // inner % samples
        others = [one for one in orders if not torch.equal(one, own)]
        if len(others) == 1 and any(_lie_so(step, made, given, own, others[0]) for given in _with(step, made, samples)):
            return int(samples)
    return 0


def _with(step: Step, made: Slot, samples: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Inputs of what is predicted with one dim of so many samples, and that dim."""
    for slot in sorted(step.made_of(made) & step.inputs):
        leaf = step.leaves[slot]
        if leaf.shape.count(samples) == 1 and samples in leaf.shape[:2]:
            yield leaf, leaf.shape.index(samples)


def _lie_so(
    step: Step, made: Slot, given: tuple[torch.Tensor, int], own: torch.Tensor, other: torch.Tensor
) -> bool:  # fmt: skip
    """Whether predictions of samples lie in the other of two orders, and some of them out of their own."""
    leaf, dim = given
    samples, out = leaf.shape[dim], False
    others = leaf.detach().roll(1, dim) if not leaf.is_floating_point() else leaf.detach() + 1 + leaf.detach().abs()
    for sample in sorted({0, 1, samples // 2, samples - 1}):
        changed = leaf.detach().clone()
        changed.select(dim, sample).copy_(others.select(dim, sample))
        run = replayed(step.tape, step.loss, lambda one, changed=changed: changed if one is leaf else one)
        moved = _moved(step.values[made].detach(), run.values[made].detach(), len(own))
        if moved is None or not bool(moved.any()) or bool((other[moved] != sample).any()):
            return False
        out |= bool((own[moved] != sample).any())
    return out


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


_ENOUGH, _ENOUGH_SHOWN = 50, 100  # places that count, and targets
_SOME, _HIDDEN, _MOSTLY = 0.1, 0.02, 0.5  # shares of places that do not count, that are hidden, and of the columns
_MOST_COMPARED = 16  # rows
_LOOKED_UP = frozenset({"embedding", "index_select", "__getitem__", "one_hot"})


def _counting(step: Step, least: int, *kinds: str) -> Iterator[tuple[Operation, Slot, torch.Tensor, torch.Tensor]]:
    """What compares something with so many targets, what that is, these, and at which of them the loss has a slope."""
    for operation in step.used(*kinds):
        given = operation.given[:2]
        for made, target in (given, given[::-1]) if len(given) == 2 else ():
            wanted = step.values[target]
            if not step.values[made].requires_grad or wanted.requires_grad or wanted.numel() < least:
                continue
            (slope,) = step.slopes(made)
            if slope is not None and operation.name in OF_CLASSES and slope.dim() > 1:
                slope = slope.any(1)
            if slope is not None and slope.shape == wanted.shape:
                yield operation, made, wanted, slope.bool()


@asks("shown")
def shown(step: Step) -> Iterator[Probed]:
    """Whether all places whose target counts show it in the input, and all others are hidden there, at random.

    Padding is hidden as well, but at the ends of rows; and what is drawn at each step is no gap in the data: what was
    drawn outside of the step hides other places of the same rows later.
    """
    for operation, made, wanted, counted in _counting(step, _ENOUGH_SHOWN, "sub", *OF_CLASSES, *DISTANCES):
        for slot in step.made_of(made) - step.parameters.keys():
            one = step.values[slot]
            is_alike = one.dtype == wanted.dtype and one.numel() == wanted.numel() and len(one) == step.rows
            if is_alike and not one.requires_grad and _is_hidden(step, slot, wanted, counted):
                yield said(operation, op=operation.name.strip("_"), share=float(counted.double().mean()))


def _is_hidden(step: Step, slot: Slot, target: torch.Tensor, counted: torch.Tensor) -> bool:
    """Whether an input is the target where that counts and hides it elsewhere, as one mask or by what is drawn."""
    one = step.values[slot]
    counted = counted.reshape(one.shape)
    if not torch.equal(one == target.reshape(one.shape), counted) or float((~counted).double().mean()) < _HIDDEN:
        return False
    drawn = (made for made in step.operations if made.drawn is not None)
    is_drawn = any(set(made.outs) & step.made_of(slot) for made in drawn)
    if one.is_floating_point():
        return is_drawn
    rows = counted.flatten(1)
    begun = rows.cumsum(1) > 0
    ends = (begun & ~rows)[:, :-1] & rows[:, 1:]  # of what is hidden, with something shown on both sides of it
    hidden = one[~counted].unique()
    is_one = len(hidden) == 1 and not bool((one[counted] == hidden).any())
    return is_one and float(ends.any(0).double().mean()) > _MOSTLY and (is_drawn or _hides_others(step, one, hidden))


def _hides_others(step: Step, one: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Whether most rows are there once more with other places hidden, and the same ones shown else."""
    others = [other for batches in step.kept.batches.values() for other, *_ in batches if other.dtype == one.dtype]
    every = [row.flatten() for other in others if other.shape[1:] == one.shape[1:] for row in other]
    if not every:
        return False
    table, found = torch.stack(every).to(one.device), 0
    for row in one.flatten(1)[:_MOST_COMPARED]:
        is_same, both = table == row, (table != hidden) & (row != hidden)
        found += bool(((is_same | ~both).all(1) & ~is_same.all(1) & (2 * both.sum(1) > len(row))).any())
    return found > _MOSTLY * min(len(one), _MOST_COMPARED)


@asks("copied places")
def copied_places(step: Step) -> Iterator[Probed]:
    """Whether a net reads the target at all places that count, and tokens of the same kind at those that do not.

    A loss that counts some places alone is one of filling in what is hidden there. Padding counts neither, but lies at
    the ends of rows; what is hidden is one token, which is no target. Attention may leave out a place's own token.
    """
    for operation, made, wanted, counted in _counting(step, _ENOUGH, *OF_CLASSES):
        if wanted.is_floating_point() or int(counted.sum()) < _ENOUGH:
            continue
        for slot in _read_as_tokens(step, step.made_of(made)):
            tokens = step.values[slot]
            if tokens.numel() == wanted.numel() and len(tokens) == step.rows and tokens.dim() > 1:
                target, counts = wanted.reshape(tokens.shape), counted.reshape(tokens.shape)
                is_given = torch.equal(tokens[counts], target[counts]) and _are_of_a_kind(tokens, counts)
                if is_given and _is_read(step, made, slot, counts):
                    yield said(operation, op=operation.name.strip("_"), share=float(counts.double().mean()))


def _read_as_tokens(step: Step, some: set[Slot]) -> Iterator[Slot]:
    """What rows of a table that is trained are looked up with."""
    for one in step.operations:
        if one.kind in _LOOKED_UP and some & set(one.outs) and any(slot in step.parameters for slot in one.given):
            yield from (slot for slot in one.given if step.values[slot].dtype in (torch.int64, torch.int32))


def _is_read(step: Step, made: Slot, slot: Slot, counts: torch.Tensor) -> bool:
    """Whether what is predicted at a place that counts depends on its own token, which attention may hide from it."""
    tokens, place = step.values[slot], int(counts.flatten().nonzero()[0])
    other = tokens.clone()
    flat = other.view(-1)
    flat[place] = tokens[tokens != flat[place]][0]
    operations, at = [*step.tape.operations], step.made_at(slot) + 1
    operations.insert(at, Operation("other", lambda _: other, (slot,), {}, (slot,)))
    loss = replace(step.loss, before=step.loss.before + 1)
    run = replayed(step.tape.changed(operations), loss)
    moved = (run.values[made].detach() != step.values[made].detach()).any(1)
    return bool(moved.flatten()[place])


def _are_of_a_kind(tokens: torch.Tensor, counts: torch.Tensor) -> bool:
    """Whether what does not count lies between what does, anywhere in a row, and is of the same tokens."""
    rows = counts.flatten(1)
    begun, ahead = rows.cumsum(1) > 0, rows.flip(1).cumsum(1).flip(1) > 0
    between = ~rows & begun & ahead
    kinds, others = tokens[counts].unique(), tokens[~counts].unique()
    is_alike = len(others) > 1 and bool(torch.isin(others, kinds).all())
    return is_alike and float((~rows).double().mean()) > _SOME and float(between.any(0).double().mean()) > _MOSTLY
