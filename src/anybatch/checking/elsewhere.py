"""What a model may give later, and what a batch may have: to see a loss there that has not left its first regime.

A loss over the triplets that are active, the samples above a threshold or the positions of a mask is a mean over all of
them as long as all are, as often in the first batch.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.batch.batches import SIGNED, Splittable
from anybatch.batch.trees import flat, leaves, like
from anybatch.checking.candidates import Candidate, labels_of
from anybatch.tensors.dispatch import unseen as unwatched

_FACTORS = (0.3, 30.0)
_MARKS = 4  # numbers that often have a meaning of their own
_DRAWS = 16  # of which entries are kept, among few samples
_NOISE = 0.5  # of what a sample has
_AT_ONCE = 1 << 20  # entries that are compared with a mark: a mask of a whole leaf may have no room in a budget


_CUTS: tuple[Any, ...] = (..., (..., slice(1, None)), (..., slice(None, -1)))  # of labels: all, or shifted by one

_Has = Callable[[torch.Tensor], Any]


class Unseen(NamedTuple):
    """What a batch does not have, and would have to be proved for."""

    keys: tuple[str, ...]  # of the leaf
    has: _Has  # whether an entry of it is so
    what: Any = ""  # what it is known by

    def is_in(self, batches: Iterable[Any]) -> bool:
        """Whether a batch has it; one on an accelerator is not looked at, since that would wait for it."""
        for batch in batches:
            leaf = _at(batch, self.keys)
            if _is_numbers(leaf) and self.has(leaf):
                return True
        return False


def _at(batch: Any, keys: tuple[str, ...]) -> Any:
    """The leaf of a batch with some keys, found quickly in each step; ``None`` where there is none."""
    node = batch
    for key in keys:
        if type(node) is dict:
            node = node.get(key)
        elif type(node) in (list, tuple):
            node = node[int(key)] if int(key) < len(node) else None
        else:
            return next((leaf for _, own, leaf in leaves(batch, "batch") if tuple(own) == keys), None)
    return node


def uncounted(splittable: Splittable, labels: torch.Tensor, ignored: int, counts: Sequence[Any]) -> Iterator[Unseen]:
    """The leaf of labels of a mean, none of which is ignored so far, where the counts do not leave such a one out."""
    (batch,) = splittable.batches
    for place, (_, keys, leaf) in enumerate(leaves(batch, "batch")):
        if _is_numbers(leaf) and _are_of(leaf, labels.cpu()) and not _has(leaf, ignored):
            values = flat(batch)
            values[place] = torch.full_like(leaf, ignored)
            if all(float(one(like(batch, values))) == float(one(batch)) for one in counts):
                yield Unseen(tuple(keys), functools.partial(_has, mark=ignored), ignored)


def labels_counted(batch: Any, labels: torch.Tensor, ignored: int) -> Candidate | None:
    """The count of labels that are not ignored, from the leaf that has them; ``None`` where none has."""
    for _, keys, leaf in leaves(batch, "batch"):
        if _is_numbers(leaf) and (number := _shift_of(leaf, labels.cpu())) is not None:
            return Candidate("", "", functools.partial(_counted, tuple(keys), _CUTS[number], ignored))
    return None


def _counted(keys: tuple[str, ...], cut: Any, ignored: int, batch: Any) -> Any:
    return (_at(batch, keys)[cut] != ignored).sum()


def _are_of(leaf: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether labels are those of a leaf, maybe shifted by one."""
    return _shift_of(leaf, labels) is not None


def _shift_of(leaf: torch.Tensor, labels: torch.Tensor) -> int | None:
    """By which of ``_CUTS`` labels are those of a leaf; ``None`` where they are not."""
    for number, cut in enumerate(_CUTS if leaf.dim() > 1 else _CUTS[:1]):
        one = leaf[cut]
        if one.numel() == labels.numel() and torch.equal(one.reshape(-1).to(labels.dtype), labels.reshape(-1)):
            return number
    return None


def unseen(splittable: Splittable, sizes: Sequence[int]) -> Iterator[tuple[Unseen, Splittable | None]]:
    """Batches in which numbers of one leaf are missing, negative, marks, twice there, or are not all one.

    No whole number is larger than it was, or negative: for that there is no batch, but ``None``.
    """
    (batch,) = splittable.batches
    for place, (_, keys, leaf) in enumerate(leaves(batch, "batch")):
        if not _is_numbers(leaf) or ".".join(keys) in splittable.broadcast or _is_full(leaf):
            continue
        values, kept = flat(batch), _by_chance(leaf, sizes)
        for has, what, other in _others_tried(leaf):
            values[place] = torch.where(kept, leaf, torch.full_like(leaf, other)) if isinstance(other, float) else other
            found = Splittable([like(batch, values)], broadcast=splittable.broadcast)
            yield Unseen(tuple(keys), has, what), None if other is None else found


def _others_tried(leaf: torch.Tensor) -> Iterator[tuple[_Has, str, float | torch.Tensor | None]]:
    """What a leaf has not, with a number for some of its entries, or another leaf, by which it is tried."""
    is_whole, first = not leaf.is_floating_point(), leaf.flatten()[0].item()
    if not is_whole:
        yield lambda leaf: bool(_ends(leaf)[0].isnan()), "nan", math.nan
    if first > 0 and leaf.dtype is not torch.bool and bool((leaf == first).all()):
        yield _is_uneven, "uneven", first / 4
    if not is_whole and not _is_negative(leaf):
        yield _is_negative, "-1", -1.0
    for has, mark in _others(leaf):  # negative ones are not tried: kernels may read where such an index points
        yield has, *(("negative", None) if has is _is_negative else (str(mark), float(mark)))
    if is_whole and leaf.dim() == 1 and not _is_twice(leaf):  # in other micro-batches
        yield _is_twice, "twice", leaf[torch.arange(len(leaf), device=leaf.device) % ((len(leaf) + 1) // 2)]


def _others(leaf: torch.Tensor) -> Iterator[tuple[_Has, float]]:
    """Whole numbers that a leaf has not: negative ones, and those that may stand for a padding, an end or a flag."""
    if leaf.is_floating_point():
        return
    if leaf.dtype not in (torch.bool, torch.uint8) and not _is_negative(leaf):
        yield _is_negative, -1
    for mark in (True,) if leaf.dtype is torch.bool else range(min(_MARKS, int(leaf.max()))):
        if not _has(leaf, mark):
            yield functools.partial(_has, mark=mark), mark


def even(splittable: Splittable) -> list[Unseen]:
    """What leaves do not have so far, such as ignored labels or uneven weights, where no other ones can be tried."""
    return [] if splittable.is_collated else even_in(splittable.batches, splittable.broadcast)


@unwatched
def even_in(batches: Sequence[Any], broadcast: Sequence[str] = ()) -> list[Unseen]:
    """The same of batches of one layout."""
    found = [
        Unseen(tuple(keys), has, what)
        for _, keys, leaf in leaves(batches[0], "batch")
        if _is_numbers(leaf) and not leaf.is_nested and ".".join(keys) not in broadcast
        for has, what in ((_is_uneven, "uneven"), *_others(leaf))
    ]
    return [one for one in found if not one.is_in(batches)]


def _ends(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number, without a mask; both are NaN where one is."""
    try:
        low, high = leaf.aminmax()
    except RuntimeError:  # small types that torch does not order on every device
        low, high = leaf.float().aminmax()
    return low, high


def _is_uneven(leaf: torch.Tensor) -> bool:
    low, high = _ends(leaf)
    return bool(low != high)


def _is_negative(leaf: torch.Tensor) -> bool:
    low, _ = _ends(leaf)
    return bool((leaf < 0).any() if low != low else low < 0)


def is_not_full(leaf: torch.Tensor) -> bool:
    """Whether a mask has anything but ones."""
    low, high = _ends(leaf)
    return not (low == 1 and high == 1)


def _has(leaf: torch.Tensor, mark: float) -> bool:
    pieces = leaf.split(max(1, _AT_ONCE * len(leaf) // leaf.numel()))
    for piece in pieces:  # noqa: SIM110 - in each step, so without a generator's calls
        if (piece == mark).any():
            return True
    return False


def _is_twice(leaf: torch.Tensor) -> bool:
    """Whether two of some whole numbers are the same."""
    ordered = leaf.flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def _is_numbers(leaf: Any) -> bool:
    """Whether it is a tensor that later batches are looked at for."""
    is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"
    return is_plain and leaf.dim() > 0 and leaf.numel() > 1 and not (leaf.is_complex() or leaf.dtype in SIGNED)


def moved(outputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """What a model gives, by micro-batch and leaf, with each sample's made smaller or larger, and less alike.

    Numbers of one sign keep it, and those from 0 to 1 stay there, since a loss may take no others.
    """
    kinds = [_kind(own) for own in zip(*outputs, strict=True)]
    generators = [torch.Generator("cpu").manual_seed(0) for _ in kinds]  # the same factors for each leaf of a sample
    return [[_moved(*one) if one[1] else one[0] for one in zip(own, kinds, generators, strict=True)] for own in outputs]


def thinned(splittable: Splittable, sizes: Sequence[int], only: str = "") -> tuple[list[str], Splittable]:
    """A batch in which masks that are full are not, by chance and by another rate in each sample; and their labels."""
    (batch,) = splittable.batches
    generator, values, labels = torch.Generator("cpu").manual_seed(0), flat(batch), list[str]()
    for place, (label, path, leaf) in enumerate(leaves(batch, "batch")):
        if (
            only in ("", label)
            and type(leaf) is torch.Tensor
            and ".".join(path) not in splittable.broadcast
            and _is_full(leaf)
        ):
            values[place] = torch.where(_by_chance(leaf, sizes, generator), leaf, torch.zeros_like(leaf))
            labels.append(label)
    return labels, Splittable([like(batch, values)], broadcast=splittable.broadcast) if labels else splittable


def _by_chance(
    leaf: torch.Tensor, sizes: Sequence[int], generator: torch.Generator | None = None
) -> torch.Tensor:  # fmt: skip
    """Which entries are kept, by another rate in each sample: some in each micro-batch, and not as many in all."""
    generator = generator or torch.Generator("cpu").manual_seed(0)
    for _ in range(_DRAWS):
        rate = 0.2 + 0.8 * torch.rand((len(leaf), *[1] * (leaf.dim() - 1)), generator=generator, device="cpu")
        kept = torch.rand(leaf.shape, generator=generator, device="cpu") < rate
        shares = [float(part.float().mean()) for part in kept.split(list(sizes))]
        if min(shares) > 0 and len({*shares}) > 1:
            break
    return kept.to(leaf.device)


def _is_full(leaf: torch.Tensor) -> bool:
    is_compared = leaf.dim() > 0 and leaf.numel() > 1 and not (leaf.is_complex() or leaf.dtype in SIGNED)
    return is_compared and not is_not_full(leaf)


def _kind(own: Sequence[Any]) -> str:
    """How a leaf may be moved; ``""`` for not at all."""
    if not all(isinstance(one, torch.Tensor) and one.requires_grad and one.is_floating_point() for one in own):
        return ""
    least, most = (float(torch.stack([one.detach().aminmax()[i] for one in own]).aminmax()[i]) for i in (0, 1))
    return "part" if least >= 0 and most <= 1 else "sign" if least >= 0 or most <= 0 else "any"


def _moved(one: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    rows = (len(one), *[1] * (one.dim() - 1))
    chosen = torch.randint(len(_FACTORS), rows, generator=generator, device="cpu")
    factors = torch.tensor(_FACTORS, device="cpu")[chosen].to(one)
    noise = _NOISE * torch.randn(one.shape, generator=generator, device="cpu").to(one)
    value = one.detach()
    if kind == "part":
        return (value ** (factors * noise.exp())).requires_grad_()
    if kind == "sign":
        return (value * factors * noise.exp()).requires_grad_()
    return (factors * (value + noise * value.square().mean().sqrt())).requires_grad_()


def of_one_size(batch: Any, rows: int) -> Iterator[tuple[str, Any]]:
    """The batch with a list of images of several sizes, one a sample, padded to that of the largest; and the first."""
    alike, values = defaultdict[Any, list[int]](list), flat(batch)
    known = list(leaves(batch, "batch"))
    for place, (_, path, leaf) in enumerate(known):
        if may_be_changed(leaf) and leaf.is_floating_point() and leaf.dim() > 2:
            for at in range(len(path)):  # where the number of the sample may stand
                alike[at, path[:at], path[at + 1 :]].append(place)
    for places in alike.values():
        shapes = [values[place].shape for place in places]
        if len(places) == rows and len(set(map(len, shapes))) == 1 < len(set(shapes)):
            largest, padded = [max(sizes) for sizes in zip(*shapes, strict=True)], list(values)
            for place, shape in zip(places, shapes, strict=True):
                missing = [number for pair in zip(largest, shape, strict=True) for number in (pair[0] - pair[1], 0)]
                padded[place] = torch.nn.functional.pad(values[place], missing[::-1])
            yield known[places[0]][0], like(batch, padded)


def with_labels_moved(batch: Any, broadcast: Sequence[str]) -> Any:
    """A batch whose labels have changed places: labels still, so that a loss takes them."""
    labels, generator = labels_of(batch, broadcast), torch.Generator("cpu").manual_seed(0)
    values = [shuffled(leaf, generator) if ".".join(path) in labels else leaf for _, path, leaf in leaves(batch)]
    return like(batch, values)


def shuffled(leaf: Any, generator: torch.Generator) -> Any:
    """A leaf whose numbers have changed places, among all samples."""
    if not may_be_changed(leaf):
        return leaf
    order = torch.randperm(leaf.numel(), generator=generator, device="cpu").to(leaf.device)
    return leaf.reshape(-1)[order].reshape(leaf.shape)


def may_be_changed(leaf: Any) -> bool:
    """Whether it is a tensor that a count may go by; what is large is data."""
    is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_meta
    return is_plain and not leaf.is_complex() and leaf.dtype not in SIGNED and leaf.numel() <= _AT_ONCE
