"""The encoder of a coupled loss by itself: what a micro-batch of it keeps, and what comes out of it."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.gradient.accumulate import Settings
from anybatch.gradient.coupling import Coupled
from anybatch.gradient.outputs import Outputs
from anybatch.gradient.pieces import InPieces, Piece, Place, whole
from anybatch.planning.curve import Profile, Size
from anybatch.planning.microbatches import clear_away, micro_batch_of, stand_in_of
from anybatch.planning.running import settings_for, undisturbed
from anybatch.planning.subjects import Subject
from anybatch.records.memory import GRADIENTS
from anybatch.tensors.batches import Part
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.meter import storages_of
from anybatch.tensors.moving import to_device
from anybatch.tensors.trees import leaves, map_leaves
from anybatch.update.batchnorm import batch_norm_as


class Encoding(InPieces):
    """The ``encode`` of a coupled loss, which goes back from gradients of its outputs instead of a loss.

    Args:
        coupled: the user's functions.

    Attributes:
        seconds: of the forward, and of forward and backward, by the number of samples; the shortest that was seen.
    """

    comes_in_one = True

    def __init__(self, coupled: Coupled) -> None:
        self._coupled = coupled
        self.seconds: dict[int, tuple[float, float]] = {}

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self._coupled.user_functions

    def __call__(self, model: Any, batch: Any) -> Any:
        """Encodes a micro-batch."""
        return self._coupled.encode(model, batch)

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Encodes a micro-batch and gives its outputs with a gradient for each, which is as large as they are."""
        began = _clock(None)
        outputs = Outputs([range(place.rows)])
        tensors = outputs.add(self._coupled.encode(model, batch))
        encoded = _clock(tensors)
        own = {id(tensor): tensor for tensor in tensors if tensor is not None and tensor.requires_grad}
        roots = [(tensor, torch.zeros_like(tensor)) for tensor in own.values()]
        yield Piece(None, whole, roots)
        ended = _clock(tensors)
        if encoded is not None and ended is not None and began is not None:
            taken = (encoded - began, ended - began)
            self.seconds[place.rows] = min(self.seconds.get(place.rows, taken), taken, key=lambda pair: pair[1])

    def forward_share(self, samples: int) -> float:
        """The part of the time of a micro-batch that its forward takes.

        Args:
            samples: in the micro-batch.
        """
        if not self.seconds:
            return _FORWARD
        forward, both = self.seconds[min(self.seconds, key=lambda known: abs(known - samples))]
        return forward / both if both else _FORWARD


_FORWARD = 1 / 3  # of the arithmetic of linear layers: the backward multiplies twice


def _clock(tensors: Any) -> float | None:
    """The time when they are there; ``None`` for tensors without numbers."""
    for tensor in tensors or ():
        if tensor is not None and type(tensor) is not torch.Tensor:
            return None
        if tensor is not None and tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


@dataclass(frozen=True)
class Column:
    """One leaf of the outputs.

    Args:
        shape: of a row.
        dtype: of its numbers, ``None`` for what is no tensor.
        row_bytes: that it takes in its storage, which may hold more.
        differs: whether it gets a gradient.
        twin: the position of the leaf that is the very same, its own if there is none before.
        value: what it was for a few samples, if they ran for real.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    row_bytes: int = 0
    differs: bool = False
    twin: int = 0
    value: Any = None

    def bytes_of(self, rows: int) -> int:
        """Of a tensor of so many rows of its own."""
        if self.dtype is None:
            return 0
        return rows * self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class OutputFacts:
    """What an encoder gives.

    Args:
        structure: its containers around the positions of the columns.
        columns: the leaves.
    """

    structure: Any
    columns: tuple[Column, ...]

    @property
    def own(self) -> list[Column]:
        """The tensors, each once."""
        return [c for position, c in enumerate(self.columns) if c.dtype is not None and c.twin == position]

    @property
    def row_bytes(self) -> int:
        """What a row takes as long as it is kept as it came."""
        return sum(column.row_bytes for column in self.own)

    @property
    def mark_bytes(self) -> int:
        """Of the sums by which a second pass is compared with the first."""
        floats = [c.dtype for c in self.own if c.dtype is not None and c.dtype.is_floating_point]
        return sum(2 * torch.promote_types(dtype, torch.float32).itemsize for dtype in floats)

    def without_values(self) -> "OutputFacts":
        """The same, which keeps no tensors."""
        return OutputFacts(
            self.structure, tuple(replace(c, value=None) if c.dtype is not None else c for c in self.columns)
        )

    @property
    def differing(self) -> int:
        """How many get a gradient."""
        return sum(column.differs for column in self.own)

    def made(self, make: Callable[[Column], torch.Tensor]) -> Any:
        """The outputs of other samples.

        Args:
            make: gives a tensor for a column.
        """
        found: list[Any] = []
        for position, column in enumerate(self.columns):
            if column.dtype is None:
                found.append(column.value)
            else:
                found.append(make(column) if column.twin == position else found[column.twin])
        return map_leaves(lambda position: found[position], self.structure)


def outputs_of(subject: Subject, encode: Callable[[Any, Any], Any], *, fake: bool) -> OutputFacts:
    """Encodes very few samples, and takes every trace of it off again.

    Args:
        subject: what is planned.
        encode: the user's.
        fake: on fake tensors, else for real.
    """
    few = min(2, subject.splittable.rows)
    settings = settings_for(subject)
    if not fake:  # a graph of as few samples as can be, and values of two
        with_graph = _encoded(subject, encode, 1 if subject.splits else few, settings, differentiate=True)
        values = _encoded(subject, encode, few, settings, differentiate=False)
        columns = [
            replace(one, value=other.value) for one, other in zip(with_graph.columns, values.columns, strict=True)
        ]
        return OutputFacts(with_graph.structure, tuple(columns))
    settings = replace(settings, device=torch.device("cpu"))
    fakes = Fakes()
    batch = stand_in_of(subject, Part(range(few), few), fakes)
    with (
        undisturbed(subject, is_fake=True),
        batch_norm_as(subject.batch_norm, subject.roots, 1),
        swapped(fakes, subject.roots),
        fakes.mode,
        settings.context(),
    ):
        found = _facts(encode(subject.model, batch), few, keeps_values=False)
    del batch
    clear_away(fakes, subject.settings.device)
    return found


def _encoded(
    subject: Subject, encode: Callable[[Any, Any], Any], rows: int, settings: Settings, *, differentiate: bool
) -> OutputFacts:
    batch = to_device(micro_batch_of(subject, Part(range(rows), rows)), settings.device)
    with (
        undisturbed(subject),
        batch_norm_as(subject.batch_norm, subject.roots, 1),
        torch.set_grad_enabled(differentiate),
        settings.context(),
    ):
        return _facts(encode(subject.model, batch), rows, keeps_values=not differentiate)


def _facts(outputs: Any, rows: int, *, keeps_values: bool) -> OutputFacts:
    found = [leaf for _, _, leaf in leaves(outputs)]
    Outputs([range(rows)]).add(outputs)  # refuses what can't be joined
    columns = []
    storages: set[int] = set()
    for position, leaf in enumerate(found):
        twin = next(index for index, other in enumerate(found) if other is leaf)
        if not isinstance(leaf, torch.Tensor):
            columns.append(Column(twin=position, value=leaf))
            continue
        new = [storage for storage in storages_of(leaf) if storage._cdata not in storages]
        storages |= {storage._cdata for storage in new}
        columns.append(
            Column(
                tuple(leaf.shape[1:]), leaf.dtype, sum(storage.nbytes() for storage in new) // rows,
                leaf.requires_grad, twin, leaf.detach().clone() if keeps_values else None,
            )
        )  # fmt: skip
    positions = iter(range(len(found)))
    return OutputFacts(map_leaves(lambda _: next(positions), outputs), tuple(columns))


@dataclass(frozen=True)
class Curve:
    """What a micro-batch of the encoder takes on top of what is there anyway.

    Args:
        fixed: bytes of parameters and buffers, on top of which the others are.
        graph: bytes kept after its forward, the outputs among them.
        forward: the most in the forward.
        first: the most in a backward that finds no gradients; those that it makes are among them.
        later: the most in a backward that finds them, themselves among them.
        gradients: of the parameters that the encoder has.
    """

    fixed: int
    graph: int
    forward: int
    first: int
    later: int
    gradients: int

    @staticmethod
    def of(profile: Profile, size: Size, outputs: OutputFacts, *, copies: bool) -> "Curve":
        """Reads it off a trace.

        Args:
            profile: of ``Encoding``.
            size: of the micro-batch.
            outputs: what it gives.
            copies: whether the gradient of the outputs is copied for each micro-batch, since rows are in another order.
        """
        fit = profile.fit
        sizes = fit.sizes(size)
        own = fit.trace.allocations
        turn = min((one.back for one in own if one.back is not None), default=len(fit.trace.operations))
        given = sum(count for one, count in zip(own, sizes, strict=True) if turn - outputs.differing <= one.born < turn)
        less = 0 if copies else given
        there = [(one, count) for one, count in zip(own, sizes, strict=True) if one.born < 0]
        gradients = sum(count for one, count in there if one.category == GRADIENTS)
        base = sum(count for _, count in there) - gradients
        first, later = fit.live(size, first=True), fit.live(size)
        forward = max(first[:turn], default=base) - base
        graph = (first[turn - 1] - base - given) if turn else 0
        return Curve(
            fixed=base,
            graph=graph,
            forward=forward
            if turn == len(first)
            else max(max(first[: max(1, turn - outputs.differing)]) - base, graph),
            first=max((x - base - less for x in first[turn:]), default=0),
            later=max((x - base - less for x in later[turn:]), default=gradients),
            gradients=gradients,
        )
