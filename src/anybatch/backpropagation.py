"""The gradient of a whole batch, in the caller's own loop."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anybatch.checking.proving import Proofs, Verify, proofs_of
from anybatch.errors import LossError
from anybatch.gradient.accumulate import DropoutPolicy, Settings
from anybatch.gradient.losses import LossFunction
from anybatch.gradient.sums import Sums
from anybatch.gradient.weights import Count, Weights
from anybatch.interception import Call, announce, first_call, gradients_aside
from anybatch.parallel.ranks import reducer_for
from anybatch.planning.devices import check_plan, precision_of
from anybatch.planning.following import Follower
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan
from anybatch.records.results import Attempt, StepResult
from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.counting import count_samples
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.tensors.windowing import Window
from anybatch.update.arguments import check_batch_options, check_hooks, check_pass, check_scaler, check_uncut, inputs_of
from anybatch.update.batchnorm import BatchNormPolicy
from anybatch.update.passes import Progress, Task, device_of, result_of, run_pass
from anybatch.update.transaction import SizeLimit, Snapshot, run_with_retries


def backward(
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
    verify: Verify = "first",
) -> StepResult:
    """Adds the gradient of the whole batch to ``.grad``, as ``loss_fn(model, batch).backward()`` would.

    The batch is split into micro-batches, each weighted by its share of the count. When memory runs out it starts again
    with micro-batches of half the size. After an exception ``.grad``, the random state and the buffers are as before.

    Args:
        model: the first argument of ``loss_fn``.
        loss_fn: ``loss_fn(model, batch)`` gives the mean over ``count(batch)`` items; or a ``Mean``, a mapping of
            names to either, a generator of losses, or a pair of the loss and metrics.
        batch: any nested container of tensors of shape ``[rows, ...]`` and lists of ``rows`` items, or a ``Window``;
            with ``collate`` a list of raw samples.
        micro_batch_size: samples in a micro-batch at most; with ``cost`` the padded cost of one; ``None`` for all.
        plan: a plan that was made with the same model, loss and precision; it says the size and what is recomputed.
        count: what the loss is the mean over: a function of a batch, a mapping of loss names to such functions, or
            ``"forward"`` where only the forward knows.
        broadcast: dotted paths of leaves that are not split.
        layout: by dotted path, which may have wildcards, the dimension of the samples where it is another than would be
            inferred, or ``None`` for what is not split: ``{"x": 1, "state.*": 1, "weights": None}``. ``0`` of a list or
            a tuple says that its items are the samples.
        collate: makes a batch of raw samples.
        cost: the cost of one raw sample, by which they are packed.
        autocast: the dtype in which the forward runs.
        scaler: a ``GradScaler`` that scales the losses; unscaling stays with the caller.
        inputs: the only tensors that get a gradient, as in ``torch.autograd.backward``.
        batch_norm: ``"refuse"`` to split it in training mode, ``"ghost"`` or ``"frozen"``.
        accumulate: when bfloat16 and float16 gradients are accumulated in float32: ``"auto"`` from the ninth
            micro-batch on, ``"fp32"`` always, ``"native"`` never.
        dropout: ``"native"``: masks are torch's; ``"per-sample"``: they are a function of the sample and do not depend
            on the split.
        group: the ranks whose batches together are the batch: a ``torch.distributed.ProcessGroup``, ``None`` for that
            of a DistributedDataParallel or else the default one if there is one, ``False`` for this process alone. All
            ranks call; one without samples passes a batch with no rows.
        verify: before the first batch of its layout that is split, some samples are run whole and in two parts:
            ``"first"`` refuses a loss that may not be split, ``"warn"`` warns of it, ``"off"`` runs nothing.

    Returns:
        The loss, the counts and the metrics of the whole batch; nothing waits for the device until they are read.

    Raises:
        BatchError: the batch can't be split.
        CountError: the counts are not finite, are negative or do not add up.
        LossError: the loss function broke its contract.
        NotSplittable: BatchNorm in training mode would be split; or the loss gives another gradient in parts.
        PlanMismatch: the plan was made for something else.
        DoesNotFit: one sample alone runs out of memory.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> out = backward(model, lambda model, batch: model(batch).mean(), torch.ones(22, 3), micro_batch_size=8)
        >>> out.micro_batches, [round(value, 5) for value in model.weight.grad[0].tolist()]
        (3, [1.0, 1.0, 1.0])
    """
    batch_options = check_batch_options(broadcast, collate, cost, layout)
    intercept(
        model, loss_fn, batch, micro_batch_size=micro_batch_size, count=count, **batch_options,
        batch_norm=batch_norm, autocast=autocast, inputs=inputs, accumulate=accumulate, dropout=dropout,
    )  # fmt: skip
    check_pass(
        model, loss_fn, count, micro_batch_size=micro_batch_size, batch_norm=batch_norm, accumulate=accumulate,
        autocast=autocast, cost=cost, dropout=dropout,
    )  # fmt: skip
    check_scaler(scaler)
    check_plan(None, plan, micro_batch_size)
    autocast = autocast or precision_of(plan)
    only = inputs_of(inputs)
    proofs = proofs_of(verify, model, loss_fn, count, collate, batch_norm, dropout, autocast)
    settings = Settings(device_of(model), autocast, scaler, only, accumulate, dropout=dropout)
    settings.reducer = reducer = reducer_for(model, group, settings.device)
    parameters = list(only) if only is not None else parameters_of(model, loss_fn)
    with reducer.call("backward", parameters, adds=True):
        splittable = splittable_of(batch, **batch_options, may_be_empty=reducer.is_shared)
        check_uncut(splittable, micro_batch_size, dropout, loss_fn, is_planned=plan is not None)
        task = Task(model, loss_fn, count, settings, batch_norm, splittable, micro_batch_size, "backward")
        return _run(task, plan, parameters, proofs)


def _run(task: Task, plan: Plan | None, parameters: Sequence[torch.Tensor], proofs: Proofs) -> StepResult:
    with _followed(plan, task) as (limit, levers):
        result = run_backward(task, parameters, limit, levers, proofs)
    result.plan = plan
    return result


@gradients_aside()
def run_backward(
    task: Task,
    parameters: Sequence[torch.Tensor],
    limit: SizeLimit,
    levers: Callable[[], contextlib.AbstractContextManager[None]],
    proofs: Proofs,
) -> StepResult:
    """Adds the gradient to what was there, or leaves everything as it was.

    Args:
        task: the logical batch.
        parameters: whose ``.grad`` is filled.
        limit: the size of micro-batches to begin with; it is changed when memory runs out.
        levers: gives what is on while the gradient is taken.
        proofs: looks whether a split is exact.

    Returns:
        What it gave.
    """
    model, only, splittable, reducer = task.model, task.settings.inputs, task.splittable, task.settings.reducer
    check_hooks(parameters)
    before = Before(model, task.loss_fn, parameters)
    progress = Progress()

    def attempt(parts: list[Part]) -> tuple[Weights, Sums, list[Part]]:
        proofs.look(task, parts, parameters, levers)
        outside = before.take_off()
        with levers():
            weights, sums = run_pass(task, parts, parameters, progress, outside=outside if only is None else None)
        reducer.reduce_(sums, parameters, outside if only is None else None)
        check_model_was_used(model, only, sums)
        before.sum_()
        return weights, sums, parts

    (weights, sums, parts), failed = run_with_retries(
        attempt, splittable, limit, before.restore, progress, reducer, before.snapshot.note_weights
    )
    before.snapshot.look_at_weights()
    before.commit_()
    done = Attempt(max((part.cost for part in parts), default=0), len(parts), splittable.rows, "done")
    skipped = "the count of the whole batch is 0" if weights.is_empty else ""
    result = result_of(weights, sums, parts, (*failed, done), skipped=skipped)
    result.proof, result.layout = proofs.latest, splittable.outline()
    return result


@contextlib.contextmanager
def _followed(
    plan: Plan | None, task: Task
) -> Iterator[tuple[SizeLimit, Callable[[], contextlib.AbstractContextManager[None]]]]:
    """Gives the size of micro-batches to begin with, and what is on while the gradient is taken."""
    if plan is None:
        yield SizeLimit(task.micro_batch_size), contextlib.nullcontext
        return
    kind = task.settings.device.type
    subject = Subject(
        task.model, task.loss_fn, task.settings, task.splittable, batch_norm=task.batch_norm, device_type=kind
    )
    follower = Follower(lambda _: subject, memory=None, plan=plan)
    try:
        follower.prepare(task.splittable, lambda: None)
        yield follower.limit, lambda: follower.applied(task.model)
    finally:
        follower.release()


def intercept(model: Any, loss_fn: Any, batch: Any, **options: Any) -> None:
    """Hands the arguments to the command line if it waits for them, and tells a doctor what is trained."""
    handler = first_call.get()
    if handler is not None:
        handler(Call(model, loss_fn, batch, options))
    announce(model, loss_fn, options.get("optimizer") or ())


def splittable_of(batch: Any, **options: Any) -> Splittable:
    """The logical batch that a batch or a window is."""
    return Splittable(batch.batches if isinstance(batch, Window) else [batch], **options)


def check_model_was_used(model: torch.nn.Module, inputs: Sequence[torch.Tensor] | None, sums: Sums) -> None:
    """Refuses a loss that gave no gradient to any parameter of the model, or to any of the inputs.

    Raises:
        LossError: the loss depends on something else than the model that was passed in.
    """
    if not sums.has_gradient:
        return
    wanted = 0
    for parameter in _trained(model) if inputs is None else inputs:
        if parameter.grad is not None:
            return
        wanted += 1
    if wanted:
        raise LossError(
            f"the loss gave no gradient to any of the {wanted} parameters of {type(model).__name__}; "
            "expected a loss that is computed with the model that is passed to loss_fn, not with another one"
        )


def _trained(*owners: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in modules_of(*owners):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                yield parameter


def parameters_of(model: Any, loss_fn: Any) -> list[torch.Tensor]:
    """Parameters of the model and of a loss that is a module itself, each once.

    Args:
        model: the first argument of the loss function.
        loss_fn: the user's.

    Returns:
        Those that require a gradient.
    """
    return list({id(parameter): parameter for parameter in _trained(*modules_behind(model, loss_fn))}.values())


class Before:
    """What ``.grad``, buffers and random state were before.

    Args:
        model: whose buffers are kept.
        loss_fn: its buffers are kept too if it is a module.
        parameters: whose gradients are kept.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Any, parameters: Sequence[torch.Tensor]) -> None:
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._outside = OutsideLeaves(parameters)
        self.snapshot = Snapshot(modules_behind(model, loss_fn), None, loss_fn)

    def take_off(self) -> OutsideLeaves:
        """Takes the gradients off, so that the new ones are alone; gives what looks for parameters on the way."""
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._outside = OutsideLeaves(parameter for parameter, _ in self._gradients)
        return self._outside

    def restore(self) -> None:
        """Puts everything back."""
        for parameter, gradient in self._all:
            parameter.grad = gradient
        self.snapshot.restore()

    @property
    def _all(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [*self._gradients, *self._outside.found]

    def sum_(self) -> None:
        """Adds the gradients that were there to the new ones; those that were there stay as they are."""
        for parameter, gradient in self._all:
            new = parameter.grad
            if gradient is None or new is None:
                continue
            if new.layout == gradient.layout:
                new.add_(gradient)
            else:  # a dense and a sparse one, of which the dense one has to come first
                parameter.grad = gradient + new if gradient.layout is torch.strided else new + gradient

    def commit_(self) -> None:
        """Puts the sums in the place of the gradients that were there, in the same tensors, as autograd does."""
        for parameter, gradient in self._all:
            if gradient is None:
                continue
            if parameter.grad is not None:
                if parameter.grad.layout != gradient.layout:  # autograd too makes a new tensor here
                    continue
                _copy_(gradient, parameter.grad)
            parameter.grad = gradient


def _copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    try:
        target.copy_(source)
    except torch.OutOfMemoryError:  # a copy takes no memory of its own; half of the gradients must not be new
        target.copy_(source)
