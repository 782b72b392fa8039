"""One pass over a logical batch whose micro-batches run on several devices of this process, side by side."""

import contextlib
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from anybatch.batch.batches import Part
from anybatch.batch.moving import moved
from anybatch.errors import AnyBatchWarning, BatchError, LossError
from anybatch.loss.accumulate import Accumulation, Settings
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.parallel.devices import Devices, Lane
from anybatch.parallel.draws import DeviceDraws, HostDraws, seeds_for
from anybatch.parallel.workers import run_together
from anybatch.tensors.graph import OutsideLeaves
from anybatch.update.progress import Beginnings, Progress
from anybatch.update.transaction import Snapshot, is_out_of_memory

if TYPE_CHECKING:
    from anybatch.update.passes import Task


def run_over_devices(
    task: "Task",
    devices: Devices,
    parts: Sequence[Part],
    weights: Weights,
    batches: Iterator[Any],
    parameters: Sequence[torch.Tensor],
    progress: Progress,
    *,
    differentiate: bool,
) -> Sums:
    """Goes through the parts once, on all devices.

    The first time one micro-batch runs at a time, to see whether the model draws from the random generators of the
    host, which all threads share. If it does, this goes on so, each with a seed of its own. If it begins to draw later,
    what ran side by side is thrown away and runs again.

    Args:
        task: the logical batch and how to go through it.
        devices: that share the parts.
        parts: how it is split.
        weights: of the parts.
        batches: the micro-batches, where the loader left them.
        parameters: whose ``.grad``, empty now, is filled.
        progress: is told what is running.
        differentiate: whether gradients are wanted.

    Returns:
        What was added up.

    Raises:
        LossError: the loss uses parameters that are no part of the model.
    """
    seeds = seeds_for(len(parts))  # before a collate draws, as where a forward counts
    kept = list(batches)  # collated by one thread, in their order
    _refresh(task, devices)
    in_turns = devices.drew_on_host.get(differentiate, True)
    before = None if in_turns else Snapshot(task.modules)
    try:
        run = _Run(task, devices, parts, weights, seeds, progress, differentiate)
        with _levered(task, devices):
            sums = run.over(kept, parameters, in_turns=in_turns)
        if run.drew_on_host and before is not None:
            for parameter in parameters:
                parameter.grad = None
            before.restore()
            _refresh(task, devices)
            run = _Run(task, devices, parts, weights, seeds, progress, differentiate)
            with _levered(task, devices):
                sums = run.over(kept, parameters, in_turns=True)
        devices.drew_on_host[differentiate] = run.drew_on_host
        _warn_of_buffers(devices)
    finally:
        for lane in devices.lanes:
            if lane.copy is not None:
                lane.copy.clear()
    return sums


def _refresh(task: "Task", devices: Devices) -> None:
    for lane in devices.lanes:
        if lane.copy is not None:
            lane.copy.refresh(task.modules)


@contextlib.contextmanager
def _levered(task: "Task", devices: Devices) -> Iterator[None]:
    """Puts the levers of a plan on the model and on each copy, which know nothing of one another."""
    with contextlib.ExitStack() as stack:
        for lane in devices.lanes:
            model = task.model if lane.copy is None else lane.copy.translated(task.model)
            stack.enter_context(task.levered(model))
        yield


def count_draws_alike(task: "Task", batches: Iterator[Any], seeds: Sequence[int]) -> Iterator[Any]:
    """The micro-batches for a forward that only counts, each with the random numbers that it will get later.

    Args:
        task: the logical batch.
        batches: the micro-batches, where the loader left them.
        seeds: of the micro-batches, from before they were made.
    """
    home, host = DeviceDraws(task.settings.device, seeds), HostDraws(seeds)
    for number, batch in enumerate(_there(task, task.settings.device, batches)):
        host.begin(number)
        home.begin(number)
        yield batch


class _Run:
    """One attempt at a pass."""

    def __init__(
        self,
        task: "Task",
        devices: Devices,
        parts: Sequence[Part],
        weights: Weights,
        seeds: Sequence[int],
        progress: Progress,
        differentiate: bool,
    ) -> None:
        self._task = task
        self._devices = devices
        self._parts = parts
        self._weights = weights
        self._seeds = seeds
        self._progress = progress
        self._differentiate = differentiate
        self._stop = threading.Event()
        self._turn = threading.Lock()
        self._in_turns = True
        self._host: HostDraws
        self._outside: list[OutsideLeaves] = []
        self.drew_on_host = False

    def over(self, batches: list[Any], parameters: Sequence[torch.Tensor], *, in_turns: bool) -> Sums:
        """Runs the micro-batches, and adds up on the home device what the others have.

        Args:
            batches: the micro-batches.
            parameters: whose ``.grad`` is filled.
            in_turns: whether only one runs at a time, with seeds of its own.
        """
        self._in_turns = in_turns
        lanes = self._devices.lanes
        with contextlib.ExitStack() as stack:
            begin = Beginnings(self._task, self._parts, self._progress, stack, self._differentiate)
            self._host = HostDraws(self._seeds)
            stack.callback(self._host.end)
            accumulations = [self._accumulation(lane, parameters) for lane in lanes]
            numbers = self._devices.assign(self._parts)
            workers = [
                _Worker(self, lane, accumulation, mine, batches)
                for lane, accumulation, mine in zip(lanes, accumulations, numbers, strict=True)
            ]
            works = [(lanes[0].device, lambda: workers[0].work(begin))]
            works += [(worker.lane.device, _bound(worker, begin.seed)) for worker in workers[1:]]
            self._raise(run_together(self._devices.home, works, self._stop), workers)
            if not in_turns:
                self._host.look()
            self.drew_on_host = self._host.drew_here
            self._check_outside()
            for lane, other in zip(lanes[1:], accumulations[1:], strict=True):
                if lane.copy is not None:
                    accumulations[0].absorb_(other, lane.copy.pairs)
            return accumulations[0].close()

    def _accumulation(self, lane: Lane, parameters: Sequence[torch.Tensor]) -> Accumulation:
        task, settings, outside = self._task, self._task.settings, None
        model, loss_fn, mine = task.model, task.loss_fn, list(parameters)
        if lane.copy is not None:
            settings = replace(settings, device=lane.device, inputs=_inputs_of(settings, lane))
            model, loss_fn = lane.copy.translated(model), lane.copy.translated(loss_fn)
            mine = [copy for one in parameters if (copy := lane.copy.leaf_of(one)) is not None]
            if self._differentiate and not self._devices.is_checked:
                outside = OutsideLeaves(copy for _, copy in lane.copy.pairs)
                self._outside.append(outside)
        return Accumulation(
            model, loss_fn, self._weights, mine, settings, rows=self._task.splittable.rows_in(self._parts),
            outside=outside, differentiate=self._differentiate,
        )  # fmt: skip

    def _check_outside(self) -> None:
        found = [pair for outside in self._outside for pair in outside.found]
        for leaf, gradient in found:
            leaf.grad = gradient
        if found:
            raise LossError(
                f"with devices= the loss reaches {len(found)} leaves, the first of shape {tuple(found[0][0].shape)}, "
                "that are parameters neither of the model that is passed to loss_fn nor of a loss that is a module; "
                "only these are copied to each device. Make them parameters of the model, or make loss_fn a "
                "torch.nn.Module that has them"
            )
        if self._differentiate:
            self._devices.is_checked = True

    def _raise(self, errors: list[BaseException | None], workers: Sequence["_Worker"]) -> None:
        failed = [pair for pair in zip(errors, workers, strict=True) if pair[0] is not None]
        if not failed:
            return
        # One that would be raised whatever the size of micro-batches comes first.
        error, worker = min(failed, key=lambda pair: pair[0] is not None and is_out_of_memory(pair[0]))
        self._progress.text = where = f"{worker.progress()} on {worker.lane.device}"
        if error is not None:
            error.add_note(f"in {where}, one of {len(workers)} devices that share the batch")
            raise error


def _bound(worker: "_Worker", seed: int | None) -> Any:
    return lambda: worker.work_elsewhere(seed)


class _Worker:
    """What runs on one device."""

    def __init__(
        self, run: _Run, lane: Lane, accumulation: Accumulation, numbers: Iterator[int], batches: list[Any]
    ) -> None:
        self._run = run
        self.lane = lane
        self.progress = Progress("the start")
        self._accumulation = accumulation
        self._numbers = numbers
        self._batches = batches
        self._draws = DeviceDraws(lane.device, run._seeds)

    def work_elsewhere(self, seed: int | None) -> None:
        """Runs the micro-batches of another device than home.

        Args:
            seed: of masks that do not depend on the split.
        """
        run, copy = self._run, self.lane.copy
        task = run._task
        if copy is not None:
            model, loss_fn = copy.translated(task.model), copy.translated(task.loss_fn)
            task = replace(task, model=model, loss_fn=loss_fn, modules=(), every_module=())
        with contextlib.ExitStack() as stack:
            self.work(Beginnings(task, run._parts, self.progress, stack, run._differentiate, seed=seed))

    def work(self, begin: Beginnings) -> None:
        """Runs the micro-batches.

        Args:
            begin: is told of each.
        """
        with self._draws.put_back(), contextlib.closing(self._each(begin)) as micro_batches:
            self._accumulation.collect(micro_batches)
        if self._draws.drew:
            self._run._host.drew = True

    def _each(self, begin: Beginnings) -> Generator[tuple[int, Any], None, None]:
        run, order = self._run, list[int]()
        for batch in _there(run._task, self.lane.device, self._taken(order)):
            number = order.pop(0)
            with run._turn if run._in_turns else contextlib.nullcontext():
                if run._stop.is_set():
                    return
                begin.begin(number)
                self.progress.micro_batch(number, len(run._parts))
                if run._in_turns:
                    run._host.begin(number)
                self._draws.begin(number)
                yield number, batch
                self._draws.look()
                if run._in_turns:
                    run._host.look()

    def _taken(self, order: list[int]) -> Iterator[Any]:
        for number in self._numbers:
            order.append(number)
            yield self._batches[number]


def _there(task: "Task", device: torch.device, batches: Iterator[Any]) -> Iterator[Any]:
    return batches if task.splittable.lies_on(device) else moved(batches, device)


def _inputs_of(settings: Settings, lane: Lane) -> tuple[torch.Tensor, ...] | None:
    if settings.inputs is None or lane.copy is None:
        return None
    found = [lane.copy.leaf_of(one) for one in settings.inputs]
    if any(one is None for one in found):
        raise BatchError(
            "with devices= one of inputs is no parameter of the model, so the other devices have no copy of it; "
            "expected parameters of the model"
        )
    return tuple(one for one in found if one is not None)


def _warn_of_buffers(devices: Devices) -> None:
    names = [f"{name} on {lane.device}" for lane in devices.lanes if lane.copy for name in lane.copy.changed_buffers()]
    if names and not devices.was_warned:
        devices.was_warned = True
        warnings.warn(
            f"the forward writes to {len(names)} buffers of the copies ({', '.join(names[:3])}): what the other "
            "devices write is lost, as under nn.DataParallel, and only what the micro-batches of the first device "
            "write is kept",
            AnyBatchWarning,
            stacklevel=2,
        )
