"""Sums of losses, counts and metrics over the micro-batches of a logical batch."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anybatch.errors import LossError
from anybatch.loss.weights import fetched, numbers_in
from anybatch.records.means import Mean


def checked_metrics(metrics: Mapping[str, Any], rows: int | None, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Checks that the metrics of a micro-batch can be joined, and detaches them."""
    checked = {str(name): _checked(str(name), value, rows) for name, value in metrics.items()}
    if before is not None:
        kinds, usual = ({name: _kind(value) for name, value in found.items()} for found in (checked, before))
        for name in [*kinds, *usual]:
            if kinds.get(name) != usual.get(name):
                raise LossError(
                    f"the metric {name!r} is {kinds.get(name, 'missing')} in a micro-batch and "
                    f"{usual.get(name, 'missing')} in the one before; expected the same metrics each time: a Mean "
                    "over no items is Mean(0, 0); pad rows of different lengths or return a Mean",
                    name=name,
                )
    return checked


def _checked(name: str, value: Any, rows: int | None) -> Any:
    if isinstance(value, Mean) and _is_number(value.total) and _is_number(value.count):
        return Mean(_detached(value.total), _detached(value.count))
    if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == (len(value) if rows is None else rows):
        return value.detach()
    if isinstance(value, torch.Tensor):
        kind = f"tensor of shape {tuple(value.shape)}"
    else:
        kind = (
            f"Mean of {value.total!r:.60} over {value.count!r:.60}" if isinstance(value, Mean) else type(value).__name__
        )
    raise LossError(
        f"the metric {name!r} is a {kind}, which can't be combined over micro-batches; expected a Mean of two "
        f"numbers, such as anybatch.Mean(correct.sum(), count), or a tensor with one row for each of the {rows} "
        "samples",
        name=name,
    )


def _kind(value: Any) -> str:
    return f"a tensor with rows of shape {tuple(value.shape[1:])}" if isinstance(value, torch.Tensor) else "a Mean"


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, (int, float))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def joined_metrics(found: Sequence[Mapping[str, Any]], order: Sequence[int]) -> dict[str, Any]:
    """Joins metrics over micro-batches.

    Args:
        order: the position of each sample in the logical batch, in the order in which samples ran.
    """
    joined: dict[str, Any] = {}
    for name in found[0] if found else ():
        values: list[Any] = [metrics[name] for metrics in found]
        if isinstance(values[0], Mean):
            total, count = sum(float(mean.total) for mean in values), sum(float(mean.count) for mean in values)
            joined[name] = Mean(total, count).value
            continue
        if len({value.device for value in values}) > 1:  # of several devices: joined on none of them
            values = [value.cpu() for value in values]
        rows = torch.cat(values)
        is_in_order = all(a < b for a, b in itertools.pairwise(order))
        joined[name] = rows if is_in_order else rows[torch.tensor(list(order), device=rows.device).argsort()]
    return joined


def added_metrics(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums the metrics of the pieces of a micro-batch."""
    added: dict[str, Any] = {}
    for metrics in found:
        for name, value in checked_metrics(metrics, None, None).items():
            if not isinstance(value, Mean):
                raise LossError(
                    f"the metric {name!r} of a piece is a {type(value).__name__}; expected a Mean, which can be added "
                    "up",
                    name=name,
                )
            added[name] = added[name] + value if name in added else value
    return added


class Term(NamedTuple):
    """The contribution of one micro-batch to the value of a loss: ``value * factor / divisor``."""

    value: torch.Tensor
    factor: float
    divisor: Any


@dataclass
class Sums:
    """The sums over the micro-batches so far, still on the device."""

    terms: dict[str, list[Term]] = field(default_factory=dict)  # by the name of the loss
    # the counts that ``Mean`` s brought along, by the name of the loss
    counts: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[Mapping[str, Any]] = field(default_factory=list)  # one mapping a micro-batch
    accumulator_bytes: int = 0  # of the float32 buffers
    has_gradient: bool = False  # whether anything was differentiated
    # what gradients were multiplied by in the end, where the count was known only then
    closing_scale: float | None = None
    in_order: bool = False  # whether the rows of metrics are in the order of the batch already, whatever ran first
    means: dict[str, float] = field(default_factory=dict)  # over all processes, of the ``Mean`` s among the metrics
    # plain values that whoever looks on tells all processes together with the sums; later those of each process
    facts: Sequence[Any] = ()

    @property
    def is_over_nothing(self) -> bool:
        """Whether every loss was a ``Mean``, and all of them were over no items; asked where there are counts."""
        if any(name not in self.counts for name in self.terms):
            return False
        return all(sum(fetched(counts)) == 0 for counts in self.counts.values())


def added(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of numbers by name."""
    totals: dict[str, float] = {}
    for counts in found:
        for name, value in counts.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def told(sums: Sums) -> dict[str, Any]:
    """The sums of one process as plain values."""
    means: dict[str, list[float]] = {}
    for name, value in (pair for metrics in sums.metrics for pair in metrics.items()):
        if isinstance(value, Mean):
            total, count = means.get(name, (0.0, 0.0))
            means[name] = [total + float(value.total), count + float(value.count)]
    return {
        "losses": values_of(sums),
        "counts": {name: sum(fetched(found)) for name, found in sums.counts.items()},
        "metrics": means,
        "has_gradient": sums.has_gradient,
        "scale": sums.closing_scale,
        "facts": [*sums.facts],
    }


def share_(sums: Sums, heard: Sequence[Mapping[str, Any]]) -> None:
    """Puts what all processes added up in the place of what this one did, from the results of ``told`` on each."""
    losses, counts = added(one["losses"] for one in heard), added(one["counts"] for one in heard)
    totals = added({name: pair[0] for name, pair in one["metrics"].items()} for one in heard)
    over = added({name: pair[1] for name, pair in one["metrics"].items()} for one in heard)
    sums.terms = {
        name: [Term(torch.tensor(value, dtype=torch.float64, device="cpu"), 1.0, 1.0)] for name, value in losses.items()
    }
    sums.counts = {name: [count] for name, count in counts.items()}
    sums.means = {name: Mean(totals[name], over[name]).value for name in totals}
    sums.has_gradient = any(one["has_gradient"] for one in heard)
    sums.facts = [fact for one in heard for fact in one["facts"] or (None,)]


def values_of(sums: Sums) -> dict[str, float]:
    """The value of each loss over the logical batch; one synchronization per device and dtype."""
    terms = [(name, term) for name, found in sums.terms.items() for term in found]
    values = dict.fromkeys([*sums.terms, *sums.counts], 0.0)
    for (name, term), number in zip(terms, numbers_in([term.value for _, term in terms]), strict=True):
        divisor = float(term.divisor)
        values[name] += number * term.factor / divisor if divisor else 0.0
    return values


def total_of(sums: Sums) -> torch.Tensor:
    """The sum of the values of all losses, without a device synchronization."""
    found = []
    for term in (term for terms in sums.terms.values() for term in terms):
        value, divisor = term.value.detach() * term.factor, term.divisor
        if isinstance(divisor, torch.Tensor):
            found.append(torch.where(divisor.to(value.device) == 0, 0.0, value / divisor.to(value.device)))
        elif divisor:
            found.append(value / divisor)
    return torch.stack([value.to(found[0].device) for value in found]).sum() if found else torch.zeros((), device="cpu")
