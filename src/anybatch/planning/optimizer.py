"""What is held apart from micro-batches, whatever their size: by clipping, the optimizer's step and the count."""

import copy
import functools
import logging
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.batch.counting import count_samples
from anybatch.batch.trees import leaves, map_leaves
from anybatch.loss.norms import clip_
from anybatch.loss.weights import FORWARD
from anybatch.memory.meter import Allocation, Recording, held_by
from anybatch.options import needs_closure
from anybatch.planning.microbatches import tensors_in
from anybatch.planning.subjects import Subject
from anybatch.records.memory import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from anybatch.tensors.fakes import Fakes
from anybatch.tensors.optimizers import state_tensors, with_tensors
from anybatch.update.boundary import OptimizerWatch
from anybatch.update.closures import StepCall, step_alone

logger = logging.getLogger(__name__)

_LBFGS_VECTORS = 10  # directions, flat gradients and copies of the parameters in a line search
_A_NUMBER = 1000.5  # such as that of a late step, which may take more than the first ones do; nothing divides by 0
_PRINT = 16


class LocalScalars(Recording):
    """A recording that answers an optimizer's questions for the numbers in fake tensors, which change no bytes."""

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _A_NUMBER if args[0].is_floating_point() else 1
        return super()._run(func, args, kwargs)


@dataclass(frozen=True)
class UpdateTrace:
    """What the update holds, whatever the size of the micro-batches."""

    peak: int  # bytes at its peak: parameters, gradients, the optimizer's state, what clipping and stepping need
    state: int  # bytes of the optimizer's state
    operation: str  # after which operation the peak was reached
    at_peak: Mapping[str, int]  # bytes at the peak by category
    is_traced: bool = True  # whether the optimizers could be run on fake tensors; else their state is estimated
    allocations: Sequence[Allocation] = ()  # what was there and what came and went
    steps_at: int = 0  # before which operation the optimizers step, of which the first one makes the state


def trace_update(subject: Subject, trained: Sequence[int], parts: Mapping[int, torch.Tensor] = {}) -> UpdateTrace:
    """Runs clipping and the optimizers' second step on fake tensors.

    Args:
        subject: what is planned.
        trained: positions of the parameters that get a gradient.
        parts: by its ``id``, of each parameter that does not lie here as a whole the part that does.
    """
    fakes = Fakes()
    real = subject.parameters
    here = [torch.nn.Parameter(parts[id(p)], p.requires_grad) if id(p) in parts else p for p in real]
    parameters = [fakes.like(parameter) for parameter in here]
    by_id = {id(parameter): fake for parameter, fake in zip(real, parameters, strict=True)}
    recording = LocalScalars(granularity=subject.granularity, counts_fakes=True)
    recording.register(parameters, PARAMETERS)
    estimated = idle = 0
    with fakes.mode, torch.no_grad():
        for position in trained:
            parameters[position].grad = torch.empty_like(parameters[position])
        optimizers = []
        for optimizer in subject.optimizers:
            clone = stepped_clone(optimizer, by_id, subject)
            if clone is None:
                estimated += _estimated_state(optimizer, by_id)
            else:
                optimizers.append(clone)
                idle += _idle_state(optimizer, {id(real[position]) for position in trained})
        recording.register((p.grad for p in parameters), GRADIENTS)
        if subject.device_type != "cpu":
            recording.register(_counters_on_host(optimizers), OPTIMIZER, counted=False)
        recording.register((t for one in optimizers for t in state_tensors(one)), OPTIMIZER)
        state = recording.by_category().get(OPTIMIZER, 0) + estimated + idle
        with recording:
            if subject.clip_norm is not None:
                clip_(parameters, subject.clip_norm)
            watches = _watches(optimizers)
            steps_at = recording.now
            runs_again = [step_alone(clone) for clone in optimizers]
            del watches
    memory = recording.memory()
    # Two numbers for each parameter are kept while an optimizer steps that may ask for the gradient again.
    asks = [one for one in subject.optimizers if not needs_closure(one) and StepCall(one).is_given]
    more = estimated + idle + sum(_PRINT * len(group["params"]) for one in asks for group in one.param_groups)
    at_peak = {**memory.at_peak, OPTIMIZER: memory.at_peak.get(OPTIMIZER, 0) + more}
    is_traced = not estimated and not any(runs_again)
    return UpdateTrace(
        memory.peak_bytes + more, state, memory.operation, at_peak, is_traced, recording.allocations, steps_at
    )


def _counters_on_host(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """How often each parameter was updated, which optimizers of torch keep on the host but for kernels of their own."""
    return [
        counter
        for one in optimizers if type(one).__module__.startswith("torch.optim")
        for group in one.param_groups if not (group.get("fused") or group.get("capturable"))
        for parameter in group["params"]
        if isinstance(counter := one.state.get(parameter, {}).get("step"), torch.Tensor)
    ]  # fmt: skip


def _watches(optimizers: Sequence[Any]) -> list[OptimizerWatch]:
    """What every step keeps to tell whether an optimizer that failed had begun."""
    try:
        return [OptimizerWatch(optimizer) for optimizer in optimizers]
    except Exception as error:  # noqa: BLE001 - the state of an optimizer of the user's
        logger.info(
            "the bookkeeping that tells whether an update has begun is not counted (%s: %s)",
            type(error).__name__,
            error,
        )
        return []


def stepped_clone(optimizer: torch.optim.Optimizer, fakes: Mapping[int, torch.Tensor], subject: Subject) -> Any:
    """An optimizer over other tensors after its first step, which makes the state; ``None`` if it can't be had."""
    if needs_closure(optimizer):
        return None
    for has_state in (False, True) if optimizer.state else (False,):  # some make it before their first step
        clone = _clone(optimizer, fakes, foreach=subject.device_type != "cpu")
        if has_state:
            _give_state(clone, optimizer, fakes)
        try:
            with LocalScalars():
                step_alone(clone)
        except Exception as error:  # noqa: BLE001 - code of the user's, which is not meant to run on fakes
            failed = f"{type(error).__name__}: {error}"
        else:
            return clone
    logger.info(
        "%s can't step on stand-in tensors (%s); the bytes of its state are estimated",
        type(optimizer).__name__, failed,
    )  # fmt: skip
    return None


def _give_state(clone: Any, optimizer: torch.optim.Optimizer, fakes: Mapping[int, torch.Tensor]) -> None:
    """Gives an optimizer over fakes state as the original has it, for the parameters with a gradient."""
    for parameter, state in optimizer.state.items():
        fake = fakes.get(id(parameter))
        if fake is not None and fake.grad is not None:
            clone.state[fake] = with_tensors(state, functools.partial(_state_like, parameter.shape, fake.shape))
    for name, value in optimizer.__dict__.items():
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state:
            _give_state(clone.__dict__[name], value, fakes)


def _state_like(shape: torch.Size, fake: torch.Size, value: torch.Tensor) -> torch.Tensor:
    """Zeros for a tensor of the state of a parameter of a shape, for a fake of another."""
    return torch.zeros(fake if value.shape == shape else value.shape, dtype=value.dtype, device="cpu")


def _idle_state(optimizer: torch.optim.Optimizer, trained: set[int]) -> int:
    """The bytes of state that is there for parameters that get no gradient now."""
    idle = (value for parameter, value in optimizer.state.items() if id(parameter) not in trained)
    tensors = (leaf for value in idle for _, _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))
    return sum(held_by(tensors).values())


def _estimated_state(optimizer: torch.optim.Optimizer, fakes: Mapping[int, torch.Tensor]) -> int:
    """What the state is, if there is some, and else what it may become: two copies of what lies here of parameters.

    An LBFGS keeps ``history_size`` pairs of vectors and some more, see ``torch.optim.LBFGS``.
    """
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    size = sum(p.numel() * p.element_size() for p in own if p.requires_grad)
    history = optimizer.param_groups[0].get("history_size")
    copies = 2 if history is None else 2 * int(history) + _LBFGS_VECTORS
    held = held_by(tensor for tensor in state_tensors(optimizer) if not tensor.is_sparse)
    whole, here = (sum(p.numel() * p.element_size() for p in ps) for ps in (own, [fakes[id(p)] for p in own]))
    return max(int(copies * size), sum(held.values())) * here // max(whole, 1)


def _clone(optimizer: torch.optim.Optimizer, fakes: Mapping[int, torch.Tensor], *, foreach: bool) -> Any:
    """An optimizer of the same kind over fakes; nothing of the original is reached through it."""
    clone: Any = object.__new__(type(optimizer))
    made = dict(fakes)

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made and tensor.layout is torch.strided:
            made[id(tensor)] = torch.empty_like(tensor, device="cpu")
        return made.get(id(tensor), tensor)

    for name, value in optimizer.__dict__.items():
        if isinstance(value, torch.optim.Optimizer):
            clone.__dict__[name] = _clone(value, fakes, foreach=foreach)
        else:
            clone.__dict__[name] = copy.copy(value) if name == "defaults" else with_tensors(value, fake_of)
    clone.__dict__.pop("step", None)  # a scheduler puts a bound method of the original there
    step = getattr(type(clone).step, "__wrapped__", None)
    if step is not None:  # what torch wraps it in calls hooks, also those on all optimizers, such as a profiler's
        clone.__dict__["step"] = types.MethodType(step, clone)
    clone.param_groups = [
        {**group, "params": [fakes.get(id(parameter), parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    clone.state = defaultdict(dict)
    for name, value in optimizer.__dict__.items():  # a wrapper shares its groups and state with what it wraps
        if isinstance(value, torch.optim.Optimizer):
            for shared in ("param_groups", "state"):
                if getattr(value, shared) is getattr(optimizer, shared):
                    setattr(clone.__dict__[name], shared, getattr(clone, shared))
    if foreach:
        for group in clone.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # what CUDA takes by default and the CPU does not
    return clone


_PIECES = 32


def counted_bytes(subject: Subject) -> int:
    """The most bytes that the functions of ``count=`` hold besides the batch.

    They run on fake tensors. One that looks at numbers runs for real, on small pieces of the batch, which together hold
    at least as much as the whole.

    Returns:
        The bytes; 0 where only samples are counted, where raw samples are, which nobody sees as a whole, and where the
        batch is not on the device.
    """
    count, splittable = subject.count, subject.splittable
    is_elsewhere = subject.device_type != "cpu" and not subject.batch_is_there
    if count is count_samples or count == FORWARD or splittable.is_collated or is_elsewhere:
        return 0
    functions = list(count.values()) if isinstance(count, Mapping) else [count]
    try:
        return _most(functions, splittable.batches, subject.granularity)
    except Exception as error:  # noqa: BLE001 - code of the user's, which is not meant to run on fakes
        logger.info("the count can't run on fake tensors (%s: %s)", type(error).__name__, error)
    pieces = splittable.materialise(splittable.plan(max(1, splittable.rows // _PIECES), is_shared=False))
    try:
        return sum(_held(function, piece, Recording()) for piece in pieces for function in functions)
    except Exception as error:  # noqa: BLE001 - the step itself raises it, too
        logger.info("the count can't run on a part of the batch (%s: %s)", type(error).__name__, error)
        return 0


def _most(functions: Iterable[Any], batches: Iterable[Any], granularity: int) -> int:
    found = [0]
    for batch in batches:
        fakes = Fakes()

        def like(leaf: Any, fakes: Fakes = fakes) -> Any:
            return fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf

        stand_in = map_leaves(like, batch)
        for function in functions:
            with fakes.mode:
                recording = LocalScalars(granularity=granularity, counts_fakes=True)
                found.append(_held(function, stand_in, recording))
        fakes.let_go()
    return max(found)


def _held(function: Any, batch: Any, recording: Recording) -> int:
    recording.register(tensors_in(batch), INPUTS, counted=False)
    with recording:
        result = function(batch)
    del result
    recording.end()
    return max(recording.live_bytes(), default=0)
