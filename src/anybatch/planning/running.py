"""Runs the micro-batches of a step that is planned, and takes every trace of it off again."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.gradient.accumulate import Accumulation, Settings
from anybatch.gradient.losses import LossFunction
from anybatch.gradient.pieces import InPieces, Piece, Place
from anybatch.gradient.reducing import ALONE
from anybatch.gradient.weights import Weights
from anybatch.levers.application import apply_levers
from anybatch.parallel.workers import without_autocast_cache
from anybatch.planning.collating import bytes_in, collated, collated_on_fakes
from anybatch.planning.recipe import Recipe
from anybatch.planning.subjects import Subject
from anybatch.planning.windowshapes import differ, part_of_window
from anybatch.records.means import Mean
from anybatch.tensors.batches import Part
from anybatch.tensors.fakes import Fakes
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.meter import storages_of
from anybatch.tensors.modules import is_scripted, modules_of
from anybatch.tensors.moving import to_device
from anybatch.tensors.overwritten import Overwritten
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import SideEffects
from anybatch.tensors.trees import leaves, map_leaves, tensors_within
from anybatch.tensors.writes import writable
from anybatch.update.batchnorm import batch_norm_as
from anybatch.update.transaction import Snapshot


def run_for_real(subject: Subject, part: Part, levers: Recipe, *, clock: Callable[[], float]) -> float:
    """Runs a forward and a backward for one micro-batch, and takes every trace of it off again.

    Args:
        subject: what is planned.
        part: the samples of the micro-batch.
        levers: what is traded for memory.
        clock: is read before and after.

    Returns:
        The difference of the clock.
    """
    if subject.habits.writes_elsewhere is None and not _is_scripted(subject):
        _seconds_of(subject, part, levers, clock)  # which finds that out, and takes longer
    return _seconds_of(subject, part, levers, clock)


def _seconds_of(subject: Subject, part: Part, levers: Recipe, clock: Callable[[], float]) -> float:
    batch = to_device(batch_for_loss(subject, part), subject.settings.device)
    rows, writes = len(part.samples), subject.splittable.writes()
    with (
        undisturbed(subject) as outside,
        batch_norm_as(subject.batch_norm, subject.roots, 1),
        applied(subject, levers, False),
    ):
        accumulation = Accumulation(
            subject.model, plain_losses(subject.loss_fn), Weights([{"": rows}]), subject.parameters,
            settings_for(subject, levers), rows=[rows], outside=outside(()),
        )  # fmt: skip
        before = clock()
        accumulation.run([batch])
        seconds = clock() - before
    writes.refuse(subject.splittable.batches, "once the plan is made")
    return seconds


def plain_losses(loss_fn: LossFunction) -> LossFunction:
    """The loss function with ``Mean`` s in the form of scalars, whose counts nobody has to read.

    Args:
        loss_fn: the user's; one that gives its losses in pieces stays one.
    """
    return _PlainPieces(loss_fn) if isinstance(loss_fn, InPieces) else with_plain_losses(loss_fn)


class _PlainPieces(InPieces):
    """A loss function in pieces, with ``Mean`` s in the form of scalars."""

    def __init__(self, loss_fn: InPieces) -> None:
        self._loss_fn = loss_fn

    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the losses at once."""
        return with_plain_losses(self._loss_fn)(model, batch)

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Gives the pieces."""
        for piece in self._loss_fn.pieces(model, batch, place):
            given = [piece._replace(result=_plain(piece.result))]
            del piece
            yield given.pop()  # nothing of it stays alive here while it is differentiated


def _plain(result: Any) -> Any:
    """One loss, or a mapping of losses, without counts."""
    if isinstance(result, Mapping):
        return {name: _plain(loss) for name, loss in result.items()}
    return result.total * 1.0 if isinstance(result, Mean) else result


def with_plain_losses(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives losses, with ``Mean`` s in the form of scalars.

    Args:
        function: the user's, of any arguments.
    """

    def named(item: Any) -> Any:
        return (item[0], _plain(item[1])) if isinstance(item, tuple) else _plain(item)

    def yielding(generator: Any) -> Generator[Any, None, Any]:
        while True:
            try:
                item = next(generator)
            except StopIteration as stop:
                return stop.value
            yield named(item)
            del item

    def called(*arguments: Any) -> Any:
        result = function(*arguments)
        if hasattr(result, "send"):
            return yielding(result)
        if isinstance(result, tuple) and len(result) == 2 and not isinstance(result, Mean):
            return _plain(result[0]), result[1]
        return _plain(result)

    return called


def settings_for(subject: Subject, recipe: Recipe = Recipe()) -> Settings:  # noqa: B008 - it is frozen
    """The settings of a run that nobody steps on.

    Without a scaler, which scales only, and without float32 buffers for low-precision gradients and sums of sparse
    ones, whose bytes are known; and by this process alone.

    Args:
        subject: what is planned.
        recipe: how it is run.
    """
    kept, length = subject.settings.kept_graphs, subject.settings.chunk_length
    return replace(
        subject.settings, scaler=None, policy="native", reducer=ALONE, sums_sparse=False,
        kept_graphs=kept if recipe.keep is None else recipe.keep,
        chunk_length=length if recipe.chunk is None else recipe.chunk,
    )  # fmt: skip


@contextlib.contextmanager
def applied(subject: Subject, levers: Recipe, simulate: bool) -> Iterator[Any]:
    """Puts levers on, and takes them off.

    Args:
        subject: what is planned.
        levers: what is traded for memory.
        simulate: whether offloaded bytes only seem to go, since there is no device to take them from.
    """
    handle = apply_levers(
        subject.model, recompute=levers.recompute, offload=levers.offload, head=levers.head,
        loss_chunks=levers.loss_chunks, simulate_offload=simulate,
    )  # fmt: skip
    try:
        yield handle
    finally:
        handle.remove()


@contextlib.contextmanager
def random_state_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Puts random state back, also what a ``collate`` has drawn.

    Args:
        parameters: lie on the devices whose generators are kept beside the CPU's.
    """
    before = RandomState({parameter.device for parameter in parameters})
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def undisturbed(
    subject: Subject, *, is_fake: bool = False
) -> Iterator[Callable[[Sequence[torch.Tensor]], OutsideLeaves]]:
    """Puts gradients, buffers, random state, modes, plain attributes and whatever is written to back, bitwise.

    Writes into weights and other tensors, as where a forward moves an average of weights, are seen operation by
    operation, which is left out once a run has shown that there are none.

    Python collects no garbage meanwhile, so that tensors in a cycle of references, such as those of a cache that knows
    its model, count to the end and not until some moment that depends on everything else in the process.

    Args:
        subject: what is planned.
        is_fake: whether nothing is run but on fake tensors.

    Returns:
        A context whose value makes what finds leaves that the loss reaches besides some parameters.
    """
    parameters = subject.parameters
    gradients = [parameter.grad for parameter in parameters]
    functions = (subject.loss_fn, *getattr(subject.loss_fn, "user_functions", ()))
    carried = SideEffects([*subject.roots, *functions], tensors=False)
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
        carried.restore()
        before.restore(warns=False)


def _is_scripted(subject: Subject) -> bool:
    """Whether a mode that sees operations would be in the way of ``torch.jit``."""
    return any(map(is_scripted, modules_of(*subject.roots)))


@contextlib.contextmanager
def _writes_taken_back(subject: Subject) -> Iterator[None]:
    habits = subject.habits
    if habits.writes_elsewhere is False or _is_scripted(subject):
        yield
        return
    buffers = [buffer for module in modules_of(*subject.roots) for buffer in module._buffers.values()]
    overwritten = Overwritten(buffer for buffer in buffers if buffer is not None)
    try:
        with overwritten:
            yield
        if habits.writes_elsewhere is None:
            habits.writes_elsewhere = False
    finally:
        habits.note_elsewhere(overwritten.bytes)
        overwritten.restore()


def micro_batch_of(subject: Subject, part: Part) -> Any:
    """A micro-batch of the size of a part: of raw samples just these, else the one with the most in it.

    Args:
        subject: what is planned.
        part: the samples.
    """
    splittable = subject.splittable
    if splittable.is_collated:
        return collated(subject, part)
    if differ(splittable, subject.loss_fn):
        return part_of_window(splittable, part)
    parts = splittable.plan(len(part.samples), is_shared=False)
    most = max(len(one.samples) for one in parts)
    full = [index for index, one in enumerate(parts) if len(one.samples) == most]
    if splittable.has_lists and len(full) > 1:
        bytes_of = [bytes_in(batch) for batch in splittable.materialise(parts)]
        chosen = max(full, key=bytes_of.__getitem__)
    else:
        chosen = full[0]
    return next(itertools.islice(splittable.materialise(parts), chosen, None))


def batch_for_loss(subject: Subject, part: Part) -> Any:
    """A micro-batch that the loss may be run on: a copy if it writes into its batch, or may do so.

    Arrays are copied in any case, since writes to them can't be noticed.

    Args:
        subject: what is planned.
        part: the samples.
    """
    batch = micro_batch_of(subject, part)
    if subject.splittable.is_copied or (subject.splittable.is_collated and not _shares_samples(subject, part, batch)):
        return batch
    return writable(batch, arrays_only=subject.writes_batch is False and not subject.habits.looks_at_numbers)


def _shares_samples(subject: Subject, part: Part, batch: Any) -> bool:
    """Whether a collated micro-batch lies in the memory of the samples themselves."""
    own = {
        s._cdata for sample in subject.splittable.samples_of(part) for t in tensors_in(sample) for s in storages_of(t)
    }
    return any(storage._cdata in own for tensor in tensors_in(batch) for storage in storages_of(tensor))


def stand_in_of(subject: Subject, part: Part, fakes: Fakes) -> Any:
    """A micro-batch without numbers.

    Args:
        subject: what is planned.
        part: the samples.
        fakes: makes the tensors.
    """
    scratch, batch = Fakes(), None
    if subject.splittable.is_collated:
        batch = collated_on_fakes(subject, part, scratch)
    if batch is None:
        batch = writable(micro_batch_of(subject, part), arrays_only=True)
    found = map_leaves(lambda leaf: fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
    scratch.let_go()
    return found


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, also those of packed sequences, and of objects."""
    found: list[torch.Tensor] = []
    for _, _, leaf in leaves(batch):
        if isinstance(leaf, PackedSequence):
            found.append(leaf.data)
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf.values() if leaf.is_nested and leaf.layout is torch.jagged else leaf)
        else:
            found += tensors_within(leaf)[0]
    return found
