"""``anybatch.plan``: a plan for a model, a loss and a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from anybatch.batch.counting import count_samples
from anybatch.errors import BatchError, LossError
from anybatch.interception import unobserved
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import LossFunction
from anybatch.loss.reducing import Reducer
from anybatch.loss.weights import Count
from anybatch.options import BatchNormPolicy, Options
from anybatch.parallel.ranks import reducer_for
from anybatch.planning.devices import Target, budget_of, target_of
from anybatch.planning.planner import OPTIMIZATIONS, Planner
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan
from anybatch.tensors.dispatch import without_user_modes
from anybatch.tensors.modules import device_of
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.update.overranks import refuse_parts

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
) -> Plan:
    """Finds the fastest configuration of a step within a budget of memory; nothing of the model is changed.

    The step is traced on fake tensors, which take no memory; where the user's code can't run on them, few samples run
    for real. Times are measured where the model lies on the device that is planned for.

    Args:
        model: on the device, or on ``meta``.
        loss_fn: see ``anybatch.backward``.
        batch: one logical batch as it will come, or a ``Window``; where several ranks train together, the share of this
            one: each plans for itself.
        optimizer: one, or a sequence of them; ``None`` to plan the gradient alone.
        memory: the budget: bytes, ``"8GiB"``, ``"free"`` for what is free on the device, or a share of it such as 0.5.
        device: what to plan for if it is not where the model lies: a card such as ``"h200"``, or ``"24GiB"``.
        count: see ``anybatch.backward``.
        broadcast: see ``anybatch.backward``.
        layout: see ``anybatch.backward``.
        collate: see ``anybatch.TrainStep``.
        cost: see ``anybatch.TrainStep``.
        autocast: see ``anybatch.TrainStep``.
        clip_norm: see ``anybatch.TrainStep``.
        batch_norm: a model with BatchNorm in training mode is not split unless this says how.
        inputs: the only tensors that get a gradient.
        accumulate: see ``anybatch.TrainStep``.
        blocks: names of modules that may be recomputed or offloaded, besides the children of lists and sequences.
        allow: which of ``"recompute"``, ``"offload"`` and ``"loss_chunks"`` may be used; also ``"bfloat16"`` and
            ``"float16"``, which change the numbers.

    Returns:
        The plan, for ``TrainStep(plan=...)``.

    Raises:
        DoesNotFit: nothing does; it says how many bytes the smallest configuration needs and which modules hold them.
        BatchError, LossError, CountError: an argument is none that can be meant.

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
    refuse_parts(model, "plan")
    check_allowed(allow)
    subject, target = subject_of(
        batch, device, model=model, loss_fn=loss_fn, memory=memory, count=count, broadcast=broadcast, layout=layout,
        collate=collate, cost=cost, autocast=autocast, inputs=inputs, batch_norm=batch_norm, accumulate=accumulate,
        optimizer=optimizer, clip_norm=clip_norm, blocks=blocks,
    )  # fmt: skip
    reducer = subject.settings.reducer = reducer_for(model, None, subject.settings.device)
    refuse_joined(loss_fn, reducer)
    budget = budget_for(memory, subject, target)
    with unobserved(), without_user_modes(), reducer.apart(subject.roots):  # each process plans for itself
        return Planner(subject, target, allow=allow).plan(budget)


def subject_of(batch: Any, device: torch.device | str | None, **given: Any) -> tuple[Subject, Target]:
    """What is planned, and for which device."""
    options = Options(**given)
    target = target_of(device, device_of(options.model))
    splittable = options.splittable(batch, is_planned=True)
    subject = Subject(
        options.model, options.loss_fn, options.settings(), splittable, options.optimizer, options.batch_norm,
        options.clip_norm, tuple(options.blocks), target.device_type, target.is_present, count=options.count,
    )  # fmt: skip
    return subject, target


def check_allowed(allow: Any) -> None:
    """Refuses memory optimizations that there are not.

    Raises:
        BatchError: names them, and those that there are.
    """
    known = (*OPTIMIZATIONS, *_PRECISIONS)
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise BatchError(f"allow={allow!r}; expected a sequence of {known}")
    unknown = [name for name in allow if name not in known]
    if unknown:
        raise BatchError(f"allow has {unknown[0]!r}; expected some of {known}")


def budget_for(memory: Any, subject: Subject, target: Target) -> int:
    """What a plan may take on a device: all but what is needed beside it to sum gradients over processes.

    Of several devices the one with the least memory decides. The first one holds the most, so that what it may take is
    enough on every other.

    Args:
        memory: as the user gave it.
        subject: what is planned.
        target: where the model lies.

    Raises:
        BatchError: the model lies on several ranks; or see ``budget_of``.
        LossError: a parameter or buffer has no shape yet, or a gradient is sparse.
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
                    f"{name} of {type(root).__name__} is lazy and has no shape yet, so that its bytes are not known; "
                    "expected a model that ran. Call it once with a few samples, then make the optimizer, and plan"
                )


def refuse_joined(loss_fn: Any, reducer: Reducer) -> None:
    """Refuses a plan for a loss that sees the samples of other processes, whose memory a plan does not know.

    Raises:
        BatchError: it does.
    """
    if isinstance(loss_fn, Coupled) and loss_fn.joins(reducer):
        raise BatchError(
            "memory= or plan= was given with Coupled over several ranks; the loss sees the samples of all ranks, whose "
            "memory a plan of one rank does not know. Pass micro_batch_size=, or let each rank's loss see its own "
            "samples: Coupled(..., gather=False)"
        )
