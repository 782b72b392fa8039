"""How long a micro-batch takes: measured where the device is at hand, else estimated for comparing plans."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from anybatch.planning.recipe import Recipe
from anybatch.planning.running import run_for_real
from anybatch.planning.subjects import Subject
from anybatch.tensors.batches import Part
from anybatch.tensors.graph import in_backward
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timed:
    """One micro-batch.

    Args:
        seconds: its forward and backward.
        forward: the forward of each block by name.
    """

    seconds: float
    forward: Mapping[str, float] = field(default_factory=dict)


class Times:
    """Times at several sizes, and what follows for those between and beyond.

    Between two sizes the time is taken as a straight line; beyond the largest, each sample takes as long as there. A
    line through small sizes predicts large ones badly, since caches and kernels change.

    Args:
        known: by the size of a micro-batch.

    Example:
        >>> Times({2.0: Timed(1.0), 4.0: Timed(3.0)}).seconds(3.0)
        2.0
    """

    def __init__(self, known: Mapping[float, Timed]) -> None:
        self._known = dict(sorted(known.items()))

    def __bool__(self) -> bool:
        return bool(self._known)

    def seconds(self, size: float) -> float:
        """Of one micro-batch, forward and backward.

        Args:
            size: in samples or in cost.
        """
        return self._between(size, lambda timed: timed.seconds)

    def forward(self, size: float, block: str) -> float:
        """Of one block's forward in one micro-batch; 0 if it is not known.

        Args:
            size: of the micro-batch.
            block: its name.
        """
        return self._between(size, lambda timed: timed.forward.get(block, 0.0))

    def _between(self, size: float, read: Callable[[Timed], float]) -> float:
        sizes = list(self._known)
        if size <= sizes[0]:
            return read(self._known[sizes[0]])
        if size >= sizes[-1]:
            return read(self._known[sizes[-1]]) * size / sizes[-1]
        upper = next(index for index, one in enumerate(sizes) if one >= size)
        low, high = sizes[upper - 1], sizes[upper]
        share = (size - low) / (high - low)
        return read(self._known[low]) * (1 - share) + read(self._known[high]) * share


def measured(subject: Subject, part: Part, levers: Recipe, blocks: Sequence[str], *, repeats: int) -> Timed | None:
    """Runs a micro-batch for real, several times, and takes the shortest; gradients and buffers are put back.

    Args:
        subject: what is planned.
        part: the samples.
        levers: what is traded for memory.
        blocks: whose forwards are timed, too.
        repeats: how often.

    Returns:
        The shortest time; ``None`` if memory ran out.
    """
    best: Timed | None = None
    for _ in range(repeats):
        timed = _measured_once(subject, part, levers, blocks)
        if timed is None:
            return None
        if best is None or timed.seconds < best.seconds:
            best = timed
    return best


def _measured_once(subject: Subject, part: Part, levers: Recipe, blocks: Sequence[str]) -> Timed | None:
    try:
        with _forwards_timed(subject, blocks) as forward:
            seconds = run_for_real(subject, part, levers, clock=lambda: _clock(subject))
        return Timed(seconds, dict(forward))
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        failure = Failure(error)
    failure.release()  # outside of the except block, where no traceback holds tensors any more
    logger.info("memory ran out while a micro-batch of %d samples was measured", len(part.samples))
    return None


def _clock(subject: Subject) -> float:
    if subject.settings.device.type == "cuda":
        torch.cuda.synchronize(subject.settings.device)
    return time.perf_counter()


@contextmanager
def _forwards_timed(subject: Subject, blocks: Sequence[str]) -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    began: dict[str, float] = {}

    def before(name: str) -> None:
        if not in_backward():
            began[name] = _clock(subject)

    def after(name: str) -> None:
        if not in_backward() and name in began:
            found[name] = found.get(name, 0.0) + _clock(subject) - began.pop(name)

    handles = []
    for name in blocks:
        module = subject.model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_, n=name: before(n)))
        handles.append(module.register_forward_hook(lambda *_, n=name: after(n)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
