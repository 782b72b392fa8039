"""What every module got and gave, sample by sample, so that the module that mixes samples can be named."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from anybatch.batch.trees import leaves
from anybatch.tensors.graph import in_backward


class Print(NamedTuple):
    """A fingerprint of a tensor: its shape, and for each dimension that may be the samples' two numbers an index.

    These are a projection of every slice on fixed numbers, and its norm.
    """

    shape: tuple[int, ...]
    along: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


class Visit(NamedTuple):
    """One call of a module: its name, and fingerprints of the tensors that it got and gave."""

    module: str
    got: list[Print]
    gave: list[Print]


class Recording(NamedTuple):
    """Which samples went into a forward, and what was called, in the order in which it ended, by name and turn."""

    samples: Sequence[int]
    visits: dict[tuple[str, int], Visit]

    @property
    def rows(self) -> int:
        """How many samples went in."""
        return len(self.samples)


class Visits:
    """Follows which module runs, and records fingerprints where it is asked to."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._stack: list[tuple[str, list[Print]]] = []
        self._recording: Recording | None = None

    def attached(self) -> ExitStack:
        """Hangs hooks on the modules; closing the stack takes them off."""
        handles = ExitStack()
        for name, module in self._modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
            handles.callback(before.remove)
            handles.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        return handles

    def where(self) -> str:
        """The name of the innermost module that is running, ``"loss"`` outside of all modules."""
        return self._stack[-1][0] if self._stack else "loss"

    def restart(self) -> None:
        """Forgets what was running, as a forward that failed leaves it behind."""
        self._stack.clear()

    @contextmanager
    def recording(self, samples: Sequence[int]) -> Iterator[Recording]:
        """Gives the recording of one forward, complete at the end of the block."""
        self._recording = Recording(samples, {})
        try:
            yield self._recording
        finally:
            self._recording = None

    def _entering(self, name: str) -> Any:
        def enter(module: Any, args: Any, kwargs: Any) -> None:
            if not in_backward():  # where a checkpoint recomputes
                rows = self._recording.rows if self._recording else None
                self._stack.append((name, [] if rows is None else _prints((args, kwargs), rows)))

        return enter

    def _leave(self, module: Any, args: Any, result: Any) -> None:
        if in_backward() or not self._stack:
            return
        name, got = self._stack.pop()
        if self._recording is not None:
            call = sum(1 for other, _ in self._recording.visits if other == name)
            self._recording.visits[name, call] = Visit(name, got, _prints(result, self._recording.rows))


def _prints(value: Any, rows: int) -> list[Print]:
    tensors = (leaf for _, _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))
    return [_print(tensor.detach(), rows) for tensor in tensors if tensor.layout is torch.strided]


def _print(tensor: torch.Tensor, rows: int) -> Print:
    shape = tuple(tensor.shape)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    along = {}
    for dim, size in enumerate(shape):
        if size and size % rows == 0:
            flat = real.movedim(dim, 0).reshape(size, -1).double()
            weights = torch.arange(1, flat.size(1) + 1, dtype=torch.float64, device=flat.device).mul_(1.2345).cos_()
            along[dim] = ((flat @ weights).cpu(), torch.linalg.vector_norm(flat, dim=1).cpu())
    return Print(shape, along)


def culprits(whole: Recording, parts: Sequence[Recording], tolerance: float) -> dict[str, float]:
    """Finds the innermost modules that got the same in the whole batch and in its parts, and gave something else.

    Returns:
        The modules in the order in which they ended, none whose own submodule is one; and the largest difference of a
        result, relative to the largest norm of a sample.
    """
    found: dict[str, float] = {}
    for key, visit in whole.visits.items():
        gave = _largest(whole, parts, key, "gave")
        if gave > tolerance and not _largest(whole, parts, key, "got") > tolerance:
            found[visit.module] = max(gave, found.get(visit.module, 0.0))
    return {name: gave for name, gave in found.items() if not any(_contains(name, other) for other in found)}


def gets_different_inputs(whole: Recording, parts: Sequence[Recording], module: str, tolerance: float) -> bool:
    """Whether a module already gets something else in the parts, so that samples were mixed before it."""
    return (module, 0) in whole.visits and _largest(whole, parts, (module, 0), "got") > tolerance


def _contains(outer: str, inner: str) -> bool:
    return outer != inner and (outer == "" or inner.startswith(outer + "."))


def _largest(whole: Recording, parts: Sequence[Recording], key: tuple[str, int], side: str) -> float:
    """The largest relative difference; NaN if nothing can be compared."""
    largest, own = math.nan, getattr(whole.visits[key], side)
    for part in parts:
        prints = getattr(part.visits[key], side) if key in part.visits else []
        for one, other in zip(own, prints, strict=True) if len(prints) == len(own) else ():
            difference = _difference(one, other, whole.rows, part)
            if side == "got" and sum(a != b for a, b in zip(one.shape, other.shape, strict=False)) > 1:
                difference = math.inf  # a part is cut to its own longest sample before
            if not largest >= difference and not math.isnan(difference):
                largest = difference
    return largest


def _difference(whole: Print, part: Print, rows: int, recording: Recording) -> float:
    if len(whole.shape) != len(part.shape):
        return math.nan
    differing = [dim for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if len(differing) != 1 or differing[0] not in whole.along or differing[0] not in part.along:
        return math.nan
    dim = differing[0]
    times = whole.shape[dim] // rows
    if whole.shape[dim] % rows or part.shape[dim] != times * recording.rows:
        return math.nan
    values, norms = whole.along[dim]
    scale, chosen = (
        max(float(norms.max()), torch.finfo(torch.float64).tiny),
        torch.tensor(list(recording.samples), device="cpu"),
    )
    orders = values.view(rows, times)[chosen].flatten(), values.view(times, rows)[:, chosen].flatten()
    return min(float((part.along[dim][0] - order).abs().max()) for order in orders) / scale
