"""Assertions for your own tests: micro-batches give the whole batch's gradient, and a model learns."""

import copy
import inspect
import io
import itertools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from anybatch.backpropagation import backward
from anybatch.certificate import check
from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.views.outcomes import outcome
from anybatch.loss.losses import LossFunction
from anybatch.records.certificates import Certificate
from anybatch.records.diagnoses import Diagnosis

P = ParamSpec("P")
T = TypeVar("T")


def _with_the_arguments_of(other: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """A decorator: the function shows, and is typed with, the arguments of the one that it hands them on to."""

    def decorated(function: Any) -> Callable[P, T]:
        function.__signature__ = inspect.signature(other)
        found: Callable[P, T] = function
        return found

    return decorated


@_with_the_arguments_of(check)
def assert_exact(*args: Any, **kwargs: Any) -> Certificate:
    """Fails if micro-batches do not give the gradient of the whole batch.

    The arguments are those of ``anybatch.check``; a small batch with uneven lengths is best.

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
    certificate = check(*args, **kwargs)
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
