"""One pass over a logical batch whose micro-batches run on several devices of this process, side by side."""

import contextlib
import random
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.errors import BatchError, LossError, warn
from anybatch.loss.accumulate import Accumulation
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.parallel.devices import Devices, ModelCopy, Placement
from anybatch.parallel.workers import run_together
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.randomness import RandomState
from anybatch.update.passes import Beginnings, Progress, Task
from anybatch.update.transaction import Snapshot, is_out_of_memory

_SEEDS = 2**62


def seeds_for(micro_batches: int) -> list[int]:
    """A seed for each micro-batch, by torch's generator for the CPU, which stays as it is."""
    with without_modes():
        generator = torch.Generator(device="cpu").set_state(torch.get_rng_state())
        first = int(torch.randint(_SEEDS, (), generator=generator, device="cpu").item())
        generator.manual_seed(first)  # the next batch begins one draw later, and shares none of these
        found: list[int] = torch.randint(_SEEDS, (micro_batches,), generator=generator, device="cpu").tolist()
    return found


class HostDraws:
    """The generators of the host, which all threads share: those of torch for the CPU, of Python and of numpy.

    Attributes:
        drew: whether anything was seen to draw from any generator, so that the next batch has to get other numbers.
        drew_here: whether it was one of these.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._natural = self._before = _now()
        self.drew = self.drew_here = False

    def begin(self, number: int) -> None:
        """Seeds them for a micro-batch that runs alone."""
        seed = self._seeds[number]
        with without_modes():
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        self._before = _now()

    def look(self) -> None:
        """Looks whether anything was drawn since the micro-batch began, or since all of them did."""
        with without_modes():
            if not self._before.is_now():
                self.drew = self.drew_here = True

    def end(self) -> None:
        """Puts them back to before the first micro-batch, and one draw further if anything was drawn anywhere."""
        self._natural.restore()
        if self.drew:
            with without_modes():
                torch.randint(_SEEDS, (), device="cpu")


def _now() -> RandomState:
    with without_modes():
        return RandomState()


class DeviceDraws:
    """The generator of an accelerator, which no other thread uses."""

    def __init__(self, device: torch.device, seeds: Sequence[int]) -> None:
        self._device = device
        self._seeds = seeds
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._before: Any = None
        self.drew = False  # whether anything was drawn from it

    def begin(self, number: int) -> None:
        """Seeds it for a micro-batch; the device is the current one of its kind."""
        if self._module is not None:
            self._module.manual_seed(self._seeds[number])
            self._before = self._module.get_rng_state(self._device)

    def look(self) -> None:
        """Looks whether anything was drawn since the micro-batch began."""
        if self._module is not None and not self.drew:
            with without_modes():
                self.drew = not torch.equal(self._before, self._module.get_rng_state(self._device))

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Puts it back at the end of the block: what is drawn from it elsewhere does not depend on the split."""
        if self._module is None:
            yield
            return
        state = self._module.get_rng_state(self._device)
        try:
            yield
        finally:
            self._module.set_rng_state(state, self._device)


def count_draws_alike(task: Task, batches: Iterator[Any], seeds: Sequence[int]) -> Iterator[Any]:
    """The micro-batches for a forward that only counts, each with the random numbers that it will get later."""
    home, host = DeviceDraws(task.settings.device, seeds), HostDraws(seeds)
    for number, batch in enumerate(task.there(batches)):
        host.begin(number)
        home.begin(number)
        yield batch


@dataclass
class OverDevices:
    """A pass over a logical batch on several devices, which may be gone through a second time."""

    task: Task
    devices: Devices
    parts: Sequence[Part]
    weights: Weights
    progress: Progress
    differentiate: bool
    in_turns: bool = False
    drew_on_host: bool = False  # from the generators that all threads share

    def __post_init__(self) -> None:
        self.seeds = seeds_for(len(self.parts))  # before a collate draws, as where a forward counts
        self.stop, self.turn = threading.Event(), threading.Lock()
        self.host: HostDraws

    def run(self, batches: Iterator[Any], parameters: Sequence[torch.Tensor]) -> Sums:
        """Goes through the parts once, on all devices.

        The first time one micro-batch runs at a time, to see whether the model draws from the random generators of the
        host, which all threads share. If it does, this goes on so, each with a seed of its own. If it begins to draw
        later, what ran side by side is thrown away and runs again.
        """
        kept = list(batches)  # collated by one thread, in their order
        in_turns = self.devices.drew_on_host.get(self.differentiate, True)
        before = None if in_turns else Snapshot(self.task.modules)
        try:
            sums = self.over(kept, parameters, in_turns=in_turns)
            if self.drew_on_host and before is not None:
                for parameter in parameters:
                    parameter.grad = None
                before.restore()
                sums = self.over(kept, parameters, in_turns=True)
            self.devices.drew_on_host[self.differentiate] = self.drew_on_host
            _warn_of_buffers(self.devices)
        finally:
            for copy in self.devices.copies:
                copy.clear()
        return sums

    def over(self, batches: list[Any], parameters: Sequence[torch.Tensor], *, in_turns: bool) -> Sums:
        """Runs the micro-batches, and adds up on the home device what the others have."""
        self.in_turns = in_turns
        for copy in self.devices.copies:
            copy.refresh(self.task.modules)
        tasks = [_on(placement, self.task) for placement in self.devices.placements]
        with contextlib.ExitStack() as stack:
            for one in tasks:  # those of a plan, on the model and on each copy, which know nothing of one another
                stack.enter_context(one.optimized(one.model))
            begin = Beginnings(self.task, self.parts, self.progress, stack, self.differentiate)
            self.host = HostDraws(self.seeds)
            stack.callback(self.host.end)
            placements = zip(self.devices.placements, tasks, self.devices.assign(self.parts), strict=True)
            first, *others = workers = [_Worker(self, *each, batches, parameters) for each in placements]
            works = [(first.placement.device, partial(first.work, begin))]
            works += [(worker.placement.device, partial(worker.work_elsewhere, begin.seed)) for worker in others]
            self._raise(run_together(self.devices.home, works, self.stop), workers)
            if not in_turns:
                self.host.look()
            self.drew_on_host = self.host.drew_here
            self._check_outside(others)
            for worker in others:
                if worker.placement.copy is not None:
                    first.accumulation.absorb_(worker.accumulation, worker.placement.copy.pairs)
            return first.accumulation.close()

    def _check_outside(self, workers: Sequence["_Worker"]) -> None:
        found = [pair for worker in workers if worker.outside is not None for pair in worker.outside.found]
        for leaf, gradient in found:
            leaf.grad = gradient
        if found:
            raise LossError(
                f"with devices= the loss reaches {len(found)} leaves, the first of shape {tuple(found[0][0].shape)}, "
                "that are parameters neither of the model that is passed to loss_fn nor of a loss that is a module; "
                "only these are copied to each device. Make them parameters of the model, or make loss_fn a "
                "torch.nn.Module that has them"
            )
        self.devices.is_checked |= self.differentiate

    def _raise(self, errors: list[BaseException | None], workers: Sequence["_Worker"]) -> None:
        failed = [(error, worker) for error, worker in zip(errors, workers, strict=True) if error is not None]
        if not failed:
            return
        # One that would be raised whatever the size of micro-batches comes first.
        error, worker = min(failed, key=lambda pair: is_out_of_memory(pair[0]))
        self.progress.text = where = f"{worker.progress()} on {worker.placement.device}"
        error.add_note(f"in {where}, one of {len(workers)} devices that share the batch")
        raise error


class _Worker:
    """What runs on one device."""

    def __init__(
        self, run: OverDevices, placement: Placement, task: Task, numbers: Sequence[int], batches: list[Any],
        parameters: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._run, self.placement, self._task, self._numbers, self._batches = run, placement, task, numbers, batches
        self.progress = Progress("the start")
        self._number = 0  # of the micro-batch that runs
        self._draws = DeviceDraws(placement.device, run.seeds)
        self.outside: OutsideLeaves | None = None
        if placement.copy is not None:
            parameters = [copy for one in parameters if (copy := placement.copy.leaf_of(one)) is not None]
            if run.differentiate and not run.devices.is_checked:
                self.outside = OutsideLeaves(copy for _, copy in placement.copy.pairs)
        self.accumulation = Accumulation(
            task.model, task.loss_fn, run.weights, parameters, task.settings, rows=task.splittable.rows_in(run.parts),
            outside=self.outside, differentiate=run.differentiate, on_loss=task.on_loss,
        )  # fmt: skip

    def work_elsewhere(self, seed: int | None) -> None:
        """Runs the micro-batches of another device than home."""
        run = self._run
        with contextlib.ExitStack() as stack:
            self.work(Beginnings(self._task, run.parts, self.progress, stack, run.differentiate, seed=seed))

    def work(self, begin: Beginnings) -> None:
        """Runs the micro-batches."""
        with self._draws.put_back(), contextlib.closing(self._each(begin)) as micro_batches:
            self.accumulation.collect(micro_batches, iter(lambda: self._number, None))
        if self._draws.drew:  # never set back to False, since threads write here side by side
            self._run.host.drew = True

    def _each(self, begin: Beginnings) -> Generator[Any, None, None]:
        run, order = self._run, list[int]()
        for batch in self._task.there(self._taken(order)):
            number = order.pop(0)
            with run.turn if run.in_turns else contextlib.nullcontext():
                if run.stop.is_set():
                    return
                begin.begin(number)
                self.progress.micro_batch(number, len(run.parts))
                if run.in_turns:
                    run.host.begin(number)
                self._draws.begin(number)
                self._number = number
                yield batch
                self._draws.look()
                if run.in_turns:
                    run.host.look()

    def _taken(self, order: list[int]) -> Iterator[Any]:
        for number in self._numbers:
            order.append(number)
            yield self._batches[number]


def _on(placement: Placement, task: Task) -> Task:
    copy = placement.copy
    if copy is None:
        return task
    settings = replace(task.settings, device=placement.device, inputs=_inputs_of(task, copy))
    model, loss_fn = copy.translated(task.model), copy.translated(task.loss_fn)
    return replace(task, model=model, loss_fn=loss_fn, settings=settings, modules=(), every_module=())


def _inputs_of(task: Task, copy: ModelCopy) -> tuple[torch.Tensor, ...] | None:
    if task.settings.inputs is None:
        return None
    found = [copy.leaf_of(one) for one in task.settings.inputs]
    if any(one is None for one in found):
        raise BatchError(
            "with devices= one of inputs is no parameter of the model, so the other devices have no copy of it; "
            "expected parameters of the model"
        )
    return tuple(one for one in found if one is not None)


def _warn_of_buffers(devices: Devices) -> None:
    names = [
        f"{name} on {placement.device}"
        for placement in devices.placements
        if placement.copy
        for name in placement.copy.changed_buffers()
    ]
    if names and not devices.was_warned:
        devices.was_warned = True
        warn(
            f"the forward writes to {len(names)} buffers of the copies ({', '.join(names[:3])}): what the other "
            "devices write is lost, as under nn.DataParallel, and only what the micro-batches of the first device "
            "write is kept",
        )
