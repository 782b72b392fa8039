"""What happens to BatchNorm when a batch is split."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from anybatch import options
from anybatch.errors import NotSplittable
from anybatch.tensors.graph import is_recomputing
from anybatch.tensors.modules import SCRIPTED, is_scripted, modules_of
from anybatch.update.refusals import (
    WhySplit,
    named,
    no_statistics,
    not_splittable,
    one_value,
    put_in_training_mode,
    without_statistics,
)

BatchNormPolicy = options.BatchNormPolicy

_KINDS = (_BatchNorm, _InstanceNorm)
_COUPLING = (*_KINDS, *SCRIPTED)
_TRAINING = 5  # which input of the compiled operation is its mode
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def coupling_modules(*models: Any) -> dict[str, torch.nn.Module]:
    """The modules whose result or buffers depend, as they are now, on which samples are together in a batch.

    Returns:
        The modules by qualified name: BatchNorm of every kind in training mode, compiled by ``torch.jit`` or not, and
        in evaluation mode where it has no running statistics. InstanceNorm does not couple samples; what its running
        statistics see is merged exactly.
    """
    if not any(_couples(module) for module in modules_of(*models)):
        return {}
    found: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()
    for model in models:
        for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            if _couples(module) and id(module) not in seen:
                seen.add(id(module))
                called = name or type(module).__name__
                # The model and a loss may have modules of the same name.
                found[called if called not in found else f"{type(model).__name__}.{called}"] = module
    return found


def _couples(module: torch.nn.Module) -> bool:
    if not isinstance(module, _BatchNorm):
        return _couples_compiled(module)
    if module.running_mean is None and module.running_var is None:
        return True
    return module.training and to_eval_mode not in module._forward_pre_hooks.values()


def to_eval_mode(module: torch.nn.Module, _: object) -> None:
    """A forward pre-hook that keeps a frozen module in evaluation mode when ``model.train()`` is called."""
    module.training = False


def may_couple(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether there is anything among some modules that this page is about; a quick look at their types."""
    kinds = {*map(type, modules)}  # far fewer than modules
    return any(map(issubclass, kinds, repeat(_COUPLING))) or not all(map(issubclass, kinds, repeat(torch.nn.Module)))


def refuse_to_split(models: Sequence[Any], micro_batches: int, cause: Callable[[], WhySplit] = WhySplit) -> None:
    """Raises if a batch of several micro-batches would go through BatchNorm in training mode."""
    if micro_batches < 2:
        return
    modules = coupling_modules(*models)
    _refuse_compiled(modules, micro_batches)
    if modules:
        raise not_splittable(modules, micro_batches, cause())


def refuse_over_ranks(models: Sequence[torch.nn.Module], policy: BatchNormPolicy, *, is_training: bool) -> None:
    """Refuses BatchNorm that would see the samples of one rank only, or wait for ranks that run other micro-batches."""
    coupling = coupling_modules(*models)
    together = {name: m for name, m in coupling.items() if isinstance(m, torch.nn.SyncBatchNorm)}
    if policy == "frozen" and is_training:
        return
    if together:
        raise NotSplittable(
            f"{named(together)} would wait in each forward pass for all ranks, which may run different numbers of "
            'micro-batches and retry independently; use GroupNorm or LayerNorm, batch_norm="frozen", or BatchNorm '
            'with batch_norm="ghost"',
            modules=list(together),
        )
    if coupling and policy == "refuse":
        raise NotSplittable(
            f"{named(coupling)} would normalise by the samples of each rank alone, so the gradient is not that of "
            'the global batch; use GroupNorm or LayerNorm, batch_norm="frozen", or batch_norm="ghost", which '
            "normalises each micro-batch of each rank separately, as DistributedDataParallel does with each "
            "rank's batch",
            modules=list(coupling),
        )


@contextmanager
def batch_norm_as(
    policy: BatchNormPolicy, models: Sequence[Any], micro_batches: int, cause: Callable[[], WhySplit] = WhySplit
) -> Iterator[Callable[[], None]]:
    """Runs a logical batch under a policy for BatchNorm; what it changes in the modules is put back.

    Gives what is to be called at the beginning of each micro-batch.
    """
    is_frozen = policy == "frozen" and cause().verb is not None
    _refuse_compiled(coupling_modules(*models), micro_batches, is_frozen=is_frozen)
    if policy == "refuse":
        refuse_to_split(models, micro_batches, cause)
    with contextlib.ExitStack() as stack:
        if policy == "frozen":
            coupling = coupling_modules(*models)
            if micro_batches > 1 and (bare := without_statistics(coupling)):
                raise no_statistics(bare)
            for module in modules_of(*models):
                if isinstance(module, _KINDS):
                    if module.training:
                        stack.callback(setattr, module, "training", True)
                        module.training = False
                    # The loss function may call model.train() itself.
                    stack.callback(module.register_forward_pre_hook(to_eval_mode).remove)
        if micro_batches > 1:
            _watch_split(stack, policy, models, cause)
        found = [_Statistics(stack, m, merges=micro_batches > 1) for m in _with_running_statistics(models)]

        def begin_micro_batch() -> None:
            for one in found:
                one.begin_micro_batch()

        yield begin_micro_batch if found else lambda: None


def _watch_split(
    stack: contextlib.ExitStack, policy: BatchNormPolicy, models: Sequence[Any], cause: Callable[[], WhySplit]
) -> None:
    """Refuses what shows only while the loss function runs."""
    if policy == "ghost":
        _watch_inputs(stack, coupling_modules(*models), partial(_refuse_single_values, cause=cause))
    if policy != "frozen":
        found = {name: m for model in models for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
        quiet = {name: m for name, m in found.items() if not m.training and not _couples(m)}
        _watch_inputs(stack, quiet, _refuse_training_mode)


def _with_running_statistics(models: Sequence[Any]) -> list[Any]:
    return [
        m
        for m in modules_of(*models)
        if isinstance(m, _KINDS) and m.training and (_couples(m) or isinstance(m, _InstanceNorm))
        and m.track_running_stats and m.running_mean is not None and m.running_var is not None
    ]  # fmt: skip


def _watch_inputs(
    stack: contextlib.ExitStack, modules: dict[str, Any], watch: Callable[[str, Any, tuple[Any, ...]], None]
) -> None:
    for name, module in modules.items():
        stack.callback(module.register_forward_pre_hook(lambda m, args, name=name: watch(name, m, args)).remove)


def _refuse_training_mode(name: str, module: Any, _: tuple[Any, ...]) -> None:
    """Refuses what could not be known before the loss function ran."""
    if _couples(module):
        raise put_in_training_mode(name, module)


def _refuse_single_values(name: str, module: Any, args: tuple[Any, ...], *, cause: Callable[[], WhySplit]) -> None:
    """Refuses inputs with one value a channel, of which torch says less."""
    if module.training and args and args[0].dim() > 1 and args[0].numel() == args[0].size(1):
        raise one_value(name, module, args[0].shape, cause())


class _Merged:
    """The statistics of the micro-batches so far, in float64: memory does not grow with their number.

    Attributes:
        items: that they are of.
        mean: of all items.
        spread: squares of the differences from the mean, summed; of InstanceNorm the variances times the samples.
    """

    def __init__(self) -> None:
        self.items = 0.0
        self.mean = self.spread = torch.zeros((), dtype=torch.float64, device="cpu")

    def add(self, items: float, mean: torch.Tensor, spread: torch.Tensor, *, between: bool) -> None:
        """Takes a micro-batch in (Chan, Golub, LeVeque 1983)."""
        if not self.items:
            self.items, self.mean, self.spread = items, mean, spread
            return
        total = self.items + items
        mean.sub_(self.mean)
        self.spread.add_(spread)
        if between:
            self.spread.addcmul_(mean, mean, value=self.items * items / total)
        self.mean.add_(mean, alpha=items / total)
        self.items = total


class _Statistics:
    """The running statistics of a module, which are updated once a logical batch.

    What a forward in training mode writes is kept apart from them: copies stand in for them meanwhile. These are not
    copied back, since the graph may have saved them: a backward would take that for a change in place. And a forward in
    evaluation mode in between, as for pseudo-labels, sees those from before the logical batch.

    Args:
        merges: whether N updates, one a micro-batch, are replaced by one with the merged statistics. With momentum 1 a
            forward leaves a micro-batch's own mean and unbiased variance in the buffers. They are merged as
            (n, mean, M2): Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance". Else only what a
            checkpoint recomputes is kept apart, which would update them twice.
    """

    def __init__(self, stack: contextlib.ExitStack, module: Any, *, merges: bool) -> None:
        self._module, self._merges, self._momentum = module, merges, module.momentum
        self._is_instance_norm = isinstance(module, _InstanceNorm)  # whose statistics are means over samples
        self._swapped: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._number, self._calls = 0, list[_Merged]()  # of the call in this micro-batch
        stack.push(self._end_of_batch)
        if merges:
            module.momentum = 1.0
        stack.callback(module.register_forward_pre_hook(self._begin_forward).remove)
        stack.callback(module.register_forward_hook(self._end_forward).remove)

    def begin_micro_batch(self) -> None:
        """Puts back what a forward left that stopped early, and counts the calls anew."""
        self._put_back()
        self._number = 0

    def _begin_forward(self, *_: Any) -> None:
        self._put_back()  # what a recomputation left that stopped early, within the module
        if not self._module.training or not (self._merges or is_recomputing()):
            return
        buffers = self._module._buffers
        for name in _STATISTICS:
            own = buffers.get(name)
            if own is not None:
                other = own.detach().clone()
                self._swapped.append((name, own, other))
                buffers[name] = other

    def _end_forward(self, _: Any, args: tuple[torch.Tensor, ...], __: Any) -> None:
        if self._merges and self._module.training and not is_recomputing():  # else they were taken the first time
            self._note(args[0])
        self._put_back()

    def _put_back(self) -> None:
        """Puts the module's own statistics back, where nobody else has put something in their place."""
        buffers = self._module._buffers
        for name, own, other in self._swapped:
            if buffers[name] is other:
                buffers[name] = own
        self._swapped.clear()

    def _note(self, batch: torch.Tensor) -> None:
        if self._number == len(self._calls):
            self._calls.append(_Merged())
        module, is_instance_norm = self._module, self._is_instance_norm
        items = _samples_of(module, batch) if is_instance_norm else batch.numel() / batch.size(1)
        mean = module.running_mean.to(torch.float64, copy=True)
        spread = module.running_var.to(torch.float64, copy=True).mul_(items if is_instance_norm else items - 1)
        self._calls[self._number].add(items, mean, spread, between=not is_instance_norm)
        self._number += 1

    def _end_of_batch(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._merges:
            self._module.momentum = self._momentum
        self._put_back()
        with torch.no_grad():
            for merged in self._calls if kind is None else ():
                self._merge(merged)

    def _merge(self, merged: _Merged) -> None:
        module, factor = self._module, self._momentum
        if not self._is_instance_norm and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        if factor is None:  # a mean over all batches
            factor = 0.0 if self._is_instance_norm else 1.0 / float(module.num_batches_tracked)
        variance = merged.spread / (merged.items if self._is_instance_norm else merged.items - 1)
        module.running_mean.lerp_(merged.mean.to(module.running_mean), factor)
        module.running_var.lerp_(variance.to(module.running_var), factor)


def _samples_of(module: Any, batch: torch.Tensor) -> float:
    """The samples of an InstanceNorm's input, which may also be one sample without a batch dimension."""
    is_batched = batch.dim() > 1 and batch.size(1) == module.num_features and batch.dim() != module._get_no_batch_dim()
    return float(batch.size(0)) if is_batched else 1.0


def _couples_compiled(module: Any) -> bool:
    """Whether a compiled module is BatchNorm that normalises by the samples that run together.

    A trace keeps the mode in which it was made, whatever ``eval()`` says later.
    """
    name = getattr(module, "original_name", "") if is_scripted(module) else ""
    if "BatchNorm" not in name or name.startswith("Frozen"):
        return False
    traced = _mode_in_trace(module)
    if traced is not None:
        return traced
    return bool(getattr(module, "training", False)) or getattr(module, "running_mean", None) is None


def _mode_in_trace(module: Any) -> bool | None:
    try:
        nodes = list(module.graph.findAllNodes("aten::batch_norm"))
        modes = [list(node.inputs())[_TRAINING].toIValue() for node in nodes]
    except (AttributeError, RuntimeError, IndexError):
        return None
    known = [bool(mode) for mode in modes if mode is not None]
    return any(known) if known else None


def _refuse_compiled(modules: Mapping[str, Any], micro_batches: int, *, is_frozen: bool = False) -> None:
    """Refuses to split a batch that goes through such modules, or to freeze them."""
    names = [name for name, module in modules.items() if is_scripted(module)]
    if names and (micro_batches > 1 or is_frozen):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise NotSplittable(
            f"{listed} is BatchNorm in training mode that torch.jit compiled: it normalises by the samples that "
            f"run together, here in {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, and takes no "
            'hooks, which batch_norm="ghost" and "frozen" need. Run the whole batch at once with '
            'batch_norm="refuse" (leave micro_batch_size out); pass the model before torch.jit, with batch_norm=; '
            "or compile it in evaluation mode (model.eval()), in which it does not couple samples",
            modules=names,
        )
