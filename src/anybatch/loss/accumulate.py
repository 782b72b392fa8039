"""The gradient of a logical batch, accumulated over its micro-batches."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from anybatch.accelerators import is_accelerator
from anybatch.errors import LossError
from anybatch.loss.cutting import Restriction, accumulation, declare_nothing_to_do
from anybatch.loss.differentiation import Differentiation
from anybatch.loss.losses import (
    SINGLE,
    Evaluation,
    InPieces,
    LossFunction,
    Piece,
    Place,
    checked_loss,
    is_nothing,
    note_the_arguments,
    unless_nothing,
)
from anybatch.loss.reducing import ALONE, Reducer
from anybatch.loss.sums import Sums, added_metrics
from anybatch.loss.weights import Weights, fetched
from anybatch.records.means import Mean
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.precision import AccumulatePolicy, GradientSums, add_gradient_, needs_float32
from anybatch.tensors.shards import local_of
from anybatch.tensors.spectral import PowerIterations, power_iterations

DropoutPolicy = Literal["native", "per-sample"]
_WATCHED = 64  # parameters


@dataclass
class Settings:
    """How gradients are computed, independent of the batch."""

    device: torch.device  # of the model
    autocast: torch.dtype | None = None  # the dtype of ``torch.autocast``, or ``None``
    scaler: Any = None  # a ``GradScaler`` that scales losses, or ``None``
    inputs: tuple[torch.Tensor, ...] | None = None  # the only tensors that get a gradient, or ``None`` for all
    policy: AccumulatePolicy = "auto"  # when low-precision gradients are accumulated in float32
    # how many micro-batches of a coupled loss keep the graph of their first pass; ``None`` for the loss's own ``keep``,
    # or one
    kept_graphs: int | None = None
    chunk_length: int | None = None  # steps in a chunk of a sequence; ``None`` for the loss function's own
    # whether masks are torch's own, or a function of the sample that does not depend on the split
    dropout: DropoutPolicy = "native"
    reducer: Reducer = ALONE  # the processes that compute the gradient together

    def gradient_sums(self, parameters: Sequence[torch.Tensor], addends: int) -> GradientSums:
        """The accumulator for the gradients of a number of micro-batches."""
        return GradientSums(parameters, in_float32=needs_float32(parameters, addends, self.policy))

    def context(self) -> AbstractContextManager[Any]:
        """A new context in which the user's forward runs."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


class GradientWatch:
    """Detects a loss that changes the gradients that are accumulated.

    It compares ``.grad`` before and after the user's code, for at most about 64 evenly spaced parameters.
    """

    def __init__(self, model: Any, parameters: Sequence[torch.Tensor], *, is_alone: bool = True) -> None:
        self._model, self._is_alone = model, is_alone
        self._seen: list[tuple[torch.Tensor, torch.Tensor | None, int]]
        self._parameters = parameters[:: 1 + len(parameters) // _WATCHED]
        self.note()

    def note(self) -> None:
        """Saves the gradients that the next run of the user's code must not change."""
        self.is_on, self._seen = True, []
        for parameter in self._parameters:
            gradient = parameter.grad
            self._seen.append((parameter, gradient, -1 if gradient is None else gradient._version))

    def check(self) -> None:
        """Compares the gradients with those of ``note``, then stops."""
        for parameter, seen, version in self._seen:
            gradient = parameter.grad
            if gradient is seen and (gradient is None or gradient._version == version):
                continue
            raise self._error(parameter, seen, gradient)
        self.is_on, self._seen = False, []

    def release(self) -> None:
        """Releases the saved gradients; nothing is compared until the next ``note``."""
        self.is_on, self._seen = False, []

    def check_kept(self) -> None:
        """Looks only for gradients that were removed, since a cut may have added some."""
        for parameter, seen, _ in self._seen:
            if seen is not None and parameter.grad is None:
                raise self._error(parameter, seen, None)

    def _error(self, parameter: torch.Tensor, seen: Any, gradient: Any) -> LossError:
        named = self._model.named_parameters() if isinstance(self._model, torch.nn.Module) else ()
        name = next((name for name, one in named if one is parameter), f"a parameter of shape {tuple(parameter.shape)}")
        if gradient is None or (seen is not None and not bool(local_of(gradient).any())):
            return LossError(
                f"the loss cleared gradients: {name} lost the gradient of earlier micro-batches. Expected a loss "
                "that leaves .grad alone; remove zero_grad() from it, since gradients are zeroed once per logical "
                "batch"
            )
        if not self._is_alone:
            return LossError(
                f"{name} got a gradient while the loss ran: it called backward() itself, or the loss on another "
                "device uses this model instead of its own copy. Expected a loss that is returned and uses the "
                "model passed to it"
            )
        return LossError(
            f"the loss called backward() itself: {name} got a gradient in it. Expected a loss that is returned, or "
            "yielded, and differentiated by anybatch; remove backward() from it, and return the sum of several "
            "losses, a dict of them, or yield one after the other. A network that the loss trains, such as a "
            "discriminator, needs a step of its own before this one: anybatch.TrainStep(net, its_loss, "
            "its_optimizer)"
        )


class Accumulation:
    """One pass over the micro-batches of a logical batch, which fills ``.grad``.

    Args:
        parameters: their ``.grad`` is filled; it is empty at the start.
        rows: the samples in each micro-batch, ``None`` for a batch that can't be split.
        places: the position of each micro-batch, for a loss function in pieces.
        on_loss: is given each loss of the first micro-batch, after its name; then one whose last operation is another,
            with the number of its micro-batch.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: LossFunction,
        weights: Weights,
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        *,
        rows: Sequence[int | None],
        outside: OutsideLeaves | None = None,
        differentiate: bool = True,
        places: Sequence[Place] | None = None,
        modules: Sequence[torch.nn.Module] = (),
        on_loss: Callable[..., None] | None = None,
    ) -> None:
        self._model, self._loss_fn, self._modules = model, loss_fn, modules
        self._on_loss = on_loss
        self._kind: type | None = None  # of the last operation of the first loss
        self._weights, self._parameters, self._settings = weights, parameters, settings
        self._in_pieces = isinstance(loss_fn, InPieces)
        self._places = places if places is not None or not self._in_pieces else [Place(0, n or 1, n or 1) for n in rows]
        # A cut with weighting= divides by the scale first.
        scale = None
        if differentiate and settings.scaler is not None:
            scale = settings.scaler.scale(torch.ones((), device=settings.device))
        self._restriction = Restriction(settings.inputs, outside, len(weights.parts), scale)
        self._losses = Differentiation(
            weights, rows, parameters, settings, outside=outside, differentiate=differentiate,
            in_pieces=self._in_pieces,
        )  # fmt: skip
        self._differentiate = differentiate
        # A bf16 or fp16 sum loses small addends; their number decides whether gradients are summed in float32.
        addends = _MANY if self._in_pieces else len(weights.parts)
        self._beside = settings.gradient_sums(parameters, addends) if differentiate and addends > 1 else None
        self._is_alone = False
        self._in_lockstep = settings.reducer.keeps_step
        self._power_iterations: PowerIterations | None = None

    @property
    def weight_tensors(self) -> list[torch.Tensor]:
        """The cached weights of the last losses, which stay alive for the next micro-batch."""
        return [*self._losses.weight_tensors.values()]

    def run(self, micro_batches: Iterable[Any]) -> Sums:
        """Runs all micro-batches; gradients are in ``.grad``, scaled if there is a scaler."""
        self.collect(micro_batches)
        return self.close()

    def collect(self, micro_batches: Iterable[Any], numbers: Iterator[int] | None = None) -> None:
        """Runs micro-batches; ``numbers`` gives their indices if other devices run the rest."""
        is_alone, numbers = numbers is None, itertools.count() if numbers is None else numbers
        self._is_alone = is_alone
        watch = GradientWatch(self._model, self._parameters, is_alone=is_alone) if self._differentiate else None
        if len(self._weights.parts) > 1:
            modules = self._modules or modules_of(*modules_behind(self._model, self._loss_fn))
            self._power_iterations = power_iterations(modules)
        token = accumulation.set(self._restriction)
        try:
            for batch in micro_batches:
                self._run_one(next(numbers), batch, watch)
                del batch  # frees it before the next one is made
        except (TypeError, AttributeError) as error:
            note_the_arguments(error, self._loss_fn, self._model)
            raise
        except RuntimeError as error:
            self._refuse_parameters_on_meta(error)
            raise
        finally:
            accumulation.reset(token)

    def _refuse_parameters_on_meta(self, error: RuntimeError) -> None:
        for module in modules_behind(self._model, self._loss_fn) if re.search(r"\bmeta\b", str(error)) else ():
            names = [name for name, parameter in module.named_parameters() if parameter.is_meta]
            if names:
                raise LossError(
                    f"{', '.join(names[:3])} of {type(module).__name__}, {len(names)} parameters in all, are on "
                    f"the meta device, where tensors hold no data: {error}. Call to_empty(device=...) of their "
                    "modules, and load or initialize the weights"
                ) from error

    def absorb_(self, other: "Accumulation", pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Moves the sums and gradients of another copy of the model here."""
        factor = self._losses.absorb(other._losses)
        for parameter, copy in pairs:
            if self._beside is not None and other._beside is not None:
                self._beside.absorb_(parameter, other._beside, copy, factor)
            gradient, copy.grad = copy.grad, None
            if gradient is not None:
                moved = gradient.to(parameter.device, non_blocking=is_accelerator(parameter.device))
                add_gradient_(parameter, moved if factor == 1 else moved * factor)

    def close(self) -> Sums:
        """Finishes the gradients, after all micro-batches; returns the sums."""
        sums = self._losses.sums
        scale = sums.closing_scale = self._losses.closing_scale() if sums.counts else None
        if self._settings.reducer.is_sharded:  # gradients of other processes are not included yet
            scale = None
        if scale is not None:
            self._losses.scale_gradients_(scale)
        if self._beside is not None:
            sums.accumulator_bytes = self._beside.bytes
            self._beside.give_(scale)
        return sums

    def _take_(self) -> None:
        if self._beside is not None and not self._beside.take_() and self._is_alone:
            self._beside = None

    def _counts_nothing(self, index: int) -> bool:
        """Whether a micro-batch is run only because other processes communicate in theirs."""
        reducer, parts = self._settings.reducer, self._weights.parts
        reducer.counts_nothing = index >= len(parts) or not any(parts[index].values())
        return reducer.counts_nothing

    def _run_for_others(self, index: int, batch: Any) -> None:
        """Runs a forward and a backward with weight 0, and keeps only the metrics."""
        losses = self._losses
        with self._settings.context():
            result = self._loss_fn(self._model, batch)
        evaluation = Evaluation(result, self._settings.context, unless_nothing)
        del result
        for _, loss in evaluation:
            losses.add_nothing(loss)
            del loss
            if evaluation.is_generator:
                losses.differentiate_waiting()
        losses.differentiate_waiting()
        if index < len(self._weights):
            losses.keep_metrics(index, evaluation.metrics)

    def _run_one(self, index: int, batch: Any, watch: GradientWatch | None) -> None:
        if self._power_iterations is not None:  # each micro-batch uses the same weights
            self._power_iterations.again_()
        if self._in_pieces:
            self._run_pieces(index, batch, watch)
            return
        if self._in_lockstep and self._counts_nothing(index):
            self._run_for_others(index, batch)
            return
        losses = self._losses
        if self._settings.autocast is None:
            result = self._loss_fn(self._model, batch)
        else:
            with self._settings.context():
                result = self._loss_fn(self._model, batch)
        del batch  # the peak is in the backward, which needs only what the graph has saved of it
        if type(result) is torch.Tensor:  # the usual case, without an Evaluation
            if watch is not None and watch.is_on:
                watch.check()
            if result.dim() or not result.is_floating_point():
                result = checked_loss(result, "")
            if self._on_loss is not None:
                if self._kind is None:
                    self._kind = type(result.grad_fn)
                    if index == 0:
                        self._on_loss(SINGLE, result)
                elif type(result.grad_fn) is not self._kind:  # as where a branch goes the other way
                    self._on_loss(SINGLE, result, index)
            losses.add(index, SINGLE, result)
            del result
            losses.differentiate_waiting()
            losses.keep_metrics(index, {})
        else:
            losses.keep_metrics(index, self._run_result(index, result, watch))
            del result
        if self._beside is not None:
            self._take_()
        if watch is not None and index == 0 and len(self._weights.parts) > 1:
            watch.note()  # checked once more, in the second micro-batch, and then no longer

    def _run_result(
        self, index: int, result: Any, watch: GradientWatch | None, share: Callable[[str], float] | None = None
    ) -> Mapping[str, Any]:
        """Adds several losses, a ``Mean``, or those of a generator; returns the metrics.

        A plain loss is the mean over a share of the micro-batch, by its name; ``None`` for all of it.
        """
        losses = self._losses
        evaluation = Evaluation(result, self._settings.context, functools.partial(self._checked, index))
        del result
        seen = 0
        for seen, (name, loss) in enumerate(evaluation, start=1):
            if watch is not None:
                watch.check() if seen == 1 else watch.check_kept()
            if index == 0 and self._on_loss is not None:
                self._on_loss(name, loss)
            losses.add(index, name, loss, 1.0 if share is None or isinstance(loss, Mean) else share(name))
            del loss
            losses.check_alone(name, seen)
            if evaluation.is_generator:
                losses.differentiate_waiting(name, is_first=seen == 1)
                if watch is not None:
                    watch.note()
        if watch is not None and evaluation.is_generator:
            watch.check_kept()
            watch.release()
        if not seen:
            declare_nothing_to_do()
        losses.differentiate_waiting()
        return evaluation.metrics

    def _checked(self, index: int, loss: Any, name: str) -> Any:
        """Checks a loss; where the count is 0 it may also be ``None``, a number or empty, and becomes 0."""
        if type(loss) is torch.Tensor or not is_nothing(loss):
            return checked_loss(loss, name)
        weights = self._weights
        names = [name or SINGLE] if not isinstance(loss, Mapping) else list(weights.totals)
        if isinstance(loss, Mean) or any(weights.part(each, index) for each in names):
            return checked_loss(loss, name)
        return torch.zeros((), device="cpu")

    def _run_pieces(self, index: int, batch: Any, watch: GradientWatch | None) -> None:
        loss_fn: Any = self._loss_fn
        place = (self._places or ())[index]
        metrics: list[Mapping[str, Any]] = []
        chunks = 0
        with contextlib.closing(_under(self._settings, loss_fn.pieces(self._model, batch, place))) as pieces:
            for piece in pieces:
                for tensor, gradient in piece.roots if self._differentiate else ():
                    self._losses.wait_for(tensor, gradient)
                if piece.result is None:
                    self._losses.differentiate_waiting()
                else:
                    chunks += 1
                    self._run_result(index, piece.result, watch, piece.share)
                metrics.append(piece.metrics or {})
                del piece
                self._take_()
                if watch is not None and index == 0 and chunks == 1:
                    watch.note()  # checked once more, in the second chunk, and then no longer
        self._losses.keep_metrics(index, added_metrics(metrics))


_MANY = 2**31  # the number of gradients that are added, where it is not known in advance


def _under(settings: Settings, pieces: Generator[Piece, None, None]) -> Generator[Piece, None, None]:
    """Runs the generator of pieces under autocast, but not the code between them."""
    with contextlib.closing(pieces):
        while True:
            with settings.context():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece
            del piece


def count_in_forward(
    model: Any, loss_fn: LossFunction, micro_batches: Iterable[Any], settings: Settings, parts: Weights
) -> Weights:
    """Counts the items of ``Mean`` s in a forward pass without gradients.

    The caller restores random state and buffers afterwards.
    """
    raw: list[Any] = []
    places: list[tuple[int, str]] = []
    rows: list[dict[str, float]] = [dict(part) for part in parts.parts]
    with torch.no_grad():
        numbers = itertools.count()  # enumerate would keep a batch while the next one is made
        for batch in micro_batches:
            index = next(numbers)
            for name, loss in _losses_of(model, loss_fn, batch, settings):
                if isinstance(loss, Mean):
                    raw.append(loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count)
                    places.append((index, name))
            del batch
    for (index, name), number in zip(places, fetched(raw), strict=True):
        rows[index][name] = rows[index].get(name, 0) + number
    names = {name for row in rows for name in row}
    return Weights([{name: row.get(name, 0) for name in names} for row in rows])


def _losses_of(model: Any, loss_fn: LossFunction, batch: Any, settings: Settings) -> Iterator[tuple[str, Any]]:
    if isinstance(loss_fn, InPieces):
        place = Place(0, 0, 0, differentiate=False, length=settings.chunk_length)
        for piece in _under(settings, loss_fn.pieces(model, batch, place)):
            if piece.result is not None:
                yield from Evaluation(piece.result, contextlib.nullcontext, unless_nothing)
        return
    with settings.context():
        result = loss_fn(model, batch)
    yield from Evaluation(result, settings.context, unless_nothing)
