"""Whether the rows that are evaluated are rows that were trained on."""

import ctypes
from dataclasses import dataclass, field

import torch

from anybatch.doctor.recording.naming import user_place
from anybatch.tensors.dispatch import unseen

_MOST_TRAINED = 1 << 14  # rows of a net: of larger data nothing is said
_MOST_CALLS = 1024  # of a net in training
_MOST_EVALUATED = 16  # rows of each call
_LEAST_NUMBERS = 2  # of a row: one alone is there twice by chance
_COMPARED = 256  # numbers of a row
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
        return net.is_clear and not net.again and net.calls < _MOST_CALLS

    def evaluate(self, root: int, first: torch.Tensor) -> bool:
        """Is shown what a net is given in an evaluation; returns whether all of it was trained on so far."""
        self.calls += 1
        net = self._nets.get(root)
        trained = [net] if net is not None else [*self._nets.values()]  # a copy, of whichever net it is
        trained = [one for one in trained if one.again and one.is_clear]
        for row in (_hashes(first, _MOST_EVALUATED) or ()) if trained and self.new == 0 else ():
            if not any(row in one.trained for one in trained):
                self.new += 1
            elif row not in self.known:
                self.known.add(row)
                self.file, self.line = user_place()
        return self.new == 0 and self.calls < _MOST_CALLS


@unseen
def _hashes(first: torch.Tensor, most: int) -> list[int] | None:
    """The hashes of rows, evenly spread over a batch; ``None`` where they can't be told apart."""
    if first.dim() < 2 or not first.is_cpu or first.numel() < _LEAST_NUMBERS * max(1, len(first)):
        return None
    rows = first.detach()[:: max(1, len(first) // most)].flatten(1)
    rows = rows[:, :: max(1, rows.shape[1] // _COMPARED)].contiguous()
    width = rows.nbytes // len(rows)
    data = ctypes.string_at(rows.data_ptr(), rows.nbytes)
    return [hash(data[at : at + width]) for at in range(0, len(data), width)]
