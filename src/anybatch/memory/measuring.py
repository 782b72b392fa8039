"""``anybatch.measure``: the peak memory of a function, by category, and what was alive from operation to operation."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch

from anybatch.accelerators import forget_peaks, in_use, is_accelerator, memory_of, synchronize
from anybatch.batch.trees import leaves
from anybatch.memory.meter import BEFORE, Recording
from anybatch.records.memory import (
    BUFFERS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    Memory,
    Moment,
    Timeline,
)
from anybatch.tensors.graph import in_backward
from anybatch.tensors.optimizers import state_tensors
from anybatch.userlines import calling_frame

_LARGEST = 4


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
                f"optimizer= got {type(one).__name__}, expected a torch.optim.Optimizer or a list of them; other "
                "classes have no step hooks, so leave it out, and its state counts as other bytes"
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


class LinedRecording(Recording):
    """A recording that also notes which line of the user's called each operation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lines: dict[int, tuple[str, str]] = {}

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._lines[len(self.operations)] = _user_line()
        return super()._run(func, args, kwargs)

    def timeline(self, most: int = 120, beside: Mapping[str, int] | None = None) -> Timeline:
        """What was alive after each operation; in each of at most so many stretches where it was most.

        Args:
            beside: bytes that were there all the time and were not recorded, by category.
        """
        live = self.live_bytes()
        bounds = [index * len(live) // most for index in range(most + 1)] if len(live) > most else range(len(live) + 1)
        chosen = [max(range(start, stop), key=live.__getitem__) for start, stop in itertools.pairwise(bounds)]
        found = [self._held(position) + Counter({(kind, ""): count for kind, count in (beside or {}).items()})
                 for position in chosen]  # fmt: skip
        kinds = [kind for kind in CATEGORIES if any(kind == one for held in found for one, _ in held)]
        layers = {
            kind: tuple(sum(count for (one, _), count in held.items() if one == kind) for held in found)
            for kind in kinds
        }
        moments = tuple(map(self._moment, chosen, found))
        return Timeline(moments, layers, len(live))

    def _held(self, position: int) -> Counter[tuple[str, str]]:
        """The bytes that were alive after an operation, by category and the line that allocated them."""
        held: Counter[tuple[str, str]] = Counter()
        for one in self.alive_after(position):
            line = "" if one.born == BEFORE else self._lines.get(one.born, ("", ""))[0]
            held[one.category, line] += one.size
        return held

    def _moment(self, position: int, held: Counter[tuple[str, str]]) -> Moment:
        line, module = self._lines.get(position, ("", ""))
        largest = tuple((count, kind, where) for (kind, where), count in held.most_common(_LARGEST))
        return Moment(self.operations[position], line, module, largest)


def _user_line() -> tuple[str, str]:
    """The innermost line that is neither torch's nor this library's, and the class whose method it is in."""
    frame = calling_frame(sys._getframe(2))
    if frame is None:
        return "", ""
    line = f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
    owner = frame.f_code.co_qualname.rpartition(".")[0].rpartition(".")[2]
    return line, "the backward" if in_backward() else "" if owner == "<locals>" else owner
