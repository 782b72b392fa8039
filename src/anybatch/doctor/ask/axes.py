"""The axes and entries of what a net and its loss are given: torn or turned axes, targets among inputs, edges."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anybatch.doctor.ask.steps import DISTANCES, MOVING, OF_CLASSES, PRODUCTS, Step, asks, replayed, said, slots_of
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.doctor.ask.weighing import padding_of
from anybatch.records.lossfacts import Probed

_CHANNELS = (2, 3, 4)
_MORE_ALIKE = 0.2  # the covariance of channels, as a share of the variance of an image
_MOST = 0.6  # of the samples: some may have one colour
_SIGNED = ("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss")
_TURNING = frozenset({"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "squeeze",
                      "unsqueeze", "__getitem__", "interpolate", "upsample"})  # fmt: skip
_ALIKE = frozenset({"contiguous", "clone", "float", "to", "log_softmax", "softmax", "log", "double", "clamp"})
_LAYERS = {"linear": -1, **{f"conv{kind}{dims}d": 1 for kind in ("", "_transpose") for dims in (1, 2, 3)}}
_PADDING = frozenset({"pad", "cat", "concat", "concatenate"})
_POOLING = frozenset({"max", "amax", "mean", "sum"})
_BEHIND = frozenset({"batch_norm", "relu", "relu_", "leaky_relu", "gelu", "silu", "elu", "dropout", "group_norm"})
_ATTENDING = PRODUCTS | {"einsum", "scaled_dot_product_attention"}
_MOST_AXES = 5
_MOST_ENDS = 4
_CROWDED = 0.8  # of the edges of a tree, each begins or ends at a node of its own
_LEAST_LINKED = 50  # nodes, and edges between them
_BY_CHANCE, _SURELY = 4.0, 8.0  # standard errors
_LEAST_GRAPHS = 4
_FORGOTTEN = 0.05  # of the deviation over rows
_LEAST_PLACES = 4  # kinds, as of segments, are fewer
_MOVED = frozenset({"to", "type_as", "requires_grad_", "detach", "view", "reshape", "unsqueeze", "clone", "contiguous"})
_GATHERING = ("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
              "index_reduce_")  # fmt: skip


@asks("axes")
def turned(step: Step) -> Iterator[Probed]:
    """Whether axes change places by a reshape, which leaves the entries where they are, or an image came that way."""
    for operation in step.used(*MOVING):
        given = next(iter(operation.given), None)
        if given is None or not operation.outs:
            continue
        before, after = axes = [_axes(step.values[one].shape) for one in (given, operation.outs[0])]
        is_other = before != after and sorted(before) == sorted(after)
        is_across = step.rows in before[:2] and step.values[given].requires_grad and reads_across(before, after)
        is_across |= _is_read_back(step, operation, before, after)
        if (is_other or is_across) and not (_is_padded(step, given) or _is_skewed(step, operation)):
            yield _of_axes(operation, *axes)
        elif step.values[given].requires_grad and _are_heads_torn(step, operation, before, after):
            yield said(operation, op=operation.name, before=before, after=after, heads=True)
    if (crossed := _of_classes(step)) is not None:
        yield _of_axes(*crossed)
    for slot in sorted(step.needed & step.inputs):
        leaf = step.leaves[slot]
        before, after = _axes(step.tape.bases.get(slot, ())), _axes(leaf.shape)
        is_view = before != after and sorted(before) == sorted(after)
        if leaf.shape[:1] == (step.rows,) and (is_view or _is_torn(leaf)):
            given_to = next(one for one in step.tape.operations if slot in one.given)
            if not is_view:
                count, height, width = leaf.shape[-3:]
                before, after = [height, width, count], [count, height, width]
            yield _of_axes(given_to, before, after)


def _of_axes(operation: Operation, before: list[int], after: list[int]) -> Probed:
    return said(operation, op=operation.name, before=before, after=after)


def _is_read_back(step: Step, operation: Operation, before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a layer reads (rows, places, features) as (rows * features, places), and puts back one per feature.

    There are targets of that shape, (rows, features), and each result is made of several features.
    """
    if len(before) != 3 or before[0] != step.rows or list(after) != [before[0] * before[2], before[1]]:
        return False
    if before[1] == before[2] or (before[2] == 1):
        return False
    wanted = torch.Size((before[0], before[2]))
    if all(step.leaves[slot].shape != wanted for slot in step.needed & step.inputs):
        return False
    made = {slot for one in step.used("linear") if one.given[0] == operation.outs[0] for slot in one.outs}
    back = (one for one in step.used(*MOVING) if made & set(one.given))
    return any(step.values[slot].shape == wanted for one in back for slot in one.outs)


def _axes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size > 1]


def _is_torn(image: torch.Tensor) -> bool:
    """Whether the channels of most images are alike, and images smoother, only if read in another order.

    Rows, columns, channels are what a picture is stored as.
    """
    if image.dim() != 4 or image.shape[1] not in _CHANNELS or min(image.shape[2:]) < 8 or not image.is_floating_point():
        return False
    count, channels, height, width = image.shape
    given = image.double()
    other = given.reshape(count, height, width, channels).permute(0, 3, 1, 2)
    (rough, alike), (rough_other, alike_other) = _texture(given), _texture(other)
    better = alike_other > alike + _MORE_ALIKE
    return float(better.double().mean()) > _MOST and bool(rough_other.mean() < rough.mean())


def _texture(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each image how much one row of pixels differs from the next, and how alike two channels are."""
    spread = image.var((1, 2, 3)).clamp_min(1e-12)
    away = image - image.mean((2, 3), keepdim=True)
    rough = (image[:, :, 1:] - image[:, :, :-1]).pow(2).mean((1, 2, 3)) / spread
    return rough, (away[:, 1:] * away[:, :-1]).mean((1, 2, 3)) / spread


def _of_classes(step: Step) -> tuple[Operation, list[int], list[int]] | None:
    """The reshape behind the last layer that puts entries of one and the same class into places of several ones."""
    makers = {slot: one for one in step.operations for slot in set(one.outs) - set(one.given)}
    for loss in step.operations:  # without those that give what they are given, as contiguous may
        scores = next(iter(loss.given), None)
        if loss.name not in OF_CLASSES or not loss.grad or scores is None:
            continue
        chain = list[Operation]()
        one = makers.get(scores)
        while one is not None and one.name in MOVING | _TURNING | _ALIKE:
            chain.insert(0, one)
            one = makers.get(one.given[0]) if len(one.given) == 1 else None
        moved = [each for each in chain if each.name in MOVING]
        if one is not None and one.name in _LAYERS and moved and _is_crossed(one, chain, step, scores):
            before = step.values[moved[-1].given[0]]
            return moved[-1], _axes(before.shape), _axes(step.values[moved[-1].outs[0]].shape)
    return None


def _is_crossed(layer: Operation, chain: list[Operation], step: Step, scores: Slot) -> bool:
    """Whether an output of a layer is in the place of several classes."""
    made, wanted = step.values[layer.outs[0]], step.values[scores]
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
            values = one.again(dict.fromkeys(one.given, values))
    found = [set(part.round().int().flatten().tolist()) for part in values.unbind(1)]
    return sum(map(len, found)) > len(set[int]().union(*found))


def reads_across(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether only another order of axes gives what is read, and pieces of axes are what it reads in place of them."""
    ends = sorted({math.prod(sizes[at:]) for sizes in (before, after) for at in range(len(sizes))})
    if all(two % one == 0 for one, two in itertools.pairwise(ends)) or len(after) < 2 or len(before) > _MOST_AXES:
        return False  # it cuts axes and puts their pieces together, as it may
    wanted = {math.prod(after[at:]) for at in range(len(after))}  # where neighbours are put together
    return any(
        wanted <= {math.prod(order[at:]) for at in range(len(order))} for order in itertools.permutations(before)
    )


def _are_heads_torn(step: Step, operation: Operation, before: list[int], after: list[int]) -> bool:
    """Whether heads of an attention are cut from features, or put together again, without the places beside them."""
    made, given = operation.outs[0], operation.given[0]
    used = [*step.used(*_ATTENDING)]
    if tears_heads(before, after):
        reached = step.made_with(made)
        attended = [slot for one in used for slot in one.given if slot in reached]
        return any(sorted(_axes(step.values[slot].shape)) == sorted(after) for slot in attended)
    if tears_heads(after, before):
        behind = step.made_of(given)
        attended = [slot for one in used for slot in one.outs if slot in behind]
        return any(sorted(_axes(step.values[slot].shape)) == sorted(before) for slot in attended)
    return False


def tears_heads(whole: Sequence[int], parts: Sequence[int]) -> bool:
    """Whether (rows, places, heads * width) is cut to (rows, heads, places, width), as a reshape of its own can't.

    Rows and places may lie in one axis, and places last.
    """
    if len(parts) < 4:
        return False
    *rows, heads, one, other = parts
    for places, width in ((one, other), (other, one)):
        shapes = ([*rows, places, heads * width], [math.prod(rows) * places, heads * width])
        is_cut_as_it_lies = heads == places or (places == other and places == heads * width)
        if list(whole) in shapes and not is_cut_as_it_lies:
            return True
    return False


def _is_padded(step: Step, slot: Slot) -> bool:
    """Whether something was made longer and read with other axes then, which skews a table as is meant."""
    made = next((one for one in step.path(slot) if one.name not in MOVING or not one.given), None)
    return made is not None and made.name in _PADDING


def _is_skewed(step: Step, operation: Operation) -> bool:
    """Whether axes are read in another order, an end is cut off, and they are read as they were, as in XLNet."""
    for back in step.used(*MOVING):
        behind = [*itertools.islice(step.path(back.given[0]), 2)] if back.given else []
        if [one.kind in MOVING for one in behind] != [False, True] or behind[0].name != "__getitem__":
            continue
        made = behind[1]
        if made.given and any(operation is one for one in (made, back)):
            *rows, width = _axes(step.values[made.given[0]].shape) or [0]
            if _axes(step.values[back.outs[0]].shape) == [*rows, width - 1]:
                return True
    return False


@asks("padding forgotten")
def forgotten(step: Step) -> Iterator[Probed]:
    """Whether a loss reads a recurrent layer behind the padding of rows only, where nothing of a row is left at first.

    What is learned then has to come through all of the padding, as it hardly can.
    """
    given = [(slot, one) for slot in step.inputs if (one := step.leaves[slot]).dim() == 2]
    tokens = [
        (slot, behind) for slot, one in given for each in (one, one.T) if (behind := padding_of(each)) is not None
    ]
    for operation in step.used("lstm", "gru", "rnn_tanh", "rnn_relu") if tokens else ():
        flags = operation.args[-2:]  # whether it goes both ways, and whether the batch comes first
        own = step.made_of(operation.given[0])
        behind = next((one for slot, one in tokens if slot in own), None)
        shape = step.values[operation.given[0]].shape
        if behind is None or len(shape) != 3 or not all(type(one) is bool for one in flags) or flags[0]:
            continue  # of both directions, one has read the row last
        run = replayed(step.tape, step.loss, held=step.kept.first_of(step.tape))
        slope, final = step.slopes(*operation.outs[:2], run=run)
        made = run.values[operation.outs[0]].detach()
        if not flags[1]:
            made, slope = made.transpose(0, 1), None if slope is None else slope.transpose(0, 1)
        counts, rows = behind.sum(1), behind.any(1)
        if made.shape[:2] != behind.shape or int(rows.sum()) < _LEAST_GRAPHS or 2 * int(rows.sum()) < len(rows):
            continue
        reads_end = slope is not None and bool(slope[:, -1].any()) and not bool(slope[:, :-1].any())
        reads_final = (slope is None or not bool(slope.any())) and final is not None and bool(final.any())
        ends = made[rows, (behind.shape[1] - 1 - counts)[rows]]
        left, had = (float(one.double().std(0).square().mean().sqrt()) for one in (made[rows, -1], ends))
        if (reads_end or reads_final) and left < _FORGOTTEN * had:
            seen: dict[str, Any] = {"op": operation.name, "rows": int(rows.sum()), "of": len(rows)}
            yield said(operation, **seen, places=float(counts[rows].double().median()), left=left / had)


@asks("pooled channels")
def pooled_channels(step: Step) -> Iterator[Probed]:
    """Whether the channels that a convolution made are pooled, and its places become the features of a linear layer."""
    for operation in step.used(*_POOLING):
        given = step.values[operation.given[0]] if operation.given else None
        dim = operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else None)
        if given is None or given.dim() < 3 or given.shape[1] == 1 or dim not in (1, 1 - given.dim()):
            continue
        behind = (
            one for one in step.path(operation.given[0]) if one.name.startswith("conv") or one.kind not in _BEHIND
        )
        made = next(behind, None)
        pooled = step.values[operation.outs[0]]
        if made is None or not made.name.startswith("conv") or pooled.shape != (given.shape[0], *given.shape[2:]):
            continue
        ends = ((one, step.path(one.given[0])) for one in step.used("linear"))
        follows = [one for one, path in ends if operation is next(
            (each for each in path if each is operation or each.name not in MOVING), None)]  # fmt: skip
        is_beside = made.outs[0] in slots_of(step.tape, step.loss, but=[operation])
        if not is_beside and any(step.values[one.given[0]].shape[-1] == pooled[0].numel() for one in follows):
            seen: dict[str, Any] = {"op": operation.name, "channels": given.shape[1], "places": pooled[0].numel()}
            yield said(operation, **seen)


@asks("target given")
def given_away(step: Step) -> Iterator[Probed]:
    """Whether the target of a regression is one of the numbers that the model is given."""
    for operation in (one for one in step.operations if one.name in DISTANCES):
        for slot in operation.given:
            target, made_of = step.values[slot], step.made_of(slot)
            others = [leaf for one, leaf in step.leaves.items() if one not in made_of and leaf.dim() > 1]
            for leaf in others if not target.requires_grad and target.dim() else ():
                if not leaf.shape[0] == target.shape[0] == step.rows:
                    continue
                place = _column(leaf.reshape(step.rows, -1), target.reshape(step.rows, -1))
                if place >= 0:
                    yield said(operation, place=place + 1, of=leaf[0].numel())


def _column(inputs: torch.Tensor, target: torch.Tensor) -> int:
    """Which column of the inputs is a target in each row; -1 for none."""
    if target.shape[1] * 2 > inputs.shape[1] or not inputs.is_floating_point() or inputs.dtype != target.dtype:
        return -1
    if min(len(column.unique()) for column in target.T) < len(target) / 2:
        return -1  # a few values may be equal by accident
    same = [(inputs == column[:, None]).all(0).nonzero() for column in target.T]
    return int(same[0][-1]) if all(map(len, same)) else -1


@asks("blank", of_rows=False)
def blank(step: Step) -> Iterator[Probed]:
    """Whether the targets of a CTC loss hold the blank, or are longer than what they are aligned with."""
    calls = [one for one in step.tape.operations if one.name == "ctc_loss"]
    if not calls:
        raise Unknown("no CTC loss was seen")
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank")
    given = dict(zip(names, calls[-1].args, strict=False)) | calls[-1].kwargs
    targets, lengths, own = (_value(step, given[one]) for one in ("targets", "target_lengths", "input_lengths"))
    inside = targets.reshape(-1)
    if targets.dim() == 2:
        inside = targets[torch.arange(targets.shape[1], device=targets.device) < lengths[:, None].to(targets.device)]
    blanks, too_long = int((inside == given.get("blank", 0)).sum()), int((lengths > own).sum())
    answer = "yes" if blanks or too_long * 2 > len(lengths) else "no"
    is_width = targets.dim() == 2 and bool((lengths == targets.shape[1]).all())
    padded = is_width and _are_behind(targets == given.get("blank", 0))
    seen: dict[str, Any] = {
        "blank": given.get("blank", 0),
        "blanks": blanks,
        "too_long": too_long,
        "rows": len(lengths),
        "padded": padded,
        "width": targets.shape[-1],
    }
    yield said(calls[-1], answer=answer, **seen)


def _are_behind(blank: torch.Tensor) -> bool:
    """Whether blanks stand behind all else in each row, as padding does, and not as many in each."""
    counts = blank.sum(1)
    return bool((blank.int().diff(dim=1) >= 0).all()) and bool((counts != counts[0]).any())


@asks("batch before time")
def batch_before_time(step: Step) -> Iterator[Probed]:
    """Whether a CTC loss takes the samples of a batch for steps of time.

    What is given at one place of one sample changes one entry of dim 0 alone, and there several of dim 1, along which a
    net reads then. One that reads each place by itself does not say which of them is time.
    """
    call = next(iter(step.used("ctc_loss")), None)
    if call is None:
        raise Unknown("no CTC loss was seen")
    scores, row = step.values[call.given[0]], step.rows // 2
    leaves = [step.leaves[one] for one in sorted(step.inputs & step.made_of(call.given[0]))]
    given = next((one for one in leaves if one.dim() > 1 and len(one) == step.rows and one.shape[1] > 2), None)
    if given is None or scores.dim() != 3:
        raise Unknown("what the CTC loss is given is not made of the samples of a batch")
    other, place = given.clone(), given.shape[1] // 2
    other[row, place] = next((one[place] for one in given if bool((one[place] != given[row, place]).any())), 0)
    run = replayed(step.tape, step.loss, lambda one: other if one is given else one)
    changed = (run.values[call.given[0]] != scores).any(2)  # by time and sample, as the loss takes them
    if changed.any(1).nonzero().flatten().tolist() == [row] and int(changed.any(0).sum()) > 1:
        yield said(call, rows=step.rows, shape=list(scores.shape))


@asks("signs", of_rows=False)
def unsigned(step: Step) -> Iterator[Probed]:
    """Whether a loss that takes 1 for alike and -1 for different is given other numbers, which it leaves out."""
    calls = [one for one in step.tape.operations if one.name in _SIGNED]
    if not calls:
        raise Unknown("no loss of pairs was seen")
    for one in calls:
        target = _value(step, one.kwargs.get("target", one.args[-1] if one.args else 0.0))
        others = sorted({float(value) for value in target.unique()} - {1.0, -1.0})
        if others:
            share = float((target.abs() != 1).double().mean())
            yield said(one, op=one.name, others=others[:3], share=share)


def _value(step: Step, one: Any) -> torch.Tensor:
    return step.values[one] if one in step.values else torch.as_tensor(one)


@asks("edges")
def not_offset(step: Step) -> Iterator[Probed]:
    """Whether messages come to no node beyond the number that the largest graph of a batch has."""
    sizes = next((found for one in step.leaves.values() if (found := _sizes(one)) is not None), None)
    if sizes is None:
        raise Unknown("no tensor numbers the graphs of the nodes of a batch")
    nodes, largest = int(sizes.sum()), int(sizes.max())
    for operation in step.used(*_GATHERING):
        index = _index(operation, step, nodes)
        if index is not None and 2 * len(index) >= nodes and int(index.max()) < largest <= nodes // _LEAST_GRAPHS:
            seen: dict[str, Any] = {"nodes": nodes, "graphs": len(sizes), "last": int(index.max()), "edges": len(index)}
            yield said(operation, op=operation.name.strip("_"), **seen)


def _sizes(one: torch.Tensor) -> torch.Tensor | None:
    """How many nodes each graph has, if a tensor says for each node the number of its graph, in order."""
    if one.dim() != 1 or one.dtype != torch.int64 or len(one) < 2 * _LEAST_GRAPHS or int(one[0]) != 0:
        return None
    steps = one.diff()
    is_one = bool(((steps == 0) | (steps == 1)).all()) and int(one[-1]) + 1 >= _LEAST_GRAPHS
    return one.bincount() if is_one and int(one[-1]) + 1 < len(one) else None


def _index(operation: Operation, step: Step, nodes: int) -> torch.Tensor | None:
    """The nodes that an operation brings messages to."""
    given = [step.values[one] for one in operation.given]
    dim = next((one for one in operation.args[1:] if type(one) is int), operation.kwargs.get("dim"))
    index = next((one for one in given[1:] if one.dtype == torch.int64), None)
    if index is None or dim != 0 or given[0].shape[:1] != (nodes,):
        return None
    return index.reshape(len(index), -1)[:, 0] if len(index) else None


@asks("one place", of_rows=False)
def one_place(step: Step) -> Iterator[Probed]:
    """Whether all places of a sequence get one row of a table of encodings, the one that their number names.

    ``pe[:, x.shape[1]]`` in the place of ``pe[:, :x.shape[1]]``: an encoding of a kind, a level or a time is named by
    another number.
    """
    picked: dict[Slot, tuple[Slot, int]] = {}  # what is of one row of a table, with the table and the number of the row
    numbers: dict[Slot, set[int]] = {}  # of the rows that are picked of each table
    found: list[tuple[Slot, Probed]] = []
    tables = step.leaves.keys() | step.parameters.keys()
    for operation in step.operations:
        given = operation.given
        if operation.name == "__getitem__" and len(given) == 1 and given[0] in tables:
            row = _row(operation.args[1], step.values[given[0]].shape)
            if row is not None:
                picked |= dict.fromkeys(operation.outs, (given[0], row))
                numbers.setdefault(given[0], set()).add(row)
        elif operation.kind in _MOVED and given and given[0] in picked:
            picked |= dict.fromkeys(operation.outs, picked[given[0]])
        elif operation.kind in ("add", "add_") and len(given) == 2 and picked.keys() & set(given):
            other, row_of = given if given[1] in picked else given[::-1]
            table, index = picked[row_of]
            entries, rows = step.values[other], step.values[row_of]
            shape = entries.shape[:2] if entries.dim() == 3 and rows.numel() == entries.shape[-1] else ()
            is_named = index >= _LEAST_PLACES and index in (*shape, *(count - 1 for count in shape))
            if is_named and min(shape) > 1 and rows.numel() == rows.shape[-1]:
                count = max(step.values[table].shape[:-1])
                found.append((table, said(operation, row=index, table=count, places=max(shape))))
    # a level of a net, or a time, is picked of its table once for each
    yield from (probed for table, probed in found if len(numbers[table]) == 1)


def _row(index: Any, shape: torch.Size) -> int | None:
    """The number of the row that an index picks of a table, if it picks one."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(type(one) is int or one == slice(None) for one in parts) or len(parts) > len(shape):
        return None
    numbers = [one for at, one in enumerate(parts) if type(one) is int and shape[at] > 1]
    return numbers[0] if len(numbers) == 1 else None


@asks("torn edges", of_rows=False)
def torn_edges(step: Step) -> Iterator[Probed]:
    """Whether edges join nodes by chance that a list of pairs, of which they are a reshape, joins in order."""
    for edges, table in _graphs(step):
        other = edges.reshape(-1, 2).t()
        if abs(_likeness(table, edges)) < _BY_CHANCE and (alike := _likeness(table, other)) > _SURELY:
            seen = f"are two whose features are alike (by {alike:.3g} standard errors), and those of an edge are not"
            yield said(step.loss, edges=edges.shape[1], seen=seen)
        elif _in_order(other) and not _in_order(edges) and not torch.equal(_joined(edges), _joined(other)):
            yield said(
                step.loss, edges=edges.shape[1], seen="make a list in the order of its nodes, and the edges do not"
            )


@asks("one-way edges", of_rows=False)
def one_way_edges(step: Step) -> Iterator[Probed]:
    """Whether each edge goes to the node of the larger number, or of the smaller one, and they are those of no tree."""
    for edges, table in _graphs(step):
        first, second = edges
        crowded = [len(one.unique()) < _CROWDED * len(one) for one in (first, second)]
        if all(crowded) and bool((first < second).all() or (first > second).all()):
            yield said(step.loss, edges=edges.shape[1], nodes=len(table))


def _graphs(step: Step) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What may be the edges of a graph, and the features of its nodes."""
    given = [step.leaves[slot] for slot in sorted(step.inputs)]
    tables = [one for one in given if one.is_floating_point() and one.dim() == 2 and len(one) >= _LEAST_LINKED]
    numbers = [one for one in given if one.dtype == torch.int64]
    ends = itertools.permutations([one for one in numbers if one.dim() == 1][:_MOST_ENDS], 2)
    pairs = [one for one in numbers if one.dim() == 2 and len(one) == 2]
    pairs += [torch.stack(both) for both in ends if both[0].shape == both[1].shape]
    for edges, table in itertools.product(pairs, tables):
        if edges.shape[1] >= _LEAST_LINKED and 0 <= int(edges.min()) <= int(edges.max()) < len(table):
            yield edges, table


def _in_order(edges: torch.Tensor) -> bool:
    """Whether edges are sorted by their first or by their second nodes, as lists of edges are made."""
    return any(bool((nodes.diff() >= 0).all()) for nodes in edges)


def _joined(edges: torch.Tensor) -> torch.Tensor:
    """The pairs of nodes that edges join, in either direction, once each."""
    joined: torch.Tensor = torch.unique(edges.sort(0).values, dim=1)
    return joined


def _likeness(table: torch.Tensor, edges: torch.Tensor) -> float:
    """By how many standard errors the nodes of edges are more alike than two nodes by chance."""
    pairs = _joined(edges[:, edges[0] != edges[1]])  # labels of few classes are few pairs
    if pairs.shape[1] < _LEAST_LINKED // 2:
        return 0.0
    first, second = pairs
    columns = (table.double() - table.double().mean(0)) / table.double().std(0).clamp_min(1e-9)
    products = (columns[first] * columns[second]).mean(1)
    error = products.std() / len(products) ** 0.5 if len(products) > 1 else torch.tensor(torch.inf)
    return float(products.sum() / max(len(products), 1) / error.clamp_min(1e-12))
