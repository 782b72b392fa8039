"""What a rank tells of what it added up, in plain values, and what follows from that of all ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

from anybatch.loss.sums import Shared, Sums, values_of
from anybatch.loss.weights import fetched
from anybatch.records.means import Mean


def added(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of numbers by name."""
    totals: dict[str, float] = {}
    for counts in found:
        for name, value in counts.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def as_text(flags: Iterable[bool]) -> str:
    """Four flags in a letter; the first bit keeps the zeros behind it."""
    return f"{int('1' + ''.join('01'[flag] for flag in flags), 2):x}"


def as_flags(text: str) -> list[bool]:
    """Reads what ``as_text`` gave."""
    return [bit == "1" for bit in f"{int(text, 16):b}"[1:]]


def values(sums: Sums) -> dict[str, Any]:
    """What one rank adds to the losses, the counts and the metrics."""
    counts = {name: sum(fetched(found)) for name, found in sums.counts.items()}
    means: dict[str, list[float]] = {}
    for metrics in sums.metrics:
        for name, value in metrics.items():
            if isinstance(value, Mean):
                total, count = means.get(name, (0.0, 0.0))
                means[name] = [total + float(value.total), count + float(value.count)]
    return {
        "losses": values_of(sums),
        "counts": counts,
        "metrics": means,
        "plain": any(name not in sums.counts for name in sums.terms),
        "has_gradient": sums.has_gradient,
        "scale": sums.closing_scale,
    }


def shared(heard: list[dict[str, Any]]) -> Shared:
    """What all ranks added up together, from what ``values`` gave on each."""
    losses, counts = added(one["losses"] for one in heard), added(one["counts"] for one in heard)
    totals = added({name: pair[0] for name, pair in one["metrics"].items()} for one in heard)
    over = added({name: pair[1] for name, pair in one["metrics"].items()} for one in heard)
    metrics = {name: Mean(totals[name], over[name]).value for name in totals}
    is_over_nothing = bool(counts) and not any(one["plain"] for one in heard) and not any(counts.values())
    return Shared(losses, counts, metrics, is_over_nothing)
