"""Assertions for your own tests: micro-batches give the whole batch's gradient, and a model learns."""

import copy
import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from anybatch.backpropagation import backward
from anybatch.batch.counting import count_samples
from anybatch.certificate import check
from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.views.outcomes import outcome
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.loss.losses import LossFunction
from anybatch.loss.weights import Count
from anybatch.options import BatchNormPolicy
from anybatch.records.certificates import Certificate
from anybatch.records.diagnoses import Diagnosis
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
        model: this and all other arguments are those of ``anybatch.check``.
        loss_fn: the training loss.
        batch: a small one with uneven lengths is best.
        micro_batch_size: the size of the first split.
        plan: gives the size of the first split.
        count: what the loss is the mean over.
        broadcast: dotted paths of leaves that are not split.
        layout: the sample dimension of some leaves.
        collate: builds a batch from raw samples.
        cost: the cost of one raw sample.
        autocast: the dtype of the forward.
        scaler: not used.
        inputs: the only tensors whose gradients are compared.
        batch_norm: what the step does with BatchNorm.
        accumulate: when low-precision gradients are accumulated in float32.
        dropout: what the step does with dropout.
        group: not used.

    Returns:
        The certificate; its notes may say more.

    Raises:
        AssertionError: the gradients differ; the message is the certificate, with the reasons and remedies.
        BatchError, CountError, LossError, DoesNotFit: see ``anybatch.check``.

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


def assert_trains(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
    steps: int = 200,
) -> Diagnosis:
    """Trains a copy of a model, and fails if it does not learn or the doctor finds an error.

    The model has learned if its last losses are below that of the best constant prediction, or, where no such
    prediction is known, if the loss has clearly fallen. Warnings alone do not fail.

    Args:
        model: is not changed.
        loss_fn: see ``anybatch.backward``.
        batches: used in turn, again and again; ``[batch]`` tests whether one batch can be fitted.
        optimizer: builds the optimizer of the copy; ``None`` for Adam with a learning rate of 3e-3.
        steps: number of updates.

    Returns:
        The diagnosis of the run.

    Raises:
        AssertionError: the model did not learn, or has an error; the message is the diagnosis.
        ValueError: there are no batches, or ``steps`` is below 1.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(64, 4)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        >>> def adam(model):
        ...     return torch.optim.Adam(model.parameters(), lr=0.1)
        >>> assert_trains(torch.nn.Linear(4, 1), loss_fn, [x], optimizer=adam).steps
        200
    """
    trained = copy.deepcopy(model)
    made = torch.optim.Adam(trained.parameters(), lr=3e-3) if optimizer is None else optimizer(trained)
    kept = list(batches)
    if not kept or steps < 1:
        raise ValueError(f"got {len(kept)} batches and steps={steps}; expected at least one of each")
    with Doctor(trained, made) as doctor:
        for batch in itertools.islice(itertools.cycle(kept), steps):
            made.zero_grad()
            backward(trained, loss_fn, batch)
            made.step()
    found = diagnosis(doctor.run)
    if outcome(doctor.run).word != "learning" or any(one.severity == "error" for one in found.findings):
        from rich.console import Console

        from anybatch.report.diagnosis_terminal import show

        text = io.StringIO()
        show(found, doctor.run, Console(file=text, width=100))
        raise AssertionError(text.getvalue())
    return found
