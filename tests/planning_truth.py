"""The measured truth about memory and time, which plans are held against.

``peak_of_step`` looks at every operation of a real step. ``brute_force`` tries what people try by hand.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch
from planning_models import Subject
from planning_referee import alive_in, peak_of

Recomputed = Literal["none", "half", "all"]
RECOMPUTED: tuple[Recomputed, ...] = ("none", "half", "all")


def peak_of_step(step: anybatch.TrainStep, batch: Any) -> int:
    """Measures ``Plan.peak_bytes``: the most bytes of live tensors during the second call.

    Args:
        step: a fresh one; it is called twice.
        batch: the logical batch, on the device of the model.

    Returns:
        Bytes of parameters, buffers, gradients, optimizer state, batch, micro-batch and activations together.
    """
    step(batch)
    return peak_of(lambda: step(batch), alive_in(step.model, step._optimizers, batch))


def peak_of_first_call(step: anybatch.TrainStep, batch: Any) -> int:
    """Measures the same during the first call, with whatever it plans and probes."""
    return peak_of(lambda: step(batch), alive_in(step.model, step._optimizers, batch))


def peak_of_whole(subject: Subject, samples: int) -> int:
    """Measures the whole batch in one micro-batch, without any memory optimization."""
    return peak_of_step(subject.step(), subject.make_batch(samples))


@contextlib.contextmanager
def recomputed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Lets ``torch.utils.checkpoint`` recompute the named modules, as people do by hand.

    Args:
        model: whose modules they are.
        names: qualified.
    """
    modules = [model.get_submodule(name) for name in names]
    try:
        for module in modules:
            module.forward = _checkpointed(module.forward)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


@dataclass(frozen=True)
class Configuration:
    """A way to run a step by hand, its peak, and its median time where it was taken."""

    micro_batch_size: int
    recomputed: Recomputed
    peak_bytes: int
    seconds: float | None = None


@dataclass(frozen=True)
class BruteForce:
    """What was found by trying everything on the grid.

    Attributes:
        tried: all configurations, with times where they fit in the budget.
        floor: the smallest peak that can be reached.
        fastest: the fastest configuration within the budget, ``None`` if none is.
    """

    tried: tuple[Configuration, ...]
    floor: int
    fastest: Configuration | None


def sizes_of(subject: Subject, samples: int) -> list[int]:
    """The whole batch, then powers of two below it, down to one; the whole batch alone where it can't be split."""
    if not subject.splits:
        return [samples]
    return [samples, *(2**power for power in range(samples.bit_length(), -1, -1) if 2**power < samples)]


def names_of(subject: Subject, which: Recomputed) -> Sequence[str]:
    """The blocks that are recomputed: none, all, or every second one."""
    return {"none": (), "half": subject.blocks[1::2], "all": subject.blocks}[which]


def brute_force(make: Callable[[], Subject], samples: int, budget: int | None = None, *, rounds: int = 5) -> BruteForce:
    """Tries micro-batch sizes, with none, half or all of the blocks recomputed, and times what fits.

    Subjects with a ``cost`` are not for this: their micro-batch sizes are no numbers of samples.

    Args:
        make: a factory of the subject, for a fresh one in each configuration.
        samples: in the logical batch.
        budget: bytes; ``None`` times nothing.
        rounds: how often each configuration is timed, in turn with the others.

    Returns:
        All configurations, the smallest peak, and the fastest within the budget.
    """
    subject = make()
    batch = subject.make_batch(samples)
    optimizations = RECOMPUTED if len(subject.blocks) > 1 else RECOMPUTED[:1]
    found = []
    for size in sizes_of(subject, samples):
        for which in optimizations:
            with recomputed(subject.model, names_of(subject, which)):
                found.append(Configuration(size, which, peak_of_step(_step(subject, size, samples), batch)))
    floor = min(one.peak_bytes for one in found)
    fitting = [one for one in found if budget is not None and one.peak_bytes <= budget]
    times = _times(make, batch, samples, fitting, rounds)
    timed = {one: dataclasses.replace(one, seconds=time) for one, time in zip(fitting, times, strict=True)}
    fastest = min(timed.values(), key=lambda one: one.seconds or 0.0, default=None)
    return BruteForce(tuple(timed.get(one, one) for one in found), floor, fastest)


def _step(subject: Subject, size: int, samples: int) -> anybatch.TrainStep:
    return subject.step(micro_batch_size=None if size == samples else size)


def _times(
    make: Callable[[], Subject], batch: Any, samples: int, ways: Sequence[Configuration], rounds: int
) -> list[float]:
    """The median seconds of a step of each configuration; all take turns, so that a busy moment hits them alike."""
    subject = make()
    steps = [_step(subject, way.micro_batch_size, samples) for way in ways]
    taken: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, step, seconds in zip(ways, steps, taken, strict=True):
            with recomputed(subject.model, names_of(subject, way.recomputed)):
                start = time.perf_counter()
                step(batch)
                if turn > 0:  # the first one makes the optimizer's state
                    seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in taken]
