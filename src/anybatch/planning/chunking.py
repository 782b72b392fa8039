"""A loss over time as a plan looks at it: in chunks of one length, and of many alike only a few."""

import copy
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from anybatch.gradient.pieces import InPieces, Piece, Place
from anybatch.gradient.sequence import OverTime
from anybatch.gradient.timesteps import Steps
from anybatch.tensors.trees import leaves

FEW = 3
"""Chunks that are looked at: the last one, which may be shorter, the one before it, and one that runs after these."""


class InChunks(InPieces):
    """A loss over time in chunks of a length, which leaves the user's own object as it is.

    Of more chunks than a few, those in the middle are left out. The states that they would begin with are stood in for
    by a tensor of as many bytes, so that the peak is the same.

    Args:
        over_time: the user's.
        length: steps in a chunk.
        state_bytes: that a chunk which is left out would hold for each sample, and whatever their number.
        most: chunks that are run; ``None`` for all.
    """

    def __init__(
        self, over_time: OverTime, length: int, state_bytes: tuple[int, int] = (0, 0), most: int | None = FEW
    ) -> None:
        own = copy.copy(over_time)
        own.carried, own.carry, own.known_dims = None, False, {}
        own.has_run_again = True  # whether a chunk gives the same again is looked at with numbers
        self._carries = over_time.carry
        self._own = own
        self._length = length
        self._state_bytes = state_bytes
        self._most = None if over_time.prepare is not None else most
        if over_time.mode == "truncated":
            self._length = own.chunk or length

    @property
    def user_functions(self) -> tuple[Any, ...]:
        """What may be modules, or methods of modules."""
        return self._own.user_functions

    def __call__(self, model: Any, batch: Any) -> Any:
        """Gives the losses at once."""
        return self._own(model, batch)

    def shown(self, total: int) -> tuple[int, int]:
        """How many steps are run of so many, and how many chunks are left out.

        Args:
            total: steps of a sequence.
        """
        chunks = -(-total // self._length)
        if self._most is None or chunks <= self._most:
            return total, 0
        left_out = chunks - self._most
        return total - left_out * self._length, left_out

    def pieces(self, model: Any, batch: Any, place: Place) -> Generator[Piece, None, None]:
        """Gives the losses of the chunks that are looked at."""
        steps = Steps(batch, self._own.dim, self._own.broadcast)
        shown, left_out = (steps.total, 0) if steps.is_packed else self.shown(steps.total)
        if self._own.mode == "truncated":
            left_out = 0  # no state is kept there
        waiting = left_out + self._carries
        size, fixed = self._state_bytes
        room = torch.empty(waiting * (size * place.rows + fixed), dtype=torch.uint8, device=_device_of(batch))
        given = batch if shown == steps.total else steps.cut(shown).batches[0]
        yield from self._own.pieces(model, given, replace(place, length=self._length))
        del room


def _device_of(batch: Any) -> torch.device:
    tensors = (leaf for _, _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def steps_of(over_time: OverTime, batch: Any) -> Steps:
    """The steps of a batch.

    Args:
        over_time: knows where they are.
        batch: of sequences.
    """
    return Steps(batch, over_time.dim, over_time.broadcast)
