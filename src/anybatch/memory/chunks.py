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
from anybatch.memory.replay import Autocast

_LOW = (torch.bfloat16, torch.float16)


@dataclass
class Task:
    """A cross-entropy over the rows of a linear layer's result."""

    target: torch.Tensor  # the classes, one for each row, of any shape
    class_weights: torch.Tensor | None  # one for each class, or ``None``
    ignore_index: int  # the target that does not count
    reduction: str  # ``"mean"``, ``"sum"`` or ``"none"``
    label_smoothing: float  # what goes from the target to all classes
    chunks: int  # how many parts
    dtype: torch.dtype  # in which the linear layer computes
    casts: tuple[torch.dtype, ...]  # dtypes that its result goes through before the loss
    autocast: Autocast  # as it is around the loss

    def precision(self, weight: torch.Tensor) -> torch.dtype:
        """The dtype in which torch computes this loss, which autocast decides by itself."""
        logits = weight.new_empty((0, weight.shape[0]), dtype=self.casts[-1] if self.casts else self.dtype)
        with self.autocast.again():
            return F.cross_entropy(logits, self.target.new_empty(0), self.class_weights, reduction="none").dtype

    def denominator(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What the sum is divided by; torch divides by the weights of the classes that count, or by their number."""
        if self.reduction != "mean":
            return None
        counts = self.target.reshape(-1) != self.ignore_index
        if self.class_weights is None:
            return counts.sum().to(dtype)
        classes = torch.where(counts, self.target.reshape(-1), 0)
        return (self.class_weights[classes].to(dtype) * counts).sum()

    @property
    def is_late(self) -> bool:
        """Whether the gradient can only be computed in the backward.

        Without reduction each row's factor is unknown before. In float16 gradients that are not multiplied by the scale
        of a ``GradScaler`` yet would vanish.
        """
        return self.reduction == "none" or torch.float16 in (self.dtype, *self.casts)


def chunked_cross_entropy(
    task: Task, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The cross-entropy of ``F.linear(rows, weight, bias)``, without ever holding more than a part of that.

    Returns:
        The loss, with a gradient for ``rows``, ``weight`` and ``bias``, which can be used once.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, weight, bias)):
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(task, rows, weight, bias)  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            loss, _ = _Pass(task, (rows, weight, bias), (False, False, False)).run()
    return loss


def refuse_second_derivative() -> None:
    """Refuses ``create_graph=True``: the second derivative would be incomplete."""
    if torch.is_grad_enabled():
        raise AnyBatchError(
            "a loss in chunks was differentiated with create_graph=True, and it has no second derivative; expected "
            "first derivatives only. Leave chunk_loss out"
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, task: Task, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.task = task
        tensors = (rows, weight, bias)
        if task.is_late:
            ctx.save_for_backward(*tensors)
            loss, _ = _Pass(task, tensors, (False, False, False)).run()
            return loss
        loss, ctx.gradients = _Pass(task, tensors, ctx.needs_input_grad[1:]).run()
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        if ctx.task.is_late:
            _, gradients = _Pass(ctx.task, ctx.saved_tensors, ctx.needs_input_grad[1:]).run(gradient)
            return None, *gradients
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise AnyBatchError(
                "a loss in chunks was differentiated twice; its gradient is computed together with it and given away "
                "once. Leave chunk_loss out, or compute the loss again"
            )
        return None, *(None if one is None else one.mul_(gradient) for one in gradients)


class _Pass:
    """One pass over the chunks."""

    def __init__(self, task: Task, tensors: Sequence[torch.Tensor | None], needs: Sequence[bool]) -> None:
        self._task = task
        self._tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
        self._needs = needs

    def run(self, gradient: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Computes the loss, and the gradients that are needed."""
        task, device = self._task, self._task.target.device
        with torch.autocast(device.type, enabled=False):
            # What autocast would do, but for the weight once and not in each chunk.
            rows, weight, bias = (None if tensor is None else tensor.to(task.dtype) for tensor in self._tensors)
            if rows is None or weight is None:
                raise AnyBatchError("unreachable: a linear layer has rows and a weight")
            rule = _Rule(task, task.precision(weight))
            sums, losses, at = self._empty_sums(), [], 0
            for part, target, factor in zip(
                rows.tensor_split(task.chunks),
                task.target.reshape(-1).tensor_split(task.chunks),
                rule.factors(gradient).tensor_split(task.chunks),
                strict=True,
            ):
                loss, change = rule.apply(F.linear(part, weight, bias), target, factor if any(self._needs) else None)
                losses.append(loss if task.reduction == "none" else loss.sum(dtype=_wide(loss.dtype)))
                if change is not None:
                    _add(sums, slice(at, at + len(part)), part, weight, change)
                del change
                at += len(part)
            return rule.reduced(losses), [
                None if total is None or tensor is None else total.to(tensor.dtype)
                for total, tensor in zip(sums, self._tensors, strict=True)
            ]

    def _empty_sums(self) -> list[torch.Tensor | None]:
        """Buffers for the gradients: one slice per chunk for the rows, sums over the chunks for weight and bias."""
        sums: list[torch.Tensor | None] = [None, None, None]
        for index, (tensor, needed) in enumerate(zip(self._tensors, self._needs, strict=True)):
            if tensor is not None and needed:
                dtype = tensor.dtype if index == 0 else _wide(tensor.dtype)
                make = torch.empty if index == 0 else torch.zeros
                sums[index] = make(tensor.shape, dtype=dtype, device=tensor.device)
        return sums


class _Rule:
    """The cross-entropy and its gradient, row by row.

    With ``p`` the softmax, ``e`` the smoothing, ``w`` the weights of the C classes and ``y`` the target the loss of a
    row is ``-(1 - e) w_y log p_y - e / C sum_c w_c log p_c``, which is what ``F.cross_entropy`` computes, and its
    gradient at logit c is ``((1 - e) w_y + e / C sum w) p_c - (1 - e) w_y [c = y] - e / C w_c``.
    """

    def __init__(self, task: Task, dtype: torch.dtype) -> None:
        self._task = task
        self._dtype = dtype
        self._denominator = task.denominator(_wide(dtype))
        self._weights = None if task.class_weights is None else task.class_weights.to(dtype)

    def factors(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """The factor for the gradient of each row."""
        target = self._task.target
        if gradient is None:
            gradient = torch.ones((), dtype=_wide(self._dtype), device=target.device)
        if self._denominator is not None:
            gradient = gradient.to(self._denominator.dtype) / self._denominator
        return gradient.reshape(-1) if self._task.reduction == "none" else gradient.expand(target.numel())

    def apply(
        self, logits: torch.Tensor, target: torch.Tensor, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The losses of some rows, and the gradient at their logits if there is a factor."""
        task, dtype = self._task, logits.dtype
        for cast in (*task.casts, self._dtype):
            logits = logits.to(cast)
        logits = torch.log_softmax(logits, dim=1)
        counts = target != task.ignore_index
        classes = torch.where(counts, target, 0).unsqueeze(1)
        keep = (1.0 - task.label_smoothing) * counts.to(self._dtype)
        if self._weights is not None:
            keep = keep * self._weights[classes.squeeze(1)]
        share = task.label_smoothing / logits.shape[1] * counts.to(self._dtype)
        losses = torch.where(counts, -keep * logits.gather(1, classes).squeeze(1), 0)
        if task.label_smoothing:
            smooth = logits.sum(1) if self._weights is None else logits @ self._weights
            losses = torch.where(counts, losses - share * smooth, 0)
        if factor is None:
            return losses, None
        factor = torch.where(counts, factor.to(self._dtype), 0)  # 1 / 0 where nothing counts at all
        keep, share = keep * factor, share * factor
        change = self._gradient(logits, classes, keep, share)
        for cast in reversed((dtype, *task.casts)):
            change = change.to(cast)
        return losses, change

    def _gradient(
        self, logarithms: torch.Tensor, classes: torch.Tensor, keep: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        weights = self._weights
        total = logarithms.shape[1] if weights is None else weights.sum()
        change = logarithms.exp_().mul_((keep + share * total).unsqueeze(1))
        change.scatter_(1, classes, change.gather(1, classes) - keep.unsqueeze(1))
        if self._task.label_smoothing:
            change.addr_(share, change.new_ones(change.shape[1]) if weights is None else weights, alpha=-1)
        return change

    def reduced(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The loss of all rows."""
        if self._task.reduction == "none":
            return torch.cat(losses).view(self._task.target.shape)
        total = torch.stack(losses).sum()
        return (total if self._denominator is None else total / self._denominator).to(self._dtype)


def _add(
    sums: list[torch.Tensor | None], piece: slice, part: torch.Tensor, weight: torch.Tensor, change: torch.Tensor
) -> None:
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
