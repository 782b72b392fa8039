"""The cross-entropy of a linear layer, computed for a chunk of rows at a time.

``F.linear_cross_entropy`` of torch 2.13 does the same for a part of what ``F.cross_entropy`` takes, and within one
operation, so that what it allocates can't be seen from outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from anybatch.errors import AnyBatchError
from anybatch.memory.checkpointing import Autocast

_LOW = (torch.bfloat16, torch.float16)
Gradients = list[torch.Tensor | None]
"""Of the rows, of the weight and of the bias; ``None`` where none is needed."""


@dataclass
class CrossEntropy:
    """A cross-entropy over the rows of a linear layer's result, and its gradient, row by row.

    With ``p`` the softmax, ``e`` the smoothing, ``w`` the weights of the C classes and ``y`` the target the loss of a
    row is ``-(1 - e) w_y log p_y - e / C sum_c w_c log p_c``, which is what ``F.cross_entropy`` computes, and its
    gradient at logit c is ``((1 - e) w_y + e / C sum w) p_c - (1 - e) w_y [c = y] - e / C w_c``.
    """

    target: torch.Tensor  # the classes, one for each row, of any shape
    class_weights: torch.Tensor | None  # one for each class, or ``None``
    ignore_index: int  # the target that does not count
    reduction: str  # ``"mean"``, ``"sum"`` or ``"none"``
    label_smoothing: float  # what goes from the target to all classes
    chunks: int  # how many parts
    dtype: torch.dtype  # in which the linear layer computes
    casts: tuple[torch.dtype, ...]  # dtypes that its result goes through before the loss
    autocast: Autocast  # as it is around the loss

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The loss of ``F.linear(rows, weight, bias)``, without ever holding more than a part of that.

        It has a gradient for ``rows``, ``weight`` and ``bias``, which can be used once.
        """
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, weight, bias)):
            loss: torch.Tensor = _Chunked.apply(self, rows, weight, bias)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                loss, _ = self.run(rows, weight, bias, (False, False, False))
        return loss

    @property
    def is_late(self) -> bool:
        """Whether the gradient can only be computed in the backward.

        Without reduction each row's factor is unknown before. In float16 gradients that are not multiplied by the scale
        of a ``GradScaler`` yet would vanish.
        """
        return self.reduction == "none" or torch.float16 in (self.dtype, *self.casts)

    def run(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: Sequence[bool],
        gradient: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Gradients]:
        """Goes over the chunks; gives the loss, and the gradients that are needed."""
        given = [None if tensor is None else tensor.detach() for tensor in (rows, weight, bias)]
        with torch.autocast(self.target.device.type, enabled=False):
            # What autocast would do, but for the weight once and not in each chunk.
            rows, weight = rows.detach().to(self.dtype), weight.detach().to(self.dtype)
            bias = None if bias is None else bias.detach().to(self.dtype)
            precision = self._precision(weight)
            denominator = self._denominator(_wide(precision))
            weights = None if self.class_weights is None else self.class_weights.to(precision)
            sums, losses, at = _empty_sums(given, needs), [], 0
            for part, target, factor in zip(
                rows.tensor_split(self.chunks),
                self.target.reshape(-1).tensor_split(self.chunks),
                self._factors(gradient, denominator, precision).tensor_split(self.chunks),
                strict=True,
            ):
                # The logits of these rows have no name here, so that they go as soon as they were looked at.
                loss, change = self._of_rows(
                    F.linear(part, weight, bias), target, factor if any(needs) else None, weights, precision
                )
                losses.append(loss if self.reduction == "none" else loss.sum(dtype=_wide(loss.dtype)))
                if change is not None:
                    _add(sums, slice(at, at + len(part)), part, weight, change)
                del change
                at += len(part)
            return self._reduced(losses, denominator, precision), [
                None if total is None or tensor is None else total.to(tensor.dtype)
                for total, tensor in zip(sums, given, strict=True)
            ]

    def _precision(self, weight: torch.Tensor) -> torch.dtype:
        """The dtype in which torch computes this loss, which autocast decides by itself."""
        logits = weight.new_empty((0, weight.shape[0]), dtype=self.casts[-1] if self.casts else self.dtype)
        with self.autocast.again():
            return F.cross_entropy(logits, self.target.new_empty(0), self.class_weights, reduction="none").dtype

    def _denominator(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What the sum is divided by; torch divides by the weights of the classes that count, or by their number."""
        if self.reduction != "mean":
            return None
        counts = self.target.reshape(-1) != self.ignore_index
        if self.class_weights is None:
            return counts.sum().to(dtype)
        classes = torch.where(counts, self.target.reshape(-1), 0)
        return (self.class_weights[classes].to(dtype) * counts).sum()

    def _factors(
        self, gradient: torch.Tensor | None, denominator: torch.Tensor | None, precision: torch.dtype
    ) -> torch.Tensor:
        """The factor for the gradient of each row."""
        if gradient is None:
            gradient = torch.ones((), dtype=_wide(precision), device=self.target.device)
        if denominator is not None:
            gradient = gradient.to(denominator.dtype) / denominator
        return gradient.reshape(-1) if self.reduction == "none" else gradient.expand(self.target.numel())

    def _of_rows(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        factor: torch.Tensor | None,
        weights: torch.Tensor | None,
        precision: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The losses of some rows, and the gradient at their logits if there is a factor."""
        dtype = logits.dtype
        for cast in (*self.casts, precision):
            logits = logits.to(cast)
        logits = torch.log_softmax(logits, dim=1)
        counts = target != self.ignore_index
        classes = torch.where(counts, target, 0).unsqueeze(1)
        keep = (1.0 - self.label_smoothing) * counts.to(precision)
        if weights is not None:
            keep = keep * weights[classes.squeeze(1)]
        share = self.label_smoothing / logits.shape[1] * counts.to(precision)
        losses = torch.where(counts, -keep * logits.gather(1, classes).squeeze(1), 0)
        if self.label_smoothing:
            smooth = logits.sum(1) if weights is None else logits @ weights
            losses = torch.where(counts, losses - share * smooth, 0)
        if factor is None:
            return losses, None
        factor = torch.where(counts, factor.to(precision), 0)  # 1 / 0 where nothing counts at all
        keep, share = keep * factor, share * factor
        change = logits.exp_().mul_(
            (keep + share * (logits.shape[1] if weights is None else weights.sum())).unsqueeze(1)
        )
        change.scatter_(1, classes, change.gather(1, classes) - keep.unsqueeze(1))
        if self.label_smoothing:
            change.addr_(share, change.new_ones(change.shape[1]) if weights is None else weights, alpha=-1)
        for cast in reversed((dtype, *self.casts)):
            change = change.to(cast)
        return losses, change

    def _reduced(
        self, losses: list[torch.Tensor], denominator: torch.Tensor | None, precision: torch.dtype
    ) -> torch.Tensor:
        """The loss of all rows."""
        if self.reduction == "none":
            return torch.cat(losses).view(self.target.shape)
        total = torch.stack(losses).sum()
        return (total if denominator is None else total / denominator).to(precision)


def refuse_second_derivative() -> None:
    """Refuses ``create_graph=True``: the second derivative would be incomplete."""
    if torch.is_grad_enabled():
        raise AnyBatchError(
            "a loss in chunks was differentiated with create_graph=True, which gives no second derivatives; "
            "expected first derivatives only. Leave chunk_loss out"
        )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: CrossEntropy, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.loss = loss
        if loss.is_late:
            ctx.save_for_backward(rows, weight, bias)
            value, _ = loss.run(rows, weight, bias, (False, False, False))
        else:
            value, ctx.gradients = loss.run(rows, weight, bias, ctx.needs_input_grad[1:])
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        if ctx.loss.is_late:
            _, gradients = ctx.loss.run(*ctx.saved_tensors, ctx.needs_input_grad[1:], gradient)
            return None, *gradients
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise AnyBatchError(
                "a loss in chunks was differentiated twice; its gradient is computed together with it and can be "
                "used only once. Leave chunk_loss out, or compute the loss again"
            )
        return None, *(None if one is None else one.mul_(gradient) for one in gradients)


def _empty_sums(tensors: Sequence[torch.Tensor | None], needs: Sequence[bool]) -> Gradients:
    """Buffers for the gradients: one slice per chunk for the rows, sums over the chunks for weight and bias."""
    sums: Gradients = [None, None, None]
    for index, (tensor, needed) in enumerate(zip(tensors, needs, strict=True)):
        if tensor is not None and needed:
            dtype = tensor.dtype if index == 0 else _wide(tensor.dtype)
            make = torch.empty if index == 0 else torch.zeros
            sums[index] = make(tensor.shape, dtype=dtype, device=tensor.device)
    return sums


def _add(sums: Gradients, piece: slice, part: torch.Tensor, weight: torch.Tensor, change: torch.Tensor) -> None:
    """Adds the gradients of some rows, given that at their logits."""
    of_rows, of_weight, of_bias = sums
    if of_rows is not None:
        of_rows[piece] = change @ weight
    if of_weight is not None:
        if of_weight.dtype == change.dtype:
            of_weight.addmm_(change.t(), part)
        else:
            of_weight.add_(change.t() @ part)
    if of_bias is not None:
        of_bias.add_(change.sum(0))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _LOW else dtype
