"""Runs the micro-batches of a step that is planned, and takes every trace of it off again."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from anybatch.batch.batches import Part
from anybatch.batch.moving import to_device
from anybatch.loss.accumulate import Accumulation, Settings
from anybatch.loss.coupling import Coupled, tensors_of
from anybatch.loss.losses import as_coupled
from anybatch.loss.reducing import ALONE
from anybatch.loss.weights import Weights
from anybatch.memory.application import apply_optimizations
from anybatch.memory.losschunks import Applied
from anybatch.memory.overwritten import Overwritten
from anybatch.parallel.workers import without_autocast_cache
from anybatch.planning.microbatches import batch_for_loss
from anybatch.planning.recipe import Recipe
from anybatch.planning.subjects import Subject
from anybatch.records.means import Mean
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import SideEffects
from anybatch.update.batchnorm import batch_norm_as
from anybatch.update.transaction import Snapshot


def run_for_real(subject: Subject, part: Part, recipe: Recipe, *, clock: Callable[[], float]) -> float:
    """Runs a forward and a backward for one micro-batch, takes every trace of it off, and gives its time."""
    if subject.behaviour.writes_elsewhere is None and not subject.is_scripted:
        _seconds_of(subject, part, recipe, clock)  # which finds that out, and takes longer
    return _seconds_of(subject, part, recipe, clock)


def _seconds_of(subject: Subject, part: Part, recipe: Recipe, clock: Callable[[], float]) -> float:
    batch = to_device(batch_for_loss(subject, part), subject.settings.device)
    rows, writes = len(part.samples), subject.splittable.writes()
    with (
        undisturbed(subject) as outside,
        batch_norm_as(subject.batch_norm, subject.roots, 1),
        applied(subject, recipe, False),
    ):
        settings = settings_for(subject, recipe)
        accumulation = micro_batches_of(subject, recipe, rows, 1, subject.parameters, settings, outside(()))
        before = clock()
        accumulation.run([batch])
        seconds = clock() - before
    writes.refuse(subject.splittable.batches, "once the plan is made")
    return seconds


class _EncoderAlone:
    """The encoder of a coupled loss with a loss that adds up over micro-batches, which is planned as any other."""

    def __init__(self, coupled: Coupled) -> None:
        self._coupled = coupled

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self._coupled.user_functions

    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the sum of the means of what the encoder gives."""
        tensors = tensors_of(self._coupled.encode(model, batch))
        means = [one.mean() for one in tensors if one is not None and one.requires_grad]
        return sum(means[1:], start=means[0]) if means else torch.zeros((), requires_grad=True, device="cpu")


class Uncounted(Accumulation):
    """A pass with ``Mean`` s in the form of scalars, whose counts nobody has to read."""

    def _checked(self, index: int, loss: Any, name: str) -> Any:
        found = super()._checked(index, loss, name)
        return found.total if isinstance(found, Mean) else found


def micro_batches_of(
    subject: Subject, recipe: Recipe, rows: int, count: int, parameters: Sequence[torch.Tensor], settings: Settings,
    outside: OutsideLeaves,
) -> Accumulation:  # fmt: skip
    """A pass over so many micro-batches of so many samples; of a coupled loss its encoder runs alone."""
    loss_fn: Any = subject.loss_fn
    if (coupled := as_coupled(loss_fn)) is not None:
        loss_fn = _EncoderAlone(coupled)
    elif recipe.chunks is not None:
        loss_fn = loss_fn.at(recipe.chunks)
    weights = Weights([{"": rows}] * count)
    return Uncounted(subject.model, loss_fn, weights, parameters, settings, rows=[rows] * count, outside=outside)


def settings_for(subject: Subject, recipe: Recipe = Recipe()) -> Settings:  # noqa: B008 - it is frozen
    """The settings of a run that nobody steps on.

    Without a scaler, which scales only, and without float32 buffers for low-precision gradients and sums of sparse
    ones, whose bytes are known; and by this process alone.
    """
    own = subject.settings_at(recipe.autocast)
    kept = own.kept_graphs if recipe.keep is None else recipe.keep
    return replace(own, scaler=None, policy="native", reducer=ALONE, kept_graphs=kept)


def applied(subject: Subject, recipe: Recipe, simulate: bool) -> Applied:
    """Puts memory optimizations on, which a context takes off."""
    return apply_optimizations(
        subject.model, recompute=recipe.recompute, offload=recipe.offload, head=recipe.head,
        loss_chunks=recipe.loss_chunks, simulate_offload=simulate,
    )  # fmt: skip


def _python_state(subject: Subject) -> SideEffects:
    functions = (subject.loss_fn, *getattr(subject.loss_fn, "user_functions", ()))
    return SideEffects([*subject.roots, *functions], tensors=False)


@contextlib.contextmanager
def random_state_kept(subject: Subject) -> Iterator[None]:
    """Puts random state back, also what a ``collate`` has drawn."""
    before = RandomState({parameter.device for parameter in subject.parameters})
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def left_as_it_was(subject: Subject) -> Iterator[None]:
    """Puts random state back, and looks once for all state in Python that runs within its block are to put back.

    The look takes time by the size of that state, so that it is for blocks with runs only.
    """
    with random_state_kept(subject):
        subject.behaviour.python = _python_state(subject)
        try:
            yield
        finally:
            subject.behaviour.python = None


@contextlib.contextmanager
def undisturbed(
    subject: Subject, *, is_fake: bool = False
) -> Iterator[Callable[[Sequence[torch.Tensor]], OutsideLeaves]]:
    """Puts gradients, buffers, random state, modes, plain attributes and whatever is written to back, bitwise.

    Writes into weights and other tensors, as where a forward moves an average of weights, are seen operation by
    operation, which is left out once a run has shown that there are none.

    Python collects no garbage meanwhile, so that tensors in a cycle of references, such as those of a cache that knows
    its model, count to the end and not until some moment that depends on everything else in the process.

    The value of the context makes what finds leaves that the loss reaches besides some parameters.
    """
    parameters = subject.parameters
    gradients = [parameter.grad for parameter in parameters]
    python = subject.behaviour.python or _python_state(subject)
    devices = {parameter.device for parameter in parameters if not parameter.is_meta}
    before = Snapshot(subject.roots, devices, subject.loss_fn)
    made: list[OutsideLeaves] = []

    def outside(known: Sequence[torch.Tensor]) -> OutsideLeaves:
        made.append(OutsideLeaves([*parameters, *known]))
        return made[-1]

    for parameter in parameters:
        parameter.grad = None
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            contextlib.nullcontext() if subject.devices is None else without_autocast_cache(),
            contextlib.nullcontext() if is_fake else _writes_taken_back(subject),
        ):
            yield outside
    finally:
        if collects:
            gc.enable()
        found = [pair for one in made for pair in one.found]
        for parameter, gradient in [*zip(parameters, gradients, strict=True), *found]:
            parameter.grad = gradient
        python.restore()
        before.restore(warns=False)


@contextlib.contextmanager
def _writes_taken_back(subject: Subject) -> Iterator[None]:
    behaviour = subject.behaviour
    if behaviour.writes_elsewhere is False or subject.is_scripted:
        yield
        return
    overwritten = Overwritten(subject.buffers)
    try:
        with overwritten:
            yield
        if behaviour.writes_elsewhere is None:
            behaviour.writes_elsewhere = False
    finally:
        behaviour.note_elsewhere(overwritten.bytes)
        overwritten.restore()
