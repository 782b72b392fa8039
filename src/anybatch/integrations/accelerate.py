"""``TrainStep`` on objects that Accelerate has prepared, without Accelerate's own accumulation."""

from collections.abc import Sequence
from typing import Any

import torch

from anybatch.errors import BatchError, warn
from anybatch.loss.losses import LossFunction
from anybatch.step import TrainStep

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
except ImportError as error:
    raise ImportError("anybatch.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.0'") from error

_ALONE_OR_REPLICAS = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
    **options: Any,
) -> TrainStep:
    """Makes a ``TrainStep`` of prepared objects; it replaces ``accumulate``, ``backward`` and ``step``.

    The model keeps Accelerate's mixed precision and its DistributedDataParallel, and the scaler is Accelerate's, so
    that ``save_state`` and ``load_state`` include what is trained. Optimizers and schedulers step once per logical
    batch, whatever the number of processes. A warning says if Accelerate repeats samples to even out the processes.

    Args:
        accelerator: prepared the other arguments.
        model: the prepared model.
        loss_fn: see ``anybatch.backward``.
        optimizer: the prepared optimizer, or a sequence of them.
        scheduler: the prepared scheduler, or a sequence of them.
        options: further arguments of ``TrainStep``.

    Raises:
        BatchError: Accelerate shards the model or hands it to another engine; or ``options`` has ``autocast`` or
            ``scaler``, which are Accelerate's.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> step = train_step(
        ...     accelerator, model, lambda model, batch: model(batch).mean(), optimizer, micro_batch_size=8
        ... )
        >>> step(torch.ones(22, 4)).micro_batches
        3
    """
    kind = accelerator.distributed_type
    if kind.name not in _ALONE_OR_REPLICAS:
        raise BatchError(
            f"Accelerate runs with {kind.name}, which shards the model or takes the gradient itself; expected one "
            "device, or one in each process under DistributedDataParallel"
        )
    if "autocast" in options or "scaler" in options:
        raise BatchError(
            "autocast= and scaler= are Accelerate's here; expected Accelerator(mixed_precision='bf16') or 'fp16'"
        )
    _warn_of_repeated_samples(accelerator)
    return TrainStep(
        model, loss_fn, _plain(optimizer, AcceleratedOptimizer, "optimizer"),
        scheduler=_plain(scheduler, AcceleratedScheduler, "scheduler"), scaler=accelerator.scaler, **options,
    )  # fmt: skip


def _plain(given: Any, wrapper: type, name: str) -> Any:
    if isinstance(given, Sequence):
        return [_plain(one, wrapper, name) for one in given]
    return getattr(given, name) if isinstance(given, wrapper) else given


def _warn_of_repeated_samples(accelerator: Accelerator) -> None:
    if accelerator.num_processes == 1 or not accelerator.even_batches:
        return
    for loader in accelerator._dataloaders:
        rows, size = getattr(loader, "total_dataset_length", 0), getattr(loader, "total_batch_size", 0)
        if size and rows % size and not getattr(loader, "_drop_last", False):
            warn(
                f"Accelerate repeats {-rows % size} samples at the end of each epoch of a loader of {rows}, so that "
                f"all {accelerator.num_processes} processes have as many; they count twice in the last batch. If you "
                "train on this loader, make it with drop_last=True or of a length that divides",
            )
            return
