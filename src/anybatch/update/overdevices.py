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
from anybatch.batch.trees import leaves
from anybatch.errors import BatchError, LossError, warn
from anybatch.loss.accumulate import Accumulation
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.parallel.devices import Devices, ModelCopy, Placement
from anybatch.parallel.workers import run_together
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.randomness import RandomState, generator_state
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


class Draws:
    """Random generators that get a seed for each micro-batch: those of the host, or that of an accelerator.

    Those of the host are torch's for the CPU, Python's and numpy's. All threads share them, so they are seeded only
    while one micro-batch runs at a time. No other thread uses that of an accelerator.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | None = None) -> None:
        self._seeds, self._device = seeds, device
        self._natural = self._before = self._now()
        self.drew = False  # whether anything was seen to draw from them

    def _now(self) -> Any:
        with without_modes():
            return RandomState() if self._device is None else generator_state(self._device)

    def begin(self, number: int) -> None:
        """Seeds them for a micro-batch; an accelerator is the current one of its kind."""
        seed = self._seeds[number]
        if self._device is not None:
            getattr(torch, self._device.type).manual_seed(seed)
        else:
            with without_modes():
                torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(seed % 2**32)
        self._before = self._now()

    def look(self) -> None:
        """Looks whether anything was drawn since the micro-batch began, or since all of them did."""
        with without_modes():
            now = self._before.is_now() if self._device is None else torch.equal(self._before, self._now())
            self.drew = self.drew or not now

    def put_back(self) -> None:
        """Puts them back to before the first micro-batch: what is drawn elsewhere does not depend on the split."""
        if self._device is None:
            self._natural.restore()
        else:
            getattr(torch, self._device.type).set_rng_state(self._natural, self._device)


def _draws_of(seeds: Sequence[int], device: torch.device) -> list[Draws]:
    return [] if device.type == "cpu" else [Draws(seeds, device)]


def count_draws_alike(task: Task, batches: Iterator[Any], seeds: Sequence[int]) -> Iterator[Any]:
    """The micro-batches for a forward that only counts, each with the random numbers that it will get later."""
    draws = [Draws(seeds), *_draws_of(seeds, task.settings.device)]
    for number, batch in enumerate(task.there(batches)):
        for each in draws:
            each.begin(number)
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

    def __post_init__(self) -> None:
        self.seeds = seeds_for(len(self.parts))  # before a collate draws, as where a forward counts
        self.stop, self.turn = threading.Event(), threading.Lock()

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
            sums, drew = self._over(kept, parameters, in_turns=in_turns)
            if drew and before is not None:
                for parameter in parameters:
                    parameter.grad = None
                before.restore()
                sums, drew = self._over(kept, parameters, in_turns=True)
            self.devices.drew_on_host[self.differentiate] = drew
            _warn_of_buffers(self.devices)
        finally:
            for copy in self.devices.copies:
                copy.clear()
        return sums

    def _over(self, batches: list[Any], parameters: Sequence[torch.Tensor], *, in_turns: bool) -> tuple[Sums, bool]:
        """Runs the micro-batches, adds up on the home device; the sums, and whether any drew from the host."""
        for copy in self.devices.copies:
            copy.refresh(self.task.modules)
        tasks = [_on(placement, self.task) for placement in self.devices.placements]
        with contextlib.ExitStack() as stack:
            for one in tasks:  # those of a plan, on the model and on each copy, which know nothing of one another
                stack.enter_context(one.optimized(one.model))
            begin = Beginnings(self.task, self.parts, self.progress, stack, self.differentiate)
            host = Draws(self.seeds)
            placements = zip(self.devices.placements, tasks, self.devices.assign(self.parts), strict=True)
            workers = [_Worker(self, *each, batches, parameters, host if in_turns else None) for each in placements]
            stack.callback(_put_back, [host, *(each for worker in workers for each in worker.own_draws)])
            first, *others = workers
            first.progress = self.progress
            works = [(first.placement.device, partial(first.work, begin))]
            works += [(worker.placement.device, partial(worker.work_elsewhere, begin.seed)) for worker in others]
            self._raise(run_together(self.devices.home, works, self.stop), workers)
            if not in_turns:
                host.look()
            self._check_outside(others)
            for worker in others:
                if worker.placement.copy is not None:
                    first.accumulation.absorb_(worker.accumulation, worker.placement.copy.pairs)
            return first.accumulation.close(), host.drew

    def _check_outside(self, workers: Sequence["_Worker"]) -> None:
        found = [pair for worker in workers if worker.outside is not None for pair in worker.outside.found]
        for leaf, gradient in found:
            leaf.grad = gradient
        if found:
            shape = tuple(found[0][0].shape)
            given = (one for batch in self.task.splittable.batches for one in leaves(batch, "batch"))
            if label := next((label for label, _, one in given if one is found[0][0]), ""):
                raise LossError(
                    f"with devices= {label} of shape {shape} requires a gradient, and only parameters of the model "
                    "get one. If it is trained, make it part of the model, such as a torch.nn.Embedding, and put "
                    "its indices into the batch; otherwise .detach() it, or train on one device"
                )
            raise LossError(
                f"with devices= the loss reaches {len(found)} leaves, the first of shape {shape}, that are "
                "parameters neither of the model passed to loss_fn nor of a loss module; only these are copied to "
                "each device. Make them parameters of the model, or make loss_fn a torch.nn.Module that has them"
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


def _put_back(draws: Sequence[Draws]) -> None:
    for each in draws:
        each.put_back()
    if any(each.drew for each in draws):  # so that the next batch gets other numbers
        with without_modes():
            torch.randint(_SEEDS, (), device="cpu")


class _Worker:
    """What runs on one device."""

    def __init__(
        self, run: OverDevices, placement: Placement, task: Task, numbers: Sequence[int], batches: list[Any],
        parameters: Sequence[torch.Tensor], host: Draws | None,
    ) -> None:  # fmt: skip
        self._run, self.placement, self._task, self._numbers, self._batches = run, placement, task, numbers, batches
        self.progress = Progress("the start")
        self.own_draws = _draws_of(run.seeds, placement.device)
        self._host = host  # its generators, where micro-batches run one at a time
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
        with contextlib.closing(self._each(begin)) as micro_batches:
            self.accumulation.collect(micro_batches, iter(self._numbers))

    def _each(self, begin: Beginnings) -> Generator[Any, None, None]:
        numbers = iter(self._numbers)
        draws = [*self.own_draws, *([] if self._host is None else [self._host])]
        for batch in self._task.there(self._batches[number] for number in self._numbers):
            number = next(numbers)
            with contextlib.nullcontext() if self._host is None else self._run.turn:
                if self._run.stop.is_set():
                    return
                begin.begin(number)
                for each in draws:
                    each.begin(number)
                yield batch
                for each in draws:
                    each.look()


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
            "with devices= one of inputs is not a parameter of the model, so the other devices have no copy of it; "
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
            f"the forward pass writes to {len(names)} buffers of the copies ({', '.join(names[:3])}): what the "
            "other devices write is lost, as under nn.DataParallel, and only what the micro-batches of the first "
            "device write is kept",
        )
