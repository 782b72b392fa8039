"""The gradient of a logical batch, accumulated over its micro-batches."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.errors import CountError, LossError
from anybatch.gradient.cutting import (
    Restriction,
    accumulation,
    backward_to_leaves,
    declare_nothing_to_do,
)
from anybatch.gradient.losses import SINGLE, Evaluation, LossFunction, checked_loss
from anybatch.gradient.metrics import checked_metrics
from anybatch.gradient.sums import Sums, Term
from anybatch.gradient.weights import Weights, fetched
from anybatch.records.means import Mean
from anybatch.tensors.graph import OutsideLeaves
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


class Accumulation:
    """One pass over the micro-batches of a logical batch, which leaves its gradient in ``.grad``.

    Args:
        model: the first argument of the loss function.
        loss_fn: see ``gradient.losses``.
        weights: the counts.
        parameters: whose ``.grad`` is filled; empty at the start.
        settings: precision, scaling, inputs.
        rows: the samples of each micro-batch.
        outside: is told of leaves that are not in ``parameters``, or ``None``.
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
        rows: Sequence[int],
        outside: OutsideLeaves | None = None,
        differentiate: bool = True,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._weights = weights
        self._parameters = parameters
        self._settings = settings
        self._rows = rows
        self._outside = outside
        self._differentiate = differentiate
        self._weight_tensors: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._with_gradient: set[str] = set()
        self._summed: str | None = None
        self._divisor = 1.0
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
        token = accumulation.set(Restriction(self._settings.inputs, self._outside))
        try:
            self._run_all(micro_batches)
        finally:
            accumulation.reset(token)
        return self.sums

    def _run_all(self, micro_batches: Iterable[Any]) -> None:
        accumulator = None
        if needs_float32(self._parameters, len(self._weights), self._settings.policy):
            accumulator = Float32Accumulator(self._parameters)
        for index, batch in enumerate(micro_batches):
            self._run_one(index, batch)
            if accumulator is not None:
                accumulator.take_()
        scale = self._closing_scale()
        if accumulator is not None:
            self.sums.accumulator_bytes = accumulator.bytes
            accumulator.give_(scale)
        if scale is not None:
            self._scale_gradients_(scale, already=accumulator is not None)

    def _run_one(self, index: int, batch: Any) -> None:
        if self._settings.autocast is None:
            result = self._loss_fn(self._model, batch)
        else:
            with self._settings.context():
                result = self._loss_fn(self._model, batch)
        if type(result) is torch.Tensor:  # the usual case takes the short way
            self._add_scalar(index, SINGLE, checked_loss(result, ""))
            del result
            self._differentiate_waiting()
            self._keep_metrics(index, {})
            return
        evaluation = Evaluation(result, self._settings.context)
        del result
        for seen, (name, loss) in enumerate(evaluation, start=1):
            if isinstance(loss, Mean):
                self._add_mean(index, name, loss)
            else:
                self._add_scalar(index, name, loss)
            del loss
            if self._summed is not None and (seen > 1 or name != self._summed):
                raise _several_unknown_counts(name)
            if evaluation.is_generator:
                self._differentiate_waiting()
        self._differentiate_waiting()
        self._keep_metrics(index, evaluation.metrics)

    def _keep_metrics(self, index: int, metrics: Mapping[str, Any]) -> None:
        kept = self.sums.metrics
        if metrics or (kept and kept[-1]):
            metrics = checked_metrics(metrics, self._rows[index], kept[-1] if kept else None)
        kept.append(metrics)

    def _add_scalar(self, index: int, name: str, loss: torch.Tensor) -> None:
        weight = self._weights.column(name)[index]
        if weight == 0:  # a mean over nothing may be NaN, and NaN * 0 is NaN
            declare_nothing_to_do()
            return
        if self._differentiate and not loss.requires_grad:
            raise _no_gradient(name)
        self.sums.terms.setdefault(name, []).append(Term(_value(loss), weight, 1))
        self._wait(loss, weight)

    def _add_mean(self, index: int, name: str, mean: Mean) -> None:
        count = checked_count(mean.count, name)
        self.sums.counts.setdefault(name, []).append(count)
        if not isinstance(count, torch.Tensor) and count == 0:
            declare_nothing_to_do()
            return
        total, factor = self._denominator(index, name, count)
        self.sums.terms.setdefault(name, []).append(Term(_value(mean.total), 1.0, total))
        if not self._differentiate:
            return
        if not mean.total.requires_grad:
            declare_nothing_to_do()
            return
        self._with_gradient.add(name)
        if factor is None:
            self._wait_over(mean.total, count)
        else:
            self._wait(mean.total, factor)

    def _denominator(self, index: int, name: str, count: Any) -> tuple[Any, float | None]:
        """What a ``Mean`` is divided by in the end, and what its gradient is multiplied by now, if both are known."""
        if self._weights.names(name):
            total = self._weights.total(name)
            return total, 1.0 / total if total else 0.0
        if len(self._weights) == 1:
            return count, None
        return None, self._summing_factor(index, name, count) if self._differentiate else None

    def _summing_factor(self, index: int, name: str, count: Any) -> float:
        """Sums one ``Mean`` over the micro-batches, to be divided by the count at the end.

        The summands are divided by a power of two near the expected count, which rounds nothing and keeps scaled fp16
        gradients in range.
        """
        if self._summed is None:
            if {*self.sums.terms, *self.sums.counts} != {name}:
                raise _several_unknown_counts(name)
            self._summed = name
            expected = max(1.0, float(self._rows[index]))
            if not isinstance(count, torch.Tensor) or count.device.type == "cpu":
                expected = max(1.0, float(count))
            self._divisor = 2.0 ** round(math.log2(expected * len(self._weights)))
        elif self._summed != name:
            raise _several_unknown_counts(name)
        return 1.0 / self._divisor

    def _wait(self, loss: torch.Tensor, weight: float) -> None:
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
        self._waiting.append((loss, gradient))

    def _wait_over(self, total: torch.Tensor, count: Any) -> None:
        """Differentiates ``total / count``; over no items the gradient is 0."""
        if not isinstance(count, torch.Tensor):
            self._wait(total, 1.0 / count)
            return
        total = total if total.dtype in (torch.float32, torch.float64) else total.float()
        divisor = count.to(total.device, total.dtype)
        gradient = torch.where(divisor > 0, divisor.reciprocal(), torch.zeros_like(divisor))
        if self._settings.scaler is not None:
            gradient = self._settings.scaler.scale(gradient)
        self._waiting.append((total, gradient))

    def _differentiate_waiting(self) -> None:
        """Losses of one forward go back together, since they may share a graph; yielded ones go one by one."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self.sums.has_gradient = True
        try:
            backward_to_leaves([loss for loss, _ in waiting], [gradient for _, gradient in waiting])
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise _graph_is_gone() from error
            raise

    def _closing_scale(self) -> float | None:
        totals = {name: sum(fetched(counts)) for name, counts in self.sums.counts.items()}
        for name, total in totals.items():
            if self._weights.names(name):
                self._check_given_count(name, total)
            if not self._differentiate or name == self._summed:
                terms = self.sums.terms.get(name, [])
                self.sums.terms[name] = [term._replace(divisor=total) for term in terms]
            if self._differentiate and total > 0 and name not in self._with_gradient:
                raise _no_gradient(name)
        if self._summed is None:
            return None
        return self._divisor / totals[self._summed] if totals[self._summed] else 0.0

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
        outside = [leaf for leaf, _ in self._outside.found] if self._outside is not None else []
        gradients = [t.grad for t in [*targets, *outside] if t.grad is not None and not (already and t.dtype in low)]
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
            with settings.context():
                result = loss_fn(model, batch)
            for name, loss in Evaluation(result, settings.context):
                if isinstance(loss, Mean):
                    raw.append(loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count)
                    places.append((index, name))
    rows: list[dict[str, float]] = [dict(part) for part in parts.parts]
    for (index, name), number in zip(places, fetched(raw), strict=True):
        rows[index][name] = number
    names = {name for row in rows for name in row}
    return Weights([{name: row.get(name, 0) for name in names} for row in rows])


def _value(loss: torch.Tensor) -> torch.Tensor:
    """The detached value, without the storage of many numbers that it may lie in.

    It may be a view; and ``mse_loss`` and some others give a number in the storage of all its summands.
    """
    value = loss.detach()
    return value.clone() if value.untyped_storage().nbytes() > value.element_size() else value


def checked_count(count: Any, name: str) -> Any:
    """The count that a ``Mean`` brings along; a tensor on a device is looked into only at the end.

    Args:
        count: a number or a tensor without dimensions.
        name: of the loss.

    Returns:
        The number, or the tensor.

    Raises:
        CountError: it is something else, or it depends on what is learned.
    """
    if isinstance(count, torch.Tensor):
        if count.dim() != 0 or count.is_complex():
            raise CountError(
                f"the count of the Mean {name!r} is a {count.dtype} tensor of shape {tuple(count.shape)}; expected one "
                "number: .sum()"
            )
        if count.requires_grad:
            raise CountError(
                f"the count of the Mean {name!r} has a gradient, which would be left out; expected a number of items: "
                "count.detach(), or return total / count as a plain loss with its own count="
            )
        return count
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise CountError(f"the count of the Mean {name!r} is a {type(count).__name__}; expected a number or a tensor")
    return fetched([count])[0]


def _graph_is_gone() -> LossError:
    return LossError(
        "two yielded losses share a graph, which the first one freed; expected that what they share is cut: "
        "`with anybatch.cut(shared) as shared:` around the heads, or return a mapping of the losses, which go back "
        "together"
    )


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
