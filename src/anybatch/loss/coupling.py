"""Coupled losses: losses over the outputs of the whole batch, with an encoder that runs in micro-batches."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from anybatch.batch.trees import flat, leaves, like, map_leaves
from anybatch.batch.writes import Writes
from anybatch.errors import LossError
from anybatch.loss.accumulate import Accumulation, GradientWatch, Settings
from anybatch.loss.cutting import Restriction, accumulation, backward_to_leaves, in_place_explained, standing
from anybatch.loss.losses import check_callable
from anybatch.loss.reducing import ALONE, Joint, Reducer
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.memory.checkpointing import Checkpoint
from anybatch.tensors.dispatch import has_numbers
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.spectral import PowerIterations

_WATCHED = 2
"""Number of encoder runs that are checked for changes of gradients."""
_EXPECTED_AGAIN = (
    "expected a function of the model, the batch and the global random state of torch, numpy and Python only. Draw "
    "from these, not from a separate generator, or let every micro-batch keep its graph: Coupled(..., "
    "keep=1_000_000). Pass what it counts from call to call with the batch"
)


class Coupled:
    """A loss over the outputs of the whole batch, such as a contrastive loss.

    The batch is encoded in micro-batches, and the loss is computed once on the outputs of all of them. Then each
    micro-batch is differentiated: from the graph of its first pass if that was kept, else from a second pass with the
    same random state (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", which
    recomputes all graphs). Parameters inside the loss get their gradient once.

    Args:
        encode: ``encode(model, batch)`` returns the outputs of a micro-batch that the loss needs: any nested container
            of tensors with one row per sample; other values in it must be the same for all micro-batches. It may run
            twice, so it must depend only on the model, the batch and the global random state, and must not write to
            the batch.
        loss: ``loss(model, outputs, batch)`` or ``loss(model, outputs)`` returns what a loss function may return, for
            the outputs of all samples in the order of the batch. The batch is the argument of the step, on the device
            of the model; with ``collate=`` it is the list of raw samples.
        row_block: the number of rows to compute the loss for at a time, so that the matrix of all pairs never exists as
            a whole. The loss then gets one more argument, ``rows``, a slice, and returns the mean over these rows.
        keep: how many micro-batches keep the graph of their first pass if no plan decides it; ``None`` for one.
        gather: whether the loss sees the samples of all ranks, in the order of the ranks; else each rank's loss sees
            its own samples, and the gradient is that of the mean of these losses, weighted by their counts.

    Raises:
        LossError: an argument is invalid.

    Example:
        >>> import torch.nn.functional as F
        >>> def encode(model, batch):
        ...     return F.normalize(model(batch["a"])), F.normalize(model(batch["b"]))
        >>> def loss(model, outputs):
        ...     a, b = outputs
        ...     return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))
        >>> pairs = {"a": torch.ones(6, 4), "b": torch.ones(6, 4)}
        >>> float(Coupled(encode, loss)(torch.nn.Linear(4, 2), pairs).detach().exp().round())
        6.0
    """

    is_coupled = True
    """Checked by ``loss.losses.as_coupled``."""

    def __init__(
        self,
        encode: Callable[[Any, Any], Any],
        loss: Callable[..., Any],
        *,
        row_block: int | None = None,
        keep: int | None = None,
        gather: bool = True,
    ) -> None:
        if not isinstance(gather, bool):
            raise LossError(f"Coupled(gather={gather!r}); expected True or False")
        for name, value, least in (("row_block", row_block, 1), ("keep", keep, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise LossError(f"Coupled({name}={value!r}); expected an integer of at least {least}, or None")
        check_callable("Coupled", "encode", encode, "model", "batch")
        needed = [argument.name for argument in _arguments_of(loss) if argument.default is argument.empty]
        if row_block is None and "rows" in needed:
            raise LossError("the loss of Coupled takes rows, and row_block is not given; expected row_block=256 or so")
        self.takes_batch = callable(loss) and _takes_batch(loss, 2 if row_block is None else 3)
        names = ["model", "outputs", *(["batch"] if self.takes_batch else []), *(["rows"] if row_block else [])]
        check_callable("Coupled", "loss", loss, *names)
        self.encode, self.loss = encode, loss
        self.row_block, self.keep, self.gather = row_block, keep, gather
        self.has_run_again = False

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """The user's functions, which may be modules or methods of modules."""
        return self.encode, self.loss

    def joins(self, reducer: Reducer) -> bool:
        """Whether the loss sees the samples of other processes."""
        return self.gather and reducer.is_shared

    def __call__(self, model: Any, batch: Any) -> Any:
        """Encodes a whole batch and returns its loss, with one graph and without ``row_block``."""
        outputs = self.encode(model, batch)
        rows = (len(leaf) for _, _, leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.dim())
        return self.loss_of(model, outputs, batch, slice(0, next(rows, 0)))

    def loss_of(self, model: Any, outputs: Any, batch: Any, rows: slice) -> Any:
        """Calls the user's loss with those of these arguments that it takes."""
        arguments = [model, outputs, *([batch] if self.takes_batch else []), *([rows] if self.row_block else [])]
        return self.loss(*arguments)

    def blocks(self, rows: int) -> list[slice]:
        """Slices of ``row_block`` rows, of a given total."""
        size = self.row_block or rows
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)] or [slice(0, 0)]


def _takes_batch(loss: Any, position: int) -> bool:
    """Whether a loss takes the batch, rather than an optional argument of its own at that position."""
    found = _arguments_of(loss)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        return True
    places = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in places if p.default is p.empty or p.name == "batch"]
    return len(required) > position


def _arguments_of(loss: Any) -> list[inspect.Parameter]:
    function = inspect.unwrap(loss) if callable(loss) else loss
    function = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


Marks = dict[int, tuple[list[float] | None, float]]
"""By position: the sums of a tensor and of its absolute values, and the relative tolerance."""


def marks_of(tensors: Sequence[torch.Tensor | None], *, waits: bool) -> Marks:
    """The sums by which two runs are compared, ``None`` for a fake tensor; on other devices only if it ``waits``."""
    found: Marks = {}
    for position, tensor in enumerate(tensors):
        if tensor is None or tensor.is_meta or not tensor.is_floating_point() or tensor.layout != torch.strided:
            continue
        if waits or tensor.device.type == "cpu":
            dtype, value = torch.promote_types(tensor.dtype, torch.float32), tensor.detach()
            mark = torch.stack([value.sum(dtype=dtype), torch.linalg.vector_norm(value, 1, dtype=dtype)])
            found[position] = mark.tolist() if has_numbers(mark) else None, math.sqrt(torch.finfo(tensor.dtype).eps)
    return found


def refuse_others(number: int, labels: Sequence[str], first: Marks, second: Marks) -> None:
    """Refuses a second run of a micro-batch that gave other values.

    The tolerance is relative to the sum of absolute values, since kernels may round differently.
    """
    if first.keys() != second.keys():
        raise LossError(
            f"encode gave different outputs for micro-batch {number + 1} when it ran again; {_EXPECTED_AGAIN}"
        )
    for position, (mark, tolerance) in first.items():
        again = second[position][0]
        if mark is None or again is None:
            continue
        (before, _), (after, size) = mark, again
        if abs(after - before) > tolerance * size:  # NaN is the same as NaN
            raise LossError(
                f"{labels[position]} of micro-batch {number + 1} has different values when encode runs again: "
                f"they sum to {after:.6g}, the first time to {before:.6g}; {_EXPECTED_AGAIN}",
                name=labels[position],
            )


class _Ended(torch.autograd.Function):
    """Identity on gradients; its outputs take no memory."""

    @staticmethod
    def forward(_: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.new_zeros(()).expand(tensor.shape) for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients


def tensors_of(outputs: Any) -> list[torch.Tensor | None]:
    """The tensors among some outputs, by position; ``None`` for anything else."""
    return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in flat(outputs)]


def ended(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Tensors that stand for outputs in a backward, by position; they keep the graph alive, but not the outputs."""
    own = {id(tensor): tensor for tensor in tensors if tensor is not None and tensor.requires_grad}
    if not own:
        return [None] * len(tensors)
    by_id = dict(zip(own, _Ended.apply(*own.values()), strict=True))  # type: ignore[no-untyped-call]
    return [by_id.get(id(tensor)) for tensor in tensors]


class Outputs:
    """The outputs of micro-batches."""

    def __init__(self, samples: Sequence[Sequence[int]]) -> None:
        self._samples = samples
        self.total = sum(len(part) for part in samples)
        self._first: Any = None
        self.labels: list[str] = []  # of the outputs of a micro-batch, by position
        self._parts: list[list[Any]] = []  # those of each micro-batch
        self._needing: set[int] = set()  # the positions of those that get a gradient
        self._twins: list[int] = []
        self._order = [sample for part in samples for sample in part]
        self._is_in_order = self._order == list(range(self.total))

    def add(self, outputs: Any) -> list[torch.Tensor | None]:
        """Adds the outputs of the next micro-batch, detached."""
        named = [(label, leaf) for label, _, leaf in leaves(outputs, "outputs")]
        number, labels, found = len(self._parts), [label for label, _ in named], [leaf for _, leaf in named]
        tensors = tensors_of(found)
        own = [leaf if tensor is None else tensor.detach() for leaf, tensor in zip(found, tensors, strict=True)]
        if number == 0:
            if all(tensor is None for tensor in tensors):
                raise LossError("encode gave no tensor; expected at least one, with one row per sample")
            self._first, self.labels, self._twins = like(outputs, own), labels, [0] * len(found)
        elif labels != self.labels:
            raise _of_another_structure(labels, self.labels, number)
        for label, tensor in zip(labels, tensors, strict=True):
            _check_rows(label, tensor, len(self._samples[number]))
        self._parts.append(own)
        self._needing.update(p for p, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad)
        self._twins = twins(self._twins, found)
        return tensors

    def repeat(self, number: int, rows: int) -> None:
        """Adds the outputs of an earlier micro-batch again; a plan runs one for many."""
        self._parts.append([leaf[:rows] if isinstance(leaf, torch.Tensor) else leaf for leaf in self._parts[number]])

    def joined(self, *, differentiate: bool) -> tuple[Any, list[torch.Tensor | None]]:
        """All outputs in the order of the batch, and the leaves among them that get a gradient; releases the parts."""
        columns, values = [list(column) for column in zip(*self._parts, strict=True)], list[Any]()
        gets: list[torch.Tensor | None] = []
        self._parts.clear()
        for position, column in enumerate(columns):
            twin, wanted = self._twins[position], None
            if twin != position:  # one tensor in two places stays one
                value = values[twin]
            else:
                value = self._column(self.labels[position], column)
                if differentiate and position in self._needing:
                    wanted = value.requires_grad_()
            values.append(value)
            gets.append(wanted)
            column.clear()
        if not values:  # no samples
            return None, gets
        first, self._first = self._first, None
        return like(first, values), gets

    def _column(self, label: str, column: list[Any]) -> Any:
        if not isinstance(column[0], torch.Tensor):
            if not all(_is_equal(value, column[0]) for value in column):
                raise LossError(
                    f"{label} is {column[0]!r:.40} for one micro-batch and another for the next; expected tensors "
                    "with one row per sample, or the same value each time. Anything that is not a tensor can stay "
                    "in the batch, which the loss may take: loss(model, outputs, batch)",
                    name=label,
                )
            return column[0]
        if len({tuple(leaf.shape[1:]) for leaf in column}) > 1:
            shapes = ", ".join(sorted({str(tuple(leaf.shape)) for leaf in column}))
            raise LossError(
                f"{label} has the shapes {shapes} in different micro-batches; expected rows of the same shape, so "
                "that they can be concatenated: pool or pad them in encode",
                name=label,
            )
        value = torch.cat(column) if len(column) > 1 else column[0].detach()
        if self._is_in_order:
            return value
        return value[_on(value.device, torch.tensor(self._order, device="cpu").argsort())]

    def rows(self, gradients: Sequence[torch.Tensor | None], number: int) -> list[torch.Tensor | None]:
        """The gradients of one micro-batch's outputs."""
        part = self._samples[number]
        if self._is_in_order:
            return [None if g is None else g.narrow(0, part[0], len(part)) for g in gradients]
        return [None if g is None else g[_on(g.device, torch.tensor(list(part), device="cpu"))] for g in gradients]


def twins(before: Sequence[int], found: Sequence[Any]) -> list[int]:
    """For each position, the first position with the same tensor in every micro-batch."""
    first: dict[tuple[int, int], int] = {}
    keys = [(before[p], id(leaf) if isinstance(leaf, torch.Tensor) else -p) for p, leaf in enumerate(found)]
    return [first.setdefault(key, position) for position, key in enumerate(keys)]


def _on(device: torch.device, positions: torch.Tensor) -> torch.Tensor:
    return positions.to(device, non_blocking=True)  # does not synchronize


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays, or anything else without one truth value
        return False


def _of_another_structure(labels: Sequence[str], expected: Sequence[str], number: int) -> LossError:
    odd = [label for label in [*labels, *expected] if (label in labels) != (label in expected)]
    return LossError(
        f"encode gave {len(labels)} outputs for micro-batch {number + 1} and {len(expected)} for the first, which "
        f"differ in {', '.join(odd[:3]) or 'their order'}; expected the same containers around tensors with one "
        "row per sample. Turn a list with one item per sample into a tensor, or take it from the batch in the "
        "loss"
    )


def _check_rows(label: str, tensor: torch.Tensor | None, rows: int) -> None:
    if tensor is not None and (tensor.dim() == 0 or len(tensor) != rows):
        raise LossError(
            f"{label} has the shape {tuple(tensor.shape)} for a micro-batch of {rows} samples; expected one row "
            "per sample. Compute what belongs to the batch as a whole in the loss",
            name=label,
        )


_Graph = Callable[[], list[torch.Tensor | None]]
"""Gives the outputs of a micro-batch with their graph, by position: those that were kept, or encoded again."""


class CoupledPass:
    """One pass over a logical batch with a coupled loss, which fills ``.grad``.

    All micro-batches are encoded, and only the last ones keep their graph. The loss runs on leaves that stand in for
    the outputs. Then each micro-batch is differentiated with the gradient of its rows, in reverse order as in a single
    graph, and encoded again first if its graph is gone.

    ``torch.utils.checkpoint`` would do the same with three Python calls per saved tensor: a step with small encoders
    took 1.4 times as long.

    Args:
        samples: positions in the logical batch, for each micro-batch.
        on_loss: is given each loss, and each output of the first micro-batch, after its name.
    """

    loss_pass: type[Accumulation] = Accumulation
    """The pass that runs the loss, with blocks of rows instead of micro-batches."""

    def __init__(
        self,
        model: Any,
        coupled: Coupled,
        weights: Weights,
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        *,
        samples: Sequence[Sequence[int]],
        outside: OutsideLeaves | None = None,
        differentiate: bool = True,
        on_loss: Callable[[str, Any], None] | None = None,
    ) -> None:
        self._on_loss = on_loss
        self._model, self._coupled, self._weights = model, coupled, weights
        self._parameters, self._settings, self._samples = parameters, settings, samples
        self._outside, self._differentiate = outside, differentiate
        self._modules = modules_of(*modules_behind(model, coupled.encode))
        self._passes = Checkpoint("the encode of Coupled", self._modules, devices=[settings.device])
        self._watched = {True: 0, False: 0}
        self._is_new, self._has_run_again = not coupled.has_run_again, False

    def run(self, batches: Iterable[Any], again: Callable[[int], Any], whole: Callable[..., Any]) -> Sums:
        """Encodes, computes the loss, and differentiates the encoder.

        Raises:
            LossError: ``encode`` wrote to the batch or gave other outputs when it ran again, or the loss broke its
                contract.
        """
        outputs = Outputs(self._samples)
        graphs = self._encoded(batches, again, outputs)
        sums, gradients = self._loss_of(outputs, whole)
        if self._differentiate:
            self._go_back(graphs, outputs, gradients, sums)
            self._coupled.has_run_again |= self._has_run_again
        sums.in_order = True
        return sums

    def _encoded(self, batches: Iterable[Any], again: Callable[[int], Any], outputs: Outputs) -> list[_Graph]:
        """Encodes all micro-batches; returns the graph of each, or what makes it again."""
        # One by default: the last micro-batch is differentiated first, right after the loss.
        keep = next((n for n in (self._settings.kept_graphs, self._coupled.keep) if n is not None), 1)
        twice = len(self._samples) - keep if self._differentiate else 0
        power_iterations = PowerIterations(self._modules)
        graphs: list[_Graph] = []
        for number, batch in enumerate(batches):
            power_iterations.again_()
            given = [batch]
            del batch
            if number < twice:
                graphs.append(self._to_run_again(number, given, again, outputs))
            else:
                graphs.append(self._to_keep(number, given, outputs))
        return graphs

    def _to_keep(self, number: int, given: list[Any], outputs: Outputs) -> _Graph:
        tensors = outputs.add(self._encode(given.pop(), is_first=True))
        self._tell(number, outputs, tensors)
        kept = ended(tensors) if self._differentiate else []
        return lambda: kept

    def _to_run_again(self, number: int, given: list[Any], again: Callable[[int], Any], outputs: Outputs) -> _Graph:
        """Encodes a micro-batch without keeping its graph; returns a function that encodes it again."""
        batch = given.pop()
        self._passes.refuse_hidden_dropout()
        writes = Writes([batch])
        with self._passes.first() as forward:
            tensors = outputs.add(self._encode(batch, is_first=True))  # with grad mode on, so that both runs are alike
            before = marks_of(tensors, waits=self._is_new)
        self._tell(number, outputs, tensors)
        if writes.were_made:
            raise LossError(
                "encode of Coupled wrote to a tensor of the batch in place, so it would encode something else when "
                "it runs again; use the out-of-place operation, or clone the tensor first"
            )

        def encoded() -> list[torch.Tensor | None]:
            with forward():
                found = tensors_of(self._encode(again(number), is_first=False))
            refuse_others(number, outputs.labels, before, marks_of(found, waits=self._is_new))
            self._has_run_again = True
            return found

        return encoded

    def _tell(self, number: int, outputs: Outputs, tensors: Sequence[torch.Tensor | None]) -> None:
        if number == 0 and self._on_loss is not None:
            for label, tensor in zip(outputs.labels, tensors, strict=True):
                self._on_loss(label, tensor)

    def _encode(self, batch: Any, *, is_first: bool) -> Any:
        watch = None
        if self._differentiate and self._watched[is_first] < _WATCHED:
            self._watched[is_first] += 1
            watch = GradientWatch(self._model, self._parameters)
        own = map_leaves(lambda leaf: leaf, batch)  # new containers, which encode may change
        del batch
        with self._settings.context():
            encoded = self._coupled.encode(self._model, own)
        if watch is not None:
            watch.check()
        return encoded

    def _go_back(
        self, graphs: list[_Graph], outputs: Outputs, gradients: Sequence[torch.Tensor | None],
        sums: Sums,
    ) -> None:  # fmt: skip
        """Differentiates one micro-batch after the other, the last one first, and frees its graph."""
        beside = self._settings.gradient_sums(self._parameters, len(graphs) + 1)
        beside.take_()  # gradients of the loss's own parameters
        token = accumulation.set(Restriction(self._settings.inputs, self._outside))
        try:
            while graphs:
                number, graph = len(graphs) - 1, graphs.pop()
                self._back(number, [graph], outputs.rows(gradients, number))
                del graph
                beside.take_()
        finally:
            accumulation.reset(token)
        sums.accumulator_bytes = max(sums.accumulator_bytes, beside.bytes)
        beside.give_()

    def _back(self, number: int, graph: list[_Graph], gradients: list[torch.Tensor | None]) -> None:
        if all(gradient is None for gradient in gradients):
            return
        tensors = graph.pop()()
        pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t is not None and g is not None]
        pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
        del tensors
        if pairs:
            backward_to_leaves([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])

    def _loss_of(self, outputs: Outputs, whole: Callable[..., Any]) -> tuple[Sums, list[torch.Tensor | None]]:
        """The loss on all outputs, and the gradient of each output of this process."""
        joins, takes_batch = self._coupled.joins(self._settings.reducer), self._coupled.takes_batch
        reducer = self._settings.reducer if joins else ALONE
        joint = reducer.gathered(
            *outputs.joined(differentiate=self._differentiate), whole(own=True) if joins and takes_batch else None
        )
        rows = joint.rows if joins else outputs.total
        blocks = self._coupled.blocks(rows)[joint.place :: joint.of]  # the share of this process
        sums = Sums()
        if blocks:  # without row_block only one process has a block
            sums = self._loss_in(joint, blocks, rows, partial(whole, joint) if joins else whole)
        if self._differentiate:
            joint.sum_()
        own = slice(joint.start, joint.start + outputs.total)
        return sums, [None if leaf is None or leaf.grad is None else leaf.grad[own] for leaf in joint.leaves]

    def _loss_in(self, joint: Joint, blocks: list[slice], total: int, whole: Callable[[], Any]) -> Sums:
        coupled, settings = self._coupled, self._settings
        mine = [leaf for leaf in joint.leaves if leaf is not None]
        batch = whole()
        counts = [rows.stop - rows.start for rows in blocks]
        items = self._weights.totals if coupled.joins(settings.reducer) else self._weights.own_totals
        parts = [{name: number * count / max(1, total) for name, number in items.items()} for count in counts]
        weights = Weights([items] if counts == [total] else parts, self._weights.totals)
        if settings.inputs is not None:
            settings = replace(settings, inputs=(*settings.inputs, *mine))
        accumulation = self.loss_pass(
            self._model, lambda model, rows: coupled.loss_of(model, joint.outputs, batch, rows), weights,
            [*self._parameters, *mine], settings, rows=counts, outside=self._outside,
            differentiate=self._differentiate, on_loss=self._on_loss,
        )  # fmt: skip
        explained = in_place_explained("a tensor of the outputs that the loss of Coupled was given")
        with explained, standing(mine if settings.inputs is None else []):
            return accumulation.run(blocks)
