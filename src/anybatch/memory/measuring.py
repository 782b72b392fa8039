"""``anybatch.measure``: the peak memory of a function, by category."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from anybatch.accelerators import forget_peaks, in_use, is_accelerator, memory_of, synchronize
from anybatch.batch.trees import leaves
from anybatch.memory.meter import Recording
from anybatch.memory.timeline import LinedRecording
from anybatch.records.memory import BUFFERS, GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS, Memory
from anybatch.tensors.optimizers import state_tensors


def measure(
    function: Callable[[], Any],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batch: Any = None,
) -> Memory:
    """Measures the bytes of live tensors while a function runs, by category.

    On the CPU, workspace that operations allocate internally is not counted. On an accelerator the totals are those of
    its allocator.

    Args:
        function: called once, without arguments.
        model: its parameters, gradients and buffers are categories of their own.
        optimizer: one optimizer, or a list; its state is a category of its own.
        batch: its tensors count as inputs.

    Returns:
        Bytes at the peak and at the end, by category.

    Raises:
        TypeError: ``function`` can't be called, or ``optimizer`` is not a ``torch.optim.Optimizer`` or a list of them.

    Example:
        >>> model = torch.nn.Linear(100, 100, bias=False)
        >>> batch = torch.ones(8, 100)
        >>> memory = measure(lambda: model(batch).sum().backward(), model=model, batch=batch)
        >>> memory.at_end["parameters"], memory.at_end["gradients"], memory.at_end["inputs"]
        (40000, 40000, 3200)
    """
    if not callable(function):
        raise TypeError(f"got a {type(function).__name__}; expected a function, as in measure(lambda: step(batch))")
    home = next(iter(model.parameters()), None) if model is not None else None
    device = home.device if home is not None else next(iter(in_use()), None)
    recording = LinedRecording(device_type=device.type if device is not None and is_accelerator(device) else None)
    optimizers = _as_list(optimizer)
    handles = _register_all(recording, model, optimizers, batch)
    if device is not None and is_accelerator(device):
        synchronize(device)
        forget_peaks(device)
    try:
        with recording:
            function()
    finally:
        for handle in handles:
            handle.remove()
    _assign_all(recording, model, optimizers)
    memory = replace(recording.memory(), timeline=recording.timeline())
    if device is None or not is_accelerator(device):
        return memory
    synchronize(device)
    counted = memory_of(device)
    return Memory(
        counted.peak_allocated, counted.allocated, memory.at_peak, memory.at_end, memory.operation,
        counted.peak_reserved, memory.timeline,
    )  # fmt: skip


def _as_list(optimizer: Any) -> list[torch.optim.Optimizer]:
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer= got {type(one).__name__}, expected a torch.optim.Optimizer or a list of them; what only "
                "looks like an optimizer is not notified of steps, so leave it out, and its state counts as other bytes"
            )
    return given


def _register_all(
    recording: Recording, model: Any, optimizers: Sequence[torch.optim.Optimizer], batch: Any
) -> list[Any]:
    if model is not None:
        recording.register(model.parameters(), PARAMETERS)
        recording.register((parameter.grad for parameter in model.parameters()), GRADIENTS)
        recording.register(model.buffers(), BUFFERS)
    recording.register((leaf for _, _, leaf in leaves(batch)), INPUTS)
    handles: list[Any] = []
    for optimizer in optimizers:
        recording.register(state_tensors(optimizer), OPTIMIZER)
        handles.append(optimizer.register_step_pre_hook(lambda *_: _assign_all(recording, model, optimizers)))
        handles.append(optimizer.register_step_post_hook(lambda *_: _assign_all(recording, model, optimizers)))
    return handles


def _assign_all(recording: Recording, model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    parameters = list(model.parameters()) if model is not None else []
    for optimizer in optimizers:
        parameters += [p for group in optimizer.param_groups for p in group["params"]]
        recording.assign(state_tensors(optimizer), OPTIMIZER)
    recording.assign((parameter.grad for parameter in parameters), GRADIENTS)
