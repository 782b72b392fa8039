"""Loss functions that yield the losses of a micro-batch in pieces, each differentiated before the next."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anybatch.batch.counting import count_samples
from anybatch.errors import LossError
from anybatch.loss.sums import checked_metrics
from anybatch.loss.weights import Count
from anybatch.records.means import Mean


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


def added_metrics(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums the metrics of the pieces of a micro-batch."""
    added: dict[str, Any] = {}
    for metrics in found:
        for name, value in checked_metrics(metrics, None, None).items():
            if not isinstance(value, Mean):
                raise LossError(
                    f"the metric {name!r} of a piece is a {type(value).__name__}; expected a Mean, which can be added "
                    "up",
                    name=name,
                )
            added[name] = added[name] + value if name in added else value
    return added


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
