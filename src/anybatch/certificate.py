"""``check``: do micro-batches give the gradient of the whole batch, and if not, why not?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from anybatch.batch.counting import count_samples
from anybatch.checking.examination import examine
from anybatch.interception import unobserved
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.loss.losses import LossFunction
from anybatch.loss.weights import Count
from anybatch.options import BatchNormPolicy, Options, refuse_parts
from anybatch.parallel.ranks import reducer_for
from anybatch.records.certificates import Certificate
from anybatch.records.plans import Plan
from anybatch.tensors.modules import device_of, modules_behind
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.update.passes import Task


def check(
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
    """Compares the gradient of a whole batch with the gradients of two different splits of it.

    Your model, loss and batch run in float64 on copies of all tensors, with random numbers that do not depend on the
    split. Where the model can't run in float64, it runs in its own precision and a note says so. Afterwards weights,
    gradients, buffers, modes, attributes and random state are bitwise unchanged. If gradients differ, each reason names
    the module or the loss, the difference, and the line that helps.

    A model whose gradients differ only by dropout is exact, with a note: the masks of a split are as valid as those of
    the whole batch. If all samples have the same count, a mean over tokens looks like a mean over samples: check a
    batch with uneven lengths. The arguments are those of ``anybatch.backward``.

    Args:
        model: the first argument of ``loss_fn``, in the mode in which it trains.
        loss_fn: see ``anybatch.backward``.
        batch: at least two samples; of a ``Window`` the largest batch is checked. Each rank of a process group checks
            its own batch, without communication.
        micro_batch_size: the size of the first split: samples, or with ``cost`` the padded cost; ``None`` for halves.
        plan: gives the size of the first split.
        count: see ``anybatch.backward``.
        broadcast: dotted paths of leaves that are not split.
        layout: the sample dimension of some leaves, see ``anybatch.backward``.
        collate: builds a batch from raw samples.
        cost: the cost of one raw sample.
        autocast: the dtype of the forward, used where it can't run in float64.
        scaler: not used.
        inputs: the only tensors whose gradients are compared.
        batch_norm: what the step will do with BatchNorm; ``"frozen"`` does not couple samples.
        accumulate: when low-precision gradients are accumulated in float32.
        dropout: what the step will do with dropout; ``"per-sample"`` draws the same masks in every split.
        group: not used.

    Returns:
        The certificate; its ``exact`` is the answer.

    Raises:
        BatchError: an argument is invalid, the batch can't be split or has one sample, or the model is sharded.
        CountError: the count of the whole batch is 0 or not a number.
        LossError: the loss function fails its contract on the whole batch.
        DoesNotFit: not even two samples fit in memory.

    Example:
        >>> def loss_fn(model, batch):
        ...     logits = model(batch["x"])
        ...     return torch.nn.functional.cross_entropy(logits, batch["y"], ignore_index=-100)
        >>> batch = {"x": torch.randn(4, 3), "y": torch.tensor([0, 1, -100, 1])}
        >>> certificate = check(torch.nn.Linear(3, 2), loss_fn, batch)
        >>> certificate.exact, certificate.reasons[0].remedy
        (False, 'count=anybatch.count_tokens("y")')
    """
    options = Options(
        model=model, loss_fn=loss_fn, micro_batch_size=micro_batch_size, plan=plan, count=count, broadcast=broadcast,
        layout=layout, collate=collate, cost=cost, autocast=autocast, scaler=scaler, inputs=inputs,
        batch_norm=batch_norm, accumulate=accumulate, dropout=dropout,
    )  # fmt: skip
    refuse_parts(model, "check")
    splittable = options.splittable(batch, may_be_empty=True)
    size = micro_batch_size if plan is None else plan.micro_batch_size
    settings = replace(options.settings(), scaler=None)
    task = Task(model, loss_fn, count, settings, batch_norm, splittable, size)
    with unobserved(), reducer_for(model, False, device_of(model)).apart(modules_behind(model, loss_fn)):
        return examine(task)
