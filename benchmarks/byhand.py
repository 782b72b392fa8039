"""What people do by hand when memory is short: accumulation, checkpointing, trial and error, Accelerate's restarts.

Each side is given a budget and looks for its way under it, on a machine whose memory is emulated: an operation after
which more bytes of tensors are alive than the budget raises ``torch.OutOfMemoryError``.
"""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Batch, LossFunction, seconds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from planning_referee import Cap, alive_in, peak_of

UPDATES_OF_A_TRIAL = 2  # the state of the optimizer is there from the second on
ROUNDS_OF_A_TRIAL = 3


@dataclass(frozen=True)
class Case:
    """A model with its logical batch.

    Args:
        name: what it is called in the table.
        model: from which every side makes its own copy.
        loss_fn: the mean over the samples.
        batch: the logical batch, on the model's device.
        blocks: the names of the modules that are checkpointed by hand.
    """

    name: str
    model: nn.Module
    loss_fn: LossFunction
    batch: Batch
    blocks: Sequence[str]

    @property
    def samples(self) -> int:
        return len(next(iter(self.batch.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.batch.values())).device

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A copy of the model with an optimizer."""
        model = copy.deepcopy(self.model)
        # A rate this small keeps the work the same from the first update to the last.
        return model, torch.optim.AdamW(model.parameters(), lr=1e-6)


class Loop:
    """The loop that people write: micro-batches of a size, each weighted by its share.

    Args:
        case: model and batch.
        size: samples in a micro-batch.
        blocks: the modules that ``torch.utils.checkpoint`` recomputes.
    """

    def __init__(self, case: Case, size: int, blocks: Sequence[str] = ()) -> None:
        self.case, self.size = case, size
        self.model, self.optimizer = case.fresh()
        for name in blocks:
            module = self.model.get_submodule(name)
            module.forward = _checkpointed(module.forward)

    def __call__(self) -> None:
        """Makes an update."""
        self.optimizer.zero_grad()
        for start in range(0, self.case.samples, self.size):
            part = {name: tensor[start : start + self.size] for name, tensor in self.case.batch.items()}
            share = len(next(iter(part.values()))) / self.case.samples
            (self.case.loss_fn(self.model, part) * share).backward()
        self.optimizer.step()

    def alive(self) -> Iterator[Tensor]:
        """What is alive between updates."""
        return alive_in(self.model, [self.optimizer], self.case.batch)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


class Planned:
    """``anybatch.TrainStep`` with a budget."""

    def __init__(self, case: Case, budget: int | None) -> None:
        self.case = case
        self.model, self.optimizer = case.fresh()
        options = {} if budget is None else {"memory": budget}
        self.step = anybatch.TrainStep(self.model, case.loss_fn, self.optimizer, **options)
        self.plan: Any = None
        self.micro_batches = 0

    def __call__(self) -> None:
        """Makes an update."""
        result = self.step(self.case.batch)
        self.micro_batches, self.plan = result.micro_batches, getattr(result, "plan", None)

    def alive(self) -> Iterator[Tensor]:
        """What is alive between updates."""
        return alive_in(self.model, [self.optimizer], self.case.batch)


@dataclass
class Found:
    """What a side came to under a budget.

    Attributes:
        update: makes an update; ``None`` if nothing fits.
        how: the micro-batch size and the optimizations.
        out_of_memory: how often memory ran out on the way; for Accelerate these are its restarts.
        search_seconds: what the way there took beyond the updates that were kept.
        first_peak: the most bytes while it was looked for.
        peak: the most bytes in an update after that.
        seconds: of updates, in the order of the rounds.
    """

    update: Loop | Planned | None
    how: str
    out_of_memory: int
    search_seconds: float
    first_peak: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


def whole_peak(case: Case) -> int:
    """The peak of the whole batch at once, the larger one of the loop's and of a ``TrainStep`` without a budget."""
    peaks = []
    for update in (Loop(case, case.samples), Planned(case, None)):
        update()
        peaks.append(peak_of(update, update.alive()))
    return max(peaks)


def plan(case: Case, budget: int) -> Found:
    """anybatch: one object, the first call plans; what follows is tried under the emulated memory.

    The emulation slows every operation down, which would show in the times that planning takes. That the first call
    stays within the budget, too, is in tests/unit/planning/test_plan_budgets.py.
    """
    start = time.perf_counter()
    planned = Planned(case, budget)
    try:
        planned()
    except anybatch.DoesNotFit as error:
        needed = "an unknown number of" if error.needed is None else f"{error.needed / 1e6:.2f} million"
        return Found(None, f"needs {needed} bytes", 0, time.perf_counter() - start)
    with Cap(budget, planned.alive()) as cap:
        for _ in range(UPDATES_OF_A_TRIAL):
            planned()
    return Found(planned, _described(planned), cap.raised, time.perf_counter() - start, cap.peak)


def _described(planned: Planned) -> str:
    """The micro-batch size and the optimizations, from what the step says about its plan."""
    chosen = planned.plan
    if chosen is None:
        return f"{planned.micro_batches} micro-batches"
    optimizations = [f"micro-batches of {chosen.micro_batch_size:g}"]
    if chosen.recompute:
        optimizations.append(f"{len(chosen.recompute)} recomputed")
    if chosen.offload:
        optimizations.append(f"{len(chosen.offload)} offloaded")
    if chosen.loss_chunks > 1:
        optimizations.append(f"loss in {chosen.loss_chunks} chunks")
    return ", ".join(optimizations)


def accumulate(case: Case, budget: int) -> Found:
    """Accumulation alone: the fastest power of two that fits, by trial."""
    return _by_trial(case, budget, ())


def checkpoint_all(case: Case, budget: int) -> Found:
    """All blocks checkpointed, and accumulation: the fastest power of two that fits, by trial."""
    return _by_trial(case, budget, case.blocks)


def _by_trial(case: Case, budget: int, blocks: Sequence[str]) -> Found:
    """Halves the size until it fits, and on for as long as that makes it faster."""
    start = time.perf_counter()
    failed, size, reached = 0, case.samples, None
    while size >= 1:
        best = Loop(case, size, blocks)
        reached = _try(best, budget)
        if reached is not None:
            break
        failed += 1
        size //= 2
    if reached is None:
        return Found(None, "not even one sample", failed, time.perf_counter() - start)
    fastest = _best_time(best)
    while best.size > 1:
        smaller = Loop(case, best.size // 2, blocks)
        taken = _best_time(smaller)
        if taken >= fastest:
            break
        best, fastest = smaller, taken
    return Found(best, f"micro-batches of {best.size}", failed, time.perf_counter() - start, reached)


def _best_time(loop: Loop) -> float:
    return min(seconds(loop, loop.case.device) for _ in range(ROUNDS_OF_A_TRIAL))


def _try(loop: Loop, budget: int) -> int | None:
    """The peak of some updates, ``None`` if memory runs out."""
    cap = Cap(budget, loop.alive())
    try:
        with cap:
            for _ in range(UPDATES_OF_A_TRIAL):
                loop()
    except torch.OutOfMemoryError:
        return None
    peak: int = cap.peak
    return peak


def find_executable(case: Case, budget: int) -> Found:
    """Accelerate's ``find_executable_batch_size``: after every failure the training starts again, a tenth smaller.

    The logical batch stays what it is, as its guide to gradient accumulation asks for.
    """
    find = importlib.import_module("accelerate.utils").find_executable_batch_size
    start, sizes, peaks = time.perf_counter(), [], []

    @find(starting_batch_size=case.samples)
    def train(batch_size: int) -> Loop:
        sizes.append(batch_size)
        loop = Loop(case, batch_size)
        with Cap(budget, loop.alive()) as cap:
            for _ in range(UPDATES_OF_A_TRIAL):
                loop()
        peaks.append(cap.peak)
        return loop

    try:
        loop = train()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        return Found(None, "not even one sample", len(sizes), time.perf_counter() - start)
    return Found(loop, f"micro-batches of {loop.size}", len(sizes) - 1, time.perf_counter() - start, max(peaks))


ANYBATCH = "anybatch"
SIDES: dict[str, Callable[[Case, int], Found]] = {
    ANYBATCH: plan,
    "accumulation": accumulate,
    "checkpointing": checkpoint_all,
    "Accelerate": find_executable,
}


def search(case: Case, budget: int, names: Sequence[str]) -> dict[str, Found]:
    """Lets every side find its way under a budget, and measures the peak that it then has.

    Args:
        case: model and batch.
        budget: bytes.
        names: keys of ``SIDES``.

    Returns:
        What each came to.
    """
    found = {}
    for name in names:
        gc.collect()
        found[name] = one = SIDES[name](case, budget)
        if one.update is not None:
            one.peak = peak_of(one.update, one.update.alive())
    return found
