"""Losses of one micro-batch that come in pieces, each differentiated and freed before the next is made."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anybatch.batch.counting import count_samples
from anybatch.errors import LossError
from anybatch.loss.weights import Count
from anybatch.records.means import Mean


@dataclass(frozen=True)
class Place:
    """What is asked of the pieces of a micro-batch."""

    start: int  # its first row in the batch that it was cut from
    rows: int  # how many it has
    rows_of_batch: int  # how many that batch has
    count: Count = count_samples  # how items are counted
    differentiate: bool = True  # whether gradients are wanted, or only the values
    length: int | None = None  # of a chunk of time, if a plan has chosen one


class Piece(NamedTuple):
    """A part of the losses of a micro-batch.

    Args:
        result: a loss, a ``Mean``, a mapping of names to either, or ``None``.
        share: gives the share of a micro-batch that a plain mean is over, by the name of the loss.
        roots: tensors whose gradients came from elsewhere and go back together with the losses.
        metrics: ``Mean`` s by name, added up over the pieces.
    """

    result: Any
    share: Callable[[str], float]
    roots: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    metrics: Mapping[str, Any] | None = None


def whole(_: str) -> float:
    """The share of a loss over all that a micro-batch has."""
    return 1.0


class InPieces(ABC):
    """A loss function that can also give its losses in pieces."""

    @abstractmethod
    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the losses at once, as any loss function does."""

    @abstractmethod
    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Gives the pieces; each is differentiated before the next is asked for."""


@contextmanager
def in_place_explained(what: str) -> Iterator[None]:
    """Says what was changed in place where autograd only speaks of a leaf."""
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" in str(error):
            raise LossError(
                f"{what} was changed in place (such as relu_ or x += 1), which can't be differentiated where the graph "
                "is cut; use the version that does not write in place, or clone the tensor first"
            ) from error
        raise


def added_metrics(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up the metrics of the pieces of a micro-batch."""
    added: dict[str, Any] = {}
    for metrics in found:
        for name, value in metrics.items():
            if not isinstance(value, Mean):
                raise LossError(
                    f"the metric {name!r} of a piece is a {type(value).__name__}; expected a Mean, which can be added "
                    "up",
                    name=name,
                )
            mean = Mean(
                *(part.detach() if isinstance(part, torch.Tensor) else part for part in (value.total, value.count))
            )
            added[name] = added[name] + mean if name in added else mean
    return added


def check_callable(owner: str, name: str, function: Any, *arguments: str) -> None:
    """Refuses what can't be called with some arguments, before anything is computed."""
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
