"""What a loss may be the mean over: every number of items that can be read off a batch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.batch.counting import count_samples, count_tokens
from anybatch.batch.layout import Branch, Node, Rows, lay_out
from anybatch.batch.trees import leaves, lookup
from anybatch.errors import BatchError

_IGNORED = (-100, -1, 255, 0, 1)
_MOST_FREQUENT = 4  # values of labels that may be those that are left out
_LABEL_NAMES = ("label", "target", "tgt", "gold")
_UNCOUNTABLE = (ValueError, TypeError, IndexError, RuntimeError, KeyError, AttributeError)


class Candidate(NamedTuple):
    """One way to count."""

    code: str  # what is written behind ``count=``
    items: str  # what is counted, such as ``labels (batch['labels'] != -100)``
    function: Callable[[Any], Any]  # counts the items of a batch
    # whether some entries of the leaf are not counted; ``None`` for samples of one class, which a loss rarely ignores
    leaves_out: bool | None = True

    def number(self, batch: Any, samples: int) -> float:
        """The count of a batch of so many samples, which can't be read off every batch; NaN where it has none."""
        if self.function is count_samples:
            return samples
        try:
            return float(self.function(batch))
        except _UNCOUNTABLE:
            return math.nan


class _Leaf(NamedTuple):
    """A leaf with rows: as it is written in code, its dotted path, and itself."""

    code: str
    path: str
    value: Any

    @property
    def is_label(self) -> bool:
        last = self.path.rpartition(".")[2].lower()
        return last == "y" or any(name in last for name in _LABEL_NAMES)

    def counted(self, code: str, kind: str, tensor: tuple[str, torch.Tensor] | None = None) -> Candidate:
        """A way to count: the line that is shown is the one that is run.

        Args:
            code: with ``{0}`` for the leaf, and ``{1}`` for a tensor of the loss.
        """
        name, weight = tensor or ("", None)
        shown, run = code.format(self.code, name), compile(code.format("leaf", "weight"), "count", "eval")

        def function(batch: Any) -> Any:
            leaf = lookup(batch, self.path)
            there = weight if weight is None else weight.to(leaf.device)
            return eval(run, {"torch": torch, "leaf": leaf, "weight": there})

        return Candidate(f"lambda batch: {shown}", f"{kind} ({shown.replace('dtype=torch.float64', '')})", function)


def ways_to_count(batch: Any, broadcast: Sequence[str], weights: Iterable[tuple[str, torch.Tensor]]) -> list[Candidate]:
    """Lists ways to count a batch, the likeliest first.

    Example:
        >>> batch = {"x": torch.zeros(2, 3), "labels": torch.tensor([[5, -100, 7], [1, 2, -100]])}
        >>> [candidate.code for candidate in ways_to_count(batch, (), [])][:3]
        ['anybatch.count_samples', 'anybatch.count_tokens("labels")', 'anybatch.count_tokens("labels", shift=1)']
    """
    rows = sorted(_leaves_of(batch, broadcast), key=lambda leaf: not leaf.is_label)
    found = [Candidate("anybatch.count_samples", "samples", count_samples)]
    tensors = [leaf for leaf in rows if isinstance(leaf.value, torch.Tensor) and leaf.value.layout is torch.strided]
    named = [(name, weight) for name, weight in weights if weight.dim() == 1 and weight.is_floating_point()]
    for leaf in tensors:
        if _is_integer(leaf.value) and (leaf.is_label or not _is_mask(leaf.value)):
            found += _of_integers(leaf)
    for way in (_of_masks, _of_missing, lambda leaf: _of_class_weights(leaf, named)):
        found += [one for leaf in tensors for one in way(leaf)]
    found += [one for leaf in rows if isinstance(leaf.value, (list, tuple)) for one in _of_lists(leaf)]
    lengths = [leaf for leaf in tensors if _is_integer(leaf.value) and leaf.value.dim() == 1]
    return found + [leaf.counted("{0}.sum()", "items") for leaf in lengths if not _is_mask(leaf.value)]


def _leaves_of(batch: Any, broadcast: Sequence[str]) -> Iterator[_Leaf]:
    """The leaves with rows; of a batch whose rows can't be told, as a collate may make it, all leaves."""
    try:
        root = lay_out(batch, broadcast).root
    except BatchError:
        yield from (_Leaf(label, ".".join(path), leaf) for label, path, leaf in leaves(batch, "batch"))
    else:
        yield from _leaves(root, "batch", ())


def _leaves(node: Node, code: str, path: tuple[str, ...]) -> Iterator[_Leaf]:
    if isinstance(node, Rows):
        yield _Leaf(code, ".".join(path), node.value)
    elif isinstance(node, Branch):
        for child, below in zip(node.container.children, node.children, strict=True):
            yield from _leaves(below, code + child.label, (*path, child.key))


def _is_integer(values: torch.Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex() and values.dtype is not torch.bool


def _is_mask(values: torch.Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _of_integers(leaf: _Leaf) -> Iterator[Candidate]:
    """Labels that are not ignored, with and without the shift of a causal language model."""
    values = leaf.value
    found, times = values.unique(return_counts=True)
    there = [v for v in _IGNORED if bool((found == v).any())]
    there += found[times.argsort(descending=True)[:_MOST_FREQUENT]].tolist()
    for ignore in dict.fromkeys([-100, *there]):
        leaves_out = None if values.dim() < 2 and 0 <= ignore < max(_IGNORED) else ignore in there
        for shift in (0, 1) if values.dim() >= 2 else (0,):
            options = [f'"{leaf.path}"', *[f"ignore_index={ignore}"] * (ignore != -100), *[f"shift={shift}"] * shift]
            code, shown = f"anybatch.count_tokens({', '.join(options)})", leaf.code + "[..., 1:]" * shift
            function = count_tokens(leaf.path, ignore_index=ignore, shift=shift)
            yield Candidate(code, f"labels ({shown} != {ignore})", function, leaves_out)


def _of_masks(leaf: _Leaf) -> Iterator[Candidate]:
    """Sums of masks and of weights, and of what a mask leaves."""
    values = leaf.value
    if values.is_complex() or not bool((values >= 0).all()):
        return
    is_mask = _is_mask(values)
    if not is_mask and not values.is_floating_point():
        return
    is_full = is_mask and bool(values.all())
    for cut in ("", "[..., 1:]", "[..., :-1]") if values.dim() >= 2 else ("",):
        found = leaf.counted(f"{{0}}{cut}.sum({'' if is_mask else 'dtype=torch.float64'})", "items")
        yield found._replace(leaves_out=not is_full)
        if is_mask:
            yield leaf.counted(f"({{0}}{cut} == 0).sum()", "items")


def _of_missing(leaf: _Leaf) -> Iterator[Candidate]:
    """Numbers that are there, where missing ones are NaN, or one value that labels often have."""
    values = leaf.value
    if not values.is_floating_point():
        return
    if bool(values.isnan().any()):
        yield leaf.counted("(~{0}.isnan()).sum()", "numbers")
    elif (below := values[values < 0]).numel() and bool((below == below[0]).all()):  # one mark, such as -1
        yield leaf.counted("({0} >= 0).sum()", "numbers")
    elif leaf.is_label:
        found, times = values.unique(return_counts=True)
        if int(times.max()) > 1:
            yield leaf.counted(f"({{0}} != {float(found[times.argmax()])!r}).sum()", "numbers")


def _of_class_weights(leaf: _Leaf, weights: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Candidate]:
    """The weights of the classes of the labels, as a weighted cross entropy divides by."""
    if leaf.value.dtype is not torch.int64:
        return
    found = leaf.value.unique()
    for name, weight in weights:
        outside = found[(found < 0) | (found >= weight.numel())]
        ignored = outside.tolist() or [None, *(v for v in _IGNORED if bool((found == v).any()))]
        for ignore in ignored if len(outside) < 2 else ():
            chosen = "{0}" if ignore is None else f"{{0}}[{{0}} != {ignore}]"
            code = f"{{1}}[{chosen}].sum(dtype=torch.float64)"
            yield leaf.counted(code, "class weights of the labels", (name, weight))


def _of_lists(leaf: _Leaf) -> Iterator[Candidate]:
    """The lengths of the items of a list, such as the boxes of each image, or of what is in each of its mappings."""
    items = leaf.value
    if not all(isinstance(item, Mapping) for item in items):
        yield from _of_items(items, "item", leaf)
        return
    for key in dict.fromkeys(key for item in items for key in item):
        yield from _of_items([item.get(key) for item in items], f"item[{key!r}]", leaf)


def _of_items(values: Sequence[Any], code: str, leaf: _Leaf) -> Iterator[Candidate]:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not all(hasattr(value, "__len__") and not isinstance(value, str) for value in values):
        return
    if any(tensor.dim() == 0 or tensor.layout is not torch.strided for tensor in tensors):
        return
    yield leaf.counted(f"sum(len({code}) for item in {{0}})", "items")
    if len(tensors) < len(values) or not all(_is_integer(tensor) for tensor in tensors):
        return
    for ignore in [v for v in _IGNORED if any(bool((tensor == v).any()) for tensor in tensors)]:
        yield leaf.counted(f"sum(int(({code} != {ignore}).sum()) for item in {{0}})", "labels")


def labels_of(batch: Any, broadcast: Sequence[str]) -> set[str]:
    """The dotted paths of the leaves that are named as labels."""
    return {leaf.path for leaf in _leaves_of(batch, broadcast) if leaf.is_label}


def even_labels(batch: Any, broadcast: Sequence[str]) -> tuple[str, int]:
    """Labels of which every sample has the same number, so that a mean over them is one over samples.

    Gives their dotted path and that number; an empty path if there are none.
    """
    for leaf in _leaves(lay_out(batch, broadcast).root, "batch", ()):
        if isinstance(leaf.value, torch.Tensor) and leaf.is_label and leaf.value.dim() >= 2 and _is_integer(leaf.value):
            counts = (leaf.value != -100).flatten(1).sum(1)
            if bool((counts == counts[0]).all()):
                return leaf.path, int(counts[0])
    return "", 0


def apart(one: Candidate, other: Candidate, samples: Sequence[Any]) -> int:
    """After how many samples the shares of the total that two ways have counted differ most; 0 if they never do."""
    shares = []
    for candidate in (one, other):
        numbers = torch.tensor([candidate.number(sample, 1) for sample in samples], dtype=torch.float64, device="cpu")
        shares.append((numbers / numbers.sum()).cumsum(0)[:-1])
    difference = (shares[0] - shares[1]).abs().nan_to_num(0.0)
    return int(difference.argmax()) + 1 if difference.numel() and float(difference.max()) >= 1e-9 else 0
