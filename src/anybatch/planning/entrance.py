"""``anybatch.plan``: a plan for a model, a loss and a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from anybatch.batch.counting import count_samples
from anybatch.errors import BatchError, DoesNotFit, LossError
from anybatch.interception import unobserved
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import InPieces, LossFunction
from anybatch.loss.reducing import Reducer
from anybatch.loss.weights import Count
from anybatch.options import BatchNormPolicy, Options, Verify, refuse_parts
from anybatch.parallel.ranks import reducer_for
from anybatch.planning.devices import Target, budget_of, target_of
from anybatch.planning.planner import OPTIMIZATIONS, Planner
from anybatch.planning.splitproof import half_of, refusal_of, split_of
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan
from anybatch.tensors.dispatch import without_user_modes
from anybatch.tensors.modules import device_of
from anybatch.tensors.precision import AccumulatePolicy

_PRECISIONS = ("bfloat16", "float16")


def plan(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    memory: int | float | str,
    device: torch.device | str | None = None,
    count: Count = count_samples,
    broadcast: Sequence[str] = (),
    layout: Mapping[str, int | None] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    cost: Callable[[Any], float] | None = None,
    autocast: torch.dtype | None = None,
    clip_norm: float | None = None,
    batch_norm: BatchNormPolicy = "refuse",
    inputs: Iterable[torch.Tensor] | None = None,
    accumulate: AccumulatePolicy = "auto",
    blocks: Sequence[str] = (),
    allow: Sequence[str] = OPTIMIZATIONS,
    verify: Verify = "first",
) -> Plan:
    """Finds the fastest configuration of a step that fits in a memory budget, without changing the model.

    The step is traced on fake tensors, which take no memory. Where the user's code can't run on them, a few samples run
    for real. Times are measured if the model is on the device that is planned for. There a split is proved, too, as
    ``anybatch.backward`` does; where the step would refuse it the plan is of the whole batch.

    Args:
        model: on the device, or on ``meta``.
        loss_fn: see ``anybatch.backward``.
        batch: a typical logical batch, or a ``Window``; of several ranks, the share of this rank: each plans for
            itself.
        optimizer: one optimizer or a sequence; ``None`` plans the gradient alone.
        memory: the budget: bytes, ``"8GiB"``, ``"free"`` for the free memory of the device, or a fraction of its memory
            such as 0.5 or ``"50%"``.
        device: the device to plan for, if it is not the model's: a card such as ``"h200"``, or a size such as
            ``"24GiB"``.
        count: see ``anybatch.backward``.
        broadcast: see ``anybatch.backward``.
        layout: see ``anybatch.backward``.
        collate: see ``anybatch.TrainStep``.
        cost: see ``anybatch.TrainStep``.
        autocast: see ``anybatch.TrainStep``.
        clip_norm: see ``anybatch.TrainStep``.
        batch_norm: see ``anybatch.TrainStep``; with ``"refuse"`` a model with BatchNorm in training mode is not split.
        inputs: the only tensors that get a gradient.
        accumulate: see ``anybatch.TrainStep``.
        blocks: names of modules that may be checkpointed or offloaded, besides the children of ``ModuleList`` and
            ``Sequential``.
        allow: the memory optimizations that may be used: ``"recompute"``, ``"offload"`` and ``"loss_chunks"``; also
            ``"bfloat16"`` and ``"float16"``, which change the results.
        verify: see ``anybatch.backward``; ``"off"`` and ``"warn"`` plan splits that a step would refuse.

    Returns:
        The plan, for ``TrainStep(plan=...)``.

    Raises:
        DoesNotFit: no configuration fits; the message has the bytes of the smallest and the modules that hold them.
        BatchError, LossError, CountError: an argument is invalid, the model is sharded or lazy, or a ``Coupled`` loss
            sees the samples of other ranks.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> found = plan(
        ...     model,
        ...     lambda model, batch: model(batch).square().mean(),
        ...     torch.ones(1024, 64),
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     memory="1MiB",
        ... )
        >>> found.micro_batch_size < 1024, found.peak_bytes <= 2**20, found.confidence
        (True, True, 'predicted')
    """
    check_allowed(allow)
    subject, target = subject_of(
        batch, device, model=model, loss_fn=loss_fn, memory=memory, count=count, broadcast=broadcast, layout=layout,
        collate=collate, cost=cost, autocast=autocast, inputs=inputs, batch_norm=batch_norm, accumulate=accumulate,
        optimizer=optimizer, clip_norm=clip_norm, blocks=blocks, verify=verify,
    )  # fmt: skip
    is_proved = verify != "off" and target.is_present and not any(one.is_meta for one in subject.parameters)
    is_proved = is_proved and not isinstance(subject.loss_fn, InPieces)  # whose pieces a step proves as they are then
    return _proved(subject, target, memory, allow, verify) if is_proved else plan_of(subject, target, memory, allow)


def _proved(subject: Subject, target: Target, memory: Any, allow: Sequence[str], verify: Verify) -> Plan:
    """The plan of a subject; of its whole batch where a step would refuse micro-batches."""
    found = does_not_fit = None
    try:
        found = plan_of(subject, target, memory, allow)
        size = split_of(found, subject.loss_fn)
    except DoesNotFit as error:
        does_not_fit, size = error, half_of(subject)
    refusal = refusal_of(subject, size, verify) if size else None
    if refusal is not None:
        subject.is_coupled = True
        try:
            return plan_of(subject, target, memory, allow)
        except DoesNotFit as error:
            error.add_note(f"The batch is not split: {refusal}")
            raise
    if does_not_fit is not None:
        raise does_not_fit
    return cast("Plan", found)


def plan_of(subject: Subject, target: Target, memory: Any, allow: Sequence[str] = OPTIMIZATIONS) -> Plan:
    """The plan of a subject; see ``plan``."""
    reducer = subject.settings.reducer = reducer_for(subject.model, None, subject.settings.device)
    refuse_joined(subject.loss_fn, reducer)
    budget = budget_for(memory, subject, target)
    with unobserved(), without_user_modes(), reducer.apart(subject.roots):  # each process plans for itself
        return Planner(subject, target, allow=allow).plan(budget)


def subject_of(batch: Any, device: torch.device | str | None, **given: Any) -> tuple[Subject, Target]:
    """The subject of a plan and its target device."""
    refuse_parts(given["model"], "plan")
    options = Options(**given)
    target = target_of(device, device_of(options.model))
    splittable, place = options.splittable(batch, is_planned=True), {"device_type": target.device_type}
    return Subject.of(options, options.settings(), splittable, is_present=target.is_present, **place), target


def check_allowed(allow: Any) -> None:
    """Checks that ``allow=`` is a sequence of names that are known."""
    known = (*OPTIMIZATIONS, *_PRECISIONS)
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise BatchError(f"allow={allow!r}; expected a sequence of {known}")
    unknown = [name for name in allow if name not in known]
    if unknown:
        raise BatchError(f"allow has {unknown[0]!r}; expected some of {known}")


def budget_for(memory: Any, subject: Subject, target: Target) -> int:
    """The bytes that a plan may use on a device: the budget, less the bytes for summing gradients over processes.

    With several devices it is the smallest of their budgets. The first device holds the most, so a plan that fits there
    fits on all. Models that are sharded or lazy are refused, and gradients that are sparse.
    """
    refuse_parts(subject.model, "planning within memory=")
    _refuse_lazy(subject.roots)
    subject.refuse_sparse()
    if subject.devices is None:
        return budget_of(memory, target, subject.held_bytes) - subject.bytes_beside
    placements = subject.devices.placements
    found = []
    for placement in placements:
        sharers = sum(1 for other in placements if other.device == placement.device)
        held = subject.held_bytes if placement.copy is None else placement.copy.nbytes
        found.append(budget_of(memory, target_of(None, placement.device), held, sharers=sharers))
    return min(found)


def _refuse_lazy(roots: Sequence[torch.nn.Module]) -> None:
    for root in roots:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if is_lazy(tensor):
                raise LossError(
                    f"{name} of {type(root).__name__} is lazy and has no shape yet, so its size is unknown; "
                    "expected a model that has run. Call it once with a few samples, then build the optimizer, "
                    "and plan"
                )


def refuse_joined(loss_fn: Any, reducer: Reducer) -> None:
    """Refuses a plan for a ``Coupled`` loss over the samples of other processes, whose memory is not known here."""
    if isinstance(loss_fn, Coupled) and loss_fn.joins(reducer):
        raise BatchError(
            "memory= or plan= was given with Coupled over several ranks; the loss sees the samples of all ranks, "
            "whose memory a plan for one rank can't account for. Pass micro_batch_size=, or let each rank's loss "
            "see its own samples: Coupled(..., gather=False)"
        )
