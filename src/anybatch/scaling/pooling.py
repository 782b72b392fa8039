"""The noise of the micro-batches of all ranks together, from a few numbers of each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Pooled(NamedTuple):
    """What was seen of one logical batch on all ranks.

    Args:
        spread: the mean of the squared norms of the micro-batches' mean gradients, weighted by their items.
        number: of micro-batches with items.
        items: of all of them.
        total: the norm of the gradient, not fetched from the device.
        unit: what an item is.
    """

    spread: float
    number: int
    items: float
    total: torch.Tensor
    unit: str


def facts_of(
    norms: Sequence[float], columns: Mapping[str, Sequence[float]] | None, rows: Sequence[int]
) -> dict[str, Any]:
    """What one rank tells, in plain values.

    With a_i = (n_i/n) g_i, what micro-batch i adds to the gradient, sum (n_i/n) |g_i|^2 = n sum |a_i|^2 / n_i, so one
    sum a rank is enough.

    Args:
        norms: of what each micro-batch adds to the gradient.
        columns: the items of each micro-batch by the name of the loss; ``None`` if they are not known.
        rows: the samples of each micro-batch.

    Example:
        >>> facts_of([2.0, 3.0], {"loss": [1, 2]}, [1, 1])["samples"]
        [13.0, 2, 2]
    """
    first = list(next(iter(columns.values()))) if columns else None
    is_known = first is not None and all(in_proportion(first, other) for other in (columns or {}).values())
    return {
        "trouble": "",
        "samples": _summed(norms, rows),
        "items": _summed(norms, first) if first is not None and is_known else None,
        "totals": {name: sum(column) for name, column in (columns or {}).items()},
        "plain": first == list(rows),
    }


def _summed(norms: Sequence[float], counts: Sequence[float]) -> list[float]:
    pairs = [(norm, count) for norm, count in zip(norms, counts, strict=True) if count > 0]
    return [math.fsum(norm**2 / count for norm, count in pairs), len(pairs), sum(count for _, count in pairs)]


def in_proportion(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two sequences are multiples of each other.

    Args:
        one: numbers of at least 0.
        other: as many.

    Example:
        >>> in_proportion([1, 2], [3, 6]), in_proportion([1, 2], [3, 5])
        (True, False)
    """
    total, other_total = sum(one), sum(other)
    return all(abs(a * other_total - b * total) <= 1e-9 * total * other_total for a, b in zip(one, other, strict=True))


def trouble_in(told: Sequence[Any]) -> str:
    """Why nothing can be said about a batch; empty if there is no reason.

    Args:
        told: what each rank told, ``None`` for one that does not measure.
    """
    if not all(told):
        return f"rank {[bool(one) for one in told].index(False)} does not measure; expected a NoiseScale on every rank"
    return next((f"on rank {rank} {one['trouble']}" for rank, one in enumerate(told) if one["trouble"]), "")


def pool(told: Sequence[Mapping[str, Any]], total: torch.Tensor) -> Pooled | None:
    """Puts together what all ranks told.

    Args:
        told: their facts.
        total: the norm of the gradient.

    Returns:
        The measurement; ``None`` if there are not two micro-batches with items.

    Example:
        >>> told = [facts_of([norm / 2], {"loss": [1]}, [1]) for norm in (5.0, 13.0)]
        >>> pool(told, torch.tensor(80.0).sqrt()).spread
        97.0
    """
    having = [one for one in told if one["samples"][1]]
    names = list(dict.fromkeys(name for one in having for name in one["totals"]))
    columns = [[one["totals"].get(name, 0) for one in having] for name in names]
    is_common = all(in_proportion(columns[0], other) for other in columns[1:])
    by_items = bool(names) and is_common and all(one["items"] for one in having)
    unit = "items" if by_items and not all(one["plain"] for one in having) else "samples"
    sums = [one[unit] for one in having]
    number, items = sum(int(one[1]) for one in sums), math.fsum(one[2] for one in sums)
    if number < 2:
        return None
    return Pooled(items * math.fsum(one[0] for one in sums), number, items, total, unit)
