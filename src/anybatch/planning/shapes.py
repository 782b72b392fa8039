"""How large the samples of a batch are, by which a later batch is known that outgrows its plan."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.planning.subjects import Subject
from anybatch.tensors.layout import PLAIN, Constant, rows_of
from anybatch.tensors.trees import leaves

Shape = tuple[int, ...]
_WHOLE = " as a whole"


def shapes_of(subject: Subject) -> dict[str, Shape]:
    """The shapes of the samples of a batch, and of what is not cut; empty for raw samples.

    Args:
        subject: has the batch.

    Returns:
        The largest of each kind of leaf, dimension by dimension: of a sample behind the first dimension, of one in a
        list whole.
    """
    found: dict[str, Shape] = {}
    for node in subject.splittable.nodes():
        shapes = _of_whole(node.value, node.label) if isinstance(node, Constant) else _of_rows(node.value, node.label)
        for place, own in shapes:
            alike = len(found.get(place, own)) == len(own)  # items of a list need not be
            name = place if alike else f"{place} with {len(own)} dimensions"
            found[name] = tuple(max(pair) for pair in zip(found.get(name, own), own, strict=True))
    return found


def outgrown(planned: dict[str, Shape], here: dict[str, Shape]) -> str:
    """Says which tensor of a batch is larger than planned for; empty if none is.

    Args:
        planned: what ``shapes_of`` gave for the batch that was planned for.
        here: what it gives for this one.

    Example:
        >>> outgrown({"batch['x']": (8, 3)}, {"batch['x']": (9, 3)})
        "batch['x'] has shape [rows, 9, 3], planned for (8, 3)"
    """
    for label, shape in here.items():
        known = planned.get(label)
        if known is None or len(known) != len(shape) or any(a > b for a, b in zip(shape, known, strict=True)):
            sizes = [*([] if label.endswith(_WHOLE) else ["rows"]), *map(str, shape)]
            return f"{label} has shape [{', '.join(sizes)}], planned for {known}"
    return ""


def _of_whole(value: Any, label: str) -> Iterator[tuple[str, Shape]]:
    for place, _, leaf in leaves(value, label):
        shape = getattr(_data_of(leaf), "shape", None)
        if shape:
            yield place + _WHOLE, tuple(shape)


def _of_rows(value: Any, label: str) -> Iterator[tuple[str, Shape]]:
    if isinstance(value, PackedSequence):
        yield label, (len(value.batch_sizes), *value.data.shape[1:])
    elif isinstance(value, torch.Tensor) and value.is_nested:
        for item in value.unbind():
            yield label, tuple(item.shape)
    elif isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        yield label, tuple(value.shape[1:])
        yield f"{label}.values()", (-(-value._nnz() // max(1, len(value))),)
    elif rows_of(value) is not None:
        yield label, tuple(value.shape[1:])
    else:
        for item in value:
            yield from _of_item(item, label)


def _of_item(item: Any, label: str) -> Iterator[tuple[str, Shape]]:
    """A sample in a list: all are in one place, whatever their number."""
    if isinstance(item, PLAIN):
        return
    if isinstance(item, (list, tuple)) and all(isinstance(one, PLAIN) for one in item):
        yield label, (len(item),)
        return
    for place, _, leaf in leaves(item, label):
        shape = getattr(_data_of(leaf), "shape", None)
        if shape is not None:
            yield place, tuple(shape)


def _data_of(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, PackedSequence) else leaf
