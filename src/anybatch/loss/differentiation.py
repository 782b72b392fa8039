"""Weights and differentiates the losses of a logical batch."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from anybatch.errors import CountError, LossError
from anybatch.interception import WEIGHT
from anybatch.loss.cutting import backward_to_leaves, declare_nothing_to_do
from anybatch.loss.reducing import Stage
from anybatch.loss.sums import Sums, Term, checked_metrics
from anybatch.loss.weights import Weights, fetched
from anybatch.records.means import Mean
from anybatch.tensors.graph import OutsideLeaves

if TYPE_CHECKING:
    from anybatch.loss.accumulate import Settings


class Differentiation:
    """Weights losses, differentiates them, and sums their values."""

    def __init__(
        self,
        weights: Weights,
        rows: Sequence[int | None],
        parameters: Sequence[torch.Tensor],
        settings: "Settings",
        *,
        outside: OutsideLeaves | None = None,
        differentiate: bool = True,
        in_pieces: bool = False,
    ) -> None:
        self._weights, self._rows, self._parameters = weights, rows, parameters
        self._scaler, self._inputs, self._reducer = settings.scaler, settings.inputs, settings.reducer
        self._outside, self._differentiate, self._in_pieces = outside, differentiate, in_pieces
        # The last one, which stays alive for the next micro-batch.
        self.weight_tensors: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}
        self._waiting: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []  # losses and their gradients
        self._with_gradient: set[str] = set()
        self._summed: str | None = None
        self._divisor = 1.0
        self._numbers: list[int] = []  # of the micro-batches that gave metrics, as long as sums.metrics
        self.sums = Sums()

    def add(self, index: int, name: str, loss: torch.Tensor | Mean, share: float = 1.0) -> None:
        """Adds a loss; ``differentiate_waiting`` differentiates it.

        Args:
            share: the fraction of the micro-batch that a plain loss is the mean over; a ``Mean`` has its own count.
        """
        if isinstance(loss, Mean):
            self._add_mean(index, name, loss)
            return
        weight = self._weights.column(name)[index] * share
        if weight == 0:  # a mean over nothing may be NaN, and NaN * 0 is NaN
            declare_nothing_to_do()
            return
        if self._differentiate and not loss.requires_grad:
            raise _no_gradient(name)
        self.sums.terms.setdefault(name, []).append(Term(_value(loss), weight, 1))
        self._wait(loss, weight)

    def add_nothing(self, loss: torch.Tensor | Mean) -> None:
        """Adds a loss with weight 0, whose backward other processes wait for."""
        total = loss.total if isinstance(loss, Mean) else loss
        had_gradient = self.sums.has_gradient
        if isinstance(total, torch.Tensor) and total.requires_grad:
            self._wait(total, 0.0)
        self.sums.has_gradient = had_gradient

    def keep_metrics(self, index: int, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a micro-batch; all micro-batches need the same metrics."""
        kept = self.sums.metrics
        if metrics or (kept and kept[-1]):
            metrics = checked_metrics(metrics, self._rows[index], kept[-1] if kept else None)
        kept.append(metrics)
        self._numbers.append(index)

    def absorb(self, other: "Differentiation") -> float:
        """Adds other micro-batches of the same logical batch; returns the factor that their gradients need before."""
        factor = 1.0
        if other._summed is not None:
            if {*self.sums.terms, *self.sums.counts, other._summed} != {other._summed}:
                raise _several_unknown_counts(other._summed)
            if self._summed is None:
                self._summed, self._divisor = other._summed, other._divisor
            factor = other._divisor / self._divisor  # of powers of two, which rounds nothing
        elif self._summed is not None and {*other.sums.terms, *other.sums.counts} - {self._summed}:
            raise _several_unknown_counts(self._summed)
        for name, terms in other.sums.terms.items():
            self.sums.terms.setdefault(name, []).extend(terms)
        for name, counts in other.sums.counts.items():
            self.sums.counts.setdefault(name, []).extend(counts)
        self.sums.has_gradient |= other.sums.has_gradient
        self._with_gradient |= other._with_gradient
        both = [*zip(self._numbers, self.sums.metrics, strict=True)]
        both += zip(other._numbers, other.sums.metrics, strict=True)
        self._numbers, self.sums.metrics = [], []
        for index, metrics in sorted(both, key=lambda found: found[0]):
            self.keep_metrics(index, metrics)
        return factor

    def check_alone(self, name: str, seen: int) -> None:
        """Refuses a second loss beside a ``Mean`` whose weight is known only at the end."""
        if self._summed is not None and (seen > 1 or name != self._summed):
            raise _several_unknown_counts(name)

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
        """The divisor of a ``Mean``'s value, and the factor for its gradient; ``None`` for what is not known yet."""
        if self._weights.names(name):
            total = self._weights.total(name)
            return total, 1.0 / total if total else 0.0
        # The only Mean of a batch has its own count as divisor; of several, the sum is known only at the end.
        if len(self._weights) == 1 and not self._in_pieces and not self._reducer.is_shared:
            return count, None
        return None, self._summing_factor(index, name, count) if self._differentiate else None

    def _summing_factor(self, index: int, name: str, count: Any) -> float:
        """The factor for a ``Mean`` that is summed over micro-batches, and divided by the count at the end.

        It is one over a power of two near the expected count: exact, and scaled fp16 gradients stay in range.
        """
        if self._summed is None:
            if {*self.sums.terms, *self.sums.counts} != {name}:
                raise _several_unknown_counts(name)
            self._summed = name
            expected = max(1.0, float(self._rows[index] or 1))
            if not isinstance(count, torch.Tensor) or count.device.type == "cpu":
                expected = max(1.0, float(count))
            expected *= len(self._weights)
            if self._reducer.is_sharded:  # gradients of several processes are summed before they are divided
                expected = float(self._reducer.rows(0))
            self._divisor = 2.0 ** round(math.log2(expected))
        elif self._summed != name:
            raise _several_unknown_counts(name)
        return 1.0 / self._divisor

    def _wait(self, loss: torch.Tensor, weight: float) -> None:
        if not self._differentiate:
            return
        # The gradient has the dtype of the loss: in bf16, with 8 bits, n_i / n would be rounded to another weight.
        loss = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        key = (weight, loss.dtype, loss.device)
        gradient = self.weight_tensors.get(key)
        if gradient is None:
            gradient = torch.full((), weight, dtype=loss.dtype, device=loss.device)
            if self._scaler is not None:
                gradient = self._scaler.scale(gradient)
            setattr(gradient, WEIGHT, weight)
            self.weight_tensors = {key: gradient}  # one for each of very many micro-batches would take memory
        self._waiting[0].append(loss)
        self._waiting[1].append(gradient)

    def _wait_over(self, total: torch.Tensor, count: Any) -> None:
        """Differentiates ``total / count``; over no items the gradient is 0."""
        if not isinstance(count, torch.Tensor):
            self._wait(total, 1.0 / count)
            return
        total = total if total.dtype in (torch.float32, torch.float64) else total.float()
        divisor = count.to(total.device, total.dtype)
        gradient = torch.where(divisor > 0, divisor.reciprocal(), torch.zeros_like(divisor))
        if self._scaler is not None:
            gradient = self._scaler.scale(gradient)
        self.wait_for(total, gradient)

    def wait_for(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds a tensor and its gradient, already weighted and scaled, to the next backward."""
        self._waiting[0].append(tensor)
        self._waiting[1].append(gradient)

    def differentiate_waiting(self, name: str = "", *, is_first: bool = True) -> None:
        """Differentiates all waiting losses in one backward, since they may share a graph."""
        (waiting, gradients), self._waiting = self._waiting, ([], [])
        if not waiting:
            return
        self.sums.has_gradient = True
        try:
            backward_to_leaves(waiting, gradients, name)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise (_graph_is_kept() if is_first else _graph_is_gone()) from error
            raise

    def closing_scale(self) -> float | None:
        """The factor for all gradients where there are ``Mean`` s; ``None`` if their counts were known before.

        Raises:
            CountError: counts of ``Mean`` s differ from ``count=``.
            LossError: a loss with items had no gradient in any micro-batch.
        """
        own = {name: sum(fetched(counts)) for name, counts in self.sums.counts.items()}
        totals = self._reducer.totals(own, Stage.TOTALS)
        for name, total in totals.items():
            if self._weights.names(name):
                self._check_given_count(name, total)
            if name in own and (not self._differentiate or name == self._summed):
                terms = self.sums.terms.get(name, [])
                self.sums.terms[name] = [term._replace(divisor=total) for term in terms]
            if self._differentiate and own.get(name, 0) > 0 and name not in self._with_gradient:
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

    def scale_gradients_(self, scale: float) -> None:
        """Multiplies the gradients."""
        targets = self._inputs if self._inputs is not None else self._parameters
        outside = [leaf for leaf, _ in self._outside.found] if self._outside is not None else []
        gradients = [tensor.grad for tensor in [*targets, *outside] if tensor.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale)


def _value(loss: torch.Tensor) -> torch.Tensor:
    """The detached value; cloned if its storage is larger, as for views and for ``mse_loss`` and some others."""
    value = loss.detach()
    return value.clone() if value.untyped_storage().nbytes() > value.element_size() else value


def checked_count(count: Any, name: str) -> Any:
    """Checks the count of a ``Mean``; the value of a tensor is read only at the end."""
    if isinstance(count, torch.Tensor):
        if count.dim() != 0 or count.is_complex():
            raise CountError(
                f"the count of the Mean {name!r} is a {count.dtype} tensor of shape {tuple(count.shape)}; expected one "
                "number: .sum()"
            )
        if count.requires_grad:
            raise CountError(
                f"the count of the Mean {name!r} requires a gradient, which would be ignored; expected a number of "
                "items: count.detach(), or return total / count as a plain loss with its own count="
            )
        return count
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise CountError(f"the count of the Mean {name!r} is a {type(count).__name__}; expected a number or a tensor")
    return fetched([count])[0]


def _graph_is_gone() -> LossError:
    return LossError(
        "two yielded losses share a graph, which the first one freed; expected a cut of the shared part: `with "
        "anybatch.cut(shared) as shared:` around the heads, or return a mapping of the losses, which share one "
        "backward pass"
    )


def _graph_is_kept() -> LossError:
    return LossError(
        "the loss backpropagates through a graph that was freed with an earlier micro-batch or step: a tensor with "
        "a graph, such as a hidden state, is kept outside the loss between calls; expected each call to start from "
        "what is in its batch. Pass the state as data, batch['state'] = state, a row for each sample; let the loss "
        "return the new one as a metric, return loss, {'state': new}; and carry it over once after the step: state "
        "= out.metrics['state']"
    )


def _no_gradient(name: str) -> LossError:
    return LossError(
        f"the loss {name!r} has no gradient, so there is nothing to differentiate; expected a loss that depends on "
        "parameters with requires_grad. Look for detach(), .item(), torch.no_grad() or a frozen model, and return "
        "values that are only logged as a metric",
        name=name,
    )


def _several_unknown_counts(name: str) -> LossError:
    return LossError(
        f"the loss {name!r} is one of several, and their Means have counts that only the forward pass knows, so "
        "the weights of the micro-batches are not known in time; pass count='forward' (one more pass without "
        f"gradients), or count={{{name!r}: ..., ...}} with a count for each loss",
        name=name,
    )
