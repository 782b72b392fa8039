"""Loss functions that say when a micro-batch begins, each still of its own kind."""

import functools
from collections.abc import Callable, Generator
from typing import Any

from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import LossFunction
from anybatch.loss.pieces import InPieces, Piece, Place


def announced(
    loss_fn: LossFunction, begin: Callable[[], None], begin_whole: Callable[[], None], *, in_pieces: bool
) -> LossFunction:
    """A loss function of the same kind that says when it begins.

    Args:
        begin: is called before each micro-batch.
        begin_whole: is called before what sees all micro-batches.
        in_pieces: whether a loss that can come in pieces does.
    """
    if isinstance(loss_fn, Coupled):
        return _coupled(loss_fn, begin, begin_whole)
    if isinstance(loss_fn, InPieces) and in_pieces:
        return _InPieces(loss_fn, begin)

    def evaluate(model: Any, batch: Any) -> Any:
        begin()
        return loss_fn(model, batch)

    return in_place_of(loss_fn, evaluate)


def in_place_of(loss_fn: LossFunction, evaluate: Any) -> LossFunction:
    """Lets the modules of a loss be found behind a function that calls it."""
    evaluate.user_functions = (loss_fn, *getattr(loss_fn, "user_functions", ()))
    function: LossFunction = evaluate
    return function


def _coupled(coupled: Coupled, begin: Callable[[], None], begin_whole: Callable[[], None]) -> Coupled:
    def encode(model: Any, batch: Any) -> Any:
        begin()
        return coupled.encode(model, batch)

    @functools.wraps(coupled.loss)  # whose arguments it is asked for
    def loss(*arguments: Any) -> Any:
        begin_whole()
        return coupled.loss(*arguments)

    return Coupled(encode, loss, row_block=coupled.row_block)


class _InPieces(InPieces):
    def __init__(self, loss_fn: InPieces, begin: Callable[[], None]) -> None:
        self._loss_fn = loss_fn
        self._begin = begin

    @property
    def user_functions(self) -> tuple[Any, ...]:
        return getattr(self._loss_fn, "user_functions", ())

    def __call__(self, model: Any, batch: Any) -> Any:
        self._begin()
        return self._loss_fn(model, batch)

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        self._begin()
        yield from self._loss_fn.pieces(model, batch, place)
