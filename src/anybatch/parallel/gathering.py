"""Gathers what a coupled loss needs from every rank: the outputs of the encoder, and the batch."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anybatch.batch.trees import flat, like, map_leaves
from anybatch.errors import LossError
from anybatch.loss.coupling import twins
from anybatch.loss.reducing import Joint, Leaves, Stage
from anybatch.parallel.messages import Messages

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def gathered(outputs: Any, gets: Leaves, batch: Any, messages: Messages) -> Joint:
    """Gathers the outputs of all ranks in the order of the ranks, with uneven rows, in one collective."""
    own = flat(outputs) if gets else []
    places = twins([0] * len(own), own)
    mine = {
        "rows": next((len(leaf) for leaf in own if isinstance(leaf, torch.Tensor)), 0),
        "outputs": [_described(*pair) for pair in zip(own, places, strict=True)],
        "gets": [leaf is not None for leaf in gets],
        "batch": batch is not None,
    }
    heard = messages.round(Stage.GATHERED, mine)
    takes = [one["batch"] for one in heard]
    if len(set(takes)) > 1:
        raise LossError(
            f"the loss of Coupled takes the batch on rank {takes.index(True)} and not on rank {takes.index(False)}; "
            "expected the same loss on all ranks"
        )
    kinds = _agreed(heard)
    rows = [one["rows"] for one in heard]
    order = sorted(kinds, key=lambda position: -kinds[position][0].itemsize)  # each begins where its dtype may
    sizes = [max(rows) * math.prod(kinds[position][1]) * kinds[position][0].itemsize for position in order]

    def parts_of(buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        pairs = zip(order, buffer.split(sizes), strict=True)
        return {
            position: part.view(kinds[position][0]).view(max(rows), *kinds[position][1]) for position, part in pairs
        }

    buffers = [torch.zeros(sum(sizes), dtype=torch.uint8, device=messages.device) for _ in range(messages.size + 1)]
    messages.round(Stage.READY, {})  # all have the memory, so nobody is missing in what follows
    send = buffers.pop()
    sent = parts_of(send)
    for position in kinds if own else ():
        sent[position][: len(own[position])].copy_(own[position].detach())
    messages.gather_tensors(buffers, send)
    del send, sent
    found = [parts_of(buffer) for buffer in buffers]
    home = next((leaf.device for leaf in own if isinstance(leaf, torch.Tensor)), messages.device)
    columns = {
        position: torch.cat([parts[position][:n] for parts, n in zip(found, rows, strict=True)]).to(home)
        for position in kinds
    }
    batches = [] if batch is None else messages.gather_objects(map_leaves(compact, batch))
    wanted = [any(flags) for flags in zip(*[one["gets"] for one in heard if one["gets"]], strict=True)]
    leaf_of = [columns[i].requires_grad_() if i in columns and wanted[i] else None for i in range(len(wanted))]
    if own:
        outputs = like(outputs, [columns.get(place, leaf) for place, leaf in zip(places, own, strict=True)])
    return Joint(outputs, leaf_of, sum(rows), sum(rows[: messages.rank]), batches)


def _described(leaf: Any, twin: int) -> list[Any]:
    """An output in plain values that have to be equal on all ranks."""
    if isinstance(leaf, torch.Tensor):
        return [str(leaf.dtype), list(leaf.shape[1:]), twin]
    return ["value", hashlib.sha256(repr(leaf).encode()).hexdigest()[:16], repr(leaf)[:40]]


def _agreed(heard: Sequence[Mapping[str, Any]]) -> dict[int, tuple[torch.dtype, list[int]]]:
    """The dtype and the shape of a row of every output, by its position, each tensor once."""
    having = [(rank, one["outputs"]) for rank, one in enumerate(heard) if one["outputs"]]
    rank, expected = having[0]
    for other, outputs in having[1:]:
        if outputs == expected:
            continue
        pairs = list(zip(expected, outputs, strict=False))
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        texts = ["none" if differs >= len(o) else _worded(o[differs]) for o in (expected, outputs)]
        raise LossError(
            f"encode gave for output {differs} on rank {rank} {texts[0]}, on rank {other} {texts[1]}; expected the "
            "same containers, dtypes and shapes of a row on all ranks, and the same value of what is no tensor, so "
            "that the loss sees the samples of all of them. Pad to one shape in encode, or let each rank's loss see "
            "its own samples: Coupled(..., gather=False)"
        )
    return {
        position: (_DTYPES[kind[0]], kind[1])
        for position, kind in enumerate(expected)
        if kind[0] != "value" and kind[2] == position
    }


def _worded(kind: Sequence[Any]) -> str:
    return str(kind[2]) if kind[0] == "value" else f"{kind[0]} rows of shape {tuple(kind[1])}"


def compact(leaf: Any) -> Any:
    """A tensor without the rows of others that its storage may have, on the host; another value as it is."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        leaf = leaf.detach().cpu()
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    return leaf
