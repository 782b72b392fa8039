"""What a call of a loss function says of itself: shapes always, values where they may be read."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anybatch.doctor.containers import entries_of
from anybatch.doctor.samples.lossgraphs import top

_COUNTED = 1 << 16  # targets up to which they are counted at each call on the host
_READ = 1 << 18  # entries of predictions that are looked at
_FEW = 1 << 10  # targets up to which Python counts the different ones faster
_MOST_CLASSES = 1000
_MOST_SHIFTED = 3
_LEAST_COMPARED = 8
_OF_CLASSES = frozenset({"cross_entropy", "nll_loss", "multi_margin_loss"})
_OF_PROBABILITIES = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
_LABELS = frozenset({"labels", "label", "targets", "target", "y", "lm_labels"})


def facts_of_loss(
    name: str, given: Mapping[str, Any], result: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *,
    read: bool,
) -> dict[str, Any]:  # fmt: skip
    """The entries of a ``LossCall``, without where it was called, after a root was called with some arguments."""
    first, *others = (value for value in given.values() if isinstance(value, torch.Tensor))
    target = given.get("target", given.get("targets", others[0] if others else first))
    first = first.detach()
    ignore = int(given.get("ignore_index", -100))
    facts: dict[str, Any] = {
        "input_shape": tuple(first.shape),
        "target_shape": tuple(target.shape),
        "reduction": _reduction(given),
        "weighted": isinstance(given.get("weight"), torch.Tensor) or isinstance(given.get("pos_weight"), torch.Tensor),
        "ignore_index": ignore,
        "target_requires_grad": bool(target.requires_grad and not target.is_leaf),
        "target_top": top(target.grad_fn),
    }
    target = target.detach()
    on_host = result.device.type == "cpu"
    dim = 1 if first.dim() > 1 else 0  # of the classes
    by_class = name in _OF_CLASSES and not target.is_floating_point()
    if name in _OF_CLASSES:
        facts["classes"] = int(first.shape[dim]) if first.dim() else 0
    try:
        if result.numel() == 1 and (on_host or read):
            facts["value"] = float(result.detach())
        if not by_class:
            facts["items"] = _count(first, target, dim if name in _OF_CLASSES else None)
        elif read or (on_host and (target.numel() <= _COUNTED or not math.isfinite(facts.get("value", 0.0)))):
            facts["ignored"] = int((target == ignore).sum())
            facts["items"] = target.numel() - facts["ignored"]
        if read and first.numel() and target.numel():
            all_count = by_class and not facts["ignored"]
            of_targets = _targets(target, None if all_count else ignore, by_class=by_class)
            facts |= _predictions(name, first, dim) | of_targets
            if by_class and name != "multi_margin_loss":
                facts |= _shift(target, ignore, args, kwargs)
    except (RuntimeError, NotImplementedError, TypeError):  # values of a transform such as vmap can't be read
        return facts
    return facts


def _reduction(given: Mapping[str, Any]) -> str:
    """As the arguments say it, those of long ago included."""
    if given.get("size_average") is None and given.get("reduce") is None:
        return str(given.get("reduction", "mean"))
    if given.get("reduce") is False:
        return "none"
    return "sum" if given.get("size_average") is False else "mean"


def _count(first: torch.Tensor, target: torch.Tensor, dim: int | None) -> int:
    if dim is not None and first.dim():
        return first.numel() // max(first.shape[dim], 1)
    if first.shape == target.shape:
        return first.numel()
    try:
        return int(torch.broadcast_shapes(first.shape, target.shape).numel())
    except RuntimeError:
        return first.numel()


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced rows of a large tensor."""
    if tensor.numel() <= _READ or tensor.dim() == 0:
        return tensor
    return tensor[:: max(1, -(-tensor.numel() // _READ))]


def _predictions(name: str, first: torch.Tensor, dim: int) -> dict[str, Any]:
    if not first.is_floating_point():
        return {}
    some = _some(first).float()
    found = list(some.aminmax())
    dim = -1 if name == "ctc_loss" else dim
    if (name in _OF_CLASSES or name == "ctc_loss") and first.shape[dim] > 1:
        found += [*some.sum(dim).aminmax(), *some.exp().sum(dim).aminmax()]
    low, high, *ends = torch.stack(found).tolist()
    facts: dict[str, Any] = {"low": low, "high": high}
    if name in _OF_PROBABILITIES:
        facts["normalised"] = low >= 0.0 and high <= 1.0
    elif ends:
        facts["normalised"] = low >= 0.0 and abs(ends[0] - 1.0) < 1e-2 and abs(ends[1] - 1.0) < 1e-2
        facts["log_normalised"] = high <= 1e-3 and abs(ends[2] - 1.0) < 1e-2 and abs(ends[3] - 1.0) < 1e-2
    return facts


def _targets(target: torch.Tensor, ignore: int | None, *, by_class: bool) -> dict[str, Any]:
    """Of the targets that count, which are all where nothing is to be ignored."""
    found: dict[str, Any] = {}
    if by_class:  # in one row, in whose order the figures are summed up
        target = target.reshape(-1) if ignore is None else target[target != ignore]
    if not target.numel() or target.is_complex():
        return found
    if by_class:
        few = target.is_cpu and target.numel() <= _FEW
        different = len(set(target.tolist())) if few else int(torch.unique(target).numel())
        found["target_classes"] = min(different, _MOST_CLASSES)
    numbers = target.double()
    deviation, mean = torch.std_mean(numbers, correction=0)
    ends = () if by_class else numbers.aminmax()
    entries = ("target_mean", "target_std", "target_low", "target_high")
    found |= zip(entries, torch.stack([mean, deviation, *ends]).tolist(), strict=False)
    return found


def _shift(target: torch.Tensor, ignore: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """By how much the targets are ahead of tokens that the root was given, and of which of these; one place first."""
    found = [
        ahead | {"shifted": place}
        for place, tokens in enumerate(tokens_of((args, kwargs)))
        if tokens is not None and (ahead := _ahead(target, ignore, tokens))
    ]
    return min(found, key=lambda one: (one["shift"] != 1, one["shifted"]), default={})


def _ahead(target: torch.Tensor, ignore: int, tokens: torch.Tensor) -> dict[str, Any]:
    """How many places the targets are ahead of tokens; predictions are cut at the end, or to the last of a row."""
    for time_first in (False, True) if tokens.device == target.device else ():
        rows, length = reversed(tokens.shape) if time_first else tokens.shape
        width = target.numel() // rows
        if target.numel() % rows or not 0 < width <= length:
            continue
        wanted = target.reshape(width, rows).T if time_first else target.reshape(rows, width)
        given, start = tokens.T if time_first else tokens, length - width
        if start <= _MOST_SHIFTED:
            fitting, start = _fitting(wanted, ignore, given), int((wanted != ignore).any(0).byte().argmax())
        else:
            fitting = [
                one for one in _fitting(wanted, ignore, given[:, start:]) if one
            ]  # 0 may be a copy that is asked
        fitting = [one for one in fitting if one < 2 or not time_first]
        if len(fitting) > 1:
            return {}
        if fitting:
            return {"shift": fitting[0], "start": start, "time_first": time_first}
    return {}


def _fitting(wanted: torch.Tensor, ignore: int, tokens: torch.Tensor) -> list[int]:
    """By how many places the tokens may be ahead to be what is wanted."""
    fitting = []
    for shift in range(_MOST_SHIFTED + 1):
        overlap = min(wanted.shape[1], tokens.shape[1] - shift)
        if overlap < 1:
            break
        ours, theirs = wanted[:, :overlap], tokens[:, shift : shift + overlap]
        counted = ours != ignore
        compared, wrong = torch.stack([counted.sum(), (counted & (ours != theirs)).sum()]).tolist()
        if compared >= _LEAST_COMPARED and not wrong:
            fitting.append(shift)
    return fitting


def tokens_of(given: Any) -> Iterator[torch.Tensor | None]:
    """Matrices of whole numbers that a root is given, in order; ``None`` in the place of one named as labels."""
    for name, value in entries_of(given):
        if not isinstance(value, torch.Tensor):
            yield from (None if name in _LABELS else one for one in tokens_of(value))
        elif value.dim() == 2 and value.dtype in (torch.int64, torch.int32) and value.numel():
            yield None if name in _LABELS else value
