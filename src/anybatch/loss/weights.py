"""Counts of items, which are the weights of micro-batches."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.batch.counting import count_samples
from anybatch.errors import CountError

CountFunction = Callable[[Any], Any]
Count = CountFunction | Mapping[str, CountFunction] | str

FORWARD = "forward"
_EVERY = ""


class Weights:
    """The counts of a logical batch: of each micro-batch and in total, for each loss or for all losses.

    Args:
        parts: for each micro-batch, the count by the name of the loss; the empty name is for all losses.
        totals: the counts of the whole batch, if other processes have micro-batches, too.
    """

    __slots__ = ("_columns", "is_empty", "own_totals", "parts", "totals")

    def __init__(self, parts: Sequence[Mapping[str, float]], totals: Mapping[str, float] | None = None) -> None:
        self.parts = parts
        self.own_totals: dict[str, float] = {}
        self._columns: dict[str, list[float]] = {}
        for part in parts:
            for name, value in part.items():
                self.own_totals[name] = self.own_totals.get(name, 0) + value
        self.totals = self.own_totals if totals is None else dict(totals)
        self.is_empty = not any(self.totals.values())

    def __len__(self) -> int:
        return len(self.parts)

    def names(self, name: str) -> bool:
        """Whether this loss has a count of its own."""
        return name in self.totals and name != _EVERY

    def total(self, name: str) -> float:
        """The count of the whole logical batch for a loss."""
        key = name if name in self.totals else _EVERY
        if key not in self.totals:
            raise CountError(
                f"count has no entry for the loss {name!r}; it has {sorted(self.totals)}. Add count={{{name!r}: ...}}"
            )
        return self.totals[key]

    def part(self, name: str, index: int) -> float:
        """The count of one micro-batch for a loss."""
        values = self.parts[index]
        return values[name] if name in values else values.get(_EVERY, 0)

    def column(self, name: str) -> list[float]:
        """The count of each micro-batch over the count of the whole, in float64; 0 where there is nothing to count."""
        column = self._columns.get(name)
        if column is None:
            total = self.total(name)
            column = self._columns[name] = [
                (part[name] if name in part else part.get(_EVERY, 0)) / total if total else 0.0 for part in self.parts
            ]
        return column


def check_count(count: Any) -> None:
    """Refuses what can't be a count, before anything is computed."""
    if isinstance(count, Mapping):
        wrong = {name: function for name, function in count.items() if not callable(function)}
        if wrong or not count:
            raise CountError(f"count={dict(count)!r}; expected a mapping of loss names to functions of a batch")
        if any(not isinstance(name, str) or not name for name in count):
            raise CountError(f"count has the names {list(count)}; expected the names of losses")
    elif count != FORWARD and not callable(count):
        raise CountError(
            f"count={count!r}; expected a function of a batch such as anybatch.count_tokens('labels'), a mapping of "
            "loss names to them, or 'forward'"
        )


def weigh(
    count: Count,
    parts: Sequence[Part],
    micro_batches: Callable[[], Iterable[Any]],
    wholes: Sequence[Any] | None,
    samples: Sequence[int | None],
) -> Weights:
    """Counts every micro-batch and checks that the counts add up to the whole's.

    Args:
        count: how to count; ``"forward"`` and ``count_samples`` count samples here without looking into the batch.
        wholes: the batches before they were cut, to check the sums by; ``None`` if there are none.
        samples: in each micro-batch; ``None`` where nobody knows, which counts as one.

    Returns:
        The weights, on the host. Counts that lie on a device are fetched once, all together.
    """
    if count is count_samples or count == FORWARD:
        return Weights([{_EVERY: 1 if rows is None else rows} for rows in samples])
    functions = dict(count) if isinstance(count, Mapping) else {_EVERY: count}
    is_cut = wholes is not None and len(parts) > len(wholes)
    is_whole = wholes is not None and [part.batch for part in parts] == [*range(len(wholes))]
    given = micro_batches() if wholes is None or not is_whole else wholes
    raw = [counted(f, batch) for batch in chain(given, wholes or () if is_cut else ()) for f in functions.values()]
    values = fetched(raw)
    names = list(functions)
    rows = [dict(zip(names, values[i : i + len(names)], strict=True)) for i in range(0, len(values), len(names))]
    weights = Weights(rows[: len(parts)])
    if is_cut:
        _check_sums(weights, rows[len(parts) :])
    return weights


def counted(function: Any, batch: Any) -> Any:
    """What a count gives for a batch: a number, or a 0-dim tensor on a device."""
    value = function(batch)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise CountError(f"count gave a tensor of shape {tuple(value.shape)}; expected one number: add .sum()")
        value = value.detach() if value.requires_grad else value
        if value.device.type == "cpu":  # nothing waits for a device, and no tensor is kept for each micro-batch
            return value.item()
        return value.reshape(()) if value.dim() else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            return value.item()
        raise CountError(f"count gave {value!r}, a {type(value).__name__}; expected a number of items")
    return value


def fetched(values: Sequence[Any]) -> list[float]:
    """Reads counts, and checks them."""
    numbers = numbers_in(values)
    for number in numbers:
        if not math.isfinite(number) or number < 0:
            raise CountError(f"count gave {number!r}; expected a finite number of items, at least 0")
    return numbers


def numbers_in(values: Sequence[Any]) -> list[float]:
    """Reads numbers and 0-dim tensors, with one synchronization per device and dtype."""
    numbers: list[Any] = list(values)
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_kind.setdefault((value.device, value.dtype), []).append(position)
    for positions in by_kind.values():
        stacked = torch.stack([values[i] for i in positions]) if len(positions) > 1 else values[positions[0]].reshape(1)
        for position, number in zip(positions, stacked.tolist(), strict=True):
            numbers[position] = number
    return numbers


def _check_sums(weights: Weights, wholes: Sequence[Mapping[str, float]]) -> None:
    for name, total in weights.totals.items():
        whole = sum(counts[name] for counts in wholes)
        exact = isinstance(whole, int) and isinstance(total, int)
        if total != whole if exact else not math.isclose(total, whole, rel_tol=1e-6, abs_tol=1e-9):
            which = f"count[{name!r}]" if name else "count"
            raise CountError(
                f"{which} of the whole batch is {whole:g}, of its micro-batches together {total:g}; expected a count "
                "that adds up over samples: a sum over them, not a mean, a maximum or a padded size, in an integer "
                "dtype or float64"
            )
