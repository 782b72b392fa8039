"""One pass over a logical batch in given parts: its gradient, or only its loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.gradient.accumulate import Accumulation, Settings, count_in_forward
from anybatch.gradient.coupling import Coupled, CoupledPass
from anybatch.gradient.losses import SINGLE, LossFunction
from anybatch.gradient.metrics import joined_metrics
from anybatch.gradient.overtime import OverTime
from anybatch.gradient.pieces import InPieces, Place
from anybatch.gradient.sums import Sums, values_of
from anybatch.gradient.weights import FORWARD, Count, Weights, fetched, weigh
from anybatch.records.results import Attempt, Deferred, StepResult
from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.moving import moved, to_device
from anybatch.update.batchnorm import BatchNormPolicy, batch_norm_as, coupling_modules, refuse_to_split
from anybatch.update.transaction import Snapshot


@dataclass
class Task:
    """What is the same for every attempt at a logical batch.

    Args:
        model: the first argument of the loss function.
        loss_fn: the user's.
        count: how to count.
        settings: precision, scaling, inputs.
        batch_norm: what happens to BatchNorm in a split.
        splittable: the logical batch.
    """

    model: Any
    loss_fn: LossFunction
    count: Count
    settings: Settings
    batch_norm: BatchNormPolicy
    splittable: Splittable

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that the loss runs through."""
        return modules_behind(self.model, self.loss_fn)


@dataclass
class Progress:
    """What is running, for messages."""

    text: str = "the start of the step"

    def __call__(self) -> str:
        """The text."""
        return self.text


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the first parameter lies; the CPU for a model without any."""
    first = _first_parameter(model)
    return torch.device("cpu") if first is None else first.device


def _first_parameter(module: torch.nn.Module) -> torch.Tensor | None:
    """The first of ``module.parameters()``, which takes as long for one as a small layer does."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None


def devices_of(model: torch.nn.Module) -> list[torch.device]:
    """Where the parameters lie."""
    return list(
        {
            parameter.device
            for module in modules_of(model)
            for parameter in module._parameters.values()
            if parameter is not None
        }
    )


def run_pass(
    task: Task,
    parts: Sequence[Part],
    parameters: Sequence[torch.Tensor],
    progress: Progress,
    *,
    differentiate: bool = True,
    outside: OutsideLeaves | None = None,
) -> tuple[Weights, Sums]:
    """Goes through the parts once.

    Args:
        task: the logical batch and how to go through it.
        parts: how it is split.
        parameters: whose ``.grad``, empty now, is filled.
        progress: is told what is running.
        differentiate: whether gradients are wanted.
        outside: is told of leaves that are not in ``parameters``, or ``None``.

    Returns:
        The weights, and what was added up; empty sums if there is nothing to count.
    """
    progress.text = "counting"
    weights, batches = _weigh(task, parts)
    if weights.is_empty:
        return weights, Sums()
    if differentiate and task.batch_norm == "refuse":
        _refuse_to_cut_time(task)
    if task.count == FORWARD and not isinstance(task.loss_fn, Coupled):  # whose loss sees the whole count at once
        weights = _count_in_forward(task, parts, weights, progress)
    context: AbstractContextManager[Callable[[], None] | None] = (
        batch_norm_as(task.batch_norm, task.modules, len(parts)) if differentiate else torch.no_grad()
    )
    with context as begin_micro_batch:
        if isinstance(task.loss_fn, Coupled):
            run = _Coupled(task, task.loss_fn, parts, progress)
            return weights, run.sums(weights, batches, parameters, outside, begin_micro_batch, differentiate)
        accumulation = Accumulation(
            task.model,
            task.loss_fn,
            weights,
            parameters,
            task.settings,
            rows=[len(part.samples) for part in parts],
            outside=outside,
            differentiate=differentiate,
            places=_places(task, parts, differentiate) if isinstance(task.loss_fn, InPieces) else None,
        )
        sums = accumulation.run(_told(_there(task, batches), progress, len(parts), begin_micro_batch))
    return weights, sums


class _Coupled:
    """A pass of a coupled loss, which needs micro-batches a second time, and the whole batch.

    Args:
        task: the logical batch.
        coupled: its loss.
        parts: how it is split.
        progress: is told what is running.
    """

    def __init__(self, task: Task, coupled: Coupled, parts: Sequence[Part], progress: Progress) -> None:
        self._task = task
        self._coupled = coupled
        self._parts = parts
        self._progress = progress

    def sums(
        self, weights: Weights, batches: Any, parameters: Sequence[torch.Tensor], outside: OutsideLeaves | None,
        begin_micro_batch: Callable[[], None] | None, differentiate: bool,
    ) -> Sums:  # fmt: skip
        """Runs it.

        Args:
            weights: of the micro-batches.
            batches: the micro-batches, where the loader left them.
            parameters: whose ``.grad`` is filled.
            outside: is told of other leaves.
            begin_micro_batch: is called at the beginning of each.
            differentiate: whether gradients are wanted.
        """
        task, progress, total = self._task, self._progress, len(self._parts)
        kept = list(batches)  # what a collate made at random can't be made again

        def again(numbers: Sequence[int]) -> Iterator[Any]:
            for number, batch in zip(numbers, _there(task, [kept[n] for n in numbers]), strict=True):
                progress.text = f"micro-batch {number + 1} of {total}, for the second time"
                yield batch

        def whole() -> Any:
            progress.text = "the coupled loss of the whole batch"
            return to_device(task.splittable.whole(), task.settings.device)

        run = CoupledPass(
            task.model, self._coupled, Weights([weights.totals]), parameters, task.settings,
            samples=[part.samples for part in self._parts], outside=outside, differentiate=differentiate,
        )  # fmt: skip
        return run.run(_told(_there(task, kept), progress, total, begin_micro_batch), again, whole)


def _weigh(task: Task, parts: Sequence[Part]) -> tuple[Weights, Any]:
    """Counts the parts, and gives the micro-batches to go through; what ``collate`` made is not made twice."""
    splittable = task.splittable
    made: list[Any] | None = None

    def micro_batches() -> Any:
        nonlocal made
        if not splittable.is_collated:
            return splittable.materialise(parts)
        made = list(splittable.materialise(parts))
        return made

    weights = weigh(task.count, parts, micro_batches, None if splittable.is_collated else splittable.batches)
    return weights, splittable.materialise(parts) if made is None else made


def _count_in_forward(task: Task, parts: Sequence[Part], samples: Weights, progress: Progress) -> Weights:
    """Counts by a forward, whose traces in buffers and random state are taken off again."""
    progress.text = "the forward that counts"
    if task.batch_norm == "refuse":
        refuse_to_split(task.modules, len(parts))
    before = Snapshot(task.modules, devices_of(task.model))
    batches = _there(task, task.splittable.materialise(parts))
    try:
        return count_in_forward(task.model, task.loss_fn, batches, task.settings, samples)
    finally:
        before.restore()


def _places(task: Task, parts: Sequence[Part], differentiate: bool) -> list[Place]:
    """Where each part lies in the batch that it was cut from."""
    rows: dict[int, int] = {}
    for part in parts:
        rows[part.batch] = rows.get(part.batch, 0) + len(part.samples)
    places = []
    seen = dict.fromkeys(rows, 0)
    for part in parts:
        start, count = seen[part.batch], len(part.samples)
        seen[part.batch] += count
        places.append(Place(start, count, rows[part.batch], task.count, differentiate, task.settings.chunk_length))
    return places


def _refuse_to_cut_time(task: Task) -> None:
    """BatchNorm in a chunk of time would see the steps of that chunk only."""
    loss_fn, splittable = task.loss_fn, task.splittable
    if not isinstance(loss_fn, OverTime) or not coupling_modules(*task.modules):
        return
    if splittable.is_collated or any(loss_fn.is_cut(batch) for batch in splittable.batches):
        refuse_to_split(task.modules, 2)


def _there(task: Task, batches: Any) -> Iterator[Any]:
    device = task.settings.device
    return iter(batches) if task.splittable.lies_on(device) else moved(batches, device)


def _told(
    batches: Iterator[Any], progress: Progress, total: int, begin_micro_batch: Callable[[], None] | None
) -> Iterator[Any]:
    progress.text = f"micro-batch 1 of {total}"
    for index, batch in enumerate(batches):
        progress.text = f"micro-batch {index + 1} of {total}"
        if begin_micro_batch is not None:
            begin_micro_batch()
        yield batch


def result_of(
    weights: Weights,
    sums: Sums,
    parts: Sequence[Part],
    attempts: tuple[Attempt, ...],
    *,
    skipped: str = "",
    grad_norm: torch.Tensor | None = None,
) -> StepResult:
    """Puts together what a logical batch gave; nothing is fetched from the device yet.

    Args:
        weights: the counts.
        sums: what was added up.
        parts: how the batch was split.
        attempts: all of them.
        skipped: why the update was left out.
        grad_norm: the norm before clipping.

    Returns:
        The result.
    """
    names = list(dict.fromkeys([*sums.terms, *sums.counts])) or [SINGLE]

    def losses() -> dict[str, float]:
        return {**dict.fromkeys(names, 0.0), **values_of(sums)}

    def counts() -> dict[str, float]:
        return {name: sum(fetched(sums.counts[name])) if name in sums.counts else weights.total(name) for name in names}

    def metrics() -> dict[str, Any]:
        order = [sample for part in parts for sample in part.samples]
        return joined_metrics(sums.metrics, sorted(order) if sums.in_order else order)

    return StepResult(
        losses=Deferred(losses),
        counts=Deferred(counts),
        metrics=Deferred(metrics),
        grad_norm=None if grad_norm is None else Deferred(lambda: float(grad_norm)),
        micro_batches=len(parts),
        skipped=skipped,
        attempts=attempts,
        accumulator_bytes=sums.accumulator_bytes,
    )
