"""Whether the rows that are evaluated are rows that were trained on."""

import ctypes
from dataclasses import dataclass, field

import torch

from anybatch.tensors.dispatch import unseen
from anybatch.userlines import user_place

_MOST_TRAINED = 1 << 14  # rows of a net: of larger data nothing is said
_MOST_CALLS = 1024  # of a net in training
_MOST_EVALUATED = 16  # rows of each call
_LEAST_NUMBERS = 2  # of a row: one alone is there twice by chance
_COMPARED, _FEWEST_COMPARED, _MOST_COMPARED = 256, 16, 1 << 16  # numbers of a row, at least, and of a batch
_OFTEN = 0.01  # of the rows of a batch that are there twice, as where rows are drawn from few


@dataclass(slots=True)
class _Net:
    trained: set[int] = field(default_factory=set)  # hashes of its rows
    calls: int = 0  # in which no epoch was over
    again: bool = False  # whether all rows of a batch were there before: an epoch is over
    is_clear: bool = True  # whether rows can be told apart, and all were kept


@dataclass(slots=True)
class Rows:
    """The rows that nets were trained on, and how many of those that were evaluated later are among them."""

    known: set[int] = field(default_factory=set)  # evaluated and trained on
    new: int = 0  # evaluated, and not trained on so far
    file: str = ""  # of the last evaluation
    line: int = 0
    calls: int = 0  # of evaluations
    _nets: dict[int, _Net] = field(default_factory=dict)  # by root

    def train(self, root: int, first: torch.Tensor) -> bool:
        """Is shown what a net is given in training; returns whether it may be given other rows later."""
        net = self._nets.setdefault(root, _Net())
        before, rows = len(net.trained), _hashes(first, len(first)) if len(first) <= _MOST_TRAINED else None
        net.calls += 1
        net.is_clear &= rows is not None and len({*rows}) >= (1 - _OFTEN) * len(rows) and before <= _MOST_TRAINED
        net.trained.update(rows if rows is not None and net.is_clear else ())
        net.again = len(net.trained) == before
        net.is_clear &= not net.again or net.calls > 2  # where all batches are one, a mask may tell its rows apart
        return net.is_clear and not net.again and net.calls < _MOST_CALLS

    def evaluate(self, root: int, first: torch.Tensor) -> bool:
        """Is shown what a net is given in an evaluation; returns whether all of it was trained on so far."""
        self.calls += 1
        net = self._nets.get(root)
        if net is None or not (net.again and net.is_clear) or self.new:
            return self.new == 0 and self.calls < _MOST_CALLS
        rows = {*(_hashes(first, _MOST_EVALUATED) or [0])}  # what can't be told apart counts as new
        self.new += len(rows - net.trained)
        if rows & net.trained - self.known:
            self.known |= rows & net.trained
            self.file, self.line = user_place()
        return self.new == 0 and self.calls < _MOST_CALLS


@unseen
def _hashes(first: torch.Tensor, most: int) -> list[int] | None:
    """The hashes of rows, evenly spread over a batch; ``None`` where they can't be told apart."""
    if first.dim() < 2 or not first.is_cpu or first.numel() < _LEAST_NUMBERS * max(1, len(first)):
        return None
    rows = first.detach()[:: max(1, len(first) // most)]
    if not rows[0].is_contiguous():  # it would have to be copied as a whole
        return None
    rows = rows.flatten(1)
    columns = min(_COMPARED, max(_FEWEST_COMPARED, _MOST_COMPARED // len(rows)))
    rows = rows[:, :: max(1, rows.shape[1] // columns)].contiguous()
    width = rows.nbytes // len(rows)
    data = ctypes.string_at(rows.data_ptr(), rows.nbytes)
    return [hash(data[at : at + width]) for at in range(0, len(data), width)]
