"""What the best guess that ignores the input costs, from the targets of a loss, in training and in evaluation."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anybatch.accelerators import widest_float

_MOST_KEPT = 1 << 16  # numbers of a mean that is kept
_MOST_KINDS = 64
_MOST_NUMBERS = 1 << 18  # of a call
_LEAST_ROWS = 32
_PER_CLASS = 10
_OF_EACH = 20  # targets of a class, were all drawn: none is no chance
_OF_CLASSES = frozenset({"cross_entropy", "nll_loss"})
_OF_NUMBERS = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
_OF_SHARES = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"})
_MEANS = frozenset({"mean", "batchmean"})
_TINY = 1e-12


class Guesses:
    """Keeps the mean of the targets, or how many there were of each class, and asks the loss function itself."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[torch.Tensor, int]] = {}
        self.absent: tuple[int, ...] = ()  # classes of the last call that no target was of so far, by no chance

    def of(self, name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> float | None:
        """The loss of the best constant guess for the targets of a call; ``None`` while that is not known."""
        first, target = given.get("input"), given.get("target")
        if not isinstance(first, torch.Tensor) or not isinstance(target, torch.Tensor) or target.requires_grad:
            return None
        if given.get("size_average") is not None or given.get("reduce") is not None:  # of long ago; these warn
            return None
        first, target = first.detach(), target.detach()
        guess, self.absent = None, ()
        try:
            if name in _OF_CLASSES and not target.is_floating_point():
                guess = self._of_classes(name, first, target, given)
            elif (name in _OF_NUMBERS or name in _OF_SHARES) and first.shape == target.shape and target.numel():
                guess = self._of_numbers(name, function, target, given)
            return None if guess is None else float(guess)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # values of a transform can't be read
            return None

    def _add(self, key: Any, total: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
        """Adds to what was seen of one kind of call."""
        if key not in self._seen and len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        known = self._seen.get(key)
        self._seen[key] = (total.cpu(), count) if known is None else (known[0] + total.cpu(), known[1] + count)
        return self._seen[key]

    def _of_classes(
        self, name: str, first: torch.Tensor, target: torch.Tensor, given: Mapping[str, Any]
    ) -> torch.Tensor | None:
        classes = first.shape[1] if first.dim() > 1 else first.numel()
        smoothing = float(given.get("label_smoothing") or 0.0)
        every = target.numel() if target.dim() == 1 and first.dim() == 2 else -1
        target = target[target != int(given.get("ignore_index", -100))].long()
        if classes > _MOST_KEPT or classes < 2 or not target.numel():
            return None
        counts = torch.bincount(target, minlength=classes).cpu().double()
        if counts.numel() > classes or (target.numel() == classes and counts.max() == 1):  # a contrast of pairs
            return None
        known, number = self._add(
            (name, classes), torch.stack([counts, counts > 0, torch.ones_like(counts)]), target.numel()
        )
        seen, within, calls = known.unbind()
        if target.numel() == every:  # one for each row; what has no label may be of any class
            self.absent = _absent(seen, within, int(calls[0]), number)
        different = int((seen > 0).sum())
        if different < 2 or number < max(_LEAST_ROWS, _PER_CLASS * different):
            return None
        weight = given.get("weight")
        weights = torch.ones_like(counts) if weight is None else weight.detach().cpu().double()
        mass = weights * ((1 - smoothing) * seen + smoothing * seen.sum() / classes)
        own = weights * ((1 - smoothing) * counts + smoothing * counts.sum() / classes)
        loss = -(own * (mass / mass.sum()).clamp_min(_TINY).log()).sum()
        return loss if given.get("reduction", "mean") == "sum" else loss / (counts * weights).sum()

    def _of_numbers(
        self, name: str, function: Callable[..., Any], target: torch.Tensor, given: Mapping[str, Any]
    ) -> torch.Tensor | None:
        rest = [value for key, value in given.items() if key not in ("input", "target")]
        step = min(target.numel() // _MOST_NUMBERS, len(target) // _LEAST_ROWS) if target.dim() else 1
        if step > 1 and given.get("reduction") in _MEANS and not any(map(torch.is_tensor, rest)):
            target = target[::step]  # it may be most of what there is in memory, and a mean of some rows is as good
        values = target.exp() if name == "kl_div" and given.get("log_target") else target
        is_small = values.numel() <= _MOST_NUMBERS
        wide = widest_float(values.device) if is_small else torch.float32  # of sums, which copy what is widened
        by_column = values.dim() > 1 and values[0].numel() <= _MOST_KEPT
        total = values.sum(0, dtype=wide) if by_column else values.sum(dtype=wide)
        rows = values.shape[0] if by_column else values.numel()
        kept, count = self._add((name, tuple(values.shape[1:]) if by_column else ()), total, rows)
        if count < _LEAST_ROWS:
            return None
        mean = (kept / count).to(values.device, wide)
        guesses = [mean]
        if name == "kl_div":  # which warns of its own reduction
            whole = -torch.special.entr(values).sum(dtype=wide) - (total * mean.clamp_min(_TINY).log()).sum()
            parts = {"mean": target.numel(), "batchmean": target.shape[0], "sum": 1}
            return whole / parts[given["reduction"]] if given.get("reduction") in parts else None
        if name == "binary_cross_entropy_with_logits":
            positive = given.get("pos_weight")
            odds = mean / (1 - mean).clamp_min(_TINY) * (1 if positive is None else positive)
            guesses = [odds.clamp_min(_TINY).log()]
        elif name in _OF_NUMBERS and name != "mse_loss" and rows >= _LEAST_ROWS:
            guesses.append(values.median(0).values if by_column else values.median())
        found = [function(one.to(target.dtype).expand_as(target), target, *rest) for one in guesses]
        return min(found, key=float) if all(one.numel() == 1 for one in found) else None


_MOST_CALLS = 256
_SURELY = 3.0  # standard errors


def _absent(seen: torch.Tensor, within: torch.Tensor, calls: int, number: int) -> tuple[int, ...]:
    """The last classes, if no target is of these, and all others come about as often as each other, in all batches.

    The first ones may be a padding or a start, or the classes are counted from 1.

    Args:
        seen: targets of each class.
        within: the calls that have one of a class among their targets.
        calls: all of them.
        number: of the targets.
    """
    classes, kinds = len(seen), int((seen > 0).sum())
    if seen[:kinds].eq(0).any() or not 1 < kinds < classes <= _MOST_KINDS or number < _OF_EACH * classes:
        return ()
    rarest = int(seen[seen > 0].kthvalue(2).values)  # one may be cut in two
    expected = calls * (1 - (1 - seen / number) ** (number / calls))  # of batches that are drawn
    is_mixed = bool((within >= expected / 2).all())
    return tuple(torch.nonzero(seen == 0).flatten().tolist()) if is_mixed and rarest > number / kinds / 4 else ()


class Targets:
    """Sums up the targets of the calls of one loss function, on the host.

    Example:
        >>> targets = Targets("mse_loss")
        >>> targets.add(torch.zeros(4, 1), (torch.tensor([[0.0], [2.0], [0.0], [2.0]]), None, None, "mean", None))
        True
        >>> targets.facts()
        {'guess': 1.0, 'items': 4, 'better': False}
    """

    def __init__(self, name: str) -> None:
        self._name, self._calls, self._items, self._right = name, 0, 0, 0
        self._sums: Any = 0
        self._squares = 0.0

    def add(self, first: torch.Tensor, others: tuple[Any, ...]) -> bool:
        """Adds a call; whether it could be, as one of a mean over plain targets can."""
        target, self._calls = others[0], self._calls + 1
        is_plain = torch.is_tensor(target) and not any(torch.is_tensor(one) for one in others[1:])
        if (
            not is_plain
            or "mean" not in others[1:]
            or not target.is_cpu
            or target.numel() > _MOST_NUMBERS
            or self._calls > _MOST_CALLS
        ):
            return False
        if self._name == "cross_entropy" and not target.is_floating_point() and first.dim() == target.dim() + 1:
            counted = target != others[3]
            right = (first.argmax(1) == target) & counted
            if others[-1]:  # smoothed labels
                return False
            return self._sum(target[counted].bincount(minlength=first.shape[1]).double(), int(counted.sum()), right)
        if self._name == "mse_loss" and target.is_floating_point() and first.shape == target.shape and target.dim():
            self._squares += float(target.double().square().sum())
            return self._sum(target.double().sum(0), target.shape[0])
        return False

    def _sum(self, sums: torch.Tensor, items: int, right: torch.Tensor | None = None) -> bool:
        if torch.is_tensor(self._sums) and self._sums.shape != sums.shape:
            return False
        self._sums, self._items = self._sums + sums, self._items + items
        self._right += int(right.sum()) if right is not None else 0
        return True

    def facts(self) -> dict[str, Any]:
        """The entries of an ``Evaluated`` about its targets."""
        count = self._items
        if not count:
            return {}
        if self._name == "mse_loss":
            spread = self._squares - float(self._sums.square().sum()) / count
            return {"guess": spread / (count * max(self._sums.numel(), 1)), "items": count, "better": False}
        share = self._sums / count
        most = float(share.max())
        error = math.sqrt(most * (1 - most) / count)
        better = self._right / count > most + _SURELY * error
        return {"guess": float(torch.special.entr(share).sum()), "items": count, "better": better}
