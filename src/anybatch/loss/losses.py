"""Reads what a loss function returned as named losses and metrics.

A loss function ``loss_fn(model, batch)`` returns one of

- the mean over ``count(batch)`` items, a 0-dim tensor;
- a ``Mean(total, count)``, whose own count takes precedence;
- a mapping of names to either;
- a generator that yields losses or ``(name, loss)`` one by one, and may return metrics;
- any of the first three in a pair ``(loss, metrics)``.

One in pieces, such as ``OverTime``, also gives its losses piece by piece, each differentiated before the next.
"""

import inspect
import traceback
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from anybatch.batch.counting import count_samples
from anybatch.errors import LossError
from anybatch.loss.weights import Count
from anybatch.records.means import Mean

if TYPE_CHECKING:
    from anybatch.loss.coupling import Coupled
    from anybatch.loss.sequence import OverTime

LossFunction = Callable[[Any, Any], Any]

SINGLE = "loss"
_SUMMANDS = 64  # operations that are looked at for a sum
_OF_SUMS = ("AddBackward", "SubBackward", "SumBackward", "StackBackward", "CatBackward", "UnsqueezeBackward",
            "MulBackward", "DivBackward")  # fmt: skip
_WITHOUT_ITEMS = ". Where a micro-batch has no items, count= says so with 0: then None, 0.0 and {} are fine"


def as_coupled(loss_fn: Any) -> "Coupled | None":
    """The loss function if it is a ``Coupled``, else ``None``; does not import its module."""
    return cast("Coupled", loss_fn) if getattr(type(loss_fn), "is_coupled", False) else None


def as_over_time(loss_fn: Any) -> "OverTime | None":
    """The loss function if it is an ``OverTime``, else ``None``; does not import its modules."""
    return cast("OverTime", loss_fn) if getattr(type(loss_fn), "is_over_time", False) else None


@dataclass(frozen=True)
class Place:
    """The position of a micro-batch in its batch, and options of the pass."""

    start: int  # its first row in the batch
    rows: int  # of the micro-batch
    rows_of_batch: int
    count: Count = count_samples
    differentiate: bool = True  # whether gradients are computed, or only the values
    length: int | None = None  # of a chunk of time, if a plan has chosen one


class Piece(NamedTuple):
    """A part of the losses of a micro-batch."""

    result: Any  # a loss, a ``Mean``, a mapping of names to either, or ``None``
    share: Callable[[str], float]  # the fraction of the micro-batch that a plain loss is the mean over, by name
    # tensors with given gradients, differentiated in the same backward as the losses
    roots: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    metrics: Mapping[str, Any] | None = None  # ``Mean`` s by name, summed over the pieces


def whole(_: str) -> float:
    """The share of a loss over a whole micro-batch: 1."""
    return 1.0


class InPieces(ABC):
    """A loss function that can also yield its losses in pieces."""

    @abstractmethod
    def __call__(self, model: Any, batch: Any) -> Any:
        """Returns the losses at once, as any loss function does."""

    @abstractmethod
    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Yields the pieces; each is differentiated before the next is requested."""


class Evaluation:
    """The result of one call of the loss function on one micro-batch.

    Iterating yields ``(name, loss)`` pairs, each loss a 0-dim tensor or a ``Mean``; a generator resumes only when the
    next pair is requested. ``metrics`` is complete after the iteration, ``is_generator`` from the start.

    Args:
        context: makes the context, such as autocast, in which a generator runs.
        check: a function of a loss and its name, empty for a single loss, that returns the loss.
    """

    def __init__(
        self,
        result: Any,
        context: Callable[[], AbstractContextManager[Any]],
        check: Callable[[Any, str], Any] | None = None,
    ) -> None:
        self._context = context
        self._check = checked_loss if check is None else check
        self.metrics: Mapping[str, Any] = {}
        self._result = result
        self.is_generator = isinstance(result, types.GeneratorType)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | Mean]]:
        result, self._result = self._result, None
        if self.is_generator:
            yield from self._from_generator(result)
            return
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, self.metrics = result
        if isinstance(result, Mapping):
            if not result:
                self._check(result, "")
            _refuse_outputs(result)
            _refuse_totals(result)
            for name, loss in result.items():
                yield str(name), self._check(loss, str(name))
            return
        yield SINGLE, self._check(result, "")

    def _from_generator(self, generator: Any) -> Iterator[tuple[str, torch.Tensor | Mean]]:
        names: set[str] = set()
        try:
            while True:
                with self._context():
                    try:
                        item = next(generator)
                    except StopIteration as stop:
                        if not isinstance(stop.value, (Mapping, type(None))):
                            raise LossError(
                                f"the loss generator returned a {type(stop.value).__name__}; expected nothing or a "
                                "mapping of metrics. Losses are yielded, not returned"
                            ) from None
                        self.metrics = stop.value or {}
                        break
                is_named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
                name, loss = item if is_named else (f"{SINGLE}_{len(names)}", item)
                if name in names:
                    raise LossError(
                        f"the loss {name!r} was yielded twice; give each loss of a step its own name", name=name
                    )
                names.add(name)
                del item
                yield name, self._check(loss, name)
                del loss
        finally:
            generator.close()
        if not names:
            raise LossError("the loss function is a generator that yielded nothing; expected at least one loss")


def _refuse_outputs(result: Mapping[Any, Any]) -> None:
    """Refuses the whole output of a model that has its loss as one of several entries."""
    loss = result.get("loss")
    others = {
        name: value for name, value in result.items() if isinstance(value, (torch.Tensor, tuple)) and name != "loss"
    }
    wrong = {name: value for name, value in others.items() if not _is_one(value)}
    if not wrong or not _is_one(loss):
        return
    name, value = next(iter(wrong.items()))
    shown = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    wanted = "its .loss: return output.loss" if hasattr(result, "loss") else 'its loss: return output["loss"]'
    raise LossError(
        f"the loss function returned a {type(result).__name__} with {name!r}, {shown}, besides its loss; expected "
        f"{wanted}",
        name=str(name),
    )


def _refuse_totals(result: Mapping[Any, Any]) -> None:
    """Refuses a loss that is the sum of all others beside these: each would count twice.

    Whether it is one stands in its graph, whatever its name is.
    """
    nodes = {name: _node(loss) for name, loss in result.items() if _is_one(loss)}
    if len(nodes) < 2 or len(nodes) < len(result):
        return
    for name, node in nodes.items():
        wanted = [other for key, other in nodes.items() if key != name and other is not None]
        if wanted and node is not None and set(wanted) <= _summed(node):
            raise LossError(
                f"the loss function returned {str(name)!r} together with the losses it is made of, which would "
                f"count twice; expected either: return the parts alone, or return result[{name!r}], {{'part': "
                "anybatch.Mean(part.detach(), 1), ...}",
                name=str(name),
            )


def _is_one(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape in ((), (1,))


def _node(loss: torch.Tensor) -> Any:
    """The operation behind a loss, before it was given a dimension."""
    node = loss.grad_fn
    is_view = loss.dim() and node is not None and node.name().startswith(("View", "Unsqueeze"))
    return node.next_functions[0][0] if is_view and node is not None else node


def _summed(node: Any) -> set[Any]:
    """The operations whose results a weighted sum is made of, itself included."""
    reached, edge = {node}, [node]
    while edge and len(reached) < _SUMMANDS:
        inner = []
        for own in edge:
            found = [one for one, _ in own.next_functions if one is not None]
            is_product = type(own).__name__.startswith(("Mul", "Div")) and len(found) > 1
            inner += found if type(own).__name__.startswith(_OF_SUMS) and not is_product else []
        edge = [one for one in dict.fromkeys(inner) if one not in reached]
        reached.update(edge)
    return reached


def is_nothing(loss: Any) -> bool:
    """Whether a result has no loss: ``None``, a plain number, an empty mapping, or a ``Mean`` of numbers over 0."""
    if isinstance(loss, Mean):
        is_zero = isinstance(loss.count, (int, float)) and loss.count == 0
        return is_zero and isinstance(loss.total, (int, float))
    return loss is None or isinstance(loss, (int, float)) or (isinstance(loss, Mapping) and not loss)


def unless_nothing(loss: Any, name: str) -> Any:
    """The loss, checked unless ``is_nothing``; whether nothing is allowed depends on the counts."""
    return loss if is_nothing(loss) and not isinstance(loss, Mean) else checked_loss(loss, name)


def checked_loss(loss: Any, name: str) -> Any:
    """Returns a 0-dim floating-point tensor or a ``Mean`` of one, and refuses all else."""
    which = f"loss {name!r}" if name else "loss"
    if isinstance(loss, Mapping) and not loss:
        raise LossError(f"the loss function returned an empty mapping; expected at least one loss{_WITHOUT_ITEMS}")
    if isinstance(loss, Mean):
        if is_nothing(loss):
            return Mean(torch.zeros((), device="cpu"), loss.count)
        if not isinstance(loss.total, torch.Tensor):
            raise LossError(
                f"the total of the {which} is a {type(loss.total).__name__}; expected a tensor that depends on the "
                "model",
                name=name,
            )
        _check_scalar(loss.total, f"total of the {which}", name, "sum it: Mean(total.sum(), count)")
        return loss
    if not isinstance(loss, torch.Tensor):
        hint = " (was .item() called?)" if isinstance(loss, (int, float)) else ""
        way = _WITHOUT_ITEMS if is_nothing(loss) else ""
        if isinstance(loss, tuple) and loss and isinstance(loss[0], torch.Tensor) and not loss[0].dim():
            way = ". If its first item is the loss, return result[0]"
        elif isinstance(getattr(loss, "loss", None), torch.Tensor):
            way = ". It has one: return output.loss"
        raise LossError(
            f"the {which} is a {type(loss).__name__}{hint}; expected a scalar tensor, a Mean, a mapping of names to "
            f"either, or a generator that yields them{way}",
            name=name,
        )
    loss = loss.reshape(()) if loss.shape == (1,) else loss  # which torch's own backward takes, too
    _check_scalar(loss, which, name, "reduce it to the mean over the items: .mean()")
    return loss


def _check_scalar(loss: torch.Tensor, which: str, name: str, remedy: str) -> None:
    if loss.dim() != 0:
        raise LossError(
            f"the {which} has shape {tuple(loss.shape)}; expected a tensor without dimensions: {remedy}", name=name
        )
    if not loss.is_floating_point():
        raise LossError(f"the {which} has dtype {loss.dtype}; expected a floating-point tensor", name=name)


def check_callable(owner: str, name: str, function: Any, *arguments: str) -> None:
    """Refuses a function that can't be called with some arguments, before anything is computed."""
    call = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise LossError(f"{owner}({name}=) is a {type(function).__name__}; expected a function {call}")
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        inspect.signature(target).bind(*arguments)
    except TypeError as error:
        raise LossError(f"{owner}({name}=) can't be called as {call}: {error}") from None
    except ValueError:
        return  # a builtin without a signature


def check_loss_fn(loss_fn: Any) -> None:
    """Refuses what can't be a loss function, before anything is computed."""
    if isinstance(loss_fn, types.FunctionType) and loss_fn in _found_fine:
        return
    _refuse_criterion(loss_fn)
    if not callable(loss_fn):
        raise LossError(f"loss_fn is a {type(loss_fn).__name__}; expected a function loss_fn(model, batch)")
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        raise LossError(
            f"loss_fn can't be called as loss_fn(model, batch): {error}; expected a function of the model and the batch"
        ) from None
    except ValueError:
        return  # a builtin without a signature
    if isinstance(loss_fn, types.FunctionType):
        _found_fine.add(loss_fn)


def _refuse_criterion(loss_fn: Any) -> None:
    """Refuses torch's own losses, which take an output and a target, not a model and a batch."""
    forward = type(loss_fn).forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    if getattr(forward, "__module__", "") in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = type(loss_fn).__name__ if isinstance(loss_fn, torch.nn.Module) else loss_fn.__name__
        raise LossError(
            f"loss_fn is torch's {name}, which takes an output and a target; expected a function of the model and the "
            "batch that calls it: def loss_fn(model, batch): return criterion(model(batch['x']), batch['y'])"
        )


def note_the_arguments(error: Exception, loss_fn: Any, model: Any) -> None:
    """Adds a note to the error of a loss function that used the model as an output."""
    called = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if type(model).__name__ not in str(error) or torch.nn.Module._call_impl.__name__ in called:
        return
    written = (loss_fn, *getattr(loss_fn, "user_functions", ()))[-1]  # by the user, behind what stands for it
    names = [*inspect.signature(written).parameters]
    if len(names) > 1 and not any(word in names[0] for word in ("model", "net", "module")):
        error.add_note(
            f"loss_fn is called as loss_fn(model, batch): its {names[0]!r} is the model, its {names[1]!r} the batch. A "
            "loss of an output and a target is called within it: lambda model, batch: loss(model(batch[0]), batch[1])"
        )


_found_fine: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()
