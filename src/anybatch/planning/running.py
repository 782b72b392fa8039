"""Runs the micro-batches of a step that is planned, and takes every trace of it off again."""

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from anybatch.planning.subjects import Subject
from anybatch.records.means import Mean
from anybatch.tensors.batches import Part
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_of
from anybatch.tensors.moving import to_device
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.trees import leaves
from anybatch.tensors.writes import writable
from anybatch.update.batchnorm import batch_norm_as
from anybatch.update.transaction import Snapshot

# What torch.nn.Module keeps for itself; none of it is a plain attribute.
_OWN = frozenset(torch.nn.Module().__dict__) - {"training"}


@dataclass(frozen=True)
class Levers:
    """What is traded for memory in a trace.

    Args:
        recompute: names of blocks, or of runs of them.
        offload: names of blocks.
        head: the output layer whose loss is chunked.
        loss_chunks: into how many.
    """

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    head: str = ""
    loss_chunks: int = 1


def run_for_real(subject: Subject, part: Part, levers: Levers, *, clock: Callable[[], float]) -> float:
    """Runs a forward and a backward for one micro-batch, and takes every trace of it off again.

    Args:
        subject: what is planned.
        part: the samples of the micro-batch.
        levers: what is traded for memory.
        clock: is read before and after.

    Returns:
        The difference of the clock.
    """
    batch = to_device(batch_for_loss(subject, part), subject.settings.device)
    rows, writes = len(part.samples), subject.splittable.writes()
    with (
        undisturbed(subject) as outside,
        batch_norm_as(subject.batch_norm, subject.roots, 1),
        applied(subject, levers, False),
    ):
        accumulation = Accumulation(
            subject.model, plain_losses(subject.loss_fn), Weights([{"": rows}]), subject.parameters,
            settings_for(subject), rows=[rows], outside=outside(()),
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


def settings_for(subject: Subject) -> Settings:
    """The settings of a run that nobody steps on.

    Without a scaler, which scales only, and without float32 buffers for low-precision gradients, whose bytes are known;
    and by this process alone.

    Args:
        subject: what is planned.
    """
    return replace(subject.settings, scaler=None, policy="native", reducer=ALONE)


@contextlib.contextmanager
def applied(subject: Subject, levers: Levers, simulate: bool) -> Iterator[Any]:
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
def undisturbed(subject: Subject) -> Iterator[Callable[[Sequence[torch.Tensor]], OutsideLeaves]]:
    """Puts gradients, buffers, random state, modes and plain attributes of modules back, bitwise.

    Python collects no garbage meanwhile, so that tensors in a cycle of references, such as those of a cache that knows
    its model, count to the end and not until some moment that depends on everything else in the process.

    Args:
        subject: what is planned.

    Returns:
        A context whose value makes what finds leaves that the loss reaches besides some parameters.
    """
    parameters = subject.parameters
    gradients = [parameter.grad for parameter in parameters]
    attributes = [(module, _attributes_of(module)) for module in modules_of(*subject.roots)]
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
        with contextlib.nullcontext() if subject.devices is None else without_autocast_cache():
            yield outside
    finally:
        if collects:
            gc.enable()
        found = [pair for one in made for pair in one.found]
        for parameter, gradient in [*zip(parameters, gradients, strict=True), *found]:
            parameter.grad = gradient
        for module, own in attributes:
            _put_back(module, own)
        before.restore()


def _attributes_of(module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """The plain attributes of a module, such as tables that a forward makes when it first needs them.

    What is a list, a dictionary or a set is copied, too.
    """
    return {
        name: (value, copy.copy(value) if type(value) in (list, dict, set) else None)
        for name, value in module.__dict__.items()
        if name not in _OWN
    }


def _put_back(module: torch.nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    own = module.__dict__
    for name in [name for name in own if name not in attributes and name not in _OWN]:
        del own[name]
    for name, (value, items) in attributes.items():
        own[name] = value
        if items is None or _is_same(items, value):
            continue
        value.clear()
        value.extend(items) if isinstance(value, list) else value.update(items)


def _is_same(items: Any, value: Any) -> bool:
    """Whether a container still holds the very same things, of which some may be tensors."""
    if isinstance(items, dict):
        return list(items) == list(value) and all(value[key] is item for key, item in items.items())
    if isinstance(items, set):
        return bool(items == value)
    return len(items) == len(value) and all(a is b for a, b in zip(items, value, strict=True))


def micro_batch_of(subject: Subject, part: Part) -> Any:
    """A micro-batch of the size of a part: of raw samples just these, else the one with the most in it."""
    splittable = subject.splittable
    if splittable.is_collated:
        return next(splittable.collated_apart([part]))
    parts = splittable.plan(len(part.samples), is_shared=False)
    most = max(len(one.samples) for one in parts)
    full = [index for index, one in enumerate(parts) if len(one.samples) == most]
    if splittable.has_lists and len(full) > 1:
        bytes_of = [_bytes_in(batch) for batch in splittable.materialise(parts)]
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
    if subject.splittable.is_copied:
        return batch
    return writable(batch, arrays_only=subject.writes_batch is False and not subject.habits.looks_at_numbers)


def _bytes_in(batch: Any) -> int:
    """The bytes of all leaves; a number in a list counts as one that a tensor is made of."""
    rest = (leaf for _, _, leaf in leaves(batch) if not isinstance(leaf, (torch.Tensor, PackedSequence, str)))
    return sum(t.nbytes for t in tensors_in(batch)) + sum(getattr(leaf, "nbytes", 8) for leaf in rest)


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, also those of packed sequences."""
    found: list[torch.Tensor] = []
    for _, _, leaf in leaves(batch):
        if isinstance(leaf, PackedSequence):
            found.append(leaf.data)
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf.values() if leaf.is_nested and leaf.layout is torch.jagged else leaf)
    return found
