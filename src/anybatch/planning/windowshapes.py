"""The batches of a window, which may each be padded to a length of their own."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch

from anybatch.gradient.sequence import OverTime
from anybatch.tensors.batches import Part, Splittable, split
from anybatch.tensors.layout import PLAIN, Branch, Constant, Node, Rows, rows_of
from anybatch.tensors.trees import leaves
from anybatch.tensors.writes import writable

Shape = tuple[int, ...]


def shapes_of_batches(splittable: Splittable, loss_fn: Any = None) -> tuple[Shape, ...]:
    """All dimensions of the samples of each batch, one after the other.

    Args:
        splittable: the logical batch.
        loss_fn: one that goes in chunks of time plans for lengths by itself.

    Returns:
        One shape for each batch; none of raw samples, and where samples lie in something else than tensors and lists of
        plain items, which are looked at one by one.
    """
    if splittable.is_collated or isinstance(loss_fn, OverTime) or not all(map(_is_cut_plainly, splittable.nodes())):
        return ()
    return tuple(tuple(_dimensions(layout.root)) for layout in splittable.layouts)


def differ(splittable: Splittable, loss_fn: Any = None) -> bool:
    """Whether a window has batches of several shapes.

    Args:
        splittable: the logical batch.
        loss_fn: see ``shapes_of_batches``.
    """
    return len(splittable.batches) > 1 and len(set(shapes_of_batches(splittable, loss_fn))) > 1


def lengths_by_shape(shapes: tuple[Shape, ...]) -> tuple[dict[Shape, int], bool]:
    """A length for each shape, and whether everything else about a shape follows from it.

    Args:
        shapes: of the batches of a window, of which some differ.
    """
    found = list(dict.fromkeys(shapes))
    columns = [[one[k] for one in found] for k in range(len(found[0]))] if len({*map(len, found)}) == 1 else []
    varying = [column for column in columns if len({*column}) > 1]
    is_one = len(found) > 2 and bool(varying)
    is_one = is_one and all(len({a - b for a, b in zip(varying[0], other, strict=True)}) == 1 for other in varying)
    if is_one:
        return {shape: max(column[i] for column in varying) for i, shape in enumerate(found)}, True
    order = sorted(found, key=lambda shape: (sum(shape), shape))
    return {shape: sum(shape) * len(order) + place for place, shape in enumerate(order)}, False


def part_of_window(splittable: Splittable, part: Part) -> Any:
    """A micro-batch of as many samples as a part, of the batch that its first sample is in.

    Args:
        splittable: a window.
        part: the samples; where the batch has fewer, some come several times.
    """
    index, _ = batch_in_window(splittable, part)
    layout, samples = splittable.layouts[index], len(part.samples)
    if samples > layout.rows:
        return _gathered(layout.root, [place % layout.rows for place in range(samples)])
    found = next(split(layout, [samples, layout.rows - samples]))
    return writable(found) if splittable.is_copied else found


def batch_in_window(splittable: Splittable, part: Part) -> tuple[int, int]:
    """Which batch of a window the first sample of a part is in, and how many samples that has.

    Args:
        splittable: a window, or a single batch.
        part: the samples.
    """
    stops = list(accumulate(layout.rows for layout in splittable.layouts))
    index = bisect_right(stops, part.samples[0])
    return index, splittable.layouts[index].rows


def _gathered(node: Node, samples: list[int]) -> Any:
    """Any samples of a batch of tensors, lists and arrays, as copies."""
    if isinstance(node, Branch):
        return node.container.rebuild([_gathered(child, samples) for child in node.children])
    value = node.value
    if isinstance(node, Constant):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()[torch.tensor(samples, device=value.device)].requires_grad_(value.requires_grad)
    return type(value)(value[i] for i in samples) if isinstance(value, (list, tuple)) else value[samples]


def _is_cut_plainly(node: Rows | Constant) -> bool:
    if isinstance(node, Constant):
        return True
    value = node.value
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_nested
    if type(value) in (list, tuple):
        return all(isinstance(item, PLAIN) for item in value)
    return hasattr(value, "dtype") and rows_of(value) is not None


def _dimensions(node: Node) -> Iterator[int]:
    if isinstance(node, Branch):
        for child in node.children:
            yield from _dimensions(child)
    elif isinstance(node, Rows):
        yield from getattr(node.value, "shape", ())[1:]
    else:
        for _, _, leaf in leaves(node.value):
            yield from getattr(leaf, "shape", ())
