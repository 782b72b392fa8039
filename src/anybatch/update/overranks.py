"""What the samples of several ranks together ask for, and what is said when modules couple them."""

import numbers
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.moving import to_device
from anybatch.errors import BatchError, NotSplittable
from anybatch.loss.reducing import Joint, Reducer
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import devices_among, modules_of
from anybatch.tensors.shards import is_sharded
from anybatch.update.batchnorm import BatchNormPolicy, coupling_modules
from anybatch.update.refusals import named
from anybatch.update.transaction import Snapshot

if TYPE_CHECKING:
    from anybatch.update.passes import Task

_HOW = ("foreach", "fused", "capturable", "differentiable")  # of which the numbers are the same, or nearly


def settings_of(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], clip_norm: float | None
) -> dict[str, str]:
    """What an update is made with, by name; ranks that have it otherwise do not stay equal.

    Args:
        optimizers: all of them; options that lie on a device are left out, so that nothing waits for it.
    """
    found = {"clip_norm": _shown(clip_norm), "scheduler": _shown([type(one).__name__ for one in schedulers])}
    for number, optimizer in enumerate(optimizers):
        owner = "" if len(optimizers) == 1 else f"optimizer[{number}]."
        found[f"{owner}type"] = type(optimizer).__name__
        for at, group in enumerate(optimizer.param_groups):
            options = [key for key in optimizer.defaults if key in group and key not in _HOW]
            found.update((f"{owner}param_groups[{at}][{key!r}]", _shown(group[key])) for key in options)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.device.type == "cpu" and value.numel() == 1 else "a tensor"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return repr(float(value))
    return repr(value) if isinstance(value, (str, bool, type(None))) else type(value).__name__


def whole_batch(splittable: Splittable, joint: Joint | None, device: torch.device) -> Any:
    """The batch that a loss over all samples looks at."""
    return to_device(splittable.whole() if joint is None else splittable.joined(joint.batches), device)


def refuse_over_ranks(models: Sequence[torch.nn.Module], policy: BatchNormPolicy, *, is_training: bool) -> None:
    """Refuses BatchNorm that would see the samples of one rank only, or wait for ranks that run other micro-batches."""
    coupling = coupling_modules(*models)
    together = {name: m for name, m in coupling.items() if isinstance(m, torch.nn.SyncBatchNorm)}
    if policy == "frozen" and is_training:
        return
    if together:
        raise NotSplittable(
            f"{named(together)} would wait in each forward for all ranks, which may run other numbers of micro-batches "
            'and start again one by one; use GroupNorm or LayerNorm, batch_norm="frozen", or BatchNorm with '
            'batch_norm="ghost"',
            modules=list(together),
        )
    if coupling and policy == "refuse":
        raise NotSplittable(
            f"{named(coupling)} would normalise by the samples of each rank alone, so the gradient is not that of the "
            'batch of all ranks; use GroupNorm or LayerNorm, batch_norm="frozen", or batch_norm="ghost", which '
            "normalises each micro-batch of each rank by itself, as DistributedDataParallel does with the share of a "
            "rank",
            modules=list(coupling),
        )


def parameters_in_parts(
    reducer: Reducer,
    parameters: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] | None,
    outside: OutsideLeaves | None,
) -> Sequence[torch.Tensor]:
    """The tensors that a pass gives gradients to, where parameters lie on several ranks."""
    if inputs is not None:
        raise BatchError(
            "inputs= was given, and the model is sharded by fully_shard, whose forward has other tensors than the "
            "optimizer; freeze what is not trained instead: parameter.requires_grad_(False)"
        )
    if outside is not None:
        outside.know(reducer.known_leaves(parameters))
    return parameters if reducer.keeps_step else reducer.known_leaves(parameters)


def padding(task: "Task", parts: Sequence[Part]) -> Iterator[Any]:
    """Micro-batches that count nothing, with which this process runs as many as any other.

    Random state and buffers are as before afterwards.
    """
    # All processes get them now, since one may have to send another what it lacks.
    return _unseen(task, task.settings.reducer.stand_ins(lambda: _smallest(task.splittable, parts)))


def _unseen(task: "Task", batches: Sequence[Any]) -> Iterator[Any]:
    if batches:
        before = Snapshot(task.modules, devices_among(modules_of(*task.modules)))
        for batch in batches:
            yield to_device(batch, task.settings.device)
        before.restore(warns=False)


def _smallest(splittable: Splittable, parts: Sequence[Part]) -> Any:
    """A micro-batch that is run in any case; ``None`` where there is none."""
    if not parts:
        return None
    number = min(range(len(parts)), key=lambda number: len(parts[number].samples))
    if splittable.is_collated:
        return next(splittable.materialise([parts[number]]))
    return next(islice(splittable.materialise(parts), number, None))


def refuse_parts(model: torch.nn.Module, verb: str) -> None:
    """Refuses a model of which this rank has a part only."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise BatchError(
            f"the model is sharded by fully_shard, and {verb} works on whole models; call it before fully_shard, or on "
            "one process with a model of its own"
        )
