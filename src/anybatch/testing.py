"""For people's own tests: a loss that may be split stays so."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from anybatch.batch.counting import count_samples
from anybatch.certificate import check
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.loss.losses import LossFunction
from anybatch.loss.weights import Count
from anybatch.options import BatchNormPolicy
from anybatch.records.certificates import Certificate
from anybatch.records.plans import Plan
from anybatch.tensors.precision import AccumulatePolicy


def assert_exact(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    micro_batch_size: float | None = None,
    plan: Plan | None = None,
    count: Count = count_samples,
    broadcast: Sequence[str] = (),
    layout: Mapping[str, int | None] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    cost: Callable[[Any], float] | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    inputs: Iterable[torch.Tensor] | None = None,
    batch_norm: BatchNormPolicy = "refuse",
    accumulate: AccumulatePolicy = "auto",
    dropout: DropoutPolicy = "native",
    group: Any = None,
) -> Certificate:
    """Fails if micro-batches do not give the gradient of the whole batch.

    Args:
        model: see ``anybatch.check``, as for the other arguments.
        loss_fn: the loss of the training.
        batch: a small one with uneven lengths is best.
        micro_batch_size: of the first split.
        plan: says the size of the first split.
        count: what the loss is the mean over.
        broadcast: dotted paths of leaves that are not split.
        layout: the dimension of the samples of some leaves.
        collate: makes a batch of raw samples.
        cost: the cost of one raw sample.
        autocast: the dtype in which the forward runs.
        scaler: makes no difference here.
        inputs: the only tensors whose gradient is compared.
        batch_norm: what the step does with BatchNorm.
        accumulate: when gradients of lower precision are accumulated in float32.
        dropout: what the step does with dropout.
        group: makes no difference here.

    Returns:
        The certificate, whose notes say what else there is to know.

    Raises:
        AssertionError: they do not; its text is the certificate, which says why and what to do.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> assert_exact(model, lambda model, batch: model(batch).pow(2).mean(), torch.randn(5, 3)).samples
        5
        >>> assert_exact(model, lambda model, batch: model(batch).sum(), torch.randn(5, 3))
        Traceback (most recent call last):
            ...
        AssertionError: not exact: in micro-batches the gradient of Linear is not the whole batch's
        ...
    """
    certificate = check(
        model, loss_fn, batch, micro_batch_size=micro_batch_size, plan=plan, count=count, broadcast=broadcast,
        layout=layout, collate=collate, cost=cost, autocast=autocast, scaler=scaler, inputs=inputs,
        batch_norm=batch_norm, accumulate=accumulate, dropout=dropout, group=group,
    )  # fmt: skip
    if not certificate.exact:
        raise AssertionError(str(certificate))
    return certificate
