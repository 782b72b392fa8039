"""What every module got and gave, sample by sample, so that the module that mixes samples can be named.

And from where a model is called.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from anybatch.batch.trees import leaves
from anybatch.tensors.graph import in_backward
from anybatch.torch_private import has_compiled

ROUNDINGS = 3  # of every weight, which may be as far off as those in the parts


class Print(NamedTuple):
    """A fingerprint of a tensor: its shape, and for each dimension that may be the samples' a number an index.

    That is a projection of the slice on fixed numbers; beside these stands the largest norm of a slice.
    """

    shape: tuple[int, ...]
    along: Mapping[int, tuple[torch.Tensor, float]]


class Visit(NamedTuple):
    """One call of a module: fingerprints of the tensors that it got and gave."""

    got: list[Print]
    gave: list[Print]


class Recording(NamedTuple):
    """Which samples went into a forward, and what was called, in the order in which it ended, by name and turn."""

    samples: Sequence[int]
    visits: dict[tuple[str, int], Visit]


class Visits:
    """Follows which module runs, and records fingerprints where it is asked to."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self.running: list[tuple[str, list[Print]]] = []
        self._recording: Recording | None = None

    def attached(self) -> ExitStack:
        """Hangs hooks on the modules; closing the stack takes them off."""
        handles = ExitStack()
        for name, module in self._modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            before = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            handles.callback(before.remove)
            handles.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        return handles

    def where(self) -> str:
        """The name of the innermost module that is running, ``"loss"`` outside of all modules."""
        return self.running[-1][0] if self.running else "loss"

    @contextmanager
    def recording(self, samples: Sequence[int]) -> Iterator[Recording]:
        """Gives the recording of one forward, complete at the end of the block."""
        self._recording = Recording(samples, {})
        try:
            yield self._recording
        finally:
            self._recording = None

    def _prints(self, value: Any) -> list[Print]:
        if self._recording is None:
            return []
        rows, tensors = len(self._recording.samples), (one for _, _, one in leaves(value))
        return [_print(one.detach(), rows) for one in tensors if getattr(one, "layout", None) is torch.strided]

    def _enter(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        if not in_backward():  # where a checkpoint recomputes
            self.running.append((name, self._prints((args, kwargs))))

    def _leave(self, module: Any, args: Any, result: Any) -> None:
        if in_backward() or not self.running:
            return
        name, got = self.running.pop()
        if self._recording is not None:
            call = sum(1 for other, _ in self._recording.visits if other == name)
            self._recording.visits[name, call] = Visit(got, self._prints(result))


def _print(tensor: torch.Tensor, rows: int) -> Print:
    real, along = torch.view_as_real(tensor) if tensor.is_complex() else tensor, {}
    for dim, size in enumerate(tensor.shape):
        if size and size % rows == 0:
            flat = real.movedim(dim, 0).reshape(size, -1).double()
            weights = torch.arange(1, flat.size(1) + 1, dtype=torch.float64, device=flat.device).mul_(1.2345).cos_()
            along[dim] = (flat @ weights).cpu(), float(torch.linalg.vector_norm(flat, dim=1).max())
    return Print(tuple(tensor.shape), along)


def culprits(whole: Recording, parts: Sequence[Recording], tolerance: float, rounded: Recording) -> dict[str, float]:
    """Finds the innermost modules that got the same in the whole batch and in its parts, and gave something else.

    Args:
        rounded: the whole batch with weights that were rounded; what differs there as much is no coupling.

    Returns:
        The modules in the order in which they ended, none whose own submodule is one; and the largest difference of a
        result, relative to the largest norm of a sample.
    """
    found: dict[str, float] = {}
    for name, turn in whole.visits:
        gave = _largest(whole, parts, (name, turn), "gave")
        least = max(tolerance, ROUNDINGS * _moved(whole.visits[name, turn], rounded.visits.get((name, turn))))
        if gave > least and not _largest(whole, parts, (name, turn), "got") > tolerance:
            found[name] = max(gave, found.get(name, 0.0))
    outer = {name for name in found for other in found if name != other and (not name or other.startswith(f"{name}."))}
    return {name: gave for name, gave in found.items() if name not in outer}


def gets_different_inputs(whole: Recording, parts: Sequence[Recording], tolerance: float) -> bool:
    """Whether the model already gets something else in the parts, so that samples were mixed before it."""
    return ("", 0) in whole.visits and _largest(whole, parts, ("", 0), "got") > tolerance


def _moved(visit: Visit, other: Visit | None) -> float:
    """The largest relative difference of what two calls on the same samples gave."""
    pairs = zip(visit.gave, other.gave if other is not None else (), strict=False)
    return max(
        (
            float((other.along[dim][0] - values).abs().max()) / max(largest, torch.finfo(torch.float64).tiny)
            for one, other in pairs
            if one.shape == other.shape
            for dim, (values, largest) in one.along.items()
        ),
        default=0.0,
    )


def _largest(whole: Recording, parts: Sequence[Recording], key: tuple[str, int], side: str) -> float:
    """The largest relative difference; NaN if nothing can be compared."""
    largest, own = math.nan, getattr(whole.visits[key], side)
    for part in parts:
        prints = getattr(part.visits[key], side) if key in part.visits else []
        for one, other in zip(own, prints, strict=True) if len(prints) == len(own) else ():
            differing = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if a != b]
            if side == "got" and len(differing) > 1:
                return math.inf  # a part is cut to its own longest sample before
            if len(differing) == 1 and len(one.shape) == len(other.shape):
                difference = _difference(one, other, differing[0], len(whole.samples), part.samples)
                largest = largest if largest >= difference or math.isnan(difference) else difference
    return largest


def _difference(whole: Print, part: Print, dim: int, rows: int, samples: Sequence[int]) -> float:
    """The relative difference of the slices of some samples; NaN where the dimension is not that of the samples."""
    times = whole.shape[dim] // rows
    if dim not in whole.along or dim not in part.along or part.shape[dim] != times * len(samples):
        return math.nan
    values, largest = whole.along[dim]
    chosen = torch.tensor(list(samples), device="cpu")
    orders = values.view(rows, times)[chosen].flatten(), values.view(times, rows)[:, chosen].flatten()
    scale = max(largest, torch.finfo(torch.float64).tiny)
    return min(float((part.along[dim][0] - order).abs().max()) for order in orders) / scale


@contextmanager
def callers_seen(model: Any) -> Iterator[Callable[[], bool]]:
    """Gives what says whether a hook on a model stays outside of all that was compiled; also where nothing was.

    That is seen in the calls of a block in which nothing is compiled. A hook that is compiled with the model takes
    seconds, and fails under ``fullgraph=True``.
    """
    are_inside: list[bool] = []

    def see(*_: Any) -> None:
        compiler, frame = sys.modules["torch._dynamo.eval_frame"].__file__, sys._getframe()
        while frame is not None and frame.f_code.co_filename != compiler:
            frame = frame.f_back  # type: ignore[assignment]
        are_inside.append(frame is not None)

    with ExitStack() as stack:
        if has_compiled() and isinstance(model, torch.nn.Module):
            with suppress(Exception):  # a scripted module takes none; its calls are then not met
                stack.callback(model.register_forward_pre_hook(see).remove)
        yield lambda: not has_compiled() or (bool(are_inside) and not any(are_inside))
