"""What happens to BatchNorm when a batch is split."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from anybatch.errors import NotSplittable
from anybatch.tensors.graph import in_backward
from anybatch.tensors.modules import modules_of

BatchNormPolicy = Literal["refuse", "ghost", "frozen"]

_KINDS = (_BatchNorm, _InstanceNorm)


def coupling_modules(*models: Any) -> dict[str, torch.nn.Module]:
    """The modules in training mode whose result or buffers depend on which samples are together in a batch.

    Args:
        *models: the model, and others such as a loss; anything that is no module has none.

    Returns:
        The modules by qualified name: BatchNorm of every kind. InstanceNorm does not couple samples; what its running
        statistics see is merged exactly.

    Example:
        >>> list(coupling_modules(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))))
        ['1']
    """
    if not any(module.training and _couples(module) for module in modules_of(*models)):
        return {}
    return {
        name or type(module).__name__: module
        for model in models
        if isinstance(model, torch.nn.Module)
        for name, module in model.named_modules()
        if module.training and _couples(module)
    }


def _couples(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and to_eval_mode not in module._forward_pre_hooks.values()


def to_eval_mode(module: torch.nn.Module, _: object) -> None:
    """A forward pre-hook that keeps a frozen module in evaluation mode when ``model.train()`` is called."""
    module.training = False


def refuse_to_split(models: Sequence[Any], micro_batches: int) -> None:
    """Raises if a batch of several micro-batches would go through BatchNorm in training mode.

    Args:
        models: the model, and the loss if it is a module.
        micro_batches: how many there are.

    Raises:
        NotSplittable: names the modules and the choices.
    """
    if micro_batches < 2:
        return
    modules = coupling_modules(*models)
    if not modules:
        return
    names = list(modules)
    shown = ", ".join(f"{name} ({type(modules[name]).__name__})" for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    raise NotSplittable(
        f"{shown}{more} in training mode computes its statistics over all samples of a batch, so {micro_batches} "
        "micro-batches would give another gradient than the whole batch, and other running statistics. Choose one:\n"
        "  - run the whole batch at once: leave micro_batch_size out (exact, needs the memory);\n"
        '  - batch_norm="ghost": normalise each micro-batch by its own statistics (another training method, known as '
        "ghost batch normalisation; running statistics are merged exactly, once a batch);\n"
        '  - batch_norm="frozen": normalise by the running statistics and leave them alone (exact for fine-tuning);\n'
        "  - use GroupNorm or LayerNorm, which do not couple samples.",
        modules=names,
    )


@contextmanager
def batch_norm_as(policy: BatchNormPolicy, models: Sequence[Any], micro_batches: int) -> Iterator[Callable[[], None]]:
    """Runs a logical batch under a policy for BatchNorm; what it changes in the modules is put back.

    Args:
        policy: ``"refuse"``, ``"ghost"`` or ``"frozen"``.
        models: the model, and the loss if it is a module.
        micro_batches: into how many the batch is split.

    Returns:
        A context whose value is to be called at the beginning of each micro-batch.

    Raises:
        NotSplittable: the policy is to refuse and there is something to refuse.
    """
    kinds = set(map(type, modules_of(*models)))  # far fewer than modules
    if all(issubclass(kind, torch.nn.Module) and not issubclass(kind, _KINDS) for kind in kinds):
        yield _nothing
        return
    if policy == "refuse":
        refuse_to_split(models, micro_batches)
    with contextlib.ExitStack() as stack:
        if policy == "frozen":
            stack.enter_context(_in_eval_mode([*coupling_modules(*models).values(), *_with_running_statistics(models)]))
        begin_micro_batch: Callable[[], None] = _nothing
        updated = _with_running_statistics(models)
        if updated and micro_batches > 1:
            begin_micro_batch = stack.enter_context(_merged_statistics(updated))
        elif updated:
            stack.enter_context(_updated_in_the_forward_only(updated))
        yield begin_micro_batch


def _nothing() -> None:
    pass


def _with_running_statistics(models: Sequence[Any]) -> list[Any]:
    """The modules whose running statistics would be updated once a micro-batch."""
    return [
        m
        for m in modules_of(*models)
        if isinstance(m, _KINDS) and m.training and (_couples(m) or isinstance(m, _InstanceNorm))
        and m.track_running_stats and m.running_mean is not None and m.running_var is not None
    ]  # fmt: skip


@contextmanager
def _in_eval_mode(modules: list[Any]) -> Iterator[None]:
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


@dataclass
class _Watched:
    """A BatchNorm whose running statistics are merged once a logical batch."""

    module: Any
    momentum: float | None
    mean: torch.Tensor
    variance: torch.Tensor
    seen: torch.Tensor | None
    calls_in_micro_batch: int = 0
    calls: list[list[tuple[float, torch.Tensor, torch.Tensor]]] = field(default_factory=list)

    @property
    def is_instance_norm(self) -> bool:
        """Whether the statistics are of single samples."""
        return isinstance(self.module, _InstanceNorm)

    @property
    def factor(self) -> float:
        """How much the statistics of this batch count against those before."""
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.is_instance_norm else 1.0 / float(self.module.num_batches_tracked)


@contextmanager
def _updated_in_the_forward_only(modules: list[Any]) -> Iterator[None]:
    """Puts running statistics back after a checkpoint has recomputed its forward, which would update them twice."""
    # The tensors and not their names: under activation checkpointing another tensor may stand in for a buffer.
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def put_back(module: Any, *_: object) -> None:
        with torch.no_grad():
            for buffer, value in kept.pop(id(module), ()):
                buffer.copy_(value)

    def keep(module: Any, _: object) -> None:
        put_back(module)  # what a recomputation left that stopped early, within the module
        if in_backward():
            kept[id(module)] = [(buffer, buffer.clone()) for buffer in module.buffers(recurse=False)]

    handles = [module.register_forward_pre_hook(keep) for module in modules]
    handles += [module.register_forward_hook(put_back) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            put_back(module)


@contextmanager
def _merged_statistics(modules: list[Any]) -> Iterator[Callable[[], None]]:
    """Replaces N updates of the running statistics, one a micro-batch, by one with the merged statistics.

    With momentum 1 a forward leaves a micro-batch's own mean and unbiased variance in the buffers, from where a hook
    takes them. They are merged as (n, mean, M2): Chan, Golub, LeVeque 1983, "Algorithms for computing the sample
    variance".
    """
    watched = [
        _Watched(m, m.momentum, m.running_mean.clone(), m.running_var.clone(), _cloned(m.num_batches_tracked))
        for m in modules
    ]
    handles = []
    for entry in watched:
        entry.module.momentum = 1.0
        handles.append(entry.module.register_forward_hook(lambda m, args, _, entry=entry: _take(entry, args[0])))
    done = False
    try:
        yield lambda: _begin_micro_batch(watched)
        done = True
    finally:
        for handle in handles:
            handle.remove()
        for entry in watched:  # before anything that can run out of memory
            entry.module.momentum = entry.momentum
        for entry in watched:
            _put_back(entry)
            if done:
                _merge(entry)


def _cloned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _begin_micro_batch(watched: list[_Watched]) -> None:
    for entry in watched:
        entry.calls_in_micro_batch = 0


def _take(entry: _Watched, batch: torch.Tensor) -> None:
    if in_backward():  # a checkpoint recomputes; these statistics were taken in the forward
        return
    if entry.calls_in_micro_batch == len(entry.calls):
        entry.calls.append([])
    items = _samples_of(entry.module, batch) if entry.is_instance_norm else batch.numel() / batch.size(1)
    entry.calls[entry.calls_in_micro_batch].append(
        (
            items,
            entry.module.running_mean.to(torch.float64, copy=True),
            entry.module.running_var.to(torch.float64, copy=True),
        )
    )
    entry.calls_in_micro_batch += 1


def _samples_of(module: Any, batch: torch.Tensor) -> float:
    """The samples of an InstanceNorm's input, which may also be one sample without a batch dimension."""
    is_batched = batch.dim() > 1 and batch.size(1) == module.num_features and batch.dim() != module._get_no_batch_dim()
    return float(batch.size(0)) if is_batched else 1.0


def _put_back(entry: _Watched) -> None:
    with torch.no_grad():
        entry.module.running_mean.copy_(entry.mean)
        entry.module.running_var.copy_(entry.variance)
        if entry.seen is not None:
            entry.module.num_batches_tracked.copy_(entry.seen)


def _merge(entry: _Watched) -> None:
    module = entry.module
    with torch.no_grad():
        for parts in entry.calls:
            items = sum(n for n, _, _ in parts)
            mean = sum((n * m for n, m, _ in parts), torch.zeros_like(parts[0][1])) / items
            if entry.is_instance_norm:  # its statistics are means over the samples
                variance = sum((n * v for n, _, v in parts), torch.zeros_like(parts[0][2])) / items
            else:
                squares = (v * (n - 1) + n * (m - mean).square() for n, m, v in parts)
                variance = sum(squares, torch.zeros_like(parts[0][1])) / (items - 1)
                if module.num_batches_tracked is not None:
                    module.num_batches_tracked.add_(1)
            module.running_mean.lerp_(mean.to(module.running_mean), entry.factor)
            module.running_var.lerp_(variance.to(module.running_var), entry.factor)
