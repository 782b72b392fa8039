"""The arguments that ``TrainStep``, ``backward``, ``check``, ``plan`` and integrations share, checked in one place."""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from anybatch.batch.batches import Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.layout import placement
from anybatch.batch.windowing import Window
from anybatch.errors import BatchError, warn
from anybatch.loss.accumulate import DropoutPolicy, Settings
from anybatch.loss.losses import LossFunction, as_coupled, as_over_time, check_loss_fn
from anybatch.loss.reducing import Reducer
from anybatch.loss.weights import Count, check_count
from anybatch.tensors.modules import device_of
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.tensors.shards import is_sharded

if TYPE_CHECKING:
    from anybatch.records.plans import Plan

BatchNormPolicy = Literal["refuse", "ghost", "frozen"]
Verify = Literal["first", "warn", "off"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "batch_norm": ("refuse", "ghost", "frozen"),
    "accumulate": ("auto", "fp32", "native"),
    "dropout": ("native", "per-sample"),
    "verify": ("first", "warn", "off"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The checked arguments of a call; ``anybatch.TrainStep`` documents each.

    After construction ``broadcast`` includes ``layout``, ``inputs`` is a tuple, ``optimizer`` and ``scheduler`` are
    lists, and ``autocast`` is that of the plan if none was given.
    """

    model: torch.nn.Module
    loss_fn: LossFunction
    micro_batch_size: float | None = None
    memory: int | float | str | None = None
    plan: "Plan | None" = None
    count: Count = count_samples
    broadcast: Sequence[str] = ()
    layout: Mapping[str, int | None] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    cost: Callable[[Any], float] | None = None
    autocast: torch.dtype | None = None
    scaler: Any = None
    inputs: Any = None
    batch_norm: BatchNormPolicy = "refuse"
    accumulate: AccumulatePolicy = "auto"
    dropout: DropoutPolicy = "native"
    group: Any = None
    verify: Verify = "first"
    optimizer: Any = None
    clip_norm: float | None = None
    scheduler: Any = None
    recorder: Any = None
    blocks: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_pass(self)
        self._set("broadcast", _checked_placement(self))
        if self.memory is not None or self.plan is not None:  # here and below: most calls skip these checks
            check_plan(self.memory, self.plan, self.micro_batch_size)
            planned = "" if self.plan is None else self.plan.chosen.autocast
            self._set("autocast", self.autocast or (getattr(torch, planned) if planned else None))
        if self.inputs is not None:
            self._set("inputs", inputs_of(self.inputs))
        if self.scaler is not None:
            _check_scaler(self.scaler)
        self._set("optimizer", [] if self.optimizer is None else optimizers_of(self.optimizer))
        self._set("scheduler", [] if self.scheduler is None else schedulers_of(self.scheduler, self.optimizer))
        if self.optimizer or self.clip_norm is not None or self.recorder is not None:
            _check_update(self)
        if self.blocks != ():
            self._set("blocks", _checked_blocks(self.model, self.blocks))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def settings(self, *, makes_scaler: bool = False) -> Settings:
        """The settings of a backward, on the device that the model is on now."""
        device, scaler = device_of(self.model), self.scaler
        if makes_scaler and scaler is None and self.autocast is torch.float16:
            scaler = torch.amp.GradScaler(device.type)
        return Settings(device, self.autocast, scaler, self.inputs, self.accumulate, dropout=self.dropout)

    def splittable(self, batch: Any, *, may_be_empty: bool = False, is_planned: bool = False) -> Splittable:
        """The logical batch of a batch or a window, ready to be split."""
        found = Splittable(
            batch.batches if isinstance(batch, Window) else [batch],
            broadcast=self.broadcast, collate=self.collate, cost=self.cost, may_be_empty=may_be_empty,
        )  # fmt: skip
        if found.obstacle is not None or getattr(found.broadcast, "dims", None):
            _check_uncut(self, found, is_planned)
        return found

    def told(self) -> dict[str, Any]:
        """The arguments by name, for a command that runs another function with them."""
        hidden = ("model", "loss_fn", "layout", "optimizer")
        found = {name: value for name, value in self.__dict__.items() if name not in hidden}
        return found | {"optimizer": self.optimizer or None}


def check_plan(memory: Any, plan: Any, micro_batch_size: Any) -> None:
    """Checks ``memory=``, ``plan=`` and ``micro_batch_size=`` against each other."""
    if plan is not None:
        from anybatch.records.plans import Plan

        if not isinstance(plan, Plan):
            raise BatchError(f"plan is a {type(plan).__name__}; expected a Plan, from anybatch.plan or Plan.load")
    if micro_batch_size is not None and (memory is not None or plan is not None):
        raise BatchError(
            "micro_batch_size was given together with memory= or plan=, which choose it; leave one of them out"
        )
    if memory is not None:
        from anybatch.units import read_budget  # imported only where there is a budget

        read_budget(memory)


def _check_pass(options: Options) -> None:
    if not isinstance(options.model, torch.nn.Module):
        raise BatchError(f"model is a {type(options.model).__name__}; expected a torch.nn.Module")
    check_loss_fn(options.loss_fn)
    check_count(options.count)
    _check_size(options.micro_batch_size, with_cost=options.cost is not None)
    for name, choices in _CHOICES.items():
        if getattr(options, name) not in choices:
            raise BatchError(f"{name}={getattr(options, name)!r}; expected one of {choices}")
    if options.autocast not in (None, torch.bfloat16, torch.float16):
        raise BatchError(f"autocast={options.autocast!r}; expected torch.bfloat16, torch.float16 or None")


def _checked_placement(options: Options) -> tuple[str, ...]:
    for name in ("collate", "cost"):
        function = getattr(options, name)
        if function is not None and not callable(function):
            raise BatchError(f"{name} is a {type(function).__name__}; expected a function, or None")
    if options.layout is not None and options.collate is not None:
        raise BatchError(
            "layout= and collate= were given; expected one of them: raw samples are split before collate joins them"
        )
    return placement(options.broadcast, options.layout)


def _check_size(micro_batch_size: Any, *, with_cost: bool) -> None:
    """Refuses a micro-batch size that is not a positive integer, or with ``cost`` not a number of at least 1."""
    if micro_batch_size is None:
        return
    kinds: tuple[type, ...] = (numbers.Real,) if with_cost else (numbers.Integral,)
    is_number = isinstance(micro_batch_size, kinds) and not isinstance(micro_batch_size, bool)
    if not is_number or not math.isfinite(micro_batch_size) or micro_batch_size < 1:
        what = "a finite number of at least 1, the cost of a micro-batch" if with_cost else "an integer of at least 1"
        raise BatchError(f"micro_batch_size={micro_batch_size!r}; expected {what}, or None for the whole batch")


def _check_uncut(options: Options, splittable: Splittable, is_planned: bool) -> None:
    """Refuses a batch that can't be split although it has to be, and a layout that ``OverTime`` can't use."""
    if any(getattr(splittable.broadcast, "dims", {}).values()) and as_over_time(options.loss_fn):
        raise BatchError(
            "layout= puts samples along a dimension other than 0, where OverTime expects them; transpose [time, "
            "rows] to [rows, time] in the loader"
        )
    obstacle = splittable.obstacle
    if obstacle is None:
        return
    size = None if is_planned else options.micro_batch_size
    most = [layout.at_most or math.inf for layout in splittable.layouts if layout.obstacle is not None]
    if size is not None and max(most) > size:
        option = f"micro_batch_size={size:g}"
    elif options.dropout != "native":
        option = 'dropout="per-sample"'
    elif as_coupled(options.loss_fn) and (is_planned or len(splittable.batches) > 1):
        option = "a plan for Coupled" if is_planned else "a window for Coupled, which joins samples,"
    else:
        return
    raise BatchError(f"{obstacle}. Without {option} the batch runs whole, as one micro-batch", path=obstacle.path)


def _checked_blocks(model: torch.nn.Module, blocks: Any) -> tuple[str, ...]:
    if isinstance(blocks, str):
        raise BatchError(f"blocks is the text {blocks!r}; expected a sequence of names: blocks=[{blocks!r}]")
    if not isinstance(blocks, Iterable):
        raise BatchError(f"blocks is a {type(blocks).__name__}; expected a sequence of names of modules")
    found = tuple(blocks)
    if found:
        known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        for name in found:
            if name not in known:
                near = ", ".join(known[:5])
                raise BatchError(f"blocks names {name!r}, which the model does not have; expected names such as {near}")
    return found


def _check_scaler(scaler: Any) -> None:
    missing = [name for name in ("scale", "unscale_", "step", "update", "state_dict") if not hasattr(scaler, name)]
    if missing:
        raise BatchError(f"scaler is a {type(scaler).__name__} without {missing[0]}(); expected a torch.amp.GradScaler")


def _check_update(options: Options) -> None:
    """Refuses arguments with which no update can be done."""
    if options.recorder is not None and not callable(options.recorder):
        raise BatchError(
            f"recorder is a {type(options.recorder).__name__}; expected a function of the step and the result"
        )
    if options.clip_norm is not None and (
        isinstance(options.clip_norm, bool)
        or not isinstance(options.clip_norm, numbers.Real)
        or not float(options.clip_norm) > 0
    ):
        raise BatchError(f"clip_norm={options.clip_norm!r}; expected a positive number, or None not to clip")
    if options.clip_norm is not None:
        modules = options.model.named_modules()
        sparse = [name or type(m).__name__ for name, m in modules if getattr(m, "sparse", False) is True]
        if sparse:
            raise BatchError(
                f"{sparse[0]} gives sparse gradients, which can't be clipped by norm; leave clip_norm out or build it "
                "with sparse=False"
            )
    parameters = [p for one in options.optimizer for group in one.param_groups for p in group["params"]]
    check_hooks(parameters)
    has_scaler = options.scaler is not None or options.autocast is torch.float16
    if has_scaler and any(p.dtype is torch.float16 for p in parameters):
        raise BatchError(
            "parameters are float16, whose gradients a GradScaler can't unscale; keep the model in float32 and pass "
            "autocast=torch.float16"
        )
    if len(options.optimizer) > 1 or has_scaler:
        closures = [type(one).__name__ for one in options.optimizer if needs_closure(one)]
        if closures:
            raise BatchError(
                f"{closures[0]} evaluates the gradient itself, which works with one optimizer and without a "
                "GradScaler; use it alone, in float32 or with autocast=torch.bfloat16"
            )


def inputs_of(inputs: Any) -> tuple[torch.Tensor, ...] | None:
    """Reads ``inputs=``, the only tensors that get a gradient."""
    if inputs is None:
        return None
    if isinstance(inputs, torch.Tensor):
        raise BatchError("inputs is a tensor; expected a sequence of them: inputs=[tensor]")
    found = tuple(inputs)
    if not found:
        raise BatchError("inputs is empty; expected at least one tensor, or leave it out for all parameters")
    for index, tensor in enumerate(found):
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(f"inputs[{index}] is a {type(tensor).__name__}; expected a tensor such as a parameter")
        if not tensor.requires_grad or not tensor.is_leaf:
            raise BatchError(
                f"inputs[{index}] is not a leaf with requires_grad; expected a tensor whose .grad can be filled"
            )
    return found


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Reads one optimizer or a sequence of them."""
    found = (
        [optimizer]
        if isinstance(optimizer, torch.optim.Optimizer) or not isinstance(optimizer, Sequence)
        else list(optimizer)
    )
    if not found:
        raise BatchError("optimizer is an empty sequence; expected at least one torch.optim.Optimizer")
    for one in found:
        if type(one).__module__.partition(".")[0] == "accelerate":
            raise BatchError(
                "the optimizer was prepared by Accelerate, whose step() does nothing within an accumulation window; "
                "build the step with anybatch.integrations.accelerate.train_step(accelerator, model, loss_fn, "
                "optimizer), or pass optimizer.optimizer, the one that it wraps"
            )
        if not isinstance(one, torch.optim.Optimizer):
            raise BatchError(
                f"optimizer is a {type(one).__name__}; expected a torch.optim.Optimizer or a sequence of them"
            )
    twice = [place for place, one in enumerate(found) if any(one is other for other in found[:place])]
    if twice:
        raise BatchError(f"optimizer[{twice[0]}] is given twice, and would step twice; expected each optimizer once")
    return found


def schedulers_of(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Reads one scheduler, or a sequence of them."""
    own = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    found = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
    for one in found:
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise BatchError(
                "ReduceLROnPlateau needs a metric, which TrainStep does not have after each update; leave scheduler= "
                "out and write after each evaluation: scheduler.step(step.evaluate(batch).loss)"
            )
        if isinstance(one, type) or not callable(getattr(one, "step", None)):
            kind = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise BatchError(f"scheduler is {kind}; expected an object with a step() method")
        if sum(one is other for other in found) > 1:
            raise BatchError(f"the {type(one).__name__} is given twice, and would step twice; expected it once")
        groups = getattr(getattr(one, "optimizer", None), "param_groups", None)
        if isinstance(one, torch.optim.lr_scheduler.LRScheduler) and groups and own.isdisjoint(map(id, groups)):
            raise BatchError(
                f"scheduler is a {type(one).__name__} of another optimizer than this step's; expected one that was "
                "built with the optimizer that is passed to TrainStep"
            )
    return found


def check_steps_on_inputs(optimizers: Sequence[torch.optim.Optimizer], inputs: Sequence[torch.Tensor] | None) -> None:
    """Refuses an optimizer whose parameters would never get a gradient."""
    wanted = {id(tensor) for tensor in inputs or ()}
    for index, optimizer in enumerate(optimizers):
        has_any = any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
        if inputs is not None and not has_any:
            which = f"optimizer[{index}]" if len(optimizers) > 1 else "the optimizer"
            raise BatchError(
                f"{which}, a {type(optimizer).__name__}, has no parameter among inputs, so it would never update "
                "one; expected inputs=model.part.parameters() of the part it trains"
            )


def check_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Refuses parameters with a post-accumulate-grad hook, which would fire once per micro-batch."""
    for parameter in parameters:
        if parameter._post_accumulate_grad_hooks:
            raise BatchError(
                "a parameter has a post-accumulate-grad hook, which would fire once per micro-batch instead of once "
                "per update (optimizers fused into the backward use it). Nothing was changed. Remove the hook and "
                "step the optimizer once the gradient is complete: let TrainStep call it, or call it after "
                "anybatch.backward"
            )


def check_devices(devices: Sequence[torch.device], plan: Any, reducer: Reducer, group: Any) -> None:
    """Refuses arguments that can't be combined with several devices in one process.

    Args:
        plan: anything but ``None`` if a plan is used.
    """
    kinds = sorted({device.type for device in devices})
    if plan is not None and len(kinds) > 1:
        raise BatchError(
            f"memory= or plan= was given, and devices are of the types {' and '.join(kinds)}; a plan is for one "
            "type of device, since kernels differ between types and save different tensors. Use devices of one "
            "type, or give micro_batch_size= instead: if any device runs out of memory, micro-batches shrink on "
            "all"
        )
    if reducer.is_shared or (group is not None and group is not False):
        raise BatchError(
            "a process group and devices= were given; expected one of them: under torchrun each process has one "
            "device, so leave devices= out; or pass group=False, so that this process reduces over its devices only"
        )


def refuse_parts(model: torch.nn.Module, verb: str) -> None:
    """Refuses a model of which this rank has a part only."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise BatchError(
            f"the model is sharded by fully_shard, and {verb} works on whole models; call it before fully_shard, "
            "or in one process with its own model"
        )


def warn_of_replicas(model: torch.nn.Module) -> None:
    """Warns of a ``DataParallel``, and says what to pass instead."""
    if isinstance(model, torch.nn.DataParallel):
        several = len(model.device_ids) > 1
        does = (
            "copies the model to its devices in each micro-batch, and no plan counts the bytes of the copies"
            if several
            else "does nothing here"
        )
        remedy = "TrainStep(model.module, ..., devices=model.device_ids)" if several else "model.module"
        warn(f"model is a DataParallel, which {does}; pass the wrapped model: {remedy}")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step`` requires a closure, as that of LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
