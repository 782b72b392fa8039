"""The gradient of a logical batch, accumulated over its micro-batches."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anybatch.errors import CountError, LossError
from anybatch.gradient.cutting import backward_to_leaves, declare_nothing_to_do, restricted_inputs
from anybatch.gradient.losses import Evaluation, LossFunction
from anybatch.gradient.weights import Weights, fetched
from anybatch.records.means import Mean
from anybatch.tensors.graph import leaves_of
from anybatch.tensors.precision import AccumulatePolicy, Float32Accumulator, needs_float32


@dataclass
class Settings:
    """How gradients are computed, whatever the batch.

    Args:
        device: where the model lies.
        autocast: the dtype of ``torch.autocast``, or ``None``.
        scaler: a ``GradScaler`` that scales losses, or ``None``.
        inputs: the only tensors that get a gradient, or ``None`` for all.
        policy: when low-precision gradients are accumulated in float32.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    scaler: Any = None
    inputs: tuple[torch.Tensor, ...] | None = None
    policy: AccumulatePolicy = "auto"

    def context(self) -> AbstractContextManager[Any]:
        """A new context in which the user's forward runs."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


class Term(NamedTuple):
    """What one micro-batch adds to the value of a loss: ``value * factor / divisor``."""

    value: torch.Tensor
    factor: float
    divisor: Any


@dataclass
class Sums:
    """What was added up over the micro-batches so far, nothing of it fetched from the device.

    Attributes:
        terms: by the name of the loss.
        counts: the counts that ``Mean`` s brought along, by the name of the loss.
        metrics: one mapping a micro-batch.
        running: how many micro-batches have begun, for messages.
        accumulator_bytes: of the float32 buffers.
    """

    terms: dict[str, list[Term]] = field(default_factory=dict)
    counts: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    running: int = 0
    accumulator_bytes: int = 0


class Accumulation:
    """One pass over the micro-batches of a logical batch, which leaves its gradient in ``.grad``.

    Args:
        model: the first argument of the loss function.
        loss_fn: see ``gradient.losses``.
        weights: the counts.
        parameters: whose ``.grad`` is filled; empty at the start.
        settings: precision, scaling, inputs.
        finds_leaves: whether leaves that are not in ``parameters`` are looked for where they matter.
        differentiate: whether gradients are wanted, or only the values.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: LossFunction,
        weights: Weights,
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        *,
        finds_leaves: bool = False,
        differentiate: bool = True,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._weights = weights
        self._parameters = list(parameters)
        self._settings = settings
        self._finds_leaves = finds_leaves
        self._differentiate = differentiate
        self._weight_tensors: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}
        self._summed: str | None = None
        self._divisor = 1.0
        self._mean_without_gradient: str | None = None
        self.sums = Sums()

    def run(self, micro_batches: Iterable[Any]) -> Sums:
        """Goes through the micro-batches.

        Args:
            micro_batches: on the device, as many as there are weights.

        Returns:
            What was added up; gradients are in ``.grad``, scaled if there is a scaler.

        Raises:
            LossError: the loss function broke its contract.
            CountError: counts of ``Mean`` s are missing or do not agree with those that were given.
        """
        token = restricted_inputs.set(self._settings.inputs)
        accumulator = None
        if needs_float32(self._parameters, len(self._weights), self._settings.policy):
            accumulator = Float32Accumulator(self._parameters)
        try:
            for index, batch in enumerate(micro_batches):
                self.sums.running = index + 1
                self._run_one(index, batch)
                if accumulator is not None:
                    accumulator.take_()
        finally:
            restricted_inputs.reset(token)
        scale = self._closing_scale()
        if accumulator is not None:
            self.sums.accumulator_bytes = accumulator.bytes
            accumulator.give_(scale)
        if scale is not None:
            self._scale_gradients_(scale, already=accumulator is not None)
        return self.sums

    def _run_one(self, index: int, batch: Any) -> None:
        evaluation = Evaluation(self._loss_fn, self._model, batch, self._settings.context)
        for seen, (name, loss) in enumerate(evaluation, start=1):
            if isinstance(loss, Mean):
                self._add_mean(index, name, loss)
            else:
                self._add_scalar(index, name, loss)
            del loss
            if self._summed is not None and (seen > 1 or name != self._summed):
                raise _several_unknown_counts(name)
        self.sums.metrics.append(_detached(evaluation.metrics))

    def _add_scalar(self, index: int, name: str, loss: torch.Tensor) -> None:
        weight = self._weights.weight(name, index)
        if weight == 0:  # a mean over nothing may be NaN, and NaN * 0 is NaN
            declare_nothing_to_do()
            return
        if self._differentiate and not loss.requires_grad:
            raise _no_gradient(name)
        self.sums.terms.setdefault(name, []).append(Term(_value(loss), weight, 1))
        self._backward(loss, weight)

    def _add_mean(self, index: int, name: str, mean: Mean) -> None:
        count = mean.count.detach() if isinstance(mean.count, torch.Tensor) else mean.count
        _check_mean_count(count, name)
        self.sums.counts.setdefault(name, []).append(count)
        if not isinstance(count, torch.Tensor) and count == 0:
            declare_nothing_to_do()
            return
        if not self._differentiate:
            self.sums.terms.setdefault(name, []).append(Term(_value(mean.total), 1.0, None))
            return
        if not mean.total.requires_grad:
            self._mean_without_gradient = name
            return
        if self._weights.names(name):
            total: Any = self._weights.total(name)
            factor = 1.0 / total if total else 0.0
        elif len(self._weights) == 1:
            total, factor = count, None
        else:
            total, factor = None, self._summing_factor(index, name, mean)
        self.sums.terms.setdefault(name, []).append(Term(_value(mean.total), 1.0, total))
        if factor is None:
            self._backward_over(mean.total, count)
        else:
            self._backward(mean.total, factor)

    def _summing_factor(self, index: int, name: str, mean: Mean) -> float:
        """Sums one ``Mean`` over the micro-batches, to be divided by the count at the end.

        The summands are divided by a power of two near the expected count, which rounds nothing and keeps scaled fp16
        gradients in range.
        """
        if self._summed is None:
            if {*self.sums.terms, *self.sums.counts} != {name}:
                raise _several_unknown_counts(name)
            self._summed = name
            expected = float(len(self._weights)) * max(1.0, self._weights.part(name, 0))
            if not isinstance(mean.count, torch.Tensor) or mean.count.device.type == "cpu":
                expected = len(self._weights) * max(1.0, float(mean.count))
            self._divisor = 2.0 ** round(torch.tensor(expected).log2().item())
            if self._finds_leaves:
                known = {id(parameter) for parameter in self._parameters}
                self._parameters += [leaf for leaf in leaves_of(mean.total) if id(leaf) not in known]
        elif self._summed != name:
            raise _several_unknown_counts(name)
        return 1.0 / self._divisor

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        if not self._differentiate:
            return
        loss = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        key = (weight, loss.dtype, loss.device)
        gradient = self._weight_tensors.get(key)
        if gradient is None:
            gradient = torch.full((), weight, dtype=loss.dtype, device=loss.device)
            if self._settings.scaler is not None:
                gradient = self._settings.scaler.scale(gradient)
            self._weight_tensors[key] = gradient
        backward_to_leaves([loss], [gradient])

    def _backward_over(self, total: torch.Tensor, count: Any) -> None:
        """Differentiates ``total / count``; over no items the gradient is 0."""
        total = total if total.dtype in (torch.float32, torch.float64) else total.float()
        if not isinstance(count, torch.Tensor):
            self._backward(total, 1.0 / count)
            return
        divisor = count.to(total.device, total.dtype)
        gradient = torch.where(divisor > 0, divisor.reciprocal(), torch.zeros_like(divisor))
        if self._settings.scaler is not None:
            gradient = self._settings.scaler.scale(gradient)
        backward_to_leaves([total], [gradient])

    def _closing_scale(self) -> float | None:
        for name, counts in self.sums.counts.items():
            if self._weights.names(name):
                self._check_given_count(name, sum(fetched(counts)))
            if not self._differentiate or name == self._summed:
                self._divide(name)
        self._refuse_means_without_gradient()
        if self._summed is None:
            return None
        total = sum(fetched(self.sums.counts[self._summed]))
        return self._divisor / total if total else 0.0

    def _refuse_means_without_gradient(self) -> None:
        name = self._mean_without_gradient
        if name is not None and not self.sums.terms and sum(fetched(self.sums.counts[name])) > 0:
            raise _no_gradient(name)

    def _divide(self, name: str) -> None:
        total = sum(fetched(self.sums.counts[name]))
        self.sums.terms[name] = [term._replace(divisor=total) for term in self.sums.terms.get(name, [])]

    def _check_given_count(self, name: str, total: float) -> None:
        given = self._weights.total(name)
        if abs(total - given) > 1e-6 * max(abs(total), abs(given)):
            raise CountError(
                f"the Mean {name!r} is over {total:g} items, count[{name!r}] of the batch is {given:g}; expected the "
                "same"
            )

    def _scale_gradients_(self, scale: float, *, already: bool) -> None:
        low = (torch.bfloat16, torch.float16)
        targets = self._settings.inputs if self._settings.inputs is not None else self._parameters
        gradients = [t.grad for t in targets if t.grad is not None and not (already and t.dtype in low)]
        if gradients:
            torch._foreach_mul_(gradients, scale)


def count_in_forward(
    model: Any, loss_fn: LossFunction, micro_batches: Iterable[Any], settings: Settings, parts: Weights
) -> Weights:
    """Counts the items of ``Mean`` s by a pass without gradient.

    The caller puts random state and buffers back afterwards.

    Args:
        model: the first argument of the loss function.
        loss_fn: gives ``Mean`` s.
        micro_batches: on the device.
        settings: precision.
        parts: the counts of samples, for losses that are plain means.

    Returns:
        The counts by the name of the loss, and of samples for every other loss.
    """
    raw: list[Any] = []
    places: list[tuple[int, str]] = []
    with torch.no_grad():
        for index, batch in enumerate(micro_batches):
            for name, loss in Evaluation(loss_fn, model, batch, settings.context):
                if isinstance(loss, Mean):
                    raw.append(loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count)
                    places.append((index, name))
    rows: list[dict[str, float]] = [dict(part) for part in parts.parts]
    for (index, name), number in zip(places, fetched(raw), strict=True):
        rows[index][name] = number
    names = {name for row in rows for name in row}
    return Weights([{name: row.get(name, 0) for name in names} for row in rows])


def values_of(sums: Sums) -> dict[str, float]:
    """The value of each loss over the logical batch; waits for each device once.

    Args:
        sums: what was added up.

    Returns:
        The values by name; 0.0 for a loss over no items.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, Term]]] = {}
    for name, terms in sums.terms.items():
        for term in terms:
            by_kind.setdefault((term.value.device, term.value.dtype), []).append((name, term))
    values = dict.fromkeys([*sums.terms, *sums.counts], 0.0)
    for group in by_kind.values():
        numbers = torch.stack([term.value for _, term in group]).tolist()
        for (name, term), number in zip(group, numbers, strict=True):
            divisor = float(term.divisor)
            values[name] += number * term.factor / divisor if divisor else 0.0
    return values


def _value(loss: torch.Tensor) -> torch.Tensor:
    """The detached value, without the storage that the loss may be a view of."""
    value = loss.detach()
    return value.clone() if loss._is_view() else value


def _detached(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): _detached_metric(str(name), value) for name, value in metrics.items()}


def _detached_metric(name: str, value: Any) -> Any:
    def detach(item: Any) -> Any:
        return item.detach() if isinstance(item, torch.Tensor) else item

    if isinstance(value, Mean):
        return Mean(detach(value.total), detach(value.count))
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.detach()
    kind = "tensor without dimensions" if isinstance(value, torch.Tensor) else type(value).__name__
    raise LossError(
        f"the metric {name!r} is a {kind}, which can't be joined over micro-batches; expected a Mean(total, count) or "
        "a "
        "tensor with one row a sample",
        name=name,
    )


def _check_mean_count(count: Any, name: str) -> None:
    if isinstance(count, torch.Tensor):
        if count.dim() != 0:
            raise CountError(
                f"the count of the Mean {name!r} has shape {tuple(count.shape)}; expected one number: .sum()"
            )
        return
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise CountError(f"the count of the Mean {name!r} is a {type(count).__name__}; expected a number or a tensor")
    fetched([count])


def _no_gradient(name: str) -> LossError:
    return LossError(
        f"the loss {name!r} has no gradient, so there is nothing to differentiate; expected a loss that depends on "
        "parameters with requires_grad. Look for detach(), .item(), torch.no_grad() or a frozen model, and return "
        "what is "
        "only to be looked at as a metric",
        name=name,
    )


def _several_unknown_counts(name: str) -> LossError:
    return LossError(
        f"the loss {name!r} stands beside another, and their Means have counts that only the forward knows, so the "
        "weights of the micro-batches are not known in time; pass count='forward' (one more pass without gradient), or "
        f"count={{{name!r}: ..., ...}} with a count for each loss",
        name=name,
    )
