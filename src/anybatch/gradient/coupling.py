"""Losses that see all samples of a batch at once, over encoders that run in micro-batches."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from anybatch.errors import LossError
from anybatch.gradient.accumulate import Accumulation, Settings
from anybatch.gradient.cutting import Restriction, accumulation, backward_to_leaves
from anybatch.gradient.gradwatch import GradientWatch
from anybatch.gradient.outputs import Outputs
from anybatch.gradient.pieces import check_callable, in_place_explained, standing
from anybatch.gradient.reducing import Reducer
from anybatch.gradient.sums import Sums
from anybatch.gradient.weights import Weights
from anybatch.levers.rerun import Forward, TwoPasses
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.precision import Float32Accumulator, needs_float32
from anybatch.tensors.sparsesums import SparseSums
from anybatch.tensors.spectral import PowerIterations
from anybatch.tensors.trees import leaves, map_leaves

_WATCHED = 2
"""Encoders that run again and are looked at; what they do to gradients, they do each time."""


class Coupled:
    """A loss over the outputs of all samples together, such as a contrastive one.

    The batch is encoded in micro-batches; the loss is computed once, on the outputs of all of them. Then each
    micro-batch gets its gradient: from the graph of its first pass where that was kept, else from a second pass with
    the random state of the first (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited
    Setup", without its recomputation of what fits). Parameters inside of the loss get their gradient once.

    Args:
        encode: ``encode(model, batch)`` gives what the loss needs of the samples of a micro-batch: any nested container
            of tensors with one row a sample; whatever else is in it has the same value each time. It may run twice, so
            it depends on the model, the batch and the global random state only, and does not write to the batch.
        loss: ``loss(model, outputs, batch)`` or ``loss(model, outputs)`` gives a loss as any loss function does: of all
            samples, in the order of the batch. The batch is the one that was given to the step, on the device of the
            model; with ``collate=`` it is the list of raw samples. What the loss takes from ``outputs`` needs no second
            copy there.
        row_block: computes the loss for so many rows at a time, so that a matrix of all pairs never exists as a whole.
            The loss gets one argument more, ``rows``, a slice, and gives the mean over these rows.
        keep: how many micro-batches keep the graph of their first pass if no plan says so; ``None`` for one.
        gather: whether the loss sees the samples of all ranks where several train together, in the order of the ranks;
            else each rank's loss sees its own, and the gradient is that of their mean, weighted by their counts.

    Raises:
        LossError: an argument is none that can be meant.

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
    """By which ``gradient.losses.as_coupled`` knows it."""

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
        if row_block is None and "rows" in _names_of(loss):
            raise LossError("the loss of Coupled takes rows, and row_block is not given; expected row_block=256 or so")
        self._takes_batch = callable(loss) and _takes_batch(loss, 2 if row_block is None else 3)
        names = ["model", "outputs", *(["batch"] if self._takes_batch else []), *(["rows"] if row_block else [])]
        check_callable("Coupled", "loss", loss, *names)
        self.encode, self.loss = encode, loss
        self.row_block, self.keep, self.gather = row_block, keep, gather
        self._has_run_again = False

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self.encode, self.loss

    def joins(self, reducer: Reducer) -> bool:
        """Whether the loss sees the samples of other processes.

        Args:
            reducer: the processes that take the gradient together.
        """
        return self.gather and reducer.is_shared

    @property
    def takes_batch(self) -> bool:
        """Whether the loss looks at the batch beside the outputs."""
        return self._takes_batch

    def __call__(self, model: Any, batch: Any) -> Any:
        """Encodes a batch at once and gives its loss, with one graph; of all rows together, whatever ``row_block``.

        Args:
            model: the first argument of both functions.
            batch: the whole.
        """
        outputs = self.encode(model, batch)
        return self.loss_of(model, outputs, batch, slice(0, _rows_of(outputs)))

    def loss_of(self, model: Any, outputs: Any, batch: Any, rows: slice) -> Any:
        """Calls the user's loss.

        Args:
            model: its first argument.
            outputs: of all samples.
            batch: the whole, if it takes it.
            rows: whose loss is asked for, if it is computed in blocks.
        """
        arguments = [model, outputs, *([batch] if self._takes_batch else []), *([rows] if self.row_block else [])]
        with in_place_explained("a tensor of the outputs that the loss of Coupled was given"):
            return self.loss(*arguments)

    def blocks(self, rows: int) -> list[slice]:
        """The rows that the loss is computed for at a time.

        Args:
            rows: of all samples.
        """
        size = self.row_block or rows
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)] or [slice(0, 0)]


def _takes_batch(loss: Any, position: int) -> bool:
    """Whether a loss asks for the batch, rather than having an option of its own at that position."""
    function = inspect.unwrap(loss)
    function = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        return True
    places = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in places if p.default is p.empty or p.name == "batch"]
    return len(required) > position


def _names_of(loss: Any) -> list[str]:
    """The arguments that a loss needs."""
    try:
        found = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return []
    return [name for name, parameter in found.items() if parameter.default is parameter.empty]


def _rows_of(outputs: Any) -> int:
    return next((len(leaf) for _, _, leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


class CoupledPass:
    """One pass over a logical batch with a coupled loss, which leaves its gradient in ``.grad``.

    Args:
        model: the first argument of the user's functions.
        coupled: the user's functions.
        weights: the counts of the whole batch.
        parameters: whose ``.grad`` is filled; empty at the start.
        settings: precision, scaling, inputs, kept graphs.
        samples: positions in the logical batch, for each micro-batch.
        outside: is told of leaves that are not in ``parameters``, or ``None``.
        differentiate: whether gradients are wanted, or only the values.
    """

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
    ) -> None:
        self._model = model
        self._coupled = coupled
        self._weights = weights
        self._parameters = parameters
        self._settings = settings
        self._samples = samples
        self._outside = outside
        self._differentiate = differentiate
        roots = self._roots = modules_behind(model, coupled.encode)
        devices = {p.device for m in modules_of(*roots) for p in m._parameters.values() if p is not None}
        self._passes = TwoPasses("the encode of Coupled", modules_of(*roots), devices=devices)
        self._graphs: list[tuple[int, list[torch.Tensor | None]]] = []
        self._forwards: list[tuple[int, Forward]] = []

    def run(
        self, first: Iterable[Any], again: Callable[[Sequence[int]], Iterator[Any]], whole: Callable[..., Any]
    ) -> Sums:
        """Encodes, takes the loss, and goes back through the encoder.

        Args:
            first: the micro-batches, on the device.
            again: gives some of them once more, by their numbers.
            whole: gives the batch that the loss looks at; over several processes, told of its rows and of the batches
                of all of them.

        Returns:
            What was added up; gradients are in ``.grad``, scaled if there is a scaler.

        Raises:
            LossError: a function broke its contract.
        """
        accumulator = None
        addends = len(self._samples) + 1
        if self._differentiate and needs_float32(self._parameters, addends, self._settings.policy):
            accumulator = Float32Accumulator(self._parameters)
        sparse = SparseSums(self._parameters, in_float32=accumulator is not None)
        outputs = self._encoded(first)
        sums, gradients = self._loss_of(outputs, whole)
        runs_again, rows = bool(self._forwards), sum(map(len, self._samples))
        if len(self._samples) > 1:  # else autograd adds at most one gradient to that of the loss
            sparse.take_(1.0)
        if accumulator is not None:
            accumulator.take_()
        token = accumulation.set(Restriction(self._settings.inputs, self._outside))
        try:
            for number, tensors in self._with_graphs(outputs, again):
                self._back(tensors, outputs.rows(gradients, number))
                del tensors
                if len(self._samples) > 1:
                    sparse.take_(rows / max(1, len(self._samples[number])))
                if accumulator is not None:
                    accumulator.take_()
        finally:
            accumulation.reset(token)
        if accumulator is not None:
            sums.accumulator_bytes = max(sums.accumulator_bytes, accumulator.bytes)
            accumulator.give_()
        sparse.give_()
        outputs.compare()
        self._coupled._has_run_again |= runs_again
        sums.in_order = True
        return sums

    def _encoded(self, batches: Iterable[Any]) -> Outputs:
        """Runs the first pass."""
        outputs = Outputs(self._samples, compares=not self._coupled._has_run_again)
        last = len(self._samples) - 1
        keep = next((n for n in (self._settings.kept_graphs, self._coupled.keep) if n is not None), 1)
        power_iterations = PowerIterations(modules_of(*self._roots))
        for number, batch in enumerate(batches):
            power_iterations.again_()
            if not self._differentiate:
                outputs.add(self._encode(batch))
            elif number > last - keep:
                self._graphs.append((number, outputs.add(self._encode(batch))))
            else:
                # Of the last one there always is a graph for a moment, which tells what needs a gradient.
                with torch.set_grad_enabled(number == last), self._passes.first() as forward, _unwritten(batch):
                    encoded = self._encode(map_leaves(lambda leaf: leaf, batch))  # containers are not shared
                outputs.add(encoded, is_encoded_again=True)
                del encoded
                self._forwards.append((number, forward))
                torch.clear_autocast_cache()  # older torch would take weights that were cast without a graph again
        return outputs

    def _encode(self, batch: Any) -> Any:
        with self._settings.context():
            return self._coupled.encode(self._model, batch)

    def _loss_of(self, outputs: Outputs, whole: Callable[..., Any]) -> tuple[Sums, list[torch.Tensor | None]]:
        """The loss on the outputs of all samples, and the gradient of each of them."""
        joined, standing_in = outputs.joined(differentiate=self._differentiate)
        reducer = self._settings.reducer
        if not self._coupled.joins(reducer):
            sums = self._loss_in(
                self._coupled.blocks(outputs.total), outputs.total, self._weights.own_totals, joined, standing_in, whole
            )
            return sums, [None if leaf is None else leaf.grad for leaf in standing_in]
        joint = reducer.gathered(joined, standing_in, whole(own=True) if self._coupled.takes_batch else None)
        del joined, standing_in
        blocks = reducer.shared_out(self._coupled.blocks(joint.rows))
        sums = Sums()
        if blocks:  # of what is not a sum over rows, one process computes all
            sums = self._loss_in(
                blocks, joint.rows, self._weights.totals, joint.outputs, joint.leaves, partial(whole, joint)
            )
        gradients = reducer.given_back(joint.leaves) if self._differentiate else []
        own = slice(joint.start, joint.start + outputs.total)
        return sums, [None if gradient is None else gradient[own] for gradient in gradients]

    def _loss_in(
        self, blocks: list[slice], total: int, items: Mapping[str, float], joined: Any,
        standing_in: Sequence[torch.Tensor | None], whole: Callable[[], Any],
    ) -> Sums:  # fmt: skip
        """The loss of some blocks of rows; gradients are left on the leaves."""
        coupled, settings = self._coupled, self._settings
        mine = [leaf for leaf in standing_in if leaf is not None]
        batch = whole()
        counts = [rows.stop - rows.start for rows in blocks]
        parts = [{name: number * count / max(1, total) for name, number in items.items()} for count in counts]
        weights = Weights([items] if counts == [total] else parts, self._weights.totals)
        if settings.inputs is not None:
            settings = replace(settings, inputs=(*settings.inputs, *mine))
        accumulation = Accumulation(
            self._model, lambda model, rows: coupled.loss_of(model, joined, batch, rows), weights,
            [*self._parameters, *mine], settings, rows=counts, outside=self._outside,
            differentiate=self._differentiate,
        )  # fmt: skip
        explained = in_place_explained("a tensor of the outputs that the loss of Coupled was given")
        with explained, standing(mine if settings.inputs is None else []):
            return accumulation.run(blocks)

    def _with_graphs(
        self, outputs: Outputs, again: Callable[[Sequence[int]], Iterator[Any]]
    ) -> Iterator[tuple[int, list[torch.Tensor | None]]]:
        """The outputs of each micro-batch with their graph, the last one first, as one graph of all would go back."""
        while self._graphs:
            yield self._graphs.pop()
        self._forwards.reverse()
        forwards, self._forwards = self._forwards, []
        for seen, ((number, forward), batch) in enumerate(zip(forwards, again([n for n, _ in forwards]), strict=True)):
            watch = GradientWatch(self._model, self._parameters) if seen < _WATCHED else None
            with forward.again():
                encoded = self._encode(batch)
            if watch is not None:
                watch.check()
            yield number, outputs.same(encoded, number)
            del encoded

    def _back(self, tensors: list[torch.Tensor | None], gradients: list[torch.Tensor | None]) -> None:
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if tensor is not None and gradient is not None and tensor.requires_grad
        ]
        if pairs:
            backward_to_leaves([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


@contextmanager
def _unwritten(batch: Any) -> Iterator[None]:
    """Refuses writes to the tensors of a batch that is encoded again later."""
    tensors = [leaf for _, _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in tensors]
    yield
    if versions != [tensor._version for tensor in tensors]:
        raise LossError(
            "encode of Coupled wrote to a tensor of the batch in place, so that it would encode something else when it "
            "runs again; use the operation that does not write in place, or clone the tensor first"
        )
