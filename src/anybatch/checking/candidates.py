"""What a loss may be the mean over: every number of items that can be read off a batch."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.batch.counting import count_samples, count_tokens
from anybatch.batch.layout import Branch, Node, Rows, lay_out
from anybatch.batch.trees import leaves, lookup
from anybatch.errors import BatchError

_IGNORED = (-100, -1, 255, 0, 1)
_MOST_FREQUENT = 4  # values of labels that may be those that are left out
_LABEL_NAMES = ("label", "target", "tgt", "gold")


@dataclass(frozen=True)
class Candidate:
    """One way to count.

    Args:
        code: what is written behind ``count=``.
        items: what is counted, such as ``labels (batch['labels'] != -100)``.
        function: counts the items of a batch.
    """

    code: str
    items: str
    function: Callable[[Any], Any]

    def number(self, batch: Any, samples: int) -> float:
        """The count of a batch; NaN where it can't be counted.

        Args:
            batch: the batch.
            samples: how many it has, which can't be read off every batch.
        """
        if self.function is count_samples:
            return samples
        try:
            return float(self.function(batch))
        except (ValueError, TypeError, IndexError, RuntimeError, KeyError, AttributeError):
            return math.nan


@dataclass(frozen=True)
class _Leaf:
    """A leaf with rows: as it is written in code, its dotted path, and itself."""

    code: str
    path: str
    value: Any

    def counted(self, code: str, items: str, number: Callable[[Any], Any]) -> Candidate:
        """A way to count by this leaf.

        Args:
            code: see ``Candidate``.
            items: see ``Candidate``.
            number: counts the leaf of a batch.
        """
        return Candidate(code, items, lambda batch: number(lookup(batch, self.path)))


def ways_to_count(batch: Any, broadcast: Sequence[str], weights: Iterable[tuple[str, torch.Tensor]]) -> list[Candidate]:
    """Lists ways to count a batch, the likeliest first.

    Args:
        batch: the whole batch.
        broadcast: dotted paths of leaves that are not split.
        weights: tensors that the loss reaches, by name, among which class weights may be.

    Returns:
        The candidates.

    Example:
        >>> batch = {"x": torch.zeros(2, 3), "labels": torch.tensor([[5, -100, 7], [1, 2, -100]])}
        >>> [candidate.code for candidate in ways_to_count(batch, (), [])][:3]
        ['anybatch.count_samples', 'anybatch.count_tokens("labels")', 'anybatch.count_tokens("labels", shift=1)']
    """
    rows = list(_leaves_of(batch, broadcast))
    rows.sort(key=lambda leaf: not _is_label(leaf.path))
    found = [Candidate("anybatch.count_samples", "samples", count_samples)]
    tensors = [leaf for leaf in rows if isinstance(leaf.value, torch.Tensor) and leaf.value.layout is torch.strided]
    for leaf in tensors:
        if _is_integer(leaf.value) and (_is_label(leaf.path) or not _is_mask(leaf.value)):
            found += _of_integers(leaf)
    for leaf in tensors:
        found += _of_masks(leaf)
    named = list(weights)
    for leaf in tensors:
        if leaf.value.dtype is torch.int64:
            found += _of_class_weights(leaf, named)
    for leaf in rows:
        if isinstance(leaf.value, (list, tuple)):
            found += _of_lists(leaf)
    return found


def _leaves_of(batch: Any, broadcast: Sequence[str]) -> Iterator[_Leaf]:
    """The leaves with rows; of a batch whose rows can't be told, as a collate may make it, all leaves."""
    try:
        root = lay_out(batch, broadcast).root
    except BatchError:
        yield from (_Leaf(label, ".".join(path), leaf) for label, path, leaf in leaves(batch, "batch"))
    else:
        yield from _leaves(root, "batch", ())


def _is_label(path: str) -> bool:
    last = path.rpartition(".")[2].lower()
    return last == "y" or any(name in last for name in _LABEL_NAMES)


def _is_integer(values: torch.Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex() and values.dtype is not torch.bool


def _is_mask(values: torch.Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _leaves(node: Node, code: str, path: tuple[str, ...]) -> Iterator[_Leaf]:
    if isinstance(node, Rows):
        yield _Leaf(code, ".".join(path), node.value)
    elif isinstance(node, Branch):
        for child, below in zip(node.container.children, node.children, strict=True):
            yield from _leaves(below, code + child.label, (*path, child.key))


def _of_integers(leaf: _Leaf) -> Iterator[Candidate]:
    """Labels that are not ignored, with and without the shift of a causal language model."""
    values = leaf.value
    ignored = [v for v in _IGNORED if bool((values == v).any())]
    found, times = values.unique(return_counts=True)
    ignored += found[times.argsort(descending=True)[:_MOST_FREQUENT]].tolist()
    for ignore in dict.fromkeys([-100, *ignored]):
        for shift in (0, 1) if values.dim() >= 2 else (0,):
            options = [f'"{leaf.path}"'] if leaf.path else ['""']
            options += [f"ignore_index={ignore}"] if ignore != -100 else []
            options += [f"shift={shift}"] if shift else []
            written = leaf.code + ("[..., 1:]" if shift else "")
            yield Candidate(
                f"anybatch.count_tokens({', '.join(options)})",
                f"labels ({written} != {ignore})",
                count_tokens(leaf.path, ignore_index=ignore, shift=shift),
            )


def _of_masks(leaf: _Leaf) -> Iterator[Candidate]:
    """Sums of masks and of weights, and of what a mask leaves."""
    values = leaf.value
    if values.is_complex() or not bool((values >= 0).all()):
        return
    is_mask = _is_mask(values)
    if not is_mask and not values.is_floating_point():
        return
    cuts = {"": slice(None), "[..., 1:]": slice(1, None), "[..., :-1]": slice(None, -1)}
    dtype = torch.float64 if values.is_floating_point() else torch.int64
    for written, cut in cuts.items() if values.dim() >= 2 else (("", slice(None)),):
        code = leaf.code + written

        def total(found: torch.Tensor, cut: slice = cut) -> torch.Tensor:
            return found[..., cut].sum(dtype=dtype)

        def zeros(found: torch.Tensor, cut: slice = cut) -> torch.Tensor:
            return (found[..., cut] == 0).sum()

        summed = f"{code}.sum()" if is_mask else f"{code}.sum(dtype=torch.float64)"
        yield leaf.counted(f"lambda batch: {summed}", f"items ({summed})", total)
        if is_mask:
            yield leaf.counted(f"lambda batch: ({code} == 0).sum()", f"items ({code} == 0)", zeros)


def _of_class_weights(leaf: _Leaf, weights: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Candidate]:
    """The weights of the classes of the labels, as a weighted cross entropy divides by."""
    labels = leaf.value
    found = labels.unique()
    for name, weight in weights:
        if weight.dim() != 1 or not weight.is_floating_point():
            continue
        outside = found[(found < 0) | (found >= weight.numel())]
        ignored = outside.tolist() or [None, *(v for v in _IGNORED if bool((found == v).any()))]
        for ignore in ignored if len(outside) < 2 else ():
            chosen = f"{leaf.code}[{leaf.code} != {ignore}]" if ignore is not None else leaf.code
            code = f"{name}[{chosen}].sum("

            def weighed(labels: torch.Tensor, weight: torch.Tensor = weight, ignore: int | None = ignore) -> Any:
                kept = labels if ignore is None else labels[labels != ignore]
                return weight.to(labels.device)[kept].sum(dtype=torch.float64)

            yield leaf.counted(
                f"lambda batch: {code}dtype=torch.float64)", f"class weights of the labels ({code}))", weighed
            )


def _of_lists(leaf: _Leaf) -> Iterator[Candidate]:
    """The lengths of the items of a list, such as the boxes of each image, or of what is in each of its mappings."""
    items = leaf.value
    if not all(isinstance(item, Mapping) for item in items):
        yield from _of_items(items, "item", leaf, lambda item: item)
        return
    for key in dict.fromkeys(key for item in items for key in item):
        yield from _of_items([item.get(key) for item in items], f"item[{key!r}]", leaf, operator.itemgetter(key))


def _of_items(values: Sequence[Any], code: str, leaf: _Leaf, chosen: Callable[[Any], Any]) -> Iterator[Candidate]:
    if not all(hasattr(value, "__len__") and not isinstance(value, str) for value in values):
        return
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(tensor.dim() == 0 or tensor.layout is not torch.strided for tensor in tensors):
        return
    each = f"len({code}) for item in {leaf.code}"
    items = f"items of the list {leaf.code}" if code == "item" else f"items ({each})"
    yield leaf.counted(f"lambda batch: sum({each})", items, lambda v: sum(len(chosen(item)) for item in v))
    if len(tensors) < len(values) or not all(_is_integer(tensor) for tensor in tensors):
        return
    for ignore in [v for v in _IGNORED if any(bool((tensor == v).any()) for tensor in tensors)]:
        each = f"int(({code} != {ignore}).sum()) for item in {leaf.code}"

        def kept(found: Any, ignore: int = ignore) -> int:
            return sum(int((chosen(item) != ignore).sum()) for item in found)

        yield leaf.counted(f"lambda batch: sum({each})", f"labels ({each})", kept)


def even_labels(batch: Any, broadcast: Sequence[str]) -> tuple[str, int]:
    """Labels of which every sample has the same number, so that a mean over them is one over samples.

    Args:
        batch: the whole batch.
        broadcast: dotted paths of leaves that are not split.

    Returns:
        Their dotted path and how many each sample has; an empty path if there are none.
    """
    for leaf in _leaves(lay_out(batch, broadcast).root, "batch", ()):
        if isinstance(leaf.value, torch.Tensor) and _is_label(leaf.path) and leaf.value.dim() >= 2:
            if not _is_integer(leaf.value):
                continue
            counts = (leaf.value != -100).flatten(1).sum(1)
            if bool((counts == counts[0]).all()):
                return leaf.path, int(counts[0])
    return "", 0


def same_by_sample(one: Candidate, other: Candidate, samples: Sequence[Any]) -> int:
    """Where two candidates can be told apart.

    Args:
        one: a candidate.
        other: another one.
        samples: the batch in pieces of one sample.

    Returns:
        After how many samples the shares of the total that they have counted differ most; 0 if they never do.
    """
    shares = []
    for candidate in (one, other):
        numbers = torch.tensor([candidate.number(sample, 1) for sample in samples], dtype=torch.float64)
        shares.append((numbers / numbers.sum()).cumsum(0)[:-1])
    difference = (shares[0] - shares[1]).abs().nan_to_num(0.0)
    if not difference.numel() or float(difference.max()) < 1e-9:
        return 0
    return int(difference.argmax()) + 1
