"""Estimators of gradient noise, from one logical batch and averaged over several."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple, TypedDict

import torch

from anybatch.records.reading import Least

_ONE_SIDED = NormalDist().inv_cdf(0.95)  # of a two-sided interval of 90 %


class Estimate(NamedTuple):
    """The estimate from one logical batch."""

    trace: float  # of the covariance of the gradient of one item
    signal: float  # the squared norm of the true gradient; may come out below 0


def estimate(norms_sq: Sequence[float], counts: Sequence[float], total_norm_sq: float) -> Estimate:
    """Estimates noise and signal from micro-batches of any sizes; both are unbiased.

    With g_i the mean gradient of micro-batch i over n_i items, n their sum, N their number, and g = sum (n_i/n) g_i:
    q = sum (n_i/n) |g_i|^2 has the expectation |G|^2 + S N/n, and |g|^2 has |G|^2 + S/n. So S = (q - |g|^2) n/(N - 1)
    and |G|^2 = |g|^2 - S/n. For equal sizes these are the estimators of McCandlish et al. 2018, "An Empirical Model of
    Large-Batch Training", appendix A.1.
    """
    total = math.fsum(counts)
    spread = math.fsum(count / total * norm_sq for norm_sq, count in zip(norms_sq, counts, strict=True))
    return estimate_from(spread, len(counts), total, total_norm_sq)


def estimate_from(spread: float, number: int, total: float, total_norm_sq: float) -> Estimate:
    """The same estimate from sums over micro-batches."""
    trace = (spread - total_norm_sq) * total / (number - 1)
    return Estimate(trace, total_norm_sq - trace / total)


class Measurement(NamedTuple):
    """The measurements of one logical batch on all processes."""

    numbers: torch.Tensor  # q of ``estimate`` and the norm of the gradient; not fetched from the device
    number: int  # of micro-batches with items
    items: float  # of all of them
    unit: str  # what an item is

    def estimate(self) -> Estimate:
        """Noise and signal; synchronizes with the device."""
        spread, total = self.numbers.tolist()
        return estimate_from(spread, self.number, self.items, total**2)


def spreads_of(
    norms: Sequence[Any], columns: Mapping[str, Sequence[float]] | None, rows: Sequence[int]
) -> dict[str, Any]:
    """The sums that one process contributes to a measurement.

    With a_i = (n_i/n) g_i, the contribution of micro-batch i to the gradient, sum (n_i/n) |g_i|^2 = n sum |a_i|^2 /
    n_i, so one sum per process is enough.

    Args:
        norms: |a_i| of each micro-batch.
        columns: the items of each micro-batch by the name of the loss; ``None`` if they are not known.
    """
    first = list(next(iter(columns.values()))) if columns else None
    is_known = first is not None and all(in_proportion(first, other) for other in (columns or {}).values())
    return {
        "samples": _summed(norms, rows),
        "items": _summed(norms, first) if first is not None and is_known else None,
        "totals": {name: sum(column) for name, column in (columns or {}).items()},
        "plain": first == list(rows),
    }


def _summed(norms: Sequence[Any], counts: Sequence[float]) -> list[Any]:
    pairs = [(norm, count) for norm, count in zip(norms, counts, strict=True) if count > 0]
    return [sum(norm**2 / count for norm, count in pairs), len(pairs), sum(count for _, count in pairs)]


def in_proportion(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two sequences are multiples of each other."""
    total, other_total = sum(one), sum(other)
    return all(abs(a * other_total - b * total) <= 1e-9 * total * other_total for a, b in zip(one, other, strict=True))


def pool(told: Sequence[Any], total: torch.Tensor | None) -> tuple[Measurement | None, str]:
    """Combines the sums of all processes.

    Args:
        told: for each process the result of ``spreads_of`` and its ``trouble``; ``None`` if it does not measure.
        total: the norm of the gradient; ``None`` if it was not measured.

    Returns:
        The measurement, ``None`` with fewer than two micro-batches with items; and the reason if it failed.
    """
    for rank, one in enumerate(told):
        if one is None:
            return None, f"rank {rank} does not measure; expected a NoiseScale on every rank"
        if one["trouble"]:
            return None, f"on rank {rank} {one['trouble']}" if len(told) > 1 else one["trouble"]
    having = [one for one in told if one["samples"][1]]
    names = list(dict.fromkeys(name for one in having for name in one["totals"]))
    columns = [[one["totals"].get(name, 0) for one in having] for name in names]
    is_common = all(in_proportion(columns[0], other) for other in columns[1:])
    by_items = bool(names) and is_common and all(one["items"] for one in having)
    unit = "items" if by_items and not all(one["plain"] for one in having) else "samples"
    sums = [one[unit] for one in having]
    number, items = sum(int(one[1]) for one in sums), math.fsum(one[2] for one in sums)
    if number < 2 or total is None:
        return None, ""
    spread = torch.as_tensor(items * sum(one[0] for one in sums), dtype=torch.float64, device=total.device)
    return Measurement(torch.stack([spread, total.double()]), number, items, unit), ""


Finite = Annotated[float, Least(-1.7e308)]


class Moments(TypedDict):
    """The state of ``RatioOfMeans``, as plain numbers."""

    number: Annotated[int, Least(0)]
    weight: Annotated[float, Least(0)]
    weight_sq: Annotated[float, Least(0)]
    means: list[Finite]
    products: list[Finite]


class RatioOfMeans:
    """Moving means of noise and of signal, and a confidence interval for their ratio.

    The mean of ratios would be biased, and not even finite if the signal is small. Weights of older estimates decay by
    ``decay`` per estimate and are normalized, so that the mean is not biased towards 0 at the start.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.number = 0
        self._weight = self._weight_sq = 0.0
        self._means = [0.0, 0.0]
        self._products = [0.0, 0.0, 0.0]  # of deviations: trace with trace, trace with signal, signal with signal

    def add(self, found: Estimate) -> None:
        """Adds an estimate (West 1979, "Updating Mean and Variance Estimates", with decaying weights)."""
        self.number += 1
        self._weight = self.decay * self._weight + 1
        self._weight_sq = self.decay**2 * self._weight_sq + 1
        before = [value - mean for value, mean in zip(found, self._means, strict=True)]
        self._means = [mean + off / self._weight for mean, off in zip(self._means, before, strict=True)]
        after = [value - mean for value, mean in zip(found, self._means, strict=True)]
        added = before[0] * after[0], before[0] * after[1], before[1] * after[1]
        self._products = [self.decay * old + new for old, new in zip(self._products, added, strict=True)]

    @property
    def means(self) -> Estimate:
        """The means of noise and signal."""
        return Estimate(*self._means)

    @property
    def value(self) -> float:
        """Noise over signal; infinite if the signal is not positive."""
        trace, signal = self._means
        return trace / signal if signal > 0 else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """A 90 % confidence interval for the ratio by Fieller's theorem, which holds for noisy denominators, too.

        Assumes independent estimates. The upper end is infinite if the signal may be 0.
        """
        if self.number < 2:
            return 0.0, math.inf
        effective = self._weight**2 / self._weight_sq
        squared = student(effective - 1) ** 2
        # The variance of a weighted mean, from the weighted squares of deviations without their bias.
        factor = self._weight_sq / self._weight**2 / (self._weight - self._weight_sq / self._weight) * squared
        of_trace, of_both, of_signal = (product * factor for product in self._products)
        trace, signal = self._means
        a, b, c = signal**2 - of_signal, trace * signal - of_both, trace**2 - of_trace
        inside = b * b - a * c
        if inside < 0 or a == 0 or (a > 0 and signal <= 0):
            return 0.0, math.inf
        root = math.sqrt(inside)
        if a > 0:
            return max(0.0, (b - root) / a), (b + root) / a
        return max(0.0, (b - root) / a), math.inf

    def state_dict(self) -> Moments:
        """Plain numbers."""
        return {
            "number": self.number, "weight": self._weight, "weight_sq": self._weight_sq, "means": list(self._means),
            "products": list(self._products),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.number, self._weight, self._weight_sq = state["number"], state["weight"], state["weight_sq"]
        self._means, self._products = list(state["means"]), list(state["products"])


def student(freedom: float) -> float:
    """The 95 % quantile of Student's t distribution, by its expansion in 1/freedom (Abramowitz and Stegun, 26.7.5).

    Args:
        freedom: degrees of freedom, positive; the expansion is 5 % low at 1 and under 1 % off from 2 on.

    Example:
        >>> [round(student(freedom), 2) for freedom in (2, 10, 1e9)]
        [2.91, 1.81, 1.64]
    """
    z = _ONE_SIDED
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
